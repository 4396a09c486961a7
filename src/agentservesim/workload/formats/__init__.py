"""The workload formats that can be read. A new one is a file here and a row in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from agentservesim.errors import InputError, nearest
from agentservesim.programs.program import Program
from agentservesim.workload.formats import llmservingsim, native
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import read_lines
from agentservesim.workload.report import ReadingReport

__all__ = ["FORMATS", "Format", "read_programs", "recognise"]


class Format(NamedTuple):
    """One reader: `recognises` judges a file by its first line that is not blank; `read` streams it."""

    name: str
    looks_like: str
    recognises: Callable[[bytes], bool]
    read: Callable[[Path, ReadingReport], Iterator[Program]]


FORMATS = (
    Format("native", '{"program_id": …, "turns": […]}', native.recognises, native.read),
    Format(
        "llmservingsim",
        '{"session_id": …, "sub_requests": […]}, {"workflow_id": …, "nodes": […]} or {"input_toks": …}',
        llmservingsim.recognises,
        llmservingsim.read,
    ),
)


def recognise(path: Path) -> Format:
    """The format of a file, from its first line, whatever its name.

    Raises InputError when the file cannot be read, is empty, or looks like none of the formats.
    """
    place, line = next(read_lines(path), (None, b""))
    if place is None:
        raise InputError(f"{path}: is empty and holds no programs; expected at least one line")
    for candidate in FORMATS:
        if candidate.recognises(line):
            return candidate
    expected = "; ".join(f"{candidate.name}: {candidate.looks_like}" for candidate in FORMATS)
    shown = quoted(line.strip().decode("utf-8", "backslashreplace"))
    raise InputError(
        f"{place}: the first line is {shown}, which no reader recognises; expected one of {expected}"
    )


def read_programs(path: Path, report: ReadingReport, format: str | None = None) -> Iterator[Program]:
    """Stream a workload file's programs, filling `report` on the way.

    `format` names the reader; None recognises it at once, from the first line. Raises InputError for a
    wrong name, an unreadable file and, while streaming, any line that is wrong.
    """
    if format is None:
        return recognise(path).read(path, report)
    for candidate in FORMATS:
        if candidate.name == format:
            return candidate.read(path, report)
    names = [candidate.name for candidate in FORMATS]
    hint = nearest(format, names)
    raise InputError(f"workload.format is {quoted(format)}{hint}: expected one of {', '.join(names)}")
