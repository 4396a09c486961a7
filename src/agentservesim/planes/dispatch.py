"""The Dispatch Plane: decides when a ready call enters an instance's queue, which one, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentservesim.clock import Clock
from agentservesim.engine.instance import Instance
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import WaitingQueue
from agentservesim.planes.guard import ask, reject, whole_number
from agentservesim.planes.residency_order import ResidencyOrder
from agentservesim.planes.retention import Log
from agentservesim.planes.views import InstanceViews, pcb_view
from agentservesim.policies.admission.none import AdmitAll
from agentservesim.policies.interface import PCB, QueueView, RunningCall
from agentservesim.policies.scheduling.fcfs import Fcfs
from agentservesim.programs.orchestrator import Call, ProgramRun, call_of
from agentservesim.programs.pcb import ProgramTable


class DispatchPlane:
    """Asks the admission, routing and scheduling policies about each ready call, in that order.

    A call that is not admitted is held, and asked about again, in order of release, whenever `retry` is
    called. Policies are asked through `getattr`: every hook but the protocol's one method is optional.
    """

    def __init__(
        self,
        scheduling: Any,
        admission: Any,
        routing: Any,
        table: ProgramTable,
        instances: Sequence[Instance],
        clock: Clock,
        log: Log,
    ) -> None:
        self._clock = clock
        # Policies that leave everything to the engine need not be asked.
        self._priority: Callable[..., Any] | None = (
            None if isinstance(scheduling, Fcfs) else scheduling.priority
        )
        self._admits: list[Callable[..., Any]] = [
            policy.admit
            for policy in (admission, scheduling)
            if hasattr(policy, "admit") and not isinstance(policy, AdmitAll)
        ]
        self._route: Callable[..., Any] = routing.route
        self._table = table
        self._instances = instances
        self._views = InstanceViews(instances, clock)
        # Our own routers look at one or two instances and may do so lazily; what is handed to others holds
        # nothing but frozen views.
        self._lazy_views = type(routing).__module__.startswith("agentservesim.policies.")
        self._log = log
        self._held: list[Call] = []
        self._admitted: dict[ProgramRun, int] = {}
        self._capacity_tokens = sum(instance.capacity_tokens for instance in instances)
        self._hook(scheduling)

    @property
    def held(self) -> int:
        """Calls that wait for admission."""
        return len(self._held)

    def submit(self, call: Call, now_s: float) -> Instance | None:
        """A call is ready: the instance it goes to, or None while it is held."""
        if not self._admit(call, now_s):
            self._held.append(call)
            self._log(now_s, "hold", call.key, None)
            return None
        return self._place(call, now_s)

    def retry(self, now_s: float) -> list[tuple[Call, Instance]]:
        """Ask again for the held calls; returns those now placed, with their instances."""
        placed = []
        held, self._held = self._held, []
        for position, call in enumerate(held):
            if self._admit(call, now_s, held=len(held) - position - 1 + len(self._held)):
                placed.append((call, self._place(call, now_s)))
            else:
                self._held.append(call)
        return placed

    def program_ended(self, run: ProgramRun) -> None:
        """A program is complete or has failed: it no longer counts as admitted."""
        self._admitted.pop(run, None)

    def _admit(self, call: Call, now_s: float, held: int | None = None) -> bool:
        if not self._admits:
            return True
        pcb = pcb_view(call, self._table, self._instances, self._clock)
        about = _about(call)
        for admit in self._admits:
            answer = ask(admit, now_s, about, pcb, now_s, self._queue_view(call, held))
            if not isinstance(answer, bool):
                raise reject(admit, answer, "True or False", now_s, about)
            if not answer:
                return False
        self._count_admitted(call)
        return True

    def _count_admitted(self, call: Call) -> None:
        self._admitted[call.run] = max(self._admitted.get(call.run, 0), call.turn.prompt_tokens)

    def _queue_view(self, call: Call, held: int | None) -> QueueView:
        contexts = (max(run.pcb.context_tokens, prompt) for run, prompt in self._admitted.items())
        return QueueView(
            admitted_programs=len(self._admitted),
            admitted_context_tokens=sum(contexts),
            program_admitted=call.run in self._admitted,
            capacity_tokens=self._capacity_tokens,
            held_calls=len(self._held) if held is None else held,
        )

    def _place(self, call: Call, now_s: float) -> Instance:
        if len(self._instances) == 1 and self._lazy_views and self._priority is None:
            return self._placed(call, 0, 0, now_s)  # there is nothing to decide
        pcb = pcb_view(call, self._table, self._instances, self._clock)
        about = _about(call)
        views = self._views if self._lazy_views else tuple(self._views)
        answer = ask(self._route, now_s, about, pcb, now_s, views)
        index = whole_number(answer)
        if index is None or not 0 <= index < len(self._instances):
            expected = f"an instance from 0 to {len(self._instances) - 1}"
            raise reject(self._route, answer, expected, now_s, about)
        return self._placed(call, index, self._ask_priority(pcb, now_s, about), now_s)

    def _placed(self, call: Call, index: int, priority: int, now_s: float) -> Instance:
        call.instance = index
        instance = self._instances[index]
        call.request = Request(
            call.sequence,
            call.content,
            call.turn.prompt_tokens,
            min(call.turn.output_tokens, instance.scheduler.max_model_len - call.turn.prompt_tokens),
            now_s,
            priority,
            call.parent_keys(),
            call,
        )
        return instance

    def _ask_priority(self, pcb: PCB, now_s: float, about: str) -> int:
        if self._priority is None:
            return 0
        answer = ask(self._priority, now_s, about, pcb, now_s)
        if answer is None:
            return 0
        priority = whole_number(answer)
        if priority is None:
            raise reject(self._priority, answer, "an int or None", now_s, about)
        return priority

    # --- hooks in the scheduler --------------------------------------------------------------------------

    def _hook(self, scheduling: Any) -> None:
        """Let a scheduling policy reorder waiting calls (dynamic) and choose victims, where it wants to."""
        for instance in self._instances:
            scheduler = instance.scheduler
            if getattr(scheduling, "follows_residency", False):
                order = ResidencyOrder(scheduler.block_pool, self._priority_now)
                scheduler.reprioritize, scheduler.order_holds_for = order, order.holds_for
            elif getattr(scheduling, "dynamic", False):
                scheduler.reprioritize = self._reprioritize
            if hasattr(scheduling, "victim"):
                scheduler.choose_victim = lambda running, ask_victim=scheduling.victim: self._victim(
                    ask_victim, running
                )

    def _reprioritize(self, waiting: WaitingQueue) -> bool:
        for request in waiting:
            request.priority = self._priority_now(call_of(request))
        return True

    def _priority_now(self, call: Call) -> int:
        pcb = pcb_view(call, self._table, self._instances, self._clock)
        return self._ask_priority(pcb, self._clock.now_s, _about(call))

    def _victim(self, victim: Callable[..., Any], running: list[Request]) -> Request:
        now_s = self._clock.now_s
        candidates = tuple(self._running_call(request) for request in running)
        answer = ask(victim, now_s, f"{len(running)} running calls", candidates, now_s)
        index = whole_number(answer)
        if index is None or not 0 <= index < len(running):
            raise reject(victim, answer, f"an index from 0 to {len(running) - 1}", now_s, "preemption")
        return running[index]

    def _running_call(self, request: Request) -> RunningCall:
        call = call_of(request)
        assert call.instance is not None
        block_size = self._instances[call.instance].scheduler.block_pool.block_size
        return RunningCall(
            pcb=pcb_view(call, self._table, self._instances, self._clock),
            priority=request.priority,
            submitted_s=request.arrival_s,
            computed_tokens=request.num_computed_tokens,
            output_tokens=request.num_output_tokens,
            kv_tokens=request.table.num_blocks * block_size,
        )


def _about(call: Call) -> str:
    return f"program {call.run.program.program_id}, turn {call.turn.turn_id}"
