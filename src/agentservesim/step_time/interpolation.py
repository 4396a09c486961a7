"""Linear interpolation of measured points, on a line and on a grid with gaps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence


class Curve:
    """Straight lines between measured points, flat before the first. Beyond the last they go on with the mean
    slope of the last half of the range, for kernel times climb in stairs."""

    __slots__ = ("xs", "ys")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Points at distinct x, at least one, in any order. A single point is a constant."""
        ordered = sorted(points)
        self.xs = [x for x, _ in ordered]
        self.ys = [y for _, y in ordered]

    def __call__(self, x: float) -> float:
        base, slope, _, _ = self.piece(x)
        return base + slope * x

    def piece(self, x: float) -> tuple[float, float, float, float]:
        """Base and slope of the straight piece that x lies on, and where it starts and ends."""
        xs, ys = self.xs, self.ys
        if x < xs[0]:
            return ys[0], 0.0, -math.inf, xs[0]
        at = bisect_right(xs, x) - 1
        if at + 1 < len(xs):
            start, end = at, at + 1
        else:
            start, end = bisect_right(xs, xs[-1] / 2, 0, at) - 1, at
            start = start if start >= 0 else max(at - 1, 0)
        slope = (ys[end] - ys[start]) / (xs[end] - xs[start]) if end > start else 0.0
        return ys[at] - slope * xs[at], slope, xs[at], xs[at + 1] if at + 1 < len(xs) else math.inf


def add(curves: Sequence[Curve]) -> Curve:
    """Their sum, exact inside the range of all."""
    knots = sorted({x for curve in curves for x in curve.xs})
    return Curve((x, sum(curve(x) for curve in curves)) for x in knots)


class Grid:
    """Values measured over several axes. Not every corner needs to have been measured: what lies below one
    value of the first axis is a grid of its own, with its own points."""

    __slots__ = ("below", "xs")

    def __init__(self, points: dict[tuple[float, ...], float]) -> None:
        """`points` maps two coordinates or more to a value; at least one."""
        parts: dict[float, dict[tuple[float, ...], float]] = {}
        for (first, *rest), value in points.items():
            parts.setdefault(first, {})[tuple(rest)] = value
        self.xs = sorted(parts)
        self.below: list[Grid | Curve] = [_build(parts[x]) for x in self.xs]

    def __call__(self, x: float, *rest: float) -> float:
        at = segment(self.xs, x)
        low = self.below[at](*rest)
        if self.xs[at] == x or len(self.xs) == 1:
            return low
        return between(self.xs, at, x, low, self.below[at + 1](*rest))

    def covers(self, x: float, *rest: float) -> bool:
        """Whether the point lies below the outermost ones measured."""
        if x > self.xs[-1]:
            return False
        part = self.around(x)[-1]
        return part.covers(*rest) if isinstance(part, Grid) else rest[0] <= part.xs[-1]

    def around(self, x: float) -> list[Grid | Curve]:
        """The one or two parts that an answer at `x` is made of."""
        at = segment(self.xs, x)
        return self.below[at : at + 1 if self.xs[at] == x else at + 2]


def _build(points: dict[tuple[float, ...], float]) -> Grid | Curve:
    if len(next(iter(points))) == 1:
        return Curve((x, y) for (x,), y in points.items())
    return Grid(points)


def segment(xs: Sequence[float], x: float) -> int:
    """Index of the point that starts the segment for x; the outermost segments go on for ever."""
    return min(max(bisect_right(xs, x) - 1, 0), max(len(xs) - 2, 0)) if x != xs[-1] else len(xs) - 1


def between(xs: Sequence[float], at: int, x: float, low: float, high: float) -> float:
    """The line through (xs[at], low) and (xs[at + 1], high), at x."""
    if at + 1 >= len(xs) or xs[at] == x:
        return low
    return low + (high - low) * (x - xs[at]) / (xs[at + 1] - xs[at])
