"""Logs of real steps: what a batch was and how long it took. docs/calibration.md says how to get one."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from agentservesim.errors import InputError, nearest
from agentservesim.workload.formats._decode import decode, quoted
from agentservesim.workload.formats._lines import Place, read_lines

COLUMNS = ("seconds", "prefills", "decodes", "decode_context_tokens")

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Step(NamedTuple):
    """One real step.

    prefills                (new tokens, tokens already computed) of each sequence in prefill
    decodes                 sequences that computed one token
    decode_context_tokens   sum of their contexts, the new token included
    spread                  the shortest and longest of those contexts, if they were logged
    seconds                 wall time from the end of the step before, or from its own start after a pause
    """

    prefills: tuple[tuple[int, int], ...]
    decodes: int
    decode_context_tokens: int
    spread: tuple[int, int] | None
    seconds: float

    @property
    def prefill_tokens(self) -> int:
        """New tokens of all chunks."""
        return sum(new for new, _ in self.prefills)


class _Record(msgspec.Struct):
    seconds: float
    decodes: _Count
    decode_context_tokens: _Count
    prefills: list[tuple[_Positive, _Count]] = []
    context_min_tokens: _Count | None = None
    context_max_tokens: _Count | None = None


_RECORD = msgspec.json.Decoder(_Record)


def read_steps(path: Path) -> list[Step]:
    """The steps in a .csv, .jsonl or .parquet file, in order.

    Raises InputError with file, line, field, value and expectation.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected a log of steps with columns {', '.join(COLUMNS)}")
    readers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise InputError(f"{path}: the name ends in {path.suffix!r}: expected one of {', '.join(readers)}")
    steps = [_step(record, place) for place, record in reader(path)]
    if not steps:
        raise InputError(f"{path}: holds no step; expected rows with {', '.join(COLUMNS)}")
    return steps


def _jsonl(path: Path) -> Iterator[tuple[Place, _Record]]:
    for place, raw in read_lines(path):
        yield place, decode(_RECORD, raw, place)


def _csv(path: Path) -> Iterator[tuple[Place, _Record]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        _check_columns(path, rows.fieldnames or [])
        for row in rows:
            place = Place(path, rows.line_num)
            given = {key: value for key, value in row.items() if key and value}
            yield place, _convert({k: v if k == "prefills" else _number(v) for k, v in given.items()}, place)


def _parquet(path: Path) -> Iterator[tuple[Place, _Record]]:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot read the Parquet file: {error}") from None
    _check_columns(path, table.column_names)
    for number, row in enumerate(table.to_pylist(), start=1):
        place = Place(f"{path}, row", number)
        yield place, _convert({k: v for k, v in row.items() if v is not None}, place)


def _check_columns(path: Path, names: Any) -> None:
    for column in COLUMNS:
        if column not in names:
            raise InputError(
                f"{path}: has columns {', '.join(names)}: expected {column}"
                f"{nearest(column, names)} among them"
            )


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _convert(row: dict[str, Any], place: Place) -> _Record:
    """A row whose prefills may be text: 'new:computed' a chunk, with blanks between."""
    chunks = row.get("prefills")
    if isinstance(chunks, str):
        row["prefills"] = [_chunk(text, place) for text in chunks.split()]
    try:
        return msgspec.convert(row, _Record)
    except msgspec.ValidationError as error:
        raise InputError(f"{place}: {str(error).replace('`', '')}; the row is {quoted(row)}") from None


def _chunk(text: str, place: Place) -> tuple[int, int]:
    new, colon, computed = text.partition(":")
    if not (colon and new.isdecimal() and computed.isdecimal()):
        raise InputError(f"{place}: prefills has {text!r}: expected new:computed in tokens, such as 512:0")
    return int(new), int(computed)


def _step(record: _Record, place: Place) -> Step:
    if not (math.isfinite(record.seconds) and record.seconds > 0):
        raise InputError(f"{place}: seconds is {record.seconds}: expected a finite number above 0")
    if not record.prefills and not record.decodes:
        raise InputError(f"{place}: prefills is empty and decodes is 0: expected a step with sequences")
    if record.decode_context_tokens < record.decodes:
        raise InputError(
            f"{place}: decode_context_tokens is {record.decode_context_tokens}: expected at least decodes, "
            f"{record.decodes}"
        )
    low, high = record.context_min_tokens, record.context_max_tokens
    spread = (low, high) if record.decodes and low is not None and high is not None else None
    return Step(tuple(record.prefills), record.decodes, record.decode_context_tokens, spread, record.seconds)
