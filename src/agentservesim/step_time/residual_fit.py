"""Fitting a residual to real steps: robust, small, and judged on shapes it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentservesim.step_time.residual import MIN_SHARE, Error, Regime, Residual, feature_value

SMALL_CHUNK = 512
"""A time that every step with a prefill takes can only be told from steps with few tokens: without any of at
most so many, the residual goes to zero with the tokens instead."""

_ROUNDS = 30
_HUBER = 1.345
"""Errors beyond so many robust standard deviations pull linearly, not quadratically: 95 % as efficient as
least squares where errors are normal."""

_Floats = NDArray[np.float64]


class StepSample(NamedTuple):
    """A real step, or the median of `steps` steps of one shape.

    operators_s   the back end's seconds for it
    wall_s        its real seconds
    """

    prefill_tokens: int
    prefills: int
    decodes: int
    context_tokens: float
    operators_s: float
    wall_s: float
    steps: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """What is held out together: prefill tokens and decodes."""
        return self.prefill_tokens, self.decodes

    @property
    def features(self) -> dict[str, float]:
        """Values of the residual's features."""
        return {
            "decodes": self.decodes,
            "context_tokens": self.context_tokens,
            "prefills": self.prefills,
            "prefill_tokens": self.prefill_tokens,
            "operators": self.operators_s * 1e6,
        }


def fit_residual(
    samples: Sequence[StepSample],
    *,
    gpu: str,
    model: str,
    tp: int,
    backend: str,
    engine: str,
    source: str,
    date: str,
    notes: str = "",
) -> Residual:
    """Fit both kinds of step, each with the set of features that predicts held-out shapes best.

    Raises ValueError without samples, or for a time that is not positive.
    """
    if not samples:
        raise ValueError("no steps to fit")
    if any(sample.wall_s <= 0 or sample.operators_s <= 0 for sample in samples):
        raise ValueError("a step's seconds must be positive")
    kinds = {
        "decode_only": [s for s in samples if s.prefill_tokens == 0],
        "with_prefill": [s for s in samples if s.prefill_tokens],
    }
    fits = {name: _fit_kind(group) for name, group in kinds.items() if group}
    held_out = [error for _, errors in fits.values() for error in errors]
    regimes = {name: regime for name, (regime, _) in fits.items()}
    in_sample = [_error(s, regimes[name]) for name, group in kinds.items() for s in group]
    return Residual(
        gpu=gpu,
        model=model,
        tp=tp,
        backend=backend,
        engine=engine,
        source=source,
        date=date,
        shapes=len({s.shape for s in samples}),
        steps=sum(s.steps for s in samples),
        error={
            "uncorrected": _summary([_error(s, Regime()) for s in samples]),
            "in_sample": _summary(in_sample),
            "held_out": _summary(held_out),
        },
        notes=notes,
        **regimes,
    )


def _fit_kind(samples: Sequence[StepSample]) -> tuple[Regime, list[float]]:
    """The candidate set of features with the least mean error on held-out shapes, and its errors there."""
    errors = {terms: _held_out(samples, terms) for terms in _candidates(samples)}
    terms = min(errors, key=lambda terms: float(np.mean(errors[terms])))
    return _fit(samples, terms), errors[terms]


def _candidates(samples: Sequence[StepSample]) -> list[tuple[str, ...]]:
    """Sets of features that the shapes can tell apart, the empty one first."""
    decodes = ("decodes",) if len({s.decodes for s in samples}) > 2 else ()
    chunks = sorted({s.prefill_tokens for s in samples})
    if chunks == [0]:
        sets: list[tuple[str, ...]] = [(), ("step",), ("operators",)]
    else:
        step = ("step",) if chunks[0] <= SMALL_CHUNK else ()
        between = chunks[1:-1] if step else chunks[:-1]
        rising = ("prefill_tokens", *(f"prefill_tokens_over_{chunk}" for chunk in _knots(between)))
        sets = [(), (*step, "operators"), (*step, "prefill_tokens"), (*step, *rising)]
    sets += [(*terms, *decodes) for terms in sets[1:]]
    room = len({s.shape for s in samples}) - 1
    return list(dict.fromkeys(terms for terms in sets if len(terms) <= room))


def _knots(chunks: Sequence[int]) -> list[int]:
    """At most eight of the chunk sizes, evenly by rank."""
    if len(chunks) <= 8:
        return list(chunks)
    return sorted({chunks[round(i * (len(chunks) - 1) / 7)] for i in range(8)})


def _held_out(samples: Sequence[StepSample], terms: tuple[str, ...]) -> list[float]:
    """Errors of each shape's samples, by a fit to all the others."""
    errors = []
    for shape in dict.fromkeys(s.shape for s in samples):
        rest = [s for s in samples if s.shape != shape]
        regime = _fit(rest, terms) if rest else Regime()
        errors += [_error(s, regime) for s in samples if s.shape == shape]
    return errors


def _fit(samples: Sequence[StepSample], terms: tuple[str, ...]) -> Regime:
    ranges = _ranges(samples, terms)
    if not terms:
        return Regime(ranges)
    table = np.array([[feature_value(term, s.features, ranges) for term in terms] for s in samples])
    wall = np.array([s.wall_s * 1e6 for s in samples])
    operators = np.array([s.operators_s * 1e6 for s in samples])
    steps = np.array([float(s.steps) for s in samples])
    # Shares of the wall alone would make a step that was twice too fast outweigh one twice too slow.
    scale = np.sqrt(wall * operators)
    solved = _huber(table / scale[:, None], (wall - operators) / scale, np.sqrt(steps / steps.mean()))
    return Regime(ranges, {term: float(f"{value:.6g}") for term, value in zip(terms, solved, strict=True)})


def _ranges(samples: Sequence[StepSample], terms: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Lowest and highest of each feature. Without a time that every step takes, a prefill's begin at zero."""
    names = ["decodes"]
    if any(s.prefill_tokens for s in samples):
        names += ["prefill_tokens"]
    if "operators" in terms:
        names += ["operators"]
    ranges = {}
    for name in names:
        values = [s.features[name] for s in samples]
        low = min(values)
        if name in ("prefill_tokens", "operators") and "step" not in terms:
            low = 0.0
        ranges[name] = float(f"{low:.6g}"), float(f"{max(values):.6g}")
    return ranges


def _huber(table: _Floats, target: _Floats, weights: _Floats) -> _Floats:
    """Coefficients by iteratively reweighted least squares; a little ridge keeps twins apart."""
    scale = np.sqrt((table**2).mean(axis=0))
    scale[scale == 0] = 1.0
    columns = table / scale
    ridge = 1e-6 * np.eye(columns.shape[1])
    robust = np.ones(len(target))
    solved: _Floats = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        w = (weights**2) * robust
        solved = np.linalg.solve(columns.T @ (w[:, None] * columns) + ridge, columns.T @ (w * target))
        error = np.abs(target - columns @ solved)
        sigma = max(1.4826 * float(np.median(error)), 1e-9)
        robust = np.minimum(1.0, _HUBER * sigma / np.maximum(error, 1e-12))
    coefficients: _Floats = solved / scale
    return coefficients


def _error(sample: StepSample, regime: Regime) -> float:
    seconds = sample.operators_s + regime.seconds(sample.features)
    return abs(max(seconds, MIN_SHARE * sample.operators_s) - sample.wall_s) / sample.wall_s


def _summary(errors: Sequence[float]) -> Error:
    return Error(round(float(np.median(errors)), 5), round(float(np.quantile(errors, 0.9)), 5))
