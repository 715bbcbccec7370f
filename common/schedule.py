"""The learning rate as a factor of its peak, a pure function of the update's number."""

from __future__ import annotations

import math

from common.errors import UserError, one_of

SCHEDULES = ("constant", "linear", "cosine")


def lr_factor(schedule: str, update: int, total: int | None, warmup: int = 0) -> float:
    """Factor in [0, 1] for update 0, 1, ..., total - 1.

    A linear warmup, min(1, (update + 1) / warmup), times the decay, which runs over the whole horizon (`total`) from 1
    at update 0 towards 0 at `total`. Raises UserError where a decay has no horizon to run over.
    """
    one_of("optim.schedule", schedule, SCHEDULES)
    rise = min(1.0, (update + 1) / warmup) if warmup else 1.0
    if schedule == "constant":
        return rise
    if total is None:
        raise UserError(
            f"optim.schedule={schedule} needs a horizon; give steps or optim.epochs, or use schedule=constant."
        )
    done = min(1.0, update / total)
    return rise * (1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
