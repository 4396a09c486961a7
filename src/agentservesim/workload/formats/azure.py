"""Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; a request a row.

There is no program in these traces: each request is a program of one turn, background load.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from agentservesim.programs.program import Program, Turn
from agentservesim.workload.formats._csv import Row, columns_of, csv_rows
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.report import ReadingReport

NAME = "azure"
LOOKS_LIKE = "TIMESTAMP,ContextTokens,GeneratedTokens"

_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")


def recognises(head: Head) -> bool:
    """Whether a file is in this format."""
    return set(_COLUMNS) <= set(columns_of(head.line))


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """Stream the requests, in two passes: the earliest of the file arrives at 0 s.

    Raises InputError naming file, line, column, value and expectation.
    """
    origin: datetime | None = None
    for row in csv_rows(source, _COLUMNS):
        with source.tolerating(ReadingReport()):
            time = _request(row)[0]
            origin = time if origin is None else min(origin, time)
    for number, row in enumerate(csv_rows(source, _COLUMNS), start=1):
        with source.tolerating(report):
            time, prompt, output = _request(row)
            arrival_s = (time - (origin or time)).total_seconds()
            turn = Turn("t0", prompt, output, kept_output_tokens=output)
            yield Program(f"request-{number}", (turn,), arrival_s)


def _request(row: Row) -> tuple[datetime, int, int]:
    """Arrival, prompt tokens, output tokens. Raises InputError."""
    return _time(row), row.count("contexttokens", least=1), row.count("generatedtokens")


def _time(row: Row) -> datetime:
    """A time without a zone is taken as UTC; Azure's 100 ns are cut to whole µs."""
    try:
        time = datetime.fromisoformat(row.text("timestamp"))
        return time if time.tzinfo else time.replace(tzinfo=UTC)
    except ValueError:
        raise row.wrong("timestamp", "a time such as 2023-11-16 18:17:03.9799600") from None
