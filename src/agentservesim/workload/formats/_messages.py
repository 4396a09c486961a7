"""Recorded chat messages, kept as a digest and an estimate of their tokens, and what two prompts share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from agentservesim.workload.formats._text_tokens import estimate_tokens


class Message(NamedTuple):
    """A message: equal digests are equal messages; `tokens` is estimated from the text."""

    digest: int
    tokens: int


_LISTS = ("content", "parts")
_TEXTS = ("text", "content", "result", "response")
_AS_CALLS = ("tool_calls", "function_call")


def message(role: str, content: Any, calls: Any = None) -> Message:
    """A message from its role, its text or parts, and its tool calls."""
    text = _text(content) + (_json(calls) if calls else "")
    return Message(hash((role, text)), estimate_tokens(text))


def message_of(record: Any) -> Message:
    """A message as chat APIs write it: a role, and content or parts; whatever else it is, as its JSON."""
    if not isinstance(record, dict):
        return message("", record)
    content = next((record[key] for key in _LISTS if record.get(key) is not None), "")
    calls = [record[key] for key in _AS_CALLS if record.get(key)]
    return message(str(record.get("role", "")), content, calls)


def tokens_of(messages: Iterable[Message]) -> int:
    """The tokens of all messages."""
    return sum(item.tokens for item in messages)


def shared_messages(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many leading messages are equal."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one.digest != other.digest:
            break
        count += 1
    return count


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return _json(content)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        return next((part[key] for key in _TEXTS if isinstance(part.get(key), str)), None) or _json(part)
    return _text(part)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
