"""A frame: what the policy sees. Known by the hash of its content, so that equal frames are encoded once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Frame:
    """A picture in a file or in memory; two frames are equal when their content is."""

    key: str
    source: Path | np.ndarray = field(compare=False, repr=False)

    def image(self) -> Image.Image:
        """The picture as 8-bit RGB, as `convert("RGB")` gives it."""
        if isinstance(self.source, Path):
            with Image.open(self.source) as picture:
                return picture.convert("RGB")
        return Image.fromarray(self.source)


def from_file(path: Path) -> Frame:
    """A frame in a picture file, keyed by the file's bytes."""
    return Frame(hashlib.sha256(path.read_bytes()).hexdigest(), path)


def from_array(pixels: np.ndarray) -> Frame:
    """A frame in memory: uint8 (height, width, 3)."""
    pixels = np.ascontiguousarray(pixels)
    return Frame(hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest(), pixels)
