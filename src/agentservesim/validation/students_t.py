"""Quantiles of Student's t distribution, without SciPy."""

from __future__ import annotations

import math


def t_quantile(probability: float, degrees: int) -> float:
    """The t below which Student's t with `degrees` >= 1 degrees of freedom lies with `probability`, which is
    from 0.5 up to, and without, 1. Accurate to about 1e-10, relative."""
    if probability == 0.5:
        return 0.0
    low, high = 0.0, 1.0
    while _cumulative(high, degrees) < probability:
        low, high = high, high * 2
    for _ in range(80):
        middle = (low + high) / 2
        if _cumulative(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _cumulative(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0: the finite trigonometric sums for whole degrees of freedom."""
    theta = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    term, total = (cosine, cosine) if degrees % 2 else (1.0, 1.0)
    start = 3 if degrees % 2 else 2
    for n in range(start, degrees - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    if degrees % 2 == 0:
        inside = sine * total
    else:
        inside = 2 / math.pi * (theta + (sine * total if degrees > 1 else 0.0))
    return 0.5 + inside / 2
