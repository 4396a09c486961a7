"""The scheduler classes that stock vLLM loads, so that its engine runs our policy objects.

    vllm serve MODEL --scheduler-cls agentservesim.live.vllm_plugin.LiveScheduler …        synchronous
    vllm serve MODEL --scheduler-cls agentservesim.live.vllm_plugin.LiveAsyncScheduler …   asynchronous

Nothing of vLLM's decisions is written anew: each method here lets vLLM's own do its work, and asks the
planes before or after. Requests without a program, and everything a failing policy would have said, are left
to plain vLLM.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import vllm

from agentservesim.live.versions import check_vllm

check_vllm(vllm.__version__)  # before what another version may not have

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from agentservesim.clock import Clock
from agentservesim.errors import InputError
from agentservesim.live.decision_log import DecisionLog
from agentservesim.live.identity import Identity, IdentityError, identity_of
from agentservesim.live.planes import FinishedCall, LiveDispatch, LiveInstance, SchedulerView
from agentservesim.live.programs import LiveCall, LivePrograms
from agentservesim.live.recorder import StepRecorder, batch_shape
from agentservesim.live.settings import LiveSettings, live_settings
from agentservesim.live.supervision import Supervisor, supervised
from agentservesim.live.vllm_pool import HeldBlocks, ParkingBlockPool, ProgramKVCacheManager
from agentservesim.live.vllm_queue import DynamicQueue
from agentservesim.planes.retention import RetentionPlane
from agentservesim.policies.interface import PrefillLine
from agentservesim.policies.routing.round_robin import RoundRobin
from agentservesim.policies.scheduling.fcfs import Fcfs

logger = init_logger("vllm.agentservesim")

COUNTS_EVERY_S = 2.0
COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class LiveScheduler(Scheduler):
    """vLLM's Scheduler with our planes.

    now   seconds of the engine's clock; a test may put another in its place
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = live_settings(vllm_config.additional_config)
        policies = {
            axis: supervised(policy, settings.policy_timeout_s)
            for axis, policy in settings.policies().items()
        }
        if not isinstance(policies["scheduling"], Fcfs):
            vllm_config.scheduler_config.policy = "priority"
        super().__init__(vllm_config, *args, **kwargs)
        _check_supported(self)
        self._started_s = time.monotonic()
        self.now: Callable[[], float] = lambda: time.monotonic() - self._started_s
        self.clock = Clock()
        self.supervisor = Supervisor(logger.warning)
        self.decisions = DecisionLog(settings.decision_log, self.supervisor.counts)
        self.recorder = StepRecorder(settings.step_log) if settings.step_log is not None else None
        self._settings = settings
        self._calls: dict[str, LiveCall] = {}
        self._finished: list[Request] | None = None
        self._marked: tuple[Request, int] | None = None
        self._counts_written_s = 0.0
        self._build_planes(settings, policies)
        logger.info(
            "AgentServeSim: retention %s, scheduling %s, admission %s",
            *(getattr(settings, axis) for axis in ("retention", "scheduling", "admission")),
        )

    def _build_planes(self, settings: LiveSettings, policies: dict[str, Any]) -> None:
        pool = ParkingBlockPool.adopt(self.kv_cache_manager.block_pool, self.block_size)
        ProgramKVCacheManager.adopt(self.kv_cache_manager, self._admitted, self._short)
        line = settings.prefill_line
        self.instance = LiveInstance(
            SchedulerView(self), PrefillLine(**line.model_dump()) if line is not None else None
        )
        self.parking = pool.parking
        self.programs = LivePrograms(settings.program_idle_s)
        instances: Any = [self.instance]
        self.dispatch = LiveDispatch(
            self.supervisor,
            policies["scheduling"],
            policies["admission"],
            RoundRobin(),
            self.programs.table,
            instances,
            self.clock,
            self.decisions,
        )
        self.retention = RetentionPlane(
            policies["retention"], self.programs.table, instances, self.clock, self.decisions
        )
        if self.dispatch.dynamic:
            self.waiting = DynamicQueue(self._reprioritize)

    # --- a request arrives -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        identity = self._identity(request)
        if identity is None or request.request_id in self.requests:
            super().add_request(request)
            return
        now_s = self._tick()
        self._forget_idle(now_s)
        call = self.programs.arrived(identity, request, now_s)
        self._calls[request.request_id] = call
        self.supervisor.attempt(self.retention.call_arrived, None, call, now_s)
        if call.gap is not None:
            self.programs.table.close_gap(call.run.pcb, call.gap, now_s)
        if self.dispatch.submit(call, now_s) is not None:
            self._enqueue(call)
        else:
            self._release_if_idle()

    def _identity(self, request: Request) -> Identity | None:
        params = request.sampling_params
        try:
            return identity_of(params.extra_args) if params is not None else None
        except IdentityError as error:
            self.supervisor.report(
                "bad_identities", f"request {request.request_id}: {error}; served as plain"
            )
            return None

    def _enqueue(self, call: LiveCall) -> None:
        call.run.pcb.instance = 0
        if self.dispatch.orders:
            call.vllm_request.priority = call.priority
        super().add_request(call.vllm_request)

    # --- a step ------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now_s = self._tick()
        self.parking.expire(now_s)
        if self.dispatch.dynamic:
            self.waiting.begin_step()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self.instance.last_batch_tokens = output.total_num_scheduled_tokens
        if self.recorder is not None:
            self._record(self.recorder, output, now_s)
        return output

    def _record(self, recorder: StepRecorder, output: Any, now_s: float) -> None:
        running, waiting = self.get_request_counts()
        pool = self.kv_cache_manager.block_pool
        recorder.scheduled(
            id(output),
            *batch_shape(output.num_scheduled_tokens, self.requests),
            sorted(output.preempted_req_ids or ()),
            running,
            waiting,
            pool.get_num_free_blocks(),
            pool.num_parked,
            now_s,
        )

    def _admitted(self, request: Request) -> None:
        """vLLM has just admitted a request: it takes over what was protected for it."""
        call = self._calls.get(request.request_id)
        if call is None or call.scheduled_s is not None:
            return
        call.scheduled_s = self.clock.now_s
        for key in call.parent_keys():
            self.parking.release(key, "takeover")

    def _reprioritize(self, waiting: Sequence[Request]) -> None:
        calls = [call for request in waiting if (call := self._calls.get(request.request_id)) is not None]
        self.dispatch.reprioritize(calls)
        for call in calls:
            call.vllm_request.priority = call.priority

    def _short(self) -> None:
        """vLLM is about to preempt the running request with the highest (priority, arrival time). If the
        policy names another, that one is marked with the highest priority until it has been preempted."""
        if not self.dispatch.chooses_victims:
            return
        running = [call for request in self.running if (call := self._calls.get(request.request_id))]
        if len(running) < len(self.running):
            return  # requests without a program run too: left to vLLM
        victim = self.dispatch.victim(running)
        if victim is not None:
            self._marked = victim.vllm_request, victim.vllm_request.priority
            victim.vllm_request.priority = sys.maxsize

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._marked is not None:
            marked, priority = self._marked
            self._marked = None
            marked.priority = priority
        super()._preempt_request(request, *args, **kwargs)
        call = self._calls.get(request.request_id)
        if call is not None:
            self.decisions(self.clock.now_s, "preempt", call.key, 0)

    # --- a request ends ----------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM frees a request as soon as it has found its last token. Here all of a step's are disposed of
        after it, in the same order, so that a policy sees them all gone from the running list."""
        self._tick()
        self._finished = []
        try:
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        finally:
            finished, self._finished = self._finished, None
        for request in finished:
            self._dispose(request)
        if finished:
            self._retry_held()
        if self.recorder is not None:
            self.recorder.updated(id(scheduler_output), sum(self.get_request_counts()), self.clock.now_s)
        return outputs

    def _free_blocks(self, request: Request) -> None:
        if self._finished is not None:
            self._finished.append(request)
        else:
            self._tick()
            self._dispose(request)
            self._retry_held()

    def _dispose(self, request: Request) -> None:
        call = self._calls.pop(request.request_id, None)
        if call is None:
            super()._free_blocks(request)
        elif request.status in COMPLETED and call.scheduled_s is not None:
            self._completed(call)
        else:
            self._aborted(call)

    def _completed(self, call: LiveCall) -> None:
        """A call has its last token: retention first, then what follows from it."""
        now_s = self.clock.now_s
        request = call.vllm_request
        gap = self.programs.completed(call, now_s)
        self.parking.release(
            call.key
        )  # a repeated turn id: the earlier call's blocks are no longer asked for
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        hashed = [block for block in blocks if block.block_hash is not None]
        held = HeldBlocks(hashed, lambda: super(LiveScheduler, self)._free_blocks(request))
        call.request = FinishedCall(held)
        self.supervisor.attempt(self.retention.call_completed, None, call, gap, self.instance, now_s)
        held.give_back()  # does nothing unless the policy has failed
        call.request = None
        self._end_if_done(call)

    def _aborted(self, call: LiveCall) -> None:
        """A client has gone, or the request failed: nobody takes over what was protected for it."""
        super()._free_blocks(call.vllm_request)
        self.supervisor.counts["calls_aborted"] += 1
        self.retention.call_refused(call)
        self.programs.aborted(call, self.clock.now_s)
        self._end_if_done(call)

    def _end_if_done(self, call: LiveCall) -> None:
        if call.run.ending and call.run.in_flight == 0:
            self.programs.end(call.run)
            self.dispatch.program_ended(call.run)
            self._retry_held()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """A held request is handed to vLLM first, which then ends it as it ends any other."""
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        ids = list(self._calls if request_ids is None else request_ids)
        for request_id in ids:
            call = self._calls.get(request_id)
            if call is not None and self.dispatch.withdraw(call):
                super().add_request(call.vllm_request)
        return super().finish_requests(None if request_ids is None else ids, finished_status)

    # --- held calls --------------------------------------------------------------------------------------

    def _retry_held(self) -> None:
        if self.dispatch.held:
            for call, _ in self.dispatch.retry(self.clock.now_s):
                assert isinstance(call, LiveCall)
                self._enqueue(call)
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        """With no program admitted nothing will end that a held call could wait for."""
        if self.dispatch.held and not self.dispatch.admitted_programs:
            self.supervisor.report("calls_forced", "a call is held while no program runs: it is let in")
            self._enqueue(self.dispatch.force())

    def _forget_idle(self, now_s: float) -> None:
        for program in self.programs.idle(now_s):
            for turn_id in program.gaps_after:
                self.parking.release((program.program.program_id, turn_id))
            self.programs.end(program)
            self.dispatch.program_ended(program)
            self._retry_held()

    # --- the rest ----------------------------------------------------------------------------------------

    def _tick(self) -> float:
        now_s = self.clock.now_s = self.now()
        if self._settings.counts is not None and now_s - self._counts_written_s >= COUNTS_EVERY_S:
            self._write_counts(now_s)
        return now_s

    def counts(self) -> dict[str, int]:
        """What happened how often; incidents that never happened are not listed."""
        return {
            **self.supervisor.counts,
            "programs_live": len(self.programs),
            "calls_live": len(self._calls),
            "calls_held": self.dispatch.held,
            "parked_blocks": self.kv_cache_manager.block_pool.num_parked,
            "protected_reclaims": self.parking.num_reclaimed,
            "steps_not_logged": self.recorder.lost if self.recorder is not None else 0,
        }

    def _write_counts(self, now_s: float) -> None:
        self._counts_written_s = now_s
        assert self._settings.counts is not None
        try:
            Path(self._settings.counts).write_text(json.dumps(self.counts()) + "\n", encoding="utf-8")
        except OSError as error:
            self.supervisor.report("counts_not_written", f"counts {self._settings.counts}: {error}")

    def shutdown(self) -> None:
        if self._settings.counts is not None:
            self._write_counts(self.now())
        if self.recorder is not None:
            self.recorder.close(self.now())
        self.decisions.close()
        super().shutdown()


def _check_supported(scheduler: Any) -> None:
    """The rules were compared with vLLM's for one full-attention group and no KV connector."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise InputError(
            f"this model's KV cache is {kinds or 'empty'}; the plug-in supports one group of full attention"
        )
    if scheduler.connector is not None:
        raise InputError("a KV connector is configured (--kv-transfer-config); the plug-in supports none")


class LiveAsyncScheduler(LiveScheduler, AsyncScheduler):
    """vLLM's AsyncScheduler with our planes: for engines that schedule asynchronously, the GPU default."""
