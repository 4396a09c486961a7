"""The step log of a real engine, in the format that `calibrate` reads (docs/calibration.md).

A scheduler tells the recorder what it scheduled and when the step was over; it knows nothing of vLLM, so that
it can be tested without. Both kinds of engine loop are covered: one step at a time, or two in flight.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentservesim.errors import InputError

FLUSH_S = 1.0
"""Rows reach the file at least this often while steps run, and whenever the engine runs out of work."""

_log = logging.getLogger(__name__)


class _Computed(Protocol):
    num_computed_tokens: int


def batch_shape(
    scheduled: Mapping[str, int], requests: Mapping[str, _Computed]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Prefills, (new tokens, tokens computed before) each, and the context of each decode, its new token
    included: of what vLLM's schedule() has just returned, when `num_computed_tokens` holds the new ones too.

    One new token on top of a context is a decode, whatever the request calls it.
    """
    prefills, contexts = [], []
    for name, new_tokens in scheduled.items():
        total = requests[name].num_computed_tokens
        if new_tokens == 1 and total > 1:
            contexts.append(total)
        else:
            prefills.append((new_tokens, total - new_tokens))
    return prefills, contexts


class StepRecorder:
    """Writes a line a step. Times are seconds of one clock, whatever its zero; each row's `monotonic_s` is of
    the machine's own, to lay the log beside the times of a client on the same machine.

    steps    rows written or waiting to be
    lost     rows that could not be written, a full disk for instance; the engine runs on without them
    """

    def __init__(self, path: Path | str) -> None:
        """Start a new log. Raises InputError where it cannot be written."""
        self.path = Path(path)
        self.steps = 0
        self.lost = 0
        try:
            self._file = self.path.open("wb", buffering=0)
            self._file.write(b"\n")  # a full disk says so now
        except OSError as error:
            raise InputError(f"step log {path}: cannot be written: {error}") from None
        self._waiting: list[bytes] = []
        self._good_size = 0
        self._undo()
        self._flushed_s = float("-inf")
        self._in_flight: dict[int, tuple[float, dict[str, Any]]] = {}
        self._preempted: list[str] = []
        self._ended_s: float | None = None
        """When the step before ended; None if the engine had nothing left to do then."""

    def scheduled(
        self,
        step_id: int,
        prefills: Sequence[tuple[int, int]],
        decode_contexts: Sequence[int],
        preempted: Iterable[str],
        running: int,
        waiting: int,
        free_blocks: int,
        parked_blocks: int,
        now_s: float,
    ) -> None:
        """schedule() began at `now_s` and has decided a step.

        prefills, decode_contexts   as batch_shape gives them; a step with neither is no row, and its
                                    preemptions go to the next
        running, waiting            requests after the decision
        free_blocks, parked_blocks  blocks of the pool after it; parked ones are among the free
        """
        self._preempted += preempted
        if not prefills and not decode_contexts:
            return
        row: dict[str, Any] = {
            "step": step_id,
            "prefills": prefills,
            "decodes": len(decode_contexts),
            "decode_context_tokens": sum(decode_contexts),
        }
        if decode_contexts:
            row["context_min_tokens"] = min(decode_contexts)
            row["context_max_tokens"] = max(decode_contexts)
        row |= {
            "preempted": self._preempted,
            "running": running,
            "waiting": waiting,
            "free_blocks": free_blocks,
            "parked_blocks": parked_blocks,
            "scheduled_s": now_s,
        }
        self._preempted = []
        self._in_flight[step_id] = now_s, row

    def updated(self, step_id: int, unfinished: int, now_s: float) -> None:
        """update_from_output() has handed the step's tokens out at `now_s`, and left `unfinished` requests,
        running and waiting. Steps that were no row may be left out.

        A step lasts from the end of the one before, for the host's time between two steps is part of what a
        step costs; from its own schedule() where the engine had run out of work before.
        """
        began = self._in_flight.pop(step_id, None)
        if began is not None:
            began_s, row = began
            since_s = began_s if self._ended_s is None else self._ended_s
            clocks = {"ended_s": now_s, "monotonic_s": time.monotonic()}
            self._write({"seconds": now_s - since_s, **clocks, **row})
        # With two steps in flight the second may still run when the first leaves nothing unfinished.
        idle = not unfinished and not self._in_flight
        self._ended_s = None if idle else now_s
        if idle or now_s - self._flushed_s >= FLUSH_S:
            self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Bring what waits to the file. Where that fails, the rows are dropped and counted, and no broken
        line is left behind."""
        self._flushed_s = now_s
        rows, self._waiting = self._waiting, []
        data = b"".join(rows)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
            self._good_size += len(data)
        except OSError as error:
            if not self.lost:
                _log.warning("step log %s: rows are lost from now on: %s", self.path, error)
            self.lost += len(rows)
            self._undo()

    def close(self, now_s: float) -> None:
        """Write what waits and close the file. May be called twice."""
        if self._file.closed:
            return
        self.flush(now_s)
        self._file.close()
        if self.lost:
            _log.warning("step log %s: %d of %d rows were lost", self.path, self.lost, self.steps)

    def _write(self, row: dict[str, Any]) -> None:
        self.steps += 1
        self._waiting.append(json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def _undo(self) -> None:
        """Cut off a line that was written in part."""
        try:
            self._file.truncate(self._good_size)
            self._file.seek(self._good_size)
        except OSError:
            pass  # a pipe or a device: there is nothing to cut
