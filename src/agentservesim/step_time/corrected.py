"""A back end with a residual on top. Decode-only steps stay lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentservesim.step_time.decode_line import LinedStepTime, SecondsLine
from agentservesim.step_time.interface import Spread
from agentservesim.step_time.residual import MIN_SHARE, Regime, Residual, split_term


class CorrectedStepTime(LinedStepTime):
    """The seconds of `inner` plus the residual's, never below MIN_SHARE of the former; see residual.py."""

    def __init__(self, inner: LinedStepTime, residual: Residual) -> None:
        super().__init__(inner.power, inner.max_num_batched_tokens)
        self._inner = inner
        self._decode_only, self._with_prefill = residual.decode_only, residual.with_prefill
        self.backend, self.notice = inner.backend, inner.notice
        self.uses_spread = inner.uses_spread
        self.source = f"{inner.source}; {residual.described}"

    def _seconds_line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> SecondsLine:
        line = self._inner._seconds_line(decodes, decode_context_tokens, spread)
        if self._decode_only is None:
            return line._replace(in_grid=False)
        return _corrected(line, self._decode_only, decodes, decode_context_tokens)

    def _roofline_line(self, decodes: int) -> tuple[float, float]:
        return self._inner._roofline_line(decodes)

    def _mixed(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None,
    ) -> tuple[float, float, bool]:
        operators_s, ideal_s, in_grid = self._inner._mixed(prefills, decodes, decode_context_tokens, spread)
        regime = self._with_prefill
        if regime is None:
            return operators_s, ideal_s, False
        features = {
            "decodes": decodes,
            "context_tokens": decode_context_tokens,
            "prefills": len(prefills),
            "prefill_tokens": sum([new for new, _ in prefills]),
            "operators": operators_s * 1e6,
        }
        seconds = max(operators_s + regime.seconds(features), MIN_SHARE * operators_s)
        return seconds, ideal_s, in_grid and regime.covers(features)


def _corrected(line: SecondsLine, regime: Regime, decodes: int, tokens: float) -> SecondsLine:
    """The corrected piece around `tokens`. A feature that grows with the context is cut to its range and may
    have knees, so the piece ends there, and where the floor takes over."""
    start, end = line.from_tokens, line.until_tokens
    for edge in _edges(line, regime):
        if edge <= tokens:
            start = max(start, edge)
        else:
            end = min(end, edge)

    def features(at: float) -> dict[str, float]:
        batch = {"decodes": decodes, "context_tokens": at, "prefills": 0, "prefill_tokens": 0}
        return {**batch, "operators": (line.base_s + line.slope_s * at) * 1e6}

    slope_s = line.slope_s
    inside = _inside(start, end)
    for term, coefficient in regime.coefficients.items():
        name, knee = split_term(term)
        low, high = regime.ranges.get(name, (-math.inf, math.inf))
        grows = {"context_tokens": 1e-6, "operators": line.slope_s}.get(name, 0.0)
        if grows and max(low, knee if knee is not None else -math.inf) <= features(inside)[name] < high:
            slope_s += coefficient * grows
    total_s = line.base_s + line.slope_s * inside + regime.seconds(features(inside))
    base_s = total_s - slope_s * inside
    floor_s, floor_slope_s = MIN_SHARE * line.base_s, MIN_SHARE * line.slope_s
    if slope_s != floor_slope_s:
        crossing = math.ceil((floor_s - base_s) / (slope_s - floor_slope_s))
        if start < crossing <= tokens:
            start = crossing
        elif tokens < crossing < end:
            end = crossing
        inside = _inside(start, end)
    if base_s + slope_s * inside < floor_s + floor_slope_s * inside:
        base_s, slope_s = floor_s, floor_slope_s
    return SecondsLine(base_s, slope_s, start, end, line.in_grid and regime.covers(features(inside)))


def _edges(line: SecondsLine, regime: Regime) -> list[float]:
    """Context tokens, whole numbers, at which a feature enters or leaves its range or passes a knee."""
    bounds: dict[str, set[float]] = {"context_tokens": set(), "operators": set()}
    for name, pair in regime.ranges.items():
        if name in bounds:
            bounds[name].update(pair)
    for term in regime.coefficients:
        name, knee = split_term(term)
        if name in bounds and knee is not None:
            bounds[name].add(knee)
    edges = list(bounds["context_tokens"])
    if line.slope_s > 0:
        edges += [(value * 1e-6 - line.base_s) / line.slope_s for value in bounds["operators"]]
    return [math.ceil(edge) for edge in edges if math.isfinite(edge)]


def _inside(start: float, end: float) -> float:
    """A point well inside a piece."""
    if math.isfinite(start) and math.isfinite(end):
        return (start + end) / 2
    if math.isfinite(end):
        return end - 1
    return start + 1 if math.isfinite(start) else 0.0
