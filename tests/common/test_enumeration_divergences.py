"""Exact enumeration, divergences: which KL each estimate and each distillation objective really descends.

Two targets are easily confused. *Whole* is the gradient of the KL of whole answers. *Prefix-fixed* is the sum over
positions of the gradient of that position's KL, the prefix being where the student's samples happen to stand: it drops
what a token does to the positions after it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.advantages import Advantage, reward_to_go
from common.distillation import Distillation, sampled_advantage
from common.kl import kl_estimate
from common.logprobs import log_probs
from common.objectives import PolicyGradient, cross_entropy
from common.preference import DPO
from tests.common.enumerated import Enumerated, bias, cosine, gradient

EXACT = 2e-6  # advantages are float32


class Setting:
    """A student, a teacher (or reference) and every gradient a test compares."""

    def __init__(self, policy: Enumerated) -> None:
        self.policy, self.mask = policy, policy.mask_RA
        self.student = policy.table(1)
        self.teacher = policy.table(5).detach()
        self.s, self.t = policy.logps(self.student), policy.logps(self.teacher)
        self.chance = policy.probs(self.student).detach()

    def expected(self, loss_RA: Tensor, chance: Tensor | None = None) -> Tensor:
        """Gradient of the mean over answers of a loss summed over tokens; answers drawn from the student by default."""
        rows = loss_RA.masked_fill(~self.mask, 0.0).sum(-1)
        return gradient(((self.chance if chance is None else chance) * rows).sum(), self.student)

    def whole(self, kind: str) -> Tensor:
        """Gradient of the reverse or forward KL between the distributions of whole answers."""
        s, t = self.policy.answer_logps(self.student), self.policy.answer_logps(self.teacher)
        value = (s.exp() * (s - t)).sum() if kind == "reverse_kl" else (t.exp() * (t - s)).sum()
        return gradient(value, self.student)

    def prefix_fixed(self, kind: str, chance: Tensor | None = None) -> Tensor:
        logits = [self.policy.logits(table) for table in (self.student, self.teacher)]
        return self.expected(Distillation(kind).divergence(*map(log_probs, logits)), chance)

    def policy_gradient(
        self, advantages_RA: Tensor, importance: Tensor | None = None, chance: Tensor | None = None
    ) -> Tensor:
        objective = PolicyGradient("reinforce")
        losses = objective(self.s, self.s.detach(), advantages_RA, self.mask, importance_NA=importance)
        return self.expected(losses.terms["pg"], chance)


@pytest.fixture(params=["fixed", "stopping"])
def setting(request) -> Setting:
    return Setting(request.getfixturevalue(request.param))


@pytest.fixture
def of_three(fixed: Enumerated) -> Setting:
    """The setting whose biases are printed in the documentation."""
    return Setting(fixed)


# -- KL estimates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expected_value_of_k1_and_k3_is_the_kl_of_whole_answers(setting: Setting, estimator: str) -> None:
    s, t = setting.policy.answer_logps(setting.student), setting.policy.answer_logps(setting.teacher)
    true = (s.exp() * (s - t)).sum()
    estimate_R = (kl_estimate(setting.s, setting.t, estimator) * setting.mask).sum(-1)
    torch.testing.assert_close((setting.chance * estimate_R).sum(), true)


def test_k1_of_the_answer_in_the_reward_descends_the_reverse_kl_of_whole_answers(setting: Setting) -> None:
    rows = len(setting.mask)
    penalty = kl_estimate(setting.s.detach(), setting.t, "k1")
    advantages = Advantage("none")(torch.zeros(rows), torch.zeros(rows).long(), setting.mask, torch.ones(rows), penalty)
    assert bias(setting.policy_gradient(advantages), setting.whole("reverse_kl")) < EXACT


def test_k1_to_go_as_in_reinforce_pp_descends_the_same(setting: Setting) -> None:
    to_go = reward_to_go(-kl_estimate(setting.s.detach(), setting.t, "k1"), setting.mask)
    assert bias(setting.policy_gradient(to_go), setting.whole("reverse_kl")) < EXACT


@pytest.mark.parametrize(("estimator", "kind"), [("k2", "reverse_kl"), ("k3", "forward_kl")])
def test_k2_and_k3_of_each_token_in_the_loss_descend_reverse_and_forward_kl_with_the_prefix_fixed(
    setting: Setting, estimator: str, kind: str
) -> None:
    found = setting.expected(kl_estimate(setting.s, setting.t, estimator))
    assert bias(found, setting.prefix_fixed(kind)) < 1e-9
    assert bias(found, setting.whole("reverse_kl")) > 0.1


@pytest.mark.parametrize(("estimator", "kind"), [("k2", "reverse_kl"), ("k3", "forward_kl")])
def test_k2_and_k3_of_the_summed_log_probs_descend_the_kl_of_whole_answers(
    setting: Setting, estimator: str, kind: str
) -> None:
    s, t = setting.policy.answer_logps(setting.student), setting.policy.answer_logps(setting.teacher)
    found = gradient((setting.chance * kl_estimate(s, t, estimator)).sum(), setting.student)
    assert bias(found, setting.whole(kind)) < 1e-9


def test_k1_in_the_loss_has_no_expected_gradient(setting: Setting) -> None:
    assert float(setting.expected(kl_estimate(setting.s, setting.t, "k1")).abs().max()) < 1e-12


@pytest.mark.parametrize(("estimator", "expected"), [("k2", (1.4155, 0.1017)), ("k3", (1.3013, -0.0706))])
def test_k2_and_k3_in_the_reward_are_biased_by_this_much(
    of_three: Setting, estimator: str, expected: tuple[float, float]
) -> None:
    penalty_R = (kl_estimate(of_three.s.detach(), of_three.t, estimator) * of_three.mask).sum(-1, keepdim=True)
    found, true = of_three.policy_gradient(-penalty_R.expand(-1, 3)), of_three.whole("reverse_kl")
    assert (bias(found, true), cosine(found, true)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("estimator", "expected"), [("k2", (0.6049, 0.8855)), ("k3", (0.7651, 0.8100))])
def test_k2_and_k3_of_each_token_in_the_loss_miss_the_kl_of_whole_answers_by_this_much(
    of_three: Setting, estimator: str, expected: tuple[float, float]
) -> None:
    found, true = of_three.expected(kl_estimate(of_three.s, of_three.t, estimator)), of_three.whole("reverse_kl")
    assert (bias(found, true), cosine(found, true)) == pytest.approx(expected, abs=1e-4)


# -- distillation ------------------------------------------------------------------------------------------------------


def test_the_sampled_token_has_the_full_vocabularys_expected_gradient(setting: Setting) -> None:
    found = setting.policy_gradient(sampled_advantage(setting.s, setting.t))
    assert bias(found, setting.prefix_fixed("reverse_kl")) < 1e-9


def test_per_token_distillation_is_not_the_gradient_of_the_kl_of_whole_answers(of_three: Setting) -> None:
    """The difference is what a token does to the positions after it: the last position has none, the first the most."""
    per_token, whole = of_three.prefix_fixed("reverse_kl"), of_three.whole("reverse_kl")
    assert (bias(per_token, whole), cosine(per_token, whole)) == pytest.approx((0.6049, 0.8855), abs=1e-4)
    first, second, last = (per_token - whole).split([1, 4, 16])
    assert float(last.abs().max()) < 1e-12
    assert float(first.abs().max()) > 0.01
    assert float(second.abs().max()) > 0.01


def test_the_difference_is_exactly_the_later_tokens_advantages(setting: Setting) -> None:
    advantages = sampled_advantage(setting.s, setting.t)
    later = reward_to_go(advantages, setting.mask) - advantages.masked_fill(~setting.mask, 0.0)
    difference = setting.whole("reverse_kl") - setting.prefix_fixed("reverse_kl")
    assert bias(setting.policy_gradient(later), difference) < 1e-9


def test_advantages_to_go_make_sampled_distillation_the_gradient_of_whole_answers(setting: Setting) -> None:
    to_go = reward_to_go(sampled_advantage(setting.s, setting.t), setting.mask)
    assert bias(setting.policy_gradient(to_go), setting.whole("reverse_kl")) < 1e-9


def test_mopds_token_weights_correct_the_token_and_keep_the_samplers_prefixes(setting: Setting) -> None:
    with torch.no_grad():
        sampler = setting.student + 0.5 * setting.policy.table(3)
        mu, chance = setting.policy.logps(sampler), setting.policy.probs(sampler)
    weights = (setting.s.detach() - mu).exp()
    found = setting.policy_gradient(sampled_advantage(setting.s, setting.t), weights, chance)
    assert bias(found, setting.prefix_fixed("reverse_kl", chance)) < 1e-9
    assert bias(found, setting.prefix_fixed("reverse_kl")) > 0.01


def test_forward_kl_on_the_students_answers_is_no_forward_kl_of_whole_answers_but_on_the_teachers_it_is(
    setting: Setting,
) -> None:
    teachers = setting.policy.probs(setting.teacher)
    assert bias(setting.prefix_fixed("forward_kl", teachers), setting.whole("forward_kl")) < 1e-9
    assert bias(setting.prefix_fixed("forward_kl"), setting.whole("forward_kl")) > 0.1


# -- supervised and preference baselines -------------------------------------------------------------------------------


def test_cross_entropy_on_a_teachers_answers_descends_the_forward_kl_to_it(setting: Setting) -> None:
    found = setting.expected(cross_entropy(setting.s), setting.policy.probs(setting.teacher))
    assert bias(found, setting.whole("forward_kl")) < 1e-9


def test_cross_entropy_on_its_own_right_answers_climbs_the_chance_of_being_right(setting: Setting) -> None:
    """Rejection sampling and SFT: the first step is REINFORCE with the reward 0 or 1, and no baseline."""
    right = (setting.policy.rewards() > 0.7).double()
    found = setting.expected(cross_entropy(setting.s), setting.chance * right)
    assert bias(-found, gradient((setting.policy.probs(setting.student) * right).sum(), setting.student)) < 1e-9


def test_dpo_on_its_own_right_and_wrong_answers_starts_as_a_scaled_policy_gradient(setting: Setting) -> None:
    """-gradient = beta / 2 * dp / (p (1 - p)), p the chance of being right: it favours the extremes as a std does."""
    right = setting.policy.rewards() > 0.7
    wanted, unwanted = right.nonzero().flatten(), (~right).nonzero().flatten()
    pairs = torch.cartesian_prod(wanted, unwanted)
    logps = setting.policy.answer_logps(setting.student)
    loss, _ = DPO(beta=0.3)(logps[pairs.flatten()], logps.detach()[pairs.flatten()])
    p = (setting.policy.probs(setting.student) * right).sum()
    chance_P = setting.chance[pairs].prod(-1) / (p * (1 - p)).detach()
    found = -gradient((chance_P * loss).sum(), setting.student)
    assert bias(found, 0.15 * gradient(p, setting.student) / float((p * (1 - p)).detach())) < 1e-9
