"""PPO without a critic: sample a round of rows (or read them from a file), score them once, several clipped epochs.

Old and reference log-probs are computed once a round without gradient; an epoch visits the rows in a fresh order,
`rows_per_update` at a time, and the clip (arXiv 1707.06347) keeps the policy near the one that wrote the rows. An
offline
task's rows are one round: the trainer of rows that a server produced is the trainer of rows that were just sampled.

    python -m rlsim method=ppo
    torchrun --nproc_per_node=2 -m bt_policy method=ppo data.train=rows.jsonl
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from common.advantages import Advantage
from common.errors import at_least
from common.interfaces import Experience
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.seeding import torch_rng
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.rlvr import policy_gradient_loss, reference_policy
from common.trainers.rollout import Sampling, prepare, sample_with_signal, scaled


def minibatches(rows: Experience, per_update: int, seed: int, round_: int, epoch: int) -> Iterator[Experience]:
    """The rows in a seeded order, in units, `per_update` rows at a time; the last one may be short."""
    order = torch.randperm(rows.units, generator=torch_rng(seed, f"epoch {epoch}", round_))
    for units in order.split(max(1, per_update // rows.group)):
        yield rows.select(units)


@dataclass
class PPO:
    """Rounds of `rows_per_round` sampled rows (None: all that the task has), `epochs` passes over each."""

    optim: Optim
    sampling: Sampling
    rows_per_round: int | None = None
    epochs: int = 2
    objective: PolicyGradient = field(default_factory=PolicyGradient)
    advantage: Advantage = field(default_factory=Advantage)
    mismatch: Mismatch = field(default_factory=Mismatch)
    name: str = "ppo"

    def __post_init__(self) -> None:
        at_least("method.rows_per_round", self.rows_per_round, 1, optional=True, whole=True)
        at_least("method.epochs", self.epochs, 1, whole=True)

    def train(self, context: Context) -> None:
        """Run to the horizon; an offline task's rows make exactly one round."""
        reference = reference_policy(context, self.objective)
        optim = self.optim
        if context.task.offline:
            context.rounds, optim = 1, replace(optim, epochs=self.epochs)
        loop = Loop(context, optim)
        asked = None if context.task.offline else self.rows_per_round  # a recorded round is learned from whole
        for round_ in loop.rounds():
            rows, sampled = sample_with_signal(context, loop.round_batch, asked, self.sampling)
            rows, mismatched = prepare(
                context, rows, objective=self.objective, advantage=self.advantage, mismatch=self.mismatch,
                reference=reference, micro_batch=self.optim.micro_batch, score_old=True,
            )  # fmt: skip
            self._update(context, loop, rows, round_, sampled | mismatched)

    def _update(self, context: Context, loop: Loop, rows: Experience, round_: int, measured: dict[str, float]) -> None:
        made = loop.round_progress()
        if made == 0:
            loop.count_once(measured)
            context.report.setdefault("rounds", []).append(
                {"round": round_, "rows": len(rows), **measured, "epochs": []}
            )
        seen = 0
        for epoch in range(self.epochs):
            for minibatch in minibatches(rows, self.optim.rows_per_update, context.seed, round_, epoch):
                seen += 1
                if loop.done:
                    break
                if seen > made:
                    loop.update(
                        scaled(minibatch, self.objective),
                        lambda micro: policy_gradient_loss(context, self.objective, micro),
                    )
            reported = context.report["rounds"][-1]["epochs"]
            if len(reported) == epoch and not (seen <= made and loop.done):
                reported.append(loop.epoch_report())
