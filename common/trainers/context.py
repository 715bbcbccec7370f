"""What a trainer is given: a policy, a task, and a run's plumbing. A method knows no more of its world than this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common.distributed import World
from common.interfaces import Policy, Task


class Recorder(Protocol):
    """The part of `common.tracking.Tracker` that a loop uses."""

    def log(self, step: int, values: Mapping[str, float], times: Mapping[str, float] | None = None) -> None: ...
    def advance(self, step: int) -> None: ...
    def rewind(self, step: int) -> None: ...


class Silent:
    """Records nothing: teachers and warm starts are built without a run of their own."""

    def log(self, step: int, values: Mapping[str, float], times: Mapping[str, float] | None = None) -> None:
        """Nothing."""

    def advance(self, step: int) -> None:
        """Nothing."""

    def rewind(self, step: int) -> None:
        """Nothing."""


@dataclass
class Context:
    """One run of a method. `report` is filled by the trainer and becomes part of result.json."""

    policy: Policy
    task: Task
    world: World
    seed: int = 0
    steps: int | None = None  # optimizer updates; with optim.epochs the smaller of the two ends the run
    rounds: int | None = None  # rollout rounds, for methods that have them
    eval_every: int | None = 20  # updates; None = once an epoch
    log_every: int | None = None  # updates; None = with each evaluation
    teachers: Mapping[str, Policy] = field(default_factory=dict)  # by subject, built when first asked for
    reference: Callable[[], Policy] | None = None  # the frozen reference; None = the policy as it started
    recorder: Recorder = field(default_factory=Silent)
    checkpoints: Any = None  # common.checkpoint.Checkpoints; None = none are kept
    resume: bool = False
    optimizer_state: Path | None = None  # an earlier run's optimizer to continue
    stop: Callable[[Mapping[str, float]], bool] | None = None  # ends the run early, asked after each evaluation
    report: dict[str, Any] = field(default_factory=dict)
