"""The KV blocks of one instance: who holds them, which are cached, and which go next.

The rules are those of vLLM's BlockPool and its free queue. They are kept over *runs* of blocks (see
block_table.Run) instead of single ones, so the cost of a call does not grow with its context. Blocks
without a hash are all alike, and the queue always has them in front of the hashed ones: they are a count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from agentservesim.engine.block_table import BlockTable, CachedLine, Run
from agentservesim.engine.content import Content, Line, Span


class BlockPool:
    """Blocks and prefix cache of one instance. `num_blocks` counts vLLM's null block, which is never used.

    At any time: used + parked + hashed free + unhashed free = num_blocks - 1.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, expected at least 2 (block 0 is the null block)")
        self.num_usable_blocks = num_blocks - 1
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_unhashed_free = self.num_usable_blocks
        self.num_hashed_free = 0
        self.num_parked = 0
        self._changed: set[Line] | None = None
        self._cached: dict[Line, CachedLine] = {}
        # Sentinel of the ring of hashed free runs: _queue.newer is the next to be evicted.
        self._queue = Run(CachedLine(Line()), 0, 0)
        self._queue.newer = self._queue.older = self._queue

    # --- counts ------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks an allocation may count on. Parked ones are among them: protection is no lock."""
        return self.num_unhashed_free + self.num_hashed_free + self.num_parked

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests."""
        return self.num_usable_blocks - self.num_free_blocks

    # --- look-up -----------------------------------------------------------------------------------------

    def find_longest_cache_hit(self, content: Content, max_blocks: int) -> list[tuple[Run, int]]:
        """The leading blocks of `content` that are cached, at most `max_blocks`, as (run, end block)."""
        hits: list[tuple[Run, int]] = []
        for line, at, end in content.block_spans(self.block_size):
            if end > max_blocks:
                end = max_blocks
            index = self._cached.get(line)
            if index is None or at >= end:
                break
            for run in index.runs:
                if run.lo != at or at >= end:
                    break
                at = run.hi if run.hi < end else end
                hits.append((run, at))
            if at < end:
                break
        return hits

    def num_hit_blocks(self, content: Content, max_blocks: int) -> int:
        """How many leading blocks of `content` are cached, at most `max_blocks`."""
        hits = self.find_longest_cache_hit(content, max_blocks)
        return hits[-1][1] if hits else 0

    def watch(self) -> set[Line]:
        """A set that collects, from now on, the lines of which other blocks are cached than before. Whoever
        reads it empties it."""
        if self._changed is None:
            self._changed = set()
        return self._changed

    def blocks_before(self, lines: Collection[Line], at_most: int) -> int:
        """How many blocks can be allocated before one of these lines loses one, as far as `at_most`."""
        count = self.num_unhashed_free
        run = self._queue.newer
        assert run is not None
        while count < at_most and run is not self._queue and run.index.line not in lines:
            count += run.hi - run.lo
            run = run.newer
            assert run is not None
        return min(count, at_most)

    # --- references --------------------------------------------------------------------------------------

    def touch(self, table: BlockTable, hits: list[tuple[Run, int]]) -> None:
        """Give the holder a reference to the hits; free and parked ones leave their place."""
        for run, end in hits:
            if end < run.hi:
                self._split(run, end)
            if run.ref_cnt == 0:
                if run.park_cnt:
                    self.num_parked -= run.hi - run.lo
                else:
                    self._unlink(run)
            run.ref_cnt += 1
            table.append(run)
        table.num_blocks = table.num_hashed

    def allocate(self, table: BlockTable, num_blocks: int) -> None:
        """Take blocks from the front of the free queue; a hashed one loses its hash (eviction).

        Precondition: num_blocks <= num_unhashed_free + num_hashed_free.
        """
        table.num_blocks += num_blocks
        self._take(num_blocks)

    def allocate_one_each(self, tables: list[BlockTable]) -> None:
        """allocate() of one block for each holder."""
        for table in tables:
            table.num_blocks += 1
        self._take(len(tables))

    def _take(self, num_blocks: int) -> None:
        unhashed = min(num_blocks, self.num_unhashed_free)
        self.num_unhashed_free -= unhashed
        num_blocks -= unhashed
        while num_blocks > 0:
            run = self._queue.newer
            assert run is not None and run is not self._queue, "allocate() beyond the free blocks"
            taken = min(num_blocks, run.hi - run.lo)
            if taken == run.hi - run.lo:
                self._unlink(run)
            else:
                self.num_hashed_free -= taken
            self._drop_tail(run, taken)
            num_blocks -= taken

    def cache_full_blocks(self, table: BlockTable, content: Content, num_full_blocks: int) -> None:
        """Hash the holder's blocks up to `num_full_blocks`, so that others can hit them."""
        if not self.enable_prefix_caching or num_full_blocks <= table.num_hashed:
            return
        spans = content.block_spans(self.block_size)
        last = table.last()
        line, _, end = spans[-1]
        if last is not None and last.index.line is line and num_full_blocks <= end and _grows(last):
            # Nearly always a holder writes on where it stopped, on its last line.
            last.hi = num_full_blocks
            last.right = None
            table.extend_last(num_full_blocks)
            if self._changed is not None:
                self._changed.add(line)
            return
        for line, lo, hi in _between(spans, table.num_hashed, num_full_blocks):
            index = self._cached.get(line)
            if index is None:
                index = self._cached[line] = CachedLine(line)
            self._insert(table, index, lo, hi)

    def cache_next_block(self, table: BlockTable, content: Content) -> bool:
        """Hash the holder's next block, where that only lengthens a run that nobody else has. Returns
        whether it did; otherwise nothing has changed."""
        if not self.enable_prefix_caching:
            return True
        last = table.last()
        line, _, end = content.block_spans(self.block_size)[-1]
        if last is None or last.index.line is not line or last.hi >= end or not _grows(last):
            return False
        last.hi += 1
        last.right = None
        if self._changed is not None:
            self._changed.add(line)
        table.extend_last(last.hi)
        return True

    def lines_beyond(self, table: BlockTable, content: Content, num_full_blocks: int) -> list[Line] | None:
        """The lines that cache_full_blocks() would write; None if some of it is cached already."""
        lines = []
        for line, lo, _ in _between(content.block_spans(self.block_size), table.num_hashed, num_full_blocks):
            index = self._cached.get(line)
            if index is not None and (index.duplicates or index.runs[-1].hi > lo):
                return None
            lines.append(line)
        return lines

    def free(self, table: BlockTable) -> None:
        """Drop the holder's references. Last references go to the free queue in reverse order: hashed
        blocks to its tail, so that the end of a sequence is evicted first; unhashed ones to its front."""
        for run in reversed(list(table.runs())):
            run.ref_cnt -= 1
            if run.ref_cnt == 0:
                if run.park_cnt:
                    self.num_parked += run.hi - run.lo
                else:
                    self._append(run)
        self._free_unhashed(table)

    def evict(self, table: BlockTable) -> None:
        """Drop the holder's references, and the hashes of the blocks nobody else holds, which go to the
        front of the free queue."""
        for run in reversed(list(table.runs())):
            run.ref_cnt -= 1
            if run.ref_cnt == 0:
                if run.park_cnt:
                    self.num_parked += run.hi - run.lo
                else:
                    self.num_unhashed_free += run.hi - run.lo
                    self._drop_tail(run, run.hi - run.lo)
        self._free_unhashed(table)

    def _free_unhashed(self, table: BlockTable) -> None:
        self.num_unhashed_free += table.num_blocks - table.num_hashed
        table.clear()

    # --- parking -----------------------------------------------------------------------------------------

    def park(self, table: BlockTable) -> BlockTable:
        """A second kind of reference to the holder's hashed blocks; the holder still frees its own."""
        self._join(table)
        parked = BlockTable()
        for run in table.runs():
            run.park_cnt += 1
            parked.append(run)
        return parked

    def unpark(self, parked: BlockTable) -> None:
        """Drop park references; blocks nobody else holds go to the tail of the free queue, end first."""
        for run in reversed(list(parked.runs())):
            run.park_cnt -= 1
            if run.park_cnt == 0 and run.ref_cnt == 0:
                self.num_parked -= run.hi - run.lo
                self._append(run)
        parked.clear()

    def reclaim(self, parked: BlockTable, num_blocks: int) -> int:
        """Take up to `num_blocks` from the end of a parked table to the front of the free queue, without
        their hashes. A block in use, or shared with a second parked entry, only loses this one's reference.
        Where all that is left is in use, it stays. Returns how many were taken."""
        runs = list(parked.runs())
        in_use = next((position for position, run in enumerate(runs) if run.ref_cnt == 0), len(runs))
        taken = 0
        while taken < num_blocks and len(runs) > in_use:
            run = runs[-1]
            if run.ref_cnt or run.park_cnt > 1:
                run.park_cnt -= 1
                runs.pop()
                continue
            part = min(num_blocks - taken, run.hi - run.lo)
            taken += part
            if part == run.hi - run.lo:
                runs.pop()
            self._drop_tail(run, part)
        self.num_parked -= taken
        self.num_unhashed_free += taken
        parked.clear()
        for run in runs:
            parked.append(run)
        return taken

    # --- the free queue ----------------------------------------------------------------------------------

    def _append(self, run: Run) -> None:
        """To the tail of the queue; joined with the run already there where that continues this one."""
        last = self._queue.older
        assert last is not None
        self.num_hashed_free += run.hi - run.lo
        if last.index is run.index and last.lo == run.hi and not (last.duplicate or run.duplicate):
            last.lo = run.lo
            run.index.runs.remove(run)
            return
        run.older, run.newer = last, self._queue
        last.newer = self._queue.older = run

    def _unlink(self, run: Run) -> None:
        assert run.older is not None and run.newer is not None
        self.num_hashed_free -= run.hi - run.lo
        run.older.newer, run.newer.older = run.newer, run.older
        run.older = run.newer = None

    # --- runs --------------------------------------------------------------------------------------------

    def _split(self, run: Run, at: int) -> Run:
        """Cut `run` at block `at`; the right part becomes a run of its own, with the same holders."""
        right = Run(run.index, at, run.hi, run.duplicate)
        right.ref_cnt, right.park_cnt = run.ref_cnt, run.park_cnt
        right.right, run.right = run.right, right
        run.hi = at
        siblings = run.index.duplicates if run.duplicate else run.index.runs
        siblings.insert(siblings.index(run) + 1, right)
        if run.older is not None:  # in the free queue the end of a sequence goes first
            right.older, right.newer = run.older, run
            right.older.newer = run.older = right
        return right

    def _join(self, table: BlockTable) -> None:
        """Make one run of neighbours that nobody but the holder has. Freed blocks are joined in the queue;
        without this, those of a program that is always protected never would be."""
        joined: list[Run] = []
        for run in list(table.runs()):
            last = joined[-1] if joined else None
            if (
                last is not None
                and last.index is run.index
                and last.ref_cnt == run.ref_cnt == 1
                and last.park_cnt == run.park_cnt == 0
                and not (last.duplicate or run.duplicate)
            ):
                last.hi, last.right = run.hi, None
                run.index.runs.remove(run)
            else:
                joined.append(run)
        table.replace(joined)

    def _insert(self, table: BlockTable, index: CachedLine, lo: int, hi: int) -> None:
        """Hash blocks [lo, hi) of a line for the holder. Where the line is cached already, the new blocks
        are duplicates."""
        last = table.last()
        runs = index.runs
        if self._changed is not None:
            self._changed.add(index.line)
        if not runs or runs[-1].hi <= lo:
            if last is not None and last.index is index and last.hi == lo and _grows(last):
                last.hi = hi
                last.right = None
                table.extend_last(hi)
                return
            run = Run(index, lo, hi)
            runs.append(run)
            table.append(run)
            return
        position = bisect_right(runs, lo, key=lambda run: run.hi)
        while lo < hi:
            covered = runs[position] if position < len(runs) else None
            if covered is not None and covered.lo <= lo:
                end = min(hi, covered.hi)
                run = Run(index, lo, end, duplicate=True)
                index.duplicates.append(run)
            else:
                end = hi if covered is None else min(hi, covered.lo)
                run = Run(index, lo, end)
                runs.insert(position, run)
            position += 1
            table.append(run)
            lo = end

    def _drop_tail(self, run: Run, num_blocks: int) -> None:
        """The last blocks of a run lose their hashes. Their duplicates, if any, become the ones found."""
        index = run.index
        if self._changed is not None:
            self._changed.add(index.line)
        lo, hi = run.hi - num_blocks, run.hi
        run.hi = lo
        if run.lo == lo:
            (index.duplicates if run.duplicate else index.runs).remove(run)
        if index.duplicates and not run.duplicate:
            self._promote(index, lo, hi)
        elif not index.runs and not index.duplicates:
            del self._cached[index.line]

    def _promote(self, index: CachedLine, lo: int, hi: int) -> None:
        """Blocks [lo, hi) of the line have lost their first holder: the oldest duplicate takes its place."""
        for run in list(index.duplicates):
            for start, end in self._uncovered(index, max(lo, run.lo), min(hi, run.hi)):
                if run.lo < start:
                    run = self._split(run, start)
                rest = self._split(run, end) if end < run.hi else None
                index.duplicates.remove(run)
                run.duplicate = False
                index.runs.insert(bisect_right(index.runs, run.lo, key=lambda found: found.lo), run)
                if rest is not None:
                    run = rest

    @staticmethod
    def _uncovered(index: CachedLine, lo: int, hi: int) -> list[tuple[int, int]]:
        """The parts of [lo, hi) that no run of the line carries."""
        gaps = []
        for run in index.runs:
            if run.hi <= lo or run.lo >= hi:
                continue
            if run.lo > lo:
                gaps.append((lo, run.lo))
            lo = max(lo, run.hi)
        if lo < hi:
            gaps.append((lo, hi))
        return gaps


def _between(spans: list[Span], start: int, end: int) -> list[Span]:
    """The parts of block spans that lie in blocks [start, end)."""
    return [Span(line, max(lo, start), min(hi, end)) for line, lo, hi in spans if lo < end and start < hi]


def _grows(run: Run) -> bool:
    """Whether a holder's last run can take more blocks: nobody else has it, and nothing follows it."""
    return run.ref_cnt == 1 and run.park_cnt == 0 and run is run.index.runs[-1]
