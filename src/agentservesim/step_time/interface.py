"""The contract between an instance and whatever knows how long its steps take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from agentservesim.policies.interface import PrefillLine


class StepCost(NamedTuple):
    """One engine step: wall seconds, joules of all its GPUs, and whether the batch lay inside the
    grid that was measured (always False for a back end without measurements)."""

    seconds: float
    joules: float
    in_grid: bool


Spread = tuple[int, int]
"""Contexts of a decode batch in tokens, this step's included: the shortest and the longest."""


class DecodeLine(NamedTuple):
    """Cost of a step that only decodes, while from_tokens <= its context tokens < until_tokens:
    seconds = base_s + slope_s * tokens, joules = base_joules + slope_joules * tokens."""

    base_s: float
    slope_s: float
    base_joules: float
    slope_joules: float
    from_tokens: float
    until_tokens: float
    in_grid: bool


class StepTimeModel(Protocol):
    """Seconds and joules of a step, a pure function of the batch's shape.

    backend   the name in the config: measured, tables, roofline or linear
    source    what the numbers come from, in words, with version
    notice    what a user should be told once, or None
    idle_watts    power of the instance's GPUs together while no step runs
    uses_spread   whether the spread of contexts matters to it; if not, nobody need work it out
    """

    backend: str
    source: str
    notice: str | None
    idle_watts: float
    uses_spread: bool

    def step(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None = None,
    ) -> StepCost:
        """Cost of a step.

        prefills                a (new_tokens, computed_tokens) pair a sequence in prefill: tokens this
                                step computes, tokens of it already in the KV cache
        decodes                 sequences that compute one token
        decode_context_tokens   sum over those of the context each attends to, its new token included
        spread                  the shortest and longest of those; None: all alike
        """
        ...

    def decode_line(
        self, decodes: int, decode_context_tokens: int, spread: Spread | None = None
    ) -> DecodeLine:
        """The line that gives the cost of a decode-only step, and the range of context tokens it holds for;
        `step([], decodes, t, s)` equals it at every t in the range, bit for bit, where all contexts of the
        batch have grown alike: s is `spread`, moved by (t - decode_context_tokens) / decodes."""
        ...

    def prefill_line(self) -> PrefillLine:
        """The prefill cost as a line, for policies that weigh a recomputation (min-waste)."""
        ...
