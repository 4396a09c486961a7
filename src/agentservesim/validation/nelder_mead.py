"""A minimum without derivatives: the simplex search of Nelder and Mead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Point = tuple[float, ...]


def minimise(
    function: Callable[[Point], float], start: Sequence[float], steps: Sequence[float], evaluations: int
) -> tuple[Point, float]:
    """The best point found with about `evaluations` calls of `function`, and its value.

    The first simplex is `start` and, for each coordinate, `start` moved by its entry of `steps`. Ends early
    once the values of the simplex differ by less than a thousandth of the best.
    """
    calls = 0

    def value_at(point: Point) -> float:
        nonlocal calls
        calls += 1
        return function(point)

    first = tuple(start)
    points = [first] + [
        tuple(x + (step if i == j else 0.0) for j, x in enumerate(first)) for i, step in enumerate(steps)
    ]
    simplex = sorted((value_at(point), point) for point in points)
    while calls < evaluations and simplex[-1][0] - simplex[0][0] > 1e-3 * abs(simplex[0][0]):
        worst_value, worst = simplex[-1]
        rest = [point for _, point in simplex[:-1]]
        centre = tuple(sum(xs) / len(rest) for xs in zip(*rest, strict=True))

        reflected = _towards(centre, worst, -1.0)
        value = value_at(reflected)
        if value < simplex[0][0]:
            stretched = _towards(centre, worst, -2.0)
            further = value_at(stretched)
            simplex[-1] = (further, stretched) if further < value else (value, reflected)
        elif value < simplex[-2][0]:
            simplex[-1] = (value, reflected)
        else:
            nearer = _towards(centre, worst, 0.5 if value >= worst_value else -0.5)
            inside = value_at(nearer)
            if inside < min(value, worst_value):
                simplex[-1] = (inside, nearer)
            else:
                best = simplex[0][1]
                moved = [_towards(best, point, 0.5) for _, point in simplex[1:]]
                simplex[1:] = [(value_at(point), point) for point in moved]
        simplex.sort()
    return simplex[0][1], simplex[0][0]


def _towards(centre: Point, point: Point, share: float) -> Point:
    """centre + share * (point - centre)."""
    return tuple(c + share * (p - c) for c, p in zip(centre, point, strict=True))
