"""Which blocks a holder (a request, or a parked entry) has, as runs."""

from __future__ import annotations

from collections.abc import Iterator

from agentservesim.engine.content import Line


class Run:
    """Blocks [lo, hi) of one line's content that share their fate: one physical block each, all hashed,
    the same references, neighbours in the free queue.

    A run is split when somebody refers to a part of it. `right` then leads from the kept left part to the
    part split off, so that holders of the whole find it without being told.

    ref_cnt       requests that hold the blocks
    park_cnt      parked entries that hold them; at ref_cnt 0 they are parked, else they are in use
    duplicate     an older run already carries these hashes; a look-up takes the older
    newer, older  neighbours in the free queue while both counts are 0 (older is evicted before this one)
    """

    __slots__ = ("duplicate", "hi", "index", "lo", "newer", "older", "park_cnt", "ref_cnt", "right")

    def __init__(self, index: CachedLine, lo: int, hi: int, duplicate: bool = False) -> None:
        self.index = index
        self.lo = lo
        self.hi = hi
        self.duplicate = duplicate
        self.ref_cnt = 1
        self.park_cnt = 0
        self.right: Run | None = None
        self.newer: Run | None = None
        self.older: Run | None = None

    def __repr__(self) -> str:
        mark = "'" if self.duplicate else ""
        return f"Run[{self.lo}:{self.hi}){mark} ref={self.ref_cnt} park={self.park_cnt}"


class CachedLine:
    """Where one line's blocks are cached in one pool.

    runs          what a look-up finds, by position, without overlap
    duplicates    further holders of the same hashes, in the order they were hashed
    """

    __slots__ = ("duplicates", "line", "runs")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.runs: list[Run] = []
        self.duplicates: list[Run] = []


class BlockTable:
    """The blocks of one holder: its hashed ones as runs, then `num_blocks - num_hashed` unhashed ones."""

    __slots__ = ("_ends", "_runs", "num_blocks", "num_hashed")

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._ends: list[int] = []
        self.num_blocks = 0
        self.num_hashed = 0

    def append(self, run: Run) -> None:
        """Hold all of `run`, which continues the blocks held so far."""
        self._runs.append(run)
        self._ends.append(run.hi)
        self.num_hashed = run.hi

    def extend_last(self, hi: int) -> None:
        """The last run has grown to `hi`."""
        self._ends[-1] = hi
        self.num_hashed = hi

    def last(self) -> Run | None:
        """The run with the last hashed block, if it ends where this table's hashed blocks end."""
        if self._runs and self._runs[-1].hi == self.num_hashed:
            return self._runs[-1]
        return None

    def runs(self) -> Iterator[Run]:
        """The runs in order, pieces split off since included."""
        for run, end in zip(self._runs, self._ends, strict=True):
            yield run
            while run.hi < end:
                assert run.right is not None
                run = run.right
                yield run

    def replace(self, runs: list[Run]) -> None:
        """Hold the same blocks, as these runs."""
        self._runs = runs
        self._ends = [run.hi for run in runs]

    def clear(self) -> None:
        """Hold nothing."""
        self._runs.clear()
        self._ends.clear()
        self.num_blocks = self.num_hashed = 0
