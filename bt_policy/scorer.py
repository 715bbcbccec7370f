"""The module that DDP or FSDP wraps: tokens and frame features in, logits at chosen positions of each row out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from bt_policy.encoding import Encoder
from bt_policy.frames import Frame

Grid = tuple[int, int, int]


class Scorer(nn.Module):
    """A Qwen3.5 with LoRA inside. The head is applied to the gathered positions of each row only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.peft = model

    @property
    def base(self) -> Any:
        """The `Qwen3_5ForConditionalGeneration` itself; with an adapter its linear layers are LoRA layers."""
        return self.peft.get_base_model() if hasattr(self.peft, "get_base_model") else self.peft

    def forward(
        self,
        ids_NT: Tensor,
        mask_NT: Tensor,
        positions_3NT: Tensor,
        keep_NK: Tensor,
        features: tuple[Tensor, ...] | None = None,
        cache: Any = None,
    ) -> Tensor:
        """(N, K, V) logits at positions `keep_NK`. `features` holds one (image tokens, D) tensor a row."""
        images = None if features is None else {"image": BaseModelOutputWithPooling(pooler_output=features)}
        hidden_NTD = self.base.model(
            input_ids=ids_NT,
            attention_mask=mask_NT,
            position_ids=positions_3NT,
            mm_encoder_outputs=images,
            cache=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return self.base.lm_head(hidden_NTD.gather(1, keep_NK[..., None].expand(-1, -1, hidden_NTD.shape[-1])))


class Vision:
    """Frame features: each distinct frame computed once, kept while `budget` bytes last (least recently used go first).

    The tower is frozen and carries no LoRA, so the features belong to the frame alone. Frames are encoded one at a
    time: their bits then do not depend on which other frames happened to be missing, and a resumed run repeats them
    exactly.
    """

    def __init__(
        self,
        tower: Any,
        encoder: Encoder,
        autocast: Callable[[], AbstractContextManager[Any]],
        budget: int,
        readers: int = 0,
    ) -> None:
        """`readers`: threads that open and scale the pictures of a batch (0: none): a GPU should not wait for them."""
        self._tower, self._encoder, self._autocast, self._budget = tower, encoder, autocast, budget
        self._readers = ThreadPoolExecutor(readers) if readers else None
        self._pixels: dict[str, tuple[Tensor, Tensor]] = {}  # read ahead, until they are encoded
        self._kept: OrderedDict[str, tuple[Tensor, Grid]] = OrderedDict()
        self._bytes = 0
        self.computed = 0  # how many frames went through the tower, for tests and reports

    def __call__(self, frame: Frame) -> tuple[Tensor, Grid]:
        """(image tokens, D) features on the CPU or the tower's device, and the frame's grid of patches."""
        if frame.key in self._kept:
            self._kept.move_to_end(frame.key)
            return self._kept[frame.key]
        found = self._compute(frame)
        self._kept[frame.key] = found
        self._bytes += found[0].nbytes
        while self._bytes > self._budget and len(self._kept) > 1:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
        return found

    def read_ahead(self, frames: Sequence[Frame]) -> None:
        """Open and scale the frames that are not known yet, several at a time."""
        missing = {frame.key: frame for frame in frames if frame.key not in self._kept}
        if self._readers is not None and len(missing) > 1:
            self._pixels = dict(zip(missing, self._readers.map(self._encoder.pixels, missing.values()), strict=True))

    @torch.no_grad()
    def _compute(self, frame: Frame) -> tuple[Tensor, Grid]:
        pixels, grid_13 = self._pixels.pop(frame.key, None) or self._encoder.pixels(frame)
        device, dtype = next(self._tower.parameters()).device, self._tower.dtype
        with self._autocast():
            made = self._tower(pixels.to(device, dtype), grid_thw=grid_13.to(device)).pooler_output
        self.computed += 1
        t, h, w = grid_13[0].tolist()
        return made, (t, h, w)
