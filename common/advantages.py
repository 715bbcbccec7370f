"""From rewards to advantages.

R is the reward of a row, G the rows that are compared with each other (usually samples of one prompt).

| kind     | advantage                             | source                                   |
|----------|---------------------------------------|------------------------------------------|
| group    | (R - mean_G) / (std_G + eps)          | GRPO, arXiv 2402.03300                   |
| centred  | R - mean_G                            | Dr. GRPO, arXiv 2503.20783               |
| rloo     | R - mean of the other G - 1           | RLOO, arXiv 2402.14740                   |
| batch    | (R - mean) / (std + eps), all rows    | REINFORCE with a batch baseline          |
| whiten   | token returns, whitened over tokens   | REINFORCE++, arXiv 2501.03262            |
| none     | R                                     | REINFORCE, Williams 1992                 |

rloo is an unbiased gradient of the expected reward, centred is (G - 1) / G of it. Dividing by the group's std (group)
is no gradient of it: with rewards 0 and 1 and G = 8 a prompt solved 2% or 98% of the time weighs 1.387 times one solved
half the time; with graded rewards the direction turns (cosine .979 at G = 2). Proved by enumeration in
tests/common/test_enumeration.py. Statistics are over all ranks: rows are global.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError, at_least, one_of

KINDS = ("group", "centred", "rloo", "batch", "whiten", "none")
UNSCALED = ("centred", "rloo", "none")


def _group_sums(values_N: Tensor, index_N: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values_N.dtype, device=values_N.device).index_add_(0, index_N, values_N)


def signal(rewards_N: Tensor, groups_N: Tensor, weight_N: Tensor) -> Tensor:
    """Bool (N,): True where the row's group holds different rewards, i.e. has something to learn from.

    Compares max with min: the float32 std of equal rewards can leave a residue.
    """
    _, index = groups_N.unique(return_inverse=True)
    counted = weight_N > 0
    size = int(index.max()) + 1 if len(index) else 0
    high = torch.full((size,), -torch.inf, device=rewards_N.device).scatter_reduce_(
        0, index, rewards_N.float().masked_fill(~counted, -torch.inf), "amax"
    )
    low = torch.full((size,), torch.inf, device=rewards_N.device).scatter_reduce_(
        0, index, rewards_N.float().masked_fill(~counted, torch.inf), "amin"
    )
    return (high > low)[index] & counted


def refuse_non_finite(values_N: Tensor, row_ids: list[int], what: str = "reward") -> None:
    """Raise UserError naming the rows whose reward (or `what`) is NaN or infinite."""
    bad = (~values_N.isfinite()).nonzero().flatten().tolist()
    if bad:
        named = ", ".join(str(row_ids[i]) for i in bad[:10])
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise UserError(f"the {what} of row {named}{more} is not finite; fix what computes it or drop these rows.")


def group_relative(
    rewards_N: Tensor, groups_N: Tensor, weight_N: Tensor, kind: str, *, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """group, centred or rloo advantages (N,), float32. Groups of equal rewards, or of one row, are exactly 0."""
    _, index = groups_N.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    rewards, weight = rewards_N.double(), (weight_N > 0).double()
    count_G = _group_sums(weight, index, groups)
    centred = rewards - (_group_sums(rewards * weight, index, groups) / count_G.clamp(min=1))[index]
    if kind == "group":
        variance_G = _group_sums(centred.square() * weight, index, groups) / (count_G - ddof).clamp(min=1)
        centred = centred / (variance_G.sqrt() + eps)[index]
    elif kind == "rloo":
        centred = centred * (count_G / (count_G - 1).clamp(min=1))[index]  # R - mean of others = (R - mean) G / (G - 1)
    return centred.float().masked_fill(~signal(rewards_N, groups_N, weight_N), 0.0)


def whiten(values: Tensor, counted: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(x - mean) / (std + eps) over the counted entries; 0 elsewhere, and everywhere if all counted are equal."""
    picked = values[counted].double()
    if picked.numel() < 2 or bool(picked.max() == picked.min()):
        return torch.zeros_like(values, dtype=torch.float32)
    white = (values.double() - picked.mean()) / (picked.std(correction=ddof) + eps)
    return white.float().masked_fill(~counted, 0.0)


def reward_to_go(rewards_NA: Tensor, mask_NA: Tensor, gamma: float = 1.0) -> Tensor:
    """(N, A): the sum of this token's and the later tokens' rewards, discounted by gamma a token."""
    returns, running = torch.zeros_like(rewards_NA), torch.zeros_like(rewards_NA[:, 0])
    for t in range(rewards_NA.shape[1] - 1, -1, -1):
        running = rewards_NA[:, t].masked_fill(~mask_NA[:, t], 0.0) + gamma * running
        returns[:, t] = running
    return returns.masked_fill(~mask_NA, 0.0)


@dataclass(frozen=True)
class Advantage:
    """Which baseline and scale turn rewards into advantages; `kind` is explained at the top of this file."""

    kind: str = "group"
    ddof: int = 1  # TRL and the reference use 1; 0 exists elsewhere
    eps: float = 1e-6  # TRL uses 1e-4

    def __post_init__(self) -> None:
        one_of("advantage.kind", self.kind, KINDS)
        one_of("advantage.ddof", self.ddof, (0, 1))
        at_least("advantage.eps", self.eps, 0)
        if self.kind in UNSCALED and self.ddof != 1:
            raise UserError(
                f"advantage.ddof={self.ddof} has no effect with advantage.kind={self.kind}, "
                "which divides by no std; leave it at 1."
            )

    def __call__(
        self,
        rewards_N: Tensor,
        groups_N: Tensor,
        mask_NA: Tensor,
        weight_N: Tensor,
        penalty_NA: Tensor | None = None,
    ) -> Tensor:
        """(N, A) advantages of every scored token, float32, without gradient.

        `penalty_NA` (beta times a KL estimate) is subtracted from the reward: summed over the answer, or, for `whiten`,
        at its own token, so that a token answers for the penalties that follow it (REINFORCE++).
        """
        if self.kind == "whiten":
            return self._whitened_returns(rewards_N, mask_NA, weight_N, penalty_NA)
        if penalty_NA is not None:
            rewards_N = rewards_N - penalty_NA.masked_fill(~mask_NA, 0.0).sum(-1)
        if self.kind == "none":
            advantages_N = rewards_N.float() * (weight_N > 0)
        elif self.kind == "batch":
            advantages_N = whiten(rewards_N, weight_N > 0, ddof=self.ddof, eps=self.eps)
        else:
            advantages_N = group_relative(rewards_N, groups_N, weight_N, self.kind, ddof=self.ddof, eps=self.eps)
        return advantages_N[:, None] * mask_NA

    def _whitened_returns(
        self, rewards_N: Tensor, mask_NA: Tensor, weight_N: Tensor, penalty_NA: Tensor | None
    ) -> Tensor:
        last = mask_NA.sum(-1) - 1  # the outcome is paid at the last scored token
        rewards_NA = torch.zeros(mask_NA.shape, device=mask_NA.device)
        rows = (last >= 0).nonzero().flatten()
        rewards_NA[rows, last[rows]] = rewards_N[rows].float()
        if penalty_NA is not None:
            rewards_NA = rewards_NA - penalty_NA.masked_fill(~mask_NA, 0.0)
        counted = mask_NA & (weight_N > 0)[:, None]
        return whiten(reward_to_go(rewards_NA, mask_NA), counted, ddof=self.ddof, eps=self.eps)
