"""DPO: its value and gradient at known margins."""

from __future__ import annotations

import math

import pytest
import torch

from common.preference import DPO


def test_at_the_reference_the_loss_is_log_two_and_the_margin_zero() -> None:
    logps = torch.tensor([-3.0, -5.0, -1.0, -1.0])
    loss, margin = DPO()(logps, logps)
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
    assert margin.tolist() == [0.0, 0.0]


def test_the_value_at_a_known_margin_is_minus_log_sigmoid() -> None:
    loss, margin = DPO(beta=0.5)(torch.tensor([-1.0, -4.0]), torch.tensor([-2.0, -3.0]))  # (1 - -1) * .5
    assert margin.tolist() == [1.0]
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-1.0))])


def test_the_gradient_pushes_the_chosen_up_and_the_rejected_down_by_beta_times_the_error() -> None:
    logps = torch.tensor([-1.0, -4.0], requires_grad=True)
    DPO(beta=0.5)(logps, torch.tensor([-2.0, -3.0]))[0].sum().backward()
    error = 1 / (1 + math.exp(1.0))
    assert logps.grad.tolist() == pytest.approx([-0.5 * error, 0.5 * error])


def test_label_smoothing_stops_at_a_finite_margin() -> None:
    smooth = 0.1
    best = math.log((1 - smooth) / smooth)  # where the gradient vanishes
    logps = torch.tensor([best, 0.0], dtype=torch.float64, requires_grad=True)
    DPO(beta=1.0, label_smoothing=smooth)(logps, torch.zeros(2).double())[0].sum().backward()
    assert logps.grad.abs().max() < 1e-9


def test_large_margins_of_either_sign_stay_finite() -> None:
    logps = torch.tensor([0.0, -1e4, -1e4, 0.0], requires_grad=True)
    loss, _ = DPO(beta=1.0)(logps, torch.zeros(4))
    loss.sum().backward()
    assert loss.tolist() == [0.0, 1e4]
    assert logps.grad.tolist() == [0.0, 0.0, -1.0, 1.0]
