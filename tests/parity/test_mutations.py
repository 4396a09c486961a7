"""Breaking any one rule of the engine shows on the recordings: each mutation must lead to a difference."""

from __future__ import annotations

import pytest

from .compare import first_difference
from .mutation import Edit, Mutation, broken
from .recording import Trial
from .test_recordings import all_trials

_HASH_AT_SCHEDULE = "min(num_computed + num_new_tokens, request.num_tokens) // self.block_size"
_DECODE_FILLS_BLOCK = "elif in_block == self.block_size - 1 and num_computed < request.num_tokens:\n"
_NO_TOKEN_YET = "            if request.num_computed_tokens < num_tokens:\n"
_HASH_AFTER_THE_STEP = """\
            full = request.num_computed_tokens // self.kv_cache.block_size
            self.block_pool.cache_full_blocks(request.table, request.content, full)
"""
_GOES_ON = "self.goes_on_after_own_preemption = True"
_WAITING_LOOP = "        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:\n"
_HEAD_FAILS = """\
            ):
                refused = True
                break
            self.waiting.pop()
"""
_HEAD_IS_SKIPPED = """\
            ):
                skipped.append(self.waiting.pop())
                continue
            self.waiting.pop()
"""
_AFTER_WAITING = "        full = len(self.running) >= self.max_num_seqs\n"
_SKIPPED_GO_BACK = """\
        for request in reversed(skipped):
            self.waiting.prepend(request)
"""
_TO_THE_TAIL = """\
        run.older, run.newer = last, self._queue
        last.newer = self._queue.older = run
"""
_TO_THE_HEAD = """\
        run.older, run.newer = self._queue, self._queue.newer
        run.newer.older = self._queue.newer = run
"""
_FREED_BACKWARDS = '''unhashed ones to its front."""
        for run in reversed(list(table.runs())):
'''
_FREED_FORWARDS = '''unhashed ones to its front."""
        for run in list(table.runs()):
'''


def _mutation(rule: str, *edits: tuple[str, str, str]) -> Mutation:
    return Mutation(rule, tuple(Edit(*edit) for edit in edits))


MUTATIONS = {
    # Running requests.
    "threshold_for_a_lone_request": _mutation(
        "the long-prefill threshold is off while there is one request in all",
        ("scheduler", "if len(self.running) + len(self.waiting) <= 1:", "if False:"),
    ),
    "threshold_ignored": _mutation(
        "the long-prefill threshold caps a chunk",
        ("scheduler", "threshold = self.long_prefill_token_threshold\n", "threshold = 0\n"),
    ),
    "victim_is_the_first": _mutation(
        "under fcfs the last running request is preempted",
        ("scheduler", "return self.running[-1]", "return self.running[0]"),
    ),
    "victim_by_priority_is_the_last": _mutation(
        "under priority the running request of the highest (priority, arrival) is preempted",
        (
            "scheduler",
            'if self.policy == "priority":\n            return max',
            "if False:\n            return max",
        ),
    ),
    "victim_without_arrival": _mutation(
        "of equal priority, the latest arrival is preempted",
        (
            "scheduler",
            "key=lambda request: (request.priority, request.arrival_s)",
            "key=lambda r: r.priority",
        ),
    ),
    "budget_not_given_back": _mutation(
        "a victim scheduled in this step gives its tokens back to the budget",
        ("scheduler", "budget += scheduled.pop(victim, 0)", "scheduled.pop(victim, 0)"),
    ),
    "victim_stays_in_the_batch": _mutation(
        "a victim scheduled in this step leaves the batch",
        ("scheduler", "budget += scheduled.pop(victim, 0)", "budget += scheduled.get(victim, 0)"),
    ),
    "loop_skips_after_a_victim": _mutation(
        "a victim in front of the present request does not make the loop skip one",
        ("scheduler", "index -= 1", "pass"),
    ),
    "loop_goes_on_after_self_preemption": _mutation(
        "a request that preempts itself ends the running loop (vLLM 0.33: it goes on)",
        ("scheduler", 'self.goes_on_after_own_preemption = semantics == "vllm-0.33"', _GOES_ON),
    ),
    # Preemption.
    "preempted_to_the_back": _mutation(
        "a preempted request goes to the front of the queue",
        ("scheduler", "self._fifo.appendleft(request)", "self._fifo.append(request)"),
    ),
    "preempted_blocks_lose_their_hash": _mutation(
        "the blocks of a preempted request stay hashed",
        (
            "scheduler",
            "        self.kv_cache.free(request)\n",
            "        self.kv_cache.block_pool.evict(request.table)\n",
        ),
    ),
    "admission_after_preemption": _mutation(
        "nothing is admitted in a step with a preemption",
        ("scheduler", "if self.waiting and not output.preempted:", "if self.waiting:"),
    ),
    # Admission.
    "head_is_skipped": _mutation(
        "a waiting head that does not fit blocks those behind it",
        ("scheduler", _WAITING_LOOP, "        skipped = []\n" + _WAITING_LOOP),
        ("scheduler", _HEAD_FAILS, _HEAD_IS_SKIPPED),
        ("scheduler", _AFTER_WAITING, _SKIPPED_GO_BACK + _AFTER_WAITING),
    ),
    "one_running_too_many": _mutation(
        "at most max_num_seqs requests run",
        ("scheduler", _WAITING_LOOP, _WAITING_LOOP.replace("<", "<=")),
    ),
    "queue_without_priority": _mutation(
        "the waiting heap orders by priority first",
        (
            "request",
            "return (self.priority, self.arrival_s, self.request_id)",
            "return (0, self.arrival_s, self.request_id)",
        ),
    ),
    "ties_by_id_reversed": _mutation(
        "of equal priority and arrival, the lower request id goes first",
        (
            "request",
            "return (self.priority, self.arrival_s, self.request_id)",
            "return (self.priority, self.arrival_s, -int(self.request_id[1:]))",
        ),
    ),
    "no_watermark": _mutation(
        "an admission leaves the watermark free",
        ("kv_cache", "(self.watermark_blocks if use_watermark else 0)", "0"),
    ),
    "watermark_when_idle": _mutation(
        "the watermark applies only while something runs",
        ("scheduler", "use_watermark=bool(self.running)", "use_watermark=True"),
    ),
    "watermark_rounded_up": _mutation(
        "the watermark is rounded down to blocks",
        ("kv_cache", "int(watermark * num_blocks)", "-int(-watermark * num_blocks // 1)"),
    ),
    "watermark_while_running": _mutation(
        "the watermark does not apply to running requests",
        ("kv_cache", "use_watermark: bool = False", "use_watermark: bool = True"),
    ),
    "no_full_sequence_check": _mutation(
        "an admission needs room for the whole present sequence",
        (
            "scheduler",
            "full_sequence_must_fit=self.scheduler_reserve_full_isl",
            "full_sequence_must_fit=False",
        ),
    ),
    "full_sequence_with_output": _mutation(
        "the whole present sequence has no tokens still to be generated",
        (
            "kv_cache",
            "whole = min(request.num_tokens,",
            "whole = min(request.num_prompt_tokens + request.max_tokens,",
        ),
    ),
    "free_hits_not_counted": _mutation(
        "hit blocks that sit in the free queue count as needed",
        (
            "kv_cache",
            "self._blocks(whole) - held) > headroom:",
            "self._blocks(whole) - held) > headroom + free_hits:",
        ),
    ),
    # Prefix cache.
    "hit_of_the_last_token": _mutation(
        "the last token is never hit",
        ("kv_cache", "max_blocks = (request.num_tokens - 1) //", "max_blocks = request.num_tokens //"),
    ),
    "hit_of_the_prompt_only": _mutation(
        "a preempted request hits its generated tokens, too",
        (
            "kv_cache",
            "max_blocks = (request.num_tokens - 1) //",
            "max_blocks = (request.num_prompt_tokens - 1) //",
        ),
    ),
    "hashed_after_the_step": _mutation(
        "a block is hashed at schedule time",
        ("kv_cache", _HASH_AT_SCHEDULE, "num_computed // self.block_size"),
        ("kv_cache", _DECODE_FILLS_BLOCK, "elif False:\n"),
        ("scheduler", _NO_TOKEN_YET, _HASH_AFTER_THE_STEP + _NO_TOKEN_YET),
    ),
    "prompt_blocks_only_hashed": _mutation(
        "blocks of generated tokens are hashed",
        (
            "kv_cache",
            _HASH_AT_SCHEDULE,
            "min(num_computed + num_new_tokens, request.num_prompt_tokens) // self.block_size",
        ),
        ("kv_cache", _DECODE_FILLS_BLOCK, "elif False:\n"),
    ),
    "duplicates_forgotten": _mutation(
        "a block with the hash of an evicted one takes its place in the cache",
        ("block_pool", "            self._promote(index, lo, hi)\n", "            pass\n"),
    ),
    # The free queue.
    "null_block_used": _mutation(
        "one block of the pool is never used",
        ("block_pool", "self.num_usable_blocks = num_blocks - 1", "self.num_usable_blocks = num_blocks"),
    ),
    "hashed_blocks_to_the_front": _mutation(
        "freed hashed blocks go to the tail of the free queue",
        ("block_pool", _TO_THE_TAIL, _TO_THE_HEAD),
    ),
    "start_of_a_sequence_evicted_first": _mutation(
        "blocks are freed in reverse order, so the tail of a sequence is evicted first",
        ("block_pool", _FREED_BACKWARDS, _FREED_FORWARDS),
    ),
    "hashed_blocks_allocated_first": _mutation(
        "free blocks without a hash are allocated before hashed ones",
        (
            "block_pool",
            "unhashed = min(num_blocks, self.num_unhashed_free)",
            "unhashed = max(0, num_blocks - self.num_hashed_free)",
        ),
    ),
    # The end of a request.
    "finished_blocks_lose_their_hash": _mutation(
        "the blocks of a finished request stay hashed",
        (
            "scheduler",
            "self.on_finished: Callable[[Request], None] = self.kv_cache.free",
            "self.on_finished = lambda request: self.block_pool.evict(request.table)",
        ),
    ),
    "finished_freed_backwards": _mutation(
        "finished requests are freed in batch order",
        ("scheduler", "for request in finished:", "for request in reversed(finished):"),
    ),
    "max_model_len_does_not_stop": _mutation(
        "a request ends at max_model_len",
        ("scheduler", "min(request.num_tokens_at_end, self.max_model_len)", "request.num_tokens_at_end"),
    ),
}


_IN_FLIGHT = "num_new_tokens += request.num_output_placeholders\n"
_LAST_TOKEN_TEST = "        return (\n            request.num_computed_tokens + 2 -"
_LAST_TOKEN_RULE = """\
                if self._last_token_in_flight(request):
                    index += 1
"""
_SLOTS_TAKEN = "len(self.running) < self.max_num_seqs:\n"
_SLOTS_TAKEN_BUT_FOR_LAST_TOKENS = """\
len(
            [r for r in self.running if not (r.num_output_placeholders and self._last_token_in_flight(r))]
        ) < self.max_num_seqs:
"""
_HASH_AT_UPDATE = """\
        if not stale:
            known ="""
_FREE_FINISHED = """\
        for request in finished:
            self.on_finished(request)
"""
_FREE_FINISHED_LATE = """\
        for request in self.__dict__.pop("late", ()):
            self.on_finished(request)
        self.late = finished
"""

ASYNC_MUTATIONS = {
    "token_in_flight_not_counted": _mutation(
        "the next token of a request can be scheduled while the one before is in flight",
        ("scheduler", _IN_FLIGHT + "            if 0 <", "pass\n            if 0 <"),
    ),
    "last_token_rule_dropped": _mutation(
        "a request whose last token is in flight is not scheduled again",
        ("scheduler", _LAST_TOKEN_TEST, _LAST_TOKEN_TEST.replace("return (", "return False and (")),
    ),
    "last_token_rule_too_soon": _mutation(
        "a request is scheduled until its last token is in flight",
        ("scheduler", "request.num_computed_tokens + 2 -", "request.num_computed_tokens + 3 -"),
    ),
    "last_token_at_max_model_len": _mutation(
        "a request whose token in flight brings it to max_model_len is not scheduled again",
        ("scheduler", "budget, self.max_model_len - num_computed - 1)", "budget)"),
    ),
    "slot_given_back_early": _mutation(
        "a request whose last token is in flight takes one of max_num_seqs",
        ("scheduler", _WAITING_LOOP, _WAITING_LOOP.replace(_SLOTS_TAKEN, _SLOTS_TAKEN_BUT_FOR_LAST_TOKENS)),
    ),
    "blocks_freed_early": _mutation(
        "a request whose last token is in flight keeps its blocks",
        (
            "scheduler",
            _LAST_TOKEN_RULE,
            _LAST_TOKEN_RULE + "                    self.kv_cache.free(request)\n",
        ),
    ),
    "blocks_freed_late": _mutation(
        "a finished request frees its blocks when its step is updated",
        ("async_scheduler", _FREE_FINISHED, _FREE_FINISHED_LATE),
    ),
    "token_in_flight_hashed": _mutation(
        "a block is hashed at schedule time only up to the tokens that are known by then",
        ("kv_cache", _HASH_AT_SCHEDULE, "(num_computed + num_new_tokens) // self.block_size"),
        ("kv_cache", _DECODE_FILLS_BLOCK, "elif in_block == self.block_size - 1:\n"),
    ),
    "not_hashed_at_the_next_schedule": _mutation(
        "a block whose last token was in flight is hashed by the next schedule",
        ("kv_cache", "if num_computed == request.num_tokens:", "if False:"),
    ),
    "not_hashed_at_update": _mutation(
        "a block is hashed at update, too, up to the tokens that have been delivered",
        ("async_scheduler", _HASH_AT_UPDATE, _HASH_AT_UPDATE.replace("not stale", "False")),
    ),
    "hashed_at_update_with_the_token_in_flight": _mutation(
        "a token in flight is not hashed at update",
        (
            "async_scheduler",
            "request.num_computed_tokens - request.num_output_placeholders",
            "request.num_computed_tokens",
        ),
    ),
    "stale_token_dropped": _mutation(
        "the token in flight of a preempted request is delivered",
        (
            "async_scheduler",
            "if request in output.sampled and",
            "if not stale and request in output.sampled and",
        ),
    ),
    "stale_token_counts_twice": _mutation(
        "the token in flight of a preempted request is none of its placeholders",
        ("async_scheduler", "request.num_stale_tokens = request.num_in_flight_tokens", "pass"),
    ),
    "stale_for_ever": _mutation(
        "only tokens that were in flight at the preemption are stale",
        ("async_scheduler", "request.num_stale_tokens -= num_new_tokens", "pass"),
    ),
    "placeholders_survive_preemption": _mutation(
        "a preempted request starts over without placeholders",
        ("async_scheduler", "request.num_output_placeholders = 0", "pass"),
    ),
    "finished_while_waiting_stays": _mutation(
        "a preempted request whose token in flight was its last leaves the waiting queue",
        ("async_scheduler", "self.waiting.remove(request)", "pass"),
    ),
}


def test_an_unbroken_engine_shows_nothing():
    with broken(_mutation("no rule")) as simulated:
        for trial in all_trials():
            assert first_difference(trial, simulated.run(trial)) is None


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_shows(name):
    _must_show(MUTATIONS[name], all_trials(async_scheduling=False))


@pytest.mark.parametrize("name", ASYNC_MUTATIONS)
def test_a_broken_rule_of_asynchronous_scheduling_shows(name):
    _must_show(ASYNC_MUTATIONS[name], all_trials(async_scheduling=True))


def _must_show(mutation: Mutation, trials: list[Trial]) -> None:
    with broken(mutation) as simulated:
        for trial in trials:
            try:
                difference = first_difference(trial, simulated.run(trial))
            except (AssertionError, ValueError) as error:
                difference = f"{type(error).__name__}: {error}"
            if difference is not None:
                print(difference)
                return
    pytest.fail(f"no recording shows that {mutation.rule}")
