"""A distribution learned from a sample, as quantiles."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec

SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Where, from 0 to 1, the quantiles of a table lie."""

_POINTS = len(SHARES)
_Finite = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class Table(msgspec.Struct, frozen=True, tag_field="kind", tag="quantiles"):
    """A distribution given by its quantiles and by the mean between each two of them.

    values   the quantiles at SHARES, from the smallest value to the largest
    means    the mean of the values between two neighbouring quantiles

    Between two quantiles the distribution is a power curve with that mean, so the table has the quantiles of
    its sample exactly, and its mean. A sample of a few values comes back nearly as it is.
    """

    values: Annotated[tuple[_Finite, ...], msgspec.Meta(min_length=_POINTS, max_length=_POINTS)]
    means: Annotated[tuple[_Finite, ...], msgspec.Meta(min_length=_POINTS - 1, max_length=_POINTS - 1)]

    def __post_init__(self) -> None:
        for (low, high), mean in zip(pairwise(self.values), self.means, strict=True):
            slack = 1e-9 * max(1.0, abs(low), abs(high))
            if not low - slack <= mean <= high + slack:
                raise ValueError(f"quantiles {low} and {high} with mean {mean}: expected them in order")

    @classmethod
    def of(cls, sample: Sequence[float], digits: int = 4) -> Table:
        """The table of a sample that is not empty; numbers are kept to `digits` decimals."""
        ordered = sorted(sample)
        sums = list(accumulate(ordered, initial=0.0))
        values = tuple(round(float(_step(ordered, share)), digits) for share in SHARES)
        means = []
        for (a, b), (low, high) in zip(pairwise(SHARES), pairwise(values), strict=True):
            mean = (_integral(ordered, sums, b) - _integral(ordered, sums, a)) / (b - a)
            means.append(min(max(round(mean, digits), low), high))
        return cls(values, tuple(means))

    @property
    def mean(self) -> float:
        return sum(mean * (b - a) for mean, (a, b) in zip(self.means, pairwise(SHARES), strict=True))

    @property
    def sd(self) -> float:
        square = 0.0
        for number, (a, b) in enumerate(pairwise(SHARES)):
            low, spread, power = self._curve(number)
            if math.isinf(power):
                square += low * low * (b - a)
            else:
                square += (low**2 + 2 * low * spread / (power + 1) + spread**2 / (2 * power + 1)) * (b - a)
        return math.sqrt(max(0.0, square - self.mean**2))

    def quantile(self, share: float) -> float:
        """The value that `share` (0 to 1) of all values lie below; a uniform `share` makes it a sample."""
        inside = min(max(share, 0.0), 1.0)
        number = max(0, bisect_left(SHARES, inside) - 1)
        low, spread, power = self._curve(number)
        if not spread or math.isinf(power):
            return low
        at = (inside - SHARES[number]) / (SHARES[number + 1] - SHARES[number])
        return low + spread * float(at**power)

    def _curve(self, number: int) -> tuple[float, float, float]:
        """Between two quantiles, at 0 to 1 of the way: low + spread * at ** power."""
        low, high = self.values[number], self.values[number + 1]
        above = self.means[number] - low
        return low, high - low, max(0.0, (high - low) / above - 1) if above > 0 else math.inf


def _step(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sample does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def _integral(ordered: Sequence[float], sums: Sequence[float], share: float) -> float:
    """The integral of the sample's quantile function from 0 to `share`."""
    whole = min(int(share * len(ordered) + 1e-9), len(ordered))
    rest = share - whole / len(ordered)
    return sums[whole] / len(ordered) + (rest * ordered[whole] if whole < len(ordered) else 0.0)
