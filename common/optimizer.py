"""The optimizer: built from a configuration, its state saved by parameter name, whole on the CPU whatever shards it.

States of other programs are accepted too: a plain `torch.optim` state dict, whose entries are matched to the parameters
by
position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common.errors import UserError, at_least, is_number, one_of
from common.schedule import SCHEDULES

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Optim:
    """How an update is made. Rows are answers; an update is one optimizer step."""

    lr: float
    rows_per_update: int
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 0  # updates
    schedule: str = "constant"
    clip_norm: float | None = 1.0  # of the whole gradient; null = never clipped
    micro_batch: int | None = None  # rows a forward on one rank; null = all of the rank's share
    epochs: float | None = None  # passes over finite data; null = bounded by steps alone

    def __post_init__(self) -> None:
        one_of("method.optim.optimizer", self.optimizer, OPTIMIZERS)
        one_of("method.optim.schedule", self.schedule, SCHEDULES)
        for name in ("lr", "eps", "weight_decay"):
            at_least(f"method.optim.{name}", getattr(self, name), 0)
        for name, least in (("warmup", 0), ("rows_per_update", 1)):
            at_least(f"method.optim.{name}", getattr(self, name), least, whole=True)
        for name in ("clip_norm", "epochs"):
            at_least(f"method.optim.{name}", getattr(self, name), 0, optional=True)
        at_least("method.optim.micro_batch", self.micro_batch, 1, optional=True, whole=True)
        betas = list(self.betas) if isinstance(self.betas, Sequence) else [self.betas]
        if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
            raise UserError(f"method.optim.betas={self.betas} must be two numbers in [0, 1).")

    def build(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        """The optimizer over the given parameters; UserError where there is nothing to train."""
        if not parameters:
            raise UserError("the policy has no trainable parameters; check model.adapter and the LoRA module pattern.")
        return OPTIMIZERS[self.optimizer](
            [parameter for _, parameter in parameters],
            lr=self.lr,
            betas=tuple(self.betas),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: NamedParameters) -> dict[str, dict[str, Any]]:
    """Per parameter name its moments and step, whole, on the CPU. A collective call where parameters are sharded."""
    return {
        name: {key: _whole(value) for key, value in optimizer.state.get(parameter, {}).items()}
        for name, parameter in parameters
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: NamedParameters, state: Mapping[str, Any], source: str
) -> None:
    """Continue from a state saved by name (ours) or by position (a plain torch state dict); UserError if unfit."""
    if set(state) == {"state", "param_groups"}:
        if len(state["param_groups"]) != 1 or len(state["param_groups"][0]["params"]) != len(parameters):
            raise UserError(
                f"{source}: an optimizer of {len(state['state'])} parameters cannot continue "
                f"{len(parameters)}; it belongs to another adapter."
            )
        order = state["param_groups"][0]["params"]
        state = {name: state["state"].get(i, {}) for i, (name, _) in zip(order, parameters, strict=True)}
    missing = {name for name, _ in parameters} ^ set(state)
    if missing:
        raise UserError(
            f"{source}: the optimizer's parameters are not the policy's ({len(missing)} differ, "
            f"e.g. {sorted(missing)[0]}); it belongs to another adapter."
        )
    for name, parameter in parameters:
        optimizer.state[parameter] = {
            key: _placed(value, parameter, f"{source}: {name}") for key, value in state[name].items()
        }
        if not state[name]:
            del optimizer.state[parameter]


def _placed(value: Any, parameter: nn.Parameter, where: str) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value.clone() if isinstance(value, Tensor) else value
    if value.shape != parameter.shape:
        raise UserError(
            f"{where}: the optimizer's moments have shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}."
        )
    if isinstance(parameter, DTensor):
        return distribute_tensor(
            value.to(parameter.device, parameter.dtype), parameter.device_mesh, parameter.placements
        )
    return value.to(parameter.device, parameter.dtype, copy=True)


def clip_gradients(parameters: NamedParameters, limit: float | None) -> float:
    """The norm of the whole gradient (over all shards) before clipping it to `limit`."""
    gradients = [parameter.grad for _, parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if limit is not None and bool(norm.isfinite()):
        torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in parameters], limit, norm)
    return float(norm)
