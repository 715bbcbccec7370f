"""summary.md: one row per arm, readable on GitHub and, aligned, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.report.curves import ACCURACY, Arm, Run, label
from common.report.statistics import first_step, interval, median_step

THRESHOLD = 0.9


def summary(
    name: str,
    arms: Sequence[Arm],
    measures: Sequence[str],
    *,
    failed: Sequence[dict[str, Any]],
    unfinished: Sequence[Run],
    root: Path,
) -> str:
    """The whole page: what ran, the table, how to read it, and what is missing."""
    parts = [f"# {name}", described(arms)]
    if arms:
        parts += [table(*rows(arms, measures)), notes(arms, measures), "![curves](curves.png)"]
    if failed:
        parts += ["## Failed jobs", "\n".join(failure(entry, root) for entry in failed)]
    if unfinished:
        lines = [
            f"- {_who(run.arm, run.seed)}: no result.json (log: {_log(run.directory, root)})" for run in unfinished
        ]
        parts += ["## Unfinished jobs", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def described(arms: Sequence[Arm]) -> str:
    """One sentence: application, updates, seeds."""
    results = [run.result or {} for arm in arms for run in arm.runs]
    if not results:
        return "No run finished."
    apps = sorted({str(result["app"]) for result in results if result.get("app")})
    steps = sorted({result["steps"] for result in results if result.get("steps") is not None})
    seeds = sorted({run.seed for arm in arms for run in arm.runs if run.seed is not None})
    said = [*apps, f"{len(arms)} arm{'s' * (len(arms) > 1)}", f"{len(results)} finished run{'s' * (len(results) > 1)}"]
    if seeds:
        said.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
    if steps:
        said.append(f"{_range(steps)} updates a run")
    return f"{'; '.join(said)}."


def rows(arms: Sequence[Arm], measures: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table."""
    fractions = [measure for measure in measures if is_fraction(measure)]
    header = ["arm", "n", *(f"final {label(m)}" for m in measures), *(f"start {label(m)}" for m in measures)]
    header += [f"{label(m)} to {THRESHOLD:.0%}" for m in fractions] + ["seconds"]
    cells = []
    for arm in arms:
        row = [arm.name, str(len(arm.runs))]
        row += [estimate(arm.values("final", m)) for m in measures]
        row += [estimate(arm.values("start", m), width=False) for m in measures]
        row += [speed(arm, m) for m in fractions]
        seconds = [r.result["seconds"] for r in arm.runs if r.result and r.result.get("seconds") is not None]
        row.append(f"{sum(seconds) / len(seconds):.0f}" if seconds else "-")
        cells.append(row)
    return header, cells


def notes(arms: Sequence[Arm], measures: Sequence[str]) -> str:
    """What the columns mean, where a reader could take them for something else."""
    said = ["final and start: mean over n seeds; ± is the 95% interval of that mean (Student t)."]
    if any(len(arm.runs) == 1 for arm in arms):
        said.append("One seed has no interval.")
    if any(is_fraction(measure) for measure in measures):
        said.append(
            f"to {THRESHOLD:.0%}: median over seeds of the first evaluated step at {THRESHOLD:.0%} or more (seeds that"
            " reached it / seeds); a seed that did not counts as later than all others."
        )
    said.append("seconds: mean of a run.")
    return " ".join(said)


def estimate(values: Sequence[float], *, width: bool = True) -> str:
    """`0.957 ± 0.076`, `0.957`, or `-`."""
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.3f}" if half is None or not width else f"{mean:.3f} ± {half:.3f}"


def speed(arm: Arm, measure: str) -> str:
    """`240 (3/3)`; `>500 (1/3)` where the median seed did not get there within its steps."""
    curves = [curve for run in arm.runs if len((curve := run.curve(measure))[0])]
    if not curves:
        return "-"
    median, count = median_step([first_step(*curve, THRESHOLD) for curve in curves])
    last = max(steps[-1] for steps, _ in curves)
    return f"{f'>{last:g}' if median is None else f'{median:g}'} ({count}/{len(curves)})"


def is_fraction(measure: str) -> bool:
    """True for what lies in [0, 1] and is best at 1."""
    return measure == "success" or measure.startswith((ACCURACY, "success/"))


def failure(entry: dict[str, Any], root: Path) -> str:
    """One line for a failed job: who, why, and the log to read."""
    directory = entry.get("directory")
    log = entry.get("log") or (_log(root / directory, root) if directory else None)
    why = str(entry.get("error") or "failed").strip().splitlines()
    said = f"- {_who(entry.get('arm'), entry.get('seed'))}: {why[-1] if why else 'failed'}"
    return f"{said} (log: {log})" if log else said


def table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A GitHub table whose columns line up as plain text: the first to the left, numbers to the right."""
    header, cells = [_escape(text) for text in header], [[_escape(text) for text in row] for row in cells]
    widths = [max(3, *(len(row[i]) for row in [header, *cells])) for i in range(len(header))]

    def render(row: Sequence[str]) -> str:
        texts = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(texts)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([render(header), render(rule), *(render(row) for row in cells)])


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _who(arm: Any, seed: Any) -> str:
    return f"{arm or 'job'}, seed {seed}" if seed is not None else str(arm or "job")


def _log(directory: Path, root: Path) -> str:
    """The log of a job, from the sweep's directory."""
    log = directory / "run.log"
    return (log.relative_to(root) if log.is_relative_to(root) else log).as_posix()


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
