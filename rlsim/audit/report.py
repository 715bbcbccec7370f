"""The audit's table, JSON and picture. Everything that is not a function of options and seed stands under time/."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.files import write_json, write_text
from common.report.canvas import GREY, colour, save, settings, title
from rlsim.audit.entries import REWARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
COLUMNS = (
    "objective", "claims to follow", "exact cosine", "exact scale", "cosine", "cosine of one update",
    "of one update to the reward", "answers", "cost", "price",
)  # fmt: skip
EXPLAINED = """\
- *exact*: the expected gradient on one-digit problems, all answers enumerated, against the gradient of the claim.
  Cosine 1 is no bias of direction; scale is its length along the claim (losses: sums over tokens, means over answers).
- *cosine*: the same on the real task, from {updates} updates of {rows} answers, with its 95% interval (noise can carry
  an estimate past 1; "?", here and below: the noise hides it). *of one update*: what a single update has on average.
- *answers*: sampled answers until the squared signal along the claim equals the noise, i.e. the trace of the gradient's
  covariance an answer over the squared length of its expectation along the claim (the noise scale of arXiv 1812.06162).
- *cost*: CPU time of an update relative to SFT on true answers, sampling and teacher included. *price*: answers times
  cost, in SFT updates of {rows} answers.
"""
NARROW = 0.35  # half-width beyond which a sampled cosine says nothing


def resolved(row: Row) -> bool:
    """Whether the noise scale is known: its interval is narrower than itself."""
    return 0 < row["sampled"]["answers_interval"] < row["sampled"]["answers"]


def price(row: Row, rows: int) -> float:
    """SFT updates of compute until the signal equals the noise."""
    return row["sampled"]["answers"] / rows * row["time/cost"]


def write(directory: Path, rows: Sequence[Row], options: Mapping[str, Any], *, seconds: float) -> Path:
    """audit.md, audit.json and audit.png; the picture's path."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    facts = {
        "options": plain,
        "torch": torch.__version__,
        "objectives": list(rows),
        "time/cpu_seconds": round(seconds, 1),
    }
    write_json(directory / "audit.json", facts)
    text = table(rows, options)
    write_text(directory / "audit.md", text)
    print(text)
    picture = directory / "audit.png"
    draw(rows, options, picture)
    return picture


def table(rows: Sequence[Row], options: Mapping[str, Any]) -> str:
    """Markdown: a table a family, and what the columns mean."""
    lines = ["# Audit", "", f"`python -m rlsim.audit{command(options)}`", "", EXPLAINED.format(**options)]
    for family, members in _families(rows):
        lines += [f"## {family}", "", f"| {' | '.join(COLUMNS)} |", f"|---|---|{'---:|' * (len(COLUMNS) - 2)}"]
        lines += [f"| {' | '.join(_cells(row, options['rows']))} |" for row in members] + [""]
    return "\n".join(lines)


def command(options: Mapping[str, Any]) -> str:
    """The options that differ from the defaults, as they are typed."""
    from rlsim.audit.__main__ import checked, parser

    usual = checked(parser().parse_args([]))
    shown = {name: value for name, value in options.items() if value != usual[name]}
    words = [
        f"--{n.replace('_', '-')} {','.join(map(str, v)) if isinstance(v, tuple) else v}" for n, v in shown.items()
    ]
    return "".join(f" {word}" for word in words)


def _families(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for family, members in groupby(rows, key=lambda row: row["family"]):
        yield family, list(members)


def figures_of(row: Row) -> list[str]:
    """Exact cosine and scale, cosine of one update, answers: what the documentation quotes."""
    sampled, exact = row["sampled"], row["exact"]
    return [
        "" if exact is None else f"{exact['cosine']:.3f}",
        "" if exact is None else f"{exact['scale']:.3g}",
        f"{sampled['update_cosine']:.2f}",
        f"{_rounded(sampled['answers'])} ± {_rounded(sampled['answers_interval'])}" if resolved(row) else "?",
    ]


def _cells(row: Row, rows: int) -> list[str]:
    sampled, interval = row["sampled"], row["sampled"]["cosine_interval"]
    cosine, scale, update, answers = figures_of(row)
    return [
        row["name"],
        row["claim"],
        cosine,
        scale,
        f"{sampled['cosine']:.2f} ± {interval:.2f}" if interval < NARROW else "?",
        update,
        "" if row["claim"] == REWARD else f"{row['reward']['update_cosine']:.2f}",
        answers,
        f"{row['time/cost']:.1f}",
        _rounded(price(row, rows)) if resolved(row) else "?",
    ]


def _rounded(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{round(value, 1 - math.floor(math.log10(abs(value)))):,.10g}"


def draw(rows: Sequence[Row], options: Mapping[str, Any], path: Path) -> None:
    """A line an objective: direction, noise, cost, and the price of both; noise that is not known is left out."""
    from matplotlib.figure import Figure

    with settings():
        families = list(_families(rows))
        height = 1.5 + 0.19 * (len(rows) + 1.4 * len(families))
        figure = Figure(figsize=(13, height), layout="constrained")
        axes = list(figure.subplots(1, 4, sharey=True, width_ratios=[1.5, 1.2, 0.8, 1.2]))
        ticks, y = {}, 0.0
        for i, (family, members) in enumerate(families):
            y += 1.4
            _heading(axes[0], family, y - 0.75, colour(i))
            for row in members:
                _line(axes, row, y, colour(i), options["rows"])
                ticks[y] = row["name"] if row["claim"] == REWARD else f"{row['name']}  [{row['claim']}]"
                y += 1
        axes[0].set_yticks(list(ticks), list(ticks.values()), fontsize=7.5)
        axes[0].set_ylim(y, 0.2)
        _headings(axes, options)
        title(
            figure,
            "What each objective's gradient is worth: on the left its claim, the expected reward unless in brackets",
        )
        save(figure, path)


def _heading(axis: Axes, family: str, y: float, shade: str) -> None:
    place = axis.get_yaxis_transform()
    axis.text(-0.01, y, family, transform=place, ha="right", va="center", color=shade, fontweight="bold", fontsize=8)


def _line(axes: Sequence[Axes], row: Row, y: float, shade: str, rows: int) -> None:
    sampled, exact = row["sampled"], row["exact"]
    if exact is not None:
        axes[0].plot([exact["cosine"]], [y], "x", color="black", markersize=5, zorder=3)
    if sampled["cosine_interval"] < NARROW:
        cosine, interval = [sampled["cosine"]], [sampled["cosine_interval"]]
        axes[0].errorbar(cosine, [y], xerr=interval, fmt="o", color=shade, markersize=4, linewidth=1)
    axes[0].plot([sampled["update_cosine"]], [y], "o", markerfacecolor="white", markeredgecolor=shade, markersize=4.5)
    if resolved(row):
        answers, interval = [sampled["answers"]], [sampled["answers_interval"]]
        axes[1].errorbar(answers, [y], xerr=interval, fmt="o", color=shade, markersize=4, linewidth=1)
        axes[3].plot([price(row, rows)], [y], "D", color=shade, markersize=4)
    axes[2].plot([row["time/cost"]], [y], "o", color=shade, markersize=4)


def _headings(axes: Sequence[Axes], options: Mapping[str, Any]) -> None:
    axes[0].set_title("cosine to the claimed gradient")
    axes[0].set_xlabel(f"x exact (one digit)   \u25cf real task   \u25cb one update of {options['rows']}", fontsize=8)
    axes[0].set_xlim(-0.55, 1.25)
    axes[0].axvline(1, color=GREY, linewidth=0.8)
    axes[1].set_title("noise")
    axes[1].set_xlabel("answers until signal = noise (log)", fontsize=8)
    axes[2].set_title("cost of an update")
    axes[2].set_xlabel("CPU time, SFT = 1", fontsize=8)
    axes[2].set_xlim(left=0)
    axes[3].set_title("price")
    axes[3].set_xlabel("noise x cost, in SFT updates (log)", fontsize=8)
    for axis in (axes[1], axes[3]):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    for axis in axes:
        axis.tick_params(axis="y", length=0)
