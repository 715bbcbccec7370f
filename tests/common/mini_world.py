"""A world small enough to reason about: a table of logits is the policy, a fixed code for each prompt is the task.

It implements the doors of common/interfaces.py and nothing else, so a trainer that runs here knows no more than the
doors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from common.distributed import World
from common.interfaces import Batch, Experience, Metrics, Sample
from common.seeding import numpy_rng, torch_rng

PROMPTS, ANSWER, VOCAB = 6, 3, 4
ALONE = World()


class TablePolicy:
    """Autoregressive over (prompt, position, previous token): every expectation can be enumerated."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 0, world: World = ALONE, answer_len: int = ANSWER) -> None:
        table = torch.randn(PROMPTS, answer_len, VOCAB + 1, VOCAB, generator=torch_rng(seed, "table"))
        self.table = nn.Parameter(table)
        self.answer_len, self.world = answer_len, world
        self.forwards = 0

    def _logits(self, prompts: Tensor, t: int, previous: Tensor) -> Tensor:
        return self.table[prompts, t, previous]

    @torch.no_grad()
    def sample(
        self, prompts: Tensor, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        rows = prompts.repeat_interleave(group)
        previous, answers, logps = torch.full_like(rows, VOCAB), [], []
        for t in range(self.answer_len):
            step = (self._logits(rows, t, previous) / temperature).log_softmax(-1)
            if uniforms_NA is None:
                previous = step.argmax(-1)
            else:
                below = step.double().exp().cumsum(-1) <= uniforms_NA[:, t : t + 1]
                previous = below.sum(-1).clamp(max=VOCAB - 1)
            answers.append(previous)
            logps.append(step.gather(-1, previous[:, None])[:, 0])
        written = torch.stack(answers, -1)
        return Sample(written, torch.stack(logps, -1), torch.ones_like(written, dtype=torch.bool))

    def answer_logits(self, prompts: Tensor, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        self.forwards += 1
        rows = prompts.repeat_interleave(group)
        assert len(rows) == len(answers_NA)
        previous = torch.cat([torch.full_like(answers_NA[:, :1], VOCAB), answers_NA[:, :-1]], -1)
        return self.table[rows[:, None], torch.arange(answers_NA.shape[1]), previous]

    def frozen(self, name: str) -> TablePolicy:
        copy = TablePolicy(answer_len=self.answer_len)
        copy.table = nn.Parameter(self.table.detach().clone(), requires_grad=False)
        return copy

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        yield
        if last and self.world.size > 1:  # what DDP does
            dist.all_reduce(self.table.grad)
            self.table.grad /= self.world.size

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [("table", self.table)]

    def state(self) -> dict[str, Tensor]:
        return {"table": self.table.detach()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.table.copy_(state["table"])

    def save(self, directory: Path) -> None:
        if self.world.main:
            save_file({"table": self.table.detach().clone()}, str(directory / "model.safetensors"))


class CodeTask:
    """Each prompt has one right code; prompts 0-2 are subject "a", 3-5 "b". Reward: share of right tokens, or all."""

    subjects = ("a", "b")
    size: int | None = None
    offline = False

    def __init__(self, seed: int = 0, world: World = ALONE, *, partial: bool = False, answer_len: int = ANSWER) -> None:
        self.seed, self.world, self.partial = seed, world, partial
        self.codes = torch.randint(0, VOCAB, (PROMPTS, answer_len), generator=torch_rng(99, "codes"))

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        prompts = torch.from_numpy(numpy_rng(self.seed, f"problems {draw}", step).integers(0, PROMPTS, n))
        answers = self.codes[prompts]
        subjects = ["a" if p < PROMPTS // 2 else "b" for p in prompts.tolist()]
        return Batch(prompts, subjects, prompts.tolist(), answers, torch.ones_like(answers, dtype=torch.bool))

    def experience(
        self, policy: TablePolicy, batch: Batch, group: int, *, temperature: float, uniforms_NA: Tensor
    ) -> Experience:
        sample = policy.sample(batch.prompts, group, temperature=temperature, uniforms_NA=uniforms_NA)
        right = sample.answers_NA == self.codes[batch.prompts.repeat_interleave(group)]
        rewards = right.float().mean(-1) if self.partial else right.all(-1).float()
        return Experience(
            batch.prompts, sample.answers_NA, sample.mask_NA, batch.subjects, batch.row_ids, group, temperature,
            rollout_logps=sample.logps_NA, rewards_N=rewards,
        )  # fmt: skip

    def evaluate(self, policy: TablePolicy) -> Metrics:
        if not self.world.main:
            return {}
        written = policy.sample(torch.arange(PROMPTS)).answers_NA
        right = (written == self.codes).float()
        return {
            "acc/code": (float(right.all(-1).sum()), PROMPTS),
            "acc/digit": (float(right.sum()), float(right.numel())),
        }

    def score(self, metrics: Mapping[str, float]) -> float:
        return metrics["acc/digit"]


def teacher(task: CodeTask, strength: float = 4.0) -> TablePolicy:
    """A policy that gives the right code's tokens `strength` nats more than the others, whatever came before."""
    policy = TablePolicy(answer_len=task.codes.shape[1])
    with torch.no_grad():
        policy.table.zero_()
        for prompt in range(PROMPTS):
            for t in range(task.codes.shape[1]):
                policy.table[prompt, t, :, task.codes[prompt, t]] = strength
    return policy.frozen("teacher")


class Recorder:
    """Keeps what a loop logs."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float], times: Mapping[str, float] | None = None) -> None:
        self.lines.append((step, dict(values)))

    def advance(self, step: int) -> None:
        pass

    def rewind(self, step: int) -> None:
        self.lines = [line for line in self.lines if line[0] <= step]
