"""Parked KV: what the retention plane protects between two calls of a program.

Parked blocks are out of the free queue and still counted as free, because protection is a preference and
not a lock: a short allocation reclaims them, lowest value first, before anything is preempted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from agentservesim.engine.block_pool import BlockPool
from agentservesim.engine.block_table import BlockTable


@dataclass(slots=True, eq=False)
class ParkedEntry:
    """One call's hashed blocks, protected until `deadline_s`."""

    key: Hashable
    table: BlockTable
    deadline_s: float
    value: float
    sequence: int
    reclaimed: bool = False

    @property
    def num_blocks(self) -> int:
        return self.table.num_hashed


class ParkingLot:
    """The parked entries of one instance. `listener(event, key, blocks)` is told what happens to them;
    events are expire, release, takeover and reclaim.

    num_reclaimed    entries that lost blocks to a reclaim, each counted once
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[Hashable, ParkedEntry] = {}
        self._deadlines: list[tuple[float, int, ParkedEntry]] = []
        self._sequence = 0
        # Entries in the order of reclaim, the first at the end, released ones among them; empty: to be made.
        self._reclaimable: list[ParkedEntry] = []
        self.num_reclaimed = 0
        self.listener: Callable[[str, Hashable, int], None] = lambda event, key, blocks: None

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> ParkedEntry | None:
        """The entry of that key, or None."""
        return self._entries.get(key)

    def park(self, key: Hashable, table: BlockTable, deadline_s: float, value: float = 0.0) -> int:
        """Protect the hashed blocks of `table` until `deadline_s`; returns how many."""
        parked = self._pool.park(table)
        if parked.num_hashed == 0:
            return 0
        self._reclaimable = []
        self._sequence += 1
        entry = ParkedEntry(key, parked, deadline_s, value, self._sequence)
        self._entries[key] = entry
        self._push(entry)
        return entry.num_blocks

    def redate(self, key: Hashable, deadline_s: float, value: float) -> None:
        """Give a live entry a new deadline and value."""
        self._reclaimable = []
        entry = self._entries[key]
        entry.deadline_s, entry.value = deadline_s, value
        self._push(entry)

    def release(self, key: Hashable, event: str = "release") -> None:
        """Put an entry's blocks back into the free queue, hashed; does nothing if there is none."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.listener(event, key, entry.num_blocks)
            self._pool.unpark(entry.table)

    def release_all(self) -> None:
        """Release every entry."""
        for key in list(self._entries):
            self.release(key)

    def expire(self, now_s: float) -> None:
        """Release every entry past its deadline, in deadline order."""
        while self._deadlines and self._deadlines[0][0] < now_s:
            deadline_s, _, entry = heapq.heappop(self._deadlines)
            if self._entries.get(entry.key) is entry and entry.deadline_s == deadline_s:
                self.release(entry.key, "expire")

    def next_deadline_s(self) -> float:
        """The earliest deadline of an entry; infinity if none has one."""
        while self._deadlines:
            deadline_s, _, entry = self._deadlines[0]
            if self._entries.get(entry.key) is entry and entry.deadline_s == deadline_s:
                return deadline_s
            heapq.heappop(self._deadlines)
        return math.inf

    def reclaim(self, num_blocks: int) -> None:
        """Take `num_blocks` out of protection into the free queue's front: lowest value first, then the
        latest deadline, then the oldest entry; the end of a sequence first.

        Precondition: at least that many are parked.
        """
        order = self._reclaimable
        while order and not self._is_live(order[-1]):
            order.pop()
        if not order:
            order = self._reclaimable = sorted(
                self._entries.values(), key=lambda e: (e.value, -e.deadline_s, e.sequence), reverse=True
            )
        for entry in reversed(order):
            if not self._is_live(entry):
                continue
            before = entry.num_blocks
            taken = self._pool.reclaim(entry.table, num_blocks)
            num_blocks -= taken
            if entry.num_blocks < before:
                self.num_reclaimed += not entry.reclaimed
                entry.reclaimed = True
                self.listener("reclaim", entry.key, taken)
            if entry.num_blocks == 0:
                del self._entries[entry.key]
            if num_blocks == 0:
                return
        raise AssertionError(f"{num_blocks} parked blocks are missing")

    def _is_live(self, entry: ParkedEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def _push(self, entry: ParkedEntry) -> None:
        if entry.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (entry.deadline_s, entry.sequence, entry))
