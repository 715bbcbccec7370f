"""Files that are either whole or absent: written under a temporary name in the same directory, then renamed.

A reader never sees half a file, and a run killed while writing leaves the previous version. Importing this costs
nothing (no torch), so the launcher and the report use it too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"  # prefix of what is being written; never a name that a reader looks for
REPLACED = ".old-"  # prefix of what is about to be removed


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically; missing parent directories are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{os.getpid()}-{path.name}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write strict JSON atomically. NaN and infinities, which JSON does not have, become null."""
    write_text(path, json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with every non-finite float replaced by None, in nested dicts and sequences."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


@contextmanager
def replace_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `path` when the block ends; on an exception `path` is kept.

    A directory cannot be renamed over another one, so there is an instant without `path`: `recover_directory` undoes a
    kill in that instant.
    """
    path = Path(path)
    temporary, replaced = path.parent / f"{TEMPORARY}{path.name}", path.parent / f"{REPLACED}{path.name}"
    recover_directory(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            os.rename(path, replaced)
        os.rename(temporary, path)
    except BaseException:
        recover_directory(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def recover_directory(path: str | Path) -> None:
    """Clean up after an interrupted `replace_directory(path)`: the old one returns if the new one had not arrived."""
    path = Path(path)
    replaced = path.parent / f"{REPLACED}{path.name}"
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(path.parent / f"{TEMPORARY}{path.name}", ignore_errors=True)


def recover_directories(parent: Path) -> None:
    """`recover_directory` for whatever was being replaced in `parent` when a process was killed."""
    for prefix in (REPLACED, TEMPORARY):
        for path in parent.glob(f"{prefix}*"):
            recover_directory(parent / path.name.removeprefix(prefix))
