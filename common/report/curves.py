"""Reads the runs of a sweep back from their directories: arms x seeds, with a curve per measure.

A *measure* is what an evaluation reported, without the `eval/` of metrics.jsonl: `acc/+`, `acc/code`, `success`. Runs
that did not finish are read too, but only finished ones (with a result.json) enter means.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.tracking import METRICS, read_metrics

log = logging.getLogger(__name__)

RESULT = "result.json"
ACCURACY = "acc/"
SKIPPED = {"wandb", "checkpoints", "results"}  # directories of a run or a sweep that hold no run
MOST_OTHERS = 4  # measures shown beside the accuracies


@dataclass(frozen=True)
class Run:
    """One job: its directory's result.json (None while it has none) and metrics.jsonl."""

    arm: str
    seed: int | None
    directory: Path
    result: dict[str, Any] | None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The entries of metrics.jsonl, one per step (a step that was logged twice is merged)."""
        merged: dict[int, dict[str, Any]] = {}
        for entry in read_metrics(self.directory):
            merged.setdefault(entry["step"], {}).update(entry)
        return [merged[step] for step in sorted(merged)]

    @cached_property
    def names(self) -> set[str]:
        """Every name that metrics.jsonl has."""
        return {name for entry in self.metrics for name in entry}

    def series(self, name: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """(x, value) of a metric where both were recorded, x ascending. Empty arrays where there is none."""
        pairs = [
            (entry[x], entry[name]) for entry in self.metrics if _number(entry.get(x)) and _number(entry.get(name))
        ]
        pairs.sort(key=lambda pair: pair[0])
        return np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], float)

    def curve(self, measure: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """A measure over training; from result.json where metrics.jsonl is gone."""
        steps, values = self.series(f"eval/{measure}", x)
        if len(steps) or x != "step":
            return steps, values
        points = (self.result or {}).get("curve") or []
        kept = [(p["step"], p[label(measure)]) for p in points if _number(p.get(label(measure)))]
        return np.array([p[0] for p in kept], float), np.array([p[1] for p in kept], float)

    def value(self, when: str, measure: str) -> float | None:
        """What result.json says of a measure at "start" or "final"."""
        stored = (self.result or {}).get(when) or {}
        found: Any = stored.get(label(measure), stored.get(measure))
        return float(found) if _number(found) else None


@dataclass(frozen=True)
class Arm:
    """The finished runs of one configuration, a seed each."""

    name: str
    runs: list[Run] = field(default_factory=list)

    def values(self, when: str, measure: str) -> list[float]:
        """A measure at "start" or "final", over the seeds that have it."""
        return [value for run in self.runs if (value := run.value(when, measure)) is not None]

    def curves(self, measure: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """x (P,) and values (S, P) of the seeds that have the measure; S = 0 where none has.

        Seeds evaluated at the same x are stacked. Otherwise (x in seconds, another eval_every) they are interpolated
        linearly at all their x, within the range that every seed covers, so that a mean is always over the same seeds.
        """
        found = [curve for run in self.runs if len((curve := run.curve(measure, x))[0])]
        if not found:
            return np.empty(0), np.empty((0, 0))
        first = found[0][0]
        if all(np.array_equal(xs, first) for xs, _ in found):
            return first, np.stack([ys for _, ys in found])
        grid = np.unique(np.concatenate([xs for xs, _ in found]))
        grid = grid[(grid >= max(xs[0] for xs, _ in found)) & (grid <= min(xs[-1] for xs, _ in found))]
        return grid, np.stack([np.interp(grid, xs, ys) for xs, ys in found])


def label(measure: str) -> str:
    """A measure's name in result.json and for readers: `acc/+` is `+`."""
    return measure.removeprefix(ACCURACY)


def read_runs(directory: Path) -> list[Run]:
    """Every run below `directory`, finished or not, in a stable order."""
    found = []
    for path, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED)
        if RESULT in files or METRICS in files:
            found.append(read_run(Path(path), Path(directory)))
    return found


def read_run(directory: Path, root: Path) -> Run:
    """The run in `directory`; what its result.json does not say is taken from its place `<root>/<arm>/seed=<n>`."""
    result: dict[str, Any] | None = None
    try:
        result = json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except ValueError as error:
        log.warning("%s is not readable and counts as missing: %s", directory / RESULT, error)
    arm, seed = place(directory, root)
    said = result if isinstance(result, dict) else {}
    return Run(str(said.get("arm") or arm), said.get("seed", seed), directory, result if said else None)


def place(directory: Path, root: Path) -> tuple[str, int | None]:
    """Arm and seed that a directory's place in a sweep says."""
    parts = directory.relative_to(root).parts
    seeds = [int(match[1]) for part in parts if (match := re.fullmatch(r"seed=(-?\d+)", part))]
    arm = "/".join(part for part in parts if not re.fullmatch(r"seed=-?\d+", part))
    return arm or directory.name, seeds[-1] if seeds else None


def arms_of(runs: Iterable[Run], order: Sequence[str] = ()) -> list[Arm]:
    """Finished runs by arm, seeds ascending: the arms of `order` first, then the others by name.

    Of two runs with the same arm and seed the one that finished last counts: the same seed twice is not two seeds.
    """
    kept: dict[tuple[str, Any], Run] = {}
    for run in sorted((run for run in runs if run.result is not None), key=_finished):
        kept[run.arm, run.seed if run.seed is not None else run.directory] = run
    names = {arm for arm, _ in kept}
    ordered = [name for name in order if name in names] + sorted(names - set(order), key=_natural)
    return [
        Arm(n, sorted((r for r in kept.values() if r.arm == n), key=lambda r: (r.seed or 0, str(r.directory))))
        for n in ordered
    ]


def measures_of(arms: Iterable[Arm]) -> list[str]:
    """What the arms were evaluated on: accuracies first, then whatever else their results report at the end."""
    runs = [run for arm in arms for run in arm.runs]
    evaluated = {name.removeprefix("eval/") for run in runs for name in run.names if name.startswith("eval/")}
    accuracies = {name for name in evaluated if name.startswith(ACCURACY)}
    reported = list(dict.fromkeys(name for run in runs for name in (run.result or {}).get("final") or {}))
    if not evaluated:  # metrics.jsonl is gone
        return sorted({ACCURACY + label(name) for name in reported})
    others = [name for name in reported if name in evaluated and not name.startswith(ACCURACY)]
    return sorted(accuracies) + others[:MOST_OTHERS]


def _finished(run: Run) -> float:
    return (run.directory / RESULT).stat().st_mtime


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _natural(name: str) -> list[tuple[int, Any]]:
    """Sort key that puts lr=2 before lr=10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]
