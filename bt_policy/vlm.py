"""VLMPolicy: the `Policy` of `common/interfaces.py` on Qwen3.5 with LoRA.

Scored rows are padded on the right and their logits gathered at the answer's positions only. Sampling keeps a key-value
cache; there prompts are padded on the left, because a gated delta net carries one running state that padding behind a
prompt would change. Several adapters live on one frozen base: `frozen(name)` answers with another of them, and no
parameter's `requires_grad`, gradient or value is touched by the switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import DynamicCache

from bt_policy import adapters
from bt_policy.encoding import Encoded, Encoder, Prompts
from bt_policy.scorer import Scorer, Vision
from common import parallel
from common.distributed import World
from common.errors import UserError
from common.interfaces import Sample
from common.sampling import choose

LIVE = "default"  # the adapter that is trained
BASE = "base"  # no adapter at all
START = "start"  # a frozen copy of the live one


class VLMPolicy:
    """A vision-language model that reads a frame and a prompt and writes a behaviour code."""

    def __init__(
        self,
        model: Any,
        encoder: Encoder,
        levels: Sequence[int],
        *,
        world: World | None = None,
        autocast: torch.dtype | None = None,
        checkpointing: bool = False,
        aliases: Mapping[str, str] | None = None,
        vision_cache: int = 1 << 30,
        sample_rows: int = 256,
    ) -> None:
        """`model` is a PeftModel with an adapter "default"; its other adapters are what `frozen` may name.

        levels: how many digits are legal at each position of a code.  aliases: further names for adapters.
        autocast: compute type of the forward passes (None: the weights' own).  sample_rows: prompts per sampling pass.
        """
        self.world, self.encoder, self.levels = world or World(), encoder, list(levels)
        self.answer_len, self.device, self.sample_rows = len(self.levels), self.world.device, sample_rows
        self._autocast = lambda: torch.autocast(self.device.type, autocast) if autocast else nullcontext()
        self._aliases = dict(aliases or {})
        adapters.freeze_all_but(model, LIVE)
        if checkpointing:
            base = model.get_base_model()  # the name of the method changes with transformers 6
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.scorer = Scorer(model).to(self.device)
        self.wrapped = parallel.wrap(
            self.scorer,
            self.world,
            blocks=list(self.scorer.base.model.language_model.layers),
            ignored=list(self.scorer.base.model.visual.parameters()),
        )
        self._plain = parallel.inner(self.wrapped)
        readers = 4 if self.device.type == "cuda" else 0
        self.vision = Vision(self.scorer.base.model.visual, encoder, self._autocast, vision_cache, readers)
        self._layers = [m for m in self.scorer.modules() if isinstance(m, BaseTunerLayer)]
        self._trainable = {name for name, p in self.scorer.named_parameters() if p.requires_grad}
        self._legal_AV: Tensor | None = None
        self._probe: tuple[Prompts, Tensor] | None = None  # a row that `save` may ask about
        self.assert_trainable()

    # -- scoring ---------------------------------------------------------------------------------------------------

    def answer_logits(self, prompts: Prompts, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        """(N, A, V) logits predicting each answer token; where A is `answer_len` + 1, `<|im_end|>` is scored too."""
        self._train(torch.is_grad_enabled())
        self._probe = (prompts[torch.arange(1)], answers_NA[:1])
        encoded, features = self._prepare(prompts, group)
        inputs, keep_NA = self.encoder.pad(encoded, "right").with_answers(answers_NA.cpu())
        module = self.wrapped if torch.is_grad_enabled() else self._plain
        with self._autocast():
            logits_NAV = module(*(tensor.to(self.device) for tensor in (*inputs, keep_NA)), features=features)
        legal_N = prompts.legal_B.repeat_interleave(group).to(self.device)
        return self._masked(logits_NAV, legal_N, slice(0, answers_NA.shape[1]))

    def _prepare(self, prompts: Prompts, group: int) -> tuple[list[Encoded], tuple[Tensor, ...]]:
        encoded, features = [], []
        self.vision.read_ahead(prompts.frames)
        for frame, name, memory in zip(prompts.frames, prompts.names, prompts.memories, strict=True):
            made, grid = self.vision(frame)
            encoded += [self.encoder.encode(name, memory, grid)] * group
            features += [made.to(self.device)] * group
        return encoded, tuple(features)

    def _masked(self, logits_NAV: Tensor, legal_N: Tensor, positions: slice) -> Tensor:
        """-inf where a row that was sampled under the mask could not have written the token."""
        if not legal_N.any():
            return logits_NAV
        if self._legal_AV is None:
            self._legal_AV = torch.zeros(
                self.answer_len + 1, logits_NAV.shape[-1], dtype=torch.bool, device=self.device
            )
            for position, level in enumerate(self.levels):
                self._legal_AV[position, self.encoder.digit_ids[:level]] = True
            self._legal_AV[self.answer_len, self.encoder.end_id] = True
        illegal_NAV = legal_N[:, None, None] & ~self._legal_AV[positions]
        return logits_NAV.masked_fill(illegal_NAV, float("-inf"))

    # -- sampling --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self, prompts: Prompts, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        """Write `group` codes to each prompt, in legal digits only: a free policy soon writes `<|image_pad|>`."""
        self._train(False)
        parts = []
        for start in range(0, len(prompts), self.sample_rows):
            some = torch.arange(start, min(start + self.sample_rows, len(prompts)))
            rows = None if uniforms_NA is None else uniforms_NA[start * group : (start + len(some)) * group]
            with self._autocast():
                parts.append(self._sample(prompts[some], group, temperature, rows))
        answers_NA, logps_NA = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        return Sample(answers_NA, logps_NA, torch.ones_like(answers_NA, dtype=torch.bool))

    def _sample(
        self, prompts: Prompts, group: int, temperature: float, uniforms_NA: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        first_D, which_B = prompts.distinct()  # episodes of one start meet the same prompt: it is read once
        encoded, features = self._prepare(prompts[first_D], 1)
        batch = self.encoder.pad(encoded, "left")
        cache = DynamicCache(config=self.scorer.base.config.text_config)
        last_B1 = torch.full((len(encoded), 1), batch.ids_BP.shape[1] - 1, device=self.device)
        inputs = (tensor.to(self.device) for tensor in (batch.ids_BP, batch.mask_BP, batch.positions_3BP))
        logits_NV = self._plain(*inputs, last_B1, features=features, cache=cache)[:, 0]
        rows = which_B.to(self.device).repeat_interleave(group)
        if len(rows) > len(encoded):
            cache.reorder_cache(rows)
        logits_NV, mask_NT = logits_NV[rows], batch.mask_BP.to(self.device)[rows]
        next_N, zero_N1 = (
            batch.next_B.to(self.device)[rows],
            torch.zeros(len(rows), 1, dtype=torch.long, device=self.device),
        )
        everywhere = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        answers, logps = [], []
        for position in range(self.answer_len):
            legal_NV = self._masked(logits_NV[:, None].float(), everywhere, slice(position, position + 1))[:, 0]
            tokens_N, logps_N = choose(legal_NV, temperature, None if uniforms_NA is None else uniforms_NA[:, position])
            answers.append(tokens_N)
            logps.append(logps_N)
            if position + 1 == self.answer_len:
                break
            mask_NT = torch.cat([mask_NT, torch.ones_like(mask_NT[:, :1])], 1)
            positions_3N1 = (next_N + position)[None, :, None].expand(3, -1, 1)
            logits_NV = self._plain(tokens_N[:, None], mask_NT, positions_3N1, zero_N1, cache=cache)[:, 0]
        return torch.stack(answers, 1), torch.stack(logps, 1)

    # -- adapters --------------------------------------------------------------------------------------------------

    def frozen(self, name: str) -> FrozenAdapter:
        """A policy without gradient: "start" (a copy of the live adapter as it is now), "base", or a loaded adapter."""
        name = self._aliases.get(name, name)
        if name == START:
            adapters.copy(self.scorer.peft, LIVE, START)
        elif name != BASE and name not in self.scorer.peft.peft_config:
            known = sorted({BASE, START, *self.scorer.peft.peft_config, *self._aliases} - {LIVE})
            raise UserError(f"No adapter {name!r} is loaded; there are {', '.join(known)}.")
        return FrozenAdapter(self, name)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Answer with another adapter inside the block, without gradient."""
        was = self.scorer.training
        try:
            self._switch(name)
            with torch.no_grad():
                yield
        finally:
            self._switch(LIVE)
            self._train(was)  # a checkpointed forward may still wait for its recomputation

    def _switch(self, name: str) -> None:
        # PEFT's own set_adapter also flips requires_grad. DDP and FSDP2 record that flag once, so it must never move.
        for layer in self._layers:
            layer._disable_adapters = name == BASE
            if name != BASE:
                layer._active_adapter = name
        self.assert_trainable()

    def assert_trainable(self) -> None:
        """The live adapter, all of it and nothing else, is what an optimizer may change."""
        now = {name for name, p in self.scorer.named_parameters() if p.requires_grad}
        assert now == self._trainable, "the trainable set changed with an adapter switch"
        strangers = [name for name in now if "lora_" not in name or f".{LIVE}." not in name]
        assert now, "nothing is trainable"
        assert not strangers, "something other than the live adapter is trainable"

    # -- what a trainer needs ----------------------------------------------------------------------------------------

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Holds a micro-batch's forward and backward; only the last one synchronises gradients."""
        return parallel.accumulate(self.wrapped, last)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The live adapter's parameters under the names that an adapter file gives them."""
        return [(adapters.file_name(n), p) for n, p in self.scorer.peft.named_parameters() if p.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """The live adapter as an adapter file holds it, whole and on the CPU. Every rank calls."""
        return {name: parallel.full(parameter) for name, parameter in self.trainable()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        own = dict(self.trainable())
        if own.keys() != state.keys():
            raise UserError(
                "The saved adapter has other modules than this one: its LoRA configuration or its base differs."
            )
        for name, parameter in own.items():
            parallel.assign(parameter, state[name])

    def save(self, directory: Path) -> None:
        """Write the live adapter as PEFT and vLLM load it, once it is known to act. Every rank calls, rank 0 writes."""
        state = self.state()
        self._assert_acting(state)
        if self.world.main:
            adapters.write(directory, self.scorer.peft, state)

    def _assert_acting(self, state: Mapping[str, Tensor]) -> None:
        """An adapter that has learned something must change the output. A fresh one cannot: its B matrices are zero."""
        learned = any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name)
        if not learned or self._probe is None:
            return
        prompts, answers_NA = self._probe
        with torch.no_grad():
            live = self.answer_logits(prompts, answers_NA)
        if torch.equal(live, self.frozen(BASE).answer_logits(prompts, answers_NA)):
            raise RuntimeError("the adapter is not zero and yet does not change the output; it is not saved")

    def _train(self, on: bool) -> None:
        if self.scorer.training != on:
            self.wrapped.train(on)
            self.scorer.base.model.visual.eval()


class FrozenAdapter:
    """Another adapter of the same model, as a Policy that can only answer and score."""

    def __init__(self, policy: VLMPolicy, name: str) -> None:
        self._policy, self.name = policy, name
        self.answer_len, self.device = policy.answer_len, policy.device

    def answer_logits(self, prompts: Prompts, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        """As the live policy's, without gradient."""
        with self._policy.using(self.name):
            return self._policy.answer_logits(prompts, answers_NA, group=group)

    def sample(
        self, prompts: Prompts, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        """As the live policy's."""
        with self._policy.using(self.name):
            return self._policy.sample(prompts, group, temperature=temperature, uniforms_NA=uniforms_NA)

    def frozen(self, name: str) -> FrozenAdapter:
        """Another adapter of the same model."""
        return self._policy.frozen(name)
