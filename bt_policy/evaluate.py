"""An adapter's success in an environment, with intervals, floor and ceiling.

python -m bt_policy.evaluate model.adapter=DIR [data=episodes] [data.held_out=512] [samples=4] [against=DIR] [out=DIR]

against: another adapter, or base; the row "gain" is the greedy success over it on the same episodes, as a difference.
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
    from bt_policy.babyai.evaluation import gain, greedy, table
    from bt_policy.babyai.task import held_out_starts
    from bt_policy.vlm import BASE
    from common.distributed import World
    from common.files import write_json
    from common.launch import composed

    own, others = _own(arguments)
    samples = own.get("samples", "4")
    if not (samples.isdigit() and int(samples) > 0):
        raise UserError(f"samples={samples} must be a whole number of at least 1.")
    for key, default in (("method", "ppo"), ("data", "episodes")):
        if not any(word.lstrip("+").startswith(f"{key}=") for word in others):
            others = [f"{key}={default}", *others]
    cfg = composed("bt_policy", others)
    if "environment" not in cfg.data or "levels" not in cfg.data:
        raise UserError(f"data={cfg.data.name} is not BabyAI played: choose data=episodes.")
    torch.set_num_threads(cfg.threads)
    levels = list(cfg.model.levels or cfg.data.code_levels)
    policy = build_policy(cfg, levels, World())
    rows = table(
        policy, policy.encoder, list(cfg.data.levels),
        held_out=cfg.data.held_out, samples=int(samples), memory=cfg.data.memory,
    )  # fmt: skip
    if "against" in own:
        starts = held_out_starts(list(cfg.data.levels), cfg.data.held_out)
        cfg.model.adapter = None if own["against"] == BASE else own["against"]
        other = build_policy(cfg, levels, World())
        after, before = (
            [episode.success for episode in greedy(one, one.encoder, starts, cfg.data.memory)]
            for one in (policy, other)
        )
        rows["gain"] = {f"success over {own['against']}": gain(after, before)}
    if cfg.out is not None:
        plain = {row: {name: asdict(figure) for name, figure in columns.items()} for row, columns in rows.items()}
        write_json(Path(cfg.out) / "evaluation.json", plain)
    lines = [f"{row:8}  {name:26} {figure}" for row, columns in rows.items() for name, figure in columns.items()]
    return "\n".join(lines)


def _own(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The words that are not the configuration's, by key, and the others."""
    own, others = {}, []
    for word in arguments:
        key, _, value = word.partition("=")
        if key in ("samples", "against"):
            own[key] = value
        else:
            others.append(word)
    return own, others


if __name__ == "__main__":
    main()
