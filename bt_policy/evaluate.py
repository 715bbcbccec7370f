"""An adapter's success in an environment, with intervals, floor and ceiling.

python -m bt_policy.evaluate model.adapter=DIR [data=episodes] [data.held_out=512] [samples=4] [out=DIR]
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path

from common.errors import UserError


def main() -> None:
    """Command line; exit code 1 with a sentence where something does not fit."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    try:
        print(run(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def run(arguments: list[str]) -> str:
    """The table as text; with out=DIR also DIR/evaluation.json."""
    import torch

    from bt_policy.app import build_policy
    from bt_policy.babyai.evaluation import table
    from common.distributed import World
    from common.files import write_json
    from common.launch import composed

    samples = [word[8:] for word in arguments if word.startswith("samples=")]
    others = [word for word in arguments if not word.startswith("samples=")]
    if samples and not (samples[-1].isdigit() and int(samples[-1]) > 0):
        raise UserError(f"samples={samples[-1]} must be a whole number of at least 1.")
    for key, default in (("method", "ppo"), ("data", "episodes")):
        if not any(word.lstrip("+").startswith(f"{key}=") for word in others):
            others = [f"{key}={default}", *others]
    cfg = composed("bt_policy", others)
    if "environment" not in cfg.data or "levels" not in cfg.data:
        raise UserError(f"data={cfg.data.name} is not BabyAI played: choose data=episodes.")
    torch.set_num_threads(cfg.threads)
    policy = build_policy(cfg, list(cfg.model.levels or cfg.data.code_levels), World())
    rows = table(
        policy, policy.encoder, list(cfg.data.levels),
        held_out=cfg.data.held_out, samples=int(samples[-1]) if samples else 4, memory=cfg.data.memory,
    )  # fmt: skip
    if cfg.out is not None:
        plain = {row: {name: asdict(figure) for name, figure in columns.items()} for row, columns in rows.items()}
        write_json(Path(cfg.out) / "evaluation.json", plain)
    lines = [f"{row:8}  {name:26} {figure}" for row, columns in rows.items() for name, figure in columns.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
