"""How a transform is written, and what its parameters may be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec
import yaml

from agentservesim.errors import InputError, nearest

Spec = dict[str, dict[str, Any]]
"""One transform with its parameters."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

Registry = Mapping[str, Callable[..., Any]]


def parse(given: object, known: Registry) -> Spec:
    """A spec from its text or mapping; names and parameters are not checked yet."""
    if isinstance(given, str):
        name, _, text = given.partition(":")
        return {name.strip(): _parameters(given, text)}
    if isinstance(given, dict) and len(given) == 1:
        name, parameters = next(iter(given.items()))
        if isinstance(name, str) and (parameters is None or isinstance(parameters, dict)):
            return {name: dict(parameters or {})}
    raise InputError(
        f"transform {given!r}: expected name:key=value,… or {{name: {{key: value}}}}, "
        f"with a name from {', '.join(known)}"
    )


def check(spec: Spec, known: Registry) -> tuple[str, dict[str, Any]]:
    """The name of a spec's transform, and its parameters converted to what the function takes.

    Raises InputError that names what is wrong and what was expected.
    """
    name, given = next(iter(spec.items()))
    if name not in known:
        raise InputError(
            f"transform {name!r} is unknown{nearest(name, known)}; expected one of {', '.join(known)}"
        )
    hints = get_type_hints(known[name], include_extras=True)
    signature = inspect.signature(known[name]).parameters.values()
    accepted = {p.name: p for p in signature if p.kind is p.KEYWORD_ONLY}
    for key in given:
        if key not in accepted:
            raise InputError(
                f"transform {name}: unknown parameter {key!r}{nearest(str(key), accepted)}; "
                f"expected {', '.join(accepted)}"
            )
    missing = [key for key, p in accepted.items() if p.default is p.empty and key not in given]
    if missing:
        raise InputError(f"transform {name}: {missing[0]} is missing; expected {', '.join(accepted)}")
    return name, {key: _value(name, key, value, hints[key]) for key, value in given.items()}


def text_of(spec: Spec) -> str:
    """A spec on one line, for a report."""
    name, parameters = next(iter(spec.items()))
    return f"{name}({', '.join(f'{key}={value}' for key, value in parameters.items())})"


def _value(name: str, key: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "").replace("Expected", "expected")
        raise InputError(f"transform {name}: {key} is {value!r}: {problem}") from None


def _parameters(given: str, text: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for part in _split(text) if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or key in parameters:
            raise InputError(f"transform {given!r}: {part.strip()!r}: expected key=value, each key once")
        try:
            parameters[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            raise InputError(f"transform {given!r}: {key} is {value!r}: expected a YAML value") from None
    return parameters


def _split(text: str) -> list[str]:
    """Cut at the commas outside brackets."""
    parts, depth = [""], 0
    for mark in re.findall(r"[\[\]{},]|[^\[\]{},]+", text):
        depth += (mark in "[{") - (mark in "]}")
        if mark == "," and not depth:
            parts.append("")
        else:
            parts[-1] += mark
    return parts
