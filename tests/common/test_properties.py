"""Invariances of any rows: order, padding, splits, duplicates, logit shifts, reward scales, equal policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.advantages import Advantage, signal
from common.aggregation import AGGREGATES, token_weights
from common.distillation import Distillation, forward_kl, jsd, reverse_kl, sampled_advantage
from common.kl import KL
from common.logprobs import entropy, log_probs, token_logps
from common.mismatch import LEVELS, Mismatch, effective_sample_size
from common.objectives import RATIOS, SURROGATES, PolicyGradient

FULL = ("reverse_kl", "forward_kl", "jsd")


class Rows:
    """Random rows of unequal length, float64 logits with gradient, an old policy and a reference a little away."""

    def __init__(self, seed: int, n: int, length: int, vocab: int) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.logits = normal(n, length, vocab)
        self.old_logits = self.logits + 0.4 * normal(n, length, vocab)
        self.ref_logits = self.logits + 0.4 * normal(n, length, vocab)
        self.answers = torch.randint(0, vocab, (n, length), generator=draw)
        self.mask = torch.arange(length)[None] < torch.randint(1, length + 1, (n, 1), generator=draw)
        self.advantages = normal(n, 1).expand(n, length)
        self.weight = torch.ones(n)

    def pick(self, rows: Tensor) -> Rows:
        """The rows at the given positions, also repeated ones."""
        other = object.__new__(Rows)
        other.__dict__ = {name: value[rows] for name, value in self.__dict__.items()}
        return other


def loss_and_gradient(rows: Rows, objective: PolicyGradient, weights_by_term: dict[str, Tensor] | None = None) -> tuple:
    """The scalar loss of the rows and its gradient with respect to their logits."""
    logits = rows.logits.clone().requires_grad_()
    logps_NAV = log_probs(logits)
    losses = objective(
        token_logps(logits, rows.answers),
        token_logps(rows.old_logits, rows.answers),
        rows.advantages,
        rows.mask,
        ref_logps_NA=token_logps(rows.ref_logits, rows.answers),
        entropy_NA=entropy(logps_NAV),
    )
    total = torch.zeros((), dtype=torch.float64)
    for name, term in losses.terms.items():
        if weights_by_term is None:
            weights = token_weights(rows.mask, rows.weight, objective.aggregate_of(name), objective.constant)
        else:
            weights = weights_by_term[name]
        total = total + (term * weights).sum()
    return total.detach(), torch.autograd.grad(total, logits)[0]


seeds = st.integers(0, 10**6)
rows_of = st.builds(Rows, seeds, st.integers(2, 6), st.integers(1, 5), st.integers(2, 5))
objectives = st.builds(
    PolicyGradient,
    surrogate=st.sampled_from(SURROGATES),
    ratio=st.sampled_from(RATIOS),
    aggregate=st.sampled_from(AGGREGATES),
    entropy_bonus=st.sampled_from([0.0, 0.1]),
    kl=st.sampled_from([KL(), KL(0.3, "k2"), KL(0.3, "k3", aggregate="sequence_sum")]),
)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # token weights are float32


@given(rows_of, objectives, seeds)
def test_the_order_of_the_rows_changes_nothing(rows: Rows, objective: PolicyGradient, seed: int) -> None:
    order = torch.randperm(len(rows.mask), generator=torch.Generator().manual_seed(seed))
    loss, gradient = loss_and_gradient(rows, objective)
    shuffled_loss, shuffled_gradient = loss_and_gradient(rows.pick(order), objective)
    close(shuffled_loss, loss)
    close(shuffled_gradient, gradient[order])


@given(rows_of, objectives)
def test_rows_of_weight_zero_change_nothing(rows: Rows, objective: PolicyGradient) -> None:
    n = len(rows.mask)
    padded = rows.pick(torch.tensor([*range(n), n - 1, 0]))
    padded.weight = torch.cat([torch.ones(n), torch.zeros(2)])
    loss, gradient = loss_and_gradient(rows, objective)
    padded_loss, padded_gradient = loss_and_gradient(padded, objective)
    close(padded_loss, loss)
    close(padded_gradient[:n], gradient)
    assert not padded_gradient[n:].any()


@given(rows_of, objectives, st.booleans())
def test_unscored_columns_on_either_side_change_nothing(rows: Rows, objective: PolicyGradient, left: bool) -> None:
    if objective.aggregate == "constant":  # by default the longest possible answer, which the columns change
        objective = replace(objective, constant=4.0)
    n, length = rows.mask.shape
    wider = rows.pick(torch.arange(n))
    for name, value in rows.__dict__.items():
        if name != "weight":
            extra = torch.zeros(n, 2, *value.shape[2:], dtype=value.dtype)
            setattr(wider, name, torch.cat([extra, value] if left else [value, extra], dim=1))
    loss, gradient = loss_and_gradient(rows, objective)
    wider_loss, wider_gradient = loss_and_gradient(wider, objective)
    close(wider_loss, loss)
    close(wider_gradient[:, 2:] if left else wider_gradient[:, :length], gradient)


@given(rows_of, objectives, st.integers(1, 3))
def test_micro_batches_of_any_size_add_up_to_the_same(rows: Rows, objective: PolicyGradient, size: int) -> None:
    loss, gradient = loss_and_gradient(rows, objective)
    weights = {
        name: token_weights(rows.mask, rows.weight, objective.aggregate_of(name)) for name in ("pg", "kl", "entropy")
    }
    pieces = [
        loss_and_gradient(rows.pick(part), objective, {name: weight[part] for name, weight in weights.items()})
        for part in torch.arange(len(rows.mask)).split(size)
    ]
    close(sum(piece[0] for piece in pieces), loss)
    close(torch.cat([piece[1] for piece in pieces]), gradient)


@given(rows_of, objectives)
def test_a_duplicated_row_is_a_row_of_double_weight(rows: Rows, objective: PolicyGradient) -> None:
    n = len(rows.mask)
    doubled = rows.pick(torch.arange(n))
    doubled.weight = torch.cat([torch.tensor([2.0]), torch.ones(n - 1)])
    loss, gradient = loss_and_gradient(doubled, objective)
    twice_loss, twice_gradient = loss_and_gradient(rows.pick(torch.tensor([0, *range(n)])), objective)
    close(twice_loss, loss)
    close(twice_gradient[0] + twice_gradient[1], gradient[0])
    close(twice_gradient[2:], gradient[1:])


@given(rows_of, objectives, st.floats(-20, 20))
def test_shifting_all_logits_of_a_position_changes_nothing(rows: Rows, objective: PolicyGradient, by: float) -> None:
    shifted = rows.pick(torch.arange(len(rows.mask)))
    shifted.logits = rows.logits + by
    loss, gradient = loss_and_gradient(rows, objective)
    shifted_loss, shifted_gradient = loss_and_gradient(shifted, objective)
    close(shifted_loss, loss)
    close(shifted_gradient, gradient)
    close(gradient.sum(-1), torch.zeros_like(gradient[..., 0]))  # the same in another form


@given(rows_of, st.sampled_from(RATIOS), st.sampled_from(["clip", "cispo", "cispo_cap"]))
def test_an_unchanged_policy_has_ratio_one_and_clips_nothing(rows: Rows, ratio: str, surrogate: str) -> None:
    logps = token_logps(rows.logits, rows.answers)
    stats = PolicyGradient(surrogate, ratio)(logps, logps, rows.advantages, rows.mask).stats
    assert stats["ratio"][0].eq(1).all()
    for name in ("clip_frac", "clip_frac_high", "clip_frac_low", "ratio_outside", "approx_kl"):
        assert not stats[name][0].any()


# -- advantages --------------------------------------------------------------------------------------------------------

Grouped = tuple[Tensor, Tensor]


@st.composite
def grouped_rewards(draw: st.DrawFn) -> Grouped:
    """Rewards (eighths, so that sums are exact) and group numbers; every group has at least one row."""
    n = draw(st.integers(2, 12))
    rewards = draw(st.lists(st.integers(-16, 16), min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return torch.tensor(rewards) / 8.0, torch.tensor(groups)


def advantages(kind: str, rewards: Tensor, groups: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    weight = torch.ones(len(rewards)) if weight is None else weight
    return Advantage(kind, eps=eps)(rewards, groups, mask, weight)[:, 0]


GROUP_KINDS = st.sampled_from(["group", "centred", "rloo"])


@given(grouped_rewards(), GROUP_KINDS)
def test_group_advantages_sum_to_zero_in_every_group(data: Grouped, kind: str) -> None:
    rewards, groups = data
    result = advantages(kind, rewards, groups)
    sums = torch.zeros(4).index_add_(0, groups, result)
    torch.testing.assert_close(sums, torch.zeros(4), atol=1e-4, rtol=0)


@given(grouped_rewards(), GROUP_KINDS)
def test_advantages_are_zero_exactly_where_there_is_no_signal(data: Grouped, kind: str) -> None:
    rewards, groups = data
    informative = signal(rewards, groups, torch.ones(len(rewards)))
    result = advantages(kind, rewards, groups)
    assert not result[~informative].any()
    for group in groups[informative].unique():
        assert result[groups == group].any()


@given(grouped_rewards(), st.sampled_from([0.5, 4.0, 1024.0]), st.integers(-3, 3))
def test_group_and_batch_ignore_scale_and_shift_where_centred_and_rloo_keep_the_scale(
    data: Grouped, scale: float, shift: int
) -> None:
    rewards, groups = data
    for kind in ("group", "batch", "whiten"):
        torch.testing.assert_close(
            advantages(kind, rewards * scale + shift, groups), advantages(kind, rewards, groups), atol=1e-5, rtol=1e-5
        )
    for kind in ("centred", "rloo"):
        torch.testing.assert_close(
            advantages(kind, rewards * scale + shift, groups), scale * advantages(kind, rewards, groups)
        )


@given(grouped_rewards(), st.sampled_from(["group", "centred", "rloo", "batch", "whiten", "none"]), seeds)
def test_advantages_follow_their_rows_and_ignore_padding(data: Grouped, kind: str, seed: int) -> None:
    rewards, groups = data
    n = len(rewards)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    result = advantages(kind, rewards, groups)
    torch.testing.assert_close(advantages(kind, rewards[order], groups[order]), result[order])
    padded = advantages(
        kind,
        torch.cat([rewards, rewards[:2] + 5]),
        torch.cat([groups, groups[:2]]),
        torch.tensor([1.0] * n + [0.0] * 2),
    )
    torch.testing.assert_close(padded, torch.cat([result, torch.zeros(2)]))


@given(grouped_rewards(), GROUP_KINDS)
def test_names_of_groups_do_not_matter(data: Grouped, kind: str) -> None:
    rewards, groups = data
    torch.testing.assert_close(advantages(kind, rewards, 1000 - 7 * groups), advantages(kind, rewards, groups))


# -- divergences -------------------------------------------------------------------------------------------------------


def pair(rows: Rows) -> tuple[Tensor, Tensor]:
    return log_probs(rows.logits), log_probs(rows.ref_logits)


@st.composite
def distillations(draw: st.DrawFn, truncated: bool | None = None) -> Distillation:
    """Any full-vocabulary objective whose options all have an effect; `truncated`: with top_k, or None either way."""
    kind = draw(st.sampled_from(FULL))
    options = {"beta": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))} if kind == "jsd" else {}
    if draw(st.booleans()) if truncated is None else truncated:
        options |= {
            "top_k": draw(st.sampled_from([1, 2, 3])),
            "top_k_of": draw(st.sampled_from(["teacher", "student"])),
            "rest": draw(st.sampled_from(["renormalise", "bucket"])),
        }
    return Distillation(kind, temperature=draw(st.sampled_from([0.5, 1.0, 2.0])), **options)


@given(rows_of, distillations())
def test_a_teacher_equal_to_the_student_gives_no_loss_and_no_gradient(rows: Rows, objective: Distillation) -> None:
    logits = rows.logits.clone().requires_grad_()
    loss = objective.divergence(log_probs(logits), log_probs(rows.logits))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.detach().abs().max() < 1e-9
    assert gradient.abs().max() < 1e-9
    logps = token_logps(rows.logits, rows.answers)
    assert not sampled_advantage(logps, logps).any()


@given(rows_of, distillations())
def test_divergences_are_never_negative_and_ignore_logit_shifts(rows: Rows, objective: Distillation) -> None:
    loss = objective.divergence(*pair(rows))
    assert (loss > -1e-12).all()
    close(objective.divergence(log_probs(rows.logits + 3.0), log_probs(rows.ref_logits - 5.0)), loss)


@given(rows_of, distillations(truncated=True))
def test_top_k_of_the_whole_vocabulary_is_the_full_divergence(rows: Rows, objective: Distillation) -> None:
    student, teacher = pair(rows)
    whole = replace(objective, top_k=student.shape[-1]).divergence(student, teacher)
    full = Distillation(objective.kind, beta=objective.beta, temperature=objective.temperature)
    assert torch.equal(whole, full.divergence(student, teacher))


@given(rows_of, st.floats(0.01, 0.99))
def test_jsd_changes_sides_with_one_minus_beta_and_reverse_kl_is_forward_kl_of_the_other_side(
    rows: Rows, beta: float
) -> None:
    student, teacher = pair(rows)
    close(jsd(student, teacher, beta), jsd(teacher, student, 1 - beta))
    close(reverse_kl(student, teacher), forward_kl(teacher, student))


@given(rows_of)
def test_jsd_of_a_half_is_at_most_log_two(rows: Rows) -> None:
    student, teacher = log_probs(50 * rows.logits), log_probs(50 * rows.ref_logits.flip(-1))
    assert (jsd(student, teacher, 0.5) <= torch.log(torch.tensor(2.0)) + 1e-9).all()


# -- mismatch ----------------------------------------------------------------------------------------------------------


@given(rows_of, st.sampled_from(LEVELS), st.sampled_from(["off", "truncate", "mask"]))
def test_a_sampler_equal_to_the_trainer_weighs_everything_one(rows: Rows, level: str, treatment: str) -> None:
    logps = token_logps(rows.logits, rows.answers)
    used, keep, diagnostics = Mismatch(treatment, level)(logps, logps, rows.mask, rows.weight)
    assert used[rows.mask].eq(1).all()
    assert torch.equal(keep, rows.mask)
    assert diagnostics == pytest.approx(
        {
            "mismatch/weight_mean": 1.0,
            "mismatch/weight_max": 1.0,
            "mismatch/outside": 0.0,
            "mismatch/ess": 1.0,
            "mismatch/ess_used": 1.0,
        }
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_the_effective_sample_size_is_a_share_and_ignores_scale(weights: list[float], scale: float) -> None:
    found = effective_sample_size(torch.tensor(weights, dtype=torch.float64))
    assert 0 <= found <= 1 + 1e-12
    if max(weights) > 1e-3:
        assert effective_sample_size(torch.tensor(weights, dtype=torch.float64) * scale) == pytest.approx(found)
