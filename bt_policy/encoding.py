"""From prompts to tensors: chat template, tokens, M-RoPE positions and pixels, each computed once per distinct input.

A sequence is the rendered chat template with its one `<|image_pad|>` repeated for every token of the frame, followed
by the code's digits and `<|im_end|>`. Digits are one token each. Equal to what Qwen's own processor returns (tested),
without its need for torchvision and for a video processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bt_policy.frames import Frame
from bt_policy.prompt import Memory, PromptFunction, user_turn
from common.errors import UserError

END = "<|im_end|>"
DIGITS = "0123456789"


@dataclass(frozen=True)
class Prompts:
    """B prompts: what `common` passes on without looking inside. Indexed by a LongTensor of positions.

    `legal_B` is the rows' record of how they were sampled: True means that only legal digits could be written, and then
    the log-probs of an answer are those under that mask; False means the full vocabulary.
    """

    frames: Sequence[Frame]
    names: Sequence[str]
    memories: Sequence[Memory]
    legal_B: Tensor

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, positions: Tensor) -> Prompts:
        picked = positions.tolist()
        return Prompts(
            [self.frames[i] for i in picked],
            [self.names[i] for i in picked],
            [self.memories[i] for i in picked],
            self.legal_B[positions.cpu()],
        )

    def __add__(self, other: Prompts) -> Prompts:
        return Prompts(
            [*self.frames, *other.frames],
            [*self.names, *other.names],
            [*self.memories, *other.memories],
            torch.cat([self.legal_B, other.legal_B]),
        )

    def distinct(self) -> tuple[Tensor, Tensor]:
        """(positions of the D prompts that differ in frame, name or memory, which of them each of the B prompts is)."""
        keys = list(zip((frame.key for frame in self.frames), self.names, map(str, self.memories), strict=True))
        numbers: dict[tuple[str, str, str], int] = {}
        which = [numbers.setdefault(key, len(numbers)) for key in keys]
        first = {number: position for position, number in reversed(list(enumerate(which)))}
        return torch.tensor([first[number] for number in range(len(numbers))]), torch.tensor(which)

    def masked(self, legal: bool = True) -> Prompts:
        """The same prompts, to be answered with legal digits only (or with any token)."""
        return Prompts(self.frames, self.names, self.memories, torch.full((len(self),), legal))


@dataclass(frozen=True)
class Encoded:
    """One prompt's tokens and their M-RoPE positions. An answer continues at `next_position` in all three axes."""

    ids_P: Tensor
    positions_3P: Tensor
    next_position: int


@dataclass(frozen=True)
class Padded:
    """B prompts as one batch, padded on the right or on the left."""

    ids_BP: Tensor
    mask_BP: Tensor
    positions_3BP: Tensor
    lengths_B: Tensor
    next_B: Tensor

    def with_answers(self, answers_BA: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Append all answer tokens but the last, which predicts nothing, to prompts that are padded on the right.

        Returns the inputs (ids, mask, positions) and the (B, A) positions whose logits predict the answer.
        """
        rows, extra = answers_BA.shape[0], answers_BA.shape[1] - 1
        at_BE = self.lengths_B[:, None] + torch.arange(extra)
        next_BE = self.next_B[:, None] + torch.arange(extra)

        def widen(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:-1], extra)], -1)

        ids_BT = widen(self.ids_BP).scatter(1, at_BE, answers_BA[:, :extra])
        mask_BT = widen(self.mask_BP).scatter(1, at_BE, 1)
        shape = (3, rows, extra)
        positions_3BT = widen(self.positions_3BP).scatter(2, at_BE.expand(shape), next_BE.expand(shape))
        keep_BA = self.lengths_B[:, None] - 1 + torch.arange(extra + 1)
        return (ids_BT, mask_BT, positions_3BT), keep_BA


class Encoder:
    """Tokenizer, image processor and prompt function of one base model."""

    def __init__(self, tokenizer: Any, images: Any, prompt: PromptFunction, model: Any) -> None:
        self.tokenizer, self.images, self.prompt = tokenizer, images, prompt
        self._rope_index = model.model.get_rope_index
        self._image_id = int(model.config.image_token_id)
        self._merge = int(model.config.vision_config.spatial_merge_size)
        self.pad_id = int(tokenizer.pad_token_id)
        self.digit_ids = [self._single(digit) for digit in DIGITS]
        self.end_id = self._single(END)
        self._encoded = lru_cache(maxsize=100_000)(self._encode)

    def _single(self, text: str) -> int:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise UserError(
                f"The tokenizer writes {text!r} with {len(ids)} tokens; a behaviour code needs one token per digit."
            )
        return ids[0]

    def text(self, name: str, memory: Memory) -> str:
        """The rendered chat template, thinking off, up to where the code begins."""
        turn = user_turn(self.prompt(name, memory))
        return self.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def pixels(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """(patches, 3 * temporal * patch^2) float32 pixel values and the (1, 3) grid of one frame."""
        made = self.images(images=[frame.image()], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def encode(self, name: str, memory: Memory, grid: tuple[int, int, int]) -> Encoded:
        """Tokens and positions of one prompt whose frame has this grid of patches."""
        return self._encoded(name, None if memory is None else tuple(memory), grid)

    def _encode(self, name: str, memory: Memory, grid: tuple[int, int, int]) -> Encoded:
        ids = self.tokenizer.encode(self.text(name, memory), add_special_tokens=False)
        if ids.count(self._image_id) != 1:
            raise UserError(
                f"The prompt for {name!r} holds {ids.count(self._image_id)} image tokens where one is needed."
            )
        at = ids.index(self._image_id)
        tokens = grid[0] * grid[1] * grid[2] // self._merge**2
        ids_P = torch.tensor(ids[:at] + [self._image_id] * tokens + ids[at + 1 :])
        types_1P = (ids_P == self._image_id).int()[None]
        positions, deltas = self._rope_index(ids_P[None], types_1P, image_grid_thw=torch.tensor([grid]))
        return Encoded(ids_P, positions[:, 0], int(deltas[0, 0]) + len(ids_P))

    def pad(self, prompts: Sequence[Encoded], side: str) -> Padded:
        """One batch. Padding has mask 0 and position 0."""

        def stack(rows: list[Tensor], value: int) -> Tensor:
            return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)

        positions_BP3 = stack([p.positions_3P.T for p in prompts], 0)
        return Padded(
            stack([p.ids_P for p in prompts], self.pad_id),
            stack([torch.ones_like(p.ids_P) for p in prompts], 0),
            positions_BP3.permute(2, 0, 1),
            torch.tensor([len(p.ids_P) for p in prompts]),
            torch.tensor([p.next_position for p in prompts]),
        )

    def code_ids(self, code: str, *, end: bool) -> list[int]:
        """A code's tokens, with `<|im_end|>` where it is scored too."""
        return [self.digit_ids[int(digit)] for digit in code] + ([self.end_id] if end else [])

    def code(self, ids: Sequence[int]) -> str:
        """The digits of written tokens; "?" where a token is not a digit."""
        digit_of = {token: digit for digit, token in zip(DIGITS, self.digit_ids, strict=True)}
        return "".join(digit_of.get(token, "?") for token in ids)
