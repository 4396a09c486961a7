"""The Program Orchestrator: releases a call when all its simulated predecessors and their gaps are done."""

from __future__ import annotations

from collections.abc import Callable

from agentservesim.engine.content import Content
from agentservesim.engine.request import Request
from agentservesim.programs.context import ProgramContext, SharedPrefixes
from agentservesim.programs.pcb import Gap, ProgramControlBlock, ProgramTable
from agentservesim.programs.program import Program, Turn


class ProgramRun:
    """A program under way: its PCB, and how far its graph of turns has come. Policies never see it."""

    __slots__ = (
        "calls_completed",
        "calls_refused",
        "children",
        "completed_s",
        "context",
        "failed",
        "gaps",
        "in_flight",
        "parents_left",
        "pcb",
        "program",
        "released",
        "users_left",
    )

    def __init__(self, program: Program, pcb: ProgramControlBlock, context: ProgramContext) -> None:
        self.program = program
        self.pcb = pcb
        self.context = context
        self.children = program.children()
        self.parents_left = [len(turn.parents) for turn in program.turns]
        self.users_left = [len(children) for children in self.children]
        self.released: dict[int, tuple[float, int]] = {}
        self.gaps: dict[int, Gap] = {}
        self.in_flight = 0
        self.calls_completed = 0
        self.calls_refused = 0
        self.failed = False
        self.completed_s: float | None = None


class Call:
    """One released call. `sequence` is its place in the order of all releases, `ordinal` in its program's.

    gap           the gap that ends with it; None for a call without predecessors
    after         index of the turn before that gap: of several, whose gap ended last; -1 for none
    instance      where it was placed
    """

    __slots__ = (
        "after",
        "content",
        "gap",
        "index",
        "instance",
        "ordinal",
        "released_s",
        "request",
        "run",
        "sequence",
        "turn",
    )

    def __init__(
        self, run: ProgramRun, index: int, released_s: float, sequence: int, after: int = -1
    ) -> None:
        self.run = run
        self.index = index
        self.turn: Turn = run.program.turns[index]
        self.content: Content = run.context.content(index)
        self.released_s = released_s
        self.sequence = sequence
        self.ordinal = run.pcb.calls_submitted
        run.pcb.calls_submitted += 1
        self.after = after
        self.gap: Gap | None = run.gaps.get(after)
        self.instance: int | None = None
        self.request: Request | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Names the call, and the KV parked after it: program id and turn id."""
        return (self.run.program.program_id, self.turn.turn_id)

    def parents(self) -> tuple[int, ...]:
        """Indices of the turns before it, the one whose gap ended last in front."""
        parents = self.turn.parents
        if len(parents) < 2:
            return parents
        return tuple(sorted(parents, key=lambda parent: parent != self.after))

    def parent_keys(self) -> tuple[tuple[str, str], ...]:
        """Keys of the calls before it, in the order of `parents`."""
        program = self.run.program
        return tuple((program.program_id, program.turns[parent].turn_id) for parent in self.parents())


def call_of(request: Request) -> Call:
    """The call that a request was submitted for."""
    assert isinstance(request.owner, Call)
    return request.owner


class Orchestrator:
    """Turns programs into calls. `release_at(time_s, run, index)` is asked to bring a turn back, through
    `release`, when its time has come."""

    def __init__(
        self,
        table: ProgramTable,
        deployment: bool,
        release_at: Callable[[float, ProgramRun, int], None],
    ) -> None:
        self.table = table
        self._deployment = deployment
        self._release_at = release_at
        self._shared = SharedPrefixes()
        self._sequence = 0

    def start(self, program: Program, now_s: float) -> ProgramRun:
        """A program has arrived: its turns without parents are released, after their own delay."""
        context = ProgramContext(program, self._shared, self._deployment)
        run = ProgramRun(program, self.table.open(program.program_id, now_s), context)
        for index, turn in enumerate(program.turns):
            if not turn.parents:
                self._schedule(run, index, now_s + turn.delay_s)
        return run

    def release(self, run: ProgramRun, index: int, now_s: float) -> Call | None:
        """A turn's time has come. None if its program has failed meanwhile."""
        if run.failed:
            run.in_flight -= 1
            self._end_if_done(run, now_s)
            return None
        _, after = run.released.pop(index, (now_s, -1))
        call = Call(run, index, now_s, self._sequence, after)
        self._sequence += 1
        self._forget_parents(run, call.turn)
        return call

    def complete(self, call: Call, now_s: float) -> None:
        """A call has completed: turns with no other parent left follow after the gap and their own delay."""
        run = call.run
        run.calls_completed += 1
        run.in_flight -= 1
        if not run.failed:
            after_gap = now_s + call.turn.wait_s()
            for child in run.children[call.index]:
                # A join waits for the last of its parents' gaps.
                ready, _ = run.released.get(child, (-1.0, -1))
                if after_gap > ready:
                    run.released[child] = (after_gap, call.index)
                run.parents_left[child] -= 1
                if run.parents_left[child] == 0:
                    delay_s = run.program.turns[child].delay_s
                    self._schedule(run, child, run.released[child][0] + delay_s)
        self._end_if_done(run, now_s)

    def fail(self, call: Call, now_s: float) -> None:
        """A call was refused: its program has failed and releases nothing more."""
        run = call.run
        run.failed = True
        run.calls_refused += 1
        run.in_flight -= 1
        self._end_if_done(run, now_s)

    def open_gap(self, call: Call, gap: Gap) -> None:
        """Remember the gap after a call for the turns that follow it."""
        if call.run.children[call.index]:
            call.run.gaps[call.index] = gap

    def _schedule(self, run: ProgramRun, index: int, time_s: float) -> None:
        run.in_flight += 1
        self._release_at(time_s, run, index)

    def _forget_parents(self, run: ProgramRun, turn: Turn) -> None:
        for parent in turn.parents:
            run.users_left[parent] -= 1
            if run.users_left[parent] == 0:
                run.context.forget(parent)
                run.gaps.pop(parent, None)

    def _end_if_done(self, run: ProgramRun, now_s: float) -> None:
        if run.in_flight == 0 and run.completed_s is None:
            run.completed_s = now_s
            self.table.close(run.pcb)
