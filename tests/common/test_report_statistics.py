"""The statistics of a report against published values and against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.report.statistics import band, first_step, interval, median_step, student_cdf, student_quantile

# Abramowitz & Stegun, table 26.10 (two-sided), and the exact 1 and 2 degrees.
PUBLISHED = {
    (0.975, 1): 12.706, (0.975, 2): 4.303, (0.975, 3): 3.182, (0.975, 4): 2.776, (0.975, 5): 2.571, (0.975, 9): 2.262,
    (0.975, 10): 2.228, (0.975, 29): 2.045, (0.975, 30): 2.042, (0.975, 60): 2.000, (0.975, 120): 1.980,
    (0.95, 1): 6.314, (0.95, 2): 2.920, (0.95, 9): 1.833, (0.995, 2): 9.925, (0.995, 9): 3.250, (0.9995, 3): 12.924,
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "value"), PUBLISHED.items())
def test_the_student_quantile_is_the_published_one(arguments: tuple[float, int], value: float) -> None:
    assert student_quantile(*arguments) == pytest.approx(value, abs=5.1e-4)


@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.999])
def test_the_student_quantile_has_the_closed_form_of_one_and_two_degrees(probability: float) -> None:
    assert student_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9)
    two = (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    assert student_quantile(probability, 2) == pytest.approx(two, rel=1e-9)


def test_the_student_quantile_tends_to_the_normal() -> None:
    assert student_quantile(0.975, 100_000) == pytest.approx(1.959964, abs=5e-5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 31])
def test_the_student_distribution_is_the_integral_of_its_density(freedom: int) -> None:
    t = np.linspace(0, 2.5, 20_001)
    constant = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    integral = np.trapezoid(constant * (1 + t**2 / freedom) ** (-(freedom + 1) / 2), t)
    assert student_cdf(2.5, freedom) == pytest.approx(0.5 + integral, abs=1e-8)
    assert student_cdf(-2.5, freedom) == pytest.approx(0.5 - integral, abs=1e-8)


def test_the_interval_of_three_seeds_uses_t_and_the_sample_deviation() -> None:
    mean, half = interval([0.708, 0.710, 0.574])
    assert mean == pytest.approx(0.664)
    assert half == pytest.approx(4.302653 * np.std([0.708, 0.710, 0.574], ddof=1) / math.sqrt(3), rel=1e-6)


def test_one_seed_has_a_mean_and_no_interval() -> None:
    assert interval([0.5]) == (0.5, None)
    assert band(np.array([[0.1, 0.2]]))[1] is None


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        interval([])


def test_a_band_is_the_interval_at_every_point() -> None:
    values_SP = np.random.default_rng(0).uniform(size=(5, 4))
    mean_P, half_P = band(values_SP)
    assert half_P is not None
    for p in range(4):
        assert (mean_P[p], half_P[p]) == pytest.approx(interval(values_SP[:, p].tolist()))


def test_the_interval_covers_the_true_mean_in_95_of_100_experiments() -> None:
    samples = np.random.default_rng(1).normal(0.7, 0.1, size=(4000, 3))
    covered = [abs(mean - 0.7) <= half for mean, half in map(interval, samples) if half is not None]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)


def test_the_first_step_at_the_threshold_counts_even_if_it_falls_back() -> None:
    assert first_step([0, 20, 40, 60], [0.3, 0.9, 0.85, 0.95]) == 20
    assert first_step([0, 20], [0.3, 0.8999]) is None
    assert first_step([], []) is None


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        ([100, 300, 200], (200, 3)),
        ([100, 300], (200, 2)),
        ([100, None, 300], (300, 2)),
        ([100, None, None], (None, 1)),
        ([100, None], (None, 1)),
        ([None, None], (None, 0)),
        ([], (None, 0)),
    ],
)
def test_seeds_that_never_get_there_count_as_the_slowest(
    reached: list[float | None], said: tuple[float | None, int]
) -> None:
    assert median_step(reached) == said
