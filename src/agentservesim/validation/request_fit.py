"""A residual from per-request times alone: simulate, compare, and search for three coefficients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentservesim.config import RunConfig
from agentservesim.errors import InputError
from agentservesim.step_time.corrected import CorrectedStepTime
from agentservesim.step_time.decode_line import LinedStepTime
from agentservesim.step_time.residual import Error, Regime, Residual
from agentservesim.validation.calibrate import base_step_time, facts
from agentservesim.validation.metrics import Side, errors, sides
from agentservesim.validation.nelder_mead import Point, minimise
from agentservesim.validation.pairing import CallNames, Pair, pair
from agentservesim.validation.records import read_real_run
from agentservesim.validation.validate import simulated_calls
from agentservesim.workload import load_programs

EVALUATIONS = 120
SEARCHES = (0.5, 0.5)
"""Shares of the simulations: the search begins anew once from where it came, with a fresh simplex."""
FEW_REQUESTS = 100
TERMS = ("step", "prefill_tokens", "decodes")
HALVES = ("training", "held_out")


@dataclass(frozen=True)
class RequestFit:
    """A residual, and the relative errors before and after on the half it was fitted to and the other.

    errors     {"training" | "held_out": {"before" | "after": …}} by the names of metrics.errors
    warnings   why not to trust it, in words
    """

    residual: Residual
    coefficients: dict[str, float]
    errors: dict[str, dict[str, dict[str, float | None]]]
    evaluations: int
    warnings: list[str]


def calibrate_requests(
    config: RunConfig,
    path: Path,
    seed: int = 0,
    engine: str = "",
    evaluations: int = EVALUATIONS,
    on_try: Callable[[int, float], None] | None = None,
) -> RequestFit:
    """Fit microseconds a step, a prefill token and a decoding sequence so that the simulated requests come
    closest to the real ones.

    Half of the programs, drawn with `seed`, are compared during the search; the errors of the other half are
    reported. The same input and seed give the same result. `on_try` is told the number and objective of each
    simulation. Raises InputError for a wrong file, too few calls, or a back end that takes no residual.
    """
    real = read_real_run(path)
    names = CallNames(load_programs(config.workload).programs)
    inner = base_step_time(config)
    assert isinstance(inner, LinedStepTime)
    tries = 0

    def pairs_with(point: Point) -> list[Pair]:
        step_time = CorrectedStepTime(inner, _residual(point, config, real.path.name, engine))
        rows, _ = simulated_calls(config, real.since == "queued", step_time=step_time)
        return pair(real, rows, names).pairs

    before = pairs_with((0.0, 0.0, 0.0))
    halves = _halves(before, seed)

    def objective(point: Point) -> float:
        nonlocal tries
        tries += 1
        value = _distance(*sides(halves[0](pairs_with(point))))
        if on_try is not None:
            on_try(tries, value)
        return value

    tpot_us = 1e6 * float(np.nanmedian(sides(before)[0].tpot_s))
    if np.isnan(tpot_us):
        raise InputError(
            f"{path}: no request has two output tokens: expected times of answers, not of prefills"
        )
    first = (0.25 * tpot_us, 0.25e6 * inner.prefill_line().slope_s_per_token, 0.25 * tpot_us / 32)
    best: Point = (0.0, 0.0, 0.0)
    for share in SEARCHES:
        best, _ = minimise(objective, best, first, round(share * evaluations))
    after = pairs_with(best)
    found = {
        half: {"before": errors(*sides(take(before))), "after": errors(*sides(take(after)))}
        for half, take in zip(HALVES, halves, strict=True)
    }
    residual = _residual(best, config, real.path.name, engine, found, len(before))
    return RequestFit(residual, dict(zip(TERMS, best, strict=True)), found, tries, _warnings(before, found))


def _halves(pairs: list[Pair], seed: int) -> list[Callable[[list[Pair]], list[Pair]]]:
    """What takes the pairs of the training half and of the held-out half; programs stay whole."""
    programs = sorted({one.key[0] for one in pairs})
    if len(programs) < 4:
        raise InputError(
            f"{len(programs)} programs of the real run pair with the workload: expected at least 4 to halve"
        )
    random.Random(f"calibrate/{seed}").shuffle(programs)
    training = set(programs[: len(programs) // 2])
    return [
        lambda some: [one for one in some if one.key[0] in training],
        lambda some: [one for one in some if one.key[0] not in training],
    ]


def _distance(real: Side, simulated: Side) -> float:
    """What the search makes small: the mean absolute errors of TPOT and latency, and that of TTFT weighted by
    it, since a few milliseconds of a short one say little."""
    found = errors(real, simulated)
    ttft = float(np.abs(simulated.ttft_s - real.ttft_s).sum() / real.ttft_s.sum())
    return ttft + sum(found[name] or 0.0 for name in ("tpot_mape", "latency_mape"))


def _residual(
    point: Point,
    config: RunConfig,
    name: str,
    engine: str,
    found: dict[str, dict[str, dict[str, float | None]]] | None = None,
    calls: int = 0,
) -> Residual:
    """The coefficients as a residual; its errors are of the requests' latency."""
    terms = {term: float(f"{value:.6g}") for term, value in zip(TERMS, point, strict=True)}
    plain = {term: terms[term] for term in TERMS if term != "prefill_tokens"}
    summary = {}
    if found is not None:
        for key, half, when in (
            ("uncorrected", "held_out", "before"),
            ("in_sample", "training", "after"),
            ("held_out", "held_out", "after"),
        ):
            one = found[half][when]
            summary[key] = Error(
                round(one["latency_mape"] or 0.0, 5), round(abs(one["latency_p90"] or 0.0), 5)
            )
    return Residual(
        **facts(config, f"{name}, times of {calls} requests", engine),
        shapes=0,
        steps=0,
        error=summary,
        decode_only=Regime({}, plain),
        with_prefill=Regime({}, terms),
        notes="fitted to requests, not to steps: error.median is the mean absolute error of a request's "
        "latency, error.p90 that of its 90th percentile",
    )


def _warnings(pairs: list[Pair], found: dict[str, dict[str, dict[str, float | None]]]) -> list[str]:
    warnings = []
    if len(pairs) < FEW_REQUESTS:
        warnings.append(f"{len(pairs)} requests are few: expect better from {FEW_REQUESTS} and more")
    before, after = (found["held_out"][when]["latency_mape"] or 0.0 for when in ("before", "after"))
    if after >= before:
        warnings.append("the half that was held out is no closer than without the fit: do not use it")
    warnings.append(
        "three coefficients from requests cannot tell causes apart: where steps can be logged, fit to those"
    )
    return warnings
