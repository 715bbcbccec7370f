"""One BabyAI level: frames out, behaviour codes in. The controller and the verifier are here.

The agent sees its own 7 x 7 view at 16 pixels a cell (112 x 112). A code is a chunk of its next three actions, a digit
each: 0 turn left, 1 turn right, 2 go forward, 3 done (also: stay). The level ends, with success, as soon as the agent
has acted and faces the target; what is left of the code is then not carried out.

Everything is a function of (level, seed) and the codes: minigrid's own generator is seeded at `reset`, and nothing else
is random. Seeds from HELD_OUT on are for evaluation; no training seed reaches them.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from bt_policy.frames import Frame, from_array
from common.errors import UserError

CHUNK = 3  # actions in a code
LEVELS = (4, 4, 4)
LEFT, RIGHT, FORWARD, STAY = range(4)
ENV_ACTION = {LEFT: 0, RIGHT: 1, FORWARD: 2, STAY: 6}  # digit -> minigrid's action
DIGIT = {action: digit for digit, action in ENV_ACTION.items()}
TILE = 16
HELD_OUT = 1_000_000  # seeds of [0, HELD_OUT) are trained on, seeds from here on are evaluated
ROOM_6, ROOM_8 = "BabyAI-GoToObjS6-v1", "BabyAI-GoToObj-v0"
ROOM_10 = "BabyAI-GoToObj-v0?room_size=10"  # a level may have options of its class
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of the four directions, as minigrid counts them


@lru_cache(maxsize=4096)
def _tile(kind: int, color: int, state: int, agent: bool) -> np.ndarray:
    """One cell as minigrid draws it: kind 0 is out of sight, anything else is lit."""
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import WorldObj

    thing = None if kind in (0, 1) else WorldObj.decode(kind, color, state)
    return Grid.render_tile(thing, agent_dir=3 if agent else None, highlight=kind != 0, tile_size=TILE).astype(np.uint8)


@lru_cache(maxsize=50_000)  # 37 kB each
def _picture(cells: bytes) -> Frame:
    """A view's pixels: a function of its symbols, so that equal views share one picture."""
    view = np.frombuffer(cells, dtype=np.uint8).reshape(7, 7, 3)
    rows = [[_tile(*map(int, view[x, y]), agent=(x, y) == (3, 6)) for x in range(7)] for y in range(7)]
    pixels = np.concatenate([np.concatenate(row, axis=1) for row in rows])
    pixels.setflags(write=False)
    return from_array(pixels)


class Room:
    """One level (its options behind a "?"); an episode at a time.

    `picture`, `name`, `cells` and `in_view` say what the agent sees now.
    """

    def __init__(self, level: str = ROOM_8) -> None:
        try:
            import gymnasium
            import minigrid  # noqa: F401  (registers the levels)
        except ImportError as error:
            raise UserError("BabyAI needs minigrid: pip install 'minigrid>=3.0' (the extra [env]).") from error
        try:
            name, _, options = level.partition("?")
            extra = {key: int(value) for key, value in parse_qsl(options, strict_parsing=bool(options))}
            self.env: Any = gymnasium.make(name, disable_env_checker=True, **extra).unwrapped
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise UserError(f"data.levels: {level} is not a level of minigrid ({error}).") from None
        # A view costs more than the action before it: it is computed when somebody looks, and once for all who do.
        self.env.gen_obs, self.env.gen_obs_grid = dict, self._view
        self.level = level
        self.done, self.success, self.steps = True, False, 0
        self.reward = 0.0  # the level's own: 1 - 0.9 * steps / most steps, on success
        self.name = ""

    # -- the course of an episode ------------------------------------------------------------------------------------

    def reset(self, seed: int) -> None:
        """Begin the episode of this seed."""
        self.env.reset(seed=seed)
        self.seed, self.done, self.success, self.steps, self.reward = seed, False, False, 0, 0.0
        self._seen: tuple[Any, np.ndarray] | None = None
        self._distances: dict[tuple[int, int, int], int] | None = None
        mission = self.env.mission
        if not mission.startswith("go to "):
            raise UserError(
                f"data.levels: {self.level} asks {mission!r}; only levels whose mission is to go to an object fit."
            )
        self.name = mission.removeprefix("go to ").removeprefix("the ").removeprefix("a ")

    def step(self, digit: int) -> None:
        """One primitive action; nothing happens once the episode is over."""
        if self.done:
            return
        _, reward, terminated, truncated, _ = self.env.step(ENV_ACTION[digit])
        self._seen = None
        self.steps += 1
        self.done, self.success = terminated or truncated, bool(terminated and reward > 0)
        self.reward = float(reward)

    def act(self, code: str) -> None:
        """Carry out a code."""
        for digit in code:
            self.step(int(digit))

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _view(self, agent_view_size: int | None = None) -> tuple[Any, np.ndarray]:
        """(what lies in the view, what of it is in sight), as minigrid's own `gen_obs_grid` has it."""
        if agent_view_size is not None:
            return type(self.env).gen_obs_grid(self.env, agent_view_size)
        if self._seen is None:
            self._seen = type(self.env).gen_obs_grid(self.env)
        return self._seen

    @property
    def cells(self) -> np.ndarray:
        """The view as symbols (7, 7, 3): kind, colour and state of each cell (x, y); kind 0 is out of sight."""
        grid, in_sight = self._view()
        return grid.encode(in_sight)

    @property
    def picture(self) -> Frame:
        """The view as the policy is given it."""
        return _picture(self.cells.tobytes())

    @property
    def frame(self) -> np.ndarray:
        """The view as pixels, uint8 (112, 112, 3), read-only."""
        pixels = self.picture.source
        assert isinstance(pixels, np.ndarray)
        return pixels

    @property
    def in_view(self) -> bool:
        """Whether the target is among the cells that the agent sees."""
        inside = [self.env.relative_coords(*position) for position in self._targets() if self.env.in_view(*position)]
        return any(bool(self._view()[1][cell]) for cell in inside)

    @property
    def position(self) -> tuple[int, int]:
        """The agent's cell."""
        x, y = self.env.agent_pos
        return int(x), int(y)

    def _targets(self) -> list[tuple[int, int]]:
        return [(int(x), int(y)) for x, y in self.env.instrs.desc.obj_poss]

    @property
    def kind(self) -> str:
        """What the target is: ball, box or key (a subject of its own for MOPD)."""
        return self.name.split()[-1]

    # -- the verifier ------------------------------------------------------------------------------------------------

    @property
    def to_go(self) -> int:
        """The least number of actions until success; 0 once there.

        At least 1 before: an episode that starts in front of its target needs one action that keeps it there.
        """
        if self.success:
            return 0
        return max(1, self._distance())

    def _distance(self) -> int:
        """Actions until the agent faces the target: breadth-first backwards from all such poses, once an episode."""
        if self._distances is None:
            self._distances = self._search()
        pose = (*self.position, int(self.env.agent_dir))
        if pose not in self._distances:
            raise UserError(
                f"data.levels: in seed {self.seed} of {self.level} the target cannot be reached by turning and walking."
            )
        return self._distances[pose]

    def _search(self) -> dict[tuple[int, int, int], int]:
        grid = self.env.grid

        def free(x: int, y: int) -> bool:
            if not (0 <= x < grid.width and 0 <= y < grid.height):
                return False
            cell = grid.get(x, y)
            return cell is None or cell.can_overlap()

        facing = [(x - dx, y - dy, d) for x, y in self._targets() for d, (dx, dy) in enumerate(STEPS)]
        goals = [pose for pose in facing if free(*pose[:2])]
        found = dict.fromkeys(goals, 0)
        waiting = deque(goals)
        while waiting:
            x, y, d = pose = waiting.popleft()
            dx, dy = STEPS[d]
            for other in ((x, y, (d + 1) % 4), (x, y, (d - 1) % 4), (x - dx, y - dy, d)):
                if other not in found and free(*other[:2]):
                    found[other] = found[pose] + 1
                    waiting.append(other)
        return found

    def judge(self, code: str) -> tuple[bool, int]:
        """Carry out a code. (whether every action of it lay on a shortest path, by how many actions it came nearer)"""
        start, steps = self.to_go, self.steps
        self.act(code)
        nearer = start - self.to_go
        return nearer == self.steps - steps and nearer > 0, nearer
