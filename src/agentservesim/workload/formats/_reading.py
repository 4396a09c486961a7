"""One pass over a workload file: the checks every format shares, and the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import Place, read_lines
from agentservesim.workload.report import ReadingReport


class Reading:
    """A pass over `path` that fills `report`; knows which program ids it has met."""

    def __init__(self, path: Path, report: ReadingReport) -> None:
        self.path = path
        self.report = report
        self._line_of: dict[str, int] = {}

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """The file's lines. Raises InputError at the end of a file that held no programs."""
        yield from read_lines(self.path)
        if not self._line_of:
            raise InputError(f"{self.path}: holds no programs; expected at least one line")

    def accept(self, program: Program, place: Place) -> Program:
        """Count a program that has been read, and return it.

        Raises InputError when its id was met before or its parents make a cycle.
        """
        first = self._line_of.setdefault(program.program_id, place.line)
        if first != place.line:
            raise InputError(
                f"{place}: program id {quoted(program.program_id)} is already on line {first}; "
                "expected each program once"
            )
        try:
            program.children()
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        self.report.add(program)
        return program


def index_of(ids: list[str], place: Place, field: str) -> dict[str, int]:
    """The position of every id. `field` is a template such as 'turns[{}].turn_id'.

    Raises InputError when an id occurs twice.
    """
    index: dict[str, int] = {}
    for position, name in enumerate(ids):
        first = index.setdefault(name, position)
        if first != position:
            raise InputError(
                f"{place}: {field.format(position)} is {quoted(name)}: expected an id that differs "
                f"from {field.format(first)}"
            )
    return index
