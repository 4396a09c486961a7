"""Decode one JSON line into a typed record, or say exactly what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, get_args

import msgspec

from agentservesim.errors import InputError, nearest
from agentservesim.workload.formats._lines import Place

T = TypeVar("T")

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A token count. The limit is far beyond any context and catches a timestamp in the wrong column."""
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Nanoseconds = Annotated[float, msgspec.Meta(ge=0, le=1e21)]
Name = Annotated[str, msgspec.Meta(min_length=1)]

_QUOTE_LIMIT = 60
_ABSENT = object()
_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at `(?P<path>\$.*)`)?", re.DOTALL)
_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING_KEY = re.compile(r"Object missing required field `(?P<key>.*)`", re.DOTALL)


def quoted(value: object) -> str:
    """`value` for a message, cut to about 60 characters."""
    text = repr(value)
    return text if len(text) <= _QUOTE_LIMIT else text[: _QUOTE_LIMIT - 1] + "…"


def decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, place: Place) -> T:
    """The record in one line of JSON.

    Raises InputError with the place, the field's path, its value and what was expected.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _explain(str(error), decoder.type, bytes(raw), place) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explain_syntax(error, bytes(raw), place) from None


def top_level_keys(line: bytes) -> frozenset[str]:
    """The keys of the JSON object in `line`; empty when it holds anything else.

    Of an object that is malformed, every key that can be seen: its reader then says what is wrong with it.
    """
    try:
        return frozenset(_KEYS.decode(line))
    except msgspec.ValidationError:  # JSON, but no object
        return frozenset()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        visible = _KEY.findall(line) if line.lstrip().startswith(b"{") else []
        return frozenset(key.decode("utf-8", "replace") for key in visible)


_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEY = re.compile(rb'"([^"\\]+)"\s*:')


def _explain(message: str, record: Any, raw: bytes, place: Place) -> InputError:
    """msgspec's sentence about a value, with that value and the nearest key."""
    match = _MESSAGE.fullmatch(message)
    text, path = (match["text"], match["path"] or "$") if match else (message, "$")
    if unknown := _UNKNOWN_KEY.fullmatch(text):
        key, choices = unknown["key"], _fields_at(record, path)
        field = quoted(_field(f"{path}.{key}"))
        hint = nearest(key, choices)
        return InputError(f"{place}: unknown key {field}{hint}; expected one of {', '.join(choices)}")
    if missing := _MISSING_KEY.fullmatch(text):
        key = missing["key"]
        return InputError(f"{place}: missing key {_field(f'{path}.{key}')!r}; expected it to be given")
    expected = text.replace("`", "").replace("Expected", "expected")
    if not expected.startswith("expected"):
        expected = f"{expected[:1].lower()}{expected[1:]}, expected a smaller number"
    value = _value_at(_parse(raw), path)
    shown = "" if value is _ABSENT else f" is {quoted(value)}"
    return InputError(f"{place}: {_field(path) or 'the line'}{shown}: {expected}")


def _explain_syntax(error: Exception, raw: bytes, place: Place) -> InputError:
    """What keeps a line from being JSON at all."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as bad:
        value = quoted(raw[bad.start : bad.start + 8])
        return InputError(f"{place}: byte {bad.start + 1} of the line is {value}: expected UTF-8 text")
    for path, number in _not_finite(_parse(raw)):  # Python writes NaN and Infinity, which JSON does not have
        return InputError(f"{place}: {_field(path)} is {number}: expected a finite number")
    line = quoted(raw.decode("utf-8").strip())
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return InputError(f"{place}: malformed JSON: {reason}; the line is {line}, expected one JSON object")


def _parse(raw: bytes) -> Any:
    """The line as plain values, for messages only; `_ABSENT` when even that fails."""
    try:
        return json.loads(raw, parse_int=lambda digits: int(digits) if len(digits) < 30 else float(digits))
    except (ValueError, RecursionError):
        return _ABSENT


def _steps(path: str) -> list[str | int]:
    """`$.turns[3].name` as ['turns', 3, 'name']."""
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path)
    return [int(index) if index else key for key, index in parts]


def _field(path: str) -> str:
    """msgspec's path as a user writes it: turns[3].name."""
    return path.removeprefix("$").removeprefix(".")


def _value_at(value: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return value


def _not_finite(value: Any, path: str = "$") -> Iterator[tuple[str, float]]:
    """Paths and values of the numbers that are NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from _not_finite(below, f"{path}.{key}")
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _not_finite(below, f"{path}[{index}]")


def _fields_at(record: Any, path: str) -> list[str]:
    """The keys the record accepts in the object at `path`."""
    for step in _steps(path):
        types = {field.encode_name: field.type for field in msgspec.structs.fields(record)}
        if isinstance(step, str) and step in types:
            record = _record_in(types[step]) or record
    return [field.encode_name for field in msgspec.structs.fields(record)]


def _record_in(annotation: Any) -> Any:
    """The struct inside an annotation such as list[Struct] | None."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _record_in(arg))), None)
