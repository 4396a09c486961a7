"""Reading the CSV files of measured operators: columns by name, errors by file, line and column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agentservesim.errors import InputError, nearest


def rows(file: Path, names: tuple[str, ...], numbers: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file: `names` and `numbers` are columns that must be there; others come as text.

    Raises InputError for a missing file, column or row, and for a number that is none.
    """
    try:
        handle = file.open(encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(f"{file}: cannot read the table: {error.strerror}") from None
    with handle:
        reader = csv.DictReader(handle)
        columns = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        for column in (*names, *numbers):
            if column not in columns:
                raise InputError(
                    f"{file}:1: no column {column!r}{nearest(column, columns)}; "
                    f"expected {', '.join((*names, *numbers))}"
                )
        count = 0
        try:
            for row in reader:
                count += 1
                yield {**row, **{c: _number(file, reader.line_num, c, row[c]) for c in numbers}}
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"{file}:{reader.line_num + 1}: not a CSV file: {error}") from None
        if not count:
            raise InputError(f"{file}:2: no rows; expected at least one")


def _number(file: Path, line: int, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{file}:{line}: column {column!r} is {text!r}: expected a number")
    return value


def facts(file: Path) -> dict[str, Any]:
    """A YAML file's mapping; empty when there is no such file. Raises InputError for broken YAML."""
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise InputError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}:1: expected a mapping")
    return content


def tp_folder(path: Path, tp: int) -> Path:
    """The folder of tables for `tp` GPUs: `path` itself, path/tp<N>, or path/VARIANT/tp<N> when there is one
    variant. Raises InputError with what was found instead."""
    name = f"tp{tp}"
    if not path.is_dir():
        raise InputError(f"step_time.path is {str(path)!r}: no such folder; expected one with {name}/*.csv")
    if (path / name).is_dir():
        return path / name
    if path.name == name and (path / "dense.csv").is_file():
        return path
    variants = sorted(folder.parent for folder in path.glob(f"*/{name}") if folder.is_dir())
    if len(variants) == 1:
        return variants[0] / name
    found = sorted(str(folder.relative_to(path)) for folder in (*path.glob("tp*"), *path.glob("*/tp*")))
    raise InputError(
        f"step_time.path is {str(path)!r}: expected one folder {name} in it for cluster.tp {tp}; "
        f"found {', '.join(found) or 'no tp folder'}"
    )
