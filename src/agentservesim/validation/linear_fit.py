"""The linear back end's coefficients from logged steps: for hardware nobody has measured operators on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agentservesim.config import StepTimeConfig
from agentservesim.step_time.linear import prefill_pairs
from agentservesim.step_time.residual import Error
from agentservesim.validation.fitting import FOLDS, NEEDED, Array, error_of, few_warnings, folds_of, huber
from agentservesim.validation.step_log import Step, read_steps

HANG = 10.0
"""A step of more than so many times its shape's time counts as one of so many: one hang is no property."""
ROUNDS = 30


@dataclass(frozen=True)
class LinearFit:
    """Fitted coefficients, seconds a unit, and how good they are.

    real, fitted, held_out   seconds of each step: logged, by the fit, and by a fit of the other folds
    shapes                   distinct shapes of the steps
    warnings                 why not to trust it, in words
    """

    coefficients: dict[str, float]
    real: Array
    fitted: Array
    held_out: Array
    shapes: int
    warnings: list[str]

    @property
    def step_time(self) -> StepTimeConfig:
        """As a config's section."""
        return StepTimeConfig.model_validate({"backend": "linear", **self.coefficients})

    def errors(self) -> dict[str, Error]:
        """Of a step's seconds, in sample and held out."""
        return {"in_sample": error_of(self.fitted, self.real), "held_out": error_of(self.held_out, self.real)}

    def to_yaml(self, source: str) -> str:
        """A config's step_time section, with what it comes from."""
        error = self.errors()["held_out"]
        note = (
            f"# {source}: {len(self.real)} steps of {self.shapes} shapes; on unseen shapes, a step is "
            f"off by {error.median:.1%} in the median, {error.p90:.1%} at p90\n"
        )
        return note + yaml.safe_dump(
            {"step_time": {"backend": "linear", **self.coefficients}}, sort_keys=False
        )


def fit_linear_log(log: Path) -> LinearFit:
    """Fit the linear back end to a file of steps. Raises InputError where the file is wrong."""
    return fit_linear(read_steps(log))


def fit_linear(steps: Sequence[Step]) -> LinearFit:
    """Fit the linear back end to steps.

    A simulated run adds steps up, so what must be right is the mean, not the most frequent time: delays on a
    busy host only ever lengthen a step. Huber's loss finds the shape's dependence despite hangs; then
    quasi-likelihood with errors in proportion to the time gives means without bias. Coefficients that would
    be negative are left out.
    """
    real = np.array([step.seconds for step in steps])
    features = _features(steps)
    folds, shapes = folds_of(steps)
    coefficients, fitted = _fit(features, real)
    held_out = fitted.copy()
    for fold in range(FOLDS):
        test = folds == fold
        if test.any() and (~test).sum() >= NEEDED:
            found, _ = _fit({name: column[~test] for name, column in features.items()}, real[~test])
            held_out[test] = _seconds(features, found)[test]
    result = LinearFit(coefficients, real, fitted, held_out, shapes, few_warnings(len(real), shapes))
    result.warnings.extend(_quality(result))
    return result


def _features(steps: Sequence[Step]) -> dict[str, Array]:
    """A column a coefficient, by its name in the config."""
    return {
        "base_s": np.ones(len(steps)),
        "per_decode_s": np.array([float(step.decodes) for step in steps]),
        "per_prefill_token_s": np.array([float(step.prefill_tokens) for step in steps]),
        "per_context_token_s": np.array([float(step.decode_context_tokens) for step in steps]),
        "per_prefill_s": np.array([float(len(step.prefills)) for step in steps]),
        "per_prefill_pair_s": np.array([prefill_pairs(step.prefills) for step in steps]),
    }


def _fit(features: dict[str, Array], real: Array) -> tuple[dict[str, float], Array]:
    """Coefficients, none negative, and the seconds of each step."""
    chosen = [name for name, column in features.items() if column.any()]
    while True:
        found = _solve(np.stack([features[name] for name in chosen], axis=1), real)
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(chosen) == 1:
            break
        del chosen[worst]
    values: Any = dict(zip(chosen, np.maximum(found, 0).tolist(), strict=True))
    rounded = {name: float(f"{values.get(name, 0.0):.6g}") for name in features}
    return rounded, _seconds(features, rounded)


def _solve(matrix: Array, real: Array) -> Array:
    """Huber first, to know a hang when there is one; then means, weighted by the time they predict."""
    size = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    columns = matrix / size
    solution, _ = huber(columns, real, real)
    floor = float(np.median(real)) / 100
    predicted = np.maximum(columns @ solution, floor)
    goal = np.minimum(real, HANG * predicted)
    for _ in range(ROUNDS):
        before = predicted
        solution = np.linalg.lstsq(columns / predicted[:, None], goal / predicted, rcond=None)[0]
        predicted = np.maximum(columns @ solution, floor)
        if np.allclose(predicted, before, rtol=1e-9):
            break
    return np.asarray(solution / size)


def _seconds(features: dict[str, Array], coefficients: dict[str, float]) -> Array:
    return np.asarray(sum(coefficients[name] * column for name, column in features.items()))


def _quality(found: LinearFit) -> list[str]:
    warnings = []
    errors = found.errors()
    if errors["in_sample"].median > 0.2:
        warnings.append(
            f"half of the steps are off by over {errors['in_sample'].median:.0%}: the machine was busy, or "
            "its step times are not linear"
        )
    if errors["held_out"].median > 2 * errors["in_sample"].median + 0.01:
        warnings.append("on shapes it has not seen the fit is much worse than on its own: log more shapes")
    hangs = int((found.real > HANG * found.fitted).sum())
    if hangs:
        warnings.append(f"{hangs} of {len(found.real)} steps took over {HANG:.0f} times their shape's time")
    return warnings
