"""Sampler mismatch: the published weights, levels, what is dropped, and the diagnostics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.aggregation import token_weights
from common.errors import UserError
from common.mismatch import LEVELS, Mismatch, effective_sample_size, importance_weights


def one_token_rows(weights: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old_logps_NA, rollout_logps_NA, mask_NA, weight_N whose importance weights are the given ones."""
    rollout = torch.full((len(weights), 1), -2.0)
    return (
        rollout + torch.tensor(weights)[:, None].log(),
        rollout,
        torch.ones(len(weights), 1).bool(),
        torch.ones(len(weights)),
    )


def test_masked_weights_outside_the_bounds_are_dropped_as_published(oracle: dict) -> None:
    published = oracle["mismatch"]
    mismatch = Mismatch("mask", low=published["low"], high=published["high"])
    used, keep, diagnostics = mismatch(*one_token_rows(published["weights"]))
    assert used[:, 0].tolist() == pytest.approx(published["masked"], abs=1e-6)
    assert keep[:, 0].tolist() == [False, True, False]
    assert diagnostics["mismatch/outside"] == pytest.approx(published["outside"], abs=1e-5)
    assert diagnostics["mismatch/ess"] == pytest.approx(published["ess_raw"], abs=5e-5)
    assert diagnostics["mismatch/ess_used"] == pytest.approx(published["ess_masked"], abs=1e-5)
    assert diagnostics["mismatch/weight_mean"] == pytest.approx(2.4, abs=1e-5)
    assert diagnostics["mismatch/weight_max"] == pytest.approx(6, abs=1e-5)


def test_the_dropped_leave_the_numerator_and_the_denominator(oracle: dict) -> None:
    used, keep, _ = Mismatch("mask", low=0.5, high=5)(*one_token_rows(oracle["mismatch"]["weights"]))
    loss = torch.tensor([[100.0], [3.0], [100.0]])
    mean = (loss * used * token_weights(keep, torch.ones(3))).sum()
    assert float(mean) == pytest.approx(0.8 * 3.0)  # divided by the one token that stayed


def test_truncated_weights_are_cut_from_above_only_and_nothing_is_dropped(oracle: dict) -> None:
    used, keep, _ = Mismatch("truncate", low=0.5, high=5)(*one_token_rows(oracle["mismatch"]["weights"]))
    assert used[:, 0].tolist() == pytest.approx([0.4, 0.8, 5.0], abs=1e-6)
    assert keep.all()


def test_off_weighs_everything_one_and_still_reports_the_raw_weights(oracle: dict) -> None:
    used, keep, diagnostics = Mismatch("off")(*one_token_rows(oracle["mismatch"]["weights"]))
    assert used.eq(1).all()
    assert keep.all()
    assert diagnostics["mismatch/ess"] == pytest.approx(oracle["mismatch"]["ess_raw"], abs=5e-5)
    assert diagnostics["mismatch/ess_used"] == 1.0


OLD = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]])
ROLLOUT = torch.tensor([[-1.5, -2.0, -2.0], [-1.2, -1.4, -9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_levels_by_hand() -> None:
    token = importance_weights(OLD, ROLLOUT, MASK, "token")
    assert token.log().flatten().tolist() == pytest.approx([0.5, 0.0, -1.0, 0.2, 0.4, 0.0], abs=1e-6)
    sequence = importance_weights(OLD, ROLLOUT, MASK, "sequence")
    assert sequence.log().flatten().tolist() == pytest.approx([-0.5] * 3 + [0.6, 0.6, 0.0], abs=1e-6)
    geometric = importance_weights(OLD, ROLLOUT, MASK, "geometric")
    assert geometric.log().flatten().tolist() == pytest.approx([-0.5 / 3] * 3 + [0.3, 0.3, 0.0], abs=1e-6)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_recorded_sums_give_the_weights_of_recorded_tokens(level: str) -> None:
    sums = (ROLLOUT * MASK).sum(-1)
    torch.testing.assert_close(
        importance_weights(OLD, sums, MASK, level), importance_weights(OLD, ROLLOUT, MASK, level)
    )


def test_token_level_on_recorded_sums_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="use level=sequence"):
        Mismatch("truncate", "token")(OLD, torch.zeros(2), MASK, torch.ones(2))
    Mismatch("off", "token")(OLD, torch.zeros(2), MASK, torch.ones(2))  # diagnostics alone fall back to the sums


def test_a_sequence_weight_outside_drops_the_whole_answer_and_is_counted_once() -> None:
    used, keep, diagnostics = Mismatch("mask", "sequence", low=0.7, high=5)(OLD, ROLLOUT, MASK, torch.ones(2))
    assert keep.tolist() == [[False] * 3, [True, True, False]]
    assert not used[0].any()
    assert diagnostics["mismatch/outside"] == pytest.approx(0.5)
    assert diagnostics["mismatch/weight_mean"] == pytest.approx((math.exp(-0.5) + math.exp(0.6)) / 2, rel=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_padding_rows_are_in_no_diagnostic(level: str) -> None:
    _, _, alone = Mismatch("truncate", level)(OLD[:1], ROLLOUT[:1], MASK[:1], torch.ones(1))
    _, _, padded = Mismatch("truncate", level)(OLD, ROLLOUT, MASK, torch.tensor([1.0, 0.0]))
    assert padded == pytest.approx(alone)


def test_no_gradient_passes_through_the_weights() -> None:
    old = OLD.clone().requires_grad_()
    used, _, _ = Mismatch("truncate")(old, ROLLOUT, MASK, torch.ones(2))
    assert not used.requires_grad


def test_the_effective_sample_size_survives_huge_infinite_and_missing_weights() -> None:
    assert effective_sample_size(torch.tensor([1e30, 1e30, 0.0])) == pytest.approx(2 / 3)
    assert effective_sample_size(torch.tensor([float("inf"), 1.0, 1.0, 1.0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.zeros(3)) == 0.0
    assert effective_sample_size(torch.zeros(0)) == 0.0


def test_rows_without_scored_tokens_report_nothing() -> None:
    used, keep, diagnostics = Mismatch("mask", "sequence")(OLD, ROLLOUT, torch.zeros_like(MASK), torch.ones(2))
    assert diagnostics == {}
    assert not keep.any()
    assert used.isfinite().all()
