"""TinyGPT behind the `Policy` door of `common/interfaces.py`: sampling, scoring, wrapping for several ranks, saving."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from common import parallel
from common.checkpoint import read_tensors, write_json, write_tensors
from common.distributed import World
from common.errors import UserError
from common.interfaces import Sample
from common.sampling import choose
from rlsim.tiny_gpt import Shape, TinyGPT

WEIGHTS, SIZES = "model.safetensors", "model.json"


class TinyGPTPolicy:
    """A TinyGPT that writes and scores answers. `end_id` is the token that ends one; None: every position counts."""

    def __init__(self, net: TinyGPT, *, end_id: int | None = None, world: World | None = None) -> None:
        self.world, self.end_id, self.shape = world or World(), end_id, net.shape
        self.answer_len, self.device = net.shape.answer_len, self.world.device
        self.wrapped = parallel.wrap(net.to(self.device), self.world, blocks=net.blocks)
        self._plain: TinyGPT = parallel.inner(self.wrapped)  # type: ignore[assignment]
        if isinstance(self._plain, FSDPModule):
            register_fsdp_forward_method(self._plain, "write")
            for block in self._plain.blocks:
                register_fsdp_forward_method(block, "step")

    def sample(
        self, prompts: Tensor, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        """Write `group` answers to each of (B, P) prompts."""

        def pick(logits_NV: Tensor, position: int) -> tuple[Tensor, Tensor]:
            return choose(logits_NV, temperature, None if uniforms_NA is None else uniforms_NA[:, position])

        # A sharded block gathers its weights at every step, so all ranks must take equally many.
        stop_early = not isinstance(self._plain, FSDPModule)
        answers_NA, logps_NA = self._plain.write(prompts, group, pick, self.end_id, stop_early=stop_early)
        return Sample(answers_NA, logps_NA, self._up_to_end(answers_NA))

    def _up_to_end(self, answers_NA: Tensor) -> Tensor:
        if self.end_id is None:
            return torch.ones_like(answers_NA, dtype=torch.bool)
        ends_NA = (answers_NA == self.end_id).long()
        return ends_NA.cumsum(1) - ends_NA == 0

    def answer_logits(self, prompts: Tensor, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        """(N, A, V) logits that predict each token of the given answers."""
        module = self.wrapped if torch.is_grad_enabled() else self._plain
        return module(prompts, answers_NA, group)

    def frozen(self, name: str) -> TinyGPTPolicy:
        """A copy of the weights as they are now ("start"), whole on every rank, without gradient. A collective call."""
        if name != "start":
            raise UserError(f"a TinyGPT has no stored weights named {name}; its only frozen copy is start.")
        copy = TinyGPT(self.shape)
        copy.load_state_dict(self.state())
        return TinyGPTPolicy(copy, end_id=self.end_id, world=World(device=self.device)).freeze()

    def freeze(self, beginnings_RK: Tensor | None = None) -> TinyGPTPolicy:
        """Itself, with nothing left to train; what these beginnings of prompts give is then computed once."""
        self._plain.requires_grad_(False)
        if beginnings_RK is not None:
            self._plain.remember(beginnings_RK.to(self.device))
        return self

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Holds a micro-batch's forward and backward; the last one synchronises gradients over ranks."""
        return parallel.accumulate(self.wrapped, last)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters, unless frozen."""
        return [(name, p) for name, p in self._plain.named_parameters() if p.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """All weights, whole and on the CPU. A collective call."""
        return {name: parallel.full(p) for name, p in self._plain.named_parameters()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; UserError where the weights are another model's."""
        own = dict(self._plain.named_parameters())
        if own.keys() != state.keys() or any(own[name].shape != value.shape for name, value in state.items()):
            size = f"{self.shape.layers} x {self.shape.width}"
            raise UserError(f"these weights are not a {size} TinyGPT's; check model.layers and model.width.")
        for name, parameter in own.items():
            parallel.assign(parameter, state[name])

    def save(self, directory: Path) -> None:
        """model.safetensors and model.json (the sizes). A collective call; rank 0 writes."""
        state = self.state()
        if self.world.main:
            write_tensors(directory / WEIGHTS, state)
            write_json(directory / SIZES, {**asdict(self.shape), "end_id": self.end_id})


def load_policy(directory: Path, *, end_id: int | None, world: World | None = None) -> TinyGPTPolicy:
    """A policy from what `save` wrote."""
    sizes = json.loads((directory / SIZES).read_text(encoding="utf-8"))
    sizes.pop("end_id")
    net = TinyGPT(Shape(**sizes))
    net.load_state_dict(read_tensors(directory / WEIGHTS))
    return TinyGPTPolicy(net, end_id=end_id, world=world)
