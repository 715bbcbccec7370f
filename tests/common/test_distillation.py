"""Distillation: published divergences, top-k, mixtures, and tokens that one side cannot write."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.distillation import (
    FLOOR,
    KINDS,
    Distillation,
    forward_kl,
    jsd,
    mix,
    reverse_kl,
    sampled_advantage,
    truncate,
)

INF = float("inf")
FULL = [kind for kind in KINDS if kind != "sampled"]


def logs(probs: list[float]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def test_permuted_distributions_have_the_published_divergences(oracle: dict) -> None:
    example = oracle["kl_permuted"]
    student, teacher = logs(example["s"]), logs(example["t"])
    assert float(reverse_kl(student, teacher)) == pytest.approx(example["reverse"], abs=5e-6)
    assert float(jsd(student, teacher, 0.5)) == pytest.approx(example["jsd_beta_0.5"], abs=5e-6)


def test_p_and_q_have_the_published_divergences_in_each_direction(oracle: dict) -> None:
    example = oracle["kl_exact"]
    student, teacher = logs(example["p"]), logs(example["q"])
    assert float(reverse_kl(student, teacher)) == pytest.approx(example["reverse"], abs=1e-6)
    assert float(forward_kl(student, teacher)) == pytest.approx(example["forward"], abs=1e-6)
    assert float(jsd(student, teacher, 0.1)) == pytest.approx(example["jsd_beta_0.1"], abs=1e-6)
    assert float(jsd(student, teacher, 0.9)) == pytest.approx(example["jsd_beta_0.9"], abs=1e-6)


def test_jsd_at_its_ends_is_forward_and_reverse_kl_while_the_formula_goes_to_zero(oracle: dict) -> None:
    student, teacher = logs(oracle["kl_exact"]["p"]), logs(oracle["kl_exact"]["q"])
    assert jsd(student, teacher, 0.0) == forward_kl(student, teacher)
    assert jsd(student, teacher, 1.0) == reverse_kl(student, teacher)
    assert float(jsd(student, teacher, 1e-6)) < 1e-6
    # divided by beta, the formula's limit is the special case
    assert float(jsd(student, teacher, 1e-6)) / 1e-6 == pytest.approx(oracle["kl_exact"]["forward"], rel=1e-4)


@pytest.mark.parametrize("kind", FULL)
def test_a_student_equal_to_its_teacher_has_zero_loss_and_zero_gradient(kind: str) -> None:
    logits = torch.tensor([[[0.1, 2.0, -1.0, -INF]]], dtype=torch.float64, requires_grad=True)
    student = logits.log_softmax(-1)
    loss = Distillation(kind).divergence(student, student.detach())
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert logits.grad.abs().max() < 1e-12


def test_mopds_advantage_has_the_published_value_and_no_gradient(oracle: dict) -> None:
    example = oracle["mopd"]
    student = torch.tensor([[float(example["student_logp"])]], requires_grad=True)
    advantage = sampled_advantage(student, torch.tensor([[float(example["teacher_logp"])]]))
    assert float(advantage) == example["advantage"]
    assert not advantage.requires_grad
    assert float(sampled_advantage(student, student.detach())) == 0.0


def test_the_outcome_advantage_is_added_alpha_times() -> None:
    logps = torch.tensor([[-1.0, -2.0]])
    outcome = torch.tensor([[0.5, -1.0]])
    assert sampled_advantage(logps, logps + 1, outcome, alpha=2.0).tolist() == [[2.0, -1.0]]
    assert sampled_advantage(logps, logps, outcome, alpha=0.0).tolist() == [[0.0, 0.0]]


def test_temperature_softens_both_sides() -> None:
    student, teacher = logs([0.1, 0.9]), logs([0.5, 0.5])
    softened = Distillation("reverse_kl", temperature=2.0).divergence(student, teacher)
    s = 0.25  # sqrt(.1) : sqrt(.9) = 1 : 3
    assert float(softened) == pytest.approx(s * math.log(s / 0.5) + (1 - s) * math.log((1 - s) / 0.5))


P, Q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.6, 0.1]  # the teacher's two largest are tokens 2 and 1


def test_top_k_of_the_teacher_renormalised_by_hand() -> None:
    objective = Distillation("reverse_kl", top_k=2, top_k_of="teacher", rest="renormalise")
    s, t = [0.2 / 0.5, 0.3 / 0.5], [0.6 / 0.8, 0.2 / 0.8]
    expected = sum(a * math.log(a / b) for a, b in zip(s, t, strict=True))
    assert float(objective.divergence(logs(P), logs(Q))) == pytest.approx(expected)


def test_top_k_of_the_student_with_the_rest_as_one_bucket_by_hand() -> None:
    objective = Distillation("forward_kl", top_k=2, top_k_of="student", rest="bucket")
    s, t = [0.4, 0.3, 0.3], [0.1, 0.2, 0.7]
    expected = sum(b * math.log(b / a) for a, b in zip(s, t, strict=True))
    assert float(objective.divergence(logs(P), logs(Q))) == pytest.approx(expected)


def test_a_bucket_is_a_lower_bound_of_the_full_divergence_and_tightens_with_k() -> None:
    values = [float(Distillation("reverse_kl", top_k=k, rest="bucket").divergence(logs(P), logs(Q))) for k in (1, 2, 3)]
    assert values[0] < values[1] - 0.01 < values[2] - 0.02
    assert values[2] == pytest.approx(float(reverse_kl(logs(P), logs(Q))))  # a bucket of one token is that token


@pytest.mark.parametrize("of", ["teacher", "student"])
@pytest.mark.parametrize("rest", ["renormalise", "bucket"])
@pytest.mark.parametrize("kind", FULL)
def test_top_k_of_the_whole_vocabulary_is_the_full_divergence_exactly(kind: str, of: str, rest: str) -> None:
    student, teacher = logs(P), logs(Q)
    full = Distillation(kind).divergence(student, teacher)
    for k in (4, 100):
        assert Distillation(kind, top_k=k, top_k_of=of, rest=rest).divergence(student, teacher) == full


def test_a_mixture_of_teachers_is_the_mean_of_their_probabilities() -> None:
    mixture = mix(torch.stack([logs(P), logs(Q)])[:, None, None])
    assert mixture.exp()[0, 0].tolist() == pytest.approx([0.25, 0.25, 0.4, 0.1])
    torch.testing.assert_close(mix(logs(P)[None]), logs(P))
    assert mix(torch.stack([logs([1.0, 0.0]), logs([1.0, 0.0])])).tolist() == [pytest.approx(0.0), -INF]


# Token 3 is illegal on both sides, token 2 is impossible under the teacher alone, token 1 nearly so under the student.
STUDENT = torch.tensor([[[0.5, -40.0, 0.0, -INF]]])
TEACHER = torch.tensor([[[0.3, 0.5, -INF, -INF]]])


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
@pytest.mark.parametrize("of", ["teacher", "student"])
@pytest.mark.parametrize("rest", ["renormalise", "bucket"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_impossible_tokens_give_finite_losses_and_gradients(
    kind: str, top_k: int | None, of: str, rest: str, temperature: float
) -> None:
    logits = STUDENT.clone().requires_grad_()
    cut = {} if top_k is None else {"top_k": top_k, "top_k_of": of, "rest": rest}
    objective = Distillation(kind, temperature=temperature, **cut)
    loss = objective.divergence(logits.log_softmax(-1), TEACHER.log_softmax(-1))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0, 3] == 0


@pytest.mark.parametrize("rest", ["renormalise", "bucket"])
def test_top_k_never_picks_only_tokens_that_the_student_may_not_write(rest: str) -> None:
    student, teacher = logs([0.0, 0.0, 0.7, 0.3]), logs([0.6, 0.3, 0.05, 0.05])
    loss = Distillation("reverse_kl", top_k=2, rest=rest).divergence(student, teacher)
    assert float(loss) == pytest.approx(
        0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
        if rest == "renormalise"
        else 0.7 * math.log(0.7 / 0.05) + 0.3 * math.log(0.3 / 0.05)
    )


def test_a_token_impossible_under_the_teacher_costs_a_large_finite_amount() -> None:
    student, teacher = logs([0.5, 0.5]), logs([1.0, 0.0])
    assert float(reverse_kl(student, teacher)) == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - FLOOR))
    assert float(forward_kl(student, teacher)) == pytest.approx(math.log(2.0))
    assert float(jsd(student, teacher)) == pytest.approx(
        0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.25 * math.log(2)
    )
    assert float(sampled_advantage(student[1:], teacher[1:])) == pytest.approx(FLOOR - math.log(0.5))


def test_a_bucket_of_impossible_tokens_has_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0, -INF]], requires_grad=True)
    student, teacher = truncate(logits.log_softmax(-1), torch.tensor([[0.5, 0.5, 0.0]]).log(), 2, "teacher", "bucket")
    assert student[0, 2] == -INF
    assert teacher[0, 2] == -INF
    student[0, :2].sum().backward()
    assert logits.grad.isfinite().all()
