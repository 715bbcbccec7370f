"""Arithmetic as a `Task`: endless fresh problems of a curriculum, the verifier, and greedy accuracy on fixed problems.

Every draw is a pure function of (seed, step), so a resumed run continues with the problems it would have had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from common.distributed import World
from common.interfaces import Batch, Experience, Metrics, Policy
from common.rollout import sample_sharded
from common.seeding import numpy_rng
from rlsim.curriculum import Curriculum
from rlsim.problems import Format, Problems

EVAL_ROWS = 500  # rows a forward in evaluation: their hidden states stay in a core's cache


def right_answers(written_NA: Tensor, answers_NA: Tensor, mask_NA: Tensor) -> Tensor:
    """The verifier: (N,) True where every token up to the true answer's end is the true one."""
    return ((written_NA == answers_NA) | ~mask_NA).all(-1)


class ArithmeticTask:
    """Endless fresh problems of a curriculum's subjects, and a fixed set to evaluate on."""

    size: int | None = None
    offline = False

    def __init__(
        self,
        form: Format,
        curriculum: Curriculum,
        asked: Mapping[str, Problems],
        *,
        seed: int,
        world: World | None = None,
        purpose: str = "problems",
    ) -> None:
        """`asked`: the evaluation's problems by subject; those of the curriculum's subjects are used.

        purpose: keeps the problems apart from those of another task with the same seed.
        """
        self.form, self.curriculum, self.seed, self.world = form, curriculum, seed, world or World()
        self.subjects: Sequence[str] = curriculum.subjects
        self.purpose = purpose
        self.asked = {subject: tensors([asked[subject]], self.world.device) for subject in self.subjects}

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        """n fresh problems, split evenly over the step's subjects. `draw` > 0 gives others in their place."""
        rng = numpy_rng(self.seed, f"{self.purpose} {draw}" if draw else self.purpose, step)
        subjects = self.curriculum.at(step)
        counts = [n // len(subjects) + (i < n % len(subjects)) for i in range(len(subjects))]
        drawn = [self.form.draw(count, subject, rng) for subject, count in zip(subjects, counts, strict=True)]
        prompts_BP, answers_BA, mask_BA = tensors(drawn, self.world.device)
        return Batch(
            prompts=prompts_BP,
            subjects=[subject for subject, count in zip(subjects, counts, strict=True) for _ in range(count)],
            row_ids=list(range(step * n, (step + 1) * n)),
            answers_BA=answers_BA,
            mask_BA=mask_BA,
        )

    def experience(
        self, policy: Policy, batch: Batch, group: int, *, temperature: float, uniforms_NA: Tensor
    ) -> Experience:
        """Sample `group` answers a problem, each rank its share, and verify them: reward 1 or 0."""
        assert batch.answers_BA is not None
        assert batch.mask_BA is not None
        sample = sample_sharded(policy, batch.prompts, group, temperature, uniforms_NA, self.world)
        answers_NA, mask_NA = (x.repeat_interleave(group, 0) for x in (batch.answers_BA, batch.mask_BA))
        return Experience(
            prompts=batch.prompts,
            answers_NA=sample.answers_NA,
            mask_NA=sample.mask_NA,
            subjects=batch.subjects,
            row_ids=batch.row_ids,
            group=group,
            temperature=temperature,
            rollout_logps=sample.logps_NA,
            rewards_N=right_answers(sample.answers_NA, answers_NA, mask_NA).float(),
        )

    @torch.no_grad()
    def evaluate(self, policy: Policy) -> Metrics:
        """Greedy accuracy by subject on this rank's share of the fixed problems.

        Greedy writing gives the true answer exactly where, with the true answer as input, every token of it is the most
        likely one: one forward decides what writing would need a forward a token for.
        """
        metrics: Metrics = {}
        for subject, asked in self.asked.items():
            positions, weight = self.world.shard(len(asked[0]))
            right = 0.0
            for rows, weight_N in zip(positions.split(EVAL_ROWS), weight.split(EVAL_ROWS), strict=True):
                prompts_BP, answers_BA, mask_BA = (tensor[rows] for tensor in asked)
                written_BA = policy.answer_logits(prompts_BP, answers_BA).argmax(-1)
                right += float((right_answers(written_BA, answers_BA, mask_BA).cpu() * weight_N).sum())
            metrics[f"acc/{subject}"] = (right, float(weight.sum()))
        return metrics

    def score(self, metrics: Mapping[str, float]) -> float:
        """Mean accuracy over the subjects."""
        return sum(metrics[f"acc/{subject}"] for subject in self.subjects) / len(self.subjects)


def tensors(parts: Sequence[Problems], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts (B, P), true answers (B, A) and their masks (B, A) of several draws, one after the other."""
    names = ("prompts_BP", "answers_BA", "mask_BA")
    found = [torch.from_numpy(np.concatenate([getattr(part, name) for part in parts])).to(device) for name in names]
    return found[0], found[1], found[2]
