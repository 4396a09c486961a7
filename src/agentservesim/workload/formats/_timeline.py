"""Which call waited for which, from when each was sent and answered."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agentservesim.programs.program import Turn
from agentservesim.workload.formats._waits import TOOL_LIMIT_S, Timed, with_waits
from agentservesim.workload.report import ReadingReport


class Recorded(NamedTuple):
    """A call on any clock, in seconds; calls are listed by start.

    base        an earlier call, over by then, whose prompt this one shares most with; None: shares with none
    continues   this prompt goes on where the base ended: all of its prompt, then more
    human       a person, no tool, was waited for
    """

    start_s: float
    end_s: float
    base: int | None = None
    continues: bool = False
    human: bool = False


class Links(NamedTuple):
    """The calls that one waits for, and the one whose gap the wait is (None: the call's own delay)."""

    parents: tuple[int, ...]
    anchor: int | None


def everything(earlier: int, later: int) -> bool:
    """Every call knows of every other."""
    return True


def links_by_time(
    calls: Sequence[Recorded], tolerance_s: float, visible: Callable[[int, int], bool] = everything
) -> list[Links]:
    """Parents of every call; of a first one none.

    A call waits for the calls that were over when it started (by up to `tolerance_s` later, as clocks
    differ), less those that these had waited for themselves. What overlaps is thus a fork, and a call that
    starts after several branches a join. A call that continues a base waits for the base and for the branches
    that ended, as nothing continues them. `visible(earlier, later)` False: cannot have been waited for.
    """
    continued = {call.base for call in calls if call.continues}
    running: list[tuple[float, int]] = []
    over: list[tuple[float, int]] = []
    links = []
    for index, call in enumerate(calls):
        while running and running[0][0] <= call.start_s + tolerance_s:
            insort(over, heapq.heappop(running))
        last = _last(calls, index, over, tolerance_s, visible)
        links.append(_links(call, last, continued))
        heapq.heappush(running, (max(call.start_s, call.end_s), index))
    return links


def _last(
    calls: Sequence[Recorded],
    index: int,
    over: list[tuple[float, int]],
    tolerance_s: float,
    visible: Callable[[int, int], bool],
) -> list[int]:
    """The calls that are over when call `index` starts and that no other such call had waited for."""
    found: list[tuple[float, int]] = []
    latest_start = float("-inf")
    for end_s, earlier in reversed(over):
        if end_s <= latest_start + tolerance_s:
            break
        if visible(earlier, index):
            found.append((end_s, earlier))
            latest_start = max(latest_start, calls[earlier].start_s)
    kept = sorted(earlier for end_s, earlier in found if end_s > latest_start + tolerance_s)
    return kept or [earlier for _, earlier in found[:1]]


def _links(call: Recorded, last: list[int], continued: set[int | None]) -> Links:
    ended = [earlier for earlier in last if earlier not in continued and earlier != call.base]
    if call.base is not None and call.continues:
        return Links((call.base, *ended), None if ended else call.base)
    triggers = ended or [earlier for earlier in last if earlier != call.base]
    first = () if call.base is None else (call.base,)
    parents = (*first, *triggers)
    alone = triggers or list(first)
    return Links(parents, alone[0] if len(alone) == 1 else None)


def turns_in_time(
    turns: Sequence[Turn],
    calls: Sequence[Recorded],
    links: Sequence[Links],
    report: ReadingReport,
    tool_limit_s: float = TOOL_LIMIT_S,
) -> tuple[Turn, ...]:
    """The turns, which have their parents, with gaps, pauses and delays that give the recorded starts.

    What a gap has beyond `tool_limit_s` is a pause.
    """
    timed = [
        Timed(
            turn,
            call.start_s,
            max(call.start_s, call.end_s),
            link.anchor,
            call.human,
            tool_limit_s=tool_limit_s,
        )
        for turn, call, link in zip(turns, calls, links, strict=True)
    ]
    return with_waits(timed, report)
