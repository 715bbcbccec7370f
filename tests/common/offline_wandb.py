"""Reads an offline W&B run back: a LevelDB log of protocol buffers, so that tests see what was really recorded.

The file has a 7-byte header and 32 KiB blocks. A record is one or more chunks, each behind 7 bytes: checksum (4),
length (2), type (1: whole, 2: first, 3: middle, 4: last).
"""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.tracking import Tracker

BLOCK, HEADER = 32 * 1024, 7


@dataclass
class Recorded:
    """What one offline run holds."""

    identity: str = ""
    group: str = ""
    name: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)  # metric pattern -> its x axis
    exit_code: int | None = None


def offline_runs(directory: Path) -> list[Recorded]:
    """Every W&B run below a directory, oldest first. W&B's service may still be writing: waits for the end of each."""
    found = []
    for path in sorted(directory.rglob("*.wandb")):
        deadline = time.monotonic() + 20
        while (run := read_offline_run(path)).exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        found.append(run)
    return found


def read_offline_run(path: Path) -> Recorded:
    """Decode one `.wandb` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = Recorded()
    for payload in payloads(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found.identity, found.group, found.name, found.job_type = (
                run.run_id,
                run.run_group,
                run.display_name,
                run.job_type,
            )
            found.tags = list(run.tags)
            found.config = {item.key: json.loads(item.value_json) for item in run.config.update}
        elif kind == "history":
            found.history.append({key_of(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "summary":
            found.summary |= {key_of(item): json.loads(item.value_json) for item in record.summary.update}
        elif kind == "metric":
            found.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def key_of(item: Any) -> str:
    """An item's name: a plain key or a path of keys."""
    return item.key or ".".join(item.nested_key)


def payloads(data: bytes) -> list[bytes]:
    """The records of a LevelDB log."""
    position, parts, whole = HEADER, [], []
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:  # too little left for a chunk: padding
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        parts.append(data[position + HEADER : position + HEADER + length])
        position += HEADER + length
        if kind in (1, 4):
            whole.append(b"".join(parts))
            parts = []
    return whole


def tracked_job(directory: str, seed: int) -> int | None:
    """A job as a launcher runs it: a short tracked run; that of seed 1 fails. Returns the process it ran in.

    Here and not beside its test, so that a worker process imports no torch.
    """
    options = {"name": f"seed {seed}", "group": "g", "job_type": "opd", "tags": [], "config": {"seed": seed}}
    try:
        with Tracker(
            Path(directory), SimpleNamespace(main=True), **options, wandb={"mode": "offline"}, total=1
        ) as tracker:
            tracker.log(0, {"a": float(seed)})
            if seed == 1:
                raise KeyError("this one fails")
    except KeyError:
        return None
    return os.getpid()
