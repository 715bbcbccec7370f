"""Log-probs: float32 or wider, the temperature, masks before arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from common.logprobs import entropy, gather_tokens, log_probs, mean_tokens, sum_tokens, token_logps

INF = float("inf")


def test_log_probs_of_odds_one_to_three_are_their_logs() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert log_probs(logits)[0].tolist() == pytest.approx([math.log(0.25), math.log(0.75)], abs=1e-6)


def test_temperature_divides_the_logits_before_the_softmax() -> None:
    logits = torch.tensor([[0.0, math.log(9.0)]])
    assert log_probs(logits, temperature=2.0)[0].tolist() == pytest.approx([math.log(0.25), math.log(0.75)], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_the_softmax_is_computed_in_float32_or_wider(given: torch.dtype, computed: torch.dtype) -> None:
    logits = torch.linspace(-3, 3, 1000).to(given)[None]
    logps = log_probs(logits)
    assert logps.dtype == computed
    assert float(logps.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_token_logps_pick_the_written_token_of_each_position() -> None:
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 2], logits[0, 1, 0] = math.log(2.0), math.log(8.0)
    picked = token_logps(logits, torch.tensor([[2, 1]]))
    assert picked[0].tolist() == pytest.approx([math.log(0.5), math.log(0.1)], abs=1e-6)
    assert torch.equal(picked, gather_tokens(log_probs(logits), torch.tensor([[2, 1]])))


def test_the_gradient_of_a_token_log_prob_is_one_hot_minus_the_probabilities() -> None:
    logits = torch.tensor([[[0.3, -1.0, 2.0]]], dtype=torch.float64, requires_grad=True)
    token_logps(logits, torch.tensor([[1]])).sum().backward()
    expected = torch.tensor([0.0, 1.0, 0.0]) - logits.detach().softmax(-1)[0, 0]
    torch.testing.assert_close(logits.grad[0, 0], expected)


def test_an_illegal_token_stays_impossible_and_receives_no_gradient() -> None:
    logits = torch.tensor([[[0.0, -INF, 1.0]]], requires_grad=True)
    logps = log_probs(logits)
    assert logps[0, 0, 1] == -INF
    (logps[0, 0, 0] + logps[0, 0, 2]).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0, 1] == 0


def test_entropy_of_four_equal_tokens_is_log_four_and_of_a_certain_one_zero() -> None:
    logps = torch.stack([torch.zeros(4).log_softmax(-1), torch.tensor([0.0, -INF, -INF, -INF])])
    assert entropy(logps).tolist() == pytest.approx([math.log(4.0), 0.0], abs=1e-6)


def test_the_entropy_gradient_is_finite_beside_impossible_tokens_and_matches_the_formula() -> None:
    logits = torch.tensor([0.5, -INF, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    value = entropy(log_probs(logits))
    value.backward()
    p = logits.detach().softmax(-1)
    legal = p > 0
    expected = torch.where(legal, -p * (p.clamp(min=1e-300).log() + value.detach()), torch.zeros(()).double())
    torch.testing.assert_close(logits.grad, expected)


def test_unscored_positions_may_hold_anything() -> None:
    values = torch.tensor([[1.0, 2.0, float("nan")], [4.0, -INF, INF], [INF, -INF, float("nan")]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert sum_tokens(values, mask).tolist() == [3.0, 4.0, 0.0]
    assert mean_tokens(values, mask).tolist() == [1.5, 4.0, 0.0]
