"""The environment's own expert (`BabyAIBot`) as decisions, and its decisions as a file of rows."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from PIL import Image

from bt_policy.babyai.memory import Memory
from bt_policy.babyai.room import CHUNK, DIGIT, HELD_OUT, STAY, Room
from bt_policy.frames import Frame, from_array
from common.files import replace_directory, write_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """A state that the expert passes through: what is seen, what is asked, and what it does next."""

    picture: Frame
    name: str
    code: str
    cells: np.ndarray  # (7, 7, 3) the view as symbols: kind, colour, state of each cell (x, y)
    seed: int = 0
    prefix: str = ""  # the actions since the episode began: with level and seed, the state
    memory: tuple[str, str] | None = None
    in_view: bool = True  # whether the frame shows the target

    @property
    def frame(self) -> np.ndarray:
        """The frame as pixels, uint8 (112, 112, 3)."""
        assert isinstance(self.picture.source, np.ndarray)
        return self.picture.source


def expert_digits(room: Room, seed: int) -> Iterator[int]:
    """The expert's actions in the episode of this seed; before each, the room is in the state where it is taken."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    room.reset(seed)
    bot: Any = BabyAIBot(room.env)
    while not room.done:
        digit = DIGIT.get(int(bot.replan(None)), STAY)
        yield digit
        room.step(digit)


def expert_episode(room: Room, seed: int, memory: int | None = None) -> list[Decision]:
    """Every state that the expert passes through; [] in the rare case that it does not arrive.

    With `memory` every state carries what the last so many decisions did, had the expert decided every three actions.
    """
    seen, digits, history = [], [], []
    for digit in expert_digits(room, seed):
        seen.append((room.picture, room.name, room.cells, room.in_view))
        history.append((room.position, room.in_view))
        digits.append(digit)
    if not room.success:
        return []
    text = "".join(map(str, digits)) + str(STAY) * CHUNK
    history.append((room.position, room.in_view))
    return [
        Decision(picture, name, text[i : i + CHUNK], cells, seed, text[:i], _memory(history, i, memory), visible)
        for i, (picture, name, cells, visible) in enumerate(seen)
    ]


def _memory(history: list[tuple[tuple[int, int], bool]], now: int, length: int | None) -> tuple[str, str] | None:
    if length is None:
        return None
    memory = Memory(length)
    for at in range(now % CHUNK, now, CHUNK):
        memory.add(moved=history[at][0] != history[at + CHUNK][0], in_view=history[at][1])
    return memory.strings


def expert(level: str, seeds: Iterable[int], memory: int | None = None) -> Iterator[Decision]:
    """The expert's decisions over many episodes."""
    room = Room(level)
    for seed in seeds:
        yield from expert_episode(room, seed, memory)


expert_rows = expert


def write_rows(directory: Path, name: str, decisions: Iterable[Decision], total: int) -> None:
    """directory/name.jsonl and its frames/, each distinct frame once; stops after `total` rows."""
    from tqdm import tqdm

    (directory / "frames").mkdir(parents=True, exist_ok=True)
    lines = []
    bar = tqdm(total=total, desc=f"BabyAI {name}", unit="row", disable=not sys.stderr.isatty(), leave=False)
    for decision in decisions:
        row = {"image": save_frame(directory, decision.frame), "name": decision.name, "code": decision.code}
        if decision.memory is not None:
            row["memory"] = list(decision.memory)
        lines.append(json.dumps(row))
        bar.update()
        if len(lines) == total:
            break
    bar.close()
    write_text(directory / f"{name}.jsonl", "\n".join(lines) + "\n")


def save_frame(directory: Path, pixels: np.ndarray) -> str:
    """Write a frame once, named by its content; the path relative to `directory`."""
    name = f"frames/{from_array(pixels).key[:16]}.png"
    path = directory / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        Image.fromarray(pixels).save(partial, format="PNG", optimize=True)
        partial.replace(path)
    return name


def ensure(directory: Path, *, level: str, train: int, valid: int, memory: int | None = None) -> tuple[Path, Path]:
    """Expert rows in `directory`, made on first use; another process that makes the same ones is waited for."""
    paths = directory / "train.jsonl", directory / "valid.jsonl"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f"{directory.name}.lock")):
        if not all(path.is_file() for path in paths):
            log.info("making %d expert rows of %s in %s (once, under a minute)", train + valid, level, directory)
            with replace_directory(directory) as partial:
                write_rows(partial, "train", expert(level, range(HELD_OUT), memory), train)
                write_rows(partial, "valid", expert(level, range(HELD_OUT, 2 * HELD_OUT), memory), valid)
    return paths
