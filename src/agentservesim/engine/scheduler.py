"""vLLM's scheduler (v1, 0.32.0), rule for rule; asynchronous scheduling is in async_scheduler.py.

`schedule()` decides which requests compute how many tokens in the next step; `update_from_output()` takes
the step's result. There is no prefill phase and no decode phase: every request just catches up with its
number of tokens, under a token budget.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from agentservesim.engine.block_pool import BlockPool
from agentservesim.engine.decodes import Decodes
from agentservesim.engine.kv_cache import KVCacheManager
from agentservesim.engine.request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """One step.

    num_scheduled_tokens    tokens to compute a request, in batch order
    preempted, admitted     for this step
    from_decodes            how many of them, the first, are members of the scheduler's Decodes
    prefills                (new tokens, tokens computed before) of each request that computes several
    decodes                 how many compute one token on top of a context
    decode_context_tokens   sum of what those attend to, their new token included
    sampled                 under asynchronous scheduling: who gets a token from it
    """

    num_scheduled_tokens: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    from_decodes: int = 0
    prefills: list[tuple[int, int]] = field(default_factory=list)
    decodes: int = 0
    decode_context_tokens: int = 0
    sampled: set[Request] = field(default_factory=set)

    def decode_spread(self) -> tuple[int, int] | None:
        """The shortest and the longest of the decodes' contexts; None without decodes."""
        contexts = [
            request.num_computed_tokens
            for request, num_new_tokens in self.num_scheduled_tokens.items()
            if num_new_tokens == 1 and request.num_computed_tokens > 1
        ]
        return (min(contexts), max(contexts)) if contexts else None


class WaitingQueue:
    """Requests not yet running: a deque under fcfs, a heap on (priority, arrival, id) under priority.
    `num_added` counts those that have been added, preempted ones anew."""

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._by_priority = policy == "priority"
        self._fifo: deque[Request] = deque()
        self._heap: list[tuple[tuple[int, float, int | str], Request]] = []
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._heap) if self._by_priority else len(self._fifo)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order they would be admitted."""
        if self._by_priority:
            return (request for _, request in sorted(self._heap, key=lambda item: item[0]))
        return iter(self._fifo)

    def in_any_order(self) -> Iterator[Request]:
        """The requests."""
        return (request for _, request in self._heap) if self._by_priority else iter(self._fifo)

    def add(self, request: Request) -> None:
        self.num_added += 1
        if self._by_priority:
            heapq.heappush(self._heap, (request.queue_key(), request))
        else:
            self._fifo.append(request)

    def prepend(self, request: Request) -> None:
        """Put a preempted request back: to the front, or to its place by priority."""
        if self._by_priority:
            self.add(request)
        else:
            self._fifo.appendleft(request)

    def peek(self) -> Request:
        return self._heap[0][1] if self._by_priority else self._fifo[0]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1] if self._by_priority else self._fifo.popleft()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        if self._by_priority:
            self._heap = [item for item in self._heap if item[1] is not request]
            heapq.heapify(self._heap)
        else:
            self._fifo.remove(request)

    def reorder(self) -> None:
        """Priorities of waiting requests have changed."""
        self._heap = [(request.queue_key(), request) for _, request in self._heap]
        heapq.heapify(self._heap)


class Scheduler:
    """The scheduler of one instance. Options carry vLLM's names and defaults.

    Hooks, all optional:
    on_finished(request)         disposes of a finished request's blocks; default: free them
    choose_victim(running)       names the request to preempt; default: vLLM's choice
    reprioritize(waiting)        sets new priorities just before one of `waiting` could be admitted; returns
                                 whether it has
    order_holds_for(n)           how many blocks, n or fewer, can be taken until `reprioritize` might set
                                 another priority; -1: it might at any time, which is the default
    """

    tokens_in_flight = 0

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 8192,
        max_model_len: int = 131072,
        policy: Literal["fcfs", "priority"] = "fcfs",
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        enable_prefix_caching: bool = True,
        semantics: Literal["vllm-0.32", "vllm-0.33"] = "vllm-0.32",
    ) -> None:
        self.kv_cache = KVCacheManager(
            num_blocks, block_size, max_model_len, watermark, enable_prefix_caching
        )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.scheduler_reserve_full_isl = scheduler_reserve_full_isl
        self.goes_on_after_own_preemption = semantics == "vllm-0.33"
        self.running: list[Request] = []
        self.decodes = Decodes(block_size, self.tokens_in_flight)
        self.ending: list[Request] = []
        self._head_refused = False
        self.waiting = WaitingQueue(policy)
        self.on_finished: Callable[[Request], None] = self.kv_cache.free
        self.choose_victim: Callable[[list[Request]], Request] | None = None
        self.reprioritize: Callable[[WaitingQueue], bool] | None = None
        self.order_holds_for: Callable[[int], int] = lambda num_blocks: -1

    @property
    def block_pool(self) -> BlockPool:
        return self.kv_cache.block_pool

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._head_refused = False
        request.num_tokens_at_end = min(request.num_tokens_at_end, self.max_model_len)
        self.waiting.add(request)

    def only_decodes(self) -> bool:
        """Whether the next steps give every running request one token and admit nobody, until a request
        finishes, blocks run out, or one is added."""
        if self.waiting and not self._head_refused:
            return False
        return self.decodes.size == len(self.running)

    def blocks_until_another_head(self, num_blocks: int) -> int:
        """How many blocks, `num_blocks` or fewer, decodes can take until somebody else might be the head of
        the waiting queue; -1 where they need take none for that. A dynamic policy may change its mind."""
        if not self.reprioritize or not self.waiting or len(self.running) >= self.max_num_seqs:
            return num_blocks
        return self.order_holds_for(num_blocks)

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens of all running requests together."""
        others = [*self.ending, *self.running[self._num_leading :]]
        return self.decodes.num_computed_tokens + sum([request.num_computed_tokens for request in others])

    # --- schedule ----------------------------------------------------------------------------------------

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput:
        """Decide the next step. Computed tokens advance here, before the step has run."""
        self.kv_cache.parking.expire(now_s)
        output = SchedulerOutput()
        self._head_refused = False
        threshold = self.long_prefill_token_threshold
        if len(self.running) + len(self.waiting) <= 1:
            threshold = 0  # it protects others from a long prefill, and there are none
        budget = self._schedule_running(output, threshold)
        if self.waiting and not output.preempted:
            self._schedule_waiting(output, threshold, budget, now_s)
        self._advance(output)
        return output

    def _advance(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed, and note its shape. One new token on top of a context is a
        decode, whatever the request calls it."""
        decodes = self.decodes
        decodes.scheduled += 1
        output.from_decodes = output.decodes = decodes.size
        output.decode_context_tokens = decodes.num_computed_tokens
        for request, num_new_tokens in islice(output.num_scheduled_tokens.items(), decodes.size, None):
            num_computed = request.num_computed_tokens
            request.num_computed_tokens = num_computed + num_new_tokens
            if num_new_tokens == 1 and num_computed > 0:
                output.decodes += 1
                output.decode_context_tokens += num_computed + 1
            else:
                output.prefills.append((num_new_tokens, num_computed))

    def _schedule_running(self, output: SchedulerOutput, threshold: int) -> int:
        """Running requests first, in list order. Returns the token budget left."""
        scheduled = output.num_scheduled_tokens
        running = self.running
        kv_cache = self.kv_cache
        index = self._schedule_decodes(scheduled)
        budget = self.max_num_batched_tokens - len(scheduled)
        while index < len(running) and budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_new_tokens = request.num_tokens - num_computed
            if request.num_output_placeholders:
                if self._last_token_in_flight(request):
                    index += 1
                    continue
                num_new_tokens += request.num_output_placeholders
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            num_new_tokens = min(num_new_tokens, budget, self.max_model_len - num_computed - 1)
            if num_new_tokens == 0:
                index += 1
                continue
            while not (
                kv_cache.append_token(request)
                if num_new_tokens == 1
                else kv_cache.allocate_slots(request, num_new_tokens)
            ):
                victim = self._victim()
                position = running.index(victim)
                del running[position]
                if position < index:
                    index -= 1
                budget += scheduled.pop(victim, 0)
                self._preempt(victim)
                output.preempted.append(victim)
                if victim is request:
                    if self.goes_on_after_own_preemption and self.policy == "priority":
                        break
                    return budget
            else:
                scheduled[request] = num_new_tokens
                budget -= num_new_tokens
                index += 1
        return budget

    @property
    def _num_leading(self) -> int:
        """How many the running list begins with are decodes, or were until their last token was in flight."""
        return self.decodes.size + len(self.ending)

    def _schedule_decodes(self, scheduled: dict[Request, int]) -> int:
        """The decodes that the running list begins with, up to one that lacks a block: the rules of
        _schedule_running, where most requests need nothing. Returns how many requests it has dealt with."""
        index = self._num_leading
        members = self.running[:index]
        if self.ending:
            members = [request for request in members if request not in self.ending]
        lacking = self.kv_cache.append_tokens(*self.decodes.due())
        if lacking is not None:
            index = self.running.index(lacking)
            while members[-1] is not lacking:
                self.decodes.leave(members.pop())
            self.decodes.leave(members.pop())
        scheduled.update(dict.fromkeys(members, 1))
        return index

    def _schedule_waiting(self, output: SchedulerOutput, threshold: int, budget: int, now_s: float) -> None:
        """Then the head of the waiting queue, again and again: if it cannot run, nobody behind it can."""
        refused = False
        may_admit = budget > 0 and len(self.running) < self.max_num_seqs
        if may_admit and self.reprioritize and self.reprioritize(self.waiting):
            self.waiting.reorder()
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            hits = self.kv_cache.get_computed_blocks(request)
            num_hit_tokens = hits[-1][1] * self.kv_cache.block_size if hits else 0
            num_new_tokens = request.num_tokens - num_hit_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            num_new_tokens = min(num_new_tokens, budget)
            if not self.kv_cache.allocate_slots(
                request,
                num_new_tokens,
                hits,
                full_sequence_must_fit=self.scheduler_reserve_full_isl,
                use_watermark=bool(self.running),
            ):
                refused = True
                break
            self.waiting.pop()
            self.running.append(request)
            self._admit(request, num_hit_tokens, now_s)
            output.admitted.append(request)
            output.num_scheduled_tokens[request] = num_new_tokens
            budget -= num_new_tokens
        # Decodes only take blocks, so who is refused now is refused until something else happens.
        full = len(self.running) >= self.max_num_seqs
        self._head_refused = full or (refused and not output.admitted)

    def _admit(self, request: Request, num_hit_tokens: int, now_s: float) -> None:
        request.num_computed_tokens = request.num_hit_tokens = num_hit_tokens
        if request.first_hit_tokens is None:
            request.first_hit_tokens = num_hit_tokens
            request.scheduled_s = now_s
        for key in request.claims:
            self.kv_cache.parking.release(key, "takeover")
        request.claims = ()

    def _victim(self) -> Request:
        """Who is preempted when blocks run out."""
        if self.choose_victim is not None:
            return self.choose_victim(self.running)
        if self.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_s))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Preemption by recompute: all blocks go, generated tokens stay to be prefilled again."""
        if not request.decodes_alone:
            self.decodes.leave(request)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.prepend(request)

    def _last_token_in_flight(self, request: Request) -> bool:
        """Asynchronous scheduling: whether the step in flight gives the request its last token."""
        return (
            request.num_computed_tokens + 2 - request.num_output_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        )

    # --- update ------------------------------------------------------------------------------------------

    def update_from_output(self, output: SchedulerOutput, now_s: float = 0.0) -> list[Request]:
        """The step has run: each request that caught up has one more token. Returns the finished ones,
        disposed of in batch order."""
        finished = self.decodes.deliver() if output.from_decodes else []
        for request in islice(output.num_scheduled_tokens, output.from_decodes, None):
            num_tokens = request.num_tokens
            if request.num_computed_tokens < num_tokens:
                continue  # a chunk of a prefill
            if request.first_token_s is None:
                request.first_token_s = now_s
            if num_tokens < request.num_tokens_at_end:
                num_tokens += 1
                request.num_tokens = num_tokens
            if num_tokens >= request.num_tokens_at_end:
                finished.append(request)
        if finished:
            self._head_refused = False
            gone = set(finished)
            self.running = [request for request in self.running if request not in gone]
            for request in finished:
                request.completed_s = now_s
                self.on_finished(request)
        self._gather_decodes()
        return finished

    def _gather_decodes(self) -> None:
        """Who follows the decodes in the running list and has become one joins them."""
        index = self._num_leading
        most = min(len(self.running), self.max_num_batched_tokens)
        while index < most and self._is_decode(self.running[index]):
            self.decodes.join(self.running[index])
            index += 1

    def _is_decode(self, request: Request) -> bool:
        return request.first_token_s is not None and request.num_tokens - request.num_computed_tokens == 1
