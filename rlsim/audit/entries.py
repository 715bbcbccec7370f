"""What is audited: each entry is a method as a user would configure it, and what its gradient is supposed to be.

Losses are summed over an answer's tokens and averaged over answers unless the entry is about the aggregate, so that the
scale of a gradient can be compared with the claim's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.advantages import Advantage
from common.distillation import Distillation
from common.kl import KL
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.preference import DPO as Preference
from common.trainers.dpo import DPO
from common.trainers.opd import OPD
from common.trainers.ppo import PPO
from common.trainers.rft import RFT
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT

REWARD, LIKELIHOOD = "expected reward", "log-likelihood of the true answer"
REVERSE, REVERSE_KEPT = "reverse KL", "reverse KL, prefix kept"
FORWARD, FORWARD_KEPT = "forward KL", "forward KL, prefix kept"
ENTROPY, ENTROPY_KEPT = "entropy", "entropy, prefix kept"
ITSELF = "itself"
OLD = "old"  # the start, whose log-probs are also the old ones of the ratio
SAMPLER = "sampler"  # the start, but the trainer scores the old log-probs itself
SUM = "sequence_sum"
UNCLIPPED: dict[str, Any] = {"clip_low": 1.0, "clip_high": 1e9}


@dataclass(frozen=True)
class Entry:
    """One objective under audit."""

    family: str
    name: str
    claim: str
    method: Callable[[Optim], Any]
    moved: int = 0  # the gradient is taken this many updates after the start
    writer: str = ITSELF  # who wrote the answers
    reference: str | None = None  # of the KL: "start" or "teacher"
    rewarded: bool = True  # False: all rewards are 0, so that the penalty or bonus is all there is
    exact: bool = True  # can be enumerated

    @property
    def gradient(self) -> tuple[object, ...]:
        """Entries that agree in this have the same gradient and differ in their claim only."""
        return self.method, self.moved, self.writer, self.reference, self.rewarded

    @property
    def to(self) -> str:
        """The other policy that the claim is about."""
        return self.reference or "teacher"


def entries(moved: Sequence[int]) -> list[Entry]:
    """Everything that is audited, in the order of the report; `moved`: updates between writer and learner."""
    return [
        *supervised(),
        *advantages(),
        *(entry for n in moved for entry in ratios(n)),
        *mismatches(max(moved)),
        *penalties(max(moved)),
        *distillation(max(moved)),
    ]


def _reinforce(
    advantage: Advantage | None = None,
    group: int = 8,
    *,
    resample: int = 0,
    mismatch: Mismatch | None = None,
    **objective: Any,
) -> Callable[[Optim], RLVR]:
    loss = PolicyGradient("reinforce", **{"aggregate": SUM, **objective})
    sampling = Sampling(group, resample=resample)
    return lambda optim: RLVR(optim, sampling, loss, advantage or Advantage("rloo"), mismatch or Mismatch())


def _ppo(surrogate: str, ratio: str = "token", **options: Any) -> Callable[[Optim], PPO]:
    # a ratio of whole answers stands at each token, and `clip` differentiates it there: it counts once an answer
    aggregate = "sequence_mean" if surrogate == "clip" and ratio != "token" else SUM
    loss = PolicyGradient(surrogate, ratio, **{"aggregate": aggregate, **options})
    return lambda optim: PPO(optim, Sampling(8), optim.rows_per_update, 1, loss, Advantage("rloo"))


def _distil(
    kind: str, group: int = 1, mismatch: Mismatch | None = None, off_policy: float = 0.0, **options: Any
) -> Callable[[Optim], OPD]:
    loss = Distillation(kind, **{"aggregate": SUM, **options})
    advantage = Advantage("rloo") if loss.outcome else Advantage()
    return lambda optim: OPD(optim, Sampling(group), loss, advantage, mismatch or Mismatch(), off_policy=off_policy)


def supervised() -> list[Entry]:
    """Copying, and choosing what to copy."""
    name = "copying"
    return [
        Entry(name, "SFT, true answers", LIKELIHOOD, lambda o: SFT(o, "reference", SUM)),
        Entry(name, "SFT, teacher's greedy answers", FORWARD, lambda o: SFT(o, "teacher", SUM)),
        Entry(name, "RFT, G 8", REWARD, lambda o: RFT(o, Sampling(8), aggregate=SUM)),
        Entry(name, "RFT, G 8, repeats kept", REWARD, lambda o: RFT(o, Sampling(8), distinct=False, aggregate=SUM)),
        Entry(name, "DPO, beta 0.1", REWARD, lambda o: DPO(o, Sampling(8), Preference(0.1)), exact=False),
    ]


def advantages() -> list[Entry]:
    """On policy, REINFORCE: which baseline and scale."""

    def entry(name: str, kind: str, group: int = 8, exact: bool = True, resample: int = 0, **objective: Any) -> Entry:
        method = _reinforce(Advantage(kind), group, resample=resample, **objective)
        return Entry("advantage", name, REWARD, method, exact=exact)

    return [
        entry("none", "none"),
        entry("batch", "batch"),
        entry("whiten", "whiten"),
        *(entry(f"group (GRPO), G {group}", "group", group) for group in (4, 8, 16)),
        entry("group, G 8, resampled (DAPO)", "group", 8, exact=False, resample=3),
        *(entry(f"centred (Dr. GRPO), G {group}", "centred", group) for group in (4, 8, 16)),
        *(entry(f"rloo, G {group}", "rloo", group) for group in (4, 8, 16)),
        entry("rloo, G 8, token_mean", "rloo", aggregate="token_mean"),
        entry("rloo, G 8, sequence_mean", "rloo", aggregate="sequence_mean"),
        entry("rloo, G 8, constant", "rloo", aggregate="constant"),
    ]


def ratios(moved: int) -> list[Entry]:
    """Off policy: answers written `moved` updates ago, log-probs of then."""
    found = [
        ("no ratio (reinforce)", _ppo("reinforce")),
        ("token ratio, unclipped", _ppo("clip", **UNCLIPPED)),
        ("token ratio, clip .2 (PPO)", _ppo("clip")),
        ("token ratio, clip .2, dual 3", _ppo("clip", dual_clip=3.0)),
        ("sequence ratio, unclipped", _ppo("clip", "sequence", **UNCLIPPED)),
        ("sequence ratio, clip .2", _ppo("clip", "sequence")),
        ("geometric ratio, clip 3e-4 (GSPO)", _ppo("clip", "sequence_mean", clip_low=3e-4, clip_high=4e-4)),
        ("CISPO, two-sided .2", _ppo("cispo")),
        ("CISPO, upper cap .2", _ppo("cispo_cap")),
    ]
    family = f"ratio, {moved} update{'s' * (moved > 1)} off policy"
    return [Entry(family, name, REWARD, method, moved=moved, writer=OLD) for name, method in found]


def mismatches(moved: int) -> list[Entry]:
    """The sampler lags `moved` updates behind; old log-probs are the trainer's own."""
    found = [
        ("off", Mismatch()),
        ("truncate 2, token", Mismatch("truncate", "token")),
        ("truncate 2, sequence", Mismatch("truncate", "sequence")),
        ("truncate 2, geometric", Mismatch("truncate", "geometric")),
        ("mask .5-2, token", Mismatch("mask", "token")),
        ("mask .5-2, sequence", Mismatch("mask", "sequence")),
        ("mask .5-2, geometric", Mismatch("mask", "geometric")),
    ]
    family = f"mismatch, sampler {moved} updates behind"
    return [Entry(family, n, REWARD, _reinforce(mismatch=m), moved=moved, writer=SAMPLER) for n, m in found]


def penalties(moved: int) -> list[Entry]:
    """The KL term alone, near (the policy some updates ago) and far (the teacher), and the entropy bonus."""
    found = []
    for reference, where in (("start", f"KL to the policy {moved} updates ago"), ("teacher", "KL to the teacher")):
        for estimator, placement in (
            ("k1", "reward"),
            ("k2", "reward"),
            ("k3", "reward"),
            ("k2", "loss"),
            ("k3", "loss"),
        ):
            method = _reinforce(kl=KL(1.0, estimator, placement))
            settings: dict[str, Any] = {
                "moved": moved if reference == "start" else 0,
                "reference": reference,
                "rewarded": False,
            }
            found.append(Entry(where, f"{estimator} in the {placement}", REVERSE, method, **settings))
    bonus = _reinforce(entropy_bonus=1.0)
    return [*found, Entry("entropy", "entropy bonus", ENTROPY, bonus, rewarded=False)]


def distillation(moved: int) -> list[Entry]:
    """To the teacher, on the student's own answers."""
    opd, forward = _distil("reverse_kl"), _distil("forward_kl")
    lagging: dict[str, Any] = {"moved": moved, "writer": SAMPLER}
    found: list[tuple[str, str, Callable[[Optim], OPD], dict[str, Any]]] = [
        ("full reverse KL (OPD), against whole answers", REVERSE, opd, {}),
        ("full reverse KL (OPD)", REVERSE_KEPT, opd, {}),
        ("full reverse KL, G 8", REVERSE_KEPT, _distil("reverse_kl", 8), {}),
        ("sampled token", REVERSE_KEPT, _distil("sampled"), {}),
        ("sampled token, G 8", REVERSE_KEPT, _distil("sampled", 8), {}),
        ("sampled token + outcome 1, G 8", REWARD, _distil("sampled", 8, outcome=1.0), {"exact": False}),
        (f"sampled, {moved} behind, uncorrected", REVERSE_KEPT, _distil("sampled", 8), lagging),
        (f"sampled, {moved} behind, truncate 2", REVERSE_KEPT, _distil("sampled", 8, Mismatch("truncate")), lagging),
        (f"sampled, {moved} behind, mask .5-2 (MOPD)", REVERSE_KEPT, _distil("sampled", 8, Mismatch("mask")), lagging),
        ("reverse KL, top 4, renormalised", REVERSE_KEPT, _distil("reverse_kl", top_k=4), {}),
        ("reverse KL, top 4 + rest", REVERSE_KEPT, _distil("reverse_kl", top_k=4, rest="bucket"), {}),
        ("reverse KL, temperature 2", REVERSE_KEPT, _distil("reverse_kl", temperature=2.0), {}),
        ("JSD .5", REVERSE_KEPT, _distil("jsd"), {}),
        ("GKD: JSD .5, half true answers", REVERSE_KEPT, _distil("jsd", off_policy=0.5), {"exact": False}),
        ("full forward KL, against whole answers", FORWARD, forward, {}),
        ("full forward KL", FORWARD_KEPT, forward, {}),
    ]
    return [Entry("distillation", name, claim, method, **settings) for name, claim, method, settings in found]
