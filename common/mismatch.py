"""When the sampler's log-probs differ from the trainer's: importance weights for rows that another engine wrote.

w = exp(old_logp - rollout_logp), where old is the trainer's own log-prob at the start of the update. Level and
treatment are options; the diagnostics are always reported, because a run whose effective sample size collapses looks
like a run that does not learn.

| level     | w                                     |
|-----------|---------------------------------------|
| token     | of each token                         |
| sequence  | product over the answer (sum of logs) |
| geometric | geometric mean over the answer        |

| treatment | used weight                                                                    |
|-----------|--------------------------------------------------------------------------------|
| off       | 1                                                                              |
| truncate  | min(w, high), truncated importance sampling                                    |
| mask      | w inside [low, high]; outside dropped from the numerator and the denominator   |

Only unbounded sequence weights are unbiased, and their variance grows with the answer. With a sampler half a nat of
noise away and three tokens, bias and cosine to the true gradient are (tests/common/test_enumeration_mismatch.py): off
.523 and .886; sequence, truncated at 2, .202 and .979, masked to [.5, 2] .637 and .889; token, unbounded, .394 and
.955, truncated .421 and .941, masked .491 and .900; geometric .351 and .941.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError, at_least, one_of
from common.logprobs import sum_tokens

LEVELS = ("token", "sequence", "geometric")
TREATMENTS = ("off", "truncate", "mask")


def importance_weights(old_logps_NA: Tensor, rollout_logps: Tensor, mask_NA: Tensor, level: str) -> Tensor:
    """(N, A) weights, 1 at unscored positions. `rollout_logps` is (N, A), or (N,) sums for whole-answer levels.

    Raises UserError for level "token" where the rows have only sums.
    """
    if level == "token":
        if rollout_logps.dim() == 1:
            raise UserError(
                "mismatch.level=token needs the rollout's log-prob of every token, but these rows hold one sum each; "
                "use level=sequence."
            )
        return (old_logps_NA - rollout_logps).masked_fill(~mask_NA, 0.0).exp()
    gap_N = answer_gap(old_logps_NA, rollout_logps, mask_NA)
    if level == "geometric":
        gap_N = gap_N / mask_NA.sum(-1).clamp(min=1)
    return torch.where(mask_NA, gap_N.exp()[:, None], torch.ones((), device=gap_N.device))


def answer_gap(old_logps_NA: Tensor, rollout_logps: Tensor, mask_NA: Tensor) -> Tensor:
    """(N,): sum over the answer of the trainer's minus the sampler's log-prob."""
    rollout_N = rollout_logps if rollout_logps.dim() == 1 else sum_tokens(rollout_logps, mask_NA)
    return sum_tokens(old_logps_NA, mask_NA) - rollout_N


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) in (0, 1]: the share of the rows that the estimate uses; 0 without weights."""
    if weights.numel() == 0 or not bool((weights != 0).any()):
        return 0.0
    wide = weights.double()
    if bool(wide.isinf().any()):
        wide = wide.isinf().double()  # the limit: what overflowed is all that counts
    wide = wide / wide.max()  # the ratio is scale-free; this keeps huge weights from overflowing
    return float(wide.sum() ** 2 / (wide.numel() * wide.square().sum()))


@dataclass(frozen=True)
class Mismatch:
    """The correction of the sampler mismatch: an option of every policy-gradient method, off by default."""

    treatment: str = "off"
    level: str = "token"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        one_of("mismatch.treatment", self.treatment, TREATMENTS)
        one_of("mismatch.level", self.level, LEVELS)
        at_least("mismatch.low", self.low, 0)
        at_least("mismatch.high", self.high, self.low)

    def require(self, rollout_logps: Tensor | None) -> None:
        """Refuse rows that cannot be corrected: those whose sampler recorded no log-probs."""
        if rollout_logps is None:
            raise UserError(
                f"mismatch.treatment={self.treatment} needs the sampler's log-probs, "
                "but these rows record none; use mismatch.treatment=off."
            )

    def __call__(
        self, old_logps_NA: Tensor, rollout_logps: Tensor, mask_NA: Tensor, weight_N: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """(used weights (N, A), the mask without dropped tokens (N, A), diagnostics). No gradient passes."""
        level = self.level if self.treatment != "off" or rollout_logps.dim() > 1 else "sequence"
        raw_NA = importance_weights(old_logps_NA.detach(), rollout_logps, mask_NA, level)
        inside_NA = (raw_NA >= self.low) & (raw_NA <= self.high)
        keep_NA = mask_NA & inside_NA if self.treatment == "mask" else mask_NA
        used_NA = torch.ones_like(raw_NA)
        if self.treatment == "truncate":
            used_NA = raw_NA.clamp(max=self.high)
        elif self.treatment == "mask":
            used_NA = raw_NA.masked_fill(~keep_NA, 0.0)
        counted = mask_NA & (weight_N > 0)[:, None]
        if level != "token":  # one weight an answer: count it once
            counted = counted & (counted.cumsum(-1) == 1)
        return used_NA, keep_NA, self._diagnostics(raw_NA[counted], used_NA[counted], inside_NA[counted])

    def _diagnostics(self, raw: Tensor, used: Tensor, inside: Tensor) -> dict[str, float]:
        if raw.numel() == 0:
            return {}
        return {
            "mismatch/weight_mean": float(raw.double().mean()),
            "mismatch/weight_max": float(raw.max()),
            "mismatch/outside": float((~inside).double().mean()),
            "mismatch/ess": effective_sample_size(raw),
            "mismatch/ess_used": effective_sample_size(used),
        }
