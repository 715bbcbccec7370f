"""Rollouts as a file of rows, whole or absent: a block of states at a time, continued after a kill, joined at the end.

OUT/parts/<fingerprint>/00003.jsonl appears whole when its block has been played; OUT/train.jsonl when all have. A
second start plays the missing blocks only. Parts of another adapter, template, seed or setting have another fingerprint
and are not mixed in. Advantages need the whole round, so they are computed when the parts are joined.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bt_policy.babyai.episodes import Episode
from bt_policy.babyai.expert import save_frame
from bt_policy.babyai.task import BabyAITask
from bt_policy.rollout import fingerprints
from common.advantages import Advantage
from common.errors import UserError
from common.files import write_text
from common.interfaces import Batch, Policy
from common.seeding import uniforms
from common.trainers.rollout import Sampling


def write(
    out: Path, task: BabyAITask, policy: Policy, *, levels: Sequence[int], seed: int, number: int, rows: int | None,
    sampling: Sampling, advantage: Advantage, say: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Play round `number` as `common.trainers.rollout.sample` does and write OUT/train.jsonl; returns its path."""
    target = out / "train.jsonl"
    problems = max(1, rows // sampling.group) if rows is not None else task.size or 1
    batch = task.batch(number, problems)
    noise_NA = uniforms(seed, "rollout 0", number, len(batch) * sampling.group, policy.answer_len)
    marks = {
        "temperature": sampling.temperature,
        "mask": list(levels),
        "adapter": fingerprints.of_adapter(policy.state()),
        "template": fingerprints.of_template(task.encoder),
    }
    settings = {"seed": seed, "round": number, "problems": len(batch), "group": sampling.group, **marks}
    settings |= task.settings
    parts = out / "parts" / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    if target.exists() and not parts.exists():
        raise UserError(f"out={out} already holds rows of another round; choose another directory.")
    blocks = task.blocks(batch)
    for block, units in enumerate(blocks):
        path = parts / f"{block:05d}.jsonl"
        if path.exists():
            continue
        episodes = task.play(
            policy, batch, units, sampling.group, temperature=sampling.temperature, uniforms_NA=noise_NA
        )
        if task.world.main:
            _write_part(out, path, episodes, marks)
        task.world.barrier()
        say(f"block {block + 1} of {len(blocks)}: {sum(e.success for e in episodes) / len(episodes):.3f} success")
    if task.world.main:
        texts = [(parts / f"{i:05d}.jsonl").read_text() for i in range(len(blocks))]
        played = [json.loads(line) for text in texts for line in text.splitlines()]
        _join(target, played, task, batch, sampling.group, advantage)
        for other in (out / "parts").iterdir():
            if other != parts:
                shutil.rmtree(other)
    task.world.barrier()
    return target


def _write_part(out: Path, path: Path, episodes: Sequence[Episode], marks: Mapping[str, Any]) -> None:
    lines = []
    for episode in episodes:
        steps = []
        for step in episode.steps:
            assert isinstance(step.frame.source, np.ndarray)
            row = {"image": save_frame(out, step.frame.source), "name": step.name, "code": step.choice.code}
            row |= {} if step.memory is None else {"memory": list(step.memory)}
            row |= {"vllm_logp": list(step.choice.logps), "subject": episode.kind, **marks}
            judged = {"in_view": step.in_view, "on_path": step.on_path, "nearer": step.nearer}
            steps.append({"row": row, "judged": judged})
        start = {"level": episode.start.level, "seed": episode.start.seed, "prefix": episode.start.prefix}
        lines.append(json.dumps({"start": start, "success": episode.success, "reward": episode.reward, "steps": steps}))
    write_text(path, "\n".join(lines) + "\n")


def _join(
    target: Path, episodes: Sequence[Mapping[str, Any]], task: BabyAITask, batch: Batch, group: int,
    advantage: Advantage,
) -> None:  # fmt: skip
    """Rewards, groups and advantages of the whole round, as `task.rows` and the trainer compute them."""
    played = [task.recalled(one) for one in episodes]
    judged = task.rows(played, batch, group, 1.0)
    groups_N = judged.groups_N if judged.groups_N is not None else torch.arange(judged.units).repeat_interleave(group)
    assert judged.rewards_N is not None
    values = advantage(judged.rewards_N, groups_N, judged.mask_NA, judged.weights)[:, 0].tolist()
    rewards, weights = judged.rewards_N.tolist(), judged.weights.tolist()
    rows = [step["row"] for one in episodes for step in one["steps"]]
    lines = [
        json.dumps(row | {"adv": adv, "reward": reward})
        for row, adv, reward, weight in zip(rows, values, rewards, weights, strict=True)
        if weight > 0
    ]
    write_text(target, "\n".join(lines) + "\n")
