"""The vision-language model's command: `python -m bt_policy method=sft`, or `bt-policy` once installed."""

from __future__ import annotations

from common.launch import main as launch


def main() -> None:
    """Entry point of the console script `bt-policy`."""
    launch("bt_policy")


if __name__ == "__main__":
    main()
