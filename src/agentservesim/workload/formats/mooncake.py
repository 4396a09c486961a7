"""Mooncake request streams: JSON Lines {timestamp ms, input_length, output_length, hash_ids}.

There is no program in these traces: each request is a program of one turn, background load. A hash id stands
for a block of 512 tokens and all before it, so equal leading ids are equal leading tokens. What no other
request repeats needs no name: only shared blocks become prefix groups, and blocks that always come together
become one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program, Turn
from agentservesim.workload.formats._decode import PromptTokens, Tokens
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.report import ReadingReport

NAME = "mooncake"
LOOKS_LIKE = '{"timestamp": …, "input_length": …, "output_length": …, "hash_ids": […]}'
BLOCK_TOKENS = 512
PARTIAL = "hash ids of blocks that are not full: what they share is not counted"

_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Request(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: PromptTokens
    output_length: Tokens
    hash_ids: list[int] = []


_DECODER = msgspec.json.Decoder(_Request)


def recognises(head: Head) -> bool:
    """Whether a file is in this format."""
    return {"timestamp", "input_length", "output_length"} <= head.keys


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """Stream the requests, in two passes: the earliest arrives at 0 s, and sharing is known.

    Raises InputError naming file, line, field, value and expectation.
    """
    sharing = _Sharing(source.stem)
    origin_ms = float("inf")
    for place, request in source.records(_DECODER, ReadingReport()):
        with source.tolerating(ReadingReport()):
            _check(request, place)
            origin_ms = min(origin_ms, request.timestamp)
            sharing.add(_full_blocks(request))
    for number, (place, request) in enumerate(source.records(_DECODER, report), start=1):
        with source.tolerating(report):
            _check(request, place)
            full = _full_blocks(request)
            if len(request.hash_ids) > len(full):
                report.dropped[PARTIAL] += 1
            output = request.output_length
            turn = Turn("t0", request.input_length, output, kept_output_tokens=output)
            arrival_s = (request.timestamp - origin_ms) / 1e3
            yield Program(f"request-{number}", (turn,), arrival_s, sharing.groups(full))


def _full_blocks(request: _Request) -> list[int]:
    return request.hash_ids[: request.input_length // BLOCK_TOKENS]


def _check(request: _Request, place: Place) -> None:
    most = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) > most:
        raise InputError(
            f"{place}: hash_ids has {len(request.hash_ids)} ids: expected at most {most}, one for each "
            f"{BLOCK_TOKENS} of input_length, {request.input_length}"
        )


class _Sharing:
    """Which blocks occur in several requests. `name` sets this file's ids apart from those of others."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._uses: Counter[int] = Counter()
        self._before: dict[int, int | None] = {}
        self._chained = True

    def add(self, blocks: list[int]) -> None:
        before: int | None = None
        for block in blocks:
            self._chained &= self._before.setdefault(block, before) == before
            before = block
        self._uses.update(blocks)
        self._chained &= len(set(blocks)) == len(blocks)

    def groups(self, blocks: list[int]) -> tuple[PrefixGroup, ...]:
        """The groups a request begins with, up to the first block that no other request has.

        Where an id stands for all before it, requests part only after a block with more uses than the next.
        """
        groups: list[PrefixGroup] = []
        start = 0
        for index, block in enumerate(blocks):
            uses = self._uses[block]
            if uses < 2:
                break
            following = self._uses[blocks[index + 1]] if index + 1 < len(blocks) else 0
            if not self._chained or following != uses:
                name = f"{self._name}/{blocks[start]}-{block}"
                groups.append(PrefixGroup(name, (index + 1 - start) * BLOCK_TOKENS))
                start = index + 1
        return tuple(groups)
