"""DPO on pairs that the verifier makes: of a problem's answers the first right one is preferred to the first wrong one.

loss = -log sigmoid(beta * (chosen's minus rejected's log-ratio to the frozen start)), log-probs summed (2305.18290),
on fresh answers of the policy in every update (online DPO, arXiv 2402.04792). Problems without both kinds make no pair.

    python -m rlsim method=dpo
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.errors import UserError, is_number
from common.interfaces import Experience, Metrics
from common.logprobs import sum_tokens, token_logps
from common.optimizer import Optim
from common.preference import DPO as Objective
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.rollout import Sampling, answer, problems_of
from common.trainers.scoring import score


def pairs(rows: Experience, passing: float) -> Experience | None:
    """Units of two rows, the first right and the first wrong answer of each problem that has both; None without any."""
    assert rows.rewards_N is not None, "a task that samples also verifies"
    right_BG = (rows.rewards_N >= passing).view(rows.units, rows.group)
    both_B = right_BG.any(-1) & (~right_BG).any(-1)
    units = both_B.nonzero().flatten()
    if len(units) == 0:
        return None
    first = torch.stack([right_BG.int().argmax(-1), (~right_BG).int().argmax(-1)], -1)[units]
    rows_2P = (units[:, None] * rows.group + first).reshape(-1)
    picked = units.tolist()
    return replace(
        rows, prompts=rows.prompts[units.cpu()], subjects=[rows.subjects[u] for u in picked], group=2,
        row_ids=[rows.row_ids[u] for u in picked], answers_NA=rows.answers_NA[rows_2P], mask_NA=rows.mask_NA[rows_2P],
        rewards_N=rows.rewards_N[rows_2P], weight_N=None, rollout_logps=None, groups_N=None, advantages=None, extras={},
    )  # fmt: skip


@dataclass
class DPO:
    """Direct preference optimisation; the reference is the policy as it started (or the one the application names)."""

    optim: Optim
    sampling: Sampling
    objective: Objective = field(default_factory=Objective)
    passing: float = 1.0  # the least reward of a right answer
    name: str = "dpo"

    def __post_init__(self) -> None:
        if not is_number(self.passing):
            raise UserError(f"method.passing={self.passing} must be a number.")
        if self.sampling.group < 2:
            raise UserError("method.sampling.group must be at least 2 for dpo: a pair needs two answers.")
        if self.sampling.resample:
            raise UserError("method.sampling.resample has no effect in dpo; problems without a pair are left out.")

    def train(self, context: Context) -> None:
        """Run to the horizon; an update without a pair changes nothing and is counted."""
        if context.task.offline:
            raise UserError("method=dpo samples its own answers, but these rows are recorded (they carry adv).")
        reference = context.reference() if context.reference is not None else context.policy.frozen("start")
        loop = Loop(context, self.optim)
        for step in loop.steps():
            batch = problems_of(context, step, self.optim, self.sampling)
            rows = answer(context, batch, step, self.sampling)
            assert rows.rewards_N is not None
            loop.count_once({"reward": float(rows.rewards_N.double().mean())})
            paired = pairs(rows, self.passing)
            loop.count_once({"signal": (0 if paired is None else paired.units) / rows.units})
            if paired is not None:
                ref_NA = score(reference, paired, context.world, self.optim.micro_batch)
                share_N = torch.full((len(paired),), 1 / paired.units, device=paired.answers_NA.device)
                paired = paired.with_extras(ref_logps_NA=ref_NA, scale_N=share_N)
            loop.update(paired, lambda micro: self._loss(context, micro))

    def _loss(self, context: Context, micro: Experience) -> tuple[Tensor, Metrics]:
        logits = context.policy.answer_logits(micro.prompts, micro.answers_NA, group=micro.group)
        logps_N = sum_tokens(token_logps(logits, micro.answers_NA, micro.temperature), micro.mask_NA)
        loss_P, margin_P = self.objective(logps_N, sum_tokens(micro.extras["ref_logps_NA"], micro.mask_NA))
        weight_P = micro.weights[::2]
        loss = (loss_P * micro.extras["scale_N"][::2]).sum()
        pairs_here = float(weight_P.sum())
        return loss, {
            "margin": (float((margin_P * weight_P).sum()), pairs_here),
            "pair_accuracy": (float(((margin_P > 0) * weight_P).sum()), pairs_here),
        }
