"""One set of trainers, two worlds: two updates of SFT and of OPD on TinyGPT and on a Qwen3.5 with LoRA inside."""

from __future__ import annotations

import math

import pytest
import torch

from bt_policy import rows as rows_module
from bt_policy.task import RowsTask
from common.distributed import World
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.opd import OPD
from common.trainers.ppo import PPO
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from tests.bt_policy import gpt_world
from tests.bt_policy.conftest import make_policy, make_rows


class Recorder:
    """Keeps what a run logs."""

    def __init__(self):
        self.lines = []

    def log(self, step, values, times=None):
        self.lines.append((step, dict(values)))

    def advance(self, step):
        pass

    def rewind(self, step):
        pass


def vlm_context(tmp_path, **options):
    policy = make_policy()
    rows, _, _ = rows_module.read(make_rows(tmp_path, 16, adv=options.pop("adv", False)), levels=(4, 4, 4))
    task = RowsTask(rows, rows[:6], policy.encoder, seed=0)
    return Context(policy, task, World(), steps=2, eval_every=1, recorder=Recorder(), **options)


def gpt_context(tmp_path, **options):
    return gpt_world.context(Recorder(), **options)


def optim(lr=1e-3):
    return Optim(lr=lr, rows_per_update=8, micro_batch=4)


METHODS = {
    "sft": lambda: SFT(optim(), targets="reference"),
    "opd": lambda: OPD(optim(), Sampling(group=1)),
    "rlvr": lambda: RLVR(optim(), Sampling(group=4)),
}


@pytest.mark.parametrize("world", [vlm_context, gpt_context])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_trainers_make_two_updates_in_both_worlds(tmp_path, world, method):
    context = world(tmp_path)
    subjects = context.task.subjects
    context.teachers = {
        subject: context.policy.frozen("base" if world is vlm_context else "start") for subject in subjects
    }
    before = context.policy.state()
    METHODS[method]().train(context)
    after = context.policy.state()
    steps = [step for step, _ in context.recorder.lines]
    losses = [values["train/loss"] for _, values in context.recorder.lines if "train/loss" in values]
    assert steps == [0, 1, 2]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    moved = sum(not torch.equal(before[name], after[name]) for name in before)
    teacher_is_student = world is gpt_context and method == "opd"
    assert moved > 0 or teacher_is_student or method == "rlvr"


def test_ppo_learns_from_recorded_rows_and_starts_at_ratio_one(tmp_path):
    context = vlm_context(tmp_path, adv=True)
    context.reference = lambda: context.policy.frozen("start")
    from common.kl import KL
    from common.objectives import PolicyGradient

    objective = PolicyGradient(ratio="sequence", aggregate="sequence_mean", kl=KL(beta=0.02, aggregate="sequence_sum"))
    PPO(optim(), Sampling(group=1), epochs=1, objective=objective).train(context)
    first = context.recorder.lines[1][1]
    assert first["train/ratio"] == pytest.approx(1, abs=1e-5)
    assert first["train/kl"] == pytest.approx(0, abs=1e-6)
    assert "train/mismatch/logp_gap" in first
