"""Reads a streamed completion: what came when, what the server says of it, and whether it came whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Metrics(msgspec.Struct):
    time_to_first_token_ms: float | None = None


class _Problem(msgspec.Struct):
    message: str = "no message"
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: _Problem | str | None = None


_DECODER = msgspec.json.Decoder(_Event)
_DONE = b"[DONE]"
UNFINISHED = ("abort", "error")
"""Finish reasons of a server that gave up."""


class StreamBroken(Exception):
    """The stream ended before the completion did."""


class StreamRejected(Exception):
    """The server says, inside the stream, that the request is wrong."""


@dataclass
class Answer:
    """A completion as it came. Times are of the reader's clock.

    chunks              (time, tokens) of every chunk with output; tokens None where no ids were sent
    token_ids           the output; None where the server does not tell
    prompt_tokens, output_tokens, cached_tokens    as the server counts; None where it does not tell
    server_ttft_s       first scheduled to first token, by the server's clock
    finished            the whole completion has come
    """

    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    server_ttft_s: float | None = None
    finished: bool = False

    def received_tokens(self) -> int:
        """Output that has come: its ids, or where there are none, its chunks."""
        return len(self.token_ids) if self.token_ids is not None else len(self.chunks)


async def read_stream(pieces: AsyncIterator[bytes], answer: Answer, now_s: Callable[[], float]) -> None:
    """Read server-sent events into `answer` until the completion has ended.

    Raises StreamBroken or StreamRejected; what came before is then in the answer.
    """
    rest = bytearray()
    async for piece in pieces:
        time_s = now_s()
        rest += piece
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                _take(bytes(line[5:]).strip(), answer, time_s)
    answer.finished = answer.finished or answer.finish_reason is not None
    if not answer.finished:
        raise StreamBroken("the stream ended before the completion did")


def _take(data: bytes, answer: Answer, time_s: float) -> None:
    if data == _DONE:
        answer.finished = True
        return
    try:
        event = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise StreamBroken(f"the stream holds {data[:80]!r}, not a completion ({error})") from None
    if event.error is not None:
        _raise(event.error)
    for choice in event.choices:
        _take_choice(choice, answer, time_s)
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.output_tokens = event.usage.completion_tokens
        if event.usage.prompt_tokens_details is not None:
            answer.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    if event.metrics is not None and event.metrics.time_to_first_token_ms is not None:
        answer.server_ttft_s = event.metrics.time_to_first_token_ms / 1000


def _take_choice(choice: _Choice, answer: Answer, time_s: float) -> None:
    if choice.token_ids is not None:
        if answer.token_ids is None:
            answer.token_ids = []
        answer.token_ids += choice.token_ids
    if choice.token_ids or choice.text or choice.finish_reason is None:
        answer.chunks.append((time_s, len(choice.token_ids) if choice.token_ids is not None else None))
    if choice.finish_reason is not None:
        answer.finish_reason = choice.finish_reason
        if choice.finish_reason in UNFINISHED:
            raise StreamBroken(f"the server ended it with finish_reason {choice.finish_reason}")


def _raise(problem: _Problem | str) -> None:
    if isinstance(problem, str):
        raise StreamBroken(problem)
    code = str(problem.code)
    if code.startswith("4") and code != "429":
        raise StreamRejected(problem.message)
    raise StreamBroken(problem.message)
