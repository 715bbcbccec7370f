"""Direct preference optimisation on pairs that the verifier makes (arXiv 2305.18290).

loss = -log sigmoid(beta * ((logp_chosen - ref_chosen) - (logp_rejected - ref_rejected))), log-probs summed over the
answer. At policy = reference the loss is log 2. It optimises the KL-regularised reward of a Bradley-Terry preference
model, from fixed pairs: as the policy moves away from the pairs' sampler, the gradient is off-policy and is not
corrected. On the policy's own right and wrong answers its first step is beta / 2 / (p (1 - p)) times the gradient of p,
the chance of being right (tests/common/test_enumeration_divergences.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from common.errors import UserError, is_number


@dataclass(frozen=True)
class DPO:
    """beta: how strongly the policy clings to its reference; label_smoothing: the share of pairs assumed wrong."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.beta) or not self.beta > 0:
            raise UserError(f"objective.beta={self.beta} must be positive.")
        if not is_number(self.label_smoothing) or not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"objective.label_smoothing={self.label_smoothing} must lie in [0, 0.5).")

    def __call__(self, logps_N: Tensor, ref_logps_N: Tensor) -> tuple[Tensor, Tensor]:
        """Rows alternate chosen, rejected (N = 2 pairs). The loss and the reward margin of each pair, (N / 2,)."""
        reward_P2 = (self.beta * (logps_N - ref_logps_N)).view(-1, 2)
        margin_P = reward_P2[:, 0] - reward_P2[:, 1]
        smooth = self.label_smoothing
        return -(1 - smooth) * F.logsigmoid(margin_P) - smooth * F.logsigmoid(-margin_P), margin_P.detach()
