"""The planes of the simulator over one vLLM engine, with plain vLLM as what is left when a policy fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentservesim.clock import Clock
from agentservesim.engine.parking import ParkingLot
from agentservesim.live.programs import LiveCall
from agentservesim.live.supervision import Supervisor
from agentservesim.planes.dispatch import DispatchPlane
from agentservesim.planes.views import pcb_view
from agentservesim.policies.interface import PrefillLine, RunningCall
from agentservesim.programs.orchestrator import Call


class NoPrefillLine:
    """Stands where a view's prefill line would be, on an engine whose line nobody has given."""

    def __getattr__(self, name: str) -> float:
        raise LookupError(
            f"kv.prefill.{name} is not known of this engine; give prefill_line: "
            '{"slope_s_per_token": …, "base_s": …, "knee_tokens": …}'
        )


class KVCacheView:
    """vLLM's KV cache as the planes see one: the pool, its parking lot, and how blocks are given back."""

    def __init__(self, block_pool: Any) -> None:
        self.block_pool = block_pool
        self.parking: ParkingLot = block_pool.parking

    def free(self, finished: Any) -> None:
        finished.table.give_back()


class SchedulerView:
    """vLLM's scheduler as the planes see one."""

    def __init__(self, vllm_scheduler: Any) -> None:
        self._vllm = vllm_scheduler
        self.block_pool = vllm_scheduler.kv_cache_manager.block_pool
        self.kv_cache = KVCacheView(self.block_pool)
        self.max_num_seqs = vllm_scheduler.max_num_active_reqs
        self.max_model_len = vllm_scheduler.max_model_len

    @property
    def running(self) -> Any:
        return self._vllm.running

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens of all running requests together."""
        return sum(request.num_computed_tokens for request in self.running)

    def kv_tokens(self, request: Any) -> int:
        """Tokens that the request's blocks hold."""
        blocks = self._vllm.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        return int(len(blocks) * self.block_pool.block_size)

    @property
    def waiting(self) -> Any:
        return self._vllm.waiting


class LiveInstance:
    """One vLLM engine as the planes see an instance. Its state is always the present one.

    last_batch_tokens   tokens computed by the latest step
    """

    index = 0

    def __init__(self, scheduler: SchedulerView, prefill: PrefillLine | None) -> None:
        self.scheduler = scheduler
        self.last_batch_tokens = 0
        self.step_time = self
        self._prefill: Any = prefill or NoPrefillLine()

    @property
    def capacity_tokens(self) -> int:
        pool = self.scheduler.block_pool
        return int(pool.num_usable_blocks * pool.block_size)

    def num_used_blocks(self, clock: Clock) -> int:
        return int(self.scheduler.block_pool.num_used_blocks)

    def sync(self, clock: Clock) -> None:
        pass

    def prefill_line(self) -> Any:
        return self._prefill


class FinishedCall:
    """A call's request, finished, with the blocks it still holds."""

    def __init__(self, table: Any) -> None:
        self.table = table


class LiveDispatch(DispatchPlane):
    """Admission, order and victims of one engine's calls. Where a policy fails, the call is admitted, has no
    priority of its own, and vLLM chooses whom it preempts."""

    def __init__(self, supervisor: Supervisor, *arguments: Any) -> None:
        self._supervisor = supervisor
        self._choose: Any = None
        self.dynamic = False
        super().__init__(*arguments)

    @property
    def orders(self) -> bool:
        """Whether the scheduling policy gives priorities at all."""
        return self._priority is not None

    @property
    def chooses_victims(self) -> bool:
        return self._choose is not None

    @property
    def admitted_programs(self) -> int:
        """Programs with an admitted call, not yet ended."""
        return len(self._admitted)

    def withdraw(self, call: LiveCall) -> bool:
        """Take a call back, if it is held."""
        if call not in self._held:
            return False
        self._held.remove(call)
        return True

    def force(self) -> LiveCall:
        """Admit the call that has been held longest, whatever the admission policy says."""
        call = self._held.pop(0)
        assert isinstance(call, LiveCall)
        self._count_admitted(call)
        self._place(call, self._clock.now_s)
        return call

    def reprioritize(self, calls: Sequence[LiveCall]) -> None:
        """Ask a dynamic policy again for each of these calls, which wait in this order."""
        for call in calls:
            call.priority = self._priority_now(call)

    def victim(self, running: Any) -> Any:
        """Of the running calls the one that the scheduling policy preempts; None: vLLM is to choose."""
        return self._supervisor.attempt(self._victim, None, self._choose, running)

    # --- what the simulator does with its own requests ---------------------------------------------------

    def _admit(self, call: Call, now_s: float, held: int | None = None) -> bool:
        admit = super()._admit
        outcome = self._supervisor.attempt(admit, None, call, now_s, held)
        if outcome is None:
            self._count_admitted(call)
            return True
        return outcome

    def _placed(self, call: Call, index: int, priority: int, now_s: float) -> Any:
        assert isinstance(call, LiveCall)
        call.instance = index
        call.priority = priority
        return self._instances[index]

    def _ask_priority(self, pcb: Any, now_s: float, about: str) -> int:
        return self._supervisor.attempt(super()._ask_priority, 0, pcb, now_s, about)

    def _hook(self, scheduling: Any) -> None:
        self.dynamic = bool(getattr(scheduling, "dynamic", False))
        self._choose = getattr(scheduling, "victim", None)

    def _running_call(self, call: Any) -> RunningCall:
        request = call.vllm_request
        scheduler: Any = self._instances[0].scheduler
        return RunningCall(
            pcb=pcb_view(call, self._table, self._instances, self._clock),
            priority=request.priority,
            submitted_s=call.released_s,
            computed_tokens=request.num_computed_tokens,
            output_tokens=request.num_output_tokens,
            kv_tokens=scheduler.kv_tokens(request),
        )
