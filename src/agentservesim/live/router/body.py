"""What a router reads of a request and of its answer, both of which it passes on as they are."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from agentservesim.live.identity import Identity, IdentityError, identity_of

BYTES_A_TOKEN = 4
"""Of English text in most vocabularies: a prompt that is not token ids is estimated by it."""
TAIL_BYTES = 4096


class _Body(msgspec.Struct):
    vllm_xargs: dict[str, Any] | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


class CallFacts(msgspec.Struct, frozen=True):
    """Of a request: whose call it is, and its prompt. `malformed`: it names a program, but not properly."""

    identity: Identity | None
    prompt_tokens: int
    malformed: bool = False


def read_body(body: bytes) -> CallFacts:
    """The facts of a request's JSON; of what is not JSON, none. Prompts of token ids are counted, others
    estimated."""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except msgspec.MsgspecError:
        return CallFacts(None, len(body) // BYTES_A_TOKEN)
    prompt = bytes(fields.prompt)
    ids = re.match(rb"\[\s*\d", prompt)
    tokens = prompt.count(b",") + 1 if ids else len(body) // BYTES_A_TOKEN
    try:
        return CallFacts(identity_of(fields.vllm_xargs), tokens)
    except IdentityError:
        return CallFacts(None, tokens, malformed=True)


class AnswerTail:
    """The last bytes of an answer, where usage stands whether it was streamed or not."""

    def __init__(self) -> None:
        self._tail = b""

    def add(self, piece: bytes) -> None:
        self._tail = (self._tail + piece)[-TAIL_BYTES:]

    def context_tokens(self) -> int | None:
        """Input and output, as the server counts; None where it does not tell."""
        total = _last(rb'"total_tokens"\s*:\s*(\d+)', self._tail)
        if total is not None:
            return int(total)
        counts = [
            _last(rb'"%b_tokens"\s*:\s*(\d+)' % kind, self._tail)
            or _last(rb'"%b_tokens"\s*:\s*(\d+)' % other, self._tail)
            for kind, other in ((b"prompt", b"input"), (b"completion", b"output"))
        ]
        return None if counts[0] is None or counts[1] is None else int(counts[0]) + int(counts[1])

    def queue_s(self) -> float:
        """Seconds in the engine's queue, as the server measured; 0 where it does not tell."""
        found = _last(rb'"queue_time_ms"\s*:\s*([\d.eE+-]+)', self._tail)
        return float(found) / 1000 if found else 0.0


def _last(pattern: bytes, text: bytes) -> bytes | None:
    found: list[bytes] = re.findall(pattern, text)
    return found[-1] if found else None
