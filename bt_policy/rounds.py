"""Rounds of the closed loop: roll out, update, evaluate. What bounds them, and the record they leave.

`rounds=N` means the same for every method: N times `data.rows_per_round` sampled (or copied) answers. PPO makes
several passes over a round; a method of one update a sample makes rows_per_round / rows_per_update of them.

rounds.jsonl has a line an evaluation (the first before any update): round, updates, seconds since the start; of those
since the last line how many went into rolling out, publishing the adapter, evaluating, and (what remains) updating; and
the success figures.
rounds.png is success against seconds; in a sweep, also one of all arms in the sweep's own directory.

    python -m bt_policy.rounds DIR        # draws it again from every rounds.jsonl below DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from common.errors import UserError
from common.files import write_text
from common.sweep import SIBLING
from common.tracking import read_metrics

PARTS = ("rollout", "publish", "evaluate")


def bounded(cfg: DictConfig) -> DictConfig:
    """The configuration with `rounds` turned into steps and evaluations, for methods without rounds of their own."""
    if cfg.rounds is None or "rows_per_round" in cfg.method:
        return cfg
    rows = cfg.model.recipe.rows_per_round or cfg.method.optim.rows_per_update
    updates = max(1, rows // cfg.method.optim.rows_per_update)
    made = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    with open_dict(made):
        steps = cfg.rounds * updates
        made.steps = steps if cfg.steps is None else min(steps, cfg.steps)
        made.eval_every = updates if cfg.eval_every is None else cfg.eval_every
        made.rounds = None
        made.method.optim.epochs = None
    return made


def joined(cfg: DictConfig, directory: Path) -> DictConfig:
    """The configuration with adapters of sibling arms named by their folders; UserError where an arm has left none."""
    made = cfg.copy()
    with open_dict(made):
        for key in ("adapter", "ref", "teacher"):
            made.model[key] = _sibling(made.model[key], cfg.seed, directory)
        made.model.teachers = {name: _sibling(path, cfg.seed, directory) for name, path in cfg.model.teachers.items()}
    return made


def _sibling(path: str | None, seed: int, directory: Path) -> str | None:
    named = None if path is None else SIBLING.fullmatch(path)
    if named is None:
        return path
    arm = named[1]
    folder = directory.parents[1] / arm / f"seed={seed}" / "checkpoints" / "best"
    if not folder.is_dir():
        raise UserError(f"The arm {arm} has left no adapter in {folder}; run it before this one, with the same seed.")
    return str(folder)


def lines(directory: Path) -> list[dict[str, Any]]:
    """One record an evaluation, from the run's metrics."""
    found: list[dict[str, Any]] = []
    spent = dict.fromkeys(PARTS, 0.0)
    for line in read_metrics(directory):
        evaluated = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
        if not evaluated:
            continue
        seconds = line.get("time/seconds") or 0.0
        now = {part: line.get(f"time/{part}_seconds") or 0.0 for part in PARTS}
        since = {part: max(0.0, now[part] - spent[part]) for part in PARTS}
        since["rollout"] = max(0.0, since["rollout"] - since["publish"])  # adapters are published when first asked
        rest = seconds - (found[-1]["seconds"] if found else 0.0) - sum(since.values())
        record = {"round": len(found), "updates": line["step"], "seconds": round(seconds, 2)}
        record |= {f"{part}_s": round(value, 2) for part, value in since.items()}
        found.append(record | {"update_s": round(max(0.0, rest), 2)} | evaluated)
        spent = now
    return found


def write(directory: Path, result: Mapping[str, Any]) -> None:
    """rounds.jsonl and rounds.png of a run in which the policy acted."""
    found = lines(directory)
    write_text(directory / "rounds.jsonl", "".join(json.dumps(line) + "\n" for line in found))
    if len(found) > 1 and "success" in found[0]:
        picture(directory / "rounds.png", {str(result.get("method", "")): found})
    if result.get("arm") is not None:  # <sweep>/<arm>/seed=<n>
        picture_below(directory.parents[1])


def picture_below(directory: Path) -> Path | None:
    """rounds.png of every run below `directory` that has played rounds; None where there is none."""
    runs = {}
    for path in sorted(directory.glob("**/rounds.jsonl")):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        if len(found) > 1 and "success" in found[0]:
            runs[path.parent.relative_to(directory).as_posix()] = found
    if not runs:
        return None
    picture(directory / "rounds.png", runs)
    return directory / "rounds.png"


def picture(path: Path, runs: Mapping[str, list[dict[str, Any]]]) -> None:
    """Success against seconds, a line a run. A seed that all of them share is not repeated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ends = {name.rpartition("/")[2] for name in runs}
    shared = f"/{ends.pop()}" if len(ends) == 1 and len(runs) > 1 else ""
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for name, found in runs.items():
        seconds, success = [line["seconds"] for line in found], [100 * line["success"] for line in found]
        axes.plot(seconds, success, marker="o", markersize=4, label=name.removesuffix(shared))
    axes.set(xlabel="seconds", ylabel="success on held-out seeds, %", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend(title=shared.removeprefix("/") or None, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Command line: DIRECTORY."""
    directory = Path(sys.argv[1]) if len(sys.argv) == 2 else None
    drawn = picture_below(directory) if directory is not None else None
    if drawn is None:
        raise SystemExit(__doc__ if directory is None else f"There are no rounds below {directory}.")
    print(drawn)


if __name__ == "__main__":
    main()
