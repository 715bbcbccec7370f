"""BabyAI as a `Task`: start states, episodes played from them, and success on held-out seeds.

Where a batch's states come from and what an answer is worth are words of the configuration (conf/data/babyai.yaml):

- `states`: "start" (where episodes begin) or "expert" (every state on the expert's way; here SFT knows what to copy);
- `decisions`: codes an episode may take. 1 turns every state into a problem of its own, for a verifier;
- `reward`: success (1 at the end), level (its own, discounted), progress (actions nearer, as a share of the code),
  shortest (1 for a code on a shortest path);
- `gamma`: every decision is a row that carries the rewards from it on, discounted by gamma a decision; null gives every
  decision the whole episode's sum;
- `compare`: which rows are each other's baseline, those of the same start ("start"), or only those of them that had as
  many decisions before them ("decision").

The pool of start states is drawn once from (seed, levels) and kept: a round meets the states of earlier rounds again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bt_policy.babyai.episodes import Choice, Episode, Start, Step, choose_with, further_uniforms, play
from bt_policy.babyai.expert import Decision, expert_episode
from bt_policy.babyai.room import CHUNK, HELD_OUT, Room
from bt_policy.encoding import Encoder, Prompts
from bt_policy.frames import Frame
from common.distributed import World
from common.errors import at_least, one_of
from common.interfaces import Batch, Experience, Metrics, Policy
from common.seeding import numpy_rng, torch_rng

BLOCK = 64  # states whose episodes are played at once
KINDS = ("ball", "box", "key")
STATES, REWARDS, COMPARISONS, SUBJECTS = (
    ("expert", "start"), ("success", "level", "progress", "shortest"), ("start", "decision"), ("kind", "level"),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the configuration says about the task. UserError names the first value that cannot work."""

    levels: Sequence[str]
    episodes: int = 256  # seeds in the pool
    states: str = "expert"
    decisions: int = 6
    reward: str = "success"
    gamma: float | None = 1.0
    compare: str = "start"
    in_view: bool = False  # learn only from frames with the target
    memory: int | None = None
    subject: str = "kind"
    kinds: Sequence[str] | None = None  # learn only from episodes with these targets; evaluation meets all of them
    held_out: int = 128  # seeds that are evaluated

    def __post_init__(self) -> None:
        """Looks at every value."""
        one_of("data.states", self.states, STATES)
        one_of("data.reward", self.reward, REWARDS)
        one_of("data.compare", self.compare, COMPARISONS)
        one_of("data.subject", self.subject, SUBJECTS)
        for kind in self.kinds or ():
            one_of("data.kinds", kind, KINDS)
        at_least("data.decisions", self.decisions, 1, whole=True)
        at_least("data.gamma", self.gamma, 0, optional=True)
        at_least("data.memory", self.memory, 1, optional=True, whole=True)
        at_least("data.episodes", self.episodes, 1, whole=True)
        at_least("data.held_out", self.held_out, 1, whole=True)


class BabyAITask:
    """Start states to act from, and how it is judged."""

    offline = False

    def __init__(self, encoder: Encoder, *, seed: int, world: World | None = None, **settings: Any) -> None:
        """settings: the fields of `Settings`."""
        chosen = Settings(**settings)
        self.encoder, self.levels, self.seed, self.world = encoder, list(chosen.levels), seed, world or World()
        self.decisions, self.reward, self.gamma, self.compare = (
            chosen.decisions, chosen.reward, chosen.gamma, chosen.compare,
        )  # fmt: skip
        self.in_view, self.memory, self.subject, self.held_out = (
            chosen.in_view, chosen.memory, chosen.subject, chosen.held_out,
        )  # fmt: skip
        self.pool = _pool(chosen, seed)
        self.size: int | None = len(self.pool)
        self.knows_codes = chosen.states == "expert"
        self.subjects = sorted({self._subject(decision.name, start.level) for start, decision in self.pool})
        drawn = ("levels", "episodes", "states", "decisions", "memory", "kinds")
        self.settings = {name: getattr(chosen, name) for name in drawn} | {"levels": self.levels}
        self.times = {"rollout_seconds": 0.0, "evaluate_seconds": 0.0}  # since the task was made
        self.played: list[Episode] = []  # what `experience` last saw on all ranks, for a file or a report

    @staticmethod
    def check(**settings: Any) -> None:
        """UserError names the first setting that cannot work; asked before a model is loaded."""
        for level in Settings(**settings).levels:
            Room(level)

    def _subject(self, name: str, level: str) -> str:
        return name.split()[-1] if self.subject == "kind" else level

    # -- what is asked -----------------------------------------------------------------------------------------------

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        """The states of update `step`: passes over the pool in orders drawn from (seed, pass)."""
        n = min(n, len(self.pool))
        per_epoch = -(-len(self.pool) // n)
        epoch, within = divmod(step, per_epoch)
        order = torch.randperm(len(self.pool), generator=torch_rng(self.seed, f"babyai/order {draw}", epoch))
        rows = order[within * n : (within + 1) * n].tolist()
        states = [self.pool[i] for i in rows]
        answers_BA = None
        if self.knows_codes:
            codes = [self.encoder.code_ids(decision.code, end=True) for _, decision in states]
            answers_BA = torch.tensor(codes, device=self.world.device)
        return Batch(
            prompts=Prompts(
                [decision.picture for _, decision in states],
                [decision.name for _, decision in states],
                [decision.memory for _, decision in states],
                torch.zeros(len(states), dtype=torch.bool),
            ),
            subjects=[self._subject(decision.name, start.level) for start, decision in states],
            row_ids=rows,
            answers_BA=answers_BA,
            mask_BA=None if answers_BA is None else torch.ones_like(answers_BA, dtype=torch.bool),
        )

    # -- acting ------------------------------------------------------------------------------------------------------

    def experience(
        self, policy: Policy, batch: Batch, group: int, *, temperature: float, uniforms_NA: torch.Tensor
    ) -> Experience:
        """`group` episodes from each state; each rank plays its share, and the rows of all ranks come back."""
        began = time.monotonic()
        self.played = []
        for units in self.blocks(batch):
            self.played += self.play(policy, batch, units, group, temperature=temperature, uniforms_NA=uniforms_NA)
        self.times["rollout_seconds"] += time.monotonic() - began
        return self.rows(self.played, batch, group, temperature)

    def blocks(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """The batch's states as they are played: so many at a time."""
        return torch.arange(len(batch)).split(BLOCK)

    def play(
        self, policy: Policy, batch: Batch, units: torch.Tensor, group: int, *, temperature: float,
        uniforms_NA: torch.Tensor,
    ) -> list[Episode]:  # fmt: skip
        """The episodes of these states, a state's `group` adjacent, on every rank; `uniforms_NA`: the whole batch's."""
        positions, weight = self.world.shard(len(units))
        mine = (units[positions][:, None] * group + torch.arange(group)).reshape(-1)
        numbers = further_uniforms(uniforms_NA)
        chooser = choose_with(
            policy, self.encoder, temperature=temperature, uniforms=lambda decision: numbers(decision)[mine]
        )
        starts = [self.pool[batch.row_ids[row // group]][0] for row in mine.tolist()]
        episodes = play(starts, chooser, decisions=self.decisions, memory=self.memory, world=self.world)
        own = episodes[: int(weight.sum()) * group]  # what only pads the share comes last
        return [episode for part in self.world.gather_objects(own) for episode in part]

    def recalled(self, record: Mapping[str, Any]) -> Episode:
        """An episode as bt_policy/rollout/writer.py wrote it, without its pictures."""
        steps = [self._recalled(one["row"], one["judged"]) for one in record["steps"]]
        kind = record["steps"][0]["row"]["subject"] if record["steps"] else ""
        return Episode(Start(**record["start"]), kind, steps, record["success"], record["reward"])

    def _recalled(self, row: Mapping[str, Any], judged: Mapping[str, Any]) -> Step:
        ids = tuple(self.encoder.code_ids(row["code"], end=False))
        memory = None if row.get("memory") is None else (row["memory"][0], row["memory"][1])
        choice = Choice(row["code"], ids, tuple(row["vllm_logp"]))
        return Step(Frame(row["image"], Path(row["image"])), row["name"], memory, choice, ended=False, **judged)

    def rows(self, episodes: Sequence[Episode], batch: Batch, group: int, temperature: float) -> Experience:
        """The decisions of a batch's episodes as rows."""
        kept, rewards, groups, units = [], [], [], []
        for number, episode in enumerate(episodes):
            unit = number // group
            for at, (step, value) in enumerate(zip(episode.steps, self.values(episode), strict=True)):
                kept.append(step)
                rewards.append(value)
                groups.append(unit * self.decisions + (at if self.compare == "decision" else 0))
                units.append(unit)
        whole = self.decisions == 1  # then rows are units of one prompt each, which a policy may compute once
        device = self.world.device
        answers_NA = torch.tensor([step.choice.ids for step in kept], device=device)
        weight_N = torch.tensor([float(step.in_view or not self.in_view) for step in kept], device=device)
        return Experience(
            prompts=batch.prompts.masked() if whole else _prompts(kept),
            answers_NA=answers_NA,
            mask_NA=torch.ones_like(answers_NA, dtype=torch.bool),
            subjects=batch.subjects if whole else [batch.subjects[unit] for unit in units],
            row_ids=batch.row_ids if whole else [batch.row_ids[unit] for unit in units],
            group=group if whole else 1,
            temperature=temperature,
            weight_N=weight_N if self.in_view and bool(weight_N.any()) else None,
            rollout_logps=torch.tensor([step.choice.logps for step in kept], device=device),
            rewards_N=torch.tensor(rewards, device=device),
            groups_N=None if whole else torch.tensor(groups, device=device),
        )

    def values(self, episode: Episode) -> list[float]:
        """What each decision of an episode is worth."""
        last = len(episode.steps) - 1
        own = [self._reward(step, episode, at == last) for at, step in enumerate(episode.steps)]
        if self.gamma is None:
            return [sum(own)] * len(own)
        values, running = [], 0.0
        for one in reversed(own):
            running = one + self.gamma * running
            values.append(running)
        return values[::-1]

    def _reward(self, step: Step, episode: Episode, last: bool) -> float:
        if self.reward == "progress":
            return step.nearer / CHUNK
        if self.reward == "shortest":
            return float(step.on_path)
        return (float(episode.success) if self.reward == "success" else episode.reward) if last else 0.0

    # -- judging -----------------------------------------------------------------------------------------------------

    def evaluate(self, policy: Policy) -> Metrics:
        """Greedy episodes from this rank's share of the held-out seeds."""
        began = time.monotonic()
        starts = held_out_starts(self.levels, self.held_out)
        units, weight = self.world.shard(len(starts))
        episodes: list[Episode] = []
        for some in units.split(BLOCK * 4):
            part = [starts[i] for i in some.tolist()]
            chooser = choose_with(policy, self.encoder)
            episodes += play(part, chooser, decisions=max(6, self.decisions), memory=self.memory, world=self.world)
        own = episodes[: int(weight.sum())]
        self.times["evaluate_seconds"] += time.monotonic() - began
        return summed(own, [self._subject(episode.kind, episode.start.level) for episode in own])

    def score(self, metrics: Mapping[str, float]) -> float:
        """Success; the shorter way decides among equals."""
        return metrics["success"] + 1e-3 * metrics["return"]


def held_out_starts(levels: Sequence[str], n: int) -> list[Start]:
    """The first n held-out seeds, the levels in turn: the same for every run."""
    return [Start(levels[i % len(levels)], HELD_OUT + i) for i in range(n)]


def summed(episodes: Sequence[Episode], subjects: Sequence[str]) -> Metrics:
    """Success, return and number of decisions as sums and counts, success also by subject."""
    steps = [step for episode in episodes for step in episode.steps]
    n = float(len(episodes))
    metrics: dict[str, Any] = {
        "success": (float(sum(episode.success for episode in episodes)), n),
        "return": (sum(episode.reward for episode in episodes), n),
        "decisions": (float(len(steps)), n),
        "shortest": (float(sum(step.on_path for step in steps)), float(len(steps))),
    }
    for subject in sorted(set(subjects)):
        own = [episode.success for episode, other in zip(episodes, subjects, strict=True) if other == subject]
        metrics[f"success/{subject}"] = (float(sum(own)), float(len(own)))
    return metrics


def _pool(chosen: Settings, seed: int) -> list[tuple[Start, Decision]]:
    """The states that are learned from, with what the expert does in them where `states` says that it is asked."""
    rooms = {level: Room(level) for level in chosen.levels}
    found: list[tuple[Start, Decision]] = []
    used = 0
    for number in numpy_rng(seed, "babyai/pool").permutation(HELD_OUT).tolist():
        if used == chosen.episodes:
            break
        level = chosen.levels[used % len(chosen.levels)]
        room = rooms[level]
        room.reset(number)
        if chosen.kinds and room.kind not in chosen.kinds:
            continue
        used += 1
        if chosen.states == "expert":
            decisions = expert_episode(room, number, chosen.memory)
        else:
            empty = None if chosen.memory is None else ("", "")
            decisions = [Decision(room.picture, room.name, "", room.cells, number, "", empty, room.in_view)]
        kept = [one for one in decisions if one.in_view or not chosen.in_view or chosen.states == "start"]
        found += [(Start(level, number, one.prefix), one) for one in kept]
    return found


def _prompts(steps: Sequence[Step]) -> Prompts:
    return Prompts(
        [step.frame for step in steps],
        [step.name for step in steps],
        [step.memory for step in steps],
        torch.ones(len(steps), dtype=torch.bool),
    )
