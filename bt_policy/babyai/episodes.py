"""Episodes played by anybody: many rooms in step, one decision each, until all are over.

A start is a state: (level, seed) and the actions since (`prefix`): an episode may begin anywhere on the expert's way.
Who decides is a function from the live rooms to codes: `choose_with(policy, ...)` makes one of a policy, `at_random` is
the floor and `as_expert` the ceiling of every table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bt_policy.babyai.expert import expert_digits
from bt_policy.babyai.memory import Memory
from bt_policy.babyai.room import CHUNK, LEVELS, STAY, Room
from bt_policy.encoding import Encoder, Prompts
from bt_policy.frames import Frame
from common.distributed import World
from common.interfaces import Policy
from common.seeding import numpy_rng, torch_rng


@dataclass(frozen=True)
class Start:
    """Where an episode begins."""

    level: str
    seed: int
    prefix: str = ""


@dataclass(frozen=True)
class Choice:
    """A code as it was written: the digits, and, where a policy wrote them, its tokens and their log-probs."""

    code: str
    ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Step:
    """One decision of an episode: what was seen, what was written, and what came of it."""

    frame: Frame
    name: str
    memory: tuple[str, str] | None
    choice: Choice
    in_view: bool  # the frame showed the target
    on_path: bool  # the code lay on a shortest path
    nearer: int  # by how many actions it came nearer; negative where it went away
    ended: bool  # the episode ended with it


@dataclass
class Episode:
    """A start and the decisions made from it."""

    start: Start
    kind: str
    steps: list[Step] = field(default_factory=list)
    success: bool = False
    reward: float = 0.0  # the level's own, discounted by the number of actions


@dataclass
class Live:
    """An episode that is being played."""

    number: int
    room: Room
    episode: Episode
    memory: Memory | None


Chooser = Callable[[Sequence[Live], int], Sequence[Choice]]  # live episodes and the number of the decision -> codes

_rooms: dict[str, list[Room]] = {}


def play(
    starts: Sequence[Start], choose: Chooser, *, decisions: int, memory: int | None = None, world: World | None = None
) -> list[Episode]:
    """One episode a start, of at most so many decisions.

    On several ranks all decide equally often, because a sharded policy's forward is a collective call: a rank whose
    episodes are over asks about one of them again and forgets the answer. Every rank needs a start.
    """
    world = world or World()
    taken: dict[str, int] = {}
    everyone = [_begin(number, start, taken, memory) for number, start in enumerate(starts)]
    for decision in range(decisions):
        live = [one for one in everyone if not one.room.done]
        if world.sum([len(live)])[0] == 0:
            break
        choices = choose(live or everyone[:1], decision)
        for one, choice in zip(live, choices[: len(live)], strict=True):
            _carry_out(one, choice)
    return [one.episode for one in everyone]


def _begin(number: int, start: Start, taken: dict[str, int], memory: int | None) -> Live:
    at = taken[start.level] = taken.get(start.level, -1) + 1
    rooms = _rooms.setdefault(start.level, [])
    if at == len(rooms):
        rooms.append(Room(start.level))
    room = rooms[at]
    room.reset(start.seed)
    remembered = None if memory is None else Memory(memory)
    history = []
    for at, digit in enumerate(start.prefix):
        if (len(start.prefix) - at) % CHUNK == 0:
            history.append((room.position, room.in_view))
        room.step(int(digit))
    if remembered is not None:
        cells = [*(position for position, _ in history), room.position]
        for (position, in_view), after in zip(history, cells[1:], strict=True):
            remembered.add(moved=position != after, in_view=in_view)
    return Live(number, room, Episode(start, room.kind), remembered)


def _carry_out(one: Live, choice: Choice) -> None:
    room, before, in_view = one.room, one.room.position, one.room.in_view
    frame, memory = room.picture, None if one.memory is None else one.memory.strings
    on_path, nearer = room.judge(choice.code)
    one.episode.steps.append(Step(frame, room.name, memory, choice, in_view, on_path, nearer, room.done))
    one.episode.success, one.episode.reward = room.success, room.reward
    if one.memory is not None:
        one.memory.add(moved=room.position != before, in_view=in_view)


def prompts_of(live: Sequence[Live]) -> Prompts:
    """What each room asks now, to be answered with legal digits only."""
    return Prompts(
        [one.room.picture for one in live],
        [one.room.name for one in live],
        [None if one.memory is None else one.memory.strings for one in live],
        torch.ones(len(live), dtype=torch.bool),
    )


def choose_with(
    policy: Policy, encoder: Encoder, *, temperature: float = 1.0, uniforms: Callable[[int], Tensor] | None = None
) -> Chooser:
    """The policy decides: greedily, or with `uniforms(decision)` (episodes, A), of which an episode uses its row."""

    def choose(live: Sequence[Live], decision: int) -> list[Choice]:
        noise = None if uniforms is None else uniforms(decision)[[one.number for one in live]]
        sample = policy.sample(prompts_of(live), temperature=temperature, uniforms_NA=noise)
        return [
            Choice(encoder.code(ids), tuple(ids), tuple(logps))
            for ids, logps in zip(sample.answers_NA.tolist(), sample.logps_NA.tolist(), strict=True)
        ]

    return choose


def further_uniforms(first_NA: Tensor) -> Callable[[int], Tensor]:
    """Numbers for every decision of N episodes, from those of the first: a function of them alone."""
    seed = int(first_NA.flatten()[0].double() * 2**53) if first_NA.numel() else 0

    def numbers(decision: int) -> Tensor:
        if decision == 0:
            return first_NA
        return torch.rand(*first_NA.shape, generator=torch_rng(seed, "decision", decision), dtype=torch.float64)

    return numbers


def at_random(seed: int) -> Chooser:
    """Every code equally likely."""

    def choose(live: Sequence[Live], decision: int) -> list[Choice]:
        drawn = [numpy_rng(seed, f"random {one.number}", decision).integers(0, LEVELS) for one in live]
        return [Choice("".join(map(str, digits))) for digits in drawn]

    return choose


def as_expert() -> Chooser:
    """The expert decides, three actions at a time; it plans in its own copy of the room."""
    plans: dict[int, str] = {}

    def choose(live: Sequence[Live], decision: int) -> list[Choice]:
        choices = []
        for one in live:
            if one.number not in plans:
                plans[one.number] = "".join(map(str, expert_digits(Room(one.room.level), one.room.seed)))
            rest = plans[one.number][one.room.steps :]
            choices.append(Choice((rest + str(STAY) * CHUNK)[:CHUNK]))
        return choices

    return choose
