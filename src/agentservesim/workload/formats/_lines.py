"""The lines of a file, one at a time, plain or gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from agentservesim.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Place(NamedTuple):
    """A line of a file; its text form, 'file:line', opens every message about that line."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def read_lines(path: Path) -> Iterator[tuple[Place, bytes]]:
    """Yield every line that is not blank with its place. Gzip is recognised by its first bytes.

    Raises InputError when the file cannot be opened or read, before the first line or later.
    """
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    yield Place(path, number), text
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        where = f"{path}:{number + 1}" if number else str(path)
        raise InputError(f"{where}: cannot read the workload: {reason}; expected a readable file") from None


def _open(path: Path) -> IO[bytes]:
    """Open for reading; the file is opened again for each pass, so pipes are refused."""
    if not path.exists():
        raise InputError(f"{path}: no such file; expected a workload file")
    if path.is_dir():
        raise InputError(f"{path}: is a directory; expected a workload file")
    if not path.is_file():
        raise InputError(f"{path}: is not a regular file; expected a workload file")
    with path.open("rb") as stream:
        compressed = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    return gzip.open(path, "rb") if compressed else path.open("rb")  # type: ignore[return-value]
