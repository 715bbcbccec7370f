"""The few statistics of a report: mean and 95% interval over seeds, and how fast an accuracy was reached.

The interval of the mean of n seeds is Student's: mean +- t(0.975, n - 1) * s / sqrt(n), s the sample deviation (n - 1).
Seeds are few (3 to 10), so the normal's 1.96 would be far too narrow: at n = 3 the factor is 4.30.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np


def student_cdf(t: float, freedom: int) -> float:
    """P(T <= t) for integer degrees of freedom: the finite series of Abramowitz & Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2  # `inside` is P(-t < T < t), negative for negative t


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = probability, by bisection; to 1e-12 relative."""
    if freedom < 1 or not 0.5 <= probability < 1:
        raise ValueError(f"student_quantile({probability}, {freedom}): probability in [0.5, 1), freedom at least 1.")
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """Mean and half-width of its confidence interval; the half-width is None for a single value.

    Raises ValueError without values.
    """
    if len(values) == 0:
        raise ValueError("interval() needs at least one value.")
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, None
    factor = student_quantile((1 + level) / 2, len(values) - 1)
    return mean, factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def band(values_SP: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray | None]:
    """`interval` at every point of S curves: mean (P,) and half-width (P,), None for one curve."""
    mean_P = values_SP.mean(axis=0)
    n = len(values_SP)
    if n == 1:
        return mean_P, None
    return mean_P, student_quantile((1 + level) / 2, n - 1) * values_SP.std(axis=0, ddof=1) / math.sqrt(n)


def first_step(steps: Iterable[float], values: Iterable[float], threshold: float = 0.9) -> float | None:
    """The first evaluated step at which a value reached the threshold; None where none did."""
    return next((step for step, value in zip(steps, values, strict=True) if value >= threshold), None)


def median_step(reached: Sequence[float | None]) -> tuple[float | None, int]:
    """Median over seeds of `first_step` and how many reached it.

    A seed that did not reach it counts as later than all others: leaving it out would make an arm look faster for
    failing. So the median is None where it falls on such a seed.
    """
    ordered = sorted(math.inf if step is None else step for step in reached)
    count = sum(step is not None for step in reached)
    if not ordered:
        return None, 0
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return (middle if math.isfinite(middle) else None), count
