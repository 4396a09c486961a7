"""Fits on disk: one YAML file, known by its first key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from agentservesim.errors import InputError
from agentservesim.workload.synthetic.description import Description

KEY = "agentservesim_fit"
VERSION = 1
_HEAD_BYTES = 4096
_ABOUT = """\
# A workload generator learned from a trace by `agentservesim trace fit`: quantiles and rates, no texts.
# Use it as a workload: workload: {source: THIS FILE, programs: 100, seed: 0}
# A table's values are the quantiles at 0, .01, .05, .1, .2, … .9, .95, .99 and 1; its means, those between.
"""


def to_yaml(description: Description) -> str:
    """The text of a fit; `read_fit` gives the same description back."""
    plain: dict[str, Any] = {KEY: VERSION, **_short(msgspec.to_builtins(description))}
    return _ABOUT + yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=110)


def _short(value: Any) -> Any:
    """Without what is empty or whole floats' decimals."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items() if item not in (None, (), [])}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def is_fit(source: str) -> bool:
    """Whether a workload's name stands for a fit, from the file's content."""
    try:
        path = Path(source).expanduser()
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError, RuntimeError):  # the trace readers say what is wrong with the name
        return False
    lines = (line for line in head.splitlines() if line.strip() and not line.startswith(b"#"))
    return next(lines, b"").startswith(f"{KEY}:".encode())


def read_fit(source: str) -> Description:
    """The description in a fit. Raises InputError with the file, the field and what was expected."""
    path = Path(source).expanduser()
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot read the fit: {error}") from None
    version = plain.pop(KEY, None) if isinstance(plain, dict) else None
    if version != VERSION:
        raise InputError(f"{path}: {KEY} is {version!r}: expected {VERSION}")
    try:
        return msgspec.convert(plain, Description)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {str(error).replace('`', '')}") from None
