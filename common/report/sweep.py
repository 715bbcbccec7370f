"""Writes the report of a sweep or of a single run into its directory.

A sweep:  <dir>/<arm>/seed=<n>/...      its runs
          <dir>/results/<name>.json     all numbers: settings, warm starts, and per arm and seed the curve
          <dir>/summary.md              the table, and the jobs that failed
          <dir>/curves.png              mean and band per arm
A run:    <run>/curves.png              its evaluations and training metrics
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.files import write_json, write_text
from common.report.curves import RESULT, Arm, Run, arms_of, label, measures_of, read_run, read_runs
from common.report.tables import rows, summary, table
from common.tracking import METRICS

log = logging.getLogger(__name__)

PICTURE = "curves.png"


def write_run(directory: str | Path) -> Path:
    """Draw the page of one run beside its result.json; returns the picture's path."""
    from common.report.run_page import draw_run

    directory = Path(directory).resolve()
    path = directory / PICTURE
    draw_run(read_run(directory, directory.parent), path)
    return path


def write_sweep(
    directory: str | Path,
    *,
    name: str,
    failed: Sequence[dict[str, Any]] = (),
    arms: Sequence[str] = (),
    x: str = "step",
) -> Path:
    """Write results/<name>.json, summary.md and curves.png of the runs below `directory`; print the table.

    failed: the jobs that raised ({"arm", "seed", "directory", "error"}, whatever of it is known; directory relative or
    absolute). arms: the order to show them in. x: what the picture's curves run over, `step` or a `time/...` metric.
    Returns the picture's path.
    """
    from common.report.plots import draw_sweep

    directory = Path(directory).resolve()
    runs = read_runs(directory)
    found = arms_of(runs, arms)
    measures = measures_of(found)
    failed = [_relative(entry, directory) for entry in failed]
    known = {entry.get("directory") for entry in failed}
    unfinished = [run for run in runs if run.result is None and _inside(run.directory, directory) not in known]

    write_json(directory / "results" / f"{quote(name, safe=' +=,')}.json", results(found, failed, directory))
    write_text(
        directory / "summary.md", summary(name, found, measures, failed=failed, unfinished=unfinished, root=directory)
    )
    if found:
        print(table(*rows(found, measures)))
    for entry in failed:
        print(f"failed: {entry.get('arm')} seed {entry.get('seed')}: {entry.get('error')}")
    path = directory / PICTURE
    draw_sweep(name, found, measures, path, x=x)
    return path


def results(arms: Sequence[Arm], failed: Sequence[dict[str, Any]], root: Path) -> dict[str, Any]:
    """results/<name>.json: settings that all runs share (null where they differ), then the runs."""
    runs = [run for arm in arms for run in arm.runs]
    found: dict[str, Any] = {"steps": _shared(runs, "steps"), "seeds": len({run.seed for run in runs})}
    found |= {key: _shared(runs, key) for key in ("batch", "group", "lr")}
    found["warm"] = [warm for _, warm in sorted(_warm(runs).items())]
    found["runs"] = {arm.name: [_entry(run, root) for run in arm.runs] for arm in arms}
    examples = [run.result["example"] for run in runs if run.result and run.result.get("example")]
    if examples:
        found["example"] = examples[0]
    found["failed"] = list(failed)
    return found


def rebuild(directory: str | Path, x: str = "step") -> Path:
    """Write the report of a sweep or a run again, from what its directory holds now."""
    directory = Path(directory).resolve()
    if (directory / RESULT).exists() or (directory / METRICS).exists():
        return write_run(directory)
    earlier = sorted((directory / "results").glob("*.json"), key=os.path.getmtime)
    name, order, failed = directory.name, [], []
    if earlier:
        stored = json.loads(earlier[-1].read_text(encoding="utf-8"))
        name, order = earlier[-1].stem, list(stored.get("runs", {}))
        failed = [e for e in stored.get("failed", []) if not _finished_since(e, directory)]
    return write_sweep(directory, name=name, failed=failed, arms=order, x=x)


def _entry(run: Run, root: Path) -> dict[str, Any]:
    result = run.result or {}
    return {
        "curve": result.get("curve") or _curve(run),
        "seconds": result.get("seconds"),
        "seed": run.seed,
        "arm": run.arm,
        "directory": _inside(run.directory, root),
        "start": result.get("start"),
        "final": result.get("final"),
    }


def _curve(run: Run) -> list[dict[str, Any]]:
    """The curve as result.json has it, from the metrics."""
    measures = sorted(name for name in run.names if name.startswith("eval/"))
    points = []
    for entry in run.metrics:
        if any(name in entry for name in measures):
            values = {label(name.removeprefix("eval/")): entry.get(name) for name in measures}
            points.append({"step": entry["step"], **values, "signal": entry.get("train/signal")})
    return points


def _shared(runs: Iterable[Run], key: str) -> Any:
    """The value that all runs have, or None."""
    values = [(run.result or {}).get(key) for run in runs]
    return values[0] if values and all(value == values[0] for value in values) else None


def _warm(runs: Iterable[Run]) -> dict[int, Any]:
    """The warm start of each seed: the arms of a sweep share it."""
    found: dict[int, Any] = {}
    for run in runs:
        warm = (run.result or {}).get("warm")
        if warm and run.seed is not None:
            found.setdefault(run.seed, warm)
    return found


def _inside(path: str | Path, root: Path) -> str:
    """A path as seen from the sweep's directory, so that the report can be moved with it."""
    path = Path(path)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _relative(entry: dict[str, Any], root: Path) -> dict[str, Any]:
    entry = dict(entry)
    for key in ("directory", "log"):
        if entry.get(key):
            entry[key] = _inside(entry[key], root)
    return entry


def _finished_since(entry: dict[str, Any], root: Path) -> bool:
    return bool(entry.get("directory")) and (root / entry["directory"] / RESULT).exists()
