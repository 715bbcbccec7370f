"""From a trainer to draws of its gradient, and from draws to numbers.

A trainer runs with learning rate 0: its weights stay, so every update is an independent draw of the same gradient, made
by the code that really trains. What a draw is compared with may itself be estimated from draws; products of *different*
draws have no bias from the noise of either, so squared norms are means over pairs (U-statistics).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.distributed import World
from common.interfaces import Policy, Task
from common.optimizer import Optim
from common.trainers.context import Context


class GradientRecorder:
    """A run's recorder that keeps the gradient of every update, and the process time between updates."""

    def __init__(self, policy: Policy) -> None:
        self._parameters = [parameter for _, parameter in policy.trainable()]
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._current: Tensor | None = None
        self._began = 0.0
        self.draws: list[Tensor] = []
        self.seconds: list[float] = []

    def __enter__(self) -> GradientRecorder:
        self._handle = register_optimizer_step_pre_hook(self._keep)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _keep(self, *_: Any) -> None:
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._current = torch.cat([gradient.reshape(-1) for gradient in found])

    def log(self, step: int, values: Mapping[str, float], times: Mapping[str, float] | None = None) -> None:
        """The line before the first update starts the clock."""
        self._began = time.process_time()

    def advance(self, step: int) -> None:
        """An update is over; one that had nothing to learn from made no gradient."""
        self.seconds.append(time.process_time() - self._began)
        self.draws.append(torch.zeros(self._size) if self._current is None else self._current)
        self._current, self._began = None, time.process_time()

    def rewind(self, step: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Draws:
    """M draws of a gradient of D numbers, and the median CPU seconds an update."""

    gradients_MD: Tensor
    seconds: float


def draw(
    method: Callable[[Optim], Any], policy: Policy, task: Task, *, updates: int, rows: int, seed: int,
    teacher: Policy | None = None, reference: Policy | None = None,
) -> Draws:  # fmt: skip
    """Gradients of `updates` updates of a method, from `rows` answers each; the weights do not move."""
    optim = Optim(lr=0.0, rows_per_update=rows, optimizer="adam", clip_norm=None)
    teachers = {} if teacher is None else dict.fromkeys(task.subjects, teacher)
    with GradientRecorder(policy) as recorder:
        context = Context(
            policy, task, World(), seed=seed, steps=updates, eval_every=None, teachers=teachers, recorder=recorder,
            reference=None if reference is None else lambda: reference,
        )  # fmt: skip
        method(optim).train(context)
    return Draws(torch.stack(recorder.draws), median(recorder.seconds[1:] or recorder.seconds))


@dataclass(frozen=True)
class Figures:
    """How draws of a gradient compare with the gradient that is claimed. Intervals are half-widths at 95%."""

    cosine: float  # of the expected gradient to the claimed one
    cosine_interval: float
    update_cosine: float  # of one update to the claimed one, on average
    scale: float  # the expected gradient's length along the claimed one, in units of the claimed one
    answers: float  # sampled answers until the squared signal along the claim equals the noise
    answers_interval: float


def squared_norm(gram: Tensor) -> Tensor:
    """|E g|^2 from the inner products of draws: the mean over pairs of different ones (of one draw: its own square)."""
    m = len(gram)
    return gram.sum() if m == 1 else (gram.sum() - gram.trace()) / (m * (m - 1))


def products(first: Tensor, second: Tensor) -> Tensor:
    """Inner products of two sets of gradients, (M, K) float64, summed in float64 in slices that fit a cache."""
    total = torch.zeros(len(first), len(second), dtype=torch.float64)
    for a, b in zip(first.split(16384, 1), second.split(16384, 1), strict=True):
        total += a.double() @ b.double().T
    return total


def compare(draws_MD: Tensor, claim_CD: Tensor, rows: int) -> Figures:
    """Figures of draws (M >= 3), each from `rows` answers, against draws of the claimed gradient (C = 1: it is exact).

    Intervals are jackknifed over both sets.
    """
    gram, claim = products(draws_MD, draws_MD), products(claim_CD, claim_CD)
    cross = products(draws_MD, claim_CD)

    def without(draw: int | None = None, of_claim: int | None = None) -> Tensor:
        m = [i for i in range(len(gram)) if i != draw]
        c = [i for i in range(len(claim)) if i != of_claim]
        return _values(gram[m][:, m], cross[m][:, c], claim[c][:, c], rows)

    variance = _jackknife([without(draw=i) for i in range(len(gram))])
    if len(claim) > 1:
        variance = variance + _jackknife([without(of_claim=i) for i in range(len(claim))])
    cosine, scale, answers, one_update = without().tolist()
    interval = (1.96 * variance.sqrt()).tolist()
    return Figures(cosine, interval[0], one_update, scale, answers, interval[2])


def _jackknife(left_out: list[Tensor]) -> Tensor:
    """Variance of an estimate from its values with one draw left out."""
    return (len(left_out) - 1) * torch.stack(left_out).var(0, correction=0)


def _values(gram: Tensor, cross: Tensor, claim: Tensor, rows: int) -> Tensor:
    """cosine, scale, answers, cosine of one update, from inner products."""
    dots_M, norm, signal = cross.mean(1), squared_norm(claim), squared_norm(gram)
    noise = gram.trace() / len(gram) - signal  # trace of the covariance of one update
    cosine = dots_M.mean() / (signal * norm).sqrt()  # NaN where the noise hides the signal
    one_update = (dots_M / (gram.diagonal() * norm).clamp(min=1e-300).sqrt()).mean()
    return torch.stack([cosine, dots_M.mean() / norm, noise * rows * norm / dots_M.mean().square(), one_update])


def direction(found_D: Tensor, claim_D: Tensor) -> tuple[float, float]:
    """(cosine, scale) of a gradient against the claimed one."""
    dot, claim = float(products(found_D[None], claim_D[None])), float(products(claim_D[None], claim_D[None]))
    return dot / (float(products(found_D[None], found_D[None])) * claim) ** 0.5, dot / claim
