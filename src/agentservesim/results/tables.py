"""The columns of the three result tables, and a writer that keeps little of them in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROGRAMS = pa.schema(
    [
        ("program_id", pa.string()),
        ("status", pa.string()),
        ("arrival_s", pa.float64()),
        ("completed_s", pa.float64()),
        ("jct_s", pa.float64()),
        ("turns", pa.int32()),
        ("calls_completed", pa.int32()),
        ("calls_refused", pa.int32()),
        ("attained_service_s", pa.float64()),
    ]
)

CALLS = pa.schema(
    [
        ("program_id", pa.string()),
        ("turn_id", pa.string()),
        ("status", pa.string()),
        ("instance", pa.int32()),
        ("released_s", pa.float64()),
        ("scheduled_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("completed_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("hit_tokens", pa.int64()),
        ("preemptions", pa.int32()),
        ("reason", pa.string()),
    ]
)

DECISIONS = pa.schema(
    [
        ("time_s", pa.float64()),
        ("event", pa.string()),
        ("program_id", pa.string()),
        ("turn_id", pa.string()),
        ("instance", pa.int32()),
        ("blocks", pa.int64()),
        ("deadline_s", pa.float64()),
        ("value", pa.float64()),
    ]
)

BATCH_ROWS = 16384


class TableWriter:
    """Rows of one table: to a Parquet file in batches, or, with no path, into memory; or nowhere."""

    def __init__(self, schema: pa.Schema, path: Path | None, keep: bool = True) -> None:
        self.schema = schema
        self.wanted = keep or path is not None
        self._rows: list[tuple[Any, ...]] = []
        self._batches: list[pa.RecordBatch] = []
        self._file = pq.ParquetWriter(path, schema) if path is not None else None

    def append(self, row: tuple[Any, ...]) -> None:
        """Add a row, its values in the order of the schema."""
        if not self.wanted:
            return
        self._rows.append(row)
        if len(self._rows) >= BATCH_ROWS:
            self._flush()

    def close(self) -> pa.Table | None:
        """Write what is left; returns the table if it was kept in memory."""
        if not self.wanted:
            return None
        self._flush()
        if self._file is not None:
            self._file.close()
            return None
        return pa.Table.from_batches(self._batches, schema=self.schema)

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = zip(*self._rows, strict=True)
        arrays = [
            pa.array(column, type=field.type) for column, field in zip(columns, self.schema, strict=True)
        ]
        batch = pa.record_batch(arrays, schema=self.schema)
        if self._file is not None:
            self._file.write_batch(batch)
        else:
            self._batches.append(batch)
        self._rows = []
