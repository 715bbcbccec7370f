"""RLVR: the policy writes a group of answers to each problem, a verifier passes or fails each, one update follows.

With the defaults this is GRPO without its clip, which one update a sample never needs (the ratio is 1):
loss = mean over tokens of -A logp, A = (R - mean) / (std + 1e-6) within the group (arXiv 2402.03300, 2411.15124). A
group
whose answers are all right or all wrong has A = 0 and teaches nothing; `signal` is the share of the others.

    python -m rlsim method=rlvr
    python -m rlsim method=rlvr method.advantage.kind=rloo method.sampling.group=4
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from common.advantages import Advantage
from common.interfaces import Experience, Metrics, Policy
from common.logprobs import entropy, gather_tokens, log_probs
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.rollout import Sampling, prepare, sample_with_signal, scaled
from common.trainers.scoring import masked_mean


def reference_policy(context: Context, objective: PolicyGradient) -> Policy | None:
    """The frozen policy that the KL is measured to, None where beta is 0. Ask before a checkpoint is loaded."""
    if not objective.kl.beta:
        return None
    return context.reference() if context.reference is not None else context.policy.frozen("start")


def policy_gradient_loss(context: Context, objective: PolicyGradient, micro: Experience) -> tuple[Tensor, Metrics]:
    """The objective on prepared and scaled rows. Without old log-probs the policy is its own old one."""
    logps_NAV = log_probs(
        context.policy.answer_logits(micro.prompts, micro.answers_NA, group=micro.group), micro.temperature
    )
    logps_NA = gather_tokens(logps_NAV, micro.answers_NA)
    spread_NA = entropy(logps_NAV if objective.entropy_bonus else logps_NAV.detach())
    losses = objective(
        logps_NA,
        micro.extras.get("old_logps_NA", logps_NA.detach()),
        micro.extras["advantages_NA"],
        micro.mask_NA,
        importance_NA=micro.extras.get("importance_NA"),
        ref_logps_NA=micro.extras.get("ref_logps_NA"),
        entropy_NA=spread_NA,
    )
    weighed = {name: (term * micro.extras[f"scale_{name}_NA"]).sum() for name, term in losses.terms.items()}
    metrics = {name: masked_mean(value, mask, micro.weights) for name, (value, mask) in losses.stats.items()}
    metrics["pg_loss"] = masked_mean(losses.terms["pg"], micro.mask_NA, micro.weights)
    return sum(weighed.values()), metrics  # type: ignore[return-value]


@dataclass
class RLVR:
    """On-policy policy gradient from verified answers: one update on every sample."""

    optim: Optim
    sampling: Sampling
    objective: PolicyGradient = field(default_factory=lambda: PolicyGradient(surrogate="reinforce"))
    advantage: Advantage = field(default_factory=Advantage)
    mismatch: Mismatch = field(default_factory=Mismatch)
    name: str = "rlvr"

    def train(self, context: Context) -> None:
        """Run to the horizon."""
        reference = reference_policy(context, self.objective)
        # ratio 1 needs no old log-probs; a penalty in the reward and a corrected mismatch do
        score_old = self.objective.kl.in_reward or self.mismatch.treatment != "off" or context.task.offline
        loop = Loop(context, self.optim)
        for step in loop.steps():
            rows, sampled = sample_with_signal(context, step, self.optim.rows_per_update, self.sampling)
            rows, mismatched = prepare(
                context, rows, objective=self.objective, advantage=self.advantage, mismatch=self.mismatch,
                reference=reference, micro_batch=self.optim.micro_batch, score_old=score_old,
            )  # fmt: skip
            loop.count_once(sampled | mismatched)
            loop.update(
                scaled(rows, self.objective), lambda micro: policy_gradient_loss(context, self.objective, micro)
            )
