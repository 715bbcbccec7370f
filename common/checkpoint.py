"""Checkpoints of a run: weights as safetensors, the optimizer, and the position, in one directory that appears whole.

    checkpoints/step-000123/     what a resumed run continues from: policy.safetensors  optimizer.pt  state.json
    checkpoints/best/  last/     what a user keeps: policy.save writes there

A checkpoint is written under a temporary name and renamed; the previous one is removed only after that, so a kill at
any instant leaves a whole one. Nothing is unpickled but tensors and plain containers (`weights_only=True`).
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from common.distributed import World
from common.files import TEMPORARY, recover_directories, replace_directory, write_bytes, write_json, write_text

__all__ = ["Checkpoint", "Checkpoints", "read_tensors", "write_tensors"]
__all__ += ["replace_directory", "write_bytes", "write_json", "write_text"]  # from common.files, for those who store

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as one safetensors file, atomically. Tied tensors are stored once per name."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor  # the format refuses shared memory
        seen.add(storage)
    write_bytes(path, save(plain, metadata={"format": "pt"}))


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The inverse of `write_tensors`, on the CPU."""
    return load_file(str(path))


@dataclass(frozen=True)
class Checkpoint:
    """What `Checkpoints.save` stored."""

    step: int
    weights: dict[str, dict[str, Tensor]]
    optimizer: dict[str, Any]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of the run in `directory`. Every rank has one; rank 0 writes, all read."""

    def __init__(self, directory: Path, world: World) -> None:
        self.root = Path(directory) / "checkpoints"
        self.best_directory = self.root / "best"
        self.last_directory = self.root / "last"
        self.world = world
        if world.main:
            recover_directories(self.root)

    def save(
        self,
        step: int,
        *,
        weights: Mapping[str, Mapping[str, Tensor]],
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        """Store a checkpoint and remove the older ones. Every rank calls; only rank 0's arguments matter.

        `state` must survive JSON (string keys, lists for tuples); floats keep their bits, infinities included.
        """
        if self.world.main:
            path = self.root / f"step-{step:06d}"
            with replace_directory(path) as directory:
                for name, tensors in weights.items():
                    write_tensors(directory / (quote(name, safe="") + SUFFIX), tensors)
                buffer = io.BytesIO()
                torch.save(dict(optimizer), buffer)
                write_bytes(directory / "optimizer.pt", buffer.getvalue())
                write_text(directory / "state.json", json.dumps({"step": step, "state": dict(state)}, indent=1))
            for other in self._stored():
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)
        self.world.barrier()

    def latest(self) -> Checkpoint | None:
        """The newest readable checkpoint, or None. Every rank calls; half-written ones have names that nobody reads."""
        self.world.barrier()  # rank 0 has cleaned up by now
        for path in reversed(self._stored()):
            try:
                return _read(path)
            except Exception as error:
                log.warning("%s cannot be read and is passed over: %s", path, error)
        return None

    @contextmanager
    def replacing(self, path: Path) -> Iterator[Path]:
        """`replace_directory` for all ranks: each gets the same temporary directory, rank 0 makes and renames it."""
        if not self.world.main:
            self.world.barrier()
            yield path.parent / f"{TEMPORARY}{path.name}"
            self.world.barrier()
            self.world.barrier()
            return
        with replace_directory(path) as directory:
            self.world.barrier()
            yield directory
            self.world.barrier()
        self.world.barrier()

    def _stored(self) -> list[Path]:
        """Checkpoint directories, oldest step first."""
        found = [path for path in self.root.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _read(path: Path) -> Checkpoint:
    stored = json.loads((path / "state.json").read_text(encoding="utf-8"))
    names = sorted(file.name for file in path.iterdir() if file.name.endswith(SUFFIX))
    weights = {unquote(name.removesuffix(SUFFIX)): read_tensors(path / name) for name in names}
    optimizer = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    return Checkpoint(stored["step"], weights, optimizer, stored["state"])
