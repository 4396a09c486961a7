"""Leaps: decode steps in which nothing can be decided, taken at once.

Between two events that can change a decision (an arrival, a completion, an admission, the end of a chunk, a
deadline, a shortage of blocks) a batch of decodes evolves predictably: every request gains a token a step.
A leap covers such steps and nothing else, so it decides nothing; its step times are added one by one, in
order, and are therefore the very numbers that single steps give.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from agentservesim.clock import Clock
from agentservesim.engine.content import Line
from agentservesim.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from agentservesim.step_time.interface import DecodeLine, StepTimeModel

MAX_STEPS = 256
"""A leap that is cut short has computed its later times in vain, so it does not look further than this."""


class Segment(NamedTuple):
    """Steps of a leap whose cost lies on one line: `steps` of them, the first with `context_tokens`."""

    line: DecodeLine
    steps: int
    context_tokens: int


class Leap:
    """Decode steps under way: step i runs from times[i] to times[i + 1]."""

    __slots__ = ("decodes", "segments", "times")

    def __init__(self, decodes: int, times: list[float], segments: list[Segment]) -> None:
        self.decodes = decodes
        self.times = times
        self.segments = segments

    @property
    def end_s(self) -> float:
        return self.times[-1]

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    def steps_ended(self, now_s: float) -> int:
        """How many of its steps have ended at or before `now_s`."""
        return bisect_right(self.times, now_s) - 1

    def steps_started(self, clock: Clock) -> int:
        """How many have started. One that starts at this very instant has, once the instant's steps have;
        the first was started by whoever made the leap."""
        ended = self.steps_ended(clock.now_s)
        if ended == self.steps:
            return ended
        if ended > 0 and self.times[ended] == clock.now_s and not clock.steps_started:
            return ended
        return ended + 1


def plan_leap(scheduler: Scheduler, step_time: StepTimeModel, now_s: float) -> Leap | None:
    """The leap that can start now, or None where the next step may decide something."""
    limit = min(_undecided_steps(scheduler), MAX_STEPS)
    if limit < 1:
        return None
    decodes = scheduler.decodes.size
    context_tokens = scheduler.decodes.num_computed_tokens + decodes
    spread = _spread(scheduler) if step_time.uses_spread else None
    times = [now_s]
    segments: list[Segment] = []
    while limit > 0:
        line = step_time.decode_line(decodes, context_tokens, spread)
        steps = limit
        if context_tokens + decodes * limit > line.until_tokens:
            steps = min(limit, -int((context_tokens - line.until_tokens) // decodes))
        end = context_tokens + decodes * steps
        costs = [line.base_s + line.slope_s * tokens for tokens in range(context_tokens, end, decodes)]
        times += list(accumulate(costs, initial=times[-1]))[1:]
        segments.append(Segment(line, steps, context_tokens))
        limit -= steps
        context_tokens = end
        if spread is not None:
            spread = (spread[0] + steps, spread[1] + steps)
    if times[1] <= now_s:
        return None  # steps that take no time have no order in time
    deadline_s = scheduler.kv_cache.parking.next_deadline_s()
    if deadline_s < times[-2]:
        # A step that starts after the deadline releases an entry first.
        starts = bisect_right(times, deadline_s)
        if starts == 0:
            return None
        del times[starts + 1 :]
    return Leap(decodes, times, segments)


def commit(leap: Leap, steps: int, scheduler: Scheduler) -> None:
    """Bring requests and blocks to where `steps` single steps of the leap would have."""
    decodes = scheduler.decodes
    pool = scheduler.block_pool
    # Few steps of a large batch are cheaper one by one: most of it needs nothing.
    if steps <= min(pool.block_size, 2 * decodes.size) or not _grow_apart(scheduler, steps):
        _commit_one_by_one(scheduler, steps)
        return
    decodes.scheduled += steps
    decodes.delivered += steps
    for request in scheduler.running:
        computed = request.num_computed_tokens
        needed = -(-computed // pool.block_size) - request.table.num_blocks
        if needed > 0:
            pool.allocate(request.table, needed)
        full = computed // pool.block_size
        if full > request.table.num_hashed:
            pool.cache_full_blocks(request.table, request.content, full)


def _undecided_steps(scheduler: Scheduler) -> int:
    """For how many steps every running request decodes, none finishes, the free queue has the blocks and
    nobody can be admitted."""
    decodes = scheduler.decodes
    if not decodes.size or not scheduler.only_decodes():
        return 0
    steps = min(decodes.steps_to_first_end() - 1, MAX_STEPS)
    pool = scheduler.block_pool
    available = pool.num_unhashed_free + pool.num_hashed_free
    available = scheduler.blocks_until_another_head(
        min(available, decodes.size * (MAX_STEPS // pool.block_size + 1))
    )
    if available < 0:
        return 0
    # Each request needs at most one block more than its steps fill: no need to count where that fits.
    if steps > 0 and decodes.size * (steps // pool.block_size + 1) > available:
        steps = min(steps, decodes.steps_within(available))
    return steps


def _spread(scheduler: Scheduler) -> tuple[int, int]:
    contexts = [request.num_tokens for request in scheduler.running]
    return min(contexts), max(contexts)


def _grow_apart(scheduler: Scheduler, steps: int) -> bool:
    """Whether no request writes blocks that are cached already or that another one writes too. Only then
    is the order in which they take and hash blocks of no consequence."""
    pool = scheduler.block_pool
    lines: set[Line] = set()
    for request in scheduler.running:
        full = (request.num_computed_tokens + steps) // pool.block_size
        if full > request.table.num_hashed and pool.enable_prefix_caching:
            written = pool.lines_beyond(request.table, request.content, full)
            if written is None or not lines.isdisjoint(written):
                return False
            lines.update(written)
    return True


def _commit_one_by_one(scheduler: Scheduler, steps: int) -> None:
    """The same, the way single steps do it."""
    decodes = scheduler.decodes
    for _ in range(steps):
        lacking = scheduler.kv_cache.append_tokens(*decodes.due())
        assert lacking is None, "a leap was planned beyond the free blocks"
        decodes.scheduled += 1
        decodes.delivered += 1
