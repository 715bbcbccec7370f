"""Distillation on the student's own tokens: at every position of an answer the student's distribution is pulled towards
the teacher's, with the student's own prefix kept.

s, t are the student's and the teacher's log-probs over the vocabulary at one position:

| kind       | loss of a token                                | pulls                         | source                 |
|------------|------------------------------------------------|-------------------------------|------------------------|
| reverse_kl | sum_v s (log s - log t)                        | to the teacher's modes        | arXiv 2306.08543; OPD  |
| forward_kl | sum_v t (log t - log s)                        | to cover the teacher          | Hinton 2015            |
| jsd        | b KL(t,m) + (1-b) KL(s,m), m = (1-b) s + b t   | b = 0 forward, b = 1 reverse  | GKD, arXiv 2306.13649  |
| sampled    | -sg(log t(y) - log s(y)) log s(y), y written   | as reverse_kl, in expectation | MOPD, arXiv 2601.02780 |

Each is the gradient of its own token's divergence with the prefix held fixed: what a token does to the later ones is
dropped, so reverse_kl and sampled are not the gradient of the KL of whole answers. For three tokens and an unrelated
teacher (unit logits) the bias |found - true| / |true| is .605, the cosine .886; `reward_to_go` of the sampled
advantages would be exact, at the price of variance (tests/common/test_enumeration_divergences.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.aggregation import AGGREGATES
from common.errors import UserError, at_least, is_number, one_of

KINDS = ("reverse_kl", "forward_kl", "jsd", "sampled")
FLOOR = (
    -100.0
)  # nats; the least teacher log-prob used, so that a teacher's 0 gives a large finite loss and not infinity


def _overlap(student_NAV: Tensor, teacher_NAV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Student and teacher with illegal tokens (-inf under the student) set to 0, and the legal mask.

    Masked before any arithmetic: -inf minus -inf, or 0 times inf, would be NaN in the value or in the gradient.
    """
    legal = student_NAV > -torch.inf
    student = student_NAV.masked_fill(~legal, 0.0)
    teacher = teacher_NAV.clamp(min=FLOOR).masked_fill(~legal, 0.0)
    return student, teacher, legal


def reverse_kl(student_NAV: Tensor, teacher_NAV: Tensor) -> Tensor:
    """KL(student || teacher) over the last dimension, nats; 0 with zero gradient where they are equal."""
    student, teacher, legal = _overlap(student_NAV, teacher_NAV)
    return (student.exp() * (student - teacher) * legal).sum(-1)


def forward_kl(student_NAV: Tensor, teacher_NAV: Tensor) -> Tensor:
    """KL(teacher || student) over the last dimension, nats. Tokens the student may not write are left out."""
    student, teacher, legal = _overlap(student_NAV, teacher_NAV)
    return (teacher.exp() * (teacher - student) * legal).sum(-1)


def jsd(student_NAV: Tensor, teacher_NAV: Tensor, beta: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence of GKD; beta 0 and 1 are forward and reverse KL (its limit is 0)."""
    if beta == 0:
        return forward_kl(student_NAV, teacher_NAV)
    if beta == 1:
        return reverse_kl(student_NAV, teacher_NAV)
    student, teacher, legal = _overlap(student_NAV, teacher_NAV)
    log_beta = torch.log(torch.tensor([1 - beta, beta], dtype=torch.float64)).to(student)
    mixture = torch.logaddexp(student + log_beta[0], teacher + log_beta[1])
    to_teacher = teacher.exp() * (teacher - mixture)
    to_student = student.exp() * (student - mixture)
    return ((beta * to_teacher + (1 - beta) * to_student) * legal).sum(-1)


def mix(teachers_KNAV: Tensor) -> Tensor:
    """log of the mean probability of K teachers: a mixture, (N, A, V)."""
    return teachers_KNAV.logsumexp(0) - math.log(len(teachers_KNAV))


def truncate(student_NAV: Tensor, teacher_NAV: Tensor, k: int, of: str, rest: str) -> tuple[Tensor, Tensor]:
    """Both distributions over the k largest tokens of one side.

    rest "renormalise": the k tokens sum to one again (what lies outside is not matched); "bucket": the others become
    one further token, whose log-prob is their logsumexp (never log(1 - sum), which cancels). k >= V changes nothing.
    """
    if k >= student_NAV.shape[-1]:
        return student_NAV, teacher_NAV
    teacher_NAV = teacher_NAV.masked_fill(
        student_NAV == -torch.inf, -torch.inf
    )  # never only tokens the student may not write
    chosen = (teacher_NAV if of == "teacher" else student_NAV).detach().topk(k, -1).indices
    cut = [side.gather(-1, chosen) for side in (student_NAV, teacher_NAV)]
    if rest == "renormalise":
        return cut[0].log_softmax(-1), cut[1].log_softmax(-1)
    outside = torch.ones_like(student_NAV, dtype=torch.bool).scatter_(-1, chosen, False)
    others = [_log_mass(side, outside) for side in (student_NAV, teacher_NAV)]
    return torch.cat([cut[0], others[0]], -1), torch.cat([cut[1], others[1]], -1)


def _log_mass(logps_NAV: Tensor, where: Tensor) -> Tensor:
    """log of the probability of the marked tokens, (N, A, 1); -inf with zero gradient where all are impossible."""
    possible = where & (logps_NAV > -torch.inf)
    some = possible.any(-1, keepdim=True)
    inside = logps_NAV.masked_fill(~possible & some, -torch.inf).masked_fill(~some, 0.0)
    return inside.logsumexp(-1, keepdim=True).masked_fill(~some, -torch.inf)


@dataclass(frozen=True)
class Distillation:
    """A distillation objective with its options; the kinds are explained at the top of this file."""

    kind: str = "reverse_kl"
    beta: float = 0.5  # of jsd
    temperature: float = 1.0  # both distributions are softened by it before they are compared
    top_k: int | None = None
    top_k_of: str = "teacher"
    rest: str = "renormalise"
    outcome: float = 0.0  # alpha: this much of the outcome advantage is added to every token's (kind=sampled)
    aggregate: str = "token_mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        one_of("objective.kind", self.kind, KINDS)
        one_of("objective.top_k_of", self.top_k_of, ("teacher", "student"))
        one_of("objective.rest", self.rest, ("renormalise", "bucket"))
        one_of("objective.aggregate", self.aggregate, AGGREGATES)
        at_least("objective.top_k", self.top_k, 1, optional=True, whole=True)
        at_least("objective.outcome", self.outcome, 0)
        at_least("objective.constant", self.constant, 1, optional=True)
        if not is_number(self.beta) or not 0 <= self.beta <= 1:
            raise UserError(f"objective.beta={self.beta} must lie between 0 (forward KL) and 1 (reverse KL).")
        if not is_number(self.temperature) or not self.temperature > 0:
            raise UserError(f"objective.temperature={self.temperature} must be positive.")
        self._refuse_idle()

    def _refuse_idle(self) -> None:
        """What would change nothing beside the other options."""
        if self.beta != 0.5 and self.kind != "jsd":
            raise UserError(
                f"objective.beta={self.beta} has no effect with objective.kind={self.kind}; "
                "use kind=jsd or leave it at 0.5."
            )
        if self.constant is not None and self.aggregate != "constant":
            raise UserError(
                f"objective.constant has no effect with objective.aggregate={self.aggregate}; "
                "use aggregate=constant or leave it null."
            )
        for name, usual in (("top_k_of", "teacher"), ("rest", "renormalise")):
            if self.top_k is None and getattr(self, name) != usual:
                raise UserError(
                    f"objective.{name}={getattr(self, name)} has no effect without objective.top_k; "
                    f"give top_k or leave it at {usual}."
                )
        if self.outcome and self.kind != "sampled":
            raise UserError(
                f"objective.outcome needs objective.kind=sampled; kind={self.kind} has no sampled token to credit."
            )
        if self.kind == "sampled" and (self.top_k is not None or self.temperature != 1.0):
            raise UserError(
                "objective.top_k and objective.temperature have no effect with objective.kind=sampled; "
                "leave them at null and 1."
            )

    def divergence(self, student_NAV: Tensor, teacher_NAV: Tensor) -> Tensor:
        """(N, A) divergence of the full-vocabulary kinds; both are log-probs, the teacher's without gradient."""
        if self.temperature != 1.0:
            student_NAV = (student_NAV / self.temperature).log_softmax(-1)
            teacher_NAV = (teacher_NAV / self.temperature).log_softmax(-1)
        if self.top_k is not None:
            student_NAV, teacher_NAV = truncate(student_NAV, teacher_NAV, self.top_k, self.top_k_of, self.rest)
        if self.kind == "jsd":
            return jsd(student_NAV, teacher_NAV, self.beta)
        return (reverse_kl if self.kind == "reverse_kl" else forward_kl)(student_NAV, teacher_NAV)


def sampled_advantage(
    student_logps_NA: Tensor, teacher_logps_NA: Tensor, outcome_NA: Tensor | None = None, alpha: float = 0.0
) -> Tensor:
    """MOPD's advantage of each written token, sg[log t(y) - log s(y)] + alpha * outcome advantage, (N, A)."""
    advantage_NA = teacher_logps_NA.clamp(min=FLOOR) - student_logps_NA.detach()
    return advantage_NA if outcome_NA is None else advantage_NA + alpha * outcome_NA
