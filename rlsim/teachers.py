"""Teachers by subject, from their specifications (conf/teacher_spec/): trained when first asked for, then cached.

As configuration:

    specs:       {add: {operations: ["+"], target: 0.995, seed: 1, ...}}
    by_subject:  {"+": add, "-": add}          # who grades what; one teacher may grade several subjects
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.distributed import World
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import Recipe, pretrained
from rlsim.problems import Format

log = logging.getLogger(__name__)
MOST_BEGINNINGS = 4096  # first operands with their operation: three digits, a few operations


def teacher_recipe(spec: Mapping[str, Any]) -> Recipe:
    """A specification as a recipe."""
    return Recipe(
        **spec["model"],
        operations=tuple(spec["operations"]),
        target=spec["target"],
        check_every=spec["check_every"],
        max_steps=spec["max_steps"],
        init_seed=spec["seed"],
        problem_seed=spec["seed"],
        purpose="teacher",
        lr=spec["lr"],
        batch=spec["batch"],
        threads=spec["threads"],
    )


class Teachers(Mapping[str, TinyGPTPolicy]):
    """Subject -> frozen policy. Listing the subjects builds nothing; indexing builds that subject's teacher once.

    Subjects with the same teacher give the same object.
    """

    def __init__(
        self,
        by_subject: Mapping[str, str],
        specs: Mapping[str, Mapping[str, Any]],
        form: Format,
        validation: tuple[int, int],
        cache: str | Path,
        world: World,
    ) -> None:
        self._by_subject, self._specs = dict(by_subject), specs
        self._form, self._validation, self._cache = form, validation, cache
        self._world = replace(world, rank=0, size=1, mode="single")  # whole on every rank, never wrapped
        self._built: dict[str, TinyGPTPolicy] = {}
        self.reports: dict[str, dict[str, Any]] = {}  # name -> how its training went, of those that were built

    def __getitem__(self, subject: str) -> TinyGPTPolicy:
        name = self._by_subject[subject]
        if name not in self._built:
            what, recipe = f"teacher {name}", teacher_recipe(self._specs[name])
            policy, report = pretrained(recipe, self._form, self._validation, self._cache, what, self._world)
            log.info("%s: %s", what, report)
            self.reports[name], self._built[name] = report, policy.freeze(self._beginnings(name))
        return self._built[name]

    def _beginnings(self, name: str) -> torch.Tensor | None:
        """How the problems that this teacher grades begin, where there are few ways."""
        graded = [subject for subject, teacher in self._by_subject.items() if teacher == name]
        if len(graded) * 10**self._form.digits > MOST_BEGINNINGS:
            return None
        return torch.from_numpy(self._form.beginnings(graded))

    def __contains__(self, subject: object) -> bool:
        return subject in self._by_subject  # Mapping's own would build it

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_subject)

    def __len__(self) -> int:
        return len(self._by_subject)
