"""Run directories as `common.run` leaves them, with invented curves: what the tests of the report read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_synthetic_run(
    root: Path,
    arm: str,
    seed: int,
    *,
    ends: Mapping[str, float],
    start: float = 0.3,
    steps: int = 500,
    every: int = 20,
    spread: float = 0.03,
    finished: bool = True,
    app: str = "rlsim",
    **extra: Any,
) -> Path:
    """One run under `<root>/<arm>/seed=<seed>`: each subject's accuracy rises from `start` to about its end."""
    rng = np.random.default_rng([seed, len(arm), sum(map(ord, arm))])
    directory = root / arm / f"seed={seed}"
    directory.mkdir(parents=True, exist_ok=True)
    grid = list(range(0, steps + 1, every))
    rise = 1 - np.exp(-np.arange(len(grid)) / (len(grid) * rng.uniform(0.12, 0.25)))
    curves = {
        subject: np.clip(
            start + (end + rng.normal(0, spread) - start) * rise + rng.normal(0, spread / 4, len(grid)), 0, 1
        )
        for subject, end in ends.items()
    }
    points = [{"step": step, **{s: float(c[i]) for s, c in curves.items()}} for i, step in enumerate(grid)]
    if not finished:
        points = points[: len(points) // 2]
    lines = [metrics_line(point, i, rng) for i, point in enumerate(points)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "run.log").write_text("log\n")
    if finished:
        result = {
            "app": app, "method": arm.split("-")[0], "teachers": "add", "curriculum": "add", "arm": arm, "seed": seed,
            "steps": steps, "start": {s: points[0][s] for s in ends}, "final": {s: points[-1][s] for s in ends},
            "seconds": 100.0 + seed, "curve": [{**point, "signal": None} for point in points],
            "warm": {"steps": 400 + seed, **dict.fromkeys(ends, 0.3)}, "batch": 256, "group": 8, "lr": 5e-4, **extra,
        }  # fmt: skip
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def metrics_line(point: Mapping[str, float], index: int, rng: np.random.Generator) -> dict[str, Any]:
    """One line of metrics.jsonl for a point of the curve."""
    entry: dict[str, Any] = {"step": point["step"], "time/elapsed": index * 2.5 + rng.uniform(0, 0.3)}
    entry |= {f"eval/{s if s == 'success' else f'acc/{s}'}": value for s, value in point.items() if s != "step"}
    if index:
        entry |= {"train/loss": float(np.exp(-index / 8) + rng.uniform(0, 0.05)), "train/kl": float(index * 1e-3)}
        entry |= {"train/grad_norm": float(rng.uniform(0.2, 0.6)), "train/signal": float(rng.uniform(0.4, 0.6))}
    return entry


def write_synthetic_sweep(
    root: Path, arms: Mapping[str, Mapping[str, float]], seeds: Sequence[int], **options: Any
) -> None:
    """A run per arm and seed."""
    for arm, ends in arms.items():
        for seed in seeds:
            write_synthetic_run(root, arm, seed, ends=ends, **options)
