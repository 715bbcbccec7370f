"""The doors between a method and a world: Policy, Task, and the rows that pass through them.

A method (`common/trainers/`) sees only what is declared here. A world (`rlsim`, `bt_policy`) implements it.

Dimension suffixes, used everywhere: B prompts, G samples of one prompt, N = B * G rows (rows of a prompt adjacent),
A answer positions, T sequence positions, P prompt positions, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

# A prompt collection is opaque to a method: it has a length and is indexed by a LongTensor of positions.
# For TinyGPT it is the token tensor (B, P) itself; for the VLM a list of frames and texts behind the same two
# operations.
Prompts = Any

SCALE = "scale_"  # extras of this prefix are token weights: they vanish with their row's weight

Metrics = dict[
    str, tuple[float, float]
]  # name -> (sum, count): pooled over micro-batches and ranks by adding, never a mean of means


@dataclass(frozen=True)
class Sample:
    """Answers a policy wrote. N = B * group, rows of a prompt adjacent."""

    answers_NA: Tensor  # int64 token ids
    logps_NA: Tensor  # float32, of the written tokens as sampled (temperature and legal mask included)
    mask_NA: Tensor  # bool: True up to and including the answer's end; False tokens are neither scored nor verified


@dataclass(frozen=True)
class Batch:
    """Problems to answer, the same on every rank: a pure function of (seed, step)."""

    prompts: Prompts
    subjects: list[str]  # B
    row_ids: list[int]  # B, to name a row in an error or a report
    answers_BA: Tensor | None = None  # the true answers, where the task knows them
    mask_BA: Tensor | None = None
    rows: Experience | None = None  # an offline task's recorded experience for these prompts (group 1)

    def __len__(self) -> int:
        return len(self.subjects)


@dataclass(frozen=True)
class Experience:
    """Rows to learn from: answers with, where the method needs them, rewards, advantages and recorded log-probs.

    It is *global*: every rank holds all rows of it, and an update takes this rank's share. A unit is a prompt with its
    `group` rows; it is what is shuffled, sharded and split into micro-batches, so that a policy may compute a prompt
    once
    for its samples.
    """

    prompts: Prompts  # B = N / group
    answers_NA: Tensor
    mask_NA: Tensor  # bool
    subjects: list[str]  # B
    row_ids: list[int]  # B
    group: int = 1
    temperature: float = 1.0  # of the sampler; scoring divides by the same
    weight_N: Tensor | None = None  # float32, 0 = a row that only pads; None = all ones
    rollout_logps: Tensor | None = (
        None  # (N, A) per token, or (N,) per answer: the sampler's own, kept apart from the trainer's
    )
    rewards_N: Tensor | None = None
    groups_N: Tensor | None = None  # int64; rows with the same number are compared with each other. None = the units
    advantages: Tensor | None = None  # (N,) or (N, A)
    extras: dict[str, Tensor] = field(
        default_factory=dict
    )  # what a method computed once, leading dimension N (old_logps_NA, ...)

    def __len__(self) -> int:
        """Number of rows N."""
        return len(self.answers_NA)

    @property
    def units(self) -> int:
        """Number of prompts B."""
        return len(self.subjects)

    @property
    def weights(self) -> Tensor:
        """Row weights (N,), ones where none were given."""
        return torch.ones(len(self), device=self.answers_NA.device) if self.weight_N is None else self.weight_N

    def with_extras(self, **tensors: Tensor) -> Experience:
        """The same rows with further per-row tensors."""
        return replace(self, extras={**self.extras, **tensors})

    def weighed(self, weight_N: Tensor) -> Experience:
        """The rows with their weights, and every token weight made from them, times `weight_N` (0 = padding)."""
        factor_N = weight_N.to(self.answers_NA.device)
        extras = {
            name: tensor * factor_N.view(-1, *[1] * (tensor.dim() - 1)) if name.startswith(SCALE) else tensor
            for name, tensor in self.extras.items()
        }
        return replace(self, weight_N=self.weights * factor_N, extras=extras)

    def rows_of(self, units: Tensor) -> Tensor:
        """Row positions of the given units: unit u owns rows u * group ... u * group + group - 1."""
        return (units[:, None] * self.group + torch.arange(self.group)).reshape(-1)

    def select(self, units: Tensor) -> Experience:
        """The given units with everything that belongs to them."""
        rows = self.rows_of(units)
        picked = units.tolist()

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows.to(tensor.device)]

        return replace(
            self,
            prompts=self.prompts[units],
            answers_NA=cut(self.answers_NA),
            mask_NA=cut(self.mask_NA),
            subjects=[self.subjects[u] for u in picked],
            row_ids=[self.row_ids[u] for u in picked],
            weight_N=cut(self.weight_N),
            rollout_logps=cut(self.rollout_logps),
            rewards_N=cut(self.rewards_N),
            groups_N=cut(self.groups_N),
            advantages=cut(self.advantages),
            extras={name: cut(tensor) for name, tensor in self.extras.items()},
        )


@runtime_checkable
class Policy(Protocol):
    """A model that writes answers and scores them. TinyGPT, or a vision-language model with LoRA inside."""

    answer_len: int  # A, the longest answer it writes
    device: torch.device

    def sample(
        self, prompts: Prompts, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        """Write `group` answers to each prompt, without gradient. `uniforms_NA` (N, A) None means greedy."""
        ...

    def answer_logits(self, prompts: Prompts, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        """(N, A, V) logits that predict each answer token; differentiable where gradients are enabled.

        Illegal tokens are -inf exactly as in sampling. Only these positions are computed. This is what DDP or FSDP
        wraps.
        """
        ...

    def frozen(self, name: str) -> Policy:
        """A policy without gradient: "start" copies the current weights, another name is a stored one (an adapter)."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Holds a micro-batch's forward *and* backward; gradients are synchronised over ranks on the last one only."""
        ...

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that an optimizer may change."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The trainable weights, whole and on the CPU. A collective call: every rank makes it."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        ...

    def save(self, directory: Path) -> None:
        """Write the weights as users keep them (safetensors; a PEFT adapter). Every rank calls, rank 0 writes."""
        ...


class Task(Protocol):
    """What is to be learned: problems, how an answer is judged, and how a policy is evaluated."""

    subjects: Sequence[str]  # every subject that can occur
    size: int | None  # rows in an epoch; None = endless
    offline: bool  # True: `batch(...).rows` is recorded experience and nothing is sampled

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        """`n` problems (fewer at the end of an epoch) for this step; a pure function of (seed, step, draw).

        The curriculum is the task's own. Draws 1, 2, ... are further problems for the same step (dynamic sampling).
        """
        ...

    def experience(
        self, policy: Policy, batch: Batch, group: int, *, temperature: float, uniforms_NA: Tensor
    ) -> Experience:
        """Let the policy act on the batch, `group` times a problem, and judge it. Returns the rows of *all* ranks."""
        ...

    def evaluate(self, policy: Policy) -> Metrics:
        """This rank's share of the evaluation, as sums and counts ("acc/+": (right, asked))."""
        ...

    def score(self, metrics: Mapping[str, float]) -> float:
        """One number, higher is better, from pooled `evaluate` metrics: what "best" means."""
        ...
