"""RFT, rejection sampling and fine-tuning (expert iteration): write, keep what the verifier passes, copy it.

loss = mean over the kept answers' tokens of -log p (arXiv 2308.01825; STaR, arXiv 2203.14465). It equals REINFORCE with
the
raw 0/1 reward up to the denominator (kept answers instead of all): no wrong answer is pushed down. With
`on_failure: reference` a problem that no answer solved is answered by the true one (on-policy SFT to the verified
answer).

    python -m rlsim method=rft
    python -m rlsim method=rft method.on_failure=reference
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from common.aggregation import AGGREGATES, token_weights
from common.errors import UserError, is_number, one_of
from common.interfaces import Batch, Experience
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.rollout import Sampling, answer, problems_of
from common.trainers.sft import imitation_loss, reference_rows


@dataclass
class RFT:
    """Copy the policy's own verified answers; `distinct` counts equal answers to a problem once."""

    optim: Optim
    sampling: Sampling
    passing: float = 1.0  # the least reward of an answer that is kept
    distinct: bool = True
    on_failure: str = "drop"  # or "reference"
    aggregate: str = "token_mean"
    name: str = "rft"

    def __post_init__(self) -> None:
        one_of("method.on_failure", self.on_failure, ("drop", "reference"))
        if not is_number(self.passing):
            raise UserError(f"method.passing={self.passing} must be a number.")
        one_of("method.aggregate", self.aggregate, AGGREGATES)
        if self.sampling.resample:
            raise UserError("method.sampling.resample has no effect in RFT: an answer is kept or dropped by itself.")

    def train(self, context: Context) -> None:
        """Run to the horizon; an update without a kept answer changes nothing and is counted."""
        if context.task.offline:
            raise UserError("method=rft samples its own answers, but these rows are recorded (they carry adv).")
        loop = Loop(context, self.optim)
        for step in loop.steps():
            batch = problems_of(context, step, self.optim, self.sampling)
            rows = answer(context, batch, step, self.sampling)
            assert rows.rewards_N is not None, "a task that samples also verifies"
            loop.count_once({"reward": float(rows.rewards_N.double().mean())})
            rows = self._kept(rows, batch)
            loop.count_once({"kept": float((rows.weights > 0).double().mean())})
            scale_NA = token_weights(rows.mask_NA, rows.weights, self.aggregate)
            some = bool((scale_NA > 0).any())
            loop.update(
                rows.with_extras(scale_NA=scale_NA) if some else None, lambda micro: imitation_loss(context, micro)
            )

    def _kept(self, rows: Experience, batch: Batch) -> Experience:
        """Row weights 1 for what is copied, else 0; units stay whole, so that a prompt is still computed once."""
        assert rows.rewards_N is not None
        passed_BG = (rows.rewards_N >= self.passing).view(rows.units, rows.group)
        if self.distinct:
            passed_BG = passed_BG & _first_of_equals(rows, passed_BG)
        answers_NA, mask_NA = rows.answers_NA, rows.mask_NA
        if self.on_failure == "reference":
            true, failed_B = reference_rows(batch), ~passed_BG.any(-1)
            first_N = (failed_B[:, None] & (torch.arange(rows.group, device=failed_B.device) == 0)).reshape(-1)
            answers_NA = torch.where(first_N[:, None], true.answers_NA.repeat_interleave(rows.group, 0), answers_NA)
            mask_NA = torch.where(first_N[:, None], true.mask_NA.repeat_interleave(rows.group, 0), mask_NA)
            passed_BG = passed_BG | first_N.view_as(passed_BG)
        return replace(
            rows, answers_NA=answers_NA, mask_NA=mask_NA, weight_N=passed_BG.reshape(-1).float() * rows.weights
        )


def _first_of_equals(rows: Experience, passed_BG: torch.Tensor) -> torch.Tensor:
    """(B, G) True where no earlier passed row of the unit has the same scored answer."""
    answers_BGA = rows.answers_NA.masked_fill(~rows.mask_NA, -1).view(rows.units, rows.group, -1)
    equal_BGG = (answers_BGA[:, :, None] == answers_BGA[:, None]).all(-1)
    earlier_GG = torch.ones(rows.group, rows.group, dtype=torch.bool, device=passed_BG.device).tril(-1)
    return ~(equal_BGG & earlier_GG & passed_BG[:, None]).any(-1)
