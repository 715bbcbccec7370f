"""One round of rollouts as a file of rows: the half of the closed loop that needs no trainer.

    python -m bt_policy.rollout data=episodes model.adapter=DIR out=ROUND [round=K] [method=ppo] [key=value ...]
    python -m bt_policy method=ppo data.train=ROUND/train.jsonl model.adapter=DIR out=ROUND

Settings are those of `python -m bt_policy`; of the method its sampling, rows_per_round and advantage are used.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError


def main() -> None:
    """Command line; exit code 1 with a sentence where something does not fit."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    try:
        print(run(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("Interrupted; the same command continues.", file=sys.stderr)
        sys.exit(130)


def run(arguments: list[str]) -> Path:
    """Play the round that the arguments describe; the path of its rows."""
    from common.launch import composed

    number, arguments = _round(arguments)
    if not any(word.lstrip("+").startswith("method=") for word in arguments):
        arguments = ["method=ppo", *arguments]
    cfg = composed("bt_policy", arguments)
    if cfg.out is None:
        raise UserError("Say where the rows go: out=DIR.")
    if "environment" not in cfg.data:
        raise UserError(f"data={cfg.data.name} is not played: rollouts need an environment, e.g. data=episodes.")
    return _play(cfg, number)


def _round(arguments: list[str]) -> tuple[int, list[str]]:
    """round=K is this command's own: the number of the round, of which states and random numbers are functions."""
    number, others = 0, []
    for word in arguments:
        if word.startswith("round="):
            if not word[6:].isdigit():
                raise UserError(f"{word} must be a whole number of at least 0.")
            number = int(word[6:])
        else:
            others.append(word)
    return number, others


def _play(cfg: Any, number: int) -> Path:
    import torch
    from hydra.utils import instantiate

    from bt_policy.acting import environment, sampler
    from bt_policy.app import build_policy
    from bt_policy.babyai.task import BabyAITask
    from bt_policy.rollout.writer import write
    from common.distributed import open_world
    from common.trainers.rollout import Sampling

    torch.set_num_threads(cfg.threads)
    out = Path(cfg.out)
    world = open_world(cfg.distributed.name, cfg.distributed.backend)
    levels = list(cfg.model.levels or cfg.data.code_levels)
    policy = build_policy(cfg, levels, world)
    task = environment(cfg, policy, world)
    if not isinstance(task, BabyAITask):
        raise UserError("This command writes BabyAI's rows; another environment writes its own.")
    method = cfg.method
    sampling = instantiate(method.sampling) if "sampling" in method else Sampling(group=1)
    if "advantage" not in method:
        raise UserError(f"method={method.name} has no advantages to write; choose ppo or one of its kind.")
    return write(
        out, task, sampler(cfg, policy, world, out), levels=levels, seed=cfg.seed, number=number,
        rows=method.get("rows_per_round") or cfg.model.recipe.rows_per_round, sampling=sampling,
        advantage=instantiate(method.advantage), say=logging.getLogger(__name__).info,
    )  # fmt: skip


if __name__ == "__main__":
    main()
