"""One denominator: how per-token losses of an update become one number.

The weights are computed from masks and row weights over *all* rows of an update (all micro-batches, all ranks) before
any forward, so that loss = sum(loss_NA * token_weights) adds up to the same whatever way the rows are split.

| aggregate     | sum over tokens of            | used by                                   |
|---------------|-------------------------------|-------------------------------------------|
| token_mean    | loss / scored tokens          | DAPO (arXiv 2503.14476), the simulator    |
| sequence_mean | loss / own length / rows      | GRPO (arXiv 2402.03300), GSPO             |
| sequence_sum  | loss / rows                   | REINFORCE on whole answers, DPO           |
| constant      | loss / (rows * constant)      | Dr. GRPO (arXiv 2503.20783)               |

token_mean and constant weigh long answers by their length, sequence_mean does not: with length-normalised rows a long
wrong answer is punished less a token, which is GRPO's length bias. Over an endless batch the other three only scale the
gradient of the expected reward; sequence_mean turns it (cosine .956 with a baseline, .389 without, answers of 1 to 3
tokens: tests/common/test_enumeration.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import one_of

AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def token_weights(
    mask_NA: Tensor, weight_N: Tensor, aggregate: str = "token_mean", constant: float | None = None
) -> Tensor:
    """(N, A) float32 weights of each token's loss; rows of weight 0 and unscored tokens get 0.

    `constant` is the fixed length of the "constant" aggregate (None: A, the longest possible answer). Rows without a
    scored token count in no denominator. All zeros where nothing is scored.
    """
    one_of("aggregate", aggregate, AGGREGATES)
    weighted_NA = mask_NA.float() * weight_N[:, None]
    length_N = mask_NA.sum(-1)
    rows = (weight_N * (length_N > 0)).sum()
    if aggregate == "token_mean":
        total = weighted_NA.sum()
    elif aggregate == "sequence_mean":
        weighted_NA, total = weighted_NA / length_N.clamp(min=1)[:, None], rows
    elif aggregate == "sequence_sum":
        total = rows
    else:
        total = rows * (mask_NA.shape[1] if constant is None else constant)
    return torch.where(total > 0, weighted_NA / total, torch.zeros_like(weighted_NA))
