"""The clock and the event heap: the one place where simulated time moves. Reads top to bottom.

One call, as data: workload -> Program -> orchestrator releases a Call -> dispatch plane (admit, route,
priority) -> instance queue -> scheduler.schedule() -> step time -> tokens -> completion -> retention plane
(protect, release, evict) -> PCB -> orchestrator (tool gap) -> the next Call.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from typing import Any

from agentservesim.clock import Clock
from agentservesim.config import ClientConfig
from agentservesim.engine.instance import Instance
from agentservesim.engine.request import Request
from agentservesim.planes.dispatch import DispatchPlane
from agentservesim.planes.retention import RetentionPlane
from agentservesim.programs.orchestrator import Call, Orchestrator, ProgramRun, call_of
from agentservesim.programs.pcb import ProgramTable
from agentservesim.programs.program import Program
from agentservesim.results.recorder import Recorder

STEP_END, CALL_RELEASE, PROGRAM_ARRIVAL = range(3)
"""Kinds of events, in the order they are handled at one instant: blocks and results of a step are there
before the calls that arrive at the same time."""


class Policies:
    """One fresh policy object on each axis."""

    def __init__(self, retention: Any, scheduling: Any, admission: Any, routing: Any) -> None:
        self.retention = retention
        self.scheduling = scheduling
        self.admission = admission
        self.routing = routing


class Simulation:
    """A run over `arrivals`, (time, program) in order of time, or, with `lanes`, over programs that start
    as soon as one of `lanes` concurrent ones ends (their times are then ignored)."""

    def __init__(
        self,
        arrivals: Iterator[tuple[float, Program]],
        instances: list[Instance],
        policies: Policies,
        recorder: Recorder,
        deployment: bool = True,
        lanes: int | None = None,
        client: ClientConfig | None = None,
    ) -> None:
        self.clock = Clock()
        self.instances = instances
        self.recorder = recorder
        self._arrivals = arrivals
        self._lanes = lanes
        self._client = client or ClientConfig()
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._ready: dict[int, Instance] = {}
        self._step_ends = [-1] * len(instances)
        self._live_programs: dict[ProgramRun, None] = {}
        self._live_calls: dict[Call, None] = {}
        self.table = ProgramTable()
        self.orchestrator = Orchestrator(self.table, deployment, self._release_at)
        self.dispatch = DispatchPlane(
            policies.scheduling,
            policies.admission,
            policies.routing,
            self.table,
            instances,
            self.clock,
            recorder.decision,
        )
        self.retention = RetentionPlane(
            policies.retention, self.table, instances, self.clock, recorder.decision
        )
        for instance in instances:
            instance.scheduler.on_finished = self._call_completed
            instance.on_resync = self._announce_end
        self.sim_wall_s = 0.0
        self.interrupted = False

    # --- the loop ----------------------------------------------------------------------------------------

    def run(self, on_progress: Callable[[Simulation], None] | None = None) -> None:
        """Run until nothing is left to happen. `on_progress` is called after each instant."""
        started = time.perf_counter()
        for _ in range(self._lanes or 1):
            self._next_arrival()
        heap = self._heap
        while heap and not self.interrupted:
            if self._outdated(heap[0]):
                heapq.heappop(heap)
                continue
            now_s = self.clock.now_s = heap[0][0]
            self.clock.steps_started = False
            while heap and heap[0][0] == now_s:
                while heap and heap[0][0] == now_s:
                    event = heapq.heappop(heap)
                    _, kind, _, subject = event
                    if kind == STEP_END:
                        if not self._outdated(event):
                            self._step_ended(subject, now_s)
                    elif kind == CALL_RELEASE:
                        run, index, released_s = subject
                        self._release(run, index, released_s, now_s)
                    else:
                        self._program_arrived(subject, now_s)
                self._start_steps(now_s)
                self.clock.steps_started = True
            if on_progress is not None:
                on_progress(self)
        self._report_lost()
        self.sim_wall_s = time.perf_counter() - started

    def interrupt(self) -> None:
        """End the run after the present instant; what is unfinished then stays live."""
        self.interrupted = True

    def _push(self, time_s: float, kind: int, subject: Any) -> None:
        """Ties are broken by (time, kind, sequence)."""
        heapq.heappush(self._heap, (time_s, kind, self._sequence, subject))
        self._sequence += 1

    def _start_steps(self, now_s: float) -> None:
        """Instances that something happened to, and that are not stepping, start a step if they can."""
        if not self._ready:
            return
        ready, self._ready = self._ready, {}
        for index in sorted(ready):
            instance = ready[index]
            preempted = instance.start_step(now_s)
            if preempted is None:
                continue
            self._announce_end(instance)
            for request in preempted:
                self.recorder.decision(now_s, "preempt", call_of(request).key, index)

    def _announce_end(self, instance: Instance) -> None:
        """Bring the instance back when its step ends."""
        assert instance.step_end_s is not None
        self._step_ends[instance.index] = self._sequence
        self._push(instance.step_end_s, STEP_END, instance)

    def _outdated(self, event: tuple[float, int, int, Any]) -> bool:
        """Whether a step's end has been announced again since, for another time."""
        _, kind, sequence, subject = event
        return kind == STEP_END and self._step_ends[subject.index] != sequence

    def _wake(self, instance: Instance) -> None:
        if not instance.stepping:
            self._ready[instance.index] = instance

    # --- events ------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        """Bring in the next program: at its time, or now if a lane is free for it."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            time_s, program = arrival
            self._push(self.clock.now_s if self._lanes is not None else time_s, PROGRAM_ARRIVAL, program)

    def _program_arrived(self, program: Program, now_s: float) -> None:
        self.recorder.program_arrived()
        self._live_programs[self.orchestrator.start(program, now_s)] = None
        if self._lanes is None:
            self._next_arrival()

    def _release_at(self, time_s: float, run: ProgramRun, index: int) -> None:
        delay_s = self._client.delay_s(run.program.turns[index].prompt_tokens)
        self._push(time_s + delay_s, CALL_RELEASE, (run, index, time_s))

    def _release(self, run: ProgramRun, index: int, released_s: float, now_s: float) -> None:
        """A call's predecessors and their gaps are done, and its request is here: it enters the dispatch
        plane."""
        call = self.orchestrator.release(run, index, released_s)
        if call is None:
            self._end_program(run)
            return
        self.recorder.call_released()
        self._live_calls[call] = None
        self.retention.call_arrived(call, now_s)
        if call.gap is not None:
            self.table.close_gap(run.pcb, call.gap, now_s)
        reason = self.instances[0].refusal(call.turn.prompt_tokens, call.turn.output_tokens)
        if reason is not None:
            self._refuse(call, reason, now_s)
            return
        instance = self.dispatch.submit(call, now_s)
        if instance is not None:
            self._enqueue(call, instance)

    def _enqueue(self, call: Call, instance: Instance) -> None:
        assert call.request is not None
        instance.sync(self.clock)
        self.retention.call_placed(call, instance)
        call.run.pcb.instance = instance.index
        instance.add_request(call.request)
        self._wake(instance)

    def _refuse(self, call: Call, reason: str, now_s: float) -> None:
        del self._live_calls[call]
        self.recorder.call_refused(call, reason)
        self.recorder.decision(now_s, "refuse", call.key, None)
        self.retention.call_refused(call)
        self.orchestrator.fail(call, now_s)
        self._end_program(call.run)

    def _step_ended(self, instance: Instance, now_s: float) -> None:
        if instance.finish_step(now_s):
            self._retry_held(now_s)
        self._wake(instance)

    def _call_completed(self, request: Request) -> None:
        """A request has its last token, in batch order: retention first, then what follows from it."""
        now_s = self.clock.now_s
        call = call_of(request)
        run = call.run
        assert request.scheduled_s is not None
        assert call.instance is not None
        gap = self.table.call_completed(
            run.pcb,
            now_s,
            service_s=now_s - request.scheduled_s,
            context_tokens=request.num_tokens,
            tool_name=call.turn.tools[0].name if call.turn.tools else None,
        )
        self.retention.call_completed(call, gap, self.instances[call.instance], now_s)
        self.recorder.call_completed(call, request)
        del self._live_calls[call]
        call.request = None  # else the two would keep each other alive
        self.orchestrator.open_gap(call, gap)
        self.orchestrator.complete(call, now_s + self._client.response_s)
        self._end_program(run)

    def _end_program(self, run: ProgramRun) -> None:
        """If that was the program's last call: record it and let the next one in."""
        if run.completed_s is None or run not in self._live_programs:
            return
        del self._live_programs[run]
        self.recorder.program_ended(run)
        self.dispatch.program_ended(run)
        if self._lanes is not None:
            self._next_arrival()
        self._retry_held(self.clock.now_s)

    def _retry_held(self, now_s: float) -> None:
        if self.dispatch.held:
            for call, instance in self.dispatch.retry(now_s):
                self._enqueue(call, instance)

    # --- records -----------------------------------------------------------------------------------------

    def _report_lost(self) -> None:
        """Nothing is lost silently: what is still live at the end is named."""
        for call in self._live_calls:
            reason = "held by the admission policy" if call.request is None else "never scheduled"
            self.recorder.call_lost(call, "interrupted" if self.interrupted else reason)
        for run in self._live_programs:
            self.recorder.program_lost(run)
