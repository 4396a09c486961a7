"""The workload formats that can be read. A new one is a file here and a name in `READERS`.

A reader is a module with

    NAME = "codex"                                   # for workload.format and --format
    LOOKS_LIKE = '{"timestamp": …, "payload": …}'    # shown when nothing is recognised
    def recognises(head: Head) -> bool: ...          # by content: see Head in _source.py
    def read(source: Source, report: ReadingReport) -> Iterator[Program]: ...

and, if files of one program may lie apart, `group(head) -> frozenset[str]`: files of a folder whose sets
meet are read together, the later ones as `source.companions`.

What a reader does: get records with `source.records(decoder, report)` (a typed msgspec decoder; one line in
memory at a time), `source.document(decoder)` (one JSON value a file) or `source.lines()` (raw bytes); call
`Distinct().accept(program, place)` for each program; count, in words short enough for a table, what it
dropped, estimated, clamped or inferred in `report`. What is wrong is an InputError with file, line, field,
value and expectation: use `decode`, or f"{place}: {field} is {quoted(value)}: expected …". Recognise with
care: readers are asked in the order of the table and the first to say yes reads the file.

What is done here for all readers: files, folders, globs, gzip and stdin; unrecognised files; ids that occur
in two files; `lenient` (`source.records` skips malformed lines; `with source.tolerating(report):` does so
for any other piece; an InputError that a reader lets out ends that file only, and is counted); the cap on
pauses; counting programs and turns; and a last check that every program can run.

Turns: gap_s, pause_s and tools sit on the turn before the gap. Where the children of one turn start at
different times, give the turn the shortest gap and each later child the rest as `delay_s`, seconds of its own
on top of its parents' gaps (`Turn.delay_s`): start = max over parents (end + gap_s + pause_s) + delay_s.
`with_waits` in `_waits.py` works all this out for a program from recorded starts and ends.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from agentservesim.errors import InputError, nearest
from agentservesim.programs.program import Program, Turn
from agentservesim.workload.formats import (
    agentic_swarm_bench,
    azure,
    claude_code,
    codex,
    llmservingsim,
    mini_swe_agent,
    mooncake,
    native,
    otel_genai,
    swe_agent,
    tracelab,
    weka,
)
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import STDIN
from agentservesim.workload.formats._reading import check
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.report import ReadingReport

__all__ = [
    "READERS",
    "STDIN",
    "Head",
    "NoSuchFile",
    "Reader",
    "Source",
    "distinct_ids",
    "find_files",
    "read_programs",
    "recognise",
]


class NoSuchFile(InputError):
    """A workload name that stands for no file, folder or glob."""


class Reader(Protocol):
    """What a module needs to be a reader."""

    @property
    def NAME(self) -> str: ...

    @property
    def LOOKS_LIKE(self) -> str: ...

    def recognises(self, head: Head) -> bool: ...

    def read(self, source: Source, report: ReadingReport) -> Iterator[Program]: ...


READERS: tuple[Reader, ...] = (
    mini_swe_agent,  # before native: its counts have program_id and turns, too
    native,
    llmservingsim,
    weka,
    claude_code,
    codex,
    tracelab,
    swe_agent,
    otel_genai,
    mooncake,
    azure,
    agentic_swarm_bench,
)

UNRECOGNISED = "files that no reader recognises"
EMPTY = "empty files"
WITHOUT_PROGRAMS = "files without programs"
BROKEN = "files not read to their end, as malformed"
RENAMED = "program ids met in two files: prefixed with the file's name"
PAUSE_CAPPED = "pauses longer than the cap"


def find_files(source: str | Path) -> list[Path]:
    """The files a name stands for: a file, all in a folder and below it, or a glob; sorted by name.

    Raises NoSuchFile when there is none.
    """
    path = Path(source).expanduser()
    if str(source) == STDIN or os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        below = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
        files = sorted(file for file in below if file.is_file())
        if not files:
            raise InputError(f"{path}: the folder is empty and holds no programs; expected workload files")
        return files
    if os.path.exists(path):
        return [path]  # a pipe
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    found = [file for match in matches for file in (find_files(match) if match.is_dir() else [match])]
    if not found:
        raise NoSuchFile(f"{source}: no such file; expected a workload file, a folder, a glob or - for stdin")
    return list(dict.fromkeys(found))


def recognise(path: Path | str) -> Reader:
    """The reader of a file, from its content, whatever its name.

    Raises InputError when the file cannot be read, is empty, or looks like none of the formats.
    """
    reader = _reader_of(Source(path))
    if reader is not None:
        return reader
    place = Source(path).place(1)
    line = Source(path).head.line.strip()
    if not line:
        raise InputError(f"{place.path}: is empty and holds no programs; expected at least one line")
    number = Source(path).head.text.split(line)[0].count("\n") + 1
    expected = "".join(f"\n  {reader.NAME}: {reader.LOOKS_LIKE}" for reader in READERS)
    raise InputError(
        f"{place._replace(line=number)}: the first line is {quoted(line)}, which no reader recognises; "
        f"expected one of these:{expected}"
    )


def read_programs(
    sources: str | Path | Sequence[str | Path],
    report: ReadingReport,
    format: str | None = None,
    lenient: bool = False,
    max_pause_s: float | None = None,
) -> Iterator[Program]:
    """Stream the programs of a file, a folder, a glob, stdin (`-`) or several of these, filling `report`.

    format        names the reader; None recognises each file, at once, from its content
    lenient       malformed lines are skipped and counted as dropped, instead of an error
    max_pause_s   longest pause of a person, in seconds; longer ones are cut and counted as clamped

    Ids are unique: one that another file used before is prefixed with its file's name. Raises InputError for
    a wrong name, an unreadable file, nothing recognised, and, while streaming, for any line that is wrong.
    """
    names = [sources] if isinstance(sources, str | Path) else list(sources)
    files = [path for name in names for path in find_files(name)]
    chosen = _grouped(_chosen(files, report, format), lenient)
    return _finish(_stream(chosen, report, lenient, len(files) == 1), report, max_pause_s)


class _File(NamedTuple):
    """A file that can be read, its reader, and what ties it to other files."""

    path: Path
    reader: Reader
    keys: frozenset[str]


def _chosen(files: list[Path], report: ReadingReport, format: str | None) -> list[_File]:
    """The files that can be read; the others are counted."""
    chosen = []
    for path in files:
        source = Source(path)
        if format is not None:
            reader: Reader | None = _named(format)
        elif len(files) == 1:
            reader = recognise(path)
        else:
            reader = _reader_of(source)
        if reader is None:
            report.dropped[UNRECOGNISED if source.head.line else EMPTY] += 1
        else:
            chosen.append(_File(path, reader, _group_keys(reader, source) if len(files) > 1 else frozenset()))
    if not chosen:
        names = ", ".join(reader.NAME for reader in READERS)
        raise InputError(
            f"{files[0].parent}: none of the {len(files)} files is recognised, the first is {files[0].name}; "
            f"expected one of {names}"
        )
    return chosen


def _named(format: str) -> Reader:
    for reader in READERS:
        if format == reader.NAME:
            return reader
    names = [reader.NAME for reader in READERS]
    hint = nearest(format, names)
    raise InputError(f"workload.format is {quoted(format)}{hint}: expected one of {', '.join(names)}")


def _reader_of(source: Source) -> Reader | None:
    return next((reader for reader in READERS if reader.recognises(source.head)), None)


def _grouped(files: list[_File], lenient: bool) -> list[tuple[Reader, Source]]:
    """Files that their reader says belong together become one source with companions."""
    groups: list[list[_File]] = []
    home_of: dict[tuple[str, str], list[_File]] = {}
    for file in files:
        keys = [(file.reader.NAME, key) for key in sorted(file.keys)]
        home: list[_File] = []
        for other in {id(home_of[key]): home_of[key] for key in keys if key in home_of}.values():
            if not home:
                home = other
                continue
            home.extend(other)  # this file ties groups together that seemed apart
            home_of.update({key: home for key, group in home_of.items() if group is other})
            other.clear()
        if not home:
            groups.append(home)
        home.append(file)
        home_of.update(dict.fromkeys(keys, home))
    return [
        (group[0].reader, Source(group[0].path, lenient, tuple(Source(f.path, lenient) for f in group[1:])))
        for group in groups
        if group
    ]


def _group_keys(reader: Reader, source: Source) -> frozenset[str]:
    group = getattr(reader, "group", None)
    keys: frozenset[str] = group(source.head) if group else frozenset()
    return keys


def _stream(
    chosen: list[tuple[Reader, Source]], report: ReadingReport, lenient: bool, alone: bool
) -> Iterator[tuple[str, Program]]:
    total = 0
    for reader, source in chosen:
        found = 0
        try:
            for program in reader.read(source, report):
                check(program, str(source.place(1).path))
                found += 1
                yield source.stem, program
        except InputError:
            if not lenient:
                raise
            report.dropped[BROKEN] += 1
        else:
            if not found and not alone:
                report.dropped[WITHOUT_PROGRAMS] += 1
        total += found
    if not total:
        where = str(chosen[0][1].place(1).path)
        lost = "; ".join(f"{count} × {reason}" for reason, count in report.dropped.items())
        also = f" ({lost})" if lost else ""
        raise InputError(f"{where}: holds no programs{also}; expected at least one")


def _finish(
    programs: Iterable[tuple[str, Program]], report: ReadingReport, max_pause_s: float | None
) -> Iterator[Program]:
    for program in distinct_ids(programs, report):
        if max_pause_s is not None:
            program = _capped(program, max_pause_s, report)
        report.add(program)
        yield program
    report.tidy()


def distinct_ids(named: Iterable[tuple[str, Program]], report: ReadingReport) -> Iterator[Program]:
    """The programs; an id that was met before is prefixed with the name of its origin, and counted."""
    seen: set[str] = set()
    for origin, program in named:
        name = _unique(program.program_id, origin, seen)
        seen.add(name)
        if name != program.program_id:
            report.inferred[RENAMED] += 1
            program = msgspec.structs.replace(program, program_id=name)
        yield program


def _unique(name: str, stem: str, seen: set[str]) -> str:
    if name not in seen:
        return name
    renamed = f"{stem}/{name}"
    number = 2
    while renamed in seen:
        renamed = f"{stem}/{name}~{number}"
        number += 1
    return renamed


def _capped(program: Program, max_pause_s: float, report: ReadingReport) -> Program:
    """The program with no pause longer than the cap."""

    def cap(turn: Turn) -> Turn:
        if turn.pause_s <= max_pause_s:
            return turn
        report.clamped[PAUSE_CAPPED] += 1
        return msgspec.structs.replace(turn, pause_s=max_pause_s)

    return msgspec.structs.replace(program, turns=tuple(cap(turn) for turn in program.turns))
