"""Policy gradients: published values, the first step, where a clip is active, and what masks keep out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.aggregation import token_weights
from common.kl import KL
from common.objectives import RATIOS, SURROGATES, PolicyGradient, cispo, clipped, cross_entropy, log_ratio

INF = float("inf")


def published_row(oracle: dict) -> tuple[dict, Tensor, Tensor, Tensor, Tensor]:
    """The example as one row of three tokens: published, logps, old_logps, advantages, mask."""
    example = oracle["policy_gradient"]
    one_row = [torch.tensor([example[name]], dtype=torch.float64) for name in ("logps", "old_logps", "advantages")]
    return example, *one_row, torch.ones(1, 3, dtype=torch.bool)


def mean_loss(objective: PolicyGradient, logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> float:
    return float(objective(logps, old, advantages, mask).terms["pg"].mean())


@pytest.mark.parametrize(
    ("options", "published"),
    [
        ({"surrogate": "clip", "ratio": "token"}, "ppo_token"),
        ({"surrogate": "clip", "ratio": "sequence_mean"}, "gspo"),
        ({"surrogate": "cispo", "ratio": "token"}, "cispo_two_sided"),
        ({"surrogate": "cispo_cap", "ratio": "token"}, "cispo_cap"),
    ],
)
def test_surrogates_have_the_published_values(oracle: dict, options: dict, published: str) -> None:
    example, *row = published_row(oracle)
    objective = PolicyGradient(clip_low=example["clip"], clip_high=example["clip"], **options)
    assert mean_loss(objective, *row) == pytest.approx(example[published], abs=5e-5)


def test_gspo_has_the_published_ratio_and_its_paper_clips_the_published_loss(oracle: dict) -> None:
    example, logps, old, advantages, mask = published_row(oracle)
    ratio = log_ratio(logps, old, mask, "sequence_mean").exp()
    assert ratio[0].tolist() == pytest.approx([example["gspo_ratio"]] * 3, abs=5e-5)
    clips = example["gspo_paper_clips"]
    objective = PolicyGradient(ratio="sequence_mean", clip_low=clips["low"], clip_high=clips["high"])
    assert mean_loss(objective, logps, old, advantages, mask) == pytest.approx(clips["loss"], abs=5e-5)


def test_the_summed_sequence_ratio_is_the_ratio_of_whole_answers_and_not_gspos(oracle: dict) -> None:
    example, logps, old, _, mask = published_row(oracle)
    ratio = log_ratio(logps, old, mask, "sequence").exp()
    assert ratio[0].tolist() == pytest.approx([math.exp(sum(example["logps"]) - sum(example["old_logps"]))] * 3)
    assert float(ratio[0, 0]) == pytest.approx(0.75, abs=1e-5)  # .5 * 1 * 1.5


def test_dual_clip_has_the_published_mean(oracle: dict) -> None:
    example = oracle["dual_clip"]
    ratios, advantages = torch.tensor(example["ratios"]).double(), torch.tensor(example["advantages"]).double()
    loss = clipped(ratios, advantages, example["clip"], example["clip"], dual=example["c"])
    assert float(loss.mean()) == pytest.approx(example["loss"], abs=5e-5)
    assert loss.tolist() == pytest.approx([-0.5, 1.0, 12.0])  # the last would be 40 without it


def test_dual_clip_through_the_objective_stops_the_gradient_of_the_far_negative_token() -> None:
    logps = torch.tensor([[math.log(10.0), 0.0]], dtype=torch.float64, requires_grad=True)
    old, advantages, mask = torch.zeros(1, 2).double(), torch.tensor([[-4.0, -4.0]]).double(), torch.ones(1, 2).bool()
    loss = PolicyGradient(dual_clip=3.0)(logps, old, advantages, mask).terms["pg"]
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([12.0, 4.0])
    assert logps.grad[0].tolist() == [0.0, 4.0]


def test_dapos_wider_upper_clip_lets_a_rare_good_token_grow_further() -> None:
    logps = torch.tensor([[math.log(1.25)]], dtype=torch.float64, requires_grad=True)
    zeros, mask = torch.zeros(1, 1).double(), torch.ones(1, 1).bool()
    for high, gradient in [(0.2, 0.0), (0.28, -1.25)]:
        (grad,) = torch.autograd.grad(
            PolicyGradient(clip_low=0.2, clip_high=high)(logps, zeros, zeros + 1, mask).terms["pg"].sum(), logps
        )
        assert float(grad) == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.5, 1.0, 0.0),  # above, wanted: clipped
        (1.5, -1.0, 1.5),  # above, unwanted: full pull back
        (0.5, 1.0, -0.5),  # below, wanted: full pull back
        (0.5, -1.0, 0.0),  # below, unwanted: clipped
        (1.1, 1.0, -1.1),
        (0.9, -1.0, 0.9),
    ],
)
def test_the_clip_acts_only_where_the_token_already_moved_the_wanted_way(
    ratio: float, advantage: float, gradient: float
) -> None:
    logps = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    losses = PolicyGradient()(
        logps, torch.zeros(1, 1).double(), torch.tensor([[advantage]]).double(), torch.ones(1, 1).bool()
    )
    losses.terms["pg"].sum().backward()
    assert float(logps.grad) == pytest.approx(gradient)
    assert float(losses.stats["clip_frac"][0]) == (gradient == 0.0)


def test_clip_frac_counts_active_clips_and_ratio_outside_all_of_them() -> None:
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    stats = PolicyGradient()(ratios.log(), torch.zeros(1, 5), advantages, torch.ones(1, 5).bool()).stats
    value = {name: float(numerator[mask].mean()) for name, (numerator, mask) in stats.items()}
    assert value["clip_frac"] == pytest.approx(0.4)
    assert value["clip_frac_high"] == pytest.approx(0.2)
    assert value["clip_frac_low"] == pytest.approx(0.2)
    assert value["ratio_outside"] == pytest.approx(0.8)
    assert value["ratio"] == pytest.approx(1.0)


def test_the_first_steps_loss_is_minus_4286_with_a_token_mean_and_zero_with_sequence_means(oracle: dict) -> None:
    example = oracle["first_step"]
    mask = torch.arange(5)[None] < torch.tensor(example["lengths"])[:, None]
    advantages = torch.tensor(example["advantages"]).float()[:, None] * mask
    logps = torch.full((2, 5), -0.7, requires_grad=True)
    loss_NA = PolicyGradient()(logps, logps.detach(), advantages, mask).terms["pg"]
    values = {
        aggregate: float((loss_NA * token_weights(mask, torch.ones(2), aggregate)).sum().detach())
        for aggregate in ("token_mean", "sequence_mean", "sequence_sum", "constant")
    }
    assert values["token_mean"] == pytest.approx(example["token_mean_loss"], abs=5e-5)
    assert values["sequence_mean"] == pytest.approx(0.0, abs=1e-7)
    assert values["sequence_sum"] == pytest.approx(-1.5)  # -(5 - 2) / 2
    assert values["constant"] == pytest.approx(-0.3)  # -(5 - 2) / (2 * 5)
    (gradient,) = torch.autograd.grad((loss_NA * token_weights(mask, torch.ones(2), "sequence_mean")).sum(), logps)
    assert gradient[0].tolist() == pytest.approx([-0.1] * 5)  # the value is 0, its gradient is not
    assert gradient[1].tolist() == pytest.approx([0.25, 0.25, 0, 0, 0])


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_at_ratio_one_every_surrogate_has_reinforces_gradient(surrogate: str, ratio: str) -> None:
    """A summed sequence ratio stands at every token, so it is compared through the mean over the row's tokens."""
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(4, 5, generator=generator, dtype=torch.float64)
    logps.requires_grad_()
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 1, 4])[:, None]
    advantages = torch.tensor([[1.0], [-2.0], [0.5], [3.0]]).double() * mask
    weights = token_weights(mask, torch.ones(4), "sequence_mean")
    loss = PolicyGradient(surrogate, ratio)(logps, logps.detach(), advantages, mask).terms["pg"]
    (gradient,) = torch.autograd.grad((loss * weights).sum(), logps)
    reinforce = -advantages * weights
    if ratio == "sequence" and surrogate == "clip":  # r's gradient is that of the whole answer: sum instead of mean
        reinforce = reinforce * mask.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, reinforce)


def test_cispo_keeps_the_gradient_of_a_token_that_a_clip_silences() -> None:
    logps = torch.tensor([math.log(2.0)], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1).double()
    (kept,) = torch.autograd.grad(cispo(logps, logps.exp(), one, 0.2, 0.2).sum(), logps)
    (silenced,) = torch.autograd.grad(clipped(logps.exp(), one, 0.2, 0.2).sum(), logps)
    assert (float(kept), float(silenced)) == (pytest.approx(-1.2), 0.0)


def test_reinforce_does_not_look_at_the_old_log_probs() -> None:
    logps, advantages, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[2.0, -1.0]]), torch.ones(1, 2).bool()
    losses = PolicyGradient("reinforce")(logps, torch.full((1, 2), -9.0), advantages, mask)
    assert losses.terms["pg"].tolist() == [[2.0, -2.0]]
    assert "clip_frac" not in losses.stats


def test_cross_entropy_is_minus_the_log_prob_of_the_target() -> None:
    assert cross_entropy(torch.tensor([[-0.5, -2.0]])).tolist() == [[0.5, 2.0]]


def test_terms_are_multiplied_by_their_coefficients_and_the_entropy_is_wanted() -> None:
    logps, ref, mask = torch.tensor([[-1.0]]), torch.tensor([[0.0]]), torch.ones(1, 1).bool()
    objective = PolicyGradient(kl=KL(beta=0.5, estimator="k2"), entropy_bonus=0.25)
    losses = objective(logps, logps, torch.zeros(1, 1), mask, ref_logps_NA=ref, entropy_NA=torch.tensor([[2.0]]))
    assert {name: float(term) for name, term in losses.terms.items()} == {"pg": 0.0, "kl": 0.25, "entropy": -0.5}
    assert float(losses.stats["kl"][0]) == 0.5  # the diagnostic is without beta


def test_a_kl_in_the_reward_is_reported_and_adds_no_term() -> None:
    logps, mask = torch.tensor([[-1.0]]), torch.ones(1, 1).bool()
    losses = PolicyGradient(kl=KL(0.5, "k1", "reward"))(logps, logps, logps, mask, ref_logps_NA=torch.zeros(1, 1))
    assert set(losses.terms) == {"pg"}
    assert "kl" in losses.stats


def test_importance_weights_multiply_the_policy_gradient_and_not_the_kl() -> None:
    logps, mask, weight = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool(), torch.tensor([[0.5, 3.0]])
    given = {"advantages_NA": torch.ones(1, 2), "mask_NA": mask, "ref_logps_NA": torch.zeros(1, 2)}
    objective = PolicyGradient(kl=KL(1.0, "k2"))
    plain = objective(logps, logps, **given).terms
    weighted = objective(logps, logps, importance_NA=weight, **given).terms
    torch.testing.assert_close(weighted["pg"], plain["pg"] * weight)
    torch.testing.assert_close(weighted["kl"], plain["kl"])


def test_the_kl_may_have_its_own_aggregate() -> None:
    objective = PolicyGradient(aggregate="sequence_mean", kl=KL(0.1, aggregate="sequence_sum"))
    assert (objective.aggregate_of("pg"), objective.aggregate_of("kl")) == ("sequence_mean", "sequence_sum")
    assert PolicyGradient(aggregate="constant").aggregate_of("kl") == "constant"


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("garbage", [float("nan"), -INF, INF])
def test_unscored_positions_never_reach_the_loss_or_its_gradient(surrogate: str, ratio: str, garbage: float) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    clean = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
    dirty = clean.masked_fill(~mask, garbage)
    advantages = torch.tensor([[1.0], [-1.0]]) * mask
    gradients = []
    for values in (clean, dirty):
        logps = values.clone().requires_grad_()
        old = (values - 0.1).masked_fill(~mask, garbage)
        losses = PolicyGradient(surrogate, ratio, kl=KL(0.1))(logps, old, advantages, mask, ref_logps_NA=values)
        total = sum((term * token_weights(mask, torch.ones(2))).sum() for term in losses.terms.values())
        (gradient,) = torch.autograd.grad(total, logps)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert not gradients[1][~mask].any()
