"""SFT distillation: copy given answers by cross entropy. The student never tries anything itself.

loss = mean over scored tokens of -log p(token). The targets are a teacher's greedy answers (distillation of its argmax;
no soft labels, that is OPD's) or the true ones. Off-policy: every prefix is the target's, so nothing is learned about
recovering from the student's own mistakes.

    python -m rlsim method=sft                         # copies the addition teacher
    python -m rlsim method=sft method.targets=reference
    python -m bt_policy method=sft                     # copies the rows' codes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.aggregation import AGGREGATES, token_weights
from common.errors import UserError, one_of
from common.interfaces import Batch, Experience, Metrics
from common.logprobs import gather_tokens, log_probs
from common.objectives import cross_entropy
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.scoring import masked_mean


def reference_rows(batch: Batch) -> Experience:
    """The batch's true answers as rows to learn from; UserError where the task does not know them."""
    if batch.answers_BA is None or batch.mask_BA is None:
        raise UserError(
            "method.targets=reference needs a task that knows the true answers; use method.targets=teacher."
        )
    return Experience(batch.prompts, batch.answers_BA, batch.mask_BA, batch.subjects, batch.row_ids)


@torch.no_grad()
def teacher_rows(context: Context, batch: Batch) -> Experience:
    """The greedy answers of each row's teacher, on every rank; a rank asks only about its share."""
    units, _ = context.world.shard(len(batch))
    subjects = [batch.subjects[u] for u in units.tolist()]
    answers_NA = mask_NA = None
    for subject in dict.fromkeys(subjects):
        mine = torch.tensor([i for i, s in enumerate(subjects) if s == subject])
        sample = context.teachers[subject].sample(batch.prompts[units[mine]])
        if answers_NA is None:
            answers_NA = sample.answers_NA.new_empty(len(units), sample.answers_NA.shape[1])
            mask_NA = torch.empty_like(answers_NA, dtype=torch.bool)
        where = mine.to(answers_NA.device)
        answers_NA[where], mask_NA[where] = sample.answers_NA, sample.mask_NA
    gather = context.world.gather
    return Experience(
        batch.prompts, gather(answers_NA, len(batch)), gather(mask_NA, len(batch)), batch.subjects, batch.row_ids
    )


def imitation_loss(context: Context, micro: Experience) -> tuple[Tensor, Metrics]:
    """Cross entropy of a micro-batch's tokens, weighed by `scale_NA`, and how often the argmax is the target."""
    logps_NAV = log_probs(context.policy.answer_logits(micro.prompts, micro.answers_NA, group=micro.group))
    logps_NA = gather_tokens(logps_NAV, micro.answers_NA).masked_fill(~micro.mask_NA, 0.0)
    loss = (cross_entropy(logps_NA) * micro.extras["scale_NA"]).sum()
    right_NA = (logps_NAV.detach().argmax(-1) == micro.answers_NA).float()
    return loss, {"token_acc": masked_mean(right_NA, micro.mask_NA, micro.weights)}


@dataclass
class SFT:
    """Supervised fine-tuning on `targets`: "teacher" (its greedy answers) or "reference" (the true ones)."""

    optim: Optim
    targets: str = "teacher"
    aggregate: str = "token_mean"
    name: str = "sft"

    def __post_init__(self) -> None:
        one_of("method.targets", self.targets, ("teacher", "reference"))
        one_of("method.aggregate", self.aggregate, AGGREGATES)

    def train(self, context: Context) -> None:
        """Run to the horizon."""
        loop = Loop(context, self.optim)
        for step in loop.steps():
            batch = context.task.batch(step, self.optim.rows_per_update)
            rows = reference_rows(batch) if self.targets == "reference" else teacher_rows(context, batch)
            rows = rows.with_extras(scale_NA=token_weights(rows.mask_NA, rows.weights, self.aggregate))
            loop.update(rows, lambda micro: imitation_loss(context, micro))
