"""Where a run writes: outputs/<app>/<stamp>_<what it is>, one directory per launch, shared by all ranks of it.

A name is taken by making the directory, so two launches in the same second get two; one that stays empty (a mistake on
the command line) is removed. Under torchrun rank 0 takes it and tells the others through the store that the torchrun
agent already hosts: no process group is needed, and none is left behind for the run to trip over.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from common.errors import UserError

LONGEST = 60
PATIENCE = timedelta(seconds=120)


def reserve(app: str, what: str, root: Path = Path("outputs")) -> Path:
    """Take a directory named by the time and by what runs there; relative to the working directory."""
    label = re.sub(r"[^\w.-]+", "-", what).strip("-.")[:LONGEST]
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}_{label}" if label else stamp
    parent = root / app
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            directory = parent / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                return directory
    except OSError as error:
        raise UserError(
            f"{parent.resolve()} cannot be written ({error.strerror}); run from a directory of yours."
        ) from error
    raise UserError(f"{parent / name} is taken a thousand times over; wait a second.")


def release(directory: Path) -> None:
    """Give back a directory in which nothing was written, and its parents if that leaves them empty."""
    with suppress(OSError):
        for path in (directory, directory.parent, directory.parent.parent):
            path.rmdir()


def refuse_used(directory: Path) -> None:
    """A directory the user chose must be new or empty."""
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is not empty; choose another directory, or continue that run with resume={directory}."
        )


def shared(app: str, what: str) -> Path:
    """`reserve` once for all ranks of a torchrun launch."""
    from torch.distributed import TCPStore

    rank = int(os.environ["RANK"])
    key = (
        f"run_directory/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0  # a launcher other than torchrun
    store = TCPStore(host, port, is_master=own, timeout=PATIENCE)
    if rank != 0:
        return Path(store.get(key).decode())
    directory = reserve(app, what)
    store.set(key, str(directory))
    return directory
