"""The calls of a real run, from a file: what a client or an engine noted down for each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from agentservesim.errors import InputError, nearest
from agentservesim.workload.formats._decode import decode, quoted, top_level_keys
from agentservesim.workload.formats._lines import Place, read_lines

Since = Literal["queued", "released"]
"""What TTFT and latency count from: the engine's queue (vLLM's queued_ts), or the client's release."""

REQUIRED = (
    "program_id",
    "turn_id",
    "released_s",
    "first_token_s",
    "completed_s",
    "prompt_tokens",
    "output_tokens",
)
_ENGINE_KEYS = frozenset({"queued_ts", "first_token_ts", "last_token_ts"})
_CALL_KEYS = frozenset({"released_s", "first_token_s", "completed_s"})
_FILES = ("calls.parquet", "requests.jsonl", "calls.jsonl")
_EXPECTED = (
    f"expected a line with {', '.join(REQUIRED)}, or one with request_id, input_toks, output_toks, "
    "queued_ts, first_token_ts, last_token_ts"
)

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class RealCall(NamedTuple):
    """One call of a real run. Times are seconds of one clock, whatever its zero.

    start_s       what TTFT and latency count from; see Since
    scheduled_s   when the engine first gave it a step, if that was noted
    itls_s        times between tokens, if those were noted
    """

    place: Place
    program_id: str | None
    turn_id: str | None
    request_id: str | None
    start_s: float
    scheduled_s: float | None
    first_token_s: float
    completed_s: float
    prompt_tokens: int
    output_tokens: int
    itls_s: tuple[float, ...] = ()


class RealRun(NamedTuple):
    """A real run: the completed calls, and those that the file says were not."""

    path: Path
    since: Since
    calls: list[RealCall]
    incomplete: list[str]


class _EngineRecord(msgspec.Struct):
    """vLLM's own times of a request; queued_ts to last_token_ts are of one monotonic clock."""

    input_toks: _Count
    output_toks: _Count
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    scheduled_ts: float | None = None
    request_id: str | int | None = None
    itls_s: list[float] = []


class _CallRecord(msgspec.Struct):
    """A row of calls.parquet as JSON. What is null was not reached."""

    released_s: float
    prompt_tokens: _Count
    output_tokens: _Count
    first_token_s: float | None = None
    completed_s: float | None = None
    program_id: str | int | None = None
    turn_id: str | int | None = None
    request_id: str | int | None = None
    scheduled_s: float | None = None
    status: str | None = None
    itls_s: list[float] = []


_ENGINE = msgspec.json.Decoder(_EngineRecord)
_CALL = msgspec.json.Decoder(_CallRecord)


def read_real_run(path: Path) -> RealRun:
    """The calls in a requests.jsonl of a vLLM benchmark, a JSON Lines file of per-call records, a
    calls.parquet, or a folder that holds one of them.

    Raises InputError with file, line, field, value and expectation.
    """
    if path.is_dir():
        found = [path / name for name in _FILES if (path / name).is_file()]
        if not found:
            raise InputError(
                f"{path}: the folder holds no real run; expected one of {', '.join(_FILES)} in it"
            )
        path = found[0]
    if not path.is_file():
        raise InputError(f"--real {path}: no such file; expected the per-call records of a real run")
    run = _from_parquet(path) if _is_parquet(path) else _from_lines(path)
    if not run.calls:
        raise InputError(f"{path}: holds no completed call; {_EXPECTED}")
    return run


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _from_lines(path: Path) -> RealRun:
    since: Since | None = None
    calls: list[RealCall] = []
    incomplete: list[str] = []
    for place, raw in read_lines(path):
        keys = top_level_keys(raw)
        kind: Since
        if keys & _ENGINE_KEYS:
            kind, call = "queued", _engine_call(decode(_ENGINE, raw, place), place)
        elif keys & _CALL_KEYS:
            record = decode(_CALL, raw, place)
            if record.status not in (None, "completed") or record.completed_s is None:
                incomplete.append(f"{_name(record)} ({record.status or 'no completed_s'})")
                continue
            kind, call = "released", _call(record, place)
        else:
            raise InputError(f"{place}: the line has keys {quoted(sorted(keys))}: {_EXPECTED}")
        if since not in (None, kind):
            raise InputError(
                f"{place}: times count from {kind}, those before from {since}: expected one kind of record"
            )
        since = kind
        calls.append(call)
    return RealRun(path, since or "released", calls, incomplete)


def _from_parquet(path: Path) -> RealRun:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot read the Parquet file: {error}") from None
    for column in REQUIRED:
        if column not in table.column_names:
            raise InputError(
                f"{path}: has columns {', '.join(table.column_names)}: expected {column}"
                f"{nearest(column, table.column_names)} among them"
            )
    calls, incomplete = [], []
    for number, row in enumerate(_rows(table), start=1):
        place = Place(f"{path}, row", number)
        record = _converted(row, place)
        if record.status not in (None, "completed") or record.completed_s is None:
            incomplete.append(f"{_name(record)} ({record.status or 'no completed_s'})")
        else:
            calls.append(_call(record, place))
    return RealRun(path, "released", calls, incomplete)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    wanted = [f.name for f in msgspec.structs.fields(_CallRecord) if f.name in table.column_names]
    for batch in table.select(wanted).to_batches():
        for row in batch.to_pylist():
            yield {key: value for key, value in row.items() if value is not None}


def _converted(row: dict[str, Any], place: Place) -> _CallRecord:
    try:
        return msgspec.convert(row, _CallRecord)
    except msgspec.ValidationError as error:
        raise InputError(f"{place}: {str(error).replace('`', '')}") from None


def _name(record: _CallRecord) -> str:
    parts = (record.program_id, record.turn_id) if record.program_id is not None else (record.request_id,)
    return "/".join(str(part) for part in parts if part is not None) or "a call without an id"


def _engine_call(record: _EngineRecord, place: Place) -> RealCall:
    _ordered(
        place,
        queued_ts=record.queued_ts,
        scheduled_ts=record.scheduled_ts,
        first_token_ts=record.first_token_ts,
        last_token_ts=record.last_token_ts,
    )
    return RealCall(
        place,
        None,
        None,
        _text(record.request_id),
        record.queued_ts,
        record.scheduled_ts,
        record.first_token_ts,
        record.last_token_ts,
        record.input_toks,
        record.output_toks,
        tuple(record.itls_s),
    )


def _call(record: _CallRecord, place: Place) -> RealCall:
    assert record.completed_s is not None
    if record.first_token_s is None:
        raise InputError(f"{place}: first_token_s is missing: expected it of a call that has completed")
    _ordered(
        place,
        released_s=record.released_s,
        scheduled_s=record.scheduled_s,
        first_token_s=record.first_token_s,
        completed_s=record.completed_s,
    )
    return RealCall(
        place,
        _text(record.program_id),
        _text(record.turn_id),
        _text(record.request_id),
        record.released_s,
        record.scheduled_s,
        record.first_token_s,
        record.completed_s,
        record.prompt_tokens,
        record.output_tokens,
        tuple(record.itls_s),
    )


def _ordered(place: Place, **times: float | None) -> None:
    """Times are finite and do not run backwards."""
    before: tuple[str, float] | None = None
    for name, value in times.items():
        if value is None:
            continue
        if not math.isfinite(value):
            raise InputError(f"{place}: {name} is {value}: expected a finite number of seconds")
        if before is not None and value < before[1]:
            raise InputError(
                f"{place}: {name} is {value!r}: expected no less than {before[0]}, {before[1]!r}"
            )
        before = (name, value)


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)
