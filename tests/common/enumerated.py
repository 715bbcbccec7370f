"""A policy small enough to sum over all its answers, and how far an expected gradient is from a true one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.logprobs import token_logps


@dataclass(frozen=True)
class Enumerated:
    """An autoregressive policy whose logits are a table, one row a prefix, with all its answers and their masks.

    R rows = all distinct answers, K prefixes. With `end` (a token id) an answer stops after it, so that lengths differ.
    """

    vocab: int
    length: int
    end: int | None = None

    @property
    def answers_RA(self) -> Tensor:
        every = torch.cartesian_prod(*[torch.arange(self.vocab)] * self.length).view(-1, self.length)
        if self.end is None:
            return every
        after_end = ((every == self.end).cumsum(-1) - (every == self.end).long()) > 0
        return every.masked_fill(after_end, 0).unique(dim=0)

    @property
    def mask_RA(self) -> Tensor:
        ends = (self.answers_RA == -1 if self.end is None else self.answers_RA == self.end).long()
        return ends.cumsum(-1) - ends == 0

    @property
    def prefix_RA(self) -> Tensor:
        """The row of the table that each position of each answer is written from."""
        place = torch.zeros(len(self.answers_RA), dtype=torch.long)
        columns, first = [], 0
        for t in range(self.length):
            columns.append(first + place)
            first += self.vocab**t
            place = place * self.vocab + self.answers_RA[:, t]
        return torch.stack(columns, -1)

    def table(self, seed: int, scale: float = 1.0) -> Tensor:
        """Parameters (K, V), float64, with gradient."""
        prefixes = sum(self.vocab**t for t in range(self.length))
        noise = torch.randn(prefixes, self.vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (scale * noise).requires_grad_()

    def rewards(self, seed: int = 7) -> Tensor:
        """A real-valued reward of every answer, (R,)."""
        return torch.rand(len(self.answers_RA), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def logits(self, table_KV: Tensor) -> Tensor:
        return table_KV[self.prefix_RA]

    def logps(self, table_KV: Tensor) -> Tensor:
        """(R, A) log-probs of the written tokens."""
        return token_logps(self.logits(table_KV), self.answers_RA)

    def answer_logps(self, table_KV: Tensor) -> Tensor:
        """(R,) log-probs of the whole answers."""
        return (self.logps(table_KV) * self.mask_RA).sum(-1)

    def probs(self, table_KV: Tensor) -> Tensor:
        """(R,) probabilities of the answers; they sum to one."""
        return self.answer_logps(table_KV).exp()

    def groups(self, size: int) -> Tensor:
        """(M, size): every ordered group of answers."""
        return torch.cartesian_prod(*[torch.arange(len(self.answers_RA))] * size).view(-1, size)


def gradient(value: Tensor, table: Tensor) -> Tensor:
    return torch.autograd.grad(value, table, retain_graph=True)[0]


def bias(found: Tensor, true: Tensor) -> float:
    """|found - true| / |true|."""
    return float((found - true).norm() / true.norm())


def cosine(found: Tensor, true: Tensor) -> float:
    """1 where the directions agree; forgives the scale, which a learning rate can undo."""
    return float((found * true).sum() / (found.norm() * true.norm()))
