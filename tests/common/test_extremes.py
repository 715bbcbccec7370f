"""Extremes: finite values and gradients, or one clear sentence; never a silent NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.advantages import KINDS, Advantage, refuse_non_finite
from common.aggregation import AGGREGATES, token_weights
from common.distillation import Distillation, sampled_advantage
from common.errors import UserError, at_least, is_number, one_of
from common.kl import ESTIMATORS, KL, kl_estimate
from common.logprobs import entropy, log_probs, token_logps
from common.mismatch import LEVELS, Mismatch
from common.objectives import RATIOS, SURROGATES, PolicyGradient
from common.preference import DPO
from common.schedule import lr_factor

INF = float("inf")
CONFIGURATIONS = [(surrogate, ratio) for surrogate in SURROGATES for ratio in RATIOS]


def backward(
    logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, objective: PolicyGradient
) -> tuple[Tensor, Tensor]:
    """(loss, gradient) aggregated as the objective says."""
    logps = logps.clone().requires_grad_()
    terms = objective(logps, old, advantages, mask, ref_logps_NA=old).terms
    weights = token_weights(mask, torch.ones(len(mask)), objective.aggregate)
    loss = sum((term * weights).sum() for term in terms.values())
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


@pytest.mark.parametrize(("surrogate", "ratio"), CONFIGURATIONS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_batch_without_a_scored_token_has_loss_zero_and_gradient_zero(
    surrogate: str, ratio: str, aggregate: str
) -> None:
    logps = torch.tensor([[-INF, float("nan")], [0.0, -1.0]])
    objective = PolicyGradient(surrogate, ratio, aggregate=aggregate, kl=KL(0.1))
    loss, gradient = backward(logps, logps, torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), objective)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(("surrogate", "ratio"), CONFIGURATIONS)
def test_a_certain_token_has_log_prob_zero_and_a_finite_loss(surrogate: str, ratio: str) -> None:
    logits = torch.tensor([[[0.0, -INF, -INF]]], requires_grad=True)
    logps = token_logps(logits, torch.tensor([[0]]))
    losses = PolicyGradient(surrogate, ratio, kl=KL(0.1), entropy_bonus=0.1)(
        logps,
        logps.detach(),
        torch.ones(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
        ref_logps_NA=logps.detach(),
        entropy_NA=entropy(log_probs(logits)),
    )
    sum(term.sum() for term in losses.terms.values()).backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad.any()  # nothing else could have been written


@pytest.mark.parametrize(("surrogate", "ratio"), CONFIGURATIONS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1000.0, 89.0, -1000.0])
def test_ratios_beyond_float32_stay_finite_in_value_and_gradient(
    surrogate: str, ratio: str, advantage: float, gap: float
) -> None:
    logps = torch.tensor([[-1.0, -1.0]])
    losses = backward(
        logps, logps - gap, torch.full((1, 2), advantage), torch.ones(1, 2).bool(), PolicyGradient(surrogate, ratio)
    )
    for value in losses:
        assert value.isfinite().all()


def test_a_clipped_overflowing_ratio_has_exactly_no_gradient() -> None:
    logps = torch.tensor([[0.0]])
    _, gradient = backward(logps, logps - 500, torch.ones(1, 1), torch.ones(1, 1).bool(), PolicyGradient())
    assert gradient == 0


@pytest.mark.parametrize("objective", [PolicyGradient("reinforce"), PolicyGradient("clip")])
def test_a_written_token_that_is_impossible_now_and_before_is_loud_and_not_silently_finite(
    objective: PolicyGradient,
) -> None:
    """The update guard turns a non-finite loss into a skipped step and a sentence with the row ids."""
    impossible = torch.tensor([[-INF]])
    loss, _ = backward(impossible, impossible, torch.ones(1, 1), torch.ones(1, 1).bool(), objective)
    assert not loss.isfinite()


def test_a_token_that_became_impossible_has_ratio_zero_and_a_finite_gradient() -> None:
    logits = torch.tensor([[[0.0, -INF]]], requires_grad=True)
    logps = token_logps(logits, torch.tensor([[1]]))
    losses = PolicyGradient()(logps, torch.tensor([[-1.0]]), torch.ones(1, 1), torch.ones(1, 1).bool())
    losses.terms["pg"].sum().backward()
    assert losses.terms["pg"] == 0
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_one_token_answers_make_all_ratios_and_aggregates_agree(surrogate: str) -> None:
    logps, old = torch.tensor([[-1.0], [-0.3]]), torch.tensor([[-1.3], [-0.2]])
    advantages, mask = torch.tensor([[1.0], [-2.0]]), torch.ones(2, 1).bool()
    found = [
        backward(logps, old, advantages, mask, PolicyGradient(surrogate, ratio, aggregate=aggregate))
        for ratio in RATIOS
        for aggregate in AGGREGATES
    ]
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0])
        torch.testing.assert_close(gradient, found[0][1])


def test_bf16_logits_give_the_float32_loss_of_the_rounded_logits() -> None:
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.arange(12).view(4, 3)
    rounded = token_logps(logits, tokens)
    torch.testing.assert_close(rounded, token_logps(logits.float(), tokens), rtol=0, atol=0)
    logits.requires_grad_()
    teacher = log_probs(logits.detach().roll(1, -1))
    for kind in ("reverse_kl", "forward_kl", "jsd"):
        loss = Distillation(kind).divergence(log_probs(logits), teacher)
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, 1e30, -7.7])
def test_all_equal_rewards_are_no_signal_at_any_scale_also_with_eps_zero(kind: str, reward: float) -> None:
    rewards = torch.full((7,), reward)
    result = Advantage(kind, eps=0)(rewards, torch.zeros(7).long(), torch.ones(7, 2).bool(), torch.ones(7))
    assert not result.any()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_without_a_scored_token_have_no_advantage(kind: str) -> None:
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    result = Advantage(kind)(torch.tensor([1.0, 5.0, 0.0]), torch.zeros(3).long(), mask, torch.ones(3))
    assert result.isfinite().all()
    assert not result[~mask].any()


def test_nan_and_infinite_rewards_are_refused_by_row() -> None:
    for bad in (float("nan"), INF, -INF):
        with pytest.raises(UserError, match="reward of row 41 is not finite"):
            refuse_non_finite(torch.tensor([0.0, bad]), [40, 41])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gap", [0.0, 50.0, -50.0])
def test_kl_estimates_fifty_nats_apart_are_finite(estimator: str, gap: float) -> None:
    logps = torch.tensor([-60.0], requires_grad=True)
    value = kl_estimate(logps, torch.tensor([-60.0 + gap]), estimator)
    value.sum().backward()
    assert value.isfinite().all()
    assert logps.grad.isfinite().all()


@pytest.mark.parametrize("treatment", ["truncate", "mask"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rollout", [-INF, -500.0, 0.0])
def test_a_sampler_far_off_gives_finite_used_weights(treatment: str, level: str, rollout: float) -> None:
    old = torch.tensor([[-100.0, -0.1]])
    used, _, diagnostics = Mismatch(treatment, level)(
        old, torch.full((1, 2), rollout), torch.ones(1, 2).bool(), torch.ones(1)
    )
    assert used.isfinite().all()
    assert 0 <= diagnostics["mismatch/ess"] <= 1


def test_a_certain_teacher_and_an_unsure_student_have_a_finite_sampled_advantage() -> None:
    student = torch.tensor([[-90.0, -1e-7]])
    assert sampled_advantage(student, torch.tensor([[0.0, -INF]])).isfinite().all()


@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_dpo_at_a_margin_of_ten_thousand_nats_is_finite(margin: float) -> None:
    logps = torch.tensor([margin, 0.0], requires_grad=True)
    loss, _ = DPO(beta=1.0, label_smoothing=0.1)(logps, torch.zeros(2))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logps.grad.isfinite().all()


# -- every wrong word or number is one sentence ------------------------------------------------------------------------

WRONG = [
    (Advantage, "kind", ["grpo", None, 1]),
    (Advantage, "ddof", [2, -1, "one", None]),
    (Advantage, "eps", [-1e-6, "small", None, float("nan"), True]),
    (KL, "beta", [-0.1, "x", None, float("nan")]),
    (KL, "estimator", ["k4", None]),
    (KL, "placement", ["gradient", None]),
    (KL, "aggregate", ["mean", 3]),
    (Mismatch, "treatment", ["clip", None]),
    (Mismatch, "level", ["row", None]),
    (Mismatch, "low", [-0.5, "x", None]),
    (Mismatch, "high", [0.4, "x", None, float("nan")]),
    (PolicyGradient, "surrogate", ["ppo", None]),
    (PolicyGradient, "ratio", ["gspo", None]),
    (PolicyGradient, "clip_low", [-0.1, "x", None]),
    (PolicyGradient, "clip_high", [-0.1, "x", None]),
    (PolicyGradient, "dual_clip", [0.5, "x", float("nan")]),
    (PolicyGradient, "entropy_bonus", ["x", None, float("nan")]),
    (PolicyGradient, "aggregate", ["mean", None]),
    (PolicyGradient, "constant", [0, -3, "x"]),
    (Distillation, "kind", ["kl", None]),
    (Distillation, "beta", [-0.1, 1.1, "x", None, float("nan")]),
    (Distillation, "temperature", [0, -1, "x", None, float("nan")]),
    (Distillation, "top_k", [0, -1, 2.5, "x", True]),
    (Distillation, "top_k_of", ["both", None]),
    (Distillation, "rest", ["drop", None]),
    (Distillation, "outcome", [-1, "x", None]),
    (Distillation, "aggregate", ["mean", None]),
    (Distillation, "constant", [0, "x"]),
    (DPO, "beta", [0, -1, "x", None, float("nan")]),
    (DPO, "label_smoothing", [-0.1, 0.5, "x", None, float("nan")]),
]


@pytest.mark.parametrize(
    ("dataclass", "field", "value"), [(cls, field, value) for cls, field, values in WRONG for value in values]
)
def test_a_wrong_option_is_refused_with_its_name_and_value(dataclass: type, field: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        dataclass(**{field: value})
    assert f"{field}={value}" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_option_of_every_objective_is_in_the_list_of_wrong_ones() -> None:
    listed = {(cls, field) for cls, field, _ in WRONG}
    options = {(cls, field) for cls in {cls for cls, _, _ in WRONG} for field in cls.__dataclass_fields__}
    assert options - listed == {(PolicyGradient, "kl")}  # an object of its own


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KL(0.1, "k1", "loss"), "expected gradient of zero"),
        (lambda: PolicyGradient("cispo", dual_clip=3.0), "dual_clip has no effect"),
        (lambda: Distillation("reverse_kl", outcome=1.0), "needs objective.kind=sampled"),
        (lambda: Distillation("sampled", top_k=3), "no effect with objective.kind=sampled"),
        (lambda: Distillation("sampled", temperature=2.0), "no effect with objective.kind=sampled"),
        (lambda: token_weights(torch.ones(1, 1).bool(), torch.ones(1), "mean"), "aggregate=mean is not known"),
        (lambda: kl_estimate(torch.zeros(1), torch.zeros(1), "k5"), "estimator=k5 is not known"),
        (lambda: lr_factor("step", 0, 10), "optim.schedule=step is not known"),
    ],
)
def test_options_that_contradict_each_other_are_refused(make: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_the_checks_know_what_a_number_is() -> None:
    assert [is_number(value) for value in (1, 0.5, INF, True, "1", None, float("nan"))] == [True] * 3 + [False] * 4
    at_least("x", None, 0, optional=True)
    with pytest.raises(UserError, match="must be a number of at least 0 or null"):
        at_least("x", -1, 0, optional=True)
    with pytest.raises(UserError, match="a whole number"):
        at_least("x", 1.5, 0, whole=True)
    with pytest.raises(UserError, match="Did you mean rloo"):
        one_of("kind", "rlo", KINDS)
