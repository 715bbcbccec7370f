"""Where a configured path lies: inside this package, on the disk, or on the hub. Imports nothing heavy."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

PACKAGE = "package://"  # package://tiny/base is bt_policy/tiny/base


def located(path: str) -> str:
    """A folder or file of this package, one on the disk, or (unchanged) a name on the hub."""
    if path.startswith(PACKAGE):
        return str(files("bt_policy") / path.removeprefix(PACKAGE))
    return str(Path(path).expanduser()) if Path(path).expanduser().exists() else path
