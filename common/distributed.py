"""The ranks of a run. A single process is a world of one, so that no other file asks whether it is distributed.

Experience is global (every rank holds every row) and work is sharded, so the same rows give the same update on any
number of ranks. Communication is small: metrics, sampled answers, and the gradients that DDP or FSDP2 reduce.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError, one_of

MODES = ("auto", "single", "ddp", "fsdp")


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mode: str = "single"  # single | ddp | fsdp: how a policy's module is wrapped

    @property
    def main(self) -> bool:
        """True on the one rank that writes and reports."""
        return self.rank == 0

    def shard(self, n: int) -> tuple[Tensor, Tensor]:
        """This rank's positions among n, and their weights: padded so that all ranks hold equally many.

        Padding repeats the last position with weight 0. Positions are contiguous, so that `gather` restores their
        order.
        """
        per_rank = -(-n // self.size)
        positions = torch.arange(self.rank * per_rank, (self.rank + 1) * per_rank)
        return positions.clamp(max=n - 1), (positions < n).float()

    def gather(self, local: Tensor, n: int) -> Tensor:
        """Concatenate what each rank computed for its `shard(n)`, padding cut: (n * k, ...) in the original order.

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


def open_world(mode: str = "auto", backend: str | None = None) -> World:
    """This process's world, with one process group per process however many jobs it runs.

    mode "auto" is ddp under torchrun with several processes, else single. backend None: nccl on GPUs, gloo on CPUs.
    Raises UserError where the mode and the way the program was started do not fit.
    """
    one_of("distributed", mode, MODES)
    rank, size, local = environment()
    torchrun = "RANK" in os.environ
    if mode == "single" and size > 1:
        raise UserError(
            f"distributed=single under torchrun with {size} processes would run {size} times; use distributed=auto."
        )
    if mode in ("ddp", "fsdp") and not torchrun:
        raise UserError(f"distributed={mode} needs torchrun: torchrun --nproc_per_node=2 -m APP ... distributed={mode}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if size == 1 and mode != "fsdp":
        return World(device=device)
    if not dist.is_initialized():
        chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(chosen, device_id=device if chosen == "nccl" else None)
    return World(rank, size, device, "ddp" if mode == "auto" else mode)


def close_world() -> None:
    """Leave the process group, if there is one: once, at the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
