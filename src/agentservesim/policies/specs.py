"""How a policy is written: `name` or `name:key=value,key=value`, where the name may be `./file.py:Class`.

In a config a mapping says the same: {name: {key: value}}. Values in text are YAML.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import yaml

from agentservesim.config import PolicySpec
from agentservesim.errors import InputError

_FILE = re.compile(r"(?P<path>.*?\.py)(?::(?P<name>[^:]*))?(?::(?P<parameters>.*))?", re.DOTALL)
FORMS = "name, name:key=value,key=value or ./file.py:Class"


class Value(NamedTuple):
    """A parameter's value; `text` is what was typed, None when it came from a mapping."""

    value: Any
    text: str | None = None


class ParsedSpec(NamedTuple):
    """A policy's name, or its file and class, and its parameters as given."""

    name: str
    file: str | None
    class_name: str | None
    given: dict[str, Value]


def parse_spec(axis: str, spec: PolicySpec) -> ParsedSpec:
    """Take a spec apart. Raises InputError for anything that is not in one of the forms."""
    parameters: dict[str, Any] | None = None
    text: Any = spec
    if isinstance(spec, dict):
        if len(spec) != 1:
            raise InputError(f"{axis} policy {spec!r}: expected one name, as {{name: {{key: value}}}}")
        text, parameters = next(iter(spec.items()))
        if parameters is not None and not isinstance(parameters, dict):
            raise InputError(f"{axis} policy {text}: expected {{key: value}} below it, not {parameters!r}")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{axis} policy {text!r}: expected {FORMS}")
    text = text.strip()

    file = class_name = None
    if match := _FILE.fullmatch(text):
        file, class_name, typed = match["path"], match["name"], match["parameters"]
        if not class_name:
            raise InputError(f"{axis} policy {text}: expected the class too, {file}:Class")
        if not class_name.isidentifier():
            raise InputError(
                f"{axis} policy {text}: {class_name!r} is not a class name; expected {file}:Class or "
                f"{file}:Class:key=value,key=value"
            )
        name = f"{file}:{class_name}"
    else:
        name, colon, rest = text.partition(":")
        name, typed = name.strip(), rest if colon else None

    given = {key: Value(value) for key, value in (parameters or {}).items()}
    if typed is not None:
        if given:
            raise InputError(f"{axis} policy {text}: give parameters after ':' or in the mapping, not both")
        given = _parse_parameters(axis, name, typed)
    if bad := [key for key in given if not isinstance(key, str)]:
        raise InputError(f"{axis} policy {name}: parameter name {bad[0]!r} is not text")
    return ParsedSpec(name, file, class_name, given)


def split_specs(text: str) -> list[str]:
    """Cut a comma list of specs: 'lru,ttl:tau_s=2,until=admission' -> ['lru', 'ttl:tau_s=2,until=admission'].

    A part with '=' before any ':' belongs to the spec before it.
    """
    specs: list[str] = []
    for part in _split_commas(text):
        part = part.strip()
        if not part:
            raise InputError(f"policy list {text!r}: nothing between two commas, or at an end")
        if "=" not in part.partition(":")[0]:
            specs.append(part)
        elif specs and ":" in specs[-1]:
            specs[-1] += f",{part}"
        else:
            before = f"'{specs[-1]}:{part}'" if specs else f"'name:{part}'"
            raise InputError(f"policy list {text!r}: {part!r} has no policy before it; expected {before}")
    return specs


def spec_text(name: str, parameters: dict[str, Any]) -> str:
    """The short text of a policy; reading it back gives the same parameters."""
    pairs = ",".join(f"{key}={value_text(value)}" for key, value in parameters.items())
    return f"{name}:{pairs}" if pairs else name


def value_text(value: Any) -> str:
    """A value as YAML on one line, whole floats without '.0'."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")  # YAML wants the point
    if isinstance(value, str):
        plain = re.fullmatch(r"[a-zA-Z_][\w./+-]*", value, re.ASCII) and yaml.safe_load(value) == value
        return value if plain else yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _parse_parameters(axis: str, name: str, typed: str) -> dict[str, Value]:
    given: dict[str, Value] = {}
    for part in _split_commas(typed):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise InputError(f"{axis} policy {name}: expected key=value after ':', not {part.strip()!r}")
        if key in given:
            raise InputError(f"{axis} policy {name}: {key} is given twice")
        try:
            given[key] = Value(yaml.safe_load(value), value)
        except (yaml.YAMLError, ValueError):  # the resolver lets ValueError out on impossible dates
            raise InputError(f"{axis} policy {name}: {key} is {value!r}: expected a YAML value") from None
    return given


def _split_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and double quotes, so that values may be lists."""
    parts, depth = [""], 0
    for token in re.findall(r'"(?:\\.|[^"\\])*"|.', text, re.DOTALL):
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if token == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts
