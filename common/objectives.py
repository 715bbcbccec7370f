"""What is minimised: cross entropy and the policy gradients, as pure functions of log-probs.

Every function returns a per-token loss (N, A); how the tokens become one number is `common/aggregation.py`'s business.
With r = exp(logp - old_logp) by the chosen ratio and A the advantage:

| surrogate | loss of a token                         | source                                                     |
|-----------|-----------------------------------------|------------------------------------------------------------|
| reinforce | -A logp                                 | Williams 1992; every other one's gradient at r = 1         |
| clip      | -min(r A, clip(r, 1 - low, 1 + high) A) | PPO, arXiv 1707.06347; low != high: DAPO, arXiv 2503.14476 |
| cispo     | -sg(clip(r, 1 - low, 1 + high)) A logp  | CISPO, arXiv 2506.13585, two-sided form                    |
| cispo_cap | -sg(min(r, 1 + high)) A logp            | CISPO with an upper cap only                               |

| ratio         | r                                                                                        |
|---------------|------------------------------------------------------------------------------------------|
| token         | exp(logp_t - old_t): drops the effect of earlier tokens' changes                         |
| sequence      | exp(sum of the answer's gaps): the exact ratio of whole answers, high variance; NOT GSPO |
| sequence_mean | exp(mean of the gaps): GSPO, arXiv 2507.18071                                            |

Clipping biases the gradient wherever it is active; `dual_clip` c bounds the loss of negative advantages at -c A
(arXiv 1912.09729). Bias and cosine to the gradient of the expected reward, for answers of three tokens whose old
policy is half a nat of noise away (tests/common/test_enumeration.py): sequence without a clip 0 and 1, clipped at .2
.437 and .906; token without a clip .394 and .955, clipped .793 and .677; sequence_mean without a clip .351 and .941;
cispo .462 and .920, cispo_cap .390 and .934; reinforce, which ignores the move, .523 and .886.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.aggregation import AGGREGATES
from common.errors import UserError, at_least, is_number, one_of
from common.kl import KL, kl_estimate
from common.logprobs import mean_tokens, sum_tokens

SURROGATES = ("reinforce", "clip", "cispo", "cispo_cap")
RATIOS = ("token", "sequence", "sequence_mean")
LARGEST_LOG_RATIO = 40.0  # beyond it r would overflow, and a clipped token's gradient would be 0 times infinity: NaN


def cross_entropy(logps_NA: Tensor) -> Tensor:
    """-log p of the target tokens, nats, (N, A): maximum likelihood of the given answers."""
    return -logps_NA


def log_ratio(logps_NA: Tensor, old_logps_NA: Tensor, mask_NA: Tensor, ratio: str) -> Tensor:
    """log r by the chosen ratio, (N, A), at most 40; a sequence ratio stands at every position of its row."""
    one_of("ratio", ratio, RATIOS)
    gap_NA = (logps_NA - old_logps_NA).masked_fill(~mask_NA, 0.0)
    if ratio != "token":
        pooled_N = sum_tokens(gap_NA, mask_NA) if ratio == "sequence" else mean_tokens(gap_NA, mask_NA)
        gap_NA = pooled_N[:, None].expand_as(gap_NA)
    return gap_NA.clamp(max=LARGEST_LOG_RATIO)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual` c also at most -c A where A < 0."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return loss if dual is None else torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)


def cispo(logps: Tensor, ratio: Tensor, advantages: Tensor, low: float | None, high: float) -> Tensor:
    """-sg(clip(r)) A logp: clips the weight instead of the gradient; low None caps from above only."""
    return -ratio.detach().clamp(None if low is None else 1 - low, 1 + high) * advantages * logps


@dataclass(frozen=True)
class Losses:
    """Per-token terms to be aggregated and added, and diagnostics as (sum, count) over scored tokens."""

    terms: dict[str, Tensor]
    stats: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PolicyGradient:
    """A policy-gradient objective with its options; the words are explained at the top of this file."""

    surrogate: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_bonus: float = 0.0  # subtracted: coefficient times the entropy of each token's distribution
    aggregate: str = "token_mean"
    constant: float | None = None  # the length that aggregate=constant divides by; null: the longest possible answer
    kl: KL = field(default_factory=KL)

    def __post_init__(self) -> None:
        one_of("objective.surrogate", self.surrogate, SURROGATES)
        one_of("objective.ratio", self.ratio, RATIOS)
        one_of("objective.aggregate", self.aggregate, AGGREGATES)
        at_least("objective.clip_low", self.clip_low, 0)
        at_least("objective.clip_high", self.clip_high, 0)
        at_least("objective.dual_clip", self.dual_clip, 1, optional=True)
        at_least("objective.constant", self.constant, 1, optional=True)
        if not is_number(self.entropy_bonus):
            raise UserError(f"objective.entropy_bonus={self.entropy_bonus} must be a number.")
        if self.constant is not None and "constant" not in (self.aggregate, self.kl.aggregate):
            raise UserError(
                f"objective.constant has no effect with objective.aggregate={self.aggregate}; "
                "use aggregate=constant or leave it null."
            )
        if self.dual_clip is not None and self.surrogate != "clip":
            raise UserError(
                f"objective.dual_clip has no effect with objective.surrogate={self.surrogate}; "
                "use surrogate=clip or leave it null."
            )

    def __call__(
        self,
        logps_NA: Tensor,
        old_logps_NA: Tensor,
        advantages_NA: Tensor,
        mask_NA: Tensor,
        *,
        importance_NA: Tensor | None = None,
        ref_logps_NA: Tensor | None = None,
        entropy_NA: Tensor | None = None,
    ) -> Losses:
        """Terms "pg", and where configured "kl" and "entropy", each (N, A), already multiplied by its coefficient.

        logps_NA carry the gradient; everything else is a constant except entropy_NA where entropy_bonus > 0.
        importance_NA are the used weights of the sampler mismatch.
        """
        logps_NA = logps_NA.masked_fill(~mask_NA, 0.0)
        old_logps_NA = old_logps_NA.masked_fill(~mask_NA, 0.0)
        ratio_NA = log_ratio(logps_NA, old_logps_NA, mask_NA, self.ratio).exp()
        loss_NA = self._surrogate(logps_NA, ratio_NA, advantages_NA)
        if importance_NA is not None:
            loss_NA = loss_NA * importance_NA
        terms, stats = {"pg": loss_NA}, self._ratio_stats(logps_NA, old_logps_NA, ratio_NA, advantages_NA, mask_NA)
        if ref_logps_NA is not None:
            kl_NA = kl_estimate(logps_NA, ref_logps_NA.masked_fill(~mask_NA, 0.0), self.kl.estimator)
            stats["kl"] = (kl_NA, mask_NA)
            if self.kl.in_loss:
                terms["kl"] = self.kl.beta * kl_NA
        if entropy_NA is not None:
            stats["entropy"] = (entropy_NA, mask_NA)
            if self.entropy_bonus:
                terms["entropy"] = -self.entropy_bonus * entropy_NA
        return Losses(terms, stats)

    def _surrogate(self, logps_NA: Tensor, ratio_NA: Tensor, advantages_NA: Tensor) -> Tensor:
        if self.surrogate == "reinforce":
            return -advantages_NA * logps_NA
        if self.surrogate == "clip":
            return clipped(ratio_NA, advantages_NA, self.clip_low, self.clip_high, self.dual_clip)
        low = self.clip_low if self.surrogate == "cispo" else None
        return cispo(logps_NA, ratio_NA, advantages_NA, low, self.clip_high)

    def _ratio_stats(
        self, logps_NA: Tensor, old_NA: Tensor, ratio_NA: Tensor, advantages_NA: Tensor, mask_NA: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Diagnostics of the ratio. A clip counts only where it is active: the sign of A says which side acts."""
        if self.surrogate == "reinforce":
            return {}
        with torch.no_grad():
            above, below = ratio_NA > 1 + self.clip_high, ratio_NA < 1 - self.clip_low
            high, low = above & (advantages_NA > 0), below & (advantages_NA < 0)
            stats = {
                "clip_frac": high | low,
                "clip_frac_high": high,
                "clip_frac_low": low,
                "ratio_outside": above | below,
                "ratio": ratio_NA,
                "approx_kl": kl_estimate(logps_NA, old_NA, "k3") if self.ratio == "token" else old_NA - logps_NA,
            }
        return {name: (value.float(), mask_NA) for name, value in stats.items()}

    def aggregate_of(self, term: str) -> str:
        """The aggregate of a term: the KL may have its own, everything else has the objective's."""
        return self.kl.aggregate or self.aggregate if term == "kl" else self.aggregate
