"""Checking pictures before a model is loaded: header and size first, then each distinct content decoded once.

What is accepted is read as `Image.open(path).convert("RGB")` reads it: palette, grey, alpha (dropped), CMYK. The EXIF
orientation is not applied (pixels as stored) and said so once. Refused are missing, empty and unreadable files,
pictures cut off in the middle, more than `max_pixels`, and 16-bit grey ones, whose range that conversion would clip
to white.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

log = logging.getLogger(__name__)

EXIF_ORIENTATION = 0x0112
WIDE = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # PIL's modes of more than 8 bits a channel


def header(path: Path, max_pixels: int) -> str | None:
    """Why the picture is refused, judged without decoding it; None where nothing speaks against it."""
    if not path.is_file():
        return "is not a file"
    if path.stat().st_size == 0:
        return "is empty (0 bytes)"
    try:
        with _open(path) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                return f"is {width} x {height}, more than data.max_pixels={max_pixels}"
            if max(width, height) > 200 * min(width, height):
                return f"is {width} x {height}; the model takes sides of at most 1 : 200"
            if picture.mode in WIDE:
                return f"has more than 8 bits a channel (mode {picture.mode}); save it as 8-bit"
    except Exception as error:
        return f"is not a picture that can be read ({type(error).__name__})"
    return None


def decode(path: Path) -> tuple[str | None, bool]:
    """Why decoding fails (None: it does not), and whether an EXIF orientation is being ignored."""
    try:
        with _open(path) as picture:
            turned = picture.getexif().get(EXIF_ORIENTATION, 1) not in (0, 1)
            picture.convert("RGB").load()
    except Exception as error:
        return f"cannot be decoded, it may be cut off ({error})", False
    return None, turned


def _open(path: Path) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # size is judged by `header`, with a message of our own
    return Image.open(path)


def check(paths: Iterable[Path], max_pixels: int, cache: Path | None) -> tuple[dict[Path, str], dict[Path, str]]:
    """(path -> why it is refused, path -> sha256 of its content). `cache` remembers verdicts by content."""
    paths = list(dict.fromkeys(paths))
    refused = {path: reason for path in paths if (reason := header(path, max_pixels))}
    fine = [path for path in paths if path not in refused]
    with ThreadPoolExecutor() as pool:
        keys = dict(zip(fine, pool.map(_content, fine), strict=True))
        known = _remembered(cache)
        new = {key: path for path, key in keys.items() if key not in known}
        verdicts = dict(zip(new, pool.map(decode, new.values()), strict=True))
    turned = sum(was for _, was in verdicts.values())
    if turned:
        log.warning("%d pictures carry an EXIF orientation; it is not applied, pixels are read as stored", turned)
    known |= {key: reason for key, (reason, _) in verdicts.items()}
    _remember(cache, known, bool(verdicts))
    refused |= {path: reason for path, key in keys.items() if (reason := known[key])}
    return refused, keys


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remembered(cache: Path | None) -> dict[str, str | None]:
    try:
        return {} if cache is None else json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}


def _remember(cache: Path | None, verdicts: dict[str, str | None], changed: bool) -> None:
    if cache is None or not changed:
        return
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    partial.write_text(json.dumps(verdicts))
    partial.replace(cache)
