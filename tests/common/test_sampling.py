"""Choosing a token by inverting the distribution function."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.sampling import choose, invert_cdf

LOG = torch.tensor([[0.1, 0.0, 0.6, 0.3, 0.0]]).log()


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 2), (0.6999, 2), (0.7001, 3), (0.9999999999999999, 3)]
)
def test_a_number_falls_into_the_token_whose_interval_holds_it(uniform: float, token: int) -> None:
    assert invert_cdf(LOG, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_none_is_greedy() -> None:
    tokens, logps = choose(LOG)
    assert tokens.tolist() == [2]
    assert math.isclose(logps.item(), math.log(0.6), rel_tol=1e-6)


def test_log_probs_are_those_of_the_tempered_distribution() -> None:
    _, logps = choose(torch.tensor([[0.0, math.log(3.0)]]), temperature=0.5)
    assert math.isclose(logps.item(), math.log(0.9), rel_tol=1e-6)


@given(
    st.lists(st.one_of(st.floats(-80, 80, width=32), st.just(-math.inf)), min_size=1, max_size=9),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(math.nextafter(1.0, 0.0))),
)
def test_an_impossible_token_is_never_written(logits: list[float], uniform: float) -> None:
    if all(value == -math.inf for value in logits):
        logits[0] = 0.0
    tokens, logps = choose(torch.tensor([logits]), 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert math.isfinite(logps.item())
    assert logits[int(tokens)] > -math.inf


def test_a_row_is_chosen_without_regard_to_the_others() -> None:
    random = torch.Generator().manual_seed(0)
    logits, numbers = torch.randn(50, 7, generator=random), torch.rand(50, generator=random, dtype=torch.float64)
    together, _ = choose(logits, 1.0, numbers)
    alone = [int(choose(logits[i : i + 1], 1.0, numbers[i : i + 1])[0]) for i in range(50)]
    assert together.tolist() == alone
