"""The Retention Plane: asks the retention policy what KV survives a gap, and applies the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from agentservesim.clock import Clock
from agentservesim.engine.instance import Instance
from agentservesim.planes.guard import ask, reject
from agentservesim.planes.views import kv_view, pcb_view, protected_entry
from agentservesim.policies.interface import Evict, Protect, Release, RetentionPolicy
from agentservesim.policies.retention.lru import Lru
from agentservesim.programs.orchestrator import Call
from agentservesim.programs.pcb import Gap, ProgramTable

Log = Callable[..., None]
"""log(time_s, event, call key, instance, blocks, deadline_s, value), the last three optional"""


class RetentionPlane:
    """Applies protect, release and evict to the instances' pools, by the rules of the parking lot."""

    def __init__(
        self,
        policy: RetentionPolicy,
        table: ProgramTable,
        instances: Sequence[Instance],
        clock: Clock,
        log: Log,
    ) -> None:
        # Plain vLLM need not be asked.
        self._on_complete = None if isinstance(policy, Lru) else policy.on_call_complete
        self._on_arrival: Callable[..., Any] | None = getattr(policy, "on_call_arrival", None)
        self._table = table
        self._instances = instances
        self._clock = clock
        self._log = log
        for instance in instances:
            instance.scheduler.kv_cache.parking.listener = self._listener(instance.index)

    def call_completed(self, call: Call, gap: Gap, instance: Instance, now_s: float) -> None:
        """Decide about, and dispose of, the blocks of a completed call."""
        request = call.request
        assert request is not None
        kv_cache = instance.scheduler.kv_cache
        if self._on_complete is None:
            kv_cache.free(request)
            return
        pool = kv_cache.block_pool
        view = self._table.view(
            call.run.pcb,
            turn_index=call.ordinal,
            prompt_tokens=call.turn.prompt_tokens,
            gap=gap,
            kv_resident_tokens=request.table.num_hashed * pool.block_size,
            kv_deadline_s=None,
        )
        about = f"program {view.program_id}, turn {call.turn.turn_id}"
        decision = ask(self._on_complete, now_s, about, view, now_s, kv_view(instance, self._clock))
        if isinstance(decision, Protect):
            self._check_deadline(self._on_complete, decision, now_s, about)
            if decision.deadline_s >= now_s:
                blocks = kv_cache.parking.park(call.key, request.table, decision.deadline_s, decision.value)
                self._log(
                    now_s, "protect", call.key, instance.index, blocks, decision.deadline_s, decision.value
                )
            kv_cache.free(request)
        elif isinstance(decision, Evict):
            self._log(now_s, "evict", call.key, instance.index, request.table.num_hashed)
            pool.evict(request.table)
        elif decision is None or isinstance(decision, Release):
            kv_cache.free(request)
        else:
            raise reject(self._on_complete, decision, "Protect, Release, Evict or None", now_s, about)

    def call_arrived(self, call: Call, now_s: float) -> None:
        """The program's next call has arrived, its gap not yet closed: the policy may release what is
        protected for it, or give it a new deadline."""
        if self._on_arrival is None or call.gap is None:
            return
        placed = call.run.pcb.instance
        assert placed is not None
        instance = self._instances[placed]
        view = pcb_view(call, self._table, self._instances, self._clock)
        about = f"program {view.program_id}, turn {call.turn.turn_id}"
        decision = ask(self._on_arrival, now_s, about, view, now_s, kv_view(instance, self._clock))
        entry = protected_entry(call, self._instances)
        parking = instance.scheduler.kv_cache.parking
        if decision is None or (entry is None and isinstance(decision, Protect | Release)):
            return
        if isinstance(decision, Release):
            assert entry is not None
            parking.release(entry.key)
        elif isinstance(decision, Protect):
            assert entry is not None
            self._check_deadline(self._on_arrival, decision, now_s, about)
            parking.redate(entry.key, decision.deadline_s, decision.value)
        else:
            raise reject(self._on_arrival, decision, "Protect, Release or None", now_s, about)

    def call_placed(self, call: Call, instance: Instance) -> None:
        """A call placed elsewhere can take nothing over: what waits for it is released where it lies."""
        if call.run.pcb.instance != instance.index:
            self._release_for(call)

    def call_refused(self, call: Call) -> None:
        """Nobody will take over what waits for a refused call."""
        self._release_for(call)

    def _release_for(self, call: Call) -> None:
        placed = call.run.pcb.instance
        if placed is not None:
            for key in call.parent_keys():
                self._instances[placed].scheduler.kv_cache.parking.release(key)

    def _listener(self, index: int) -> Callable[[str, Hashable, int], None]:
        """Logs what becomes of an instance's parked entries."""
        return lambda event, key, blocks: self._log(self._clock.now_s, event, key, index, blocks)

    @staticmethod
    def _check_deadline(method: Callable[..., Any], decision: Protect, now_s: float, about: str) -> None:
        figures = (decision.deadline_s, decision.value)
        if not all(isinstance(figure, int | float) and not math.isnan(figure) for figure in figures):
            raise reject(method, decision, "a deadline and a value that are numbers", now_s, about)
