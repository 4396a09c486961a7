"""The block pool and the parked entries: rule by rule, then against the per-block model in naive_pool.py."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Hashable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentservesim.engine.block_pool import BlockPool
from agentservesim.engine.block_table import BlockTable
from agentservesim.engine.content import Content, Line, Span
from agentservesim.engine.kv_cache import KVCacheManager
from agentservesim.engine.request import Request
from naive_pool import NaivePool, NaiveRequest

BLOCK = 4

# --- a cache to write readable tests in ---------------------------------------------------------------------


def sequence(*parts: tuple[Line, int]) -> Content:
    """A sequence of (line, end token) parts."""
    starts = [0, *(end for _, end in parts)]
    return Content(tuple(Span(line, start, end) for (line, end), start in zip(parts, starts, strict=False)))


def text(name: str, num_tokens: int = 1000) -> Content:
    """A sequence that shares nothing with any other."""
    return sequence((Line(name), num_tokens))


class Cache:
    """A KVCacheManager with `usable` blocks of 4 tokens, and the events of its parked entries."""

    def __init__(self, usable: int) -> None:
        self.manager = KVCacheManager(usable + 1, BLOCK, max_model_len=10_000)
        self.pool = self.manager.block_pool
        self.parking = self.manager.parking
        self.events: list[tuple[str, Hashable, int]] = []
        self.parking.listener = lambda event, key, blocks: self.events.append((event, key, blocks))

    def admit(self, content: Content, num_tokens: int, chunk: int = 10_000) -> Request | None:
        """Admit a prompt of that many tokens and compute at most `chunk` after its hit; None: no room."""
        request = Request(0, content, num_tokens, 1000, 0.0)
        hits = self.manager.get_computed_blocks(request)
        hit_tokens = hits[-1][1] * BLOCK if hits else 0
        num_new_tokens = min(chunk, num_tokens - hit_tokens)
        if not self.manager.allocate_slots(request, num_new_tokens, hits):
            return None
        request.num_computed_tokens = hit_tokens + num_new_tokens
        return request

    def run(self, content: Content, num_tokens: int) -> Request:
        """The same, where there is room."""
        request = self.admit(content, num_tokens)
        assert request is not None
        return request

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Compute up to `num_tokens` of a sequence, tokens generated on the way included."""
        request.num_tokens = max(request.num_tokens, num_tokens)
        if not self.manager.allocate_slots(request, num_tokens - request.num_computed_tokens):
            return False
        request.num_computed_tokens = num_tokens
        return True

    def finish(self, request: Request) -> None:
        self.manager.free(request)

    def park(self, request: Request, key: str, deadline_s: float = math.inf, value: float = 0.0) -> None:
        """Finish a request and protect its blocks."""
        self.parking.park(key, request.table, deadline_s, value)
        self.manager.free(request)

    def leave(self, content: Content, num_blocks: int) -> None:
        """Compute that many full blocks of a sequence and finish: they stay cached."""
        self.finish(self.run(content, num_blocks * BLOCK))

    def leave_parked(self, content: Content, num_blocks: int, **how: Any) -> None:
        """Compute that many full blocks of a sequence and park them under the name of its last line."""
        self.park(self.run(content, num_blocks * BLOCK), content.spans[-1].line.name, **how)

    def take(self, num_blocks: int) -> Request:
        """Hold that many blocks with tokens nobody shares."""
        return self.run(text("taken"), num_blocks * BLOCK)

    def hit(self, content: Content) -> int:
        """How many leading blocks of the sequence are cached."""
        return self.pool.num_hit_blocks(content, 10_000)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Used, parked, hashed free and unhashed free blocks."""
        pool = self.pool
        return pool.num_used_blocks, pool.num_parked, pool.num_hashed_free, pool.num_unhashed_free


# --- content ------------------------------------------------------------------------------------------------


def test_a_block_belongs_to_the_line_of_its_last_token() -> None:
    first, second = Line("first"), Line("second")
    content = sequence((first, 10), (second, 21))
    assert content.block_spans(4) == [Span(first, 0, 2), Span(second, 2, 5)]


def test_a_line_that_ends_no_block_is_no_part_of_the_blocks() -> None:
    first, second, third = Line("first"), Line("second"), Line("third")
    content = sequence((first, 9), (second, 11), (third, 12))
    assert content.block_spans(4) == [Span(first, 0, 2), Span(third, 2, 3)]
    assert content.block_spans(1)[1] == Span(second, 9, 11)


def test_a_fork_inside_a_block_shares_the_blocks_before_it() -> None:
    cache, trunk = Cache(20), Line("trunk")
    cache.leave(sequence((trunk, 40)), 10)
    assert cache.hit(sequence((trunk, 24), (Line("fork"), 40))) == 6
    assert cache.hit(sequence((trunk, 27), (Line("fork"), 40))) == 6
    assert cache.hit(sequence((trunk, 28), (Line("fork"), 40))) == 7
    assert cache.hit(sequence((trunk, 3), (Line("fork"), 40))) == 0


# --- hashing and look-up ------------------------------------------------------------------------------------


def test_the_null_block_is_never_used() -> None:
    cache = Cache(3)
    assert cache.admit(text("a"), 13) is None
    assert cache.admit(text("a"), 12) is not None
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockPool(1, BLOCK)


def test_only_full_blocks_are_hashed_and_at_once() -> None:
    cache, a = Cache(10), text("a")
    request = cache.run(a, 11)
    assert cache.hit(a) == 2
    cache.grow(request, 12)
    assert cache.hit(a) == 3


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache, a = Cache(10), text("a")
    cache.leave(a, 3)
    for num_tokens, expected in [(12, 2), (13, 3), (9, 2), (8, 1), (1, 0)]:
        hits = cache.manager.get_computed_blocks(Request(0, a, num_tokens, 1, 0.0))
        assert (hits[-1][1] if hits else 0) == expected


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheManager(11, BLOCK, 1000, enable_prefix_caching=False)
    request = Request(0, text("a"), 12, 1, 0.0)
    assert manager.allocate_slots(request, 12)
    manager.free(request)
    assert manager.get_computed_blocks(request) == []
    assert manager.block_pool.num_unhashed_free == 10


def test_a_hit_takes_blocks_out_of_the_free_queue() -> None:
    cache, a = Cache(10), text("a")
    cache.leave(a, 5)
    assert cache.counts == (0, 0, 5, 5)
    request = cache.run(a, 13)
    assert cache.counts == (4, 0, 2, 4)
    cache.take(6)
    assert cache.hit(a) == 3
    cache.finish(request)
    assert cache.hit(a) == 3


def test_a_hit_counts_as_needed_room_when_it_lies_in_the_free_queue() -> None:
    cache, a = Cache(10), text("a")
    cache.leave(a, 4)
    cache.take(5)
    assert cache.counts == (5, 0, 4, 1)
    assert cache.admit(a, 21) is None  # 2 new blocks, and only 1 free beside the 4 hit
    assert cache.counts == (5, 0, 4, 1)
    assert cache.admit(a, 20) is not None


def test_a_hit_on_blocks_in_use_costs_nothing() -> None:
    cache, a = Cache(6), text("a")
    first = cache.run(a, 20)
    second = cache.run(a, 21)
    assert cache.counts == (6, 0, 0, 0)
    cache.finish(first)
    assert cache.hit(a) == 5
    cache.finish(second)
    assert cache.hit(a) == 5


# --- the order of eviction ----------------------------------------------------------------------------------


def test_unhashed_blocks_go_first() -> None:
    cache, a = Cache(10), text("a")
    cache.leave(a, 5)
    half = cache.run(text("b"), 3)
    cache.finish(half)
    cache.take(5)
    assert cache.hit(a) == 5


def test_the_end_of_a_sequence_is_evicted_first() -> None:
    cache, a = Cache(8), text("a")
    cache.leave(a, 8)
    for left in [7, 6, 5]:
        cache.take(1)
        assert cache.hit(a) == left


def test_the_longest_unused_sequence_is_evicted_first() -> None:
    cache, a, b, c = Cache(12), text("a"), text("b"), text("c")
    for content in (a, b, c):
        cache.leave(content, 4)
    cache.finish(cache.run(a, 17))  # a is used again; its new block takes the end of b
    assert [cache.hit(content) for content in (a, b, c)] == [4, 3, 4]
    cache.take(1)  # the block a has left unhashed
    cache.take(5)
    assert [cache.hit(content) for content in (a, b, c)] == [4, 0, 2]
    cache.take(3)
    assert [cache.hit(content) for content in (a, b, c)] == [3, 0, 0]


def test_a_shared_prefix_is_as_recent_as_its_last_use() -> None:
    cache, trunk = Cache(10), Line("trunk")
    left, right = sequence((trunk, 16), (Line("left"), 40)), sequence((trunk, 16), (Line("right"), 40))
    cache.leave(left, 7)
    cache.leave(right, 7)
    cache.take(3)
    assert (cache.hit(left), cache.hit(right)) == (4, 7)
    cache.take(4)
    assert (cache.hit(left), cache.hit(right)) == (3, 3)


def test_a_shared_block_is_freed_with_its_last_user() -> None:
    cache, a = Cache(8), text("a")
    first = cache.run(a, 16)
    second = cache.run(a, 17)
    cache.finish(first)
    assert cache.counts == (5, 0, 0, 3)
    cache.finish(second)
    assert cache.counts == (0, 0, 4, 4)


def test_evicted_blocks_lose_their_hashes_and_are_used_first() -> None:
    cache, a, b = Cache(8), text("a"), text("b")
    cache.leave(a, 4)
    request = cache.run(b, 16)
    cache.pool.evict(request.table)
    assert (cache.hit(a), cache.hit(b)) == (4, 0)
    assert cache.counts == (0, 0, 4, 4)
    cache.take(4)
    assert cache.hit(a) == 4


def test_evict_leaves_what_others_hold() -> None:
    cache, a = Cache(12), text("a")
    parked, live, gone = cache.run(a, 8), cache.run(a, 13), cache.run(a, 21)
    cache.park(parked, "a")
    cache.pool.evict(gone.table)
    assert cache.hit(a) == 3
    cache.pool.evict(live.table)
    assert cache.hit(a) == 2
    assert cache.counts == (0, 2, 0, 10)


# --- duplicates ---------------------------------------------------------------------------------------------


def test_two_requests_that_compute_the_same_block_keep_one_each() -> None:
    """The second prompt ends with its last block, which it must compute itself."""
    cache, a = Cache(10), text("a")
    first, second = cache.run(a, 12), cache.run(a, 12)
    assert cache.counts == (4, 0, 0, 6)
    assert cache.hit(a) == 3
    cache.finish(first)
    cache.finish(second)
    assert cache.counts == (0, 0, 4, 6)


def test_after_the_first_holder_is_evicted_the_second_is_found() -> None:
    cache, a = Cache(6), text("a")
    first, second = cache.run(a, 12), cache.run(a, 12)
    cache.finish(first)
    cache.take(2)
    taken = cache.take(1)  # the last block of first: the only one in the queue
    assert cache.hit(a) == 3
    assert cache.admit(a, 13) is None
    cache.finish(taken)
    third = cache.run(a, 13)
    cache.finish(second)
    assert cache.counts == (6, 0, 0, 0)
    cache.finish(third)
    assert cache.hit(a) == 3


def test_a_look_up_takes_the_first_of_two_holders() -> None:
    """Whoever hits the block afterwards keeps the first holder's alive, and not the second's."""
    cache, a = Cache(8), text("a")
    first, second = cache.run(a, 12), cache.run(a, 12)
    third = cache.run(a, 13)
    cache.finish(second)
    cache.finish(first)
    assert cache.counts == (4, 0, 1, 3)
    cache.take(4)
    assert cache.hit(a) == 3
    cache.finish(third)
    assert cache.hit(a) == 3


def test_the_oldest_of_the_remaining_holders_is_found_next() -> None:
    cache, a = Cache(9), text("a")
    requests = [cache.run(a, 8) for _ in range(3)]  # block 0 shared, block 1 three times
    cache.finish(requests[0])
    cache.take(5)
    cache.take(1)  # the first copy of block 1
    live = cache.admit(a, 8)
    assert live is None
    cache.finish(requests[1])  # the copy found now, free
    assert cache.hit(a) == 2
    cache.take(1)
    assert cache.hit(a) == 2  # the third copy, still in use
    cache.finish(requests[2])
    cache.take(1)
    assert cache.hit(a) == 1


def test_a_free_copy_that_becomes_the_one_found_keeps_its_place_in_the_queue() -> None:
    cache, a = Cache(5), text("a")
    first = cache.admit(a, 12, chunk=4)
    second = cache.run(a, 12)  # shares block 0, and is the first to compute blocks 1 and 2
    assert first is not None
    cache.grow(first, 12)
    cache.finish(second)
    cache.finish(first)
    hits = []
    for _ in range(5):
        cache.take(1)
        hits.append(cache.hit(a))
    assert hits == [3, 3, 2, 1, 0]


def test_a_copy_takes_the_place_of_those_blocks_only_that_are_gone() -> None:
    cache, a = Cache(12), text("a")
    first = cache.admit(a, 24, chunk=4)
    second = cache.run(a, 24)  # shares block 0, and is the first to compute blocks 1 to 5
    assert first is not None
    cache.grow(first, 12)  # copies of blocks 1 and 2
    third = cache.run(a, 9)  # uses blocks 0 and 1
    cache.finish(second)
    cache.pool.evict(third.table)  # block 1 goes, and block 2 of second stays
    assert cache.hit(a) == 6
    cache.finish(first)
    assert cache.counts == (0, 0, 7, 5)
    cache.take(5)
    hits = []
    for _ in range(7):  # blocks 5, 4, 3, 2 of second, then 2, 1, 0 of first
        cache.take(1)
        hits.append(cache.hit(a))
    assert hits == [5, 4, 3, 3, 2, 1, 0]


# --- parking ------------------------------------------------------------------------------------------------


def test_parked_blocks_are_out_of_the_queue_and_count_as_free() -> None:
    cache, a, b = Cache(12), text("a"), text("b")
    cache.leave_parked(a, 4)
    cache.leave(b, 4)
    assert cache.counts == (0, 4, 4, 4)
    assert cache.pool.num_free_blocks == 12
    cache.take(8)
    assert (cache.hit(a), cache.hit(b)) == (4, 0)
    assert cache.events == []


def test_only_hashed_blocks_are_parked() -> None:
    cache, a = Cache(8), text("a")
    cache.park(cache.run(a, 11), "a")
    assert cache.counts == (0, 2, 0, 6)
    cache.park(cache.run(text("b"), 3), "b")
    assert cache.parking.get("b") is None
    assert len(cache.parking) == 1


def test_protection_never_makes_an_allocation_fail() -> None:
    cache = Cache(8)
    cache.leave_parked(text("a"), 4, value=9.0)
    cache.leave_parked(text("b"), 4, value=9.0)
    assert cache.admit(text("c"), 33) is None
    assert cache.admit(text("c"), 32) is not None
    assert cache.counts == (8, 0, 0, 0)


def test_nothing_is_reclaimed_for_an_allocation_that_fails_anyhow() -> None:
    cache = Cache(8)
    cache.leave_parked(text("a"), 4)
    live = cache.take(2)
    assert cache.admit(text("c"), 28) is None
    assert not cache.grow(live, 36)
    assert cache.counts == (2, 4, 0, 2)
    assert cache.events == []


def test_cached_blocks_are_evicted_before_parked_ones_are_reclaimed() -> None:
    cache, a, b = Cache(8), text("a"), text("b")
    cache.leave_parked(a, 4)
    cache.leave(b, 4)
    cache.take(5)
    assert (cache.hit(a), cache.hit(b)) == (3, 0)


def test_reclaim_takes_as_many_as_needed_from_the_end() -> None:
    cache, a = Cache(8), text("a")
    cache.leave_parked(a, 6)
    cache.take(4)
    assert cache.hit(a) == 4
    assert cache.events == [("reclaim", "a", 2)]
    assert cache.counts == (4, 4, 0, 0)
    entry = cache.parking.get("a")
    assert entry is not None
    assert entry.num_blocks == 4


def test_a_wholly_reclaimed_entry_is_gone() -> None:
    cache = Cache(4)
    cache.leave_parked(text("a"), 4)
    cache.take(4)
    assert cache.parking.get("a") is None
    cache.parking.release("a")
    assert cache.events == [("reclaim", "a", 4)]


@pytest.mark.parametrize(
    ("entries", "order"),
    [
        pytest.param({"a": (5, 2.0), "b": (1, 1.0), "c": (9, 3.0)}, "bac", id="lowest value"),
        pytest.param({"a": (5, 0.0), "b": (9, 0.0), "c": (7, 0.0)}, "bca", id="then latest deadline"),
        pytest.param({"a": (5, 0.0), "b": (math.inf, 0.0), "c": (7, 0.0)}, "bca", id="no deadline is latest"),
        pytest.param({"a": (5, 0.0), "b": (5, 0.0), "c": (5, 0.0)}, "abc", id="then oldest"),
        pytest.param({"a": (9, -1.0), "b": (1, -2.0), "c": (1, 0.0)}, "bac", id="value before deadline"),
    ],
)
def test_reclaim_order(entries: dict[str, tuple[float, float]], order: str) -> None:
    cache = Cache(6)
    for name, (deadline_s, value) in entries.items():
        cache.leave_parked(text(name), 2, deadline_s=deadline_s, value=value)
    for _ in range(3):
        cache.take(2)
    assert cache.events == [("reclaim", name, 2) for name in order]


def test_one_allocation_may_reclaim_several_entries() -> None:
    cache, a, b, c = Cache(9), text("a"), text("b"), text("c")
    for value, content in enumerate((a, b, c)):
        cache.leave_parked(content, 3, value=value)
    cache.take(7)
    assert cache.events == [("reclaim", "a", 3), ("reclaim", "b", 3), ("reclaim", "c", 1)]
    assert [cache.hit(content) for content in (a, b, c)] == [0, 0, 2]


def test_redate_changes_value_and_deadline_and_keeps_the_age() -> None:
    cache = Cache(6)
    for name in "abc":
        cache.leave_parked(text(name), 2, deadline_s=5.0)
    cache.parking.redate("a", 5.0, 0.0)
    cache.parking.redate("b", 6.0, 1.0)
    cache.take(2)
    assert cache.events == [("reclaim", "a", 2)]
    cache.parking.expire(5.5)
    assert cache.events[1:] == [("expire", "c", 2)]
    cache.parking.expire(6.5)
    assert cache.events[2:] == [("expire", "b", 2)]


def test_the_earliest_deadline_is_known() -> None:
    cache = Cache(6)
    assert cache.parking.next_deadline_s() == math.inf
    for name, deadline_s in [("a", 5.0), ("b", 3.0), ("c", math.inf)]:
        cache.leave_parked(text(name), 2, deadline_s=deadline_s)
    assert cache.parking.next_deadline_s() == 3.0
    cache.parking.redate("b", 9.0, 0.0)
    assert cache.parking.next_deadline_s() == 5.0
    cache.parking.release("a")
    assert cache.parking.next_deadline_s() == 9.0


def test_entries_of_one_deadline_expire_in_the_order_of_their_parking() -> None:
    cache = Cache(6)
    for name in "bac":
        cache.leave_parked(text(name), 2, deadline_s=5.0)
    cache.parking.expire(6.0)
    assert cache.events == [("expire", name, 2) for name in "bac"]


def test_entries_expire_after_their_deadline_in_its_order() -> None:
    cache, a, b, c = Cache(12), text("a"), text("b"), text("c")
    cache.leave_parked(a, 2, deadline_s=7.0)
    cache.leave_parked(b, 2, deadline_s=3.0)
    cache.leave_parked(c, 2)
    cache.parking.expire(3.0)
    assert cache.events == []
    cache.parking.expire(100.0)
    assert cache.events == [("expire", "b", 2), ("expire", "a", 2)]
    assert cache.counts == (0, 2, 4, 6)
    cache.take(6)
    cache.take(1)
    assert [cache.hit(content) for content in (a, b, c)] == [2, 1, 2]  # b went first, so it is evicted first


def test_a_released_entry_is_evicted_from_its_end_like_any_other() -> None:
    cache, a = Cache(4), text("a")
    cache.leave_parked(a, 4)
    cache.parking.release("a")
    assert cache.events == [("release", "a", 4)]
    assert cache.counts == (0, 0, 4, 0)
    cache.take(1)
    assert cache.hit(a) == 3


def test_a_block_of_two_entries_leaves_with_the_second() -> None:
    cache, trunk = Cache(10), Line("trunk")
    a, b = sequence((trunk, 12), (Line("a"), 40)), sequence((trunk, 12), (Line("b"), 40))
    cache.leave_parked(a, 4)
    cache.leave_parked(b, 4)
    assert cache.counts == (0, 5, 0, 5)
    cache.parking.release("a")
    assert cache.counts == (0, 4, 1, 5)
    cache.parking.release("b")
    assert cache.counts == (0, 0, 5, 5)


def test_reclaim_gets_a_shared_block_from_its_last_entry_only() -> None:
    cache, trunk = Cache(8), Line("trunk")
    a, b = sequence((trunk, 12), (Line("a"), 40)), sequence((trunk, 12), (Line("b"), 40))
    cache.leave_parked(a, 5)
    cache.leave_parked(b, 4, value=1.0)
    assert cache.counts == (0, 6, 0, 2)
    cache.take(5)  # the 2 of a alone, then a gives up its share, then the end of b
    assert cache.events == [("reclaim", "a", 2), ("reclaim", "b", 1)]
    assert (cache.hit(a), cache.hit(b)) == (3, 3)
    assert cache.parking.get("a") is None
    assert cache.counts == (5, 3, 0, 0)


def test_blocks_in_use_stay_protected_through_a_reclaim() -> None:
    cache, a = Cache(10), text("a")
    cache.leave_parked(a, 6)
    live = cache.run(a, 12)  # uses 2 of them and computes a third on its own
    assert cache.counts == (3, 4, 0, 3)
    cache.take(7)
    assert cache.events == [("reclaim", "a", 4)]
    assert cache.counts == (10, 0, 0, 0)
    cache.finish(live)
    assert cache.counts == (7, 2, 1, 0)


def test_blocks_in_use_at_the_start_of_an_entry_stay_protected_however_much_is_needed() -> None:
    """Giving them up would free nothing now, and lose them once they are no longer used."""
    cache, a, b = Cache(10), text("a"), text("b")
    cache.leave_parked(a, 5)
    live = cache.run(a, 9)  # uses 2 of them
    cache.leave_parked(b, 4, value=1.0)
    cache.take(6)
    assert cache.events == [("reclaim", "a", 3), ("reclaim", "b", 3)]
    cache.finish(live)
    assert cache.counts == (6, 3, 0, 1)


def test_an_entry_all_in_use_yields_nothing_and_loses_nothing() -> None:
    cache, a, b = Cache(8), text("a"), text("b")
    cache.leave_parked(a, 2)
    live = cache.run(a, 9)
    cache.leave_parked(b, 3, value=1.0)
    cache.take(3)
    assert cache.events == [("reclaim", "b", 1)]
    cache.finish(live)
    assert cache.counts == (3, 4, 0, 1)


def test_a_parked_block_behind_one_in_use_can_be_reclaimed() -> None:
    """Two requests compute the same blocks side by side, so that each carries some of the hashes. A third
    may then use the end of an entry and not its middle."""
    cache, a = Cache(8), text("a")
    first = cache.admit(a, 8)
    second = cache.admit(a, 8)  # a block 1 of its own, which is not the one found
    assert first is not None
    assert second is not None
    cache.grow(second, 12)  # block 2 is found here
    third = cache.run(a, 13)  # uses block 1 of first and block 2 of second
    cache.park(second, "second")
    assert cache.counts == (4, 1, 0, 3)
    assert cache.admit(text("b"), 16) is not None
    assert cache.counts == (8, 0, 0, 0)
    cache.finish(third)
    cache.finish(first)
    assert cache.hit(a) == 3


def test_the_next_call_takes_its_blocks_over_at_admission() -> None:
    """It uses them before its entry is released, so they never pass through the free queue."""
    cache, a, b = Cache(10), text("a"), text("b")
    cache.leave_parked(a, 4)
    cache.leave(b, 4)
    request = cache.run(a, 17)
    assert cache.counts == (5, 0, 4, 1)
    cache.parking.release("a", "takeover")
    assert cache.events == [("takeover", "a", 4)]
    assert cache.counts == (5, 0, 4, 1)
    cache.finish(request)
    assert cache.counts == (0, 0, 8, 2)


# --- cost ---------------------------------------------------------------------------------------------------


def held_runs(cache: Cache, table: BlockTable) -> int:
    return len(list(table.runs()))


@pytest.mark.parametrize("protect", [False, True], ids=["freed", "protected"])
def test_a_conversation_of_50_turns_is_kept_in_few_runs(protect: bool) -> None:
    """Every turn continues the sequence; its cost must not grow with the number of turns before it."""
    cache, a = Cache(400), text("a", 4000)
    most = 0
    for turn in range(1, 51):
        request = cache.run(a, 20 * turn)
        cache.parking.release("a", "takeover")
        for num_tokens in range(20 * turn + 1, 20 * turn + 9):
            cache.grow(request, num_tokens)
        most = max(most, held_runs(cache, request.table))
        if protect:
            cache.park(request, "a")
        else:
            cache.finish(request)
    assert cache.hit(a) == (20 * 50 + 8) // BLOCK
    assert most <= 4


# --- any operations in any order ----------------------------------------------------------------------------

MAX_CONTENTS = 12
MAX_TOKENS = 60
index = st.integers(0, 10_000)


class Pair:
    """One request in both models."""

    def __init__(self, content: Content, num_tokens: int) -> None:
        self.real = Request(0, content, num_tokens, 1000, 0.0)
        self.naive = NaiveRequest(content, num_tokens)

    def set_num_tokens(self, num_tokens: int) -> None:
        self.real.num_tokens = self.naive.num_tokens = num_tokens


class PoolMachine(RuleBasedStateMachine):
    """Does the same to the pool and to the per-block model. `seen` counts what happened over all runs."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        usable=st.integers(4, 30),
        block_size=st.sampled_from([1, 2, 4, 4]),
        watermark=st.sampled_from([0, 0, 2]),
        length=st.integers(1, MAX_TOKENS),
    )
    def start(self, usable: int, block_size: int, watermark: int, length: int) -> None:
        self.block_size = block_size
        self.real = KVCacheManager(usable + 1, block_size, max_model_len=10_000)
        self.real.watermark_blocks = watermark
        self.naive = NaivePool(usable + 1, block_size, watermark)
        self.real_events: list[tuple[str, Hashable, int]] = []
        self.naive_events: list[tuple[str, Hashable, int]] = []
        self.real.parking.listener = lambda *event: self.real_events.append(event)
        self.naive.listener = lambda *event: self.naive_events.append(event)
        self.contents = [sequence((Line("0"), length))]
        self.running: list[Pair] = []
        self.preempted: list[Pair] = []
        self.now_s = 0.0
        self.key = 0

    # --- what sequences there are ---

    @precondition(lambda self: len(self.contents) < MAX_CONTENTS)
    @rule(base=index, cut=index, length=st.integers(1, 24), aligned=st.booleans())
    def fork(self, base: int, cut: int, length: int, aligned: bool) -> None:
        """A new line after any part of a known sequence, which may be none of it."""
        spans = self.contents[base % len(self.contents)].spans
        at = cut % (spans[-1].end + 1)
        if aligned:
            at -= at % self.block_size
        kept = [(line, min(end, at)) for line, start, end in spans if start < at]
        name = str(len(self.contents))
        self.contents.append(sequence(*kept, (Line(name), min(at + length, MAX_TOKENS + 24))))
        self.seen["fork"] += 1

    # --- requests ---

    @rule(which=index, length=index, chunk=st.integers(1, 40), flags=st.integers(0, 15))
    def admit(self, which: int, length: int, chunk: int, flags: int) -> None:
        content = self.contents[which % len(self.contents)]
        num_tokens = 1 + length % content.spans[-1].end
        if flags & 1:
            num_tokens = max(1, num_tokens - num_tokens % self.block_size)
        claim = self._key(length) if flags & 8 and self.naive.entries else None
        self._admit(Pair(content, num_tokens), chunk, bool(flags & 2), bool(flags & 4), claim)

    @precondition(lambda self: self.running)
    @rule(which=index, chunk=st.integers(1, 40))
    def admit_twin(self, which: int, chunk: int) -> None:
        """A second request with the sequence of one that is running."""
        twin = self.running[which % len(self.running)]
        self._admit(Pair(twin.naive.content, twin.naive.num_tokens), chunk, False, False, None)

    @precondition(lambda self: self.preempted)
    @rule(chunk=st.integers(1, 40), whole=st.booleans())
    def resume(self, chunk: int, whole: bool) -> None:
        pair = self.preempted.pop(0)
        if not self._admit(pair, chunk, whole, False, None):
            self.preempted.insert(0, pair)

    def _admit(self, pair: Pair, chunk: int, whole: bool, watermark: bool, claim: Hashable) -> bool:
        hits = self.real.get_computed_blocks(pair.real)
        hit_tokens = hits[-1][1] * self.block_size if hits else 0
        n = min(pair.real.num_tokens - hit_tokens, chunk)
        done = self.real.allocate_slots(pair.real, n, hits, whole, watermark)
        assert done == self.naive.admit(pair.naive, n, whole, watermark)
        self.seen["admit" if done else "refuse"] += 1
        if done:
            pair.real.num_computed_tokens = hit_tokens + n
            assert pair.naive.num_computed_tokens == hit_tokens + n
            self.running.append(pair)
            if claim is not None:
                self.real.parking.release(claim, "takeover")
                self.naive.release(claim, "takeover")
        return done

    @precondition(lambda self: self.running)
    @rule(which=index, chunk=st.integers(1, 12))
    def grow(self, which: int, chunk: int) -> None:
        """A chunk of a prefill, or a generated token."""
        self._grow(self.running[which % len(self.running)], chunk)

    @precondition(lambda self: self.running)
    @rule(chunk=st.integers(1, 12))
    def grow_all(self, chunk: int) -> None:
        """A step of everything that runs."""
        for pair in self.running:
            self._grow(pair, chunk)

    def _grow(self, pair: Pair, chunk: int) -> None:
        if pair.real.num_computed_tokens == pair.real.num_tokens:
            if pair.real.num_tokens == pair.real.content.spans[-1].end:
                return
            pair.set_num_tokens(pair.real.num_tokens + 1)
        n = min(chunk, pair.real.num_tokens - pair.real.num_computed_tokens)
        if n == 1 and chunk % 2:
            done = self.real.append_token(pair.real)
            self.seen["append"] += 1
        else:
            done = self.real.allocate_slots(pair.real, n)
        assert done == self.naive.grow(pair.naive, n)
        pair.real.num_computed_tokens += n if done else 0
        self.seen["grow" if done else "grow refused"] += 1

    @precondition(lambda self: self.running)
    @rule(which=index, how=st.sampled_from(["free", "evict", "preempt"]))
    def finish(self, which: int, how: str) -> None:
        pair = self._leave(which)
        if how == "evict":
            self.real.block_pool.evict(pair.real.table)
            self.naive.evict(pair.naive)
        else:
            self.real.free(pair.real)
            self.naive.free(pair.naive)
        if how == "preempt":
            pair.real.num_computed_tokens = 0
            self.preempted.append(pair)
        self.seen[how] += 1

    @precondition(lambda self: self.running)
    @rule(which=index, for_s=st.integers(0, 5), value=st.integers(0, 2))
    def protect(self, which: int, for_s: int, value: int) -> None:
        pair = self._leave(which)
        self.key += 1
        deadline_s = self.now_s + for_s if for_s < 5 else math.inf
        parked = self.real.parking.park(self.key, pair.real.table, deadline_s, value)
        assert parked == self.naive.park(self.key, pair.naive, deadline_s, value)
        self.real.free(pair.real)
        self.naive.free(pair.naive)
        self.seen["protect"] += parked > 0

    def _leave(self, which: int) -> Pair:
        pair = self.running.pop(which % len(self.running))
        assert pair.real.table.num_blocks == len(pair.naive.blocks)
        assert pair.real.table.num_hashed == pair.naive.num_hashed
        return pair

    # --- parked entries ---

    @rule(by_s=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    def expire(self, by_s: float) -> None:
        self.now_s += by_s
        self.real.parking.expire(self.now_s)
        self.naive.expire(self.now_s)

    @precondition(lambda self: self.naive.entries)
    @rule(which=index)
    def release(self, which: int) -> None:
        key = self._key(which)
        self.real.parking.release(key)
        self.naive.release(key)

    @precondition(lambda self: self.naive.entries)
    @rule(which=index, for_s=st.integers(0, 4), value=st.integers(0, 2))
    def redate(self, which: int, for_s: int, value: int) -> None:
        key = self._key(which)
        self.real.parking.redate(key, self.now_s + for_s, value)
        self.naive.redate(key, self.now_s + for_s, value)
        self.seen["redate"] += 1

    @rule()
    def next_deadline(self) -> None:
        deadlines = [entry.deadline_s for entry in self.naive.entries.values()]
        assert self.real.parking.next_deadline_s() == min(deadlines, default=math.inf)

    def _key(self, which: int) -> Hashable:
        return list(self.naive.entries)[which % len(self.naive.entries)]

    # --- both agree ---

    @invariant()
    def agree(self) -> None:
        self.seen["operations"] += 1
        pool, naive = self.real.block_pool, self.naive
        counts = pool.num_used_blocks, pool.num_parked, pool.num_hashed_free, pool.num_unhashed_free
        assert min(counts) >= 0
        assert sum(counts) == pool.num_usable_blocks
        assert counts == (naive.num_used, naive.num_parked, naive.num_hashed_free, naive.num_unhashed_free)
        assert pool.num_free_blocks == naive.num_free
        assert self.real_events == self.naive_events
        self.seen.update(event for event, _, _ in self.real_events)
        self.real_events.clear()
        self.naive_events.clear()
        assert len(self.real.parking) == len(naive.entries)
        for key, entry in naive.entries.items():
            real = self.real.parking.get(key)
            assert real is not None
            assert real.num_blocks == len(entry.blocks)
        self.seen["with duplicates"] += naive.num_duplicates > 0
        self._agree_on_hits()

    def _agree_on_hits(self) -> None:
        for content in self.contents:
            end = content.spans[-1].end
            whole = len(self.naive.lookup(content, end + 1))
            assert self.real.block_pool.num_hit_blocks(content, end // self.block_size) == whole
            for num_tokens in (end, end // 2 + 1, self.block_size + 1):
                if num_tokens <= end:
                    hits = self.real.get_computed_blocks(Request(0, content, num_tokens, 1, 0.0))
                    expected = min(whole, (num_tokens - 1) // self.block_size)
                    assert (hits[-1][1] if hits else 0) == expected

    def teardown(self) -> None:
        """Empty the pool block by block: what disappears when is the order of the free queue. Once with the
        requests still there, and once more after they have gone."""
        if sys.exception() is not None or not hasattr(self, "real"):
            return
        drained = self._drain()
        while self.running:
            self.finish(0, "free")
        for pair in drained:
            self.real.block_pool.evict(pair.real.table)
            self.naive.evict(pair.naive)
        self.agree()
        self._drain()
        assert self.naive.num_used == self.real.block_pool.num_usable_blocks
        self.seen["evicted"] += self.naive.num_evicted
        self.seen["runs"] += 1

    def _drain(self) -> list[Pair]:
        drained: list[Pair] = []
        while True:
            pair = Pair(text("drain", self.block_size), self.block_size)
            done = self.real.allocate_slots(pair.real, self.block_size)
            assert done == self.naive.grow(pair.naive, self.block_size)
            if not done:
                return drained
            drained.append(pair)
            self.agree()


def play(runs: int, steps: int, deterministic: bool) -> Counter[str]:
    """Random operations on both models; what happened, how often."""
    PoolMachine.seen = Counter()
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            derandomize=deterministic,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return PoolMachine.seen


RARE = [
    "append",
    "reclaim",
    "takeover",
    "expire",
    "release",
    "evict",
    "refuse",
    "grow refused",
    "with duplicates",
]


def test_any_operations_in_any_order() -> None:
    seen = play(runs=700, steps=100, deterministic=True)
    assert seen["runs"] >= 700
    assert seen["operations"] > 50_000
    assert all(seen[event] > 100 for event in RARE), seen


@pytest.mark.slow
def test_many_operations_in_any_order() -> None:
    seen = play(runs=7000, steps=100, deterministic=False)
    assert seen["operations"] > 500_000
