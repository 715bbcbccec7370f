"""How one token is chosen from logits: greedily, or by inverting the distribution function at a given uniform number.

The uniforms come from (seed, purpose, step) (`common/seeding.py`), one a token, so a row's answer depends on its own
numbers only: not on the rows beside it, nor on how many ranks share the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.logprobs import log_probs


def choose(logits_NV: Tensor, temperature: float = 1.0, uniforms_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens (N,) and their log-probs (N,) under softmax(logits / temperature). `uniforms_N` None: the likeliest.

    A token of probability 0 (a logit of -inf, or one that underflows) is never written.
    """
    logps_NV = log_probs(logits_NV, temperature)
    tokens_N = logits_NV.argmax(-1) if uniforms_N is None else invert_cdf(logps_NV, uniforms_N)
    return tokens_N, logps_NV.gather(-1, tokens_N[:, None])[:, 0]


def invert_cdf(logps_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """(N,) the first token whose cumulative probability, in float64 and of their total, exceeds the row's number."""
    cdf_NV = logps_NV.double().exp().cumsum(-1)
    total_N1 = cdf_NV[:, -1:]
    wanted_N1 = uniforms_N.to(cdf_NV.device, torch.float64)[:, None] * total_N1
    last_possible_N = (cdf_NV < total_N1).sum(-1)  # u * total may round up to the total
    return torch.minimum((cdf_NV <= wanted_N1).sum(-1), last_possible_N)
