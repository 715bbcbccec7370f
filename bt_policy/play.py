"""Playing BabyAI episodes with a policy: many rooms in step, one decision each, until all are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bt_policy.babyai import Room
from bt_policy.encoding import Prompts
from bt_policy.frames import from_array
from common.interfaces import Policy

MOST_DECISIONS = 6


def prompts_of(rooms: Sequence[Room]) -> Prompts:
    """What each room asks now, to be answered with legal digits."""
    n = len(rooms)
    return Prompts(
        [from_array(r.frame) for r in rooms], [r.name for r in rooms], [None] * n, torch.ones(n, dtype=torch.bool)
    )


def success(policy: Policy, level: str, seeds: Sequence[int], code_of: Callable[[Sequence[int]], str]) -> list[bool]:
    """Whether the policy, writing greedily, arrives in each seed's episode. `code_of(ids)` turns tokens into digits."""
    rooms = [Room(level) for _ in seeds]
    for room, seed in zip(rooms, seeds, strict=True):
        room.reset(seed)
    for _ in range(MOST_DECISIONS):
        live = [room for room in rooms if not room.done]
        if not live:
            break
        answers = policy.sample(prompts_of(live)).answers_NA.tolist()
        for room, ids in zip(live, answers, strict=True):
            room.act(code_of(ids))
    return [room.success for room in rooms]
