"""Longer or shorter waits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.transforms.spec import Factor, Seconds

PAUSE_CAPPED = "pauses longer than the cap of cap_pauses"


def scale_gaps(stream: Iterator[Program], report: ReadingReport, *, factor: Factor) -> Iterator[Program]:
    """Tools that take `factor` times as long: recorded gaps, tools' durations and turns' own delays, but
    not people's pauses."""
    for program in stream:
        yield with_longer_waits(program, factor)


def with_longer_waits(program: Program, factor: float, pause_factor: float = 1.0) -> Program:
    """The program with gaps, tools and delays `factor` times as long, and people's pauses `pause_factor`."""

    def longer(turn: Turn) -> Turn:
        return msgspec.structs.replace(
            turn,
            tools=tuple(ToolCall(tool.name, tool.duration_s * factor) for tool in turn.tools),
            gap_s=None if turn.gap_s is None else turn.gap_s * factor,
            pause_s=turn.pause_s * pause_factor,
            delay_s=turn.delay_s * factor,
        )

    return msgspec.structs.replace(program, turns=tuple(map(longer, program.turns)))


def cap_pauses(stream: Iterator[Program], report: ReadingReport, *, max_s: Seconds) -> Iterator[Program]:
    """No person's pause longer than `max_s`."""

    def capped(turn: Turn) -> Turn:
        if turn.pause_s <= max_s:
            return turn
        report.clamped[PAUSE_CAPPED] += 1
        return msgspec.structs.replace(turn, pause_s=max_s)

    for program in stream:
        yield msgspec.structs.replace(program, turns=tuple(map(capped, program.turns)))
