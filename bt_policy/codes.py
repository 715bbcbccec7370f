"""Behaviour codes: the digits of finite scalar quantisation (FSQ, arXiv 2309.15505), one digit a dimension.

A dimension of L levels holds the values (d - h) / h for digits d = 0 ... L - 1, with h = L // 2: for L = 4 these are
-1, -1/2, 0, 1/2; for L = 5 they are -1, -1/2, 0, 1/2, 1. Equal to `vector_quantize_pytorch.FSQ(levels)` (tested).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Vector = Sequence[float] | np.ndarray
EPS = 1e-3  # FSQ's own: the outermost level is reached by finite inputs


def bound(latent: Vector, levels: Sequence[int]) -> np.ndarray:
    """An unbounded latent (..., len(levels)) squashed and rounded to the levels' values."""
    counts = np.asarray(levels, dtype=np.float64)
    half = (counts - 1) * (1 + EPS) / 2
    offset = np.where(counts % 2 == 0, 0.5, 0.0)
    squashed = np.tanh(np.asarray(latent, dtype=np.float64) + np.arctanh(offset / half)) * half - offset
    return np.round(squashed) / (counts // 2)


def to_digits(values: Vector, levels: Sequence[int]) -> str:
    """The code of a bounded vector: each value's nearest level."""
    _check(len(np.atleast_1d(values)), levels)
    half = np.asarray(levels) // 2
    digits = np.clip(np.round(np.asarray(values, dtype=np.float64) * half + half), 0, np.asarray(levels) - 1)
    return "".join(str(int(digit)) for digit in digits)


def from_digits(code: str, levels: Sequence[int]) -> np.ndarray:
    """The bounded vector of a code. ValueError for a digit that its dimension does not have."""
    _check(len(code), levels)
    if not all(digit in "0123456789" and int(digit) < level for digit, level in zip(code, levels, strict=True)):
        raise ValueError(f"{code!r} is no code of the levels {list(levels)}")
    half = np.asarray(levels) // 2
    return (np.array([int(digit) for digit in code]) - half) / half


def index(code: str, levels: Sequence[int]) -> int:
    """The code's place in FSQ's codebook: the first digit counts least."""
    _check(len(code), levels)
    place, total = 1, 0
    for digit, level in zip(code, levels, strict=True):
        total, place = total + int(digit) * place, place * level
    return total


def _check(length: int, levels: Sequence[int]) -> None:
    if length != len(levels):
        raise ValueError(f"{length} dimensions where {len(levels)} levels are given")
