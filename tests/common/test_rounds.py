"""Rounds of a method that samples: each ends with an evaluation and a checkpoint that the next round can start from."""

from __future__ import annotations

from pathlib import Path

import torch

from common.checkpoint import Checkpoints
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.ppo import PPO
from common.trainers.rollout import Sampling
from tests.common.mini_world import ALONE, CodeTask, Recorder, TablePolicy


def ppo() -> PPO:
    optim = Optim(lr=0.1, rows_per_update=16)
    return PPO(optim, Sampling(group=4), rows_per_round=48, epochs=1, objective=PolicyGradient())


def run(directory: Path, rounds: int, *, resume: bool = False, **options: object) -> Context:
    context = Context(
        TablePolicy(), CodeTask(partial=True), ALONE, rounds=rounds, eval_every=None, recorder=Recorder(),
        checkpoints=Checkpoints(directory, ALONE), resume=resume, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    ppo().train(context)
    return context


def test_every_round_is_evaluated_once_and_nothing_in_between(tmp_path: Path) -> None:
    context = run(tmp_path, 3)
    evaluated = [step for step, values in context.recorder.lines if "eval/acc/code" in values]  # type: ignore[attr-defined]
    assert evaluated == [0, 3, 6, 9]


def test_rounds_that_are_continued_give_the_bits_of_rounds_that_were_not_stopped(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    resumed = run(tmp_path / "cut", 4, resume=True)
    assert torch.equal(resumed.policy.state()["table"], whole.policy.state()["table"])
    assert [entry["round"] for entry in resumed.report["rounds"]] == [0, 1, 2, 3]
    assert resumed.report["rounds"] == whole.report["rounds"]
