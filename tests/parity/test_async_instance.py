"""AsyncInstance: what is scheduled when, and when it runs. vLLM is not needed."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest

from agentservesim.engine.async_instance import AsyncInstance
from agentservesim.engine.async_scheduler import AsyncScheduler
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import SchedulerOutput
from agentservesim.step_time.interface import StepCost
from helpers import chain, rows, run

from . import simulated
from .loads import Engine, make_load
from .recording import Step, Submission, Trial, number_of
from .test_recordings import all_trials

SMALL = Engine(
    num_blocks=65,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=1024,
    policy="fcfs",
    long_prefill_token_threshold=0,
    watermark=0.0,
    scheduler_reserve_full_isl=True,
    enable_prefix_caching=True,
    async_scheduling=True,
)


class Linear:
    """A step takes 1 s, 1/1024 s a prefill token and 1/64 s a decode: sums of them are exact."""

    uses_spread = False

    def step(self, prefills, decodes, decode_context_tokens, spread=None):
        return StepCost(1 + sum(new for new, _ in prefills) / 1024 + decodes / 64, 0.0, False)


class Logged(AsyncScheduler):
    """Writes down when it is asked for a step and when it is told of a result."""

    def __init__(self, engine: Engine) -> None:
        options = msgspec.structs.asdict(engine)
        del options["async_scheduling"]
        super().__init__(**options)
        self.log: list[tuple] = []

    def schedule(self, now_s=0.0):
        output = super().schedule(now_s)
        self.log.append(("schedule", now_s, _batch(output)))
        return output

    def update_from_output(self, output, now_s=0.0):
        finished = super().update_from_output(output, now_s)
        if output.num_scheduled_tokens:
            self.log.append(("update", now_s, _batch(output), [number_of(r.request_id) for r in finished]))
        return finished


def _batch(output: SchedulerOutput) -> dict[int, int]:
    return {number_of(request.request_id): tokens for request, tokens in output.num_scheduled_tokens.items()}


def _requests(engine: Engine, *sizes: tuple[float, int, int]) -> list[Request]:
    """Requests of (arrival, prompt tokens, output tokens), all different."""
    interner = simulated.Interner(engine.block_size)
    made = [
        Submission(((2 * number, 0, prompt),), 2 * number + 1, output, 0, arrival_s)
        for number, (arrival_s, prompt, output) in enumerate(sizes)
    ]
    return [simulated.make_request(number, submission, interner) for number, submission in enumerate(made)]


def _serve(engine: Engine, requests: list[Request]) -> tuple[AsyncInstance, list[tuple]]:
    """Serve `requests` the way the simulation does: at one instant first the end of a step, then arrivals,
    then the next step."""
    scheduler = Logged(engine)
    instance = AsyncInstance(0, scheduler, Linear())
    arriving = deque(sorted(requests, key=lambda request: request.arrival_s))
    while arriving or instance.stepping:
        now_s = min(
            [request.arrival_s for request in list(arriving)[:1]]
            + [instance.step_end_s for _ in range(instance.stepping)]
        )
        if instance.step_end_s == now_s:
            instance.finish_step(now_s)
        while arriving and arriving[0].arrival_s == now_s:
            instance.add_request(arriving.popleft())
        if not instance.stepping:
            started = instance.start_step(now_s)
            assert (started is None) == (instance.in_flight == 0) == (not instance.stepping)
    assert instance.in_flight == 0
    return instance, scheduler.log


def _engine_core(engine: Engine, requests: list[Request]) -> list[tuple]:
    """The same by the loop of vLLM's engine core, which blocks while it waits for a step.

    Take what has arrived. If anybody is unfinished, schedule and queue the step; with room for another one,
    and anything scheduled or anybody unfinished, start over. Otherwise wait for the oldest step, and update.
    """
    scheduler = Logged(engine)
    arriving = deque(sorted(requests, key=lambda request: request.arrival_s))
    queue: deque[tuple[SchedulerOutput, float]] = deque()
    now_s = device_free_s = 0.0
    while arriving or queue or scheduler.running or scheduler.waiting:
        if not (queue or scheduler.running or scheduler.waiting):
            now_s = arriving[0].arrival_s
        while arriving and arriving[0].arrival_s <= now_s:
            scheduler.add_request(arriving.popleft())
        if scheduler.running or scheduler.waiting:
            output = scheduler.schedule(now_s)
            end_s = now_s
            if output.num_scheduled_tokens:
                end_s = device_free_s = max(now_s, device_free_s) + _seconds(output)
            queue.append((output, end_s))
            if len(queue) < 2:
                continue
        output, end_s = queue.popleft()
        now_s = max(now_s, end_s)
        scheduler.update_from_output(output, now_s)
    return scheduler.log


def _seconds(output: SchedulerOutput) -> float:
    decodes = [
        request
        for request, tokens in output.num_scheduled_tokens.items()
        if tokens == 1 and request.num_computed_tokens > 1
    ]
    prefilled = sum(output.num_scheduled_tokens.values()) - len(decodes)
    return 1 + prefilled / 1024 + len(decodes) / 64


# --- one step after the other ----------------------------------------------------------------------------


def test_an_idle_instance_starts_at_once_and_schedules_two_steps():
    """The second step is scheduled while the first has not run: its token counts as computed."""
    [request] = _requests(SMALL, (5.0, 32, 2))
    _, log = _serve(SMALL, [request])
    first_end_s = 5.0 + 1 + 32 / 1024
    second_end_s = first_end_s + 1 + 1 / 64
    assert log == [
        ("schedule", 5.0, {0: 32}),
        ("schedule", 5.0, {0: 1}),
        ("update", first_end_s, {0: 32}, []),
        ("schedule", first_end_s, {}),  # its last token is in flight
        ("update", second_end_s, {0: 1}, [0]),
    ]
    assert (request.scheduled_s, request.first_token_s, request.completed_s) == (
        5.0,
        first_end_s,
        second_end_s,
    )


def test_steps_follow_each_other_without_gaps():
    instance, log = _serve(SMALL, _requests(SMALL, (0.0, 100, 20), (0.0, 70, 35), (0.0, 20, 5)))
    ends = [entry[1] for entry in log if entry[0] == "update"]
    assert ends[-1] == instance.usage.busy_s
    assert instance.usage.steps == len(ends)
    batches = [entry[2] for entry in log if entry[0] == "update"]
    for start_s, end_s, batch in zip([0.0, *ends], ends, batches, strict=False):
        decodes = sum(tokens == 1 for tokens in batch.values())
        assert end_s - start_s == 1 + (sum(batch.values()) - decodes) / 1024 + decodes / 64


@pytest.mark.parametrize("into_the_step", [0.25, 0.5, 0.75])
def test_what_arrives_during_a_step_runs_in_the_step_after_the_next(into_the_step):
    """Step n + 1 is scheduled already: the arrival is seen at the end of n and runs at the end of n + 1."""
    decode_s = 1 + 1 / 64
    first_end_s = 1 + 16 / 1024
    n_start_s = first_end_s + 2 * decode_s
    n_end_s = n_start_s + decode_s
    _, log = _serve(SMALL, requests := _requests(SMALL, (0.0, 16, 20), (n_start_s + into_the_step, 8, 3)))
    seen = next(entry for entry in log if 1 in entry[2])
    assert seen == ("schedule", n_end_s, {0: 1, 1: 8})
    ran = next(entry for entry in log if entry[0] == "update" and 1 in entry[2])
    assert ran[1] == n_end_s + decode_s + (1 + 1 / 64 + 8 / 1024)
    assert requests[1].first_token_s == ran[1]


def test_what_arrives_at_the_end_of_a_step_is_seen_then():
    decode_s = 1 + 1 / 64
    at_s = 1 + 16 / 1024 + 3 * decode_s
    _, log = _serve(SMALL, _requests(SMALL, (0.0, 16, 20), (at_s, 8, 3)))
    assert next(entry for entry in log if 1 in entry[2]) == ("schedule", at_s, {0: 1, 1: 8})


def test_blocks_and_slot_of_a_finished_request_serve_the_step_after_the_next():
    """One sequence at a time: the second one waits one step longer than under synchronous scheduling."""
    one = msgspec.structs.replace(SMALL, max_num_seqs=1)
    _, log = _serve(one, _requests(one, (0.0, 16, 1), (0.0, 16, 1)))
    end_s = 1 + 16 / 1024
    assert log == [
        ("schedule", 0.0, {0: 16}),
        ("schedule", 0.0, {}),
        ("update", end_s, {0: 16}, [0]),
        ("schedule", end_s, {1: 16}),
        ("schedule", end_s, {}),
        ("update", 2 * end_s, {1: 16}, [1]),
    ]


def test_an_empty_step_takes_no_time_and_leaves_nothing_behind():
    """The step behind a last token is empty. What arrives later finds an idle instance."""
    instance, log = _serve(SMALL, _requests(SMALL, (0.0, 16, 1), (9.0, 16, 1)))
    end_s = 1 + 16 / 1024
    assert [entry[:3] for entry in log] == [
        ("schedule", 0.0, {0: 16}),
        ("schedule", 0.0, {}),
        ("update", end_s, {0: 16}),
        ("schedule", 9.0, {1: 16}),
        ("schedule", 9.0, {}),
        ("update", 9.0 + end_s, {1: 16}),
    ]
    assert instance.usage.steps == 2
    assert instance.usage.busy_s == 2 * end_s
    assert instance.step_end_s is None


# --- the order of the engine core ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_every_schedule_and_update_is_when_the_engine_core_has_it(seed):
    """On random loads in time; arrivals fall into steps, on their ends, and into pauses."""
    load = make_load(seed, calls=60, async_scheduling=True)
    rng = random.Random(seed)
    calls = [call for call in load.calls if call.after is None]
    made = [
        Submission(
            call.prompt, call.output, call.max_tokens, call.priority, call.gap * 1.25 + rng.randrange(8) / 8
        )
        for call in calls
    ]
    trial = Trial(seed, load.engine, tuple(made), ())
    _, log = _serve(load.engine, simulated.requests_of(trial))
    assert log == _engine_core(load.engine, simulated.requests_of(trial))
    assert sum(len(entry[3]) for entry in log if entry[0] == "update") == len(calls)


class Fed(AsyncScheduler):
    """Is given what had been submitted before each schedule() of a recording, and records its own steps."""

    def __init__(self, trial: Trial) -> None:
        options = msgspec.structs.asdict(trial.engine)
        del options["async_scheduling"]
        super().__init__(**options)
        self.instance = AsyncInstance(0, self, Linear())
        self.steps: list[Step] = []
        self.submitted = 0
        self._requests = simulated.requests_of(trial)
        self._due = [step.submitted for step in trial.steps]

    def feed(self) -> None:
        """Submit what is due before the next step."""
        due = self._due[len(self.steps)]
        for request in self._requests[self.submitted : due]:
            self.instance.add_request(request)
        self.submitted = due

    def schedule(self, now_s=0.0):
        self.feed()
        output = super().schedule(now_s)
        self.steps.append(
            Step(
                submitted=self.submitted,
                batch=tuple(_batch(output).items()),
                preempted=tuple(number_of(request.request_id) for request in output.preempted),
                hits=tuple((number_of(r.request_id), r.num_hit_tokens) for r in output.admitted),
                free_blocks=self.block_pool.num_free_blocks,
                finished=(),
            )
        )
        return output

    def update_from_output(self, output, now_s=0.0):
        finished = super().update_from_output(output, now_s)
        numbers = tuple(number_of(request.request_id) for request in finished)
        last = self.steps[-1]
        self.steps[-1] = msgspec.structs.replace(last, finished=(*last.finished, *numbers))
        return finished


def test_an_instance_takes_the_recorded_steps_of_the_engine_core():
    """The recordings were made by vLLM's own loop. Its steps for nobody, after the last request has
    finished, are left out: an instance takes none."""
    for recorded in all_trials(async_scheduling=True):
        trial = msgspec.structs.replace(recorded, steps=tuple(_for_somebody(recorded)))
        scheduler = Fed(trial)
        instance = scheduler.instance
        now_s = 0.0
        while len(scheduler.steps) < len(trial.steps):
            scheduler.feed()
            assert instance.start_step(now_s) is not None
            while instance.step_end_s is not None:
                now_s = instance.step_end_s
                instance.finish_step(now_s)
                instance.start_step(now_s)
        assert scheduler.steps == list(trial.steps), f"seed {trial.seed}"


def _for_somebody(trial: Trial) -> list[Step]:
    """The steps before which anybody was unfinished."""
    steps, finished = [], 0
    for step in trial.steps:
        if step.submitted > finished:
            steps.append(step)
        finished += len(step.finished)
    return steps


# --- whole runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", ["fcfs", "plas"])
@pytest.mark.parametrize("instances", [1, 2])
def test_a_whole_run_serves_every_call_in_causal_order(tmp_path, scheduling, instances):
    programs = [
        chain(f"p{number}", 5, first=60 + 7 * number, output=10 + number, gap_s=0.02, arrival_s=0.01 * number)
        for number in range(12)
    ]
    result = run(
        tmp_path,
        programs,
        engine={"async_scheduling": True, "max_num_seqs": 8, "max_num_batched_tokens": 128},
        cluster={"kv_cache_tokens": 1024, "instances": instances},
        policies={"scheduling": scheduling},
    )
    assert result.complete
    assert result.summary["preemptions"] > 0
    calls = rows(result)
    assert len(calls) == 60
    for call in calls:
        assert call["released_s"] <= call["scheduled_s"] < call["first_token_s"] <= call["completed_s"]
        assert call["output_tokens"] >= 10
