"""Write programs in the native format. Reading what was written gives equal programs."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, Turn


def to_native(program: Program) -> dict[str, Any]:
    """The program as one native line: token counts and parents spelled out, absent values left out."""
    line: dict[str, Any] = {"program_id": program.program_id}
    if program.arrival_s is not None:
        line["arrival_s"] = program.arrival_s
    if program.prefix:
        line["prefix"] = [{"id": group.id, "tokens": group.tokens} for group in program.prefix]
    names = [turn.turn_id for turn in program.turns]
    line["turns"] = [_turn(turn, names) for turn in program.turns]
    return line


def _turn(turn: Turn, names: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "turn_id": turn.turn_id,
        "parents": [names[parent] for parent in turn.parents],
        "prompt_tokens": turn.prompt_tokens,
        "reuse_tokens": turn.reuse_tokens,
        "output_tokens": turn.output_tokens,
        "kept_output_tokens": turn.kept_output_tokens,
    }
    if turn.tools:
        record["tools"] = [{"name": tool.name, "duration_s": tool.duration_s} for tool in turn.tools]
    if turn.gap_s is not None:
        record["gap_s"] = turn.gap_s
    if turn.pause_s:
        record["pause_s"] = turn.pause_s
    if turn.delay_s:
        record["delay_s"] = turn.delay_s
    return record


def write_native(programs: Iterable[Program], path: Path) -> int:
    """Write one line a program, as they come, and return how many; a name ending in .gz is compressed.

    The file appears only once complete, so `programs` may stream from `path` itself, and a failure leaves
    an old file as it was. Raises InputError when it cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a directory; expected a file to write the workload to")
    written = 0
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream, _packed(stream, path) as lines:
            for program in programs:
                lines.write(msgspec.json.encode(to_native(program)) + b"\n")
                written += 1
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot write the workload: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return written


def _packed(stream: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    """Gzip when the name asks for it; without name and time, so the same programs give the same bytes."""
    if path.suffix != ".gz":
        return nullcontext(stream)
    return gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0)
