"""Unequal contexts in one decode batch: how far attention moves from the mean context to the longest."""

from __future__ import annotations

import re
from bisect import bisect_left
from pathlib import Path

from agentservesim.errors import InputError
from agentservesim.step_time.interpolation import between, segment
from agentservesim.step_time.table_files import rows

_LABEL = re.compile(r"^(n|sr|kvB|kp)(<=|=|>)(\d+(?:\.\d+)?)(k|%)?$")
_UNITS = {None: 1.0, "k": 1024.0, "%": 0.01}
_AXES = {"n_label": "n", "skew_rate_label": "sr", "kv_big_label": "kvB", "kp_label": "kp"}

Bucket = tuple[float, float, float, float]


class Skew:
    """attention = at the mean context + alpha * (at the longest context - at the mean context)

    alpha was measured for batches of two lengths, and is looked up by prefill chunk (linear in it), decodes,
    skew rate, longest context and tokens cached before the chunk. The skew rate is
    (mean - shortest) / (longest - shortest): of two lengths, the share that is long. Labels such as
    `n<=128` and `sr>70%` give the buckets, each open below and closed above. A bucket that was not measured
    takes the mean of its neighbours that differ in the tokens cached only, else the mean of all rows.

    alpha is kept within 0 and 1: a batch takes no less than at its mean and no more than if all were longest.
    """

    def __init__(self, file: Path) -> None:
        """Raises InputError for a missing file or column and for a label or number it cannot read."""
        self._alpha: dict[tuple[float, Bucket], float] = {}
        edges: tuple[set[float], ...] = (set(), set(), set(), set())
        weights = total = 0.0
        for row in rows(file, tuple(_AXES), ("pc", "alpha")):
            bucket = tuple(_upper(file, column, row[column]) for column in _AXES)
            for axis, edge in zip(edges, bucket, strict=True):
                axis.add(edge)
            self._alpha[row["pc"], bucket] = row["alpha"]  # type: ignore[index]
            samples = float(row.get("n_samples") or 1)
            weights, total = weights + samples, total + samples * row["alpha"]
        self._default = total / weights
        self._chunks = sorted({chunk for chunk, _ in self._alpha})
        self._edges = tuple(sorted(axis) for axis in edges)

    @property
    def context_edges(self) -> list[float]:
        """Longest contexts at which alpha changes."""
        return self._edges[2]

    def alpha(self, chunk: float, decodes: int, rate: float, longest: float, cached: float) -> float:
        """alpha for a batch; chunk 0 and cached 0 where it only decodes."""
        bucket = tuple(
            axis[min(bisect_left(axis, value), len(axis) - 1)]
            for axis, value in zip(self._edges, (decodes, rate, longest, cached), strict=True)
        )
        at = segment(self._chunks, chunk)
        low = self._measured(self._chunks[at], bucket)  # type: ignore[arg-type]
        if chunk >= self._chunks[-1]:
            return low
        high = self._measured(self._chunks[at + 1], bucket)  # type: ignore[arg-type]
        return between(self._chunks, at, chunk, low, high)

    def _measured(self, chunk: float, bucket: Bucket) -> float:
        alpha = self._alpha.get((chunk, bucket))
        if alpha is None:
            near = [self._alpha.get((chunk, (*bucket[:3], cached))) for cached in self._edges[3]]
            known = [value for value in near if value is not None]
            alpha = sum(known) / len(known) if known else self._default
        return min(max(alpha, 0.0), 1.0)


def _upper(file: Path, column: str, label: str) -> float:
    """The upper edge that a bucket's label names; infinity for the last one."""
    match = _LABEL.match(label or "")
    if match is None or match[1] != _AXES[column]:
        raise InputError(
            f"{file}: column {column!r} has {label!r}: expected a bucket such as {_AXES[column]}<=8"
        )
    return float("inf") if match[2] == ">" else float(match[3]) * _UNITS[match[4]]
