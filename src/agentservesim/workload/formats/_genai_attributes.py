"""What the attributes of a GenAI span say: token usage and messages, in their older and newer names."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from agentservesim.errors import InputError
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._messages import Message, message, message_of

_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens")
_REASONING = ("gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens")
_CACHE_READ = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
_CACHE_WRITE = ("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens")
_FIRST = ("gen_ai.system_instructions", "gen_ai.tool.definitions")
_INPUT = ("gen_ai.input.messages", "gen_ai.prompt")
_ANSWER = ("gen_ai.output.messages", "gen_ai.output.text", "gen_ai.completion")
_NUMBERED = re.compile(r"gen_ai\.(prompt|completion)\.(\d+)\.(role|content)")
_SCALARS = ("stringValue", "intValue", "doubleValue", "boolValue")
_MOST = 1 << 40


class Usage(NamedTuple):
    """Token counts; None where the span has none. `cache_added`: the prompt did not include cached tokens."""

    prompt: int | None
    output: int | None
    reasoning: int | None
    cache_added: bool = False


def attributes_of(given: Any, place: Place, field: str) -> dict[str, Any]:
    """Attributes by name, from an object or from OTLP's list of {key, value}. Raises InputError."""
    if given is None:
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, list):
        raise InputError(
            f"{place}: {field} is {quoted(given)}: expected an object or a list of key and value"
        )
    found = {}
    for number, item in enumerate(given):
        if not isinstance(item, dict) or not isinstance(item.get("key"), str):
            raise InputError(f"{place}: {field}[{number}] is {quoted(item)}: expected a key and a value")
        found[item["key"]] = _value(item.get("value"))
    return found


def _value(given: Any) -> Any:
    """OTLP's {intValue: "7"} and its like, nested, as plain values; integers stay as written."""
    if not isinstance(given, dict):
        return given
    for name in _SCALARS:
        if name in given:
            return given[name]
    if isinstance(values := given.get("arrayValue"), dict):
        return [_value(value) for value in values.get("values") or []]
    if isinstance(pairs := given.get("kvlistValue"), dict):
        items = [pair for pair in pairs.get("values") or [] if isinstance(pair, dict)]
        return {str(pair.get("key")): _value(pair.get("value")) for pair in items}
    return None


def usage_of(attributes: dict[str, Any], place: Place, field: str) -> Usage:
    """The token counts of a span. Raises InputError for a count that is no whole number from 0 to 2^40.

    By the conventions the input includes cached tokens; where it is below them it was written without.
    """
    counts = [
        _count(attributes, names, place, field)
        for names in (_PROMPT, _OUTPUT, _REASONING, _CACHE_READ, _CACHE_WRITE)
    ]
    prompt, output, reasoning, read, written = counts
    cached = (read or 0) + (written or 0)
    if prompt is not None and prompt < cached:
        return Usage(prompt + cached, output, reasoning, cache_added=True)
    return Usage(prompt, output, reasoning)


def _count(attributes: dict[str, Any], names: tuple[str, ...], place: Place, field: str) -> int | None:
    name = next((name for name in names if attributes.get(name) is not None), None)
    if name is None:
        return None
    given = attributes[name]
    try:
        value = None if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = None
    if value is None or not 0 <= value <= _MOST or value != int(value):
        raise InputError(
            f"{place}: {field}[{name!r}] is {quoted(given)}: expected a whole number from 0 to 2^40"
        )
    return int(value)


def messages_of(attributes: dict[str, Any]) -> tuple[tuple[Message, ...], Message | None]:
    """The prompt's messages and the answer, as far as the span records them."""
    prompt = [message(name, _plain(attributes[name])) for name in _FIRST if attributes.get(name)]
    for record in _listed(attributes, _INPUT) or _numbered(attributes, "prompt"):
        prompt.append(message_of(record))
    answers = _listed(attributes, _ANSWER) or _numbered(attributes, "completion")
    if not answers:
        return tuple(prompt), None
    first = answers[0]
    return tuple(prompt), message_of(first) if isinstance(first, dict) else message("assistant", first)


def _listed(attributes: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    given = next((attributes[name] for name in names if attributes.get(name)), None)
    given = _plain(given)
    if given is None:
        return []
    return given if isinstance(given, list) else [given]


def _plain(given: Any) -> Any:
    """Messages are often JSON in a string; other strings are text."""
    if not isinstance(given, str) or not given.lstrip().startswith(("[", "{")):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return given


def _numbered(attributes: dict[str, Any], wanted: str) -> list[Any]:
    """Messages spread over gen_ai.prompt.0.role, gen_ai.prompt.0.content, …"""
    found: dict[int, dict[str, Any]] = {}
    for name, value in attributes.items():
        match = _NUMBERED.fullmatch(name)
        if match and match[1] == wanted:
            found.setdefault(int(match[2]), {})[match[3]] = value
    return [found[number] for number in sorted(found)]
