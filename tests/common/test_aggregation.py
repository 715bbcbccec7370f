"""One denominator: the four aggregates differ as they should, and no split of the rows changes the number."""

from __future__ import annotations

import pytest
import torch

from common.aggregation import AGGREGATES, token_weights
from common.errors import UserError

# Two rows of lengths 3 and 1 with losses 1, 2, 3 and 10.
MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])
LOSS = torch.tensor([[1.0, 2.0, 3.0, 99.0], [10.0, 99.0, 99.0, 99.0]])
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("aggregate", "constant", "expected"),
    [
        ("token_mean", None, 16 / 4),
        ("sequence_mean", None, (2 + 10) / 2),
        ("sequence_sum", None, (6 + 10) / 2),
        ("constant", None, 16 / (2 * 4)),
        ("constant", 10.0, 16 / (2 * 10)),
    ],
)
def test_unequal_lengths_give_each_aggregate_its_own_number(
    aggregate: str, constant: float | None, expected: float
) -> None:
    assert float((LOSS * token_weights(MASK, ONES, aggregate, constant)).sum()) == pytest.approx(expected)


def test_hundred_tokens_at_two_and_nine_hundred_at_a_half_make_065(oracle: dict) -> None:
    published = oracle["one_denominator"]
    short, long = published["tokens"]
    mask = torch.arange(long)[None] < torch.tensor([short, long])[:, None]
    loss = torch.tensor(published["losses"])[:, None].expand(2, long)
    weights = token_weights(mask, torch.ones(2), "token_mean")
    by_micro_batch = [float((loss[i] * weights[i]).sum()) for i in range(2)]
    assert sum(by_micro_batch) == pytest.approx(published["mean"], rel=1e-5)
    means = [float(loss[i][mask[i]].mean()) for i in range(2)]
    assert sum(means) / 2 == pytest.approx(published["mean_of_means"])  # what accumulating means would have given


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_padding_row_weighs_nothing_and_leaves_the_others_as_they_were(aggregate: str) -> None:
    padded = token_weights(torch.cat([MASK, MASK[:1]]), torch.tensor([1.0, 1.0, 0.0]), aggregate)
    torch.testing.assert_close(padded[:2], token_weights(MASK, ONES, aggregate))
    assert not padded[2].any()


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_row_without_scored_tokens_is_in_no_denominator(aggregate: str) -> None:
    with_empty = token_weights(torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)]), torch.ones(3), aggregate)
    torch.testing.assert_close(with_empty[:2], token_weights(MASK, ONES, aggregate))


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("weight", [torch.zeros(2), torch.ones(2)])
def test_nothing_scored_gives_zeros_and_not_nan(aggregate: str, weight: torch.Tensor) -> None:
    mask = MASK if not weight.any() else torch.zeros_like(MASK)
    assert not token_weights(mask, weight, aggregate).any()


def test_weights_are_float32_whatever_the_row_weights_are() -> None:
    assert token_weights(MASK, ONES).dtype == torch.float32


def test_an_unknown_aggregate_is_refused_with_the_nearest_word() -> None:
    with pytest.raises(UserError, match="Did you mean token_mean"):
        token_weights(MASK, ONES, "token_means")
