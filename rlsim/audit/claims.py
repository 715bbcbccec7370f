"""The gradients that objectives claim to follow, on the real task: by formula as far as possible.

Expected reward: a problem has one right answer y*, so E[R] = p(y*), without sampling. With d_t the divergence of the
student's and the other policy's distributions at position t of an answer, and D its sum over later positions:

    prefix kept     E_y sum_t grad d_t                              (the prefix is where the student's samples stand)
    whole answers   E_y sum_t (grad d_t + D_t grad log s(y_t))      (and what a token does to the later positions)

The whole vocabulary is summed at every position and D has the other answer to the problem as its baseline; only the
prefix is sampled. Every claim is C draws, so that its own noise can be told (`measure.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.distillation import forward_kl, reverse_kl
from common.interfaces import Batch, Policy, Task
from common.logprobs import entropy, gather_tokens, log_probs, sum_tokens, token_logps
from common.seeding import uniforms
from rlsim.audit.entries import ENTROPY, ENTROPY_KEPT, FORWARD, FORWARD_KEPT, LIKELIHOOD, REVERSE, REVERSE_KEPT, REWARD

DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    REVERSE: reverse_kl,
    REVERSE_KEPT: reverse_kl,
    FORWARD_KEPT: forward_kl,
    ENTROPY: lambda student_NAV, _: -entropy(student_NAV),
    ENTROPY_KEPT: lambda student_NAV, _: -entropy(student_NAV),
}
WHOLE = (REVERSE, ENTROPY)
PURPOSE = 1_000_000  # steps of the task that no audited update sees


def sampled_claim(claim: str, policy: Policy, other: Policy, task: Task, *, draws: int, rows: int, seed: int) -> Tensor:
    """(C, D) draws of the gradient of the claimed loss from `rows` answers each; `other`: teacher or reference."""
    found = []
    for i in range(draws):
        value = _loss(claim, policy, other, task, PURPOSE + i, rows, seed)
        found.append(flat_gradient(value, policy))
    return torch.stack(found)


def flat_gradient(value: Tensor, policy: Policy) -> Tensor:
    """(D,) gradient with respect to all parameters of the policy."""
    parts = torch.autograd.grad(value, [parameter for _, parameter in policy.trainable()])
    return torch.cat([part.reshape(-1) for part in parts])


def _loss(claim: str, policy: Policy, other: Policy, task: Task, step: int, rows: int, seed: int) -> Tensor:
    if claim in (REWARD, LIKELIHOOD):
        return _true_answers(claim, policy, task.batch(step, rows))
    if claim == FORWARD:
        batch = task.batch(step, rows)
        noise_NA = uniforms(seed, "audit teacher", step, rows, policy.answer_len)
        sample = other.sample(batch.prompts, uniforms_NA=noise_NA)
        student_NAV, other_NAV = _both(policy, other, batch, sample.answers_NA, 1)
        return sum_tokens(forward_kl(student_NAV, other_NAV), sample.mask_NA).mean()
    batch = task.batch(step, rows // 2)
    noise_NA = uniforms(seed, "audit student", step, 2 * len(batch), policy.answer_len)
    sample = policy.sample(batch.prompts, 2, uniforms_NA=noise_NA)
    student_NAV, other_NAV = _both(policy, other, batch, sample.answers_NA, 2)
    gap_NA = DIVERGENCES[claim](student_NAV, other_NAV).masked_fill(~sample.mask_NA, 0.0)
    if claim not in WHOLE:
        return gap_NA.sum(-1).mean()
    return whole_answers(gap_NA, gather_tokens(student_NAV, sample.answers_NA), sample.mask_NA)


def _true_answers(claim: str, policy: Policy, batch: Batch) -> Tensor:
    assert batch.answers_BA is not None
    assert batch.mask_BA is not None
    logps_B = sum_tokens(
        token_logps(policy.answer_logits(batch.prompts, batch.answers_BA), batch.answers_BA), batch.mask_BA
    )
    return -(logps_B.exp() if claim == REWARD else logps_B).mean()


def _both(policy: Policy, other: Policy, batch: Batch, answers_NA: Tensor, group: int) -> tuple[Tensor, Tensor]:
    student_NAV = log_probs(policy.answer_logits(batch.prompts, answers_NA, group=group))
    with torch.no_grad():
        return student_NAV, log_probs(other.answer_logits(batch.prompts, answers_NA, group=group))


def whole_answers(gap_NA: Tensor, logps_NA: Tensor, mask_NA: Tensor) -> Tensor:
    """A loss whose gradient is that of E_y sum_t gap_t, what the tokens do to later gaps included; rows are pairs."""
    later_NA = gap_NA.detach().flip(-1).cumsum(-1).flip(-1) - gap_NA.detach()
    baseline_NA = later_NA.view(-1, 2, later_NA.shape[1]).flip(1).reshape(later_NA.shape)
    score_NA = ((later_NA - baseline_NA) * logps_NA).masked_fill(~mask_NA, 0.0)
    return (gap_NA + score_NA).sum(-1).mean()
