"""The decisions of a live engine, as JSON lines with the columns of decisions.parquet."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO

from agentservesim.errors import InputError


class DecisionLog:
    """Appends a line a decision; without a path it only counts them by event, in `counts`."""

    def __init__(self, path: str | None, counts: dict[str, int]) -> None:
        self._counts = counts
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise InputError(f"decision_log {path}: cannot write there: {error}") from None

    def __call__(
        self,
        time_s: float,
        event: str,
        key: tuple[str, str],
        instance: int | None,
        blocks: int | None = None,
        deadline_s: float | None = None,
        value: float | None = None,
    ) -> None:
        """One decision; `key` is (program id, turn id). An infinite deadline is written as null."""
        self._counts[event] = self._counts.get(event, 0) + 1
        if self._file is None:
            return
        row = {
            "time_s": time_s,
            "event": event,
            "program_id": key[0],
            "turn_id": key[1],
            "instance": instance,
        }
        if blocks is not None:
            row["blocks"] = blocks
        if deadline_s is not None:
            row |= {"deadline_s": deadline_s if math.isfinite(deadline_s) else None, "value": value}
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError:
            self._counts["decisions_not_written"] = self._counts.get("decisions_not_written", 0) + 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
