"""How many programs are live at a time, and how much context they hold, if the engine took no time."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from agentservesim.programs.program import Program

_ARRIVES, _CALLS, _ENDS = range(3)


class Level(msgspec.Struct, frozen=True):
    """A quantity over the time from the first arrival to the last end: its mean and its maximum."""

    mean: float
    max: int


class LiveProfile:
    """Programs' lives and contexts over recorded time, three numbers a call.

    Calls take no time: a turn starts when its parents' gaps and pauses and its own delay are over. While a
    program lives it holds the prompt and output of the call that started last; of branches side by side only
    that one counts.
    """

    def __init__(self) -> None:
        self._times = array("d")
        self._kinds = array("b")
        self._contexts = array("q")
        self._recorded = True

    def add(self, program: Program) -> int:
        """Account for a program; the context of its last call, in tokens."""
        starts = start_times(program)
        held = 0
        begins_s = program.arrival_s or 0.0
        self._recorded = self._recorded and program.arrival_s is not None
        order = sorted(range(len(starts)), key=lambda index: (starts[index], index))
        if not self._recorded:
            last = program.turns[order[-1]]
            return last.prompt_tokens + last.output_tokens
        self._event(begins_s, _ARRIVES, 0)
        for index in order:
            turn = program.turns[index]
            context = turn.prompt_tokens + turn.output_tokens
            self._event(begins_s + starts[index], _CALLS, context - held)
            held = context
        self._event(begins_s + starts[order[-1]], _ENDS, -held)
        return held

    def programs(self) -> Level | None:
        """Programs live at a time; None unless all had arrivals."""
        kinds = np.frombuffer(self._kinds, dtype=np.int8)
        return self._level(np.where(kinds == _ARRIVES, 1, np.where(kinds == _ENDS, -1, 0)))

    def context_tokens(self) -> Level | None:
        """Tokens that the live programs hold together; None unless all had arrivals."""
        return self._level(np.frombuffer(self._contexts, dtype=np.int64))

    def _event(self, time_s: float, kind: int, context: int) -> None:
        self._times.append(time_s)
        self._kinds.append(kind)
        self._contexts.append(context)

    def _level(self, changes: np.ndarray) -> Level | None:
        if not self._recorded or not self._times:
            return None
        times = np.frombuffer(self._times)
        order = np.lexsort((np.frombuffer(self._kinds, dtype=np.int8), times))
        level = np.cumsum(changes[order])
        lasts = np.diff(times[order])
        span = float(lasts.sum())
        mean = float((level[:-1] * lasts).sum()) / span if span else float(level.max())
        return Level(mean, int(level.max()))


def start_times(program: Program) -> list[float]:
    """When each turn starts, in seconds after the program's arrival, if calls took no time."""
    children = program.children()
    waiting = [len(turn.parents) for turn in program.turns]
    ready = [index for index, count in enumerate(waiting) if not count]
    starts = [0.0] * len(waiting)
    for index in ready:  # grows while it is read
        turn = program.turns[index]
        starts[index] += turn.delay_s
        after_s = starts[index] + turn.wait_s()
        for child in children[index]:
            starts[child] = max(starts[child], after_s)
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    return starts
