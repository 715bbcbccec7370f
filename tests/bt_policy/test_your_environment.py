"""The environment that docs/your-environment.md walks through works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import yaml

from bt_policy.acting import OURS
from common.distributed import World
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from tests.bt_policy.conftest import make_policy

PAGE = Path(__file__).parents[2] / "docs" / "your-environment.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def squares():
    names = {}
    exec(blocks("python")[0], names)
    settings = {k: v for k, v in yaml.safe_load(blocks("yaml")[0]).items() if k not in OURS}
    policy = make_policy()
    return policy, names["Squares"](policy.encoder, seed=0, world=World(), **settings | {"held_out": 8})


def test_the_example_has_fewer_than_a_hundred_lines_and_is_a_task():
    policy, task = squares()
    assert len(blocks("python")[0].splitlines()) < 100
    first, again = task.batch(3, 4), task.batch(3, 4)
    assert torch.equal(first.answers_BA, again.answers_BA)
    assert [f.key for f in first.prompts.frames] == [f.key for f in again.prompts.frames]
    assert task.evaluate(policy)["success"][1] == 8


def test_methods_train_in_the_example():
    optim = Optim(lr=1e-3, rows_per_update=8)
    for trainer in (SFT(optim, targets="reference"), RLVR(optim, Sampling(group=4))):
        policy, task = squares()
        before = policy.state()
        trainer.train(Context(policy, task, World(), steps=2, eval_every=2))
        assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.state().items())
