"""A residual from logged steps: robust regression, and its error on shapes it has not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from agentservesim.step_time.interface import StepTimeModel
from agentservesim.step_time.residual import MIN_SHARE, Error, Regime, Residual
from agentservesim.validation.step_log import Step

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

FOLDS = 5
HUBER = 1.345
"""Errors beyond HUBER robust standard deviations count linearly: 95 % efficient if normal."""
ROUNDS = 50
FEW_STEPS = 200
FEW_SHAPES = 12
NEEDED = 8
"""Steps of a kind without which that kind is not corrected."""
WORTH = 0.95
"""A further feature is taken only if it brings the held-out error below this share."""

_FEATURES = {
    "decode_only": ("step", "decodes", "context_tokens"),
    "with_prefill": ("step", "prefills", "prefill_tokens", "decodes", "context_tokens"),
}
_FACTOR = "operators"


@dataclass(frozen=True)
class Fit:
    """A fitted residual, and how good it is.

    base, corrected, held_out   seconds of each step: the back end's, with the fit, and with a fit of the
                                other folds
    warnings                    why not to trust it, in words
    """

    regimes: dict[str, Regime]
    shapes: int
    real: Array
    base: Array
    corrected: Array
    held_out: Array
    warnings: list[str] = field(default_factory=list)

    def errors(self) -> dict[str, Error]:
        """By the names of the residual file."""
        return {
            "uncorrected": error_of(self.base, self.real),
            "in_sample": error_of(self.corrected, self.real),
            "held_out": error_of(self.held_out, self.real),
        }

    def residual(
        self, *, gpu: str, model: str, tp: int, backend: str, engine: str, source: str, date: str
    ) -> Residual:
        """As it is written to a file."""
        return Residual(
            gpu=gpu,
            model=model,
            tp=tp,
            backend=backend,
            engine=engine,
            source=source,
            date=date,
            shapes=self.shapes,
            steps=len(self.real),
            error=self.errors(),
            decode_only=self.regimes.get("decode_only"),
            with_prefill=self.regimes.get("with_prefill"),
            notes="; ".join(self.warnings),
        )


def error_of(predicted: Array, real: Array) -> Error:
    """|predicted - real| / real: median and 90th percentile."""
    sizes = np.abs(predicted / real - 1)
    return Error(round(float(np.median(sizes)), 5), round(float(np.percentile(sizes, 90)), 5))


def fit(steps: Sequence[Step], backend: StepTimeModel) -> Fit:
    """Fit what `backend` misses of the steps' wall times.

    Decode-only steps and steps with prefill have coefficients of their own. The fit minimises Huber's loss
    of the relative errors, so that a few percent of disturbed steps do not matter. Features that do not
    vary in the log are left out. Held-out errors leave out whole shapes (prefill tokens, decodes), FOLDS
    times.
    """
    real = np.array([step.seconds for step in steps])
    base = np.array(
        [backend.step(s.prefills, s.decodes, s.decode_context_tokens, s.spread).seconds for s in steps]
    )
    features = {
        "step": np.ones(len(steps)),
        "prefills": np.array([float(len(step.prefills)) for step in steps]),
        "prefill_tokens": np.array([float(step.prefill_tokens) for step in steps]),
        "decodes": np.array([float(step.decodes) for step in steps]),
        "context_tokens": np.array([float(step.decode_context_tokens) for step in steps]),
        _FACTOR: base * 1e6,
    }
    mixed = features["prefills"] > 0
    folds, shapes = folds_of(steps)
    found = Fit({}, shapes, real, base, base.copy(), base.copy())
    outliers = sum(
        _fit_kind(found, kind, features, mask, folds)
        for kind, mask in (("decode_only", ~mixed), ("with_prefill", mixed))
        if mask.sum() >= NEEDED
    )
    decodes = features["decodes"]
    return replace(found, warnings=_warnings(found, mixed, decodes, outliers))


def _fit_kind(
    found: Fit, kind: str, features: dict[str, Array], mask: Mask, folds: npt.NDArray[np.int64]
) -> int:
    """Fit one kind of step into `found`; returns how many of its steps are outliers."""
    plain = _varying(features, _FEATURES[kind], mask)
    chosen, held_out = plain, _held_out(found, features, plain, mask, folds)
    longer = _varying(features, (*plain, _FACTOR), mask)
    if len(longer) > len(plain):
        tried = _held_out(found, features, longer, mask, folds)
        if _size(tried, found.real, mask) < WORTH * _size(held_out, found.real, mask):
            chosen, held_out = longer, tried
    matrix = np.stack([features[name] for name in chosen], axis=1)[mask]
    real, base = found.real[mask], found.base[mask]
    coefficients, outliers = huber(matrix, real - base, real)
    found.corrected[mask] = _bounded(base, matrix @ coefficients)
    found.held_out[mask] = held_out[mask]
    ranged = dict.fromkeys((*chosen[1:], "decodes", *(("prefill_tokens",) if kind == "with_prefill" else ())))
    found.regimes[kind] = Regime(
        {name: (float(features[name][mask].min()), float(features[name][mask].max())) for name in ranged},
        {n: float(f"{c * 1e6:.6g}") for n, c in zip(chosen, coefficients.tolist(), strict=True)},
    )
    return outliers


def _held_out(
    found: Fit, features: dict[str, Array], chosen: Sequence[str], mask: Mask, folds: npt.NDArray[np.int64]
) -> Array:
    """Seconds of the steps in `mask`, each by a fit to the other folds."""
    matrix = np.stack([features[name] for name in chosen], axis=1)
    seconds = found.base.copy()
    for fold in range(FOLDS):
        train, test = mask & (folds != fold), mask & (folds == fold)
        if train.sum() >= NEEDED and test.any():
            real = found.real[train]
            coefficients, _ = huber(matrix[train], real - found.base[train], real)
            seconds[test] = _bounded(found.base[test], matrix[test] @ coefficients)
    return seconds


def _size(predicted: Array, real: Array, mask: Mask) -> float:
    error = error_of(predicted[mask], real[mask])
    return error.median + error.p90


def _varying(features: dict[str, Array], names: Sequence[str], mask: Mask) -> list[str]:
    """The constant, and every feature that is not one and adds something to those before it."""
    chosen = ["step"]
    for name in names[1:]:
        columns = np.stack(
            [features[n][mask] / max(features[n][mask].max(), 1) for n in (*chosen, name)], axis=1
        )
        if np.linalg.matrix_rank(columns, tol=1e-6 * math.sqrt(len(columns))) == len(chosen) + 1:
            chosen.append(name)
    return chosen


def huber(matrix: Array, target: Array, scale: Array) -> tuple[Array, int]:
    """Coefficients, and how many steps are outliers; re-weighted least squares of target / scale."""
    size = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    rows, goal = matrix / size / scale[:, None], target / scale
    weights = np.ones(len(goal))
    solution = np.zeros(matrix.shape[1])
    spread = 1e-9
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        before = solution
        solution = np.linalg.lstsq(rows * root[:, None], goal * root, rcond=None)[0]
        left = np.abs(goal - rows @ solution)
        spread = max(float(np.median(left)) * 1.4826, 1e-9)
        weights = np.minimum(1.0, HUBER * spread / np.maximum(left, 1e-15))
        if np.allclose(solution, before, rtol=1e-9, atol=1e-15):
            break
    far = int((np.abs(goal - rows @ solution) > max(5 * spread, 0.02)).sum())
    return solution / size, far


def _bounded(base: Array, residual: Array) -> Array:
    return np.maximum(base + residual, MIN_SHARE * base)


def folds_of(steps: Sequence[Step]) -> tuple[npt.NDArray[np.int64], int]:
    """A fold for each step, the same for steps of one shape, and the number of shapes. A shape is the
    prefill tokens and the decodes, to within a quarter of an octave."""
    keys = [(_quarter(step.prefill_tokens), _quarter(step.decodes)) for step in steps]
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    return np.array([order[key] % FOLDS for key in keys]), len(order)


def _quarter(value: int) -> int:
    return round(4 * math.log2(value)) if value else -1


def few_warnings(steps: int, shapes: int) -> list[str]:
    """Whether a log is long and varied enough."""
    warnings = []
    if steps < FEW_STEPS:
        warnings.append(f"{steps} steps are few: expect better from {FEW_STEPS} and more")
    if shapes < FEW_SHAPES:
        warnings.append(
            f"{shapes} shapes are few (prefill tokens, decodes): log a load that ramps up and down"
        )
    return warnings


def _warnings(found: Fit, mixed: Mask, decodes: Array, outliers: int) -> list[str]:
    warnings = few_warnings(len(found.real), found.shapes)
    for count, kind in ((int((~mixed).sum()), "decode-only steps"), (int(mixed.sum()), "steps with prefill")):
        if count < NEEDED:
            warnings.append(f"{count} {kind} are too few to correct: they keep the back end's own time")
    low, high = float(decodes.min()), float(decodes.max())
    if high < 4 * max(low, 1):
        warnings.append(
            f"decodes lie between {low:.0f} and {high:.0f}: what a larger batch misses is not known"
        )
    if outliers > len(found.real) / 10:
        warnings.append(
            f"{outliers} of {len(found.real)} steps are far off the fit: was the machine shared, or the log "
            "begun before the warm-up ended?"
        )
    errors = found.errors()
    if errors["in_sample"].median > 0.1:
        warnings.append(
            f"even with the fit half of the steps are off by over {errors['in_sample'].median:.0%}: were "
            "they logged on another GPU, model or tp than the config's?"
        )
    if errors["held_out"].median > errors["uncorrected"].median:
        warnings.append("on shapes it has not seen the fit is worse than the back end alone: do not use it")
    elif errors["held_out"].median > 2 * errors["in_sample"].median + 0.01:
        warnings.append("on shapes it has not seen the fit is much worse than on its own: log more shapes")
    return warnings
