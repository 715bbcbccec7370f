"""Evaluation: intervals, pass@k, floor and ceiling, the swap test."""

from __future__ import annotations

import itertools
import math

import pytest

pytest.importorskip("minigrid")

from bt_policy.babyai import ROOM_6
from bt_policy.babyai.evaluation import Figure, gain, mean, pass_at, share, table
from bt_policy.evaluate import run
from common.errors import UserError
from tests.bt_policy.conftest import make_policy


def test_a_proportions_interval_is_wilsons():
    figure = share([True] * 8 + [False] * 2)
    assert (figure.low, figure.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert share([True] * 5).high == pytest.approx(1.0)


def test_a_means_interval_is_two_standard_errors():
    figure = mean([0.0, 1.0, 2.0, 3.0])
    assert figure.mean == 1.5
    assert figure.high - figure.mean == pytest.approx(1.96 * 1.29099 / 2, rel=1e-3)


def test_pass_at_k_is_what_counting_all_choices_gives():
    answers = [True, False, False, True, False]
    for k in (1, 2, 3, 4):
        choices = list(itertools.combinations(answers, k))
        assert pass_at(k, 5, 2) == pytest.approx(sum(any(c) for c in choices) / len(choices))


def test_the_table_has_floor_and_ceiling_and_all_figures():
    policy = make_policy()
    rows = table(policy, policy.encoder, [ROOM_6], held_out=8, samples=2, memory=None)
    assert list(rows) == ["chance", "greedy", "sampled", "expert"]
    assert rows["expert"]["success"].mean == 1.0
    assert rows["sampled"]["success"].n == 16
    assert rows["sampled"]["pass@1"].mean == pytest.approx(rows["sampled"]["success"].mean)
    assert rows["sampled"]["pass@2"].mean >= rows["sampled"]["pass@1"].mean
    assert {"code = expert", "code on a shortest path", "swap test"} <= rows["greedy"].keys()


def test_a_gain_is_paired():
    assert gain([True, True, False], [True, True, False]) == Figure(0.0, 0.0, 0.0, 3)
    figure = gain([True] * 8, [True, False] * 4)
    assert (figure.mean, figure.n) == (0.5, 8)
    assert figure.low == pytest.approx(0.5 - 1.959964 * math.sqrt(8 * 0.25 / 7 / 8))


def test_an_adapter_is_put_beside_another():
    words = ["data.held_out=6", "samples=1", f"data.levels=[{ROOM_6}]", "model.adapter=package://tiny/adapter"]
    printed = run([*words, "against=package://tiny/adapter"])
    assert "success over package://tiny/adapter 0.000 (0.000 .. 0.000, n=6)" in printed
    assert "success over base" in run([*words, "against=base"])
    with pytest.raises(UserError, match="samples=0 must be"):
        run(["samples=0"])
