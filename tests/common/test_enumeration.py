"""Exact enumeration, policy gradients: what each sampled objective optimises in expectation, over every answer.

The expected gradient is summed over all answers (or all groups of answers) of a small autoregressive policy in float64
and compared with the gradient of what the objective claims to optimise. Bias that is real is asserted as a number.
"""

from __future__ import annotations

from math import comb, sqrt

import pytest
import torch
from torch import Tensor

from common.advantages import Advantage
from common.aggregation import token_weights
from common.objectives import PolicyGradient
from tests.common.enumerated import Enumerated, bias, cosine, gradient

EXACT = 2e-6  # advantages are float32
NO_CLIP = {"clip_low": 1.0, "clip_high": 1e9}


def ascent(
    policy: Enumerated, table: Tensor, objective: PolicyGradient, advantages_RA: Tensor, old: Tensor, by: Tensor
) -> Tensor:
    """Minus the expected gradient of the loss, answers drawn with probability `by`, tokens of a row summed."""
    loss_RA = objective(policy.logps(table), old, advantages_RA, policy.mask_RA).terms["pg"]
    return -gradient((by.detach() * (loss_RA * policy.mask_RA).sum(-1)).sum(), table)


def grouped(policy, table: Tensor, advantage: Advantage, rewards_R: Tensor, size: int) -> Tensor:
    """Minus the expected REINFORCE gradient of a row, over all ordered groups of `size` answers."""
    groups_MG = policy.groups(size)
    rows = groups_MG.flatten()
    index = torch.arange(len(groups_MG)).repeat_interleave(size)
    advantages = advantage(rewards_R[rows], index, policy.mask_RA[rows], torch.ones(len(rows)))
    chance_M = policy.probs(table).detach()[groups_MG].prod(-1)
    loss = PolicyGradient("reinforce")(
        policy.logps(table)[rows], policy.logps(table)[rows], advantages, policy.mask_RA[rows]
    )
    rows_loss = (loss.terms["pg"] * policy.mask_RA[rows]).sum(-1)
    return -gradient((chance_M.repeat_interleave(size) * rows_loss).sum() / size, table)


@pytest.fixture(params=["fixed", "stopping"])
def policy(request):
    """Answers of one length, and answers that may stop early."""
    return request.getfixturevalue(request.param)


def test_all_answers_have_probability_one_together(policy) -> None:
    assert float(policy.probs(policy.table(1).detach()).sum()) == pytest.approx(1.0, abs=1e-12)
    assert len(policy.answers_RA) == (64 if policy.end is None else 40)


# -- on policy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [
        PolicyGradient("reinforce"),
        PolicyGradient("clip"),
        PolicyGradient("clip", clip_low=3e-4, clip_high=4e-4),
        PolicyGradient("clip", dual_clip=3.0),
        PolicyGradient("cispo"),
        PolicyGradient("cispo_cap"),
        PolicyGradient("cispo", "sequence"),
    ],
)
def test_rewards_as_advantages_climb_the_expected_reward(policy, objective: PolicyGradient) -> None:
    table, rewards = policy.table(1), policy.rewards()
    true = gradient((policy.probs(table) * rewards).sum(), table)
    advantages = Advantage("none")(rewards, torch.zeros(len(rewards)).long(), policy.mask_RA, torch.ones(len(rewards)))
    found = ascent(policy, table, objective, advantages, policy.logps(table).detach(), policy.probs(table))
    assert bias(found, true) < EXACT


def test_rloo_is_exactly_unbiased(fixed, stopping) -> None:
    for policy in (fixed, stopping):
        table, rewards = policy.table(1), policy.rewards()
        true = gradient((policy.probs(table) * rewards).sum(), table)
        assert bias(grouped(policy, table, Advantage("rloo"), rewards, 2), true) < EXACT


@pytest.mark.parametrize("size", [2, 3, 4])
def test_centred_is_g_minus_one_over_g_of_the_gradient_and_rloo_all_of_it(short, size: int) -> None:
    table, rewards = short.table(1), short.rewards()
    true = gradient((short.probs(table) * rewards).sum(), table)
    centred = grouped(short, table, Advantage("centred"), rewards, size)
    assert bias(centred * size / (size - 1), true) < EXACT
    assert bias(centred, true) == pytest.approx(1 / size, abs=1e-5)
    assert bias(grouped(short, table, Advantage("rloo"), rewards, size), true) < EXACT


@pytest.mark.parametrize(("size", "expected"), [(2, 0.9790), (3, 0.9958), (4, 0.9992)])
def test_dividing_by_the_groups_std_turns_the_gradient(short, size: int, expected: float) -> None:
    table, rewards = short.table(1), short.rewards()
    true = gradient((short.probs(table) * rewards).sum(), table)
    found = grouped(short, table, Advantage("group", eps=0), rewards, size)
    assert cosine(found, true) == pytest.approx(expected, abs=1e-4)


def _success_weight(advantage: Advantage, p: float, size: int) -> float:
    """d(objective)/dp of a prompt solved with chance p: E[A | right] - E[A | wrong], over the other G - 1 samples."""
    means = []
    for reward in (1.0, 0.0):
        mean = 0.0
        for right in range(size):
            rewards = torch.tensor([reward] + [1.0] * right + [0.0] * (size - 1 - right))
            one = torch.ones(size, 1, dtype=torch.bool)
            value = advantage(rewards, torch.zeros(size).long(), one, torch.ones(size))[0, 0]
            mean += comb(size - 1, right) * p**right * (1 - p) ** (size - 1 - right) * float(value)
        means.append(mean)
    return means[0] - means[1]


def test_group_weighs_nearly_hopeless_prompts_up_where_rloo_weighs_all_alike() -> None:
    rloo = [_success_weight(Advantage("rloo"), p, 8) for p in (0.02, 0.5, 0.98)]
    assert rloo == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    hopeless, even, solved = (_success_weight(Advantage("group", eps=0), p, 8) for p in (0.02, 0.5, 0.98))
    assert hopeless == pytest.approx(solved, abs=1e-5)
    assert hopeless / even == pytest.approx(1.3867, abs=1e-4)
    assert even < 1 / sqrt(0.25)  # what an infinite group would have: 1 / std(p)


# -- unequal lengths ---------------------------------------------------------------------------------------------------


def aggregated(policy, aggregate: str, *, baseline: bool) -> tuple[Tensor, Tensor]:
    """(minus the gradient of an endless batch: rows weighted by their chance; that of the expected reward)."""
    table, rewards = policy.table(1), policy.rewards()
    logps, weight = policy.logps(table), policy.probs(table).detach()
    true = gradient((policy.probs(table) * rewards).sum(), table)
    advantages_RA = (rewards - baseline * (weight * rewards).sum())[:, None] * policy.mask_RA
    loss = PolicyGradient()(logps, logps.detach(), advantages_RA, policy.mask_RA).terms["pg"]
    return -gradient((loss * token_weights(policy.mask_RA, weight, aggregate)).sum(), table), true


@pytest.mark.parametrize("baseline", [False, True])
def test_three_aggregates_of_unequal_lengths_only_scale_the_gradient(stopping, baseline: bool) -> None:
    length = float((stopping.probs(stopping.table(1).detach()) * stopping.mask_RA.sum(-1)).sum())
    for aggregate, scale in {"sequence_sum": 1.0, "constant": 1 / 3, "token_mean": 1 / length}.items():
        found, true = aggregated(stopping, aggregate, baseline=baseline)
        assert bias(found, scale * true) < EXACT


@pytest.mark.parametrize(("baseline", "expected"), [(False, 0.3892), (True, 0.9564)])
def test_sequence_mean_turns_the_gradient_of_answers_of_unequal_length(
    stopping, baseline: bool, expected: float
) -> None:
    assert cosine(*aggregated(stopping, "sequence_mean", baseline=baseline)) == pytest.approx(expected, abs=1e-4)


# -- off policy: answers drawn from `old`, gradient taken at `table` ---------------------------------------------------


def off_policy(policy, objective: PolicyGradient, moved: float = 0.5) -> tuple[Tensor, Tensor]:
    """(minus the expected gradient with answers of an older policy, the gradient of the expected reward).

    The advantage is the reward less its mean under the old policy. A ratio of whole answers stands at each of their
    tokens: `clip` differentiates it, so its loss counts once an answer (as in sequence_mean), the others once a token.
    """
    table, rewards = policy.table(1), policy.rewards()
    with torch.no_grad():
        old = table + moved * policy.table(2)
        by, old_logps = policy.probs(old), policy.logps(old)
        advantages_RA = (rewards - (by * rewards).sum())[:, None] * policy.mask_RA
    true = gradient((policy.probs(table) * rewards).sum(), table)
    if objective.surrogate == "clip" and objective.ratio == "sequence":
        advantages_RA = advantages_RA / policy.mask_RA.sum(-1, keepdim=True)
    return ascent(policy, table, objective, advantages_RA, old_logps, by), true


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_the_unclipped_sequence_ratio_is_exactly_unbiased_off_policy(policy, surrogate: str) -> None:
    found, true = off_policy(policy, PolicyGradient(surrogate, "sequence", **NO_CLIP))
    assert bias(found, true) < 1e-9


OFF_POLICY = {  # surrogate, ratio, clips: (bias, cosine) half a nat of noise away from the old policy
    ("clip", "token", "none"): (0.3936, 0.9546),
    ("clip", "sequence_mean", "none"): (0.3510, 0.9411),
    ("clip", "token", ".2"): (0.7933, 0.6767),
    ("clip", "sequence", ".2"): (0.4365, 0.9063),
    ("cispo", "token", ".2"): (0.4622, 0.9198),
    ("cispo_cap", "token", ".2"): (0.3903, 0.9340),
    ("reinforce", "token", "none"): (0.5233, 0.8860),
}


@pytest.mark.parametrize(("words", "expected"), OFF_POLICY.items())
def test_off_policy_everything_else_is_biased_by_this_much(
    fixed, words: tuple[str, str, str], expected: tuple[float, float]
) -> None:
    surrogate, ratio, clips = words
    found, true = off_policy(fixed, PolicyGradient(surrogate, ratio, **(NO_CLIP if clips == "none" else {})))
    assert (bias(found, true), cosine(found, true)) == pytest.approx(expected, abs=1e-4)


def test_the_token_ratios_bias_shrinks_with_the_distance_to_the_old_policy(fixed) -> None:
    far, near = (bias(*off_policy(fixed, PolicyGradient(**NO_CLIP), moved)) for moved in (0.02, 0.01))
    assert far / near == pytest.approx(2.0, rel=0.1)
    assert near < 0.01
