"""Makes everything in this folder: the base, an adapter, and the rows that were sampled from it. `make tiny` runs it.

    python -m bt_policy.tiny.make        # some 8 minutes on one core; the same bits on the same machine

base/      a Qwen3.5 of 0.4 M parameters trained on the expert's decisions in BabyAI's 6 x 6 room: first the vision
           tower with linear heads that name what each cell holds, then the language model on the frozen frame
           features.
adapter/   LoRA on top, a short SFT on the 8 x 8 room: what bare `method=ppo` continues.
rollouts/  rows that the adapter wrote in the 8 x 8 room, eight codes a decision, with their log-probs and advantages;
           and validation rows with the expert's codes.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bt_policy import adapters, babyai, prompt
from bt_policy.babyai import Decision
from bt_policy.encoding import Encoder, Prompts
from bt_policy.frames import from_array
from bt_policy.play import success
from bt_policy.rows import Row
from bt_policy.scorer import Scorer, Vision
from bt_policy.task import RowsTask
from bt_policy.tiny import build
from bt_policy.vlm import VLMPolicy
from common.advantages import Advantage
from common.distributed import World
from common.logprobs import token_logps
from common.optimizer import Optim
from common.seeding import torch_rng, uniforms
from common.trainers.context import Context
from common.trainers.sft import SFT

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
SEED = 0
PROMPT = "{name}"  # as conf/model/qwen3_5_tiny.yaml has it
EPISODES = 1500
VISION_UPDATES, LANGUAGE_UPDATES = 150, 700
COLORS, KINDS = ("red", "green", "blue", "purple", "yellow", "grey"), ("ball", "box", "key")
ADAPTER_ROWS, ROLLOUT_FRAMES, GROUP, VALID = 384, 64, 8, 192


def main() -> None:
    """Make all three folders."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    decisions = list(babyai.expert(babyai.ROOM_6, range(EPISODES)))
    log.info("%d decisions of the expert in the 6 x 6 room", len(decisions))
    encoder, base = parts()
    see(base, encoder, decisions, VISION_UPDATES)
    write(base, encoder, decisions, LANGUAGE_UPDATES)
    build.save(HERE / "base", base, encoder.tokenizer, encoder.images)
    policy = adapter(base, encoder)
    rollouts(policy)


def parts() -> tuple[Encoder, Any]:
    """Tokenizer and random model."""
    words = [
        f"user assistant Go to the {color} {kind}. Memory: 0 1.\n{color} {kind}" for color in COLORS for kind in KINDS
    ]
    tokens = build.tokenizer(words * 4)
    base = build.model(build.config(tokens), SEED)
    base.model.language_model.embed_tokens.weight.data.mul_(3)
    return Encoder(tokens, build.image_processor(), prompt.from_config(PROMPT), base), base


def see(base: Any, encoder: Encoder, decisions: Sequence[Decision], updates: int) -> None:
    """Vision warm-up: from each frame token two linear heads name the kind and the colour of its cell."""
    tower, width = base.model.visual, base.config.vision_config.out_hidden_size
    heads = nn.ModuleList([nn.Linear(width, 11), nn.Linear(width, 6)])
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=2e-3)
    images = {from_array(d.frame).key: d for d in decisions}
    pixels = [(encoder.pixels(from_array(d.frame))[0], torch.from_numpy(d.cells).long()) for d in images.values()]
    chooser = random.Random(SEED)
    for step in range(updates):
        some = chooser.sample(pixels, 16)
        grid = torch.tensor([[1, 14, 14]] * len(some))
        features = tower(torch.cat([p for p, _ in some]), grid_thw=grid).pooler_output
        cells = torch.stack([c.transpose(0, 1) for _, c in some]).reshape(-1, 3)
        loss = sum(nn.functional.cross_entropy(head(features), cells[:, i]) for i, head in enumerate(heads))
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 10) * (1 - 0.9 * step / updates)
        optimizer.step()
    log.info("vision: loss %.4f after %d updates", float(loss.detach()), updates)


def write(base: Any, encoder: Encoder, decisions: Sequence[Decision], updates: int) -> None:
    """The language model learns to write the expert's codes; the vision tower is frozen, its features computed once."""
    base.model.visual.requires_grad_(False)
    scorer = Scorer(base)
    vision = Vision(base.model.visual, encoder, nullcontext, 1 << 31)
    parameters = [p for p in base.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)
    chooser, total = random.Random(SEED), 0.0
    frames = [from_array(d.frame) for d in decisions]
    for step in range(1, updates + 1):
        some = chooser.sample(range(len(decisions)), 32)
        loss = -_logps(scorer, vision, encoder, [frames[i] for i in some], [decisions[i] for i in some]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 20) * max(0.05, 1 - step / updates)
        optimizer.step()
        total += float(loss.detach())
        if step % 100 == 0:
            log.info("language: %d updates, loss %.4f", step, total / 100)
            total = 0.0
    base.requires_grad_(True)


def _logps(scorer: Scorer, vision: Vision, encoder: Encoder, frames: Sequence[Any], some: Sequence[Decision]) -> Tensor:
    seen = [vision(frame) for frame in frames]
    prompts = [encoder.encode(d.name, None, grid) for d, (_, grid) in zip(some, seen, strict=True)]
    answers = torch.tensor([encoder.code_ids(d.code, end=True) for d in some])
    inputs, keep = encoder.pad(prompts, "right").with_answers(answers)
    return token_logps(scorer(*inputs, keep, features=tuple(features for features, _ in seen)), answers)


def _rows(decisions: Sequence[Decision]) -> list[Row]:
    return [Row(i, from_array(d.frame), d.name, d.code) for i, d in enumerate(decisions)]


def adapter(base: Any, encoder: Encoder) -> VLMPolicy:
    """A short SFT on the 8 x 8 room, saved to adapter/; success before and after is logged."""
    train = list(babyai.expert(babyai.ROOM_8, range(3_000_000, 3_000_000 + ADAPTER_ROWS // 4)))[:ADAPTER_ROWS]
    model = adapters.attach(
        base, adapter=None, others={}, seed=SEED, r=8, alpha=16, dropout=0.0, modules=adapters.MODULES
    )
    model.peft_config["default"].base_model_name_or_path = "qwen3_5_tiny"
    policy = VLMPolicy(model, encoder, babyai.LEVELS)
    seeds = range(babyai.HELD_OUT + 5000, babyai.HELD_OUT + 5128)
    for level in (babyai.ROOM_6, babyai.ROOM_8):
        log.info("base: success %.3f in %s", _mean(success(policy, level, seeds, encoder.code)), level)
    task = RowsTask(_rows(train), [], encoder, seed=SEED)
    optim = Optim(lr=1e-3, rows_per_update=32, schedule="cosine", warmup=5, epochs=2)
    SFT(optim, targets="reference").train(Context(policy, task, World(), seed=SEED))
    log.info("adapter: success %.3f in %s", _mean(success(policy, babyai.ROOM_8, seeds, encoder.code)), babyai.ROOM_8)
    shutil.rmtree(HERE / "adapter", ignore_errors=True)
    policy.save(HERE / "adapter")
    return policy


def rollouts(policy: VLMPolicy) -> None:
    """Eight sampled codes to each of some decisions, rewarded by the share of digits that are the expert's."""
    target = HERE / "rollouts"
    shutil.rmtree(target, ignore_errors=True)
    order = torch.randperm(ROLLOUT_FRAMES * 4, generator=torch_rng(SEED, "rollouts"))[:ROLLOUT_FRAMES].tolist()
    pool = list(babyai.expert(babyai.ROOM_8, range(4_000_000, 4_000_000 + ROLLOUT_FRAMES)))
    asked = [pool[i] for i in order]
    prompts = Prompts(
        [from_array(d.frame) for d in asked],
        [d.name for d in asked],
        [None] * len(asked),
        torch.ones(len(asked)).bool(),
    )
    noise = uniforms(SEED, "rollouts", 0, len(asked) * GROUP, policy.answer_len)
    sample = policy.sample(prompts, GROUP, uniforms_NA=noise)
    codes = [policy.encoder.code(ids) for ids in sample.answers_NA.tolist()]
    expert = [d.code for d in asked for _ in range(GROUP)]
    rewards = torch.tensor(
        [sum(a == b for a, b in zip(c, e, strict=True)) / len(e) for c, e in zip(codes, expert, strict=True)]
    )
    groups = torch.arange(len(asked)).repeat_interleave(GROUP)
    advantages = Advantage()(rewards, groups, sample.mask_NA, torch.ones(len(codes)))[:, 0]
    babyai.write_rows(target, "valid", babyai.expert(babyai.ROOM_8, range(babyai.HELD_OUT, 10**9)), VALID)
    lines = [
        json.dumps(
            {
                "image": babyai.save_frame(target, asked[i // GROUP].frame),
                "name": asked[i // GROUP].name,
                "code": codes[i],
                "adv": round(float(advantages[i]), 6),
                "vllm_logp": [round(one, 6) for one in sample.logps_NA[i].tolist()],
                "temperature": 1.0,
                "mask": list(policy.levels),
            }
        )
        for i in range(len(codes))
    ]
    (target / "train.jsonl").write_text("\n".join(lines) + "\n")
    log.info("%d rollout rows, mean reward %.3f", len(lines), float(rewards.mean()))


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
