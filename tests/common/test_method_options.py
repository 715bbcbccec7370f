"""Every wrong word or number of a method's own options is one sentence, and bad rows are refused before an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.advantages import Advantage
from common.distributed import World
from common.errors import UserError
from common.interfaces import Batch, Experience
from common.kl import KL
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.dpo import DPO
from common.trainers.opd import OPD
from common.trainers.ppo import PPO
from common.trainers.rft import RFT
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from tests.common.mini_world import CodeTask, TablePolicy, teacher
from tests.common.trainer_cases import GROUP, METHODS, optim

MAKE: dict[str, Callable[..., Any]] = {
    "optim": lambda **o: optim(**o),
    "sampling": lambda **o: Sampling(**{"group": 4, **o}),
    "ppo": lambda **o: PPO(optim(), GROUP, **o),
    "opd": lambda **o: OPD(optim(), GROUP, **o),
    "rft": lambda **o: RFT(optim(), GROUP, **o),
    "dpo": lambda **o: DPO(optim(), GROUP, **o),
    "sft": lambda **o: SFT(optim(), **o),
}

WRONG = [
    ("optim", "lr", [-1, "x", None, float("nan")]),
    ("optim", "rows_per_update", [0, 2.5, "x", None]),
    ("optim", "optimizer", ["sgd", None]),
    ("optim", "betas", [(0.9,), (0.9, 1.0), "ab", 0.9, None]),
    ("optim", "eps", [-1, "x", None]),
    ("optim", "weight_decay", [-1, "x", None]),
    ("optim", "warmup", [-1, 0.5, "x", None]),
    ("optim", "schedule", ["step", None]),
    ("optim", "clip_norm", [-1, "x"]),
    ("optim", "micro_batch", [0, 1.5, "x"]),
    ("optim", "epochs", [-1, "x"]),
    ("sampling", "group", [0, 1.5, "x", None]),
    ("sampling", "temperature", [0, -1, "x", None, float("nan")]),
    ("sampling", "resample", [-1, 0.5, "x", None]),
    ("ppo", "rows_per_round", [0, 1.5, "x"]),
    ("ppo", "epochs", [0, 1.5, "x", None]),
    ("opd", "teacher", ["all", None]),
    ("opd", "off_policy", [-0.1, 1.1, "x", None, float("nan")]),
    ("opd", "off_policy_source", ["file", None]),
    ("rft", "passing", ["x", None, float("nan")]),
    ("rft", "on_failure", ["skip", None]),
    ("rft", "aggregate", ["mean", None]),
    ("dpo", "passing", ["x", None, float("nan")]),
    ("sft", "targets", ["teachers", None]),
    ("sft", "aggregate", ["mean", None]),
]


@pytest.mark.parametrize(
    ("what", "field", "value"), [(what, field, v) for what, field, values in WRONG for v in values]
)
def test_a_wrong_option_of_a_method_is_refused_with_its_name_and_value(what: str, field: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        MAKE[what](**{field: value})
    assert f"{field}={value}" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_number_and_word_of_the_optimizer_and_of_sampling_is_in_the_list() -> None:
    listed = {(what, field) for what, field, _ in WRONG}
    for what, cls in {"optim": Optim, "sampling": Sampling}.items():
        assert {(what, field) for field in cls.__dataclass_fields__} <= listed


def _context(task: CodeTask) -> Context:
    teachers = {"a": teacher(task), "b": teacher(task)}
    return Context(TablePolicy(), task, World(), steps=2, eval_every=2, teachers=teachers)


class BrokenVerifier(CodeTask):
    """Gives NaN for the second prompt's first answer."""

    def experience(self, policy: TablePolicy, batch: Batch, group: int, **rest: Any) -> Experience:
        rows = super().experience(policy, replace(batch, row_ids=[100 + i for i in range(len(batch))]), group, **rest)
        assert rows.rewards_N is not None
        rows.rewards_N[group] = float("nan")
        return rows


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("sft")])
def test_every_method_that_samples_refuses_a_nan_reward_by_its_row(name: str) -> None:
    with pytest.raises(UserError, match="reward of row 101 is not finite"):
        METHODS[name]().train(_context(BrokenVerifier()))


class Recorded(CodeTask):
    """Recorded rows with given advantages."""

    offline, size = True, 8

    def __init__(self, advantages: torch.Tensor) -> None:
        super().__init__()
        source = CodeTask()
        batch = source.batch(0, 8)
        answers = source.codes[batch.prompts]
        self._batch = replace(
            batch,
            rows=Experience(
                batch.prompts,
                answers,
                torch.ones_like(answers).bool(),
                batch.subjects,
                list(range(8)),
                advantages=advantages,
            ),
        )

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        return self._batch


@pytest.mark.parametrize("shape", [(8,), (8, 3)])
def test_recorded_advantages_that_are_not_finite_are_refused_by_their_row(shape: tuple[int, ...]) -> None:
    advantages = torch.ones(shape)
    advantages[5] = float("inf")
    with pytest.raises(UserError, match="advantage of row 5 is not finite"):
        PPO(optim(), Sampling(1)).train(_context(Recorded(advantages)))


@pytest.mark.parametrize("method", [PPO, RLVR])
def test_a_penalty_in_the_reward_of_rows_that_carry_advantages_is_refused(method: type) -> None:
    objective = PolicyGradient(kl=KL(0.1, "k1", "reward"))
    with pytest.raises(UserError, match="carry advantages"):
        method(optim(), Sampling(1), objective=objective, advantage=Advantage("none")).train(
            _context(Recorded(torch.ones(8)))
        )
