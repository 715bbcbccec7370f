"""What an adapter can do in BabyAI, as a table with intervals, between chance (the floor) and the expert (the ceiling).

- success, return and decisions of held-out episodes, greedy and sampled, by subject; pass@k of the sampled ones;
- codes: how many greedy codes in the expert's states are the expert's own, and how many lie on any shortest path;
- swap test: how often naming another object changes the code. A policy that ignores the name scores 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bt_policy.babyai.episodes import (
    Choice,
    Chooser,
    Episode,
    Start,
    as_expert,
    at_random,
    choose_with,
    further_uniforms,
    play,
)
from bt_policy.babyai.expert import expert_episode
from bt_policy.babyai.room import HELD_OUT, Room
from bt_policy.babyai.task import held_out_starts
from bt_policy.encoding import Encoder, Prompts
from common.interfaces import Policy
from common.seeding import uniforms

DECISIONS = 6
AT_ONCE = 256  # episodes
SWAPPED = {"ball": "box", "box": "key", "key": "ball"}


@dataclass(frozen=True)
class Figure:
    """A mean over n independent trials with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} .. {self.high:.3f}, n={self.n})"


def share(hits: Sequence[bool]) -> Figure:
    """A proportion with Wilson's interval, which stays inside 0 and 1."""
    n = len(hits)
    p, z = sum(hits) / n, 1.959964
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Figure(p, (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n), n)


def mean(values: Sequence[float]) -> Figure:
    """A mean with its normal interval."""
    n = len(values)
    m = sum(values) / n
    half = 1.959964 * math.sqrt(sum((v - m) ** 2 for v in values) / max(1, n - 1) / n)
    return Figure(m, m - half, m + half, n)


def gain(after: Sequence[bool], before: Sequence[bool]) -> Figure:
    """The mean difference of the same trials' outcomes: what they have in common cancels."""
    return mean([float(a) - float(b) for a, b in zip(after, before, strict=True)])


def played(chooser: Chooser, starts: Sequence[Start], memory: int | None) -> list[Episode]:
    """One episode a start, so many at once."""
    episodes: list[Episode] = []
    for at in range(0, len(starts), AT_ONCE):
        episodes += play(starts[at : at + AT_ONCE], _numbered(chooser, at), decisions=DECISIONS, memory=memory)
    return episodes


def greedy(policy: Policy, encoder: Encoder, starts: Sequence[Start], memory: int | None) -> list[Episode]:
    """One greedy episode a start."""
    return played(choose_with(policy, encoder), starts, memory)


def pass_at(k: int, n: int, hits: int) -> float:
    """The chance that at least one of k answers is right, from `hits` right ones of n (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - hits, k) / math.comb(n, k)


def described(episodes: Sequence[Episode]) -> dict[str, Figure]:
    """Success, return, decisions, success by subject."""
    found = {
        "success": share([e.success for e in episodes]),
        "return": mean([e.reward for e in episodes]),
        "decisions": mean([float(len(e.steps)) for e in episodes]),
    }
    for kind in sorted({e.kind for e in episodes}):
        found[f"success/{kind}"] = share([e.success for e in episodes if e.kind == kind])
    return found


def table(
    policy: Policy, encoder: Encoder, levels: Sequence[str], *, held_out: int, samples: int, memory: int | None,
    seed: int = 0,
) -> dict[str, dict[str, Figure]]:  # fmt: skip
    """Row (who decides) -> column -> figure."""
    starts = held_out_starts(levels, held_out)

    numbers = further_uniforms(uniforms(seed, "evaluation", 0, len(starts) * samples, policy.answer_len))
    repeated = [start for start in starts for _ in range(samples)]
    sampled = played(choose_with(policy, encoder, uniforms=numbers), repeated, memory)
    rows = {
        "chance": described(played(at_random(seed), starts, memory)),
        "greedy": described(greedy(policy, encoder, starts, memory)),
        "sampled": described(sampled),
        "expert": described(play(starts, as_expert(), decisions=4 * DECISIONS)),
    }
    hits = [sum(e.success for e in sampled[i : i + samples]) for i in range(0, len(sampled), samples)]
    for k in (k for k in (1, 2, 4, 8) if k <= samples):
        rows["sampled"][f"pass@{k}"] = mean([pass_at(k, samples, h) for h in hits])
    rows["greedy"] |= codes(policy, encoder, levels, max(1, held_out // 4), memory)
    return rows


def _numbered(chooser: Chooser, offset: int) -> Chooser:
    """The chooser for a part of the episodes: each keeps the number that it has among all."""

    def choose(live: Any, decision: int) -> Sequence[Choice]:
        return chooser([replace(one, number=one.number + offset) for one in live], decision)

    return choose


def codes(policy: Policy, encoder: Encoder, levels: Sequence[str], seeds: int, memory: int | None) -> dict[str, Figure]:
    """Greedy codes in the states of the expert's held-out episodes; the swap test is on frames that show the target."""
    rooms = {level: Room(level) for level in levels}
    decisions = [
        (levels[i % len(levels)], decision)
        for i in range(seeds)
        for decision in expert_episode(rooms[levels[i % len(levels)]], HELD_OUT + i, memory)
    ]

    def written(names: Sequence[str]) -> list[str]:
        prompts = Prompts(
            [d.picture for _, d in decisions], list(names), [d.memory for _, d in decisions],
            torch.ones(len(decisions), dtype=torch.bool),
        )  # fmt: skip
        return [encoder.code(ids) for ids in policy.sample(prompts).answers_NA.tolist()]

    plain = written([d.name for _, d in decisions])
    other = written([f"{d.name.split()[0]} {SWAPPED[d.name.split()[-1]]}" for _, d in decisions])
    on_path = []
    for (level, decision), code in zip(decisions, plain, strict=True):
        rooms[level].reset(decision.seed)
        rooms[level].act(decision.prefix)
        on_path.append(rooms[level].judge(code)[0])
    seen = [i for i, (_, d) in enumerate(decisions) if d.in_view]
    return {
        "code = expert": share([code == d.code for code, (_, d) in zip(plain, decisions, strict=True)]),
        "code on a shortest path": share(on_path),
        "the same, target in view": share([on_path[i] for i in seen]),
        "swap test": share([plain[i] != other[i] for i in seen]),
    }
