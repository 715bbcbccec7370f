"""Explicit randomness: every draw comes from (seed, purpose, step), never from a global state.

Workers of a parallel sweep are reused between jobs and a resumed run starts in the middle, so a global generator would
make the bits depend on history. A named purpose keeps streams apart; a step makes each one restartable.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def stream(seed: int, purpose: str, step: int = 0) -> int:
    """A 63-bit seed for the stream (seed, purpose, step)."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def numpy_rng(seed: int, purpose: str, step: int = 0) -> np.random.Generator:
    """A NumPy generator for the stream (seed, purpose, step)."""
    return np.random.default_rng(stream(seed, purpose, step))


def torch_rng(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A CPU torch generator for the stream (seed, purpose, step)."""
    return torch.Generator().manual_seed(stream(seed, purpose, step))


def uniforms(seed: int, purpose: str, step: int, *shape: int) -> Tensor:
    """float64 uniforms in [0, 1): one per token to be sampled.

    Sampling inverts the distribution function at these numbers, so a row's answer depends on its own uniforms only: not
    on the rows beside it, on how many ranks share the work, or on the device.
    """
    return torch.rand(*shape, generator=torch_rng(seed, purpose, step), dtype=torch.float64)
