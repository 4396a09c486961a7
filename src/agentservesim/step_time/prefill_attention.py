"""Attention of prefill chunks, from few questions to the library: it takes longer to answer one than a whole
step may cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from agentservesim.step_time.operators import Operators

NEW_KNOTS = (1, *sorted(scale * 2**power for scale in (2, 3) for power in range(15)))
COMPUTED_KNOTS = (0, *sorted(scale * 2**power for scale in (2, 3) for power in range(4, 17)))
"""Where attention over a prefix is looked up: new tokens 1, 2, 3, 4, 6, 8, ... 49,152 and computed tokens
0, 32, 48, 64, 96, ... 196,608."""
LAST_ROW, LAST_COLUMN = len(NEW_KNOTS) - 2, len(COMPUTED_KNOTS) - 2
"""The segments that go on beyond the last knots."""


class PrefillAttention:
    """Seconds of a step's prefill attention.

    Each of n chunks takes its n-th part of a batch of n chunks like it, because one kernel serves them all;
    together they take no less than the longest chunk alone. A chunk is its attention over itself, which is
    asked for exactly, plus new * h(new, computed) for the prefix it attends to; h is bilinear between knots.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._alone: dict[tuple[int, int], float] = {}
        self._excess: dict[tuple[int, int, int], float] = {}
        self._cells: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}

    def seconds(self, prefills: Sequence[tuple[int, int]]) -> float:
        """`prefills`: (new tokens, computed tokens) a chunk, at least one."""
        count = len(prefills)
        if count == 1:
            return self._chunk(1, *prefills[0])
        together = sum([self._chunk(count, new, computed) for new, computed in prefills]) / count
        return max(together, max([self._chunk(1, new, computed) for new, computed in prefills]))

    def _chunk(self, sequences: int, new: int, computed: int) -> float:
        seconds = self._over_itself(sequences, new)
        if computed == 0:
            return seconds
        row = min(bisect_right(NEW_KNOTS, new) - 1, LAST_ROW)
        column = min(bisect_right(COMPUTED_KNOTS, computed) - 1, LAST_COLUMN)
        low, high = NEW_KNOTS[row], NEW_KNOTS[row + 1]
        down = (new - low) / (high - low)
        left, right = COMPUTED_KNOTS[column], COMPUTED_KNOTS[column + 1]
        along = (computed - left) / (right - left)
        cell = self._cells.get((sequences, row, column)) or self._cell(sequences, row, column)
        above = cell[0] * (1 - along) + cell[1] * along
        below = cell[2] * (1 - along) + cell[3] * along
        excess: float = above * (1 - down) + below * down
        return seconds + new * max(excess, 0.0)

    def _cell(self, sequences: int, row: int, column: int) -> tuple[float, float, float, float]:
        """h at the corners of a cell between knots."""
        cell = self._cells[sequences, row, column] = (
            self._at(sequences, row, column),
            self._at(sequences, row, column + 1),
            self._at(sequences, row + 1, column),
            self._at(sequences, row + 1, column + 1),
        )
        return cell

    def _over_itself(self, sequences: int, new: int) -> float:
        seconds = self._alone.get((sequences, new))
        if seconds is None:
            seconds = self._operators.prefill_attention_seconds(sequences, new, 0)
            self._alone[sequences, new] = seconds
        return seconds

    def _at(self, sequences: int, row: int, column: int) -> float:
        """h at a knot. The library scales a whole length's attention down to the new tokens' share, and
        with it the kernel's fixed time; a prefix never makes a chunk faster."""
        value = self._excess.get((sequences, row, column))
        if value is None:
            new, computed = NEW_KNOTS[row], COMPUTED_KNOTS[column]
            whole = self._operators.prefill_attention_seconds(sequences, new, computed)
            value = max(whole - self._over_itself(sequences, new), 0.0) / new
            self._excess[sequences, row, column] = value
        return value
