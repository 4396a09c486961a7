"""vLLM's block pool block by block, and the parking rules on top: the slow, plain reading of the rules.

One object a physical block, a Python list for the free queue, sets for who holds what. Nothing here is
shared with the engine except the description of a sequence; tests drive both and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from agentservesim.engine.content import Content

Key = tuple[object, int]


@dataclass(eq=False)
class Block:
    """A physical block: its hash, the requests that hold it, the parked entries that hold it."""

    number: int
    key: Key | None = None
    ref_cnt: int = 0
    entries: set[int] = field(default_factory=set)

    @property
    def parked(self) -> bool:
        return self.ref_cnt == 0 and bool(self.entries)


@dataclass(eq=False)
class NaiveRequest:
    """A sequence and the blocks it holds."""

    content: Content
    num_tokens: int
    num_computed_tokens: int = 0
    blocks: list[Block] = field(default_factory=list)

    @property
    def num_hashed(self) -> int:
        return sum(block.key is not None for block in self.blocks)


@dataclass(eq=False)
class NaiveEntry:
    """Blocks protected until a deadline."""

    number: int
    blocks: list[Block]
    deadline_s: float
    value: float


class NaivePool:
    """Blocks 1 to num_blocks - 1; block 0 is the null block."""

    def __init__(self, num_blocks: int, block_size: int, watermark_blocks: int = 0) -> None:
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self.blocks = [Block(number) for number in range(1, num_blocks)]
        self.queue = list(self.blocks)
        self.holders: dict[Key, list[Block]] = {}
        self.entries: dict[Hashable, NaiveEntry] = {}
        self.num_entries_ever = 0
        self.num_evicted = 0
        self.listener: Callable[[str, Hashable, int], None] = lambda event, key, blocks: None

    # --- counts ---

    @property
    def num_parked(self) -> int:
        return sum(block.parked for block in self.blocks)

    @property
    def num_used(self) -> int:
        return sum(block.ref_cnt > 0 for block in self.blocks)

    @property
    def num_unhashed_free(self) -> int:
        return sum(block.key is None for block in self.queue)

    @property
    def num_hashed_free(self) -> int:
        return sum(block.key is not None for block in self.queue)

    @property
    def num_free(self) -> int:
        """Parked blocks count as free: protection is a preference and not a lock."""
        return len(self.queue) + self.num_parked

    @property
    def num_duplicates(self) -> int:
        return sum(len(blocks) - 1 for blocks in self.holders.values())

    # --- look-up ---

    def key(self, content: Content, index: int) -> Key:
        """The hash of a full block: who wrote its last token fixes everything before it."""
        last = (index + 1) * self.block_size - 1
        (line,) = [line for line, start, end in content.spans if start <= last < end]
        return line, index

    def lookup(self, content: Content, num_tokens: int) -> list[Block]:
        """The prefix hit of a prompt of that many tokens; the last token is always computed."""
        hits: list[Block] = []
        while len(hits) < (num_tokens - 1) // self.block_size:
            found = self.holders.get(self.key(content, len(hits)))
            if not found:
                break
            hits.append(found[0])
        return hits

    # --- requests ---

    def admit(
        self, request: NaiveRequest, num_new_tokens: int, whole_must_fit: bool, use_watermark: bool
    ) -> bool:
        """Hit the prefix and compute `num_new_tokens` after it, or change nothing."""
        hits = self.lookup(request.content, request.num_tokens)
        free_hits = sum(block.ref_cnt == 0 for block in hits)
        available = self.num_free - free_hits - (self.watermark_blocks if use_watermark else 0)
        end = len(hits) * self.block_size + num_new_tokens
        needed = self._blocks_of(end) - len(hits)
        if whole_must_fit and self._blocks_of(request.num_tokens) - len(hits) > available:
            return False
        if needed > available:
            return False
        for block in hits:
            if block in self.queue:
                self.queue.remove(block)
            block.ref_cnt += 1
        request.blocks = hits
        self._extend(request, needed, end)
        return True

    def grow(self, request: NaiveRequest, num_new_tokens: int) -> bool:
        """Compute `num_new_tokens` more, or change nothing."""
        end = request.num_computed_tokens + num_new_tokens
        needed = max(0, self._blocks_of(end) - len(request.blocks))
        if needed > self.num_free:
            return False
        self._extend(request, needed, end)
        return True

    def free(self, request: NaiveRequest) -> None:
        self._drop(request, evict=False)

    def evict(self, request: NaiveRequest) -> None:
        self._drop(request, evict=True)

    def _blocks_of(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _extend(self, request: NaiveRequest, num_blocks: int, end_token: int) -> None:
        if num_blocks > len(self.queue):
            self._reclaim(num_blocks - len(self.queue))
        for _ in range(num_blocks):
            block = self.queue.pop(0)
            self.num_evicted += block.key is not None
            self._unhash(block)
            block.ref_cnt = 1
            request.blocks.append(block)
        for index in range(end_token // self.block_size):
            block = request.blocks[index]
            if block.key is None:
                block.key = self.key(request.content, index)
                self.holders.setdefault(block.key, []).append(block)
        request.num_computed_tokens = end_token

    def _drop(self, request: NaiveRequest, evict: bool) -> None:
        for block in reversed(request.blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.entries:
                if evict:
                    self._unhash(block)
                self._enqueue(block)
        request.blocks = []
        request.num_computed_tokens = 0

    def _enqueue(self, block: Block) -> None:
        if block.key is None:
            self.queue.insert(0, block)
        else:
            self.queue.append(block)

    def _unhash(self, block: Block) -> None:
        if block.key is not None:
            self.holders[block.key].remove(block)
            if not self.holders[block.key]:
                del self.holders[block.key]
            block.key = None

    # --- parked entries ---

    def park(self, key: Hashable, request: NaiveRequest, deadline_s: float, value: float) -> int:
        """Protect the hashed blocks of a request, which still holds them; returns how many."""
        blocks = [block for block in request.blocks if block.key is not None]
        if blocks:
            self.num_entries_ever += 1
            entry = NaiveEntry(self.num_entries_ever, blocks, deadline_s, value)
            self.entries[key] = entry
            for block in blocks:
                block.entries.add(entry.number)
        return len(blocks)

    def redate(self, key: Hashable, deadline_s: float, value: float) -> None:
        self.entries[key].deadline_s = deadline_s
        self.entries[key].value = value

    def release(self, key: Hashable, event: str = "release") -> None:
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        self.listener(event, key, len(entry.blocks))
        for block in reversed(entry.blocks):
            self._leave(entry, block)

    def expire(self, now_s: float) -> None:
        due = [(entry.deadline_s, entry.number, key) for key, entry in self.entries.items()]
        for deadline_s, _, key in sorted(due, key=lambda item: item[:2]):
            if deadline_s < now_s:
                self.release(key, "expire")

    def _leave(self, entry: NaiveEntry, block: Block) -> None:
        block.entries.remove(entry.number)
        if block.ref_cnt == 0 and not block.entries:
            self._enqueue(block)

    def _reclaim(self, num_blocks: int) -> None:
        """Lowest value, then latest deadline, then oldest entry; from its end. A block somebody else holds
        yields nothing yet: the entry only loses its reference, and where requests use all that is left
        of the entry, not even that."""
        order = sorted(
            self.entries.items(), key=lambda item: (item[1].value, -item[1].deadline_s, item[1].number)
        )
        for key, entry in order:
            before = len(entry.blocks)
            taken = 0
            while taken < num_blocks and any(block.ref_cnt == 0 for block in entry.blocks):
                block = entry.blocks.pop()
                if block.parked and len(block.entries) == 1:
                    self._unhash(block)
                    taken += 1
                self._leave(entry, block)
            num_blocks -= taken
            if len(entry.blocks) < before:
                self.listener("reclaim", key, taken)
            if not entry.blocks:
                del self.entries[key]
            if num_blocks == 0:
                return
        raise AssertionError("fewer parked blocks than counted")
