"""A decode-only step as a line: for a fixed batch, seconds and joules grow linearly with the context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from agentservesim.policies.interface import PrefillLine
from agentservesim.step_time.energy import PowerModel
from agentservesim.step_time.interface import DecodeLine, Spread, StepCost


class SecondsLine(NamedTuple):
    """Seconds of a decode-only step, base + slope * context tokens, and the range where that holds."""

    base_s: float
    slope_s: float
    from_tokens: float
    until_tokens: float
    in_grid: bool


class LinedStepTime:
    """What every back end shares: decode-only steps are read off cached lines, others are worked out.

    A back end gives `_seconds_line`, `_roofline_line` and `_mixed`; each is a pure function of its arguments.
    Contexts that all grow by a token keep their distances, so a line holds for a batch
    as long as its distances from the mean.
    """

    backend: str
    source: str
    notice: str | None
    idle_watts: float
    uses_spread = False

    def __init__(self, power: PowerModel, max_num_batched_tokens: int) -> None:
        self.idle_watts = power.idle_watts
        self.power = power
        self.max_num_batched_tokens = max_num_batched_tokens
        self._lines: dict[int, DecodeLine] = {}
        self._spread_lines: dict[int, tuple[tuple[int, int], DecodeLine]] = {}

    def step(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None = None,
    ) -> StepCost:
        """Cost of a step; see StepTimeModel. Raises ValueError for an empty batch."""
        if prefills:
            seconds, roofline_s, in_grid = self._mixed(prefills, decodes, decode_context_tokens, spread)
            return StepCost(seconds, self.power.joules(seconds, roofline_s), in_grid)
        line = self._lines.get(decodes) if spread is None else None
        if line is None or not line[4] <= decode_context_tokens < line[5]:
            line = self.decode_line(decodes, decode_context_tokens, spread)
        base_s, slope_s, base_joules, slope_joules, _, _, in_grid = line
        return StepCost(
            base_s + slope_s * decode_context_tokens,
            base_joules + slope_joules * decode_context_tokens,
            in_grid,
        )

    def decode_line(
        self, decodes: int, decode_context_tokens: int, spread: Spread | None = None
    ) -> DecodeLine:
        """The line that gives the cost of a decode-only step, and the range of context tokens it holds for;
        see StepTimeModel. Raises ValueError for decodes < 1."""
        if decodes < 1:
            raise ValueError("a step without sequences has no cost")
        if spread is None or not self.uses_spread:
            line = self._lines.get(decodes)
            if line is None or not line.from_tokens <= decode_context_tokens < line.until_tokens:
                line = self._lines[decodes] = self._line(decodes, decode_context_tokens, None)
            return line
        below = decode_context_tokens - decodes * spread[0]
        above = decodes * spread[1] - decode_context_tokens
        distances, line = self._spread_lines.get(decodes, (None, None))
        if (
            line is None
            or distances != (below, above)
            or not line.from_tokens <= decode_context_tokens < line.until_tokens
        ):
            line = self._line(decodes, decode_context_tokens, spread)
            self._spread_lines[decodes] = (below, above), line
        return line

    def _line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> DecodeLine:
        seconds = self._seconds_line(decodes, decode_context_tokens, spread)
        return _with_joules(seconds, self._roofline_line(decodes), self.power, decode_context_tokens)

    def prefill_line(self) -> PrefillLine:
        """The prefill cost as a line: least squares over chunks of 1/8, 2/8, ... of max_num_batched_tokens,
        one chunk a step, nothing cached. The knee is where that line meets the time of a one-token step."""
        return self._prefill_line

    @cached_property
    def _prefill_line(self) -> PrefillLine:
        sizes = sorted({max(1, self.max_num_batched_tokens * eighth // 8) for eighth in range(1, 9)})
        seconds = [self.step([(size, 0)], 0, 0).seconds for size in sizes]
        slope, base = _least_squares(sizes, seconds)
        flat_s = self.step([(1, 0)], 0, 0).seconds
        knee = math.ceil((flat_s - base) / slope) if slope > 0 else 1
        return PrefillLine(slope, base, min(max(1, knee), self.max_num_batched_tokens))

    def _seconds_line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> SecondsLine:
        raise NotImplementedError

    def _roofline_line(self, decodes: int) -> tuple[float, float]:
        """Base and slope of the ideal seconds that utilisation is measured against."""
        raise NotImplementedError

    def _mixed(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None,
    ) -> tuple[float, float, bool]:
        """Seconds, ideal seconds and in_grid of a step with at least one prefill."""
        raise NotImplementedError


def _with_joules(
    line: SecondsLine, ideal: tuple[float, float], power: PowerModel, tokens: float
) -> DecodeLine:
    """Add joules, a line too once the range is cut where the ideal seconds cross the step's."""
    base_s, slope_s, start, end, in_grid = line
    ideal_s, ideal_slope_s = ideal
    if slope_s != ideal_slope_s:
        crossing = math.ceil((ideal_s - base_s) / (slope_s - ideal_slope_s))
        if start < crossing <= tokens:
            start = crossing
        elif tokens < crossing < end:
            end = crossing
    inside = (start + end) / 2 if math.isfinite(end) else start + 1
    if base_s + slope_s * inside <= ideal_s + ideal_slope_s * inside:
        ideal_s, ideal_slope_s = base_s, slope_s
    return DecodeLine(
        base_s,
        slope_s,
        power.idle_watts * base_s + power.active_watts * ideal_s,
        power.idle_watts * slope_s + power.active_watts * ideal_slope_s,
        start,
        end,
        in_grid,
    )


def _least_squares(xs: list[int], ys: list[float]) -> tuple[float, float]:
    """Slope and intercept; a single point gives a line through the origin."""
    if len(xs) == 1:
        return ys[0] / xs[0], 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in xs)
    return slope, mean_y - slope * mean_x
