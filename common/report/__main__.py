"""`python -m common.report DIR [--x time/elapsed]`: rebuild the report of a sweep or of a run from its directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.errors import UserError
from common.report.curves import read_runs
from common.report.sweep import rebuild


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, rebuild; prints the picture's path. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m common.report", description="Rebuild a sweep's or a run's report.")
    parser.add_argument("directory", type=Path, help="a sweep's or a run's directory, for example under outputs/")
    parser.add_argument("--x", default="step", help="what curves run over: step, or a metric such as time/elapsed")
    given = parser.parse_args(arguments)
    try:
        _check(given.directory)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print(rebuild(given.directory, given.x))
    return 0


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give a run's or a sweep's, for example one under outputs/.")
    if not read_runs(directory.resolve()):
        raise UserError(
            f"{directory} holds no run (no result.json, no metrics.jsonl below it); give a run's or a sweep's."
        )


if __name__ == "__main__":
    sys.exit(main())
