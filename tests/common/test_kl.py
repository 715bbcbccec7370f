"""KL estimates: published values, and what each estimate trains by where it is put."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from common.kl import ESTIMATORS, KL, kl_estimate
from common.logprobs import log_probs


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_have_the_published_values(oracle: dict, estimator: str) -> None:
    published = oracle["kl_estimates"]
    ref = torch.tensor(published["ref_logps"], dtype=torch.float64)
    values = kl_estimate(torch.full_like(ref, published["logp"]), ref, estimator)
    assert values.tolist() == pytest.approx(published[estimator], rel=1e-4)


def _exact(oracle: dict) -> tuple[dict, Tensor, Tensor]:
    published = oracle["kl_exact"]
    logits = torch.tensor(published["p"], dtype=torch.float64).log().requires_grad_()
    return published, logits, torch.tensor(published["q"], dtype=torch.float64).log()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_expected_estimate_is_the_published_one(oracle: dict, estimator: str) -> None:
    published, logits, ref = _exact(oracle)
    logps = log_probs(logits.detach())
    expected = (logps.exp() * kl_estimate(logps, ref, estimator)).sum()
    assert float(expected) == pytest.approx(published[f"mean_{estimator}"], abs=1e-6)


def test_k2_in_the_loss_has_the_gradient_of_the_reverse_kl(oracle: dict) -> None:
    published, logits, ref = _exact(oracle)
    logps = log_probs(logits)
    (logps.detach().exp() * kl_estimate(logps, ref, "k2")).sum().backward()
    assert logits.grad.tolist() == pytest.approx(published["reverse_gradient"], abs=1e-6)


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_kl(oracle: dict) -> None:
    published, logits, ref = _exact(oracle)
    logps = log_probs(logits)
    penalised_reward = -kl_estimate(logps.detach(), ref, "k1")
    (logps.detach().exp() * -penalised_reward * logps).sum().backward()
    assert logits.grad.tolist() == pytest.approx(published["reverse_gradient"], abs=1e-6)


def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl(oracle: dict) -> None:
    published, logits, ref = _exact(oracle)
    logps = log_probs(logits)
    (logps.detach().exp() * kl_estimate(logps, ref, "k3")).sum().backward()
    assert logits.grad.tolist() == pytest.approx(published["k3_in_loss_gradient"], abs=1e-6)
    forward = torch.autograd.grad((ref.exp() * (ref - log_probs(logits))).sum(), logits)[0]
    torch.testing.assert_close(logits.grad, forward)


def test_k1_in_the_loss_has_no_expected_gradient_and_is_refused(oracle: dict) -> None:
    published, logits, ref = _exact(oracle)
    logps = log_probs(logits)
    (logps.detach().exp() * kl_estimate(logps, ref, "k1")).sum().backward()
    assert logits.grad.tolist() == pytest.approx(published["k1_in_loss_gradient"], abs=1e-9)
    with pytest.raises(UserError, match="expected gradient of zero"):
        KL(beta=0.1, estimator="k1", placement="loss")


def test_beta_zero_is_neither_in_the_loss_nor_in_the_reward() -> None:
    assert not KL(0.0).in_loss
    assert not KL(0.0, placement="reward").in_reward
    assert KL(0.1).in_loss
    assert not KL(0.1).in_reward
    assert KL(0.1, "k1", "reward").in_reward
    assert not KL(0.1, "k1", "reward").in_loss


def test_k2_and_k3_are_never_negative_and_zero_at_the_reference() -> None:
    logps = torch.linspace(-8, 0, 50, dtype=torch.float64)
    for estimator in ("k2", "k3"):
        assert (kl_estimate(logps, logps.flip(0), estimator) >= 0).all()
        assert not kl_estimate(logps, logps, estimator).any()
