"""The learning rate's factor at the updates where an off-by-one would show."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.schedule import lr_factor


def test_constant_stays_at_the_peak_and_needs_no_horizon() -> None:
    assert [lr_factor("constant", update, None) for update in (0, 7, 10**6)] == [1.0, 1.0, 1.0]


def test_warmup_reaches_the_peak_at_its_last_update() -> None:
    assert [lr_factor("constant", update, None, warmup=4) for update in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_one_to_one_last_step_above_zero() -> None:
    assert [lr_factor("linear", update, 4) for update in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_cosine_is_a_half_in_the_middle_and_zero_at_the_horizon() -> None:
    factors = [lr_factor("cosine", update, 8) for update in (0, 2, 4, 8, 9)]
    assert factors == pytest.approx([1.0, 0.853553, 0.5, 0.0, 0.0], abs=1e-6)


def test_warmup_multiplies_the_decay_as_the_reference_script_does() -> None:
    assert lr_factor("cosine", 4, 100, warmup=10) == pytest.approx(
        0.5 * 0.996057, abs=1e-6
    )  # (4 + 1)/10, cos(pi 4/100)


def test_a_decay_without_a_horizon_and_an_unknown_schedule_are_refused() -> None:
    with pytest.raises(UserError, match="needs a horizon"):
        lr_factor("linear", 0, None)
    with pytest.raises(UserError, match="Did you mean cosine"):
        lr_factor("cosin", 0, 10)
