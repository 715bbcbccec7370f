"""From logits to log-probabilities, always in float32 or wider, whatever the model computes in.

logits_NAV predict the answer token at each of A positions; -inf marks a token that the policy may not write.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probs(logits_NAV: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature): (..., V), float32 or wider. Illegal tokens (-inf) stay -inf."""
    wide = logits_NAV.to(torch.promote_types(logits_NAV.dtype, torch.float32))
    return (wide / temperature if temperature != 1.0 else wide).log_softmax(-1)


def gather_tokens(logps_NAV: Tensor, tokens_NA: Tensor) -> Tensor:
    """The log-prob of each written token: (N, A)."""
    return logps_NAV.gather(-1, tokens_NA[..., None]).squeeze(-1)


def token_logps(logits_NAV: Tensor, tokens_NA: Tensor, temperature: float = 1.0) -> Tensor:
    """(N, A) log-probs of the written tokens under softmax(logits / temperature)."""
    return gather_tokens(log_probs(logits_NAV, temperature), tokens_NA)


def entropy(logps_NAV: Tensor) -> Tensor:
    """-sum_v p log p in nats, (N, A); a token of probability 0 contributes 0, in value and in gradient."""
    possible = logps_NAV > -torch.inf
    safe = logps_NAV.masked_fill(~possible, 0.0)
    return -(safe.exp() * safe * possible).sum(-1)


def sum_tokens(values_NA: Tensor, mask_NA: Tensor) -> Tensor:
    """Sum over the scored positions of each row: (N,). Unscored positions may hold anything, also -inf or NaN."""
    return values_NA.masked_fill(~mask_NA, 0.0).sum(-1)


def mean_tokens(values_NA: Tensor, mask_NA: Tensor) -> Tensor:
    """Mean over the scored positions of each row: (N,); 0 for a row with none."""
    return sum_tokens(values_NA, mask_NA) / mask_NA.sum(-1).clamp(min=1)
