"""The picture of one run: its evaluations together, then a panel per training metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.report.canvas import colour, dash, frame, grid, save, settings, title
from common.report.curves import ACCURACY, Run, label
from common.report.tables import is_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_DOTS = 60
LONG = 300  # points from which a training metric is smoothed
TRAINING = ("loss", "signal", "reward", "kl", "entropy", "grad_norm")


def draw_run(run: Run, path: Path, *, x: str = "step") -> None:
    """Write the picture of a run, finished or not."""
    evaluated = sorted(name.removeprefix("eval/") for name in run.names if name.startswith("eval/"))
    fractions = [measure for measure in evaluated if is_fraction(measure)]
    others = [measure for measure in evaluated if not is_fraction(measure)]
    trained = [name for name in TRAINING if len(run.series(f"train/{name}", x)[0]) > 1]
    with settings():
        panels = bool(fractions) + len(others) + len(trained)
        figure, axes = grid(max(1, panels), width=4.2, height=2.7, roomy=False)
        free = iter(axes)
        if fractions:
            _fractions(next(free), run, fractions, x)
        for measure in others:
            axis = next(free)
            xs, values = run.curve(measure, x)
            axis.plot(xs, values, color=colour(0), marker=_marker(xs))
            frame(axis, measure, x)
        for name in trained:
            axis = next(free)
            _training(axis, *run.series(f"train/{name}", x))
            frame(axis, f"train/{name}", x)
        if not panels:
            axes[0].text(0.5, 0.5, "nothing recorded yet", ha="center", va="center", transform=axes[0].transAxes)
        _align(axes)
        title(figure, _title(run))
        save(figure, path)


def _fractions(axis: Axes, run: Run, measures: Sequence[str], x: str) -> None:
    """All evaluations between 0 and 1 in one panel."""
    for i, measure in enumerate(measures):
        xs, values = run.curve(measure, x)
        axis.plot(xs, values, color=colour(i), linestyle=dash(i), marker=_marker(xs), label=label(measure))
    accuracies = all(measure.startswith(ACCURACY) for measure in measures)
    frame(axis, ACCURACY if accuracies else "evaluation", x)
    axis.set_ylim(-0.02, 1.02)
    axis.legend(fontsize=8, loc="best" if len(measures) < 8 else "upper left", ncols=1 + len(measures) // 8)


def _training(axis: Axes, xs: np.ndarray, values: np.ndarray) -> None:
    """A training metric; a long one is shown faintly behind its running mean."""
    if len(xs) <= LONG:
        axis.plot(xs, values, color="black", linewidth=1.2)
        return
    window = len(xs) // 50
    axis.plot(xs, values, color="black", linewidth=0.4, alpha=0.3)
    mean = np.convolve(values, np.ones(window) / window, mode="valid")
    axis.plot(xs[window // 2 : window // 2 + len(mean)], mean, color="black", linewidth=1.4)


def _marker(xs: np.ndarray) -> str | None:
    """Dots where single evaluations can be told apart."""
    return "." if len(xs) <= MOST_DOTS else None


def _align(axes: Sequence[Axes]) -> None:
    """Give all panels the same x range, so that what happens at the same time stands in the same place."""
    span = [limit for axis in axes for limit in axis.dataLim.intervalx if math.isfinite(limit)]
    if span and min(span) < max(span):
        room = 0.02 * (max(span) - min(span))
        for axis in axes:
            axis.set_xlim(min(span) - room, max(span) + room)


def _title(run: Run) -> str:
    seed = "" if run.seed is None else f", seed {run.seed}"
    app = f" ({run.result['app']})" if run.result and run.result.get("app") else ""
    return f"{run.arm}{seed}{app}{'' if run.result else ', not finished'}"
