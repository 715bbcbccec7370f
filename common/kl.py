"""KL of the policy to a reference, estimated from the tokens that the policy wrote.

With x = ref_logp - logp of a written token (J. Schulman, "Approximating KL divergence", 2020):

| estimator | formula          | in the loss its gradient is that of        | in the reward                  |
|-----------|------------------|--------------------------------------------|--------------------------------|
| k1        | -x               | nothing (expected gradient 0)              | the reverse KL(policy || ref)  |
| k2        | x^2 / 2          | the reverse KL(policy || ref)              | no divergence, biased          |
| k3        | exp(x) - x - 1   | the *forward* KL(ref || policy)            | biased; value unbiased         |

So "k3 in the loss", the common default, pulls towards covering the reference; k2 in the loss or k1 in the reward is
what "minus beta KL(policy || ref)" promises. In the loss each token's KL is descended with its prefix held fixed;
only k1 in the reward is the gradient of the KL of whole answers, which counts what a token does to the later ones.

Against that gradient, at an unrelated reference (unit logits, tests/common/test_enumeration_divergences.py), the bias
|expected - true| / |true| and the cosine are: k1 in the reward 0 and 1; k2 in the loss .605 and .886; k3 in the loss
.765 and .810; k2 in the reward 1.42 and .10; k3 in the reward 1.30 and -.07 (no longer a descent direction).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.aggregation import AGGREGATES
from common.errors import UserError, at_least, one_of

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference), same shape as `logps`; k1 may be negative, k2 and k3 are not."""
    one_of("estimator", estimator, ESTIMATORS)
    x = ref_logps - logps
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.exp() - x - 1


@dataclass(frozen=True)
class KL:
    """How strongly, by which estimate and where the policy is held to its reference. beta 0: not at all."""

    beta: float = 0.0
    estimator: str = "k3"
    placement: str = "loss"  # or "reward": subtracted before advantages are computed, without gradient
    aggregate: str | None = None  # of the loss term; None = the objective's own

    def __post_init__(self) -> None:
        at_least("kl.beta", self.beta, 0)
        one_of("kl.estimator", self.estimator, ESTIMATORS)
        one_of("kl.placement", self.placement, ("loss", "reward"))
        one_of("kl.aggregate", self.aggregate, (None, *AGGREGATES))
        if self.beta and self.estimator == "k1" and self.placement == "loss":
            raise UserError(
                "kl.estimator=k1 with kl.placement=loss has an expected gradient of zero; "
                "use k2 in the loss or k1 in the reward."
            )

    @property
    def in_loss(self) -> bool:
        return self.beta > 0 and self.placement == "loss"

    @property
    def in_reward(self) -> bool:
        return self.beta > 0 and self.placement == "reward"
