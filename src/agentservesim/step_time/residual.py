"""What a back end misses of a real step: host time, launch gaps, throttling. Seconds over the batch's shape.

    corrected = operators + residual,   residual = sum of coefficient * feature

A residual has two sets of coefficients, because an engine runs two kinds of step: `decode_only` (replayed as
one CUDA graph) and `with_prefill`. Features, each cut to the range it was fitted in, so that the correction
stays what it was at the range's edge:

    step                      1
    decodes                   sequences that decode
    context_tokens            sum of their contexts
    prefills                  chunks of prefill
    prefill_tokens            new tokens of all chunks
    operators                 the back end's own time of the step, in microseconds: throttling is a factor
    NAME_over_N               max(0, NAME - N): the slope changes at N

Coefficients are microseconds a unit. The corrected time is never below MIN_SHARE of the back end's. A step is
inside the fitted range when each of its features with a range is, coefficient or not.

A residual is a YAML file, read by `load_residual` and written by `Residual.to_yaml`:

    gpu: rtx_pro_6000_server      cluster.gpu, cluster.model and cluster.tp that it was fitted for
    model: llama-3.1-8b
    tp: 1
    backend: measured             the back end whose seconds it corrects
    engine: vLLM 0.19             what was measured
    source: ...                   where the measurements come from, in words
    date: 2026-01-31              of the fit
    shapes: 16                    distinct shapes (prefill tokens, decodes) of the fit
    steps: 2592                   real steps behind them
    error:                        |predicted - real| / real of a step's seconds, median and 90th percentile
      uncorrected: {median: 0.01, p90: 0.05}     the back end alone
      in_sample: {median: 0.01, p90: 0.03}
      held_out: {median: 0.02, p90: 0.04}        each shape predicted by a fit that did not see it
    decode_only:                  absent when no such step was measured: then nothing is corrected
      ranges: {decodes: [4, 16]}                 [lowest, highest] of each feature fitted
      coefficients: {step: -12.5, decodes: 3.1}
    with_prefill:
      ranges: {decodes: [4, 16], prefill_tokens: [64, 16384], operators: [5000.0, 184000.0]}
      coefficients: {step: 310.0, prefill_tokens: 1.5, prefill_tokens_over_512: 0.4}
    notes: ...                    optional

To make one: `residual_fit.fit_residual` over `StepSample`s, then `to_yaml`. To use one:
`CorrectedStepTime(back_end, residual)` (corrected.py), or `step_time: {residual: FILE}` in a config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from agentservesim.errors import InputError, nearest

FEATURES = ("step", "decodes", "context_tokens", "prefills", "prefill_tokens", "operators")
MIN_SHARE = 0.5
SHIPPED = Path(__file__).parent / "residuals"


@dataclass(frozen=True)
class Error:
    """|predicted - real| / real of a step's seconds."""

    median: float
    p90: float


@dataclass(frozen=True)
class Regime:
    """One kind of step: the range of each feature, and microseconds a unit of feature."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    coefficients: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, features: Mapping[str, float]) -> float:
        """The residual of a step; `features` has a value for every name in FEATURES but `step`."""
        total_us = 0.0
        for name, knee, low, high, coefficient in self._terms:
            value = features[name] if name != "step" else 1.0
            value = low if value < low else high if value > high else value
            if knee is not None:
                value = value - knee if value > knee else 0.0
            total_us += coefficient * value
        return 1e-6 * total_us

    @cached_property
    def _terms(self) -> list[tuple[str, float | None, float, float, float]]:
        """Feature, knee, range and coefficient of each term."""
        terms = []
        for term, coefficient in self.coefficients.items():
            name, knee = split_term(term)
            low, high = self.ranges.get(name, (-math.inf, math.inf))
            terms.append((name, knee, low, high, coefficient))
        return terms

    def covers(self, features: Mapping[str, float]) -> bool:
        """Whether a step lies inside the fitted range."""
        return all(low <= features[name] <= high for name, (low, high) in self.ranges.items())


@dataclass(frozen=True)
class Residual:
    """A fitted residual and where it comes from; the module's docstring has the fields."""

    gpu: str
    model: str
    tp: int
    backend: str
    engine: str
    source: str
    date: str
    shapes: int
    steps: int
    error: Mapping[str, Error]
    decode_only: Regime | None = None
    with_prefill: Regime | None = None
    notes: str = ""

    @property
    def described(self) -> str:
        """For summaries: what it was fitted to, and how well."""
        held_out = self.error.get("held_out")
        error = f", held-out error {100 * held_out.median:.1f} % median" if held_out else ""
        return f"residual of {self.date} fitted to {self.shapes} step shapes of {self.engine}{error}"

    def to_yaml(self) -> str:
        """The file's text."""
        data = asdict(self)
        for name in ("decode_only", "with_prefill", "notes"):
            if not data[name]:
                del data[name]
        for name in ("decode_only", "with_prefill"):
            if name in data:
                data[name]["ranges"] = {k: list(v) for k, v in data[name]["ranges"].items()}
        return yaml.safe_dump(data, sort_keys=False, width=110)


def split_term(term: str) -> tuple[str, float | None]:
    """'prefill_tokens_over_512' -> ('prefill_tokens', 512.0); a plain feature has no knee.

    Raises ValueError for a name that is no feature."""
    name, over, knee = term.partition("_over_")
    if name not in FEATURES or (over and name == "step"):
        raise ValueError(f"unknown feature {term!r}{nearest(name, FEATURES)}")
    return name, float(knee) if over else None


def feature_value(
    term: str, features: Mapping[str, float], ranges: Mapping[str, tuple[float, float]]
) -> float:
    """A term's value for a step, cut to its feature's range."""
    name, knee = split_term(term)
    if name == "step":
        return 1.0
    value = features[name]
    if name in ranges:
        low, high = ranges[name]
        value = min(max(value, low), high)
    return value if knee is None else max(0.0, value - knee)


def load_residual(path: Path) -> Residual:
    """Read a residual. Raises InputError with the file, the field and what was expected."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the residual: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}:1: expected a mapping with gpu, model, tp, backend, …")
    required = {"gpu": str, "model": str, "tp": int, "backend": str}
    for name, kind in required.items():
        if not isinstance(data.get(name), kind):
            raise InputError(f"{path}: field {name!r} is {data.get(name)!r}: expected {kind.__name__}")
    known = Residual.__dataclass_fields__
    for name in data:
        if name not in known:
            raise InputError(f"{path}: unknown field {name!r}{nearest(str(name), known)}")
    return Residual(
        gpu=data["gpu"],
        model=data["model"],
        tp=data["tp"],
        backend=data["backend"],
        engine=str(data.get("engine", "")),
        source=str(data.get("source", "")),
        date=str(data.get("date", "")),
        shapes=int(_number(path, "shapes", data.get("shapes", 0))),
        steps=int(_number(path, "steps", data.get("steps", 0))),
        error={
            name: Error(*(_number(path, f"error.{name}", pair.get(key)) for key in ("median", "p90")))
            for name, pair in _mapping(path, "error", data.get("error")).items()
        },
        decode_only=_regime(path, "decode_only", data.get("decode_only")),
        with_prefill=_regime(path, "with_prefill", data.get("with_prefill")),
        notes=str(data.get("notes", "")),
    )


def shipped_residual(gpu: str, model: str, tp: int, backend: str) -> Residual | None:
    """The residual that comes with the package for exactly this combination, or None."""
    wanted = (gpu, model, tp, backend)
    return next((r for r in shipped() if (r.gpu, r.model, r.tp, r.backend) == wanted), None)


@cache
def shipped() -> tuple[Residual, ...]:
    """All residuals that come with the package."""
    return tuple(load_residual(file) for file in sorted(SHIPPED.glob("*.yaml")))


def _regime(path: Path, where: str, data: Any) -> Regime | None:
    if data is None:
        return None
    content = _mapping(path, where, data)
    coefficients = {}
    for term, value in _mapping(path, f"{where}.coefficients", content.get("coefficients")).items():
        try:
            split_term(str(term))
        except ValueError as error:
            raise InputError(f"{path}: field '{where}.coefficients': {error}") from None
        coefficients[str(term)] = _number(path, f"{where}.coefficients.{term}", value)
    ranges = {}
    for name, pair in _mapping(path, f"{where}.ranges", content.get("ranges")).items():
        if name not in FEATURES[1:]:
            hint = nearest(str(name), FEATURES)
            raise InputError(f"{path}: field '{where}.ranges': unknown feature {name!r}{hint}")
        if not (isinstance(pair, list) and len(pair) == 2):
            raise InputError(f"{path}: field '{where}.ranges.{name}' is {pair!r}: expected [lowest, highest]")
        low, high = (_number(path, f"{where}.ranges.{name}", bound) for bound in pair)
        ranges[str(name)] = low, high
    return Regime(ranges, coefficients)


def _mapping(path: Path, where: str, data: Any) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InputError(f"{path}: field {where!r} is {data!r}: expected a mapping")
    return data


def _number(path: Path, where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InputError(f"{path}: field {where!r} is {value!r}: expected a number")
    return float(value)
