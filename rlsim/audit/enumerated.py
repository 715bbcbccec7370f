"""Every answer instead of a sample: on one-digit problems an update is the expected gradient, exactly.

`EnumeratedTask` is a Task whose "experience" is the list of all answers of each problem, weighted by their chance, and
`EnumeratedPolicy` scores them by their prefixes, which are few. What depends on a group's other answers (baselines,
repeats) enters as its expectation over groups. So the audited code is again the trainers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import comb
from typing import Any

import torch
from torch import Tensor

from common.advantages import Advantage
from common.distillation import forward_kl, reverse_kl
from common.interfaces import Batch, Experience, Metrics, Policy
from common.kl import KL, kl_estimate
from common.logprobs import entropy, gather_tokens, log_probs, sum_tokens, token_logps
from common.trainers.ppo import PPO
from common.trainers.rft import RFT
from common.trainers.rlvr import RLVR
from rlsim.arithmetic import right_answers
from rlsim.audit import entries as names
from rlsim.policy import TinyGPTPolicy
from rlsim.problems import END

MOST_ANSWERS = 20_000


def all_answers(vocab: int, length: int, end: int = END) -> tuple[Tensor, Tensor]:
    """(R, A) distinct answers, 0 behind their end, and their masks. The first token varies slowest."""
    every = torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length)
    ends = (every == end).long()
    answers_RA = every.masked_fill(ends.cumsum(-1) - ends > 0, 0).unique(dim=0)
    ends = (answers_RA == end).long()
    return answers_RA, ends.cumsum(-1) - ends == 0


class EnumeratedPolicy:
    """A policy that scores many answers to each prompt by running the V^(A-1) prefixes they are made of, once each."""

    def __init__(self, policy: TinyGPTPolicy) -> None:
        self._policy, self._vocab = policy, policy.shape.vocab
        self._prefixes = torch.cartesian_prod(*[torch.arange(self._vocab)] * (policy.answer_len - 1))
        self._prefixes = self._prefixes.view(-1, policy.answer_len - 1)

    def answer_logits(self, prompts: Tensor, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        """(N, A, V) logits of the written tokens' positions."""
        b, (k, a), v = len(prompts), (len(self._prefixes), answers_NA.shape[1]), self._vocab
        given = torch.cat([self._prefixes, self._prefixes.new_zeros(k, 1)], 1).repeat(b, 1)
        logits = self._policy.answer_logits(prompts.repeat_interleave(k // v, 0), given, group=v).view(b, k, a, v)
        place_A = v ** torch.arange(a - 2, -1, -1)
        index_NA = torch.cat([torch.zeros(len(answers_NA), 1).long(), (answers_NA[:, :-1] * place_A).cumsum(-1)], 1)
        unit_N1 = torch.arange(b).repeat_interleave(group)[:, None]
        return logits[unit_N1, index_NA, torch.arange(a)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class EnumeratedTask:
    """Fixed problems whose experience is all answers, weighted by their chance under `writer` (a mean over problems).

    `method`: what the advantages and the repeats are computed for. `reference`: of a penalty in the reward.
    """

    size: int | None = None
    offline = False

    def __init__(
        self, batch: Batch, writer: Policy, method: Any, *, rewarded: bool = True, reference: Policy | None = None
    ) -> None:
        self.subjects: Sequence[str] = sorted(set(batch.subjects))
        self._batch, self._writer, self._method = batch, writer, method
        self._rewarded, self._reference = rewarded, reference

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        """Always the same problems."""
        return self._batch

    def experience(self, policy: Policy, batch: Batch, group: int, **_: Any) -> Experience:
        """All answers to each problem."""
        rows, method = every_answer(batch, self._writer), self._method
        assert rows.rewards_N is not None
        rows = rows if self._rewarded else replace(rows, rewards_N=torch.zeros_like(rows.rewards_N))
        if isinstance(method, (RLVR, PPO)):
            penalty_NA = self._penalty(rows, method.objective.kl)
            return replace(
                rows, advantages=expected_advantages(method.advantage, rows, method.sampling.group, penalty_NA)
            )
        return expected_copies(rows, method.sampling.group) if isinstance(method, RFT) and method.distinct else rows

    def _penalty(self, rows: Experience, kl: KL) -> Tensor | None:
        if not kl.in_reward:
            return None
        assert self._reference is not None
        assert rows.rollout_logps is not None
        return kl.beta * kl_estimate(rows.rollout_logps, _logps(self._reference, rows), kl.estimator)

    def evaluate(self, policy: Policy) -> Metrics:
        """Nothing."""
        return {}

    def score(self, metrics: Any) -> float:
        """Nothing to prefer."""
        return 0.0


def without_reward_penalty(method: Any) -> Any:
    """The method without the penalty that EnumeratedTask has already put into its advantages."""
    if isinstance(method, (RLVR, PPO)) and method.objective.kl.in_reward:
        return replace(method, objective=replace(method.objective, kl=KL()))
    return method


@torch.no_grad()
def every_answer(batch: Batch, writer: Policy) -> Experience:
    """All answers to each problem as one unit: verified, scored by their writer, weighted by chance / problems."""
    answers_RA, mask_RA = all_answers(writer.shape.vocab, writer.answer_len)  # type: ignore[attr-defined]
    r, b = len(answers_RA), len(batch)
    assert batch.answers_BA is not None
    assert batch.mask_BA is not None
    answers_NA, mask_NA = answers_RA.repeat(b, 1), mask_RA.repeat(b, 1)
    true = [tensor.repeat_interleave(r, 0) for tensor in (batch.answers_BA, batch.mask_BA)]
    rows = Experience(
        batch.prompts, answers_NA, mask_NA, batch.subjects, batch.row_ids, r,
        rewards_N=right_answers(answers_NA, *true).float(),
    )  # fmt: skip
    logps_NA = _logps(writer, rows)
    return replace(rows, rollout_logps=logps_NA, weight_N=sum_tokens(logps_NA, mask_NA).exp() / b)


def _logps(policy: Policy, rows: Experience) -> Tensor:
    with torch.no_grad():
        return token_logps(policy.answer_logits(rows.prompts, rows.answers_NA, group=rows.group), rows.answers_NA)


def expected_advantages(advantage: Advantage, rows: Experience, group: int, penalty_NA: Tensor | None = None) -> Tensor:
    """(N,) each answer's advantage, averaged over the others of its group (or of an endless batch)."""
    assert rows.rewards_N is not None
    reward_N = rows.rewards_N.double() - (0.0 if penalty_NA is None else sum_tokens(penalty_NA, rows.mask_NA).double())
    weight_N = rows.weights.double()
    if advantage.kind == "none":
        return reward_N.float()
    if advantage.kind in ("batch", "whiten"):
        if advantage.kind == "whiten":
            assert penalty_NA is None, "penalties at their tokens are no advantage of the whole answer"
            weight_N = weight_N * rows.mask_NA.sum(-1)
        mean = (weight_N * reward_N).sum() / weight_N.sum()
        return ((reward_N - mean) / ((weight_N * (reward_N - mean).square()).sum() / weight_N.sum()).sqrt()).float()
    chance_BR, reward_BR = (tensor.view(rows.units, -1) for tensor in (weight_N * rows.units, reward_N))
    mean_B1 = (chance_BR * reward_BR).sum(-1, keepdim=True)
    if advantage.kind == "group":
        assert penalty_NA is None, "only rewards of 0 and 1 are enumerated over groups"
        table_2G = group_table(advantage, group)
        right_B = torch.stack(
            [mean_B1[:, 0] ** k * (1 - mean_B1[:, 0]) ** (group - 1 - k) * comb(group - 1, k) for k in range(group)], -1
        )
        return (right_B @ table_2G.T).gather(1, reward_BR.long()).float().reshape(-1)
    share = 1.0 if advantage.kind == "rloo" else (group - 1) / group
    return (share * (reward_BR - mean_B1)).float().reshape(-1)


def group_table(advantage: Advantage, group: int) -> Tensor:
    """(2, G): the advantage of a wrong and of a right answer when k = 0 ... G - 1 of the others are right."""
    found = torch.zeros(2, group, dtype=torch.float64)
    for own in (0, 1):
        for others in range(group):
            rewards = torch.tensor([own] + [1] * others + [0] * (group - 1 - others)).float()
            scored, index = torch.ones(group, 1, dtype=torch.bool), torch.zeros(group).long()
            found[own, others] = advantage(rewards, index, scored, torch.ones(group))[0, 0].double()
    return found


def expected_copies(rows: Experience, group: int) -> Experience:
    """Weights by how often a group holds an answer at least once, for methods that drop repeats."""
    chance_N = rows.weights.double() * rows.units
    return replace(rows, weight_N=((1 - (1 - chance_N).clamp(min=0) ** group) / rows.units).float())


def exact_claim(claim: str, policy: Policy, other: Policy, batch: Batch) -> Tensor:
    """A scalar whose gradient is that of the claimed loss, summed over all answers."""
    if claim == names.LIKELIHOOD:
        assert batch.answers_BA is not None
        assert batch.mask_BA is not None
        logps_BA = token_logps(policy.answer_logits(batch.prompts, batch.answers_BA), batch.answers_BA)
        return -sum_tokens(logps_BA, batch.mask_BA).mean()
    rows = every_answer(batch, policy)
    assert rows.rewards_N is not None
    student_NAV = log_probs(policy.answer_logits(rows.prompts, rows.answers_NA, group=rows.group))
    logps_N = sum_tokens(gather_tokens(student_NAV, rows.answers_NA), rows.mask_NA)
    chance_N = logps_N.exp() / rows.units
    if claim == names.REWARD:
        return -(chance_N * rows.rewards_N).sum()
    if claim == names.ENTROPY:
        return (chance_N * logps_N).sum()
    if claim == names.ENTROPY_KEPT:
        return -(rows.weights * sum_tokens(entropy(student_NAV), rows.mask_NA)).sum()
    with torch.no_grad():
        other_NAV = log_probs(other.answer_logits(rows.prompts, rows.answers_NA, group=rows.group))
        other_N = sum_tokens(gather_tokens(other_NAV, rows.answers_NA), rows.mask_NA)
    if claim == names.REVERSE:
        return (chance_N * (logps_N - other_N)).sum()
    if claim == names.FORWARD:
        return (other_N.exp() / rows.units * (other_N - logps_N)).sum()
    kind = reverse_kl if claim == names.REVERSE_KEPT else forward_kl
    return (rows.weights * sum_tokens(kind(student_NAV, other_NAV), rows.mask_NA)).sum()
