"""Pictures: a panel per measure with a line per arm and the interval of its mean, or the page of one run.

Drawn without pyplot and with fixed settings, so that a user's matplotlibrc and other figures of the process change
nothing, and the same runs give the same file. Colours are Okabe & Ito's, which colour-blind readers tell apart;
from the eighth arm on, the dashes differ too.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.files import write_bytes
from common.report.curves import ACCURACY, Arm, Run, label
from common.report.statistics import band
from common.report.tables import is_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
GREY = "#555555"
STYLE = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "text.parse_math": False,  # a name may hold a dollar
    "legend.frameon": False,
    "savefig.dpi": 150,
}
MOST_DIRECT = 16  # arms that are labelled at the end of their line; more, or longer names, go into a legend
LONGEST_DIRECT = 26
PANEL = 3.7  # inches, the height of a sweep's panel
MOST_SEED_LINES = 6  # arms up to which single seeds are drawn behind the mean
LONG = 300  # points from which a training metric is smoothed
TRAINING = ("loss", "signal", "reward", "kl", "entropy", "grad_norm")


def draw_sweep(name: str, arms: Sequence[Arm], measures: Sequence[str], path: Path, *, x: str = "step") -> None:
    """curves.png of a sweep: every measure's mean over seeds with its 95% interval."""
    with _settings():
        direct = len(arms) <= MOST_DIRECT and max((len(arm.name) for arm in arms), default=0) <= LONGEST_DIRECT
        few = len(arms) <= MOST_SEED_LINES
        figure, axes = _grid(max(1, len(measures)), width=5.6 if direct else 5.0, height=PANEL)
        for axis, measure in zip(axes, measures, strict=False):
            ends = [_arm(axis, arm, i, measure, x, few=few) for i, arm in enumerate(arms)]
            _frame(axis, measure, x)
            if direct:
                _label_ends(axis, [end for end in ends if end is not None])
        if not arms:
            axes[0].text(0.5, 0.5, "no run finished", ha="center", va="center", transform=axes[0].transAxes)
        caption = _sweep_caption(arms, seeds=few)
        if direct:
            _caption(figure, caption)
        else:
            _legend(figure, axes, caption)
        figure.suptitle(_title(name, arms, measures), x=0.01, ha="left", fontweight="bold", fontsize=11)
        _save(figure, path)


def draw_run(run: Run, path: Path, *, x: str = "step") -> None:
    """curves.png of one run: its evaluations together, then a panel per training metric."""
    with _settings():
        names = [name for name in TRAINING if len(run.series(f"train/{name}", x)[0]) > 1]
        evaluated = sorted(name.removeprefix("eval/") for name in run.names if name.startswith("eval/"))
        fractions = [measure for measure in evaluated if is_fraction(measure)]
        others = [measure for measure in evaluated if not is_fraction(measure)]
        figure, axes = _grid(max(1, bool(fractions) + len(others) + len(names)), width=4.2, height=2.7)
        free = iter(axes)
        if fractions:
            axis = next(free)
            for i, measure in enumerate(fractions):
                axis.plot(
                    *run.curve(measure, x), color=_colour(i), linestyle=_dash(i), marker=".", label=label(measure)
                )
            _frame(axis, ACCURACY if all(m.startswith(ACCURACY) for m in fractions) else "evaluation", x)
            axis.set_ylim(-0.02, 1.02)
            axis.legend(fontsize=8)
        for measure in others:
            axis = next(free)
            axis.plot(*run.curve(measure, x), color=_colour(0), marker=".")
            _frame(axis, measure, x)
        for name in names:
            axis = next(free)
            _training(axis, *run.series(f"train/{name}", x))
            _frame(axis, f"train/{name}", x)
        if not (fractions or others or names):
            axes[0].text(0.5, 0.5, "nothing recorded yet", ha="center", va="center", transform=axes[0].transAxes)
        span = [limit for axis in axes for limit in axis.dataLim.intervalx if math.isfinite(limit)]
        for axis in axes if span and min(span) < max(span) else ():
            axis.set_xlim(min(span) - 0.02 * (max(span) - min(span)), max(span) + 0.02 * (max(span) - min(span)))
        figure.suptitle(_run_title(run), x=0.01, ha="left", fontweight="bold", fontsize=11)
        _save(figure, path)


def _arm(axis: Axes, arm: Arm, index: int, measure: str, x: str, *, few: bool) -> tuple[float, float, str, str] | None:
    """Draw one arm; returns where its line ends, its name and colour."""
    xs, values_SP = arm.curves(measure, x)
    if not len(values_SP) or not len(xs):
        return None
    colour = _colour(index)
    mean_P, half_P = band(values_SP)
    if half_P is not None:
        low, high = mean_P - half_P, mean_P + half_P
        if is_fraction(measure):
            low, high = low.clip(0, 1), high.clip(0, 1)
        axis.fill_between(xs, low, high, color=colour, alpha=0.13 if few else 0.07, linewidth=0)
        if few:
            for values_P in values_SP:
                axis.plot(xs, values_P, color=colour, linewidth=0.6, alpha=0.45)
    axis.plot(xs, mean_P, color=colour, linestyle=_dash(index), label=arm.name, marker="o" if len(xs) == 1 else None)
    return float(xs[-1]), float(mean_P[-1]), arm.name, colour


def _training(axis: Axes, xs: np.ndarray, values: np.ndarray) -> None:
    """A training metric; a long one is shown faintly behind its running mean."""
    if len(xs) <= LONG:
        axis.plot(xs, values, color="black", linewidth=1.2)
        return
    window = len(xs) // 50
    axis.plot(xs, values, color="black", linewidth=0.4, alpha=0.3)
    mean = np.convolve(values, np.ones(window) / window, mode="valid")
    axis.plot(xs[window // 2 : window // 2 + len(mean)], mean, color="black", linewidth=1.4)


def _label_ends(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each arm's name beside the end of its line, pushed apart so that none covers another."""
    if not ends:
        return
    low, high = axis.get_ylim()
    gap = (high - low) * 0.058  # a line of 8-point text in a panel of PANEL inches
    placed = spread([y for _, y, _, _ in ends], gap, low, high)
    left, right = axis.get_xlim()
    beside = right + 0.03 * (right - left)
    for (x, y, name, colour), at in zip(ends, placed, strict=True):
        axis.plot([x, beside], [y, at], color=colour, linewidth=0.6, clip_on=False)
        axis.annotate(
            name, (beside, at), (2, 0), textcoords="offset points", color=colour, fontsize=8, va="center",
            annotation_clip=False,
        )  # fmt: skip
    axis.set_xlim(left, right)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions in the order of `wanted`, at least `gap` apart, within [low, high] where they fit, moved little.

    Neighbours that are too close become a block centred on their mean (pool adjacent violators).
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # [centre, members]
    for i in order:
        blocks.append([wanted[i], 1])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            centre, members = blocks.pop()
            blocks[-1] = [
                (blocks[-1][0] * blocks[-1][1] + centre * members) / (blocks[-1][1] + members),
                blocks[-1][1] + members,
            ]
            half = gap * (blocks[-1][1] - 1) / 2
            blocks[-1][0] = min(max(blocks[-1][0], low + half), max(high - half, low + half))
    positions = [centre + gap * (k - (members - 1) / 2) for centre, members in blocks for k in range(int(members))]
    placed = [0.0] * len(wanted)
    for i, position in zip(order, positions, strict=True):
        placed[i] = position
    return placed


def _frame(axis: Axes, measure: str, x: str) -> None:
    """Title, axis names and limits."""
    if measure.startswith(ACCURACY):
        axis.set_title(f"accuracy ({label(measure)})" if label(measure) else "accuracy")
        axis.set_ylabel("fraction right")
    else:
        axis.set_title(measure)
    axis.set_xlabel({"step": "updates", "time/elapsed": "seconds"}.get(x, x))
    if is_fraction(measure):
        axis.set_ylim(-0.02, 1.02)
    axis.margins(x=0.02)


def _title(name: str, arms: Sequence[Arm], measures: Sequence[str]) -> str:
    apps = sorted({str(run.result["app"]) for arm in arms for run in arm.runs if run.result and run.result.get("app")})
    where = f" ({', '.join(apps)})" if apps else ""
    kind = "accuracy" if measures and all(m.startswith(ACCURACY) for m in measures) else "evaluation"
    return f"{name}{where}: {kind} over training, by arm"


def _run_title(run: Run) -> str:
    seed = "" if run.seed is None else f", seed {run.seed}"
    app = f" ({run.result['app']})" if run.result and run.result.get("app") else ""
    return f"{run.arm}{seed}{app}{'' if run.result else ', not finished'}"


def _sweep_caption(arms: Sequence[Arm], *, seeds: bool) -> str:
    counts = sorted({len(arm.runs) for arm in arms})
    if not counts:
        return ""
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if counts[-1] == 1:
        return "One seed an arm (n = 1): no interval."
    thin = " Thin lines: single seeds." if seeds else ""
    few = " Arms with one seed have no band." if counts[0] == 1 else ""
    return f"Line: mean over n = {n} seeds. Band: 95% interval of that mean (Student t).{thin}{few}"


def _legend(figure: Figure, axes: Sequence[Axes], caption: str) -> None:
    """All arms under the panels, below the caption: two texts that are placed apart would overlap."""
    found = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    longest = max((len(name) for name in found), default=1)
    columns = max(1, min(len(found), int(figure.get_figwidth() * 13 / (longest + 6))))
    figure.legend(
        found.values(), found.keys(), loc="outside lower left", ncols=columns, fontsize=8, alignment="left",
        title=_wrapped(figure, caption), title_fontproperties={"size": 8},
    ).get_title().set_color(GREY)  # fmt: skip


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(_wrapped(figure, text), x=0.01, ha="left", fontsize=8, color=GREY)


def _wrapped(figure: Figure, text: str) -> str:
    return textwrap.fill(text, int(figure.get_figwidth() * 15))


def _grid(panels: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with at least `panels` axes, at most three in a row; the surplus ones are removed."""
    from matplotlib.figure import Figure

    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).ravel())
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _dash(index: int) -> Any:
    return DASHES[index // len(COLOURS) % len(DASHES)]


def _settings() -> Any:
    """matplotlib's own defaults plus ours, whatever the user's matplotlibrc says."""
    import matplotlib

    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"})


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_bytes(path, buffer.getvalue())
