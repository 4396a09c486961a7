"""One file to read: what recognition may look at, and how a reader gets its records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentservesim.errors import InputError
from agentservesim.workload.formats._decode import decode, top_level_keys
from agentservesim.workload.formats._lines import STDIN, Place, read_all, read_head, read_lines
from agentservesim.workload.report import ReadingReport

T = TypeVar("T")

HEAD_BYTES = 1 << 16
MALFORMED = "malformed lines"
_RECORDS = 64


class Head:
    """The first 64 KiB of a file, unpacked.

    text      decoded; bytes that are no UTF-8 are replaced
    line      the first line that is not blank, perhaps cut
    records   the JSON objects on the first complete lines (up to 64), or the one object that the whole
              file is; what is not a JSON object is left out
    keys      the keys, outermost only, of the first JSON object, also of one that is cut off or malformed
    """

    def __init__(self, raw: bytes) -> None:
        self.text = raw.decode("utf-8", "replace")
        self.line = next((line for line in self.text.splitlines() if line.strip()), "")
        self._whole = len(raw) < HEAD_BYTES

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        if self._whole and isinstance(whole := _parse(self.text), dict):
            return [whole]
        lines = self.text.split("\n")[: None if self._whole else -1]
        parsed = (_parse(line) for line in lines[:_RECORDS] if line.strip())
        return [record for record in parsed if isinstance(record, dict)]

    @cached_property
    def keys(self) -> frozenset[str]:
        if self.line.rstrip().endswith("}"):
            return top_level_keys(self.line.encode())
        return _outer_keys(self.text)


class Source:
    """A file to read, or the standard input (`-`).

    stem         its name without folder and suffixes, for ids
    lenient      malformed lines are skipped and counted instead of raised
    companions   further files that belong to the same programs (see `group` in formats/__init__.py)
    """

    def __init__(self, path: Path | str, lenient: bool = False, companions: tuple[Source, ...] = ()) -> None:
        self.path = path
        self.lenient = lenient
        self.companions = companions

    @property
    def stem(self) -> str:
        return "stdin" if str(self.path) == STDIN else Path(self.path).name.split(".")[0] or "file"

    @cached_property
    def head(self) -> Head:
        """Raises InputError when the file cannot be read."""
        return Head(read_head(self.path, HEAD_BYTES))

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """The lines that are not blank, each with its place, one in memory at a time."""
        return read_lines(self.path)

    def records(self, decoder: msgspec.json.Decoder[T], report: ReadingReport) -> Iterator[tuple[Place, T]]:
        """Every line decoded. A malformed one is an InputError or, if lenient, skipped and counted."""
        for place, raw in self.lines():
            try:
                record = decode(decoder, raw, place)
            except InputError:
                if not self.lenient:
                    raise
                report.dropped[MALFORMED] += 1
                continue
            yield place, record

    def document(self, decoder: msgspec.json.Decoder[T]) -> tuple[Place, T]:
        """The whole file as one JSON value. Raises InputError with the line where the JSON breaks."""
        raw = read_all(self.path)
        try:
            return self.place(1), decode(decoder, raw, self.place(1))
        except InputError:
            line = _broken_line(raw)
            if line == 1:
                raise
            return self.place(line), decode(decoder, raw, self.place(line))

    def documents(self, decoder: msgspec.json.Decoder[T], report: ReadingReport) -> Iterator[tuple[Place, T]]:
        """The JSON values of a file: one a line, or one that is spread over all lines.

        A malformed one is an InputError or, if lenient, skipped and counted.
        """
        first = next((raw for _, raw in self.lines()), b"").strip()
        if first.endswith(b"}"):
            yield from self.records(decoder, report)
            return
        found = None
        with self.tolerating(report):
            found = self.document(decoder)
        if found is not None:
            yield found

    def place(self, line: int) -> Place:
        """A line of this file, for messages."""
        return Place("<stdin>" if str(self.path) == STDIN else self.path, line)

    @contextmanager
    def tolerating(self, report: ReadingReport, reason: str = MALFORMED) -> Iterator[None]:
        """If lenient, an InputError inside the block ends the block and is counted as dropped."""
        try:
            yield
        except InputError:
            if not self.lenient:
                raise
            report.dropped[reason] += 1


def _parse(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        return None


def _broken_line(raw: bytes) -> int:
    """The line at which the JSON stops being valid; 1 when it is valid."""
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        return error.lineno
    except (ValueError, RecursionError):
        pass
    return 1


_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?|[{}\[\]]', re.DOTALL)


def _outer_keys(text: str) -> frozenset[str]:
    """The keys at depth 1 of the first JSON object or, in a list, of its first object."""
    keys: set[str] = set()
    depth, wanted = 0, 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in "{[":
            depth += 1
            if sign == "{" and not wanted:
                wanted = depth
        elif sign in "}]":
            depth -= 1
            if wanted and depth < wanted:
                break
        elif token[2] and depth == wanted:
            keys.add(token[1])
    return frozenset(keys)
