"""Stages over the updates of a run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from rlsim.curriculum import Curriculum


def stages(*pairs: tuple[str, float], by: str = "share") -> list[dict]:
    return [{"subjects": list(subjects), by: value} for subjects, value in pairs]


def test_one_stage_lasts_for_ever() -> None:
    assert Curriculum.always("+-").at(10**9) == ("+", "-")


@pytest.mark.parametrize(("steps", "first"), [(500, 250), (7, 3), (1, 0)])
def test_a_share_is_rounded_down_and_the_last_stage_takes_the_rest(steps: int, first: int) -> None:
    made = Curriculum.from_config(stages(("+", 0.5), ("-", 0.5)), steps)
    assert [made.at(step) for step in range(steps)] == [("+",)] * first + [("-",)] * (steps - first)


def test_stages_may_be_numbers_of_updates() -> None:
    made = Curriculum.from_config(
        [*stages(("+", 3), by="steps"), *stages(("+-", 0.2)), *stages(("-", 5), by="steps")], 10
    )
    assert [len(made.at(step)) for step in range(10)] == [1, 1, 1, 2, 2, 1, 1, 1, 1, 1]
    assert (made.at(0), made.at(9), made.subjects) == (("+",), ("-",), ("+", "-"))


@given(st.integers(1, 1000), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_shares_cut_the_run_where_their_sum_says(steps: int, parts: list[int]) -> None:
    total = sum(parts)
    made = Curriculum.from_config(stages(*((str(i), part / total) for i, part in enumerate(parts))), steps)
    assert list(made.starts) == [sum(parts[:i]) * steps // total for i in range(len(parts))]


@pytest.mark.parametrize(
    ("given_stages", "sentence"),
    [
        ([], "curriculum.stages is empty"),
        ([{"share": 1.0}], r"stages\[0\] has no subjects"),
        ([{"subjects": ["+"]}], r"needs either share .* or steps"),
        ([{"subjects": ["+"], "share": 0.5, "steps": 3}], r"needs either share .* or steps"),
        ([{"subjects": ["+"], "shares": 1.0}], "shares, which is not known"),
        (stages(("+", -1)), "share=-1 must be a positive number"),
        (stages(("+", 0.7), ("-", 0.6)), r"fill 1.3 runs of steps=10"),
        (stages(("+", 11), by="steps"), r"fill 1.1 runs"),
    ],
)
def test_a_wrong_curriculum_is_one_sentence(given_stages: list, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Curriculum.from_config(given_stages, 10)
