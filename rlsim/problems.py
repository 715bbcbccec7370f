"""Problems and how they are written, as arrays of token ids.

A problem is "123+045="; its answer, 168, is written ones digit first, as in adding by hand, then "$": "8610$".
Subtraction takes the smaller number from the larger. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB = "0123456789+-=$"
TOKEN = {character: i for i, character in enumerate(VOCAB)}
END = TOKEN["$"]
MOST_DIGITS = 18  # what an int64 holds

# symbol -> (left, right, result) of two drawn numbers; in the order in which the fixed sets are drawn
OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]] = {
    "+": lambda a, b: (a, b, a + b),
    "-": lambda a, b: (np.maximum(a, b), np.minimum(a, b), np.abs(a - b)),
}


@dataclass(frozen=True)
class Problems:
    """B problems, as token ids, with their true answers."""

    prompts_BP: np.ndarray
    answers_BA: np.ndarray
    mask_BA: np.ndarray  # bool: True up to and including the answer's end


@dataclass(frozen=True)
class Format:
    """`pad_answers`: an answer has digits + 1 digits, zeros in front; else as many as the number needs, then "$".

    `stop_at_end`: what follows the first "$" does not count; else all positions do.
    """

    digits: int = 3
    pad_answers: bool = True
    stop_at_end: bool = True

    @property
    def prompt_len(self) -> int:
        """Two operands, the operation and "="."""
        return 2 * self.digits + 2

    @property
    def answer_len(self) -> int:
        """Room for the largest sum and "$"."""
        return self.digits + 2

    def draw(self, n: int, operation: str, rng: np.random.Generator) -> Problems:
        """n problems with operands drawn uniformly from 0 ... 10^digits - 1."""
        bound = 10**self.digits
        a = rng.integers(0, bound, n)
        return self.write(a, rng.integers(0, bound, n), operation)

    def write(self, a: np.ndarray, b: np.ndarray, operation: str) -> Problems:
        """The problems `a operation b` (subtraction puts the larger number first)."""
        left, right, result = OPERATIONS[operation](a, b)
        sign, equals = np.full((len(a), 1), TOKEN[operation]), np.full((len(a), 1), TOKEN["="])
        prompts = [_ones_first(left, self.digits)[:, ::-1], sign, _ones_first(right, self.digits)[:, ::-1], equals]
        digits_BA = _ones_first(result, self.answer_len)
        place_A = np.arange(self.answer_len)
        length_B1 = np.full((len(a), 1), self.digits + 1)
        if not self.pad_answers:
            length_B1 = np.maximum(1, ((digits_BA > 0) * (place_A + 1)).max(1))[:, None]
        mask_BA = (place_A <= length_B1) if self.stop_at_end else np.ones(digits_BA.shape, dtype=bool)
        return Problems(np.concatenate(prompts, 1), np.where(place_A < length_B1, digits_BA, END), mask_BA)

    def beginnings(self, operations: Iterable[str]) -> np.ndarray:
        """(R, digits + 1): every first operand with its operation, the part of a prompt that many problems share."""
        operands = np.arange(10**self.digits)
        zeros = np.zeros_like(operands)
        return np.concatenate([self.write(operands, zeros, o).prompts_BP[:, : self.digits + 1] for o in operations])

    def fixed(self, seed: int, size: int) -> dict[str, Problems]:
        """`size` problems an operation, always the same: all are drawn in the operations' order from one generator."""
        rng = np.random.default_rng(seed)
        return {operation: self.draw(size, operation, rng) for operation in OPERATIONS}


def _ones_first(numbers: np.ndarray, places: int) -> np.ndarray:
    """(n, places) digits, which are their own token ids."""
    powers = np.array([10**place for place in range(places)], dtype=np.uint64)  # 10^19 is beyond int64
    return (numbers.astype(np.uint64)[:, None] // powers % np.uint64(10)).astype(np.int64)


def text(tokens: Iterable[Any]) -> str:
    """Token ids as characters."""
    return "".join(VOCAB[int(token)] for token in tokens)
