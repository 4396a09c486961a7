"""Step time from measured operators: the default back end."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from agentservesim.step_time.decode_line import LinedStepTime, SecondsLine
from agentservesim.step_time.energy import power_model
from agentservesim.step_time.hardware import Gpu
from agentservesim.step_time.interface import Spread
from agentservesim.step_time.models import Model
from agentservesim.step_time.operators import Operators
from agentservesim.step_time.prefill_attention import PrefillAttention
from agentservesim.step_time.roofline import IDEAL, Roofline

CONTEXT_KNOTS = (1, *sorted(scale * 2**power for scale in (2, 3) for power in range(17)))
"""Contexts at which decode attention is looked up: 1, 2, 3, 4, 6, 8, 12, ... 131,072, 196,608."""


class MeasuredStepTime(LinedStepTime):
    """A step put together from measured operators.

    seconds = shared(T) + logits(S) + prefill attention + decode attention(decodes, mean context)

    with T all tokens of the step and S all its sequences. Decode attention is linear in the mean context
    between CONTEXT_KNOTS, and beyond the last; prefill attention is PrefillAttention. Answers do not depend
    on the order of questions: every table entry is one query.
    """

    backend = "measured"
    notice: str | None = None

    def __init__(
        self, operators: Operators, gpu: Gpu, model: Model, tp: int, max_num_batched_tokens: int
    ) -> None:
        super().__init__(power_model(gpu, tp), max_num_batched_tokens)
        self._operators = operators
        self._ideal = Roofline(gpu, model, tp, IDEAL)
        self.source = operators.source
        self._shared: dict[int, float] = {}
        self._logits: dict[int, float] = {}
        self._prefill_attention = PrefillAttention(operators)
        self._attention: dict[tuple[int, int], float] = {}

    def _seconds_line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> SecondsLine:
        base_s, slope_s, knot = self._decode_attention(decodes, decode_context_tokens)
        start = decodes * CONTEXT_KNOTS[knot] if knot else -math.inf
        last = knot == len(CONTEXT_KNOTS) - 2
        end = math.inf if last else decodes * CONTEXT_KNOTS[knot + 1]
        grid = self._operators.grid
        # Measured contexts are powers of two, so a segment lies inside the grid or outside it; the longest
        # context itself starts a segment that lies outside.
        in_grid = decodes <= grid.tokens and CONTEXT_KNOTS[knot + 1] <= grid.longest_context(decodes)
        shared_s = self._shared_seconds(decodes) + self._logits_seconds(decodes)
        return SecondsLine(shared_s + base_s, slope_s, start, end, in_grid)

    def _roofline_line(self, decodes: int) -> tuple[float, float]:
        return self._ideal.decode_line(decodes)

    def _mixed(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None,
    ) -> tuple[float, float, bool]:
        grid = self._operators.grid
        tokens, longest = decodes, 0
        for new, computed in prefills:
            tokens += new
            if new + computed > longest:
                longest = new + computed
        seconds = (
            self._shared_seconds(tokens)
            + self._logits_seconds(decodes + len(prefills))
            + self._prefill_attention.seconds(prefills)
        )
        in_grid = tokens <= grid.tokens and longest <= grid.prefill_tokens
        if decodes:
            base_s, slope_s, _ = self._decode_attention(decodes, decode_context_tokens)
            seconds += base_s + slope_s * decode_context_tokens
            in_grid = in_grid and decode_context_tokens <= decodes * grid.longest_context(decodes)
        return seconds, self._ideal.seconds(prefills, decodes, decode_context_tokens), in_grid

    def _shared_seconds(self, tokens: int) -> float:
        seconds = self._shared.get(tokens)
        if seconds is None:
            seconds = self._shared[tokens] = self._operators.shared_seconds(tokens)
        return seconds

    def _logits_seconds(self, sequences: int) -> float:
        seconds = self._logits.get(sequences)
        if seconds is None:
            seconds = self._logits[sequences] = self._operators.logits_seconds(sequences)
        return seconds

    def _decode_attention(self, decodes: int, context_tokens: int) -> tuple[float, float, int]:
        """Base and slope in the batch's context tokens, and the index of the knot that starts the segment."""
        knot = bisect_right(CONTEXT_KNOTS, context_tokens / decodes) - 1
        knot = min(max(knot, 0), len(CONTEXT_KNOTS) - 2)
        low, high = CONTEXT_KNOTS[knot], CONTEXT_KNOTS[knot + 1]
        at_low, at_high = self._attention_at(decodes, low), self._attention_at(decodes, high)
        slope_s = (at_high - at_low) / (high - low)
        return at_low - slope_s * low, slope_s / decodes, knot

    def _attention_at(self, decodes: int, context: int) -> float:
        seconds = self._attention.get((decodes, context))
        if seconds is None:
            seconds = self._operators.decode_attention_seconds(decodes, context)
            self._attention[decodes, context] = seconds
        return seconds
