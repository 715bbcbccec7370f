"""Advantages: published numbers, groups without signal, padding, and REINFORCE++'s per-token returns by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.advantages import (
    KINDS,
    Advantage,
    group_relative,
    refuse_non_finite,
    reward_to_go,
    signal,
    whiten,
)
from common.errors import UserError

GROUP_KINDS = ("group", "centred", "rloo")


def rows(
    rewards: list[float], *, groups: list[int] | None = None, length: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards_N, groups_N, mask_NA, weight_N with every token scored and every row counted."""
    n = len(rewards)
    groups_N = torch.tensor(groups if groups is not None else [0] * n)
    return torch.tensor(rewards), groups_N, torch.ones(n, length, dtype=torch.bool), torch.ones(n)


@pytest.mark.parametrize(
    ("advantage", "published"),
    [
        (Advantage("group", ddof=1, eps=0), "group_ddof1"),
        (Advantage("group", ddof=0, eps=0), "group_ddof0"),
        (Advantage("centred"), "centred"),
        (Advantage("rloo"), "rloo"),
    ],
)
def test_one_right_of_eight_has_the_published_advantages(oracle: dict, advantage: Advantage, published: str) -> None:
    example = oracle["group_one_right_of_eight"]
    result = advantage(*rows([float(r) for r in example["rewards"]]))[:, 0].tolist()
    assert result[0] == pytest.approx(example[published]["right"], abs=5e-5)
    assert result[1:] == pytest.approx([example[published]["wrong"]] * 7, abs=5e-5)


def test_eps_is_added_to_the_standard_deviation() -> None:
    deviation = 0.5**0.5  # of 0 and 1, ddof 1
    result = Advantage("group", eps=0.1)(*rows([1.0, 0.0]))[:, 0]
    assert result.tolist() == pytest.approx([0.5 / (deviation + 0.1), -0.5 / (deviation + 0.1)])


def test_groups_are_compared_with_themselves_wherever_their_rows_stand() -> None:
    result = Advantage("centred")(*rows([1.0, 10.0, 0.0, 30.0], groups=[5, 2, 5, 2]))[:, 0]
    assert result.tolist() == [0.5, -10.0, -0.5, 10.0]


def test_groups_of_different_sizes_use_their_own_counts() -> None:
    result = Advantage("rloo")(*rows([1.0, 0.0, 3.0, 0.0, 0.0], groups=[0, 0, 1, 1, 1]))[:, 0]
    assert result.tolist() == pytest.approx([1.0, -1.0, 3.0, -1.5, -1.5])


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_whose_float32_std_is_not_zero_give_exactly_zero(kind: str, size: int) -> None:
    reward = 0.1 + 0.7
    residue = any(float(torch.full((n,), value).std()) > 0 for n in (3, 7) for value in (0.1, 0.7, reward))
    assert residue, "the premise: a float32 std of equal values can leave a residue"
    result = Advantage(kind, eps=0)(*rows([reward] * size))
    assert not result.any()


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "batch", "whiten"])
def test_a_group_of_one_is_exactly_zero_also_with_eps_zero(kind: str) -> None:
    assert not Advantage(kind, eps=0)(*rows([0.3])).any()


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_padding_rows_change_no_statistic_and_get_zero(kind: str) -> None:
    rewards, groups, mask, weight = rows([1.0, 0.0, 0.0, 100.0])
    weight[3] = 0.0
    result = Advantage(kind)(rewards, groups, mask, weight)[:, 0]
    torch.testing.assert_close(result[:3], Advantage(kind)(*rows([1.0, 0.0, 0.0]))[:, 0])
    assert result[3] == 0


def test_signal_counts_the_rows_of_groups_that_hold_different_rewards() -> None:
    rewards, groups, _, weight = rows([1.0, 0.0, 0.5, 0.5, 0.2, 9.0], groups=[0, 0, 1, 1, 2, 2])
    weight[5] = 0.0  # the only different reward of group 2 is padding
    assert signal(rewards, groups, weight).tolist() == [True, True, False, False, False, False]


def test_a_nan_reward_is_refused_by_its_row_id() -> None:
    with pytest.raises(UserError, match="row 12, 14 is not finite"):
        refuse_non_finite(torch.tensor([1.0, float("nan"), 0.0, float("inf")]), [11, 12, 13, 14])
    refuse_non_finite(torch.tensor([1.0, 0.0]), [0, 1])


def test_a_long_list_of_bad_rows_is_cut_and_counted() -> None:
    with pytest.raises(UserError, match="9 and 5 more"):
        refuse_non_finite(torch.full((15,), float("nan")), list(range(15)))


def test_none_is_the_reward_itself_at_every_scored_token() -> None:
    rewards, groups, mask, weight = rows([0.5, 2.0], length=3)
    mask[1, 2] = False
    assert Advantage("none")(rewards, groups, mask, weight).tolist() == [[0.5, 0.5, 0.5], [2.0, 2.0, 0.0]]


def test_batch_has_zero_mean_and_unit_std_over_all_groups() -> None:
    result = Advantage("batch", eps=0)(*rows([1.0, 2.0, 3.0, 10.0], groups=[0, 0, 1, 1]))[:, 0]
    assert float(result.mean()) == pytest.approx(0, abs=1e-6)
    assert float(result.std()) == pytest.approx(1, abs=1e-6)


def test_batch_over_one_group_is_group() -> None:
    values = [1.0, 0.0, 0.25, 0.5]
    torch.testing.assert_close(Advantage("batch")(*rows(values)), Advantage("group")(*rows(values)))


def test_reward_to_go_sums_what_follows_and_discounts_a_token() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, float("nan")]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert reward_to_go(rewards, mask).tolist() == [[7.0, 6.0, 4.0], [3.0, 2.0, 0.0]]
    assert reward_to_go(rewards, mask, gamma=0.5).tolist() == [[3.0, 4.0, 4.0], [2.0, 2.0, 0.0]]


def test_whitened_returns_have_zero_mean_and_unit_std_over_the_scored_tokens() -> None:
    rewards, groups, mask, weight = rows([1.0, 0.0, 0.0, 3.0], length=4)
    mask[1, 2:] = False
    penalty = torch.linspace(0, 1, 16).view(4, 4)
    result = Advantage("whiten", eps=0)(rewards, groups, mask, weight, penalty)
    assert not result[~mask].any()
    assert float(result[mask].mean()) == pytest.approx(0, abs=1e-6)
    assert float(result[mask].std()) == pytest.approx(1, abs=1e-6)


def test_whitened_returns_by_hand_pay_at_the_last_token_and_answer_for_later_penalties() -> None:
    rewards, groups, mask, weight = rows([1.0, 0.0], length=2)
    mask[1, 1] = False
    penalty = torch.tensor([[0.25, 0.5], [0.5, float("nan")]])
    returns = torch.tensor([0.25, 0.5, -0.5])  # 1 - .25 - .5;  1 - .5;  0 - .5
    white = (returns - returns.mean()) / returns.std()
    result = Advantage("whiten", eps=0)(rewards, groups, mask, weight, penalty)
    assert result[mask].tolist() == pytest.approx(white.tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_penalty_enters_the_reward_before_the_baseline_is_taken(kind: str) -> None:
    rewards, groups, mask, weight = rows([1.0, 1.0, 0.0], length=2)
    penalty = torch.tensor([[0.1, 0.2], [0.0, 0.0], [0.3, 0.4]])
    penalised = rewards - penalty.sum(-1)
    torch.testing.assert_close(
        Advantage(kind)(rewards, groups, mask, weight, penalty), Advantage(kind)(penalised, groups, mask, weight)
    )


def test_a_penalty_of_an_unscored_token_costs_nothing() -> None:
    rewards, groups, mask, weight = rows([1.0, 0.0], length=2)
    mask[:, 1] = False
    penalty = torch.tensor([[0.0, 9.0], [0.0, float("nan")]])
    assert Advantage("none")(rewards, groups, mask, weight, penalty).tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_whitening_ignores_padding_and_refuses_to_divide_a_residue() -> None:
    values, counted = torch.tensor([1.0, 3.0, 50.0]), torch.tensor([True, True, False])
    assert whiten(values, counted, eps=0).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])
    assert not whiten(torch.full((7,), 0.8), torch.ones(7, dtype=torch.bool), eps=0).any()


def test_whitening_all_ranks_together_is_not_whitening_each_rank() -> None:
    values, everything = torch.tensor([0.0, 1.0, 10.0, 11.0]), torch.ones(4, dtype=torch.bool)
    apart = torch.cat([whiten(half, everything[:2]) for half in values.split(2)])
    assert not torch.allclose(whiten(values, everything), apart, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_float32_of_the_shape_of_the_mask(kind: str) -> None:
    rewards, groups, mask, weight = rows([1.0, 0.0, 2.0], length=2)
    result = Advantage(kind)(rewards.double(), groups, mask, weight)
    assert (result.dtype, result.shape) == (torch.float32, mask.shape)


def test_no_rows_give_no_advantages() -> None:
    empty = torch.zeros(0)
    assert group_relative(empty, torch.zeros(0, dtype=torch.long), empty, "group").shape == (0,)
