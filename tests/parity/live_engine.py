"""Real vLLM with the plug-in, in the place of the simulated engine, in the simulator's own event loop.

The loop's planes are left without policies: all decisions are taken by the plug-in, inside vLLM. Time is
virtual. A step lasts what it is said to last, so that a run can be repeated by the simulator.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest

from agentservesim.engine.async_instance import AsyncInstance
from agentservesim.engine.instance import Instance
from agentservesim.engine.parking import ParkingLot
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import SchedulerOutput
from agentservesim.live.identity import identity_of_call
from agentservesim.live.tokens import TokenBook
from agentservesim.live.vllm_plugin import LiveAsyncScheduler, LiveScheduler
from agentservesim.policies import registry
from agentservesim.policies.interface import PrefillLine
from agentservesim.programs.orchestrator import call_of
from agentservesim.results.recorder import Recorder
from agentservesim.simulation import Policies, Simulation
from agentservesim.step_time.interface import StepCost

from .loads import Engine
from .real import HASH, make_scheduler

VOCABULARY = 2048
PREFILL = PrefillLine(slope_s_per_token=0.0002, base_s=0.004, knee_tokens=32)
PLAIN = {"retention": "lru", "scheduling": "fcfs", "admission": "none", "routing": "round-robin"}


class StepRow(msgspec.Struct, frozen=True):
    """What one schedule() decided, and what finished before the next. Calls are named by their keys."""

    time_s: float
    batch: tuple[tuple[tuple[str, str], int], ...]
    hits: tuple[tuple[tuple[str, str], int], ...]
    preempted: tuple[tuple[str, str], ...]
    free_blocks: int
    parked_blocks: int
    finished: tuple[tuple[str, str], ...] = ()


@dataclass
class Run:
    """One run: its steps, the seconds of those that computed something, its decisions, and its calls."""

    steps: list[StepRow] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    calls: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Steps:
    """A step-time model that gives the seconds of each step from outside, in the order of the steps."""

    backend = source = "steps"
    notice = None
    idle_watts = 0.0
    uses_spread = False

    def __init__(self, next_seconds: Callable[[], float]) -> None:
        self._next_seconds = next_seconds

    def step(self, *shape: Any) -> StepCost:
        return StepCost(self._next_seconds(), 0.0, True)

    def prefill_line(self) -> PrefillLine:
        return PREFILL


class Watcher(Recorder):
    """A recorder that also keeps decisions and calls."""

    def __init__(self, run: Run) -> None:
        super().__init__(keep_tables=False)
        self._run = run

    def decision(self, *row: Any) -> None:
        self._run.decisions.append(row)

    def call_completed(self, call: Any, request: Request) -> None:
        super().call_completed(call, request)
        self._run.calls[call.key] = (
            call.released_s,
            request.scheduled_s,
            request.first_token_s,
            request.completed_s,
            request.first_hit_tokens,
            request.num_preemptions,
        )


class VllmEngine:
    """vLLM's scheduler with the interface of engine.scheduler.Scheduler, and no policy of ours around it.

    execute(output)   runs the step: (seconds, the model runner's output)
    """

    def __init__(
        self, scheduler: Any, run: Run, execute: Callable[[Any], tuple[float, ModelRunnerOutput]]
    ) -> None:
        self.vllm = scheduler
        self.vllm.now = lambda: self._now_s
        self._now_s = 0.0
        self._execute = execute
        self._run = run
        self._requests: dict[str, Request] = {}
        self._last_seconds = 0.0
        self._preempted: list[Request] = []
        self._steps: dict[int, tuple[Any, ModelRunnerOutput, int]] = {}
        init_none_hash(get_hash_fn_by_name(HASH))
        self._hasher = get_request_block_hasher(scheduler.block_size, get_hash_fn_by_name(HASH))
        self.book = TokenBook(0, VOCABULARY)
        self.max_model_len = scheduler.max_model_len
        self.max_num_seqs = scheduler.max_num_running_reqs
        self.on_finished: Callable[[Request], None] = lambda request: None
        pool = SimpleNamespace(
            num_usable_blocks=scheduler.kv_cache_config.num_blocks - 1,
            block_size=scheduler.block_size,
            num_unhashed_free=0,
            num_hashed_free=0,
            num_parked=0,
        )
        self.block_pool = pool
        self.kv_cache = SimpleNamespace(block_pool=pool, parking=ParkingLot(pool), free=lambda request: None)
        self._wrap()

    @property
    def running(self) -> list[Any]:
        return self.vllm.running

    @property
    def waiting(self) -> Any:
        return self.vllm.waiting

    def step_seconds(self) -> float:
        return self._last_seconds

    def add_request(self, request: Request) -> None:
        call = call_of(request)
        name = f"{call.sequence:08d}"
        self._requests[name] = request
        self._now_s = request.arrival_s
        self.vllm.add_request(
            VllmRequest(
                request_id=name,
                prompt_token_ids=self.book.prompt(call),
                sampling_params=SamplingParams(
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    temperature=0,
                    extra_args=msgspec.to_builtins(identity_of_call(call)),
                ),
                pooling_params=None,
                arrival_time=request.arrival_s,
                block_hasher=self._hasher,
            )
        )

    def schedule(self, now_s: float) -> SchedulerOutput:
        self._now_s = now_s
        output = SchedulerOutput()
        if not self.vllm.get_num_unfinished_requests():
            return output
        running = {request.request_id for request in self.vllm.running}
        self._preempted = []
        real = self.vllm.schedule()
        for name, tokens in real.num_scheduled_tokens.items():
            output.num_scheduled_tokens[self._requests[name]] = tokens
        hits = []
        for name, tokens in real.num_scheduled_tokens.items():
            if name not in running:
                hit = self.vllm.requests[name].num_computed_tokens - tokens
                request = self._requests[name]
                hits.append((call_of(request).key, hit))
                if request.first_hit_tokens is None:
                    request.first_hit_tokens = hit
                    request.scheduled_s = now_s
        output.preempted = list(self._preempted)
        pool = self.vllm.kv_cache_manager.block_pool
        self._run.steps.append(
            StepRow(
                time_s=now_s,
                batch=tuple((call_of(r).key, n) for r, n in output.num_scheduled_tokens.items()),
                hits=tuple(hits),
                preempted=tuple(call_of(request).key for request in output.preempted),
                free_blocks=pool.get_num_free_blocks(),
                parked_blocks=pool.num_parked,
            )
        )
        if real.num_scheduled_tokens:
            seconds, answer = self._execute(real)
            self._last_seconds = seconds
            self._run.seconds.append(seconds)
            self._steps[id(output)] = real, answer, len(self._run.steps) - 1
        else:
            _, answer = self._execute(real)
            self.vllm.update_from_output(real, answer)
        return output

    def update_from_output(self, output: SchedulerOutput, now_s: float) -> list[Request]:
        self._now_s = now_s
        real, answer, _ = self._steps.pop(id(output))
        before = {
            name: self.vllm.requests[name] for name in real.num_scheduled_tokens if name in self.vllm.requests
        }
        self.vllm.update_from_output(real, answer)
        finished = []
        for name, vllm_request in before.items():
            request = self._requests[name]
            request.num_tokens = vllm_request.num_tokens
            if vllm_request.num_output_tokens and request.first_token_s is None:
                request.first_token_s = now_s
            if vllm_request.is_finished():
                request.completed_s = now_s
                request.num_preemptions = vllm_request.num_preemptions
                finished.append(request)
                call = call_of(request)
                self.book.completed(call, list(vllm_request.output_token_ids))
                del self._requests[name]
        last = self._run.steps[-1]
        keys = tuple(call_of(request).key for request in finished)
        self._run.steps[-1] = msgspec.structs.replace(last, finished=(*last.finished, *keys))
        for request in finished:
            self.on_finished(request)
        return finished

    def _wrap(self) -> None:
        """vLLM's output names the preempted as a set, and the order matters here."""
        preempt = self.vllm._preempt_request

        def noted(request: VllmRequest, *args: Any, **kwargs: Any) -> Any:
            self._preempted.append(self._requests[request.request_id])
            return preempt(request, *args, **kwargs)

        self.vllm._preempt_request = noted


def make_live_scheduler(engine: Engine, chosen: dict[str, Any], decision_log: Path) -> LiveScheduler:
    """The plug-in's scheduler, with the settings `chosen`, for an engine without a model."""
    settings = {**chosen, "decision_log": str(decision_log), "prefill_line": msgspec.to_builtins(PREFILL)}
    kind = LiveAsyncScheduler if engine.async_scheduling else LiveScheduler
    return make_scheduler(engine, kind, {"agentservesim": settings})


def blocks_missing(scheduler: Any) -> int:
    """Blocks that are neither free, nor parked, nor a request's: none, unless some were lost."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.parking.release_all()
    assert pool.num_parked == 0
    held = {
        block.block_id
        for request in scheduler.requests
        for block in scheduler.kv_cache_manager.get_blocks(request).blocks[0]
    }
    return int(pool.num_gpu_blocks - 1 - pool.free_block_queue.num_free_blocks - len(held))


def made_up_tokens(scheduler: Any, rng: random.Random) -> Callable[[Any], tuple[float, ModelRunnerOutput]]:
    """Stands for the model: random tokens, and random seconds by the number of tokens computed."""

    def execute(output: Any) -> tuple[float, ModelRunnerOutput]:
        names = list(output.num_scheduled_tokens)
        sampled = [
            [] if scheduler.requests[name].is_prefill_chunk else [rng.randrange(4, VOCABULARY)]
            for name in names
        ]
        seconds = (0.004 + 0.0002 * sum(output.num_scheduled_tokens.values())) * rng.uniform(0.7, 1.6)
        return seconds, ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    return execute


def run_live(
    programs: list[tuple[float, Any]],
    scheduler: Any,
    execute: Callable[[Any], tuple[float, ModelRunnerOutput]],
    decision_log: Path,
    async_scheduling: bool = False,
) -> Run:
    """The programs through vLLM and the plug-in. `decision_log` is the file that the plug-in writes."""
    run = Run()
    engine = VllmEngine(scheduler, run, execute)
    kind = AsyncInstance if async_scheduling else Instance
    instance = kind(0, engine, Steps(engine.step_seconds))
    policies = Policies(**{axis: registry.build(axis, spec) for axis, spec in PLAIN.items()})
    Simulation(iter(programs), [instance], policies, Watcher(run)).run()
    scheduler.shutdown()
    run.counts = scheduler.counts() | {"blocks_missing": blocks_missing(scheduler)}
    run.decisions = []
    for line in decision_log.read_text().splitlines():
        row = json.loads(line)
        blocks = (row["blocks"],) if "blocks" in row else ()
        deadline_s = row.get("deadline_s") if row.get("deadline_s") is not None else float("inf")
        protect = (deadline_s, row["value"]) if "value" in row else ()
        key = (row["program_id"], row["turn_id"])
        run.decisions.append((row["time_s"], row["event"], key, row["instance"], *blocks, *protect))
    return run
