"""CSV files, row by row: columns are found by name, in any order."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence

from agentservesim.errors import InputError, nearest
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._source import Source

_MOST = 1 << 40


class Row:
    """A row with its place; cells by column name."""

    def __init__(self, place: Place, cells: dict[str, str]) -> None:
        self.place = place
        self._cells = cells

    def text(self, column: str) -> str:
        """A cell that may not be empty. Raises InputError."""
        cell = self._cells.get(column, "")
        if not cell:
            raise self.wrong(column, "a value")
        return cell

    def count(self, column: str, least: int = 0) -> int:
        """A whole number from `least` to 2^40; 12.0 is one. Raises InputError."""
        value = self._finite(column)
        if value is None or value != int(value) or not least <= value <= _MOST:
            raise self.wrong(column, f"a whole number from {least} to 2^40")
        return int(value)

    def number(self, column: str) -> float:
        """A number from 0 to 1e15. Raises InputError."""
        value = self._finite(column)
        if value is None or not 0 <= value <= 1e15:
            raise self.wrong(column, "a number from 0 to 1e15")
        return value

    def wrong(self, column: str, expected: str) -> InputError:
        """The error that says what is wrong with a cell."""
        shown = quoted(self._cells.get(column, ""))
        return InputError(f"{self.place}: {column} is {shown}: expected {expected}")

    def _finite(self, column: str) -> float | None:
        try:
            value = float(self._cells.get(column, ""))
        except ValueError:
            return None
        return value if math.isfinite(value) else None


def columns_of(line: str) -> list[str]:
    """The column names in a CSV header, lower case, without spaces around them."""
    try:
        return [name.strip().lower() for name in next(csv.reader([line]), [])]
    except csv.Error:
        return []


def csv_rows(source: Source, required: Sequence[str]) -> Iterator[Row]:
    """The rows after the header; names are lower case. Raises InputError for a header that lacks a column."""
    names: list[str] = []
    for place, raw in source.lines():
        line = raw.decode("utf-8", "replace").strip("\r\n")
        if not names:
            names = _header(line, required, place)
            continue
        try:
            cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        except csv.Error as error:
            raise InputError(f"{place}: {quoted(line)}: expected a CSV row: {error}") from None
        yield Row(place, dict(zip(names, cells, strict=False)))


def _header(line: str, required: Sequence[str], place: Place) -> list[str]:
    names = columns_of(line)
    for column in required:
        if column not in names:
            hint = nearest(column, names)
            raise InputError(f"{place}: the header is {quoted(line)}: expected a column {column}{hint} in it")
    return names
