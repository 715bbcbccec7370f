"""Which subjects are practised when: stages one after the other, each a share of the updates or a number of them.

    stages: [{subjects: ["+"], share: 0.5}, {subjects: ["-"], share: 0.5}]

A stage ends where its cumulative share of the updates, rounded down, is reached; the last one goes on to the end.
Nothing here imports torch: a wrong curriculum is answered at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from common.errors import UserError


@dataclass(frozen=True)
class Curriculum:
    """`stages[i]` is practised from update `starts[i]` on."""

    stages: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]

    @classmethod
    def always(cls, subjects: Iterable[str]) -> Curriculum:
        """One stage without end."""
        return cls((tuple(subjects),), (0,))

    @classmethod
    def from_config(cls, stages: Sequence[Mapping[str, Any]], steps: int) -> Curriculum:
        """Stages over `steps` updates. UserError where they do not fit."""
        if not stages:
            raise UserError('curriculum.stages is empty; give at least one, such as [{subjects: ["+"], share: 1.0}].')
        shares = [_length(stage, i, steps) for i, stage in enumerate(stages)]
        ends = list(accumulate(shares))
        if ends[-1] > 1 + 1e-6:
            raise UserError(
                f"curriculum.stages fill {ends[-1]:.3g} runs of steps={steps}; shorten them or raise steps."
            )
        starts = (0, *(int(end * steps + 1e-6) for end in ends[:-1]))
        return cls(tuple(tuple(stage["subjects"]) for stage in stages), starts)

    @property
    def subjects(self) -> tuple[str, ...]:
        """Every subject of any stage, in order of appearance."""
        return tuple(dict.fromkeys(subject for stage in self.stages for subject in stage))

    def at(self, step: int) -> tuple[str, ...]:
        """The subjects of update `step`."""
        return self.stages[bisect_right(self.starts, step) - 1]


def _length(stage: Mapping[str, Any], i: int, steps: int) -> float:
    """A stage's part of the run."""
    where = f"curriculum.stages[{i}]"
    if not stage.get("subjects"):
        raise UserError(f'{where} has no subjects; write which are practised, such as subjects: ["+"].')
    unknown = set(stage) - {"subjects", "share", "steps"}
    if unknown:
        named = ", ".join(sorted(map(str, unknown)))
        raise UserError(f"{where} has {named}, which is not known; a stage has subjects and either share or steps.")
    share, updates = stage.get("share"), stage.get("steps")
    if (share is None) == (updates is None):
        raise UserError(f"{where} needs either share (a part of the run) or steps (a number of updates).")
    value = share if updates is None else updates
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UserError(f"{where}: {'share' if updates is None else 'steps'}={value} must be a positive number.")
    return float(value) if updates is None else value / steps
