"""The scheduler, rule by rule, in the order in which schedule() applies them."""

from __future__ import annotations

from typing import Any

import pytest

from agentservesim.engine.content import Content, Line, Span
from agentservesim.engine.instance import Instance
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput, WaitingQueue


def scheduler(usable: int = 100, **options: Any) -> Scheduler:
    """A scheduler with `usable` blocks of 4 tokens."""
    return Scheduler(num_blocks=usable + 1, block_size=4, **options)


def text(name: str = "") -> Content:
    """A sequence that shares nothing with any other."""
    return Content((Span(Line(name), 0, 10_000),))


def add(
    engine: Scheduler, name: str, prompt_tokens: int, max_tokens: int = 100, content: Any = None, **more: Any
) -> Request:
    """Queue a request. It arrives after those before it unless told otherwise."""
    more.setdefault("arrival_s", float(len(engine.running) + len(engine.waiting)))
    request = Request(name, content or text(name), prompt_tokens, max_tokens, **more)
    engine.add_request(request)
    return request


def names(requests: Any) -> list[int | str]:
    return [request.request_id for request in requests]


def tokens(output: SchedulerOutput) -> dict[int | str, int]:
    """The tokens of a step, a request, in batch order."""
    return {request.request_id: n for request, n in output.num_scheduled_tokens.items()}


def step(engine: Scheduler, now_s: float = 0.0) -> dict[int | str, int]:
    """One whole step; the tokens it computed, a request, in batch order."""
    output = engine.schedule(now_s)
    engine.update_from_output(output, now_s)
    return tokens(output)


def steps(engine: Scheduler, count: int) -> list[dict[int | str, int]]:
    return [step(engine) for _ in range(count)]


# --- 1. running requests first, under a token budget --------------------------------------------------------


def test_a_prompt_then_one_token_a_step() -> None:
    engine = scheduler()
    request = add(engine, "a", 10, max_tokens=3)
    assert steps(engine, 4) == [{"a": 10}, {"a": 1}, {"a": 1}, {}]
    assert request.num_output_tokens == 3
    assert request.num_computed_tokens == 12  # the last token is generated and never computed


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    request = add(engine, "a", 20)
    assert steps(engine, 2) == [{"a": 8}, {"a": 8}]
    assert (request.num_output_tokens, request.first_token_s) == (0, None)
    assert step(engine, now_s=3.0) == {"a": 4}
    assert (request.num_output_tokens, request.first_token_s) == (1, 3.0)
    assert step(engine) == {"a": 1}


def test_running_requests_share_the_budget_in_list_order_before_anyone_is_admitted() -> None:
    engine = scheduler(max_num_batched_tokens=10)
    add(engine, "a", 4)
    add(engine, "b", 20)
    add(engine, "c", 4)
    assert steps(engine, 4) == [
        {"a": 4, "b": 6},
        {"a": 1, "b": 9},
        {"a": 1, "b": 5, "c": 4},
        dict.fromkeys("abc", 1),
    ]


def test_the_threshold_caps_a_running_and_an_admitted_prefill() -> None:
    engine = scheduler(long_prefill_token_threshold=6)
    add(engine, "a", 20)
    add(engine, "b", 10)
    assert steps(engine, 3) == [{"a": 6, "b": 6}, {"a": 6, "b": 4}, {"a": 6, "b": 1}]


def test_the_threshold_is_ignored_while_there_is_only_one_request() -> None:
    engine = scheduler(long_prefill_token_threshold=6)
    add(engine, "a", 20)
    assert step(engine) == {"a": 20}


def test_a_waiting_request_is_enough_for_the_threshold() -> None:
    engine = scheduler(long_prefill_token_threshold=6, max_num_seqs=1)
    add(engine, "a", 20)
    add(engine, "b", 4)
    assert step(engine) == {"a": 6}


def test_the_threshold_is_ignored_again_when_the_others_have_left() -> None:
    engine = scheduler(long_prefill_token_threshold=6)
    add(engine, "a", 20)
    add(engine, "b", 4, max_tokens=1)
    assert steps(engine, 2) == [{"a": 6, "b": 4}, {"a": 14}]


def test_a_request_with_nothing_to_compute_is_passed_over() -> None:
    """It waits for the result of the step in flight; those after it go on."""
    engine = scheduler(max_num_batched_tokens=10)
    add(engine, "a", 4)
    add(engine, "b", 20)
    engine.schedule()
    output = engine.schedule()
    assert tokens(output) == {"b": 10}


def test_nobody_computes_beyond_the_last_but_one_token_of_max_model_len() -> None:
    engine = scheduler(max_model_len=12, max_num_batched_tokens=8)
    request = add(engine, "a", 11)
    engine.schedule()
    request.num_tokens = 14  # more than update_from_output() would ever allow
    assert engine.schedule().num_scheduled_tokens == {request: 3}
    assert engine.schedule().num_scheduled_tokens == {}


# --- 2. no blocks left: preempt -----------------------------------------------------------------------------


def test_fcfs_preempts_the_last_running_request() -> None:
    engine = scheduler(usable=4)
    for name, prompt_tokens in [("a", 4), ("b", 3), ("c", 6)]:
        add(engine, name, prompt_tokens)
    step(engine)
    output = engine.schedule()
    assert names(output.preempted) == ["c"]
    assert names(output.num_scheduled_tokens) == names(engine.running) == ["a", "b"]


def test_priority_preempts_the_highest_number_wherever_it_runs() -> None:
    engine = scheduler(usable=4, policy="priority")
    low = add(engine, "low", 2, priority=5)
    step(engine)
    add(engine, "high", 4, priority=0)
    add(engine, "middle", 5, priority=1)
    step(engine)
    output = engine.schedule()
    assert output.preempted == [low]
    assert names(output.num_scheduled_tokens) == names(engine.running) == ["high", "middle"]


def test_priority_preempts_the_latest_arrival_among_equals() -> None:
    engine = scheduler(usable=3, policy="priority")
    for name, arrival_s in [("middle", 5.0), ("late", 9.0), ("early", 1.0)]:
        add(engine, name, 3, arrival_s=arrival_s)
        step(engine)
    output = engine.schedule()
    assert names(output.preempted) == ["late"]


def test_a_victim_already_in_the_step_gives_its_tokens_back() -> None:
    engine = scheduler(usable=4, policy="priority")
    add(engine, "low", 2, priority=5)
    step(engine)
    add(engine, "high", 4, priority=0)
    add(engine, "middle", 5, priority=1)
    step(engine)
    engine.max_num_batched_tokens = 2
    output = engine.schedule()  # low takes 1 of 2 tokens, then high needs low's block
    assert names(output.preempted) == ["low"]
    assert names(output.num_scheduled_tokens) == ["high", "middle"]


def test_as_many_are_preempted_as_it_takes() -> None:
    engine = scheduler(usable=6, long_prefill_token_threshold=4, scheduler_reserve_full_isl=False)
    a = add(engine, "a", 22)
    for name in "bcd":
        add(engine, name, 3)
    step(engine)
    engine.long_prefill_token_threshold = 0
    output = engine.schedule()  # a needs 5 blocks more, 2 are free
    assert names(output.preempted) == ["d", "c", "b"]
    assert output.num_scheduled_tokens == {a: 18}
    assert names(engine.waiting) == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("semantics", "others"), [("vllm-0.32", {}), ("vllm-0.33", {"high": 1, "middle": 1})]
)
def test_under_priority_a_request_that_preempts_itself_ends_the_running_loop(
    semantics: str, others: dict[str, int]
) -> None:
    """In 0.33 it no longer does."""
    engine = scheduler(usable=4, policy="priority", semantics=semantics)
    low = add(engine, "low", 3, priority=5)
    step(engine)
    add(engine, "high", 4, priority=0)
    add(engine, "middle", 6, priority=1)
    step(engine)
    output = engine.schedule()  # the others would have had room
    assert output.preempted == [low]
    assert tokens(output) == others
    assert low in engine.waiting


def test_the_hook_names_the_victim() -> None:
    engine = scheduler(usable=4)
    asked: list[list[int | str]] = []

    def second(running: list[Request]) -> Request:
        asked.append(names(running))
        return running[1]

    engine.choose_victim = second
    for name, prompt_tokens in [("a", 4), ("b", 3), ("c", 6)]:
        add(engine, name, prompt_tokens)
    step(engine)
    output = engine.schedule()
    assert asked == [["a", "b", "c"]]
    assert names(output.preempted) == ["b"]
    assert names(output.num_scheduled_tokens) == ["a", "c"]


def test_parked_blocks_are_reclaimed_before_anyone_is_preempted() -> None:
    engine = scheduler(usable=4)
    parking = engine.kv_cache.parking
    events: list[Any] = []
    parking.listener = lambda *event: events.append(event)
    parked = add(engine, "parked", 8, max_tokens=0)
    engine.on_finished = lambda request: (
        parking.park("key", request.table, 99.0),
        engine.kv_cache.free(request),
    )
    step(engine)
    for name in "ab":
        add(engine, name, 4)
    step(engine)
    assert events == []
    output = engine.schedule()
    assert (output.preempted, events) == ([], [("reclaim", "key", 1), ("reclaim", "key", 1)])
    assert parked not in engine.running


# --- 3. the preempted request -------------------------------------------------------------------------------


def test_preemption_keeps_the_generated_tokens_and_computes_them_again() -> None:
    engine = scheduler(usable=4, enable_prefix_caching=False)
    add(engine, "a", 6, max_tokens=6)
    b = add(engine, "b", 6, max_tokens=6)
    assert steps(engine, 3) == [{"a": 6, "b": 6}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert step(engine) == {"a": 1}
    assert (b.num_computed_tokens, b.num_tokens, b.num_output_tokens, b.num_preemptions) == (0, 9, 3, 1)
    assert b.table.num_blocks == 0
    assert steps(engine, 4) == [{"a": 1}, {"a": 1}, {"b": 9}, {"b": 1}]


def test_preempted_blocks_stay_cached_and_recompute_hits_them() -> None:
    engine = scheduler(usable=7)
    add(engine, "a", 12, max_tokens=5)
    b = add(engine, "b", 15)
    assert steps(engine, 5) == [{"a": 12, "b": 15}, {"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}]
    assert step(engine, now_s=8.0) == {"b": 4}
    assert (b.first_hit_tokens, b.num_hit_tokens) == (0, 12)
    assert b.scheduled_s == 0.0


def test_a_preempted_request_goes_to_the_front_of_the_queue() -> None:
    engine = scheduler(usable=4, max_num_seqs=3)
    for name, prompt_tokens in [("a", 4), ("b", 3), ("c", 6), ("d", 1)]:
        add(engine, name, prompt_tokens)
    step(engine)
    engine.schedule()
    assert names(engine.waiting) == ["c", "d"]


def test_a_preempted_request_goes_to_its_place_by_priority() -> None:
    engine = scheduler(usable=4, max_num_seqs=3, policy="priority")
    for name, prompt_tokens, priority in [("a", 4, 0), ("b", 3, 0), ("c", 6, 3), ("d", 1, 3), ("e", 1, 4)]:
        add(engine, name, prompt_tokens, priority=priority)
    step(engine)
    add(engine, "f", 1, priority=2)
    engine.schedule()
    assert names(engine.waiting) == ["f", "c", "d", "e"]


# --- 4. after a preemption nobody is admitted ---------------------------------------------------------------


def test_nobody_is_admitted_in_a_step_with_a_preemption() -> None:
    engine = scheduler(usable=5, policy="priority")
    low = add(engine, "low", 7, priority=5)
    add(engine, "high", 12, priority=0)
    step(engine)
    late = add(engine, "late", 1, max_tokens=1, priority=0)
    output = engine.schedule()
    assert (output.preempted, output.admitted) == ([low], [])
    assert engine.block_pool.num_free_blocks == 1
    engine.update_from_output(output)
    assert engine.schedule().admitted == [late]


# --- 5. waiting requests ------------------------------------------------------------------------------------


def test_a_head_that_does_not_fit_blocks_those_behind_it() -> None:
    engine = scheduler(usable=6)
    add(engine, "a", 12, max_tokens=3)
    add(engine, "big", 16)
    add(engine, "small", 1)
    assert steps(engine, 2) == [{"a": 12}, {"a": 1}]
    assert names(engine.waiting) == ["big", "small"]
    assert steps(engine, 2) == [{"a": 1}, {"big": 16, "small": 1}]


def test_max_num_seqs_limits_those_running() -> None:
    engine = scheduler(max_num_seqs=2)
    for name in "abc":
        add(engine, name, 4, max_tokens=2)
    assert steps(engine, 3) == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"c": 4}]


def test_nobody_is_admitted_without_budget() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    add(engine, "a", 4)
    add(engine, "b", 4)
    assert steps(engine, 2) == [{"a": 4}, {"a": 1, "b": 3}]


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    engine, shared = scheduler(), text()
    add(engine, "a", 12, max_tokens=0, content=shared)
    step(engine)
    aligned = add(engine, "aligned", 12, content=shared)
    beyond = add(engine, "beyond", 13, content=shared)
    assert step(engine) == {"aligned": 4, "beyond": 1}
    assert (aligned.num_hit_tokens, beyond.num_hit_tokens) == (8, 12)


def test_requests_of_one_step_share_what_the_first_of_them_will_compute() -> None:
    engine, shared = scheduler(), text()
    add(engine, "a", 13, content=shared)
    add(engine, "b", 15, content=shared)
    assert step(engine) == {"a": 13, "b": 3}


def test_a_hit_leaves_only_the_rest_to_threshold_and_budget() -> None:
    engine, shared = scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=6), text()
    add(engine, "a", 16, max_tokens=0, content=shared)
    step(engine)
    add(engine, "b", 20, content=shared)
    add(engine, "c", 40, content=shared)
    assert step(engine) == {"b": 4, "c": 6}


def test_without_prefix_caching_everything_is_computed() -> None:
    engine, shared = scheduler(enable_prefix_caching=False), text()
    add(engine, "a", 13, content=shared)
    add(engine, "b", 13, content=shared)
    assert step(engine) == {"a": 13, "b": 13}


def test_fcfs_admits_in_the_order_of_submission() -> None:
    engine = scheduler(max_num_seqs=2)
    for name, priority in [("a", 3), ("b", 2), ("c", 1)]:
        add(engine, name, 4, priority=priority, arrival_s=-priority)
    assert list(step(engine)) == ["a", "b"]


def test_priority_admits_by_priority_then_arrival_then_id() -> None:
    engine = scheduler(policy="priority", max_num_seqs=4)
    for name, priority, arrival_s in [
        ("a", 2, 0.0),
        ("b", 1, 7.0),
        ("d", 1, 5.0),
        ("c", 1, 5.0),
        ("e", 0, 9.0),
    ]:
        add(engine, name, 4, priority=priority, arrival_s=arrival_s)
    assert names(engine.waiting) == ["e", "c", "d", "b", "a"]
    assert list(step(engine)) == ["e", "c", "d", "b"]


def test_priority_does_not_preempt_to_admit() -> None:
    engine = scheduler(usable=4, policy="priority")
    add(engine, "low", 13, priority=9)
    step(engine)
    add(engine, "high", 4, priority=0)
    assert steps(engine, 2) == [{"low": 1}, {"low": 1}]


def test_new_priorities_are_asked_for_just_before_an_admission() -> None:
    engine = scheduler(policy="priority", max_num_seqs=2)
    asked: list[list[int | str]] = []

    def reverse(waiting: WaitingQueue) -> None:
        asked.append(names(waiting))
        for number, request in enumerate(waiting):
            request.priority = -number
        return True

    engine.reprioritize = reverse
    step(engine)
    assert asked == []  # nobody waits
    for name in "abc":
        add(engine, name, 4)
    assert list(step(engine)) == ["c", "b"]
    assert asked == [["a", "b", "c"]]
    step(engine)
    assert len(asked) == 1  # no seat
    engine.max_num_seqs = 3
    engine.max_num_batched_tokens = 2
    step(engine)
    assert len(asked) == 1  # no budget
    engine.max_num_batched_tokens = 8
    assert list(step(engine)) == ["c", "b", "a"]
    assert asked[1:] == [["a"]]


def test_new_priorities_are_not_asked_for_after_a_preemption() -> None:
    engine = scheduler(usable=2, policy="priority")
    add(engine, "a", 4, priority=0)
    add(engine, "b", 4, priority=1)
    step(engine)
    engine.reprioritize = lambda waiting: pytest.fail("nobody can be admitted")
    assert names(engine.schedule().preempted) == ["b"]


# --- 6. the admission check ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "expected"), [(True, {"a": 1}), (False, {"a": 1, "b": 7})])
def test_the_whole_sequence_must_fit_even_if_only_a_chunk_is_computed(
    reserve: bool, expected: dict[str, int]
) -> None:
    engine = scheduler(usable=8, scheduler_reserve_full_isl=reserve, max_num_batched_tokens=8)
    add(engine, "a", 7)
    step(engine)
    add(engine, "b", 25)
    assert step(engine) == expected


def test_the_check_reserves_nothing() -> None:
    """Two requests that will not fit together are both admitted while they are small."""
    engine = scheduler(usable=8, long_prefill_token_threshold=2)
    add(engine, "a", 20)
    add(engine, "b", 20)
    assert step(engine) == {"a": 2, "b": 2}


def test_cached_blocks_in_use_need_no_room() -> None:
    engine, shared = scheduler(usable=6), text()
    add(engine, "a", 17, content=shared)
    step(engine)
    add(engine, "b", 18, content=shared)
    assert step(engine) == {"a": 1, "b": 2}


def test_cached_blocks_in_the_free_queue_need_room() -> None:
    engine, shared = scheduler(usable=6), text()
    add(engine, "a", 16, max_tokens=0, content=shared)
    step(engine)
    add(engine, "b", 3)
    step(engine)
    add(engine, "c", 21, content=shared)  # hits 4, needs 2 more, and 1 is left
    assert step(engine) == {"b": 1}


def test_a_recomputed_request_needs_room_for_its_generated_tokens() -> None:
    engine = scheduler(usable=4, max_num_batched_tokens=6)
    request = add(engine, "a", 4)
    request.num_tokens = 17
    assert step(engine) == {}


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, True), (0.18, True), (0.2, False)])
def test_the_watermark_stays_free_at_an_admission_beside_others(watermark: float, admitted: bool) -> None:
    """11 blocks with the null block: 0.18 of them is 1 block, 0.2 is 2."""
    engine = scheduler(usable=10, watermark=watermark)
    add(engine, "a", 14)
    step(engine)
    add(engine, "b", 20)
    assert ("b" in step(engine)) == admitted


def test_the_watermark_is_ignored_when_nothing_runs() -> None:
    engine = scheduler(usable=10, watermark=0.5)
    add(engine, "a", 40, max_tokens=1)
    assert step(engine) == {"a": 40}


def test_the_watermark_is_ignored_for_those_running() -> None:
    engine = scheduler(usable=4, watermark=0.5)
    add(engine, "a", 12)
    assert steps(engine, 2) == [{"a": 12}, {"a": 1}]


# --- 7. the step's result -----------------------------------------------------------------------------------


def test_computed_tokens_advance_when_the_step_is_scheduled() -> None:
    engine = scheduler()
    request = add(engine, "a", 10)
    output = engine.schedule(now_s=1.0)
    assert (request.num_computed_tokens, request.num_tokens) == (10, 10)
    assert engine.update_from_output(output, now_s=2.5) == []
    assert (request.num_computed_tokens, request.num_tokens) == (10, 11)
    assert (request.scheduled_s, request.first_token_s, request.completed_s) == (1.0, 2.5, None)


def test_a_request_stops_at_max_tokens() -> None:
    engine = scheduler()
    request = add(engine, "a", 10, max_tokens=1)
    output = engine.schedule()
    assert engine.update_from_output(output, now_s=2.0) == [request]
    assert (request.completed_s, request.num_output_tokens) == (2.0, 1)
    assert engine.running == []
    assert engine.block_pool.num_used_blocks == 0


def test_a_request_stops_at_max_model_len() -> None:
    engine = scheduler(max_model_len=12)
    request = add(engine, "a", 9, max_tokens=100)
    assert steps(engine, 3) == [{"a": 9}, {"a": 1}, {"a": 1}]
    assert (request.num_output_tokens, request.num_tokens) == (3, 12)
    assert request.completed_s is not None
    assert engine.running == []


def test_finished_requests_are_disposed_of_in_batch_order() -> None:
    engine = scheduler()
    disposed: list[Request] = []
    engine.on_finished = disposed.append
    requests = [add(engine, name, 4, max_tokens=1) for name in "cab"]
    assert engine.update_from_output(engine.schedule()) == disposed == requests


def test_blocks_of_finished_requests_serve_the_next_step() -> None:
    engine = scheduler(usable=4)
    add(engine, "a", 16, max_tokens=1)
    add(engine, "b", 16, max_tokens=1)
    assert steps(engine, 3) == [{"a": 16}, {"b": 16}, {}]


# --- parked entries in a step -------------------------------------------------------------------------------


def parking_scheduler(deadline_s: float) -> tuple[Scheduler, Content, list[Any]]:
    """8 blocks, of which 4 are parked as "turn 1"."""
    engine, content = scheduler(usable=8), text()
    events: list[Any] = []
    parking = engine.kv_cache.parking
    parking.listener = lambda *event: events.append(event)
    request = add(engine, "turn 1", 16, max_tokens=0, content=content)
    step(engine)
    request = add(engine, "again", 17, max_tokens=0, content=content)
    engine.on_finished = lambda request: (
        parking.park("turn 1", request.table, deadline_s),
        engine.kv_cache.free(request),
    )
    step(engine)
    engine.on_finished = engine.kv_cache.free
    assert request.table.num_blocks == 0
    assert engine.block_pool.num_parked == 4
    return engine, content, events


def test_entries_past_their_deadline_are_released_first() -> None:
    engine, _, events = parking_scheduler(deadline_s=5.0)
    engine.schedule(now_s=5.0)
    assert events == []
    add(engine, "b", 32)
    engine.schedule(now_s=5.1)
    assert events == [("expire", "turn 1", 4)]


def test_a_request_takes_over_what_it_claims_when_it_is_admitted() -> None:
    engine, content, events = parking_scheduler(deadline_s=99.0)
    add(engine, "b", 4)
    engine.max_num_seqs = 1
    step(engine)
    request = add(engine, "turn 2", 18, content=content, claims=("turn 1", "unknown"))
    step(engine)
    assert events == []
    engine.max_num_seqs = 2
    assert step(engine) == {"b": 1, "turn 2": 2}
    assert events == [("takeover", "turn 1", 4)]
    assert (request.claims, request.first_hit_tokens) == ((), 16)
    assert engine.block_pool.num_parked == 0


# --- limits -------------------------------------------------------------------------------------------------


def test_a_request_without_output_finishes_after_its_prefill() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    request = add(engine, "a", 12, max_tokens=0)
    assert step(engine) == {"a": 8}
    assert request.completed_s is None
    assert step(engine, now_s=2.0) == {"a": 4}
    assert (request.num_output_tokens, request.num_tokens) == (0, 12)
    assert (request.first_token_s, request.completed_s) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "refusal"),
    [
        pytest.param(31, 5, None, id="the longest prompt"),
        pytest.param(32, 0, "prompt_tokens 32 >= max_model_len 32", id="a prompt of max_model_len"),
        pytest.param(10, 1000, None, id="output is clipped to max_model_len"),
    ],
)
def test_what_max_model_len_refuses(prompt_tokens: int, output_tokens: int, refusal: str | None) -> None:
    instance = Instance(0, scheduler(max_model_len=32), None)  # type: ignore[arg-type]
    assert instance.refusal(prompt_tokens, output_tokens) == refusal


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "refusal"),
    [
        pytest.param(20, 0, None, id="a prompt as large as the pool"),
        pytest.param(20, 1, None, id="its first token needs no slot"),
        pytest.param(20, 2, "21 tokens of KV > 20 in the pool", id="its second does"),
        pytest.param(21, 0, "21 tokens of KV > 20 in the pool", id="a larger prompt"),
    ],
)
def test_what_the_pool_refuses(prompt_tokens: int, output_tokens: int, refusal: str | None) -> None:
    engine = scheduler(usable=5)
    assert Instance(0, engine, None).refusal(prompt_tokens, output_tokens) == refusal  # type: ignore[arg-type]
    request = add(engine, "a", prompt_tokens, output_tokens)
    for _ in range(6):
        step(engine)
    assert (request.completed_s is not None) == (refusal is None)
