"""The bytes of a file: its head, its lines one at a time, or all of it; plain or gzip."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from agentservesim.errors import InputError

STDIN = "-"
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Place(NamedTuple):
    """A line of a file; its text form, 'file:line', opens every message about that line."""

    path: Path | str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def read_lines(path: Path | str) -> Iterator[tuple[Place, bytes]]:
    """Yield every line that is not blank with its place; `-` is the standard input.

    Gzip is recognised by its first bytes. Raises InputError when the file cannot be opened or read, before
    the first line or later.
    """
    number = 0
    with _readable(path) as stream:
        try:
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    yield Place(_shown(path), number), text
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(f"{_shown(path)}:{number + 1}" if number else _shown(path), error) from None


def read_head(path: Path | str, size: int) -> bytes:
    """At most the first `size` bytes, unpacked; fewer where the file breaks off.

    Raises InputError when not even one byte can be read.
    """
    head = b""
    with _readable(path) as stream:
        try:
            while len(head) < size and (more := stream.read1(size - len(head))):  # type: ignore[attr-defined]
                head += more
        except (OSError, EOFError, zlib.error) as error:
            if not head:
                raise _unreadable(_shown(path), error) from None
    return head.removeprefix(_BYTE_ORDER_MARK)


def read_all(path: Path | str) -> bytes:
    """The whole file, unpacked. Raises InputError when it cannot be read."""
    with _readable(path) as stream:
        try:
            return stream.read().removeprefix(_BYTE_ORDER_MARK)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(_shown(path), error) from None


def _unreadable(where: str, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{where}: cannot read the workload: {reason}; expected a readable file")


def _shown(path: Path | str) -> str:
    return "<stdin>" if str(path) == STDIN else str(path)


@contextmanager
def _readable(path: Path | str) -> Iterator[IO[bytes]]:
    """The file opened for reading and unpacked; pipes are kept, so that every pass sees the same."""
    try:
        stream = _open(path)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(_shown(path), error) from None
    with stream:
        yield stream


def _open(path: Path | str) -> IO[bytes]:
    if str(path) == STDIN:
        raw: IO[bytes] = io.BytesIO(_standard_input())
    else:
        path = Path(path)
        if not path.exists():
            raise InputError(f"{path}: no such file; expected a workload file")
        if path.is_dir():
            raise InputError(f"{path}: is a directory; expected a workload file")
        raw = path.open("rb") if path.is_file() else _kept(path)
    compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    return gzip.open(raw, "rb") if compressed else raw  # type: ignore[return-value]


@cache
def _standard_input() -> bytes:
    return sys.stdin.buffer.read()


_PIPES: dict[str, bytes] = {}


def _kept(path: Path) -> IO[bytes]:
    """What a pipe holds, read once."""
    if str(path) not in _PIPES:
        _PIPES[str(path)] = path.read_bytes()
    return io.BytesIO(_PIPES[str(path)])
