"""Wrapping a module for several ranks: DDP or FSDP2, and the two things a policy does with what it wrapped.

Both average gradients over ranks, and both make every rank call the same number of forwards. A frozen part may be
left out of the sharding (`ignored`): it can then be called by itself, outside the wrapped module's forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from common.distributed import World


def wrap(
    module: nn.Module, world: World, *, blocks: Iterable[nn.Module] = (), ignored: Iterable[nn.Parameter] = ()
) -> nn.Module:
    """`module` as `world.mode` asks. FSDP gathers `blocks` one at a time; `ignored` stay whole on every rank."""
    if world.mode == "single":
        return module
    if world.mode == "ddp":
        devices = [world.device] if world.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    mesh, whole = init_device_mesh(world.device.type, (world.size,)), set(ignored)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh, ignored_params=whole)


def accumulate(wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Holds a micro-batch's forward *and* backward: DDP decides in the forward whether the backward communicates."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        return wrapped.no_sync()
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(last)
    return nullcontext()


def inner(wrapped: nn.Module) -> nn.Module:
    """What to call without gradient: DDP's own forward only adds communication, FSDP's gathers the shards."""
    return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped


def full(parameter: Tensor) -> Tensor:
    """The whole tensor on the CPU, also where it is sharded. A collective call under FSDP."""
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """The inverse of `full`."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
