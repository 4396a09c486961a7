"""From recorded starts and ends to gaps, pauses and delays, so that a replay starts every call on time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agentservesim.programs.program import Turn
from agentservesim.workload.report import ReadingReport

NEGATIVE = "negative gaps: 0 s"
LONG_GAP = "tool gaps over 600 s: what is beyond is a person's pause"
FORKED_PAUSE = "a person's pause on one branch of a fork: kept as delay_s"


TOOL_LIMIT_S = 600.0
"""The longest time-out that agents give a tool. What waits longer waits for a person (a permission)."""


@dataclass
class Timed:
    """A turn as recorded, on any clock in seconds; its waits are still to be found.

    start_s, end_s   when the call was sent and when its answer was complete
    anchor           the parent that carries the wait before this turn as its gap; None: the turn carries it
                     itself, as delay_s (a join of sub-agents waits for the last, whichever that is)
    human            a person started this turn: the wait before it is a pause, after any tools
    tools_end_s      when the last tool result after this turn came in, if it asked for tools
    tool_limit_s     longest gap to believe in; infinite for a turn that starts sub-agents
    """

    turn: Turn
    start_s: float
    end_s: float
    anchor: int | None = None
    human: bool = False
    tools_end_s: float | None = None
    tool_limit_s: float = TOOL_LIMIT_S


def with_waits(recorded: Sequence[Timed], report: ReadingReport) -> tuple[Turn, ...]:
    """The turns with gap_s, pause_s and delay_s such that start = max over parents (end + wait) + delay.

    `recorded` lists every turn after its parents. Of the children of a turn the first to start decides its
    wait; the later ones have the rest as delay_s. A wait that would be negative is 0 and counted; what it
    moved a start by is taken off the next wait, so that starts do not drift.
    """
    children: list[list[int]] = [[] for _ in recorded]
    for index, item in enumerate(recorded):
        for parent in item.turn.parents:
            children[parent].append(index)
    origin_s = min((item.start_s for item in recorded), default=0.0)
    ready = [origin_s] * len(recorded)  # end plus wait, on the replayed clock
    turns: list[Turn] = []
    for index, item in enumerate(recorded):
        earliest = max((ready[parent] for parent in item.turn.parents), default=origin_s)
        delay_s = max(0.0, item.start_s - earliest)
        if delay_s and item.human and item.anchor is not None:
            report.inferred[FORKED_PAUSE] += 1
        end_s = earliest + delay_s + max(0.0, item.end_s - item.start_s)
        gap_s, pause_s = _wait(recorded, index, children[index], end_s, report)
        ready[index] = end_s + (gap_s or 0.0) + pause_s
        turns.append(msgspec.structs.replace(item.turn, gap_s=gap_s, pause_s=pause_s, delay_s=delay_s))
    return tuple(turns)


def _wait(
    recorded: Sequence[Timed], index: int, children: list[int], end_s: float, report: ReadingReport
) -> tuple[float | None, float]:
    """gap_s and pause_s after a turn that, in the replay, ends at `end_s`."""
    anchored = [child for child in children if recorded[child].anchor == index]
    if not anchored:
        return (0.0 if children else _last_gap(recorded[index])), 0.0
    first = min(anchored, key=lambda child: recorded[child].start_s)
    recorded_s = recorded[first].start_s - recorded[index].end_s
    if recorded_s < 0:
        report.clamped[NEGATIVE] += 1
    total = max(0.0, min(recorded[child].start_s for child in children) - end_s)
    gap_s = min(total, recorded[index].tool_limit_s)
    if recorded[first].human:
        return _split(total, min(gap_s, _last_gap(recorded[index]) or 0.0))
    if gap_s < total:
        report.inferred[LONG_GAP] += 1
    return _split(total, gap_s)


def _split(total_s: float, gap_s: float) -> tuple[float, float]:
    """A wait as gap and pause."""
    return gap_s, total_s - gap_s


def _last_gap(item: Timed) -> float | None:
    """What the tools after a turn took as a whole; None without tools."""
    return None if item.tools_end_s is None else max(0.0, item.tools_end_s - item.end_s)
