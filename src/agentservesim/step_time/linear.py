"""Step time from coefficients in the config."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentservesim.config import StepTimeConfig
from agentservesim.policies.interface import PrefillLine
from agentservesim.step_time.decode_line import LinedStepTime, SecondsLine
from agentservesim.step_time.energy import power_model
from agentservesim.step_time.hardware import Gpu
from agentservesim.step_time.interface import Spread


class LinearStepTime(LinedStepTime):
    """seconds = base_s + per_prefill_token_s * new prefill tokens + per_decode_s * decodes
    + per_context_token_s * decode context tokens + per_prefill_s * chunks + per_prefill_pair_s * pairs of a
    new prefill token and one it attends to. Every step draws the full power limit."""

    backend = "linear"
    source = "the coefficients in step_time"
    notice: str | None = None

    def __init__(self, coefficients: StepTimeConfig, gpu: Gpu, tp: int, max_num_batched_tokens: int) -> None:
        super().__init__(power_model(gpu, tp), max_num_batched_tokens)
        self._c = coefficients

    def prefill_line(self) -> PrefillLine:
        """The coefficients themselves; the time grows from the first token on. With those of chunks and pairs
        it is no line, and is fitted as for other back ends."""
        if self._c.per_prefill_s or self._c.per_prefill_pair_s:
            return super().prefill_line()
        return PrefillLine(self._c.per_prefill_token_s, self._c.base_s, 1)

    def _seconds_line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> SecondsLine:
        return SecondsLine(*self._roofline_line(decodes), -math.inf, math.inf, False)

    def _roofline_line(self, decodes: int) -> tuple[float, float]:
        return self._c.base_s + self._c.per_decode_s * decodes, self._c.per_context_token_s

    def _mixed(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None,
    ) -> tuple[float, float, bool]:
        base_s, slope_s = self._roofline_line(decodes)
        new = sum(new for new, _ in prefills)
        seconds = base_s + self._c.per_prefill_token_s * new + slope_s * decode_context_tokens
        seconds += self._c.per_prefill_s * len(prefills) + self._c.per_prefill_pair_s * prefill_pairs(
            prefills
        )
        return seconds, seconds, False


def prefill_pairs(prefills: Sequence[tuple[int, int]]) -> float:
    """Pairs of a new token and a token it attends to, itself and those before it, of all chunks."""
    return sum([new * (computed + (new + 1) / 2) for new, computed in prefills])
