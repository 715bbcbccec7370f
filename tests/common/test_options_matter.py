"""No objective has an option that changes nothing: each, changed alone, changes the weights that a short run ends with.

The mini world is made unkind for it: answers of different lengths, partial rewards, two different teachers, a sampler
whose log-probs differ from the trainer's, several clipped epochs. Where an option can have no effect, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.advantages import Advantage
from common.distillation import Distillation
from common.distributed import World
from common.errors import UserError
from common.interfaces import Batch, Experience, Sample
from common.kl import KL
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.preference import DPO as Preference
from common.trainers.context import Context
from common.trainers.dpo import DPO
from common.trainers.opd import OPD
from common.trainers.ppo import PPO
from common.trainers.rft import RFT
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from tests.common.mini_world import CodeTask, TablePolicy, teacher
from tests.common.trainer_cases import optim

END = 3


def up_to_end(answers_NA: Tensor) -> Tensor:
    ends = (answers_NA == END).long()
    return ends.cumsum(-1) - ends == 0


class Uneven(CodeTask):
    """Answers stop at token 3, and the sampler's log-probs are off by up to half a nat."""

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        batch = super().batch(step, n, draw)
        return replace(batch, mask_BA=up_to_end(batch.answers_BA))

    def experience(self, policy: TablePolicy, batch: Batch, group: int, **settings: Any) -> Experience:
        rows = super().experience(policy, batch, group, **settings)
        off = torch.rand(rows.answers_NA.shape, generator=torch.Generator().manual_seed(3)) - 0.5
        return replace(rows, mask_NA=up_to_end(rows.answers_NA), rollout_logps=rows.rollout_logps + off)


class Stopping(TablePolicy):
    """A teacher whose own answers stop at token 3 too."""

    def sample(self, *args: Any, **settings: Any) -> Sample:
        sample = super().sample(*args, **settings)
        return replace(sample, mask_NA=up_to_end(sample.answers_NA))


def teachers(task: CodeTask) -> dict[str, TablePolicy]:
    found = {}
    for seed, subject in enumerate("ab"):
        found[subject] = Stopping(seed=10 + seed)
        found[subject].table.data = found[subject].table.data + teacher(task).table.data / 2
        found[subject].table.requires_grad_(False)
    return found


def trained(method: Any, *, partial: bool = True) -> Tensor:
    """The weights after four updates."""
    task, policy = Uneven(partial=partial), TablePolicy()
    method.train(Context(policy, task, World(), steps=4, eval_every=None, teachers=teachers(task)))
    return policy.table.detach()


GROUP = Sampling(group=4)
OPTIM = optim(lr=0.5, eps=0.01, clip_norm=None)  # eps: the update depends on the gradient's scale too


def pg(kl: Mapping[str, Any] | None = None, **options: Any) -> PPO:
    return PPO(OPTIM, GROUP, 32, 2, PolicyGradient(**options, kl=KL(**(kl or {}))), Advantage("centred"))


def distil(advantage: Advantage | None = None, group: int = 4, teacher: str = "subject", **options: Any) -> OPD:
    return OPD(OPTIM, Sampling(group), Distillation(**options), advantage or Advantage(), teacher=teacher)


@dataclass(frozen=True)
class Case:
    """An option: its class, its name, a maker of the method, what it is in the base and what it is changed to."""

    of: type
    option: str
    make: Callable[..., Any]
    base: dict[str, Any]
    changed: Any
    partial: bool = True

    def __str__(self) -> str:
        return f"{self.of.__name__}.{self.option}={self.changed}"


def _rlvr(advantage: Mapping[str, Any], sampling: Mapping[str, Any], mismatch: Mapping[str, Any]) -> RLVR:
    return RLVR(
        OPTIM, Sampling(**{"group": 4, **sampling}), advantage=Advantage(**advantage), mismatch=Mismatch(**mismatch)
    )


def _advantage(**options: Any) -> RLVR:
    return _rlvr(options, {}, {})


def _sampling(**options: Any) -> RLVR:
    return _rlvr({}, options, {})


def _mismatch(**options: Any) -> RLVR:
    return _rlvr({}, {}, options)


def _kl(**options: Any) -> PPO:
    return pg({"beta": 0.3, **options})


def _rft(**options: Any) -> RFT:
    return RFT(OPTIM, **{"sampling": GROUP, "passing": 0.6, **options})


def _dpo(**options: Any) -> DPO:
    return DPO(OPTIM, **{"sampling": GROUP, "passing": 0.6, **options})


def _preference(**options: Any) -> DPO:
    return DPO(OPTIM, GROUP, Preference(**options), passing=0.6)


def _sft(**options: Any) -> SFT:
    return SFT(OPTIM, **options)


def _ppo(**options: Any) -> PPO:
    return replace(pg(), **options)


def _opd(**options: Any) -> OPD:
    return replace(distil(), **options)


SAMPLED = Distillation("sampled", outcome=1.0)
CASES = [
    *(Case(PolicyGradient, "surrogate", pg, {}, word) for word in ("reinforce", "cispo", "cispo_cap")),
    *(Case(PolicyGradient, "ratio", pg, {}, word) for word in ("sequence", "sequence_mean")),
    Case(PolicyGradient, "clip_low", pg, {}, 0.5),
    Case(PolicyGradient, "clip_high", pg, {}, 0.5),
    Case(PolicyGradient, "clip_low", pg, {"surrogate": "cispo"}, 0.5),
    Case(PolicyGradient, "dual_clip", pg, {}, 1.0),
    Case(PolicyGradient, "entropy_bonus", pg, {}, 0.1),
    *(Case(PolicyGradient, "aggregate", pg, {}, word) for word in ("sequence_mean", "sequence_sum", "constant")),
    Case(PolicyGradient, "constant", pg, {"aggregate": "constant"}, 7.0),
    Case(PolicyGradient, "kl", pg, {}, {"beta": 0.3}),
    Case(KL, "beta", _kl, {}, 0.5),
    Case(KL, "estimator", _kl, {}, "k2"),
    *(Case(KL, "estimator", _kl, {"placement": "reward"}, word) for word in ("k1", "k2")),
    Case(KL, "placement", _kl, {}, "reward"),
    Case(KL, "aggregate", _kl, {}, "sequence_sum"),
    *(Case(Advantage, "kind", _advantage, {}, kind) for kind in ("centred", "rloo", "batch", "whiten", "none")),
    Case(Advantage, "kind", _advantage, {"kind": "centred"}, "rloo"),
    *(Case(Advantage, "ddof", _advantage, {"kind": kind}, 0) for kind in ("group", "batch", "whiten")),
    *(Case(Advantage, "eps", _advantage, {"kind": kind}, 0.3) for kind in ("group", "batch", "whiten")),
    *(Case(Mismatch, "treatment", _mismatch, {"high": 1.2, "low": 0.9}, word) for word in ("truncate", "mask")),
    *(Case(Mismatch, "level", _mismatch, {"treatment": "truncate", "high": 1.2}, w) for w in ("sequence", "geometric")),
    Case(Mismatch, "low", _mismatch, {"treatment": "mask"}, 0.9),
    *(Case(Mismatch, "high", _mismatch, {"treatment": word}, 1.1) for word in ("truncate", "mask")),
    Case(Sampling, "group", _sampling, {}, 8),
    Case(Sampling, "temperature", _sampling, {}, 1.5),
    Case(Sampling, "resample", _sampling, {}, 2, partial=False),
    *(Case(Distillation, "kind", distil, {}, word) for word in ("forward_kl", "jsd", "sampled")),
    *(Case(Distillation, "beta", distil, {"kind": "jsd"}, beta) for beta in (0.2, 0, 1)),
    *(Case(Distillation, "temperature", distil, {"kind": kind}, 2.0) for kind in ("reverse_kl", "forward_kl", "jsd")),
    *(Case(Distillation, "top_k", distil, {"kind": kind}, 2) for kind in ("reverse_kl", "forward_kl", "jsd")),
    Case(Distillation, "top_k_of", distil, {"top_k": 2}, "student"),
    Case(Distillation, "rest", distil, {"top_k": 2}, "bucket"),
    Case(Distillation, "outcome", distil, {"kind": "sampled"}, 1.0),
    *(Case(Distillation, "aggregate", distil, {}, word) for word in ("sequence_mean", "sequence_sum", "constant")),
    Case(Distillation, "constant", distil, {"aggregate": "constant"}, 7.0),
    Case(OPD, "sampling", _opd, {}, Sampling(1)),
    Case(OPD, "objective", _opd, {}, Distillation("jsd")),
    Case(OPD, "advantage", _opd, {"objective": SAMPLED}, Advantage("centred")),
    Case(OPD, "mismatch", _opd, {"objective": SAMPLED}, Mismatch("mask", high=1.2)),
    Case(OPD, "teacher", _opd, {}, "mixture"),
    Case(OPD, "off_policy", _opd, {}, 0.5),
    Case(OPD, "off_policy_source", _opd, {"off_policy": 0.5}, "teacher"),
    Case(RFT, "sampling", _rft, {}, Sampling(8)),
    Case(RFT, "passing", _rft, {}, 0.9),
    Case(RFT, "distinct", _rft, {"passing": 0.3}, False),
    Case(RFT, "on_failure", _rft, {}, "reference"),
    *(Case(RFT, "aggregate", _rft, {}, word) for word in ("sequence_mean", "sequence_sum", "constant")),
    Case(DPO, "sampling", _dpo, {}, Sampling(8)),
    Case(DPO, "objective", _dpo, {}, Preference(0.5)),
    Case(DPO, "passing", _dpo, {}, 0.9),
    Case(Preference, "beta", _preference, {}, 0.5),
    Case(Preference, "label_smoothing", _preference, {}, 0.2),
    Case(SFT, "targets", _sft, {}, "reference"),
    *(Case(SFT, "aggregate", _sft, {}, word) for word in ("sequence_mean", "sequence_sum", "constant")),
    Case(PPO, "sampling", _ppo, {}, Sampling(8)),
    Case(PPO, "rows_per_round", _ppo, {}, 64),
    Case(PPO, "epochs", _ppo, {}, 1),
    Case(PPO, "objective", _ppo, {}, PolicyGradient("cispo")),
    Case(PPO, "advantage", _ppo, {}, Advantage("rloo")),
    Case(PPO, "mismatch", _ppo, {}, Mismatch("truncate", high=1.2)),
]
OWN = (PolicyGradient, KL, Advantage, Mismatch, Sampling, Distillation, Preference, OPD, RFT, DPO, SFT, PPO)
NOT_AN_OBJECTIVES = {"name", "optim"}


def test_every_option_of_every_objective_and_method_is_in_the_list() -> None:
    listed = {(case.of, case.option) for case in CASES}
    assert {(cls, field.name) for cls in OWN for field in fields(cls) if field.name not in NOT_AN_OBJECTIVES} <= listed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_option_changes_the_update(case: Case) -> None:
    value = {"kl": case.changed} if case.option == "kl" else {case.option: case.changed}
    before = trained(case.make(**case.base), partial=case.partial)
    after = trained(case.make(**{**case.base, **value}), partial=case.partial)
    assert float((after - before).abs().max()) > 1e-5


IDLE: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (PolicyGradient, {"dual_clip": 3.0, "surrogate": "cispo"}),
    (PolicyGradient, {"constant": 5.0}),
    (KL, {"beta": 0.1, "estimator": "k1"}),
    (Advantage, {"kind": "rloo", "ddof": 0}),
    (Advantage, {"kind": "none", "ddof": 0}),
    (Distillation, {"beta": 0.3}),
    (Distillation, {"constant": 5.0}),
    (Distillation, {"top_k_of": "student"}),
    (Distillation, {"rest": "bucket"}),
    (Distillation, {"kind": "sampled", "top_k": 2}),
    (Distillation, {"kind": "sampled", "temperature": 2.0}),
    (Distillation, {"outcome": 1.0}),
    (_opd, {"mismatch": Mismatch("mask")}),
    (_opd, {"off_policy_source": "teacher"}),
    (_opd, {"advantage": Advantage("rloo")}),
    (_opd, {"sampling": Sampling(4, resample=2)}),
    (_rft, {"sampling": Sampling(4, resample=2)}),
    (_dpo, {"sampling": Sampling(4, resample=2)}),
]


@pytest.mark.parametrize(
    ("make", "options"), IDLE, ids=lambda value: str(value) if isinstance(value, dict) else value.__name__
)
def test_an_option_without_effect_beside_the_others_is_refused_in_a_sentence(
    make: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as error:
        make(**options)
    assert any(name in str(error.value) for name in options)
    assert "\n" not in str(error.value)


class Unrecorded(Uneven):
    """A sampler that does not say how likely its answers were."""

    def experience(self, *args: Any, **settings: Any) -> Experience:
        return replace(super().experience(*args, **settings), rollout_logps=None)


@pytest.mark.parametrize(
    "method", [_mismatch(treatment="mask"), _opd(objective=SAMPLED, mismatch=Mismatch("mask"))], ids=["rlvr", "opd"]
)
def test_a_correction_of_log_probs_that_nobody_recorded_is_refused(method: Any) -> None:
    task = Unrecorded(partial=True)
    with pytest.raises(UserError, match=r"mismatch\.treatment"):
        method.train(Context(TablePolicy(), task, World(), steps=1, eval_every=None, teachers=teachers(task)))
