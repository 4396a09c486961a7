"""vLLM's KVCacheManager for one full-attention group: may this request have its slots, and which."""

from __future__ import annotations

from operator import attrgetter

from agentservesim.engine.block_pool import BlockPool
from agentservesim.engine.block_table import Run
from agentservesim.engine.parking import ParkingLot
from agentservesim.engine.request import Request

Hits = list[tuple[Run, int]]

_place = attrgetter("place")


class KVCacheManager:
    """Slots of requests in one BlockPool, with the parked entries of the retention plane."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.parking = ParkingLot(self.block_pool)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)

    def get_computed_blocks(self, request: Request) -> Hits:
        """The request's prefix hit. The last token is never part of it: it must be computed to sample."""
        if not self.block_pool.enable_prefix_caching:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self.block_pool.find_longest_cache_hit(request.content, max_blocks)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hits: Hits | None = None,
        full_sequence_must_fit: bool = False,
        use_watermark: bool = False,
    ) -> bool:
        """Give the request slots for `num_new_tokens` beyond its computed tokens and hits.

        hits                     prefix hit of an admission; None for a running request
        full_sequence_must_fit   admit only if the whole present sequence would fit; reserves nothing
        use_watermark            keep the watermark free beyond the need

        Parked entries are reclaimed when, and only when, that lets the allocation succeed. Returns whether
        it did; otherwise nothing has changed.
        """
        pool = self.block_pool
        table = request.table
        held = table.num_blocks
        free_hits = 0
        num_computed = request.num_computed_tokens
        if hits:
            held = hits[-1][1]
            num_computed = held * self.block_size
            free_hits = _blocks_without_user(hits)
        headroom = pool.num_free_blocks - free_hits - (self.watermark_blocks if use_watermark else 0)
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            if max(0, self._blocks(whole) - held) > headroom:
                return False
        num_tokens = min(num_computed + num_new_tokens, self.max_model_len)
        num_new_blocks = max(0, self._blocks(num_tokens) - held)
        if num_new_blocks > headroom:
            return False
        if hits:
            pool.touch(table, hits)
        if num_new_blocks:
            short = num_new_blocks - pool.num_unhashed_free - pool.num_hashed_free
            if short > 0:
                self.parking.reclaim(short)
            pool.allocate(table, num_new_blocks)
        pool.cache_full_blocks(
            table, request.content, min(num_computed + num_new_tokens, request.num_tokens) // self.block_size
        )
        return True

    def append_token(self, request: Request) -> bool:
        """allocate_slots(request, 1) for a running request, in fewer words: most need nothing at all."""
        num_computed = request.num_computed_tokens
        in_block = num_computed % self.block_size
        if in_block == 0:
            pool = self.block_pool
            if self.block_size == 1 or pool.num_unhashed_free + pool.num_hashed_free == 0:
                return self.allocate_slots(request, 1)
            pool.allocate(request.table, 1)
            if num_computed == request.num_tokens:
                # Asynchronous scheduling: the block before was filled by a token that was then in flight.
                pool.cache_full_blocks(request.table, request.content, num_computed // self.block_size)
        elif in_block == self.block_size - 1 and num_computed < request.num_tokens:
            self.block_pool.cache_full_blocks(
                request.table, request.content, (num_computed + 1) // self.block_size
            )
        return True

    def append_tokens(self, takes: list[Request], fills: list[Request]) -> Request | None:
        """append_token for decodes of one running list: those that start a block with it, and those that
        fill one. Returns the first that lacks its block, and leaves those behind it alone; None: all have
        theirs."""
        pool = self.block_pool
        in_turn: list[Request] = [*takes, *fills]
        if len(takes) <= pool.num_unhashed_free + pool.num_hashed_free:
            # Lengthening a run that nobody else has is of no consequence to who takes a block, so up to the
            # first request that does more, the order is free.
            for done, request in enumerate(fills):
                if not pool.cache_next_block(request.table, request.content):
                    in_turn = [*takes, *fills[done:]]
                    break
            else:
                pool.allocate_one_each([request.table for request in takes])
                return None
        for request in sorted(set(in_turn), key=_place):
            if not self.append_token(request):
                return request
        return None

    def free(self, request: Request) -> None:
        """Free the request's blocks, hashed ones reusable until evicted."""
        self.block_pool.free(request.table)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _blocks_without_user(hits: Hits) -> int:
    """How many of the hit blocks count as free now and will not once they are hit."""
    return sum(end - run.lo for run, end in hits if run.ref_cnt == 0)
