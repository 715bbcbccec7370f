"""The simulator's command: `python -m rlsim method=opd`, or `rlsim` once installed. `--help` lists the choices."""

from __future__ import annotations

from common.launch import main as launch


def main() -> None:
    """Entry point of the console script `rlsim`."""
    launch("rlsim")


if __name__ == "__main__":
    main()
