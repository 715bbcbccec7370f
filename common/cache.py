"""Things that are built once per distinct specification and shared by every process: trained teachers, warm starts.

An entry is a directory named by the hash of its specification. One process builds it under a file lock, in a temporary
directory that is renamed when whole; the others wait and then read. A builder that is killed leaves no entry: the lock
goes with the process, and the next one clears what it left.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common.files import TEMPORARY, write_json

log = logging.getLogger(__name__)

SPEC = "spec.json"  # what an entry was built from, for whoever looks


def key_of(spec: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that depend on the content of a JSON-like specification, not on its order."""
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def cached(root: str | Path, kind: str, spec: Mapping[str, Any], build: Callable[[Path], None], what: str) -> Path:
    """The directory of the entry for (kind, spec), built by `build(empty directory)` if there is none.

    `spec` must name everything that the content depends on, a version of the code included. `what` is said in the log.
    """
    root = Path(root).absolute()
    entry = root / f"{kind}-{key_of(spec)}"
    if entry.is_dir():
        return entry
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{entry.name}.lock", what):
        if not entry.is_dir():  # another process may have built it while this one waited
            _build(entry, spec, build, what)
    return entry


def _build(entry: Path, spec: Mapping[str, Any], build: Callable[[Path], None], what: str) -> None:
    for unfinished in entry.parent.glob(f"{TEMPORARY}{entry.name}-*"):  # a killed builder's: this process has the lock
        shutil.rmtree(unfinished, ignore_errors=True)
    temporary = entry.parent / f"{TEMPORARY}{entry.name}-{os.getpid()}"
    temporary.mkdir()
    log.info("%s: not in the cache yet (%s), building it", what, entry)
    began = time.monotonic()
    try:
        build(temporary)
        write_json(temporary / SPEC, dict(spec))
        os.rename(temporary, entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    log.info("%s: ready after %.0f s", what, time.monotonic() - began)


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Holds the lock; says so when it has to wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info("%s: another process is building it, waiting", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
