"""The ranks of a run. A single process is a world of one, so that no other file asks whether it is distributed.

Experience is global (every rank holds every row) and work is sharded, so the same rows give the same update on any
number of ranks. Communication is small: metrics, sampled answers, and the gradients that DDP or FSDP2 reduce.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        """True on the one rank that writes and reports."""
        return self.rank == 0

    def shard(self, n: int) -> tuple[Tensor, Tensor]:
        """This rank's positions among n, and their weights: padded so that all ranks hold equally many.

        Padding repeats the last position with weight 0. Positions are contiguous, so that `gather` restores their order.
        """
        per_rank = -(-n // self.size)
        positions = torch.arange(self.rank * per_rank, (self.rank + 1) * per_rank)
        return positions.clamp(max=n - 1), (positions < n).float()

    def gather(self, local: Tensor, n: int) -> Tensor:
        """Concatenate what each rank computed for its `shard(n)` and cut the padding: (n * k, ...) in the original order.

        `local` holds k rows a position (k = len(local) / len(shard)).
        """
        if self.size == 1:
            return local
        per_rank = -(-n // self.size)
        rows = len(local) // per_rank
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)[: n * rows]

    def gather_objects(self, local: Any) -> list[Any]:
        """One picklable object a rank, in rank order, on every rank."""
        if self.size == 1:
            return [local]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, local)
        return parts

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over ranks."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def pool(self, metrics: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Sums and counts over all ranks; a name may be missing on some of them."""
        if self.size == 1:
            return metrics
        names = sorted({name for part in self.gather_objects(list(metrics)) for name in part})
        flat = self.sum([value for name in names for value in metrics.get(name, (0.0, 0.0))])
        return {name: (flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(names)}

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
