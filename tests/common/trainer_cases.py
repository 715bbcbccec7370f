"""Every method with small numbers, for tests that must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.advantages import Advantage
from common.distillation import Distillation
from common.kl import KL
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.preference import DPO as DPOObjective
from common.trainers.dpo import DPO
from common.trainers.opd import OPD
from common.trainers.ppo import PPO
from common.trainers.rft import RFT
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT


def optim(**changes: Any) -> Optim:
    return Optim(**{"lr": 0.05, "rows_per_update": 32, "optimizer": "adam", **changes})


GROUP = Sampling(group=4)

METHODS: dict[str, Callable[..., Any]] = {
    "sft_reference": lambda **o: SFT(optim(**o), targets="reference"),
    "sft_teacher": lambda **o: SFT(optim(**o), targets="teacher"),
    "rlvr": lambda **o: RLVR(optim(**o), GROUP),
    "rlvr_kl_reward": lambda **o: RLVR(
        optim(**o), GROUP, PolicyGradient(surrogate="reinforce", kl=KL(0.01, "k1", "reward")), Advantage("rloo")
    ),
    "reinforce_pp": lambda **o: RLVR(  # statistics of the whole batch: of all ranks
        optim(**o), GROUP, PolicyGradient(surrogate="reinforce", kl=KL(0.01, "k1", "reward")), Advantage("whiten")
    ),
    "rlvr_dynamic": lambda **o: RLVR(optim(**o), Sampling(group=4, resample=3)),
    "rlvr_mismatch": lambda **o: RLVR(optim(**o), GROUP, mismatch=Mismatch("truncate", "sequence")),
    "ppo": lambda **o: PPO(optim(**o), GROUP, rows_per_round=64),
    "ppo_kl": lambda **o: PPO(
        optim(**o),
        GROUP,
        64,
        2,
        PolicyGradient(ratio="sequence", aggregate="sequence_mean", kl=KL(0.02, aggregate="sequence_sum")),
    ),
    "cispo": lambda **o: PPO(optim(**o), GROUP, 64, objective=PolicyGradient(surrogate="cispo")),
    "opd": lambda **o: OPD(optim(**o), Sampling(group=1)),
    "opd_jsd_top_k": lambda **o: OPD(optim(**o), Sampling(1), Distillation("jsd", top_k=2, rest="bucket")),
    "opd_sampled": lambda **o: OPD(optim(**o), GROUP, Distillation("sampled", outcome=0.5), mismatch=Mismatch("mask")),
    "opd_mixture": lambda **o: OPD(optim(**o), Sampling(1), teacher="mixture"),
    "gkd": lambda **o: OPD(optim(**o), Sampling(1), Distillation("jsd"), off_policy=0.5),
    "rft": lambda **o: RFT(optim(**o), GROUP),
    "rft_repair": lambda **o: RFT(optim(**o), GROUP, on_failure="reference"),
    "dpo": lambda **o: DPO(optim(**o), GROUP, DPOObjective(beta=0.5)),
}
