"""Protection in vLLM's own block pool, by the rules of engine/parking.py.

Two of vLLM's objects are given a subclass of their own class after vLLM has built them. Their state and all
of their behaviour stay vLLM's; what is added applies to parked blocks only.

A parked block has no user and stays out of the free queue, yet counts as free: protection is a preference,
not a lock. When an allocation needs more than the queue holds, the parking lot gives blocks up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from agentservesim.engine.parking import ParkingLot


class HeldBlocks:
    """The hashed blocks of a finished request, or of a parked entry, in the order of their tokens.

    give_back   frees the request's blocks, once
    """

    def __init__(self, blocks: list[KVCacheBlock], give_back: Callable[[], None] | None = None) -> None:
        self.blocks = blocks
        self._give_back = give_back

    @property
    def num_hashed(self) -> int:
        return len(self.blocks)

    def give_back(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class ParkingBlockPool(BlockPool):
    """vLLM's BlockPool with parked blocks. Its parking lot is at `parking`.

    num_parked   blocks that are parked and have no user
    """

    parking: ParkingLot
    block_size: int
    num_parked: int
    _parks: Counter[int]

    @staticmethod
    def adopt(pool: BlockPool, block_size: int) -> ParkingBlockPool:
        """Make vLLM's pool one that can park."""
        pool.__class__ = ParkingBlockPool
        pool.block_size = block_size
        pool.num_parked = 0
        pool._parks = Counter()
        pool.parking = ParkingLot(pool)
        return pool

    # --- vLLM's interface --------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        return super().get_num_free_blocks() + self.num_parked

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        short = num_blocks - super().get_num_free_blocks()
        if 0 < short <= self.num_parked:
            self.parking.reclaim(short)
        return super().get_new_blocks(num_blocks)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A parked block without a user is in no queue that it could be taken from."""
        if self.num_parked:
            unused = [block for block in blocks if block.ref_cnt == 0 and self._parks[block.block_id]]
            for block in unused:
                block.ref_cnt += 1
                if self.metrics_collector:
                    self.metrics_collector.on_block_accessed(block)
            self.num_parked -= len(unused)
            if unused:
                taken = {block.block_id for block in unused}
                blocks = [block for block in blocks if block.block_id not in taken]
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        super().free_blocks(self._last_uses(ordered_blocks) if self._parks else ordered_blocks)

    def reset_prefix_cache(self) -> bool:
        self.parking.release_all()
        return super().reset_prefix_cache()

    def _last_uses(self, blocks: Iterable[KVCacheBlock]) -> Iterator[KVCacheBlock]:
        """The blocks to free; a parked one that loses its last user waits outside the queue."""
        for block in blocks:
            if block.ref_cnt == 1 and block.block_id in self._parks:
                block.ref_cnt = 0
                self.num_parked += 1
            else:
                yield block

    # --- what the planes look at and do ------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        """Without the null block."""
        return self.num_gpu_blocks - 1

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests."""
        return self.num_usable_blocks - self.get_num_free_blocks()

    def num_hit_blocks(self, block_hashes: Sequence[Any], max_blocks: int) -> int:
        """How many leading blocks of a sequence are cached, at most `max_blocks`."""
        if not self.enable_caching:
            return 0
        hits = 0
        for block_hash in block_hashes[:max_blocks]:
            if self.get_cached_block(block_hash, [0]) is None:
                break
            hits += 1
        return hits

    def park(self, held: HeldBlocks) -> HeldBlocks:
        """A second kind of reference to the holder's blocks; the holder still frees its own."""
        self._parks.update(block.block_id for block in held.blocks)
        return HeldBlocks(held.blocks)

    def unpark(self, parked: HeldBlocks) -> None:
        """Drop park references; blocks nobody else holds go to the queue's tail, end first."""
        freed = []
        for block in reversed(parked.blocks):
            if self._unpark_one(block):
                self.num_parked -= 1
                freed.append(block)
        self.free_block_queue.append_n(freed)
        parked.blocks = []

    def reclaim(self, parked: HeldBlocks, num_blocks: int) -> int:
        """Take up to `num_blocks` from the end of a parked entry to the front of the free queue, without
        their hashes. A block in use, or in a second entry, only loses this one's reference. Where all that
        is left is in use, it stays. Returns how many were taken."""
        blocks = parked.blocks
        in_use = next((at for at, block in enumerate(blocks) if block.ref_cnt == 0), len(blocks))
        freed: list[KVCacheBlock] = []
        while len(freed) < num_blocks and len(blocks) > in_use:
            block = blocks.pop()
            if self._unpark_one(block):
                freed.append(block)
        self.num_parked -= len(freed)
        self.evict_blocks({block.block_id for block in freed})
        self.free_block_queue.prepend_n(freed)
        return len(freed)

    def evict(self, held: HeldBlocks) -> None:
        """Free the holder's blocks, and drop the hashes of those that nobody else has."""
        unshared = {block.block_id for block in held.blocks if block.ref_cnt == 1}
        self.evict_blocks(unshared - self._parks.keys())
        held.give_back()

    def _unpark_one(self, block: KVCacheBlock) -> bool:
        """Drop one park reference; whether that was the last of any kind."""
        self._parks[block.block_id] -= 1
        if self._parks[block.block_id]:
            return False
        del self._parks[block.block_id]
        return bool(block.ref_cnt == 0)


class ProgramKVCacheManager(KVCacheManager):
    """vLLM's KVCacheManager; it says when a waiting request has been admitted, and when a running one lacks
    a block, which is when vLLM chooses whom to preempt."""

    on_admitted: Callable[[Request], None]
    on_short: Callable[[], None]

    @staticmethod
    def adopt(
        manager: KVCacheManager, on_admitted: Callable[[Request], None], on_short: Callable[[], None]
    ) -> None:
        manager.__class__ = ProgramKVCacheManager
        manager.on_admitted = on_admitted
        manager.on_short = on_short

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_slots(request, *args, **kwargs)
        if request.status == RequestStatus.RUNNING:
            if blocks is None:
                self.on_short()
        elif blocks is not None:
            self.on_admitted(request)
        return blocks
