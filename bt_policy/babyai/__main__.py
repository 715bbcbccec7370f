"""Expert rows as a file: `python -m bt_policy.babyai DIRECTORY [ROWS] [LEVEL]`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from bt_policy.babyai import ROOM_8, ensure
from common.errors import UserError


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not 2 <= len(sys.argv) <= 4 or not all(word.isdigit() for word in sys.argv[2:3]):
        raise SystemExit(__doc__)
    directory, rows = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    if directory.exists() and os.listdir(directory):
        raise SystemExit(f"{directory} is not empty.")
    try:
        print(*ensure(directory, level=sys.argv[3] if len(sys.argv) > 3 else ROOM_8, train=rows, valid=256))
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
