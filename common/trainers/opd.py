"""OPD, on-policy distillation: the student writes, the teacher says at every token what it would have written.

The student's distribution is pulled towards the teacher's at each position, with the student's own prefix kept
(arXiv 2306.13649; thinkingmachines.ai "On-policy distillation"). One teacher is OPD; a teacher per subject is MOPD
(arXiv 2601.02780). Which divergence, over the vocabulary or on the written token, is the objective's business
(`common/distillation.py`).

    python -m rlsim method=opd
    python -m rlsim method=opd method.objective.kind=jsd method.objective.beta=0.5
    python -m rlsim method=mopd teachers=specialists curriculum=mix
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from common.advantages import Advantage
from common.aggregation import token_weights
from common.distillation import Distillation, sampled_advantage
from common.errors import UserError, is_number, one_of
from common.interfaces import Batch, Experience, Metrics
from common.logprobs import entropy, log_probs
from common.mismatch import Mismatch
from common.optimizer import Optim
from common.seeding import numpy_rng
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.rollout import Sampling, answer, groups_of, problems_of
from common.trainers.scoring import masked_mean, score, teacher_log_probs, written
from common.trainers.sft import reference_rows, teacher_rows


@dataclass
class OPD:
    """Distillation on the student's own answers. `teacher`: "subject" (each row's own) or "mixture" (all, averaged).

    `off_policy` is GKD's 1 - lambda: this share of the prompts gets its answers from `off_policy_source`
    ("teacher", greedy, or "reference") instead of from the student.
    """

    optim: Optim
    sampling: Sampling
    objective: Distillation = field(default_factory=Distillation)
    advantage: Advantage = field(default_factory=Advantage)  # of the outcome, where objective.outcome > 0
    mismatch: Mismatch = field(default_factory=Mismatch)  # of the written token's weight, kind=sampled
    teacher: str = "subject"
    off_policy: float = 0.0
    off_policy_source: str = "reference"
    name: str = "opd"

    def __post_init__(self) -> None:
        one_of("method.teacher", self.teacher, ("subject", "mixture"))
        one_of("method.off_policy_source", self.off_policy_source, ("teacher", "reference"))
        if not is_number(self.off_policy) or not 0 <= self.off_policy <= 1:
            raise UserError(f"method.off_policy={self.off_policy} must lie between 0 (all from the student) and 1.")
        if self.objective.kind == "sampled" and self.off_policy:
            raise UserError(
                "method.off_policy needs a full-vocabulary objective.kind: "
                "a token that the student did not write has no sampled gradient."
            )
        if self.mismatch.treatment != "off" and self.objective.kind != "sampled":
            raise UserError(
                f"method.mismatch has no effect with objective.kind={self.objective.kind}; "
                "only kind=sampled weighs the written token."
            )
        if self.off_policy_source != "reference" and not self.off_policy:
            raise UserError(
                f"method.off_policy_source={self.off_policy_source} has no effect with method.off_policy=0; "
                "give the share of off-policy prompts too."
            )
        if self.advantage != Advantage() and not self.objective.outcome:
            raise UserError(
                "method.advantage has no effect with objective.outcome=0; "
                "give objective.kind=sampled objective.outcome=1 to add the outcome."
            )
        if self.sampling.resample:
            raise UserError("method.sampling.resample has no effect in distillation: every token has signal.")

    def train(self, context: Context) -> None:
        """Run to the horizon."""
        if context.task.offline:
            raise UserError(
                "distillation on the student's own answers needs a task that samples; "
                "these rows are recorded (they carry adv)."
            )
        loop = Loop(context, self.optim)
        for step in loop.steps():
            batch = problems_of(context, step, self.optim, self.sampling)
            rows = self._rows(context, batch, step)
            rows, mismatched = self._corrected(context, rows)
            loop.count_once(mismatched)
            scale_NA = token_weights(rows.mask_NA, rows.weights, self.objective.aggregate, self.objective.constant)
            loop.update(rows.with_extras(scale_NA=scale_NA), lambda micro: self._loss(context, micro))

    def _rows(self, context: Context, batch: Batch, step: int) -> Experience:
        rows = answer(context, batch, step, self.sampling)
        if self.objective.outcome:
            assert rows.rewards_N is not None, "an outcome advantage needs rewards"
            outcome_NA = self.advantage(
                rows.rewards_N, groups_of(rows).to(rows.rewards_N.device), rows.mask_NA, rows.weights
            )
            rows = rows.with_extras(outcome_NA=outcome_NA)
        return self._with_off_policy(context, batch, rows, step) if self.off_policy else rows

    def _corrected(self, context: Context, rows: Experience) -> tuple[Experience, dict[str, float]]:
        """w = sg[s / mu] of the sampler mu. The one update follows at once, so s may be scored before it."""
        if self.mismatch.treatment == "off":
            return rows, {}
        self.mismatch.require(rows.rollout_logps)
        old_NA = score(context.policy, rows, context.world, self.optim.micro_batch)
        used_NA, keep_NA, diagnostics = self.mismatch(old_NA, rows.rollout_logps, rows.mask_NA, rows.weights)
        return replace(rows, mask_NA=keep_NA).with_extras(importance_NA=used_NA), diagnostics

    def _with_off_policy(self, context: Context, batch: Batch, rows: Experience, step: int) -> Experience:
        given = reference_rows(batch) if self.off_policy_source == "reference" else teacher_rows(context, batch)
        replaced = torch.from_numpy(numpy_rng(context.seed, "off-policy", step).random(len(batch)) < self.off_policy)
        replaced_N = replaced.repeat_interleave(rows.group).to(rows.answers_NA.device)[:, None]
        answers_NA = given.answers_NA.repeat_interleave(rows.group, 0)
        mask_NA = given.mask_NA.repeat_interleave(rows.group, 0)
        return replace(
            rows,
            answers_NA=torch.where(replaced_N, answers_NA, rows.answers_NA),
            mask_NA=torch.where(replaced_N, mask_NA, rows.mask_NA),
        )

    def _loss(self, context: Context, micro: Experience) -> tuple[Tensor, Metrics]:
        policy = context.policy
        student_NAV = log_probs(
            policy.answer_logits(micro.prompts, micro.answers_NA, group=micro.group), micro.temperature
        )
        teacher_NAV = teacher_log_probs(context.teachers, micro, context.world, self.teacher == "mixture")
        if self.objective.kind == "sampled":
            loss_NA, kl_NA, scale_NA = self._sampled(student_NAV, teacher_NAV, micro)
        else:
            loss_NA = kl_NA = self.objective.divergence(student_NAV, teacher_NAV)
            scale_NA = micro.extras["scale_NA"]
        loss = (loss_NA.masked_fill(~micro.mask_NA, 0.0) * scale_NA).sum()
        metrics = {
            "kl": masked_mean(kl_NA, micro.mask_NA, micro.weights),
            "entropy": masked_mean(entropy(student_NAV.detach()), micro.mask_NA, micro.weights),
        }
        if micro.rewards_N is not None:
            metrics["reward"] = (float((micro.rewards_N * micro.weights).sum()), float(micro.weights.sum()))
        return loss, metrics

    def _sampled(self, student_NAV: Tensor, teacher_NAV: Tensor, micro: Experience) -> tuple[Tensor, Tensor, Tensor]:
        """MOPD's policy gradient on the written tokens: -w A log s(y), w = sg[s / mu] of the sampler mu."""
        logps_NA, scale_NA = written(student_NAV, micro), micro.extras["scale_NA"]
        advantage_NA = sampled_advantage(
            logps_NA, written(teacher_NAV, micro), micro.extras.get("outcome_NA"), self.objective.outcome
        )
        if "importance_NA" in micro.extras:
            advantage_NA = advantage_NA * micro.extras["importance_NA"]
        gap_NA = (logps_NA - written(teacher_NAV, micro)).detach()
        return -advantage_NA * logps_NA, gap_NA, scale_NA
