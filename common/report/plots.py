"""The picture of a sweep: a panel per measure, a line per arm, and the interval of its mean over seeds.

Lines are labelled where they end; many arms, or arms with long names, get a legend.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.report.canvas import GREY, colour, dash, frame, grid, save, settings, title
from common.report.curves import ACCURACY, Arm
from common.report.statistics import band
from common.report.tables import is_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DIRECT = 16  # arms that are labelled at the end of their line; more, or longer names, go into a legend
LONGEST_DIRECT = 26
PANEL = 3.7  # inches, the height of a sweep's panel
MOST_SEED_LINES = 6  # arms up to which single seeds are drawn behind the mean


def draw_sweep(name: str, arms: Sequence[Arm], measures: Sequence[str], path: Path, *, x: str = "step") -> None:
    """curves.png of a sweep: every measure's mean over seeds with its 95% interval."""
    with settings():
        direct = len(arms) <= MOST_DIRECT and max((len(arm.name) for arm in arms), default=0) <= LONGEST_DIRECT
        few = len(arms) <= MOST_SEED_LINES
        figure, axes = grid(max(1, len(measures)), width=5.6 if direct else 5.0, height=PANEL, roomy=True)
        for axis, measure in zip(axes, measures, strict=False):
            ends = [_arm(axis, arm, i, measure, x, few=few) for i, arm in enumerate(arms)]
            frame(axis, measure, x)
            if direct:
                _label_ends(axis, [end for end in ends if end is not None])
        if not arms:
            axes[0].text(0.5, 0.5, "no run finished", ha="center", va="center", transform=axes[0].transAxes)
        caption = _sweep_caption(arms, seeds=few)
        if direct:
            _caption(figure, caption)
        else:
            _legend(figure, axes, caption)
        title(figure, _title(name, arms, measures))
        save(figure, path)


def _arm(axis: Axes, arm: Arm, index: int, measure: str, x: str, *, few: bool) -> tuple[float, float, str, str] | None:
    """Draw one arm; returns where its line ends, its name and colour."""
    xs, values_SP = arm.curves(measure, x)
    if not len(values_SP) or not len(xs):
        return None
    mean_P, half_P = band(values_SP)
    if half_P is not None:
        low, high = mean_P - half_P, mean_P + half_P
        if is_fraction(measure):
            low, high = low.clip(0, 1), high.clip(0, 1)
        axis.fill_between(xs, low, high, color=colour(index), alpha=0.13 if few else 0.07, linewidth=0)
        if few:
            for values_P in values_SP:
                axis.plot(xs, values_P, color=colour(index), linewidth=0.6, alpha=0.45)
    axis.plot(
        xs, mean_P, color=colour(index), linestyle=dash(index), label=arm.name, marker="o" if len(xs) == 1 else None
    )
    return float(xs[-1]), float(mean_P[-1]), arm.name, colour(index)


def _label_ends(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each arm's name beside the end of its line, pushed apart so that none covers another."""
    if not ends:
        return
    low, high = axis.get_ylim()
    gap = (high - low) * 0.058  # a line of 8-point text in a panel of PANEL inches
    placed = spread([y for _, y, _, _ in ends], gap, low, high)
    left, right = axis.get_xlim()
    beside = right + 0.03 * (right - left)
    for (x, y, name, shade), at in zip(ends, placed, strict=True):
        axis.plot([x, beside], [y, at], color=shade, linewidth=0.6, clip_on=False)
        axis.annotate(
            name, (beside, at), (2, 0), textcoords="offset points", color=shade, fontsize=8, va="center",
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


def _title(name: str, arms: Sequence[Arm], measures: Sequence[str]) -> str:
    apps = sorted({str(run.result["app"]) for arm in arms for run in arm.runs if run.result and run.result.get("app")})
    where = f" ({', '.join(apps)})" if apps else ""
    kind = "accuracy" if measures and all(m.startswith(ACCURACY) for m in measures) else "evaluation"
    return f"{name}{where}: {kind} over training, by arm"


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
