"""agentic-swarm-bench: the calls of recorded coding sessions, one a line, as counts and times.

A recording is a program. `timestamp` is when a call was sent and total_time_s how long it took, so the gap is
the next timestamp less both. parent_seq is the earlier call whose messages this one shares most. Without one
a call shares nothing that was recorded: a nonce at the start of a prompt hides even equal system prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._decode import Name, PromptTokens, Seconds, Tokens
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._timeline import Recorded, links_by_time, turns_in_time
from agentservesim.workload.formats._times import from_earliest, iso_seconds
from agentservesim.workload.report import ReadingReport

NAME = "agentic-swarm-bench"
LOOKS_LIKE = '{"recording": …, "seq": …, "prompt_tokens": …, "completion_tokens": …, "timestamp": …}'
ROOT = "calls with no recorded parent: after the calls that were over, sharing nothing"
REUSE_WHOLE = "reuse: the parent's whole prompt and output, as all its messages are repeated"
REUSE_PART = "reuse where the parent's last messages are changed: less a token for 3 of their characters"
PARALLEL_TOOLS = "tools side by side without times of their own: each the whole gap"

CHARS_PER_TOKEN = 3
"""What prompts grew by in the recordings this format came with: 2.9 to 3.0 characters a token."""
TOLERANCE_S = 0.25
"""A side call is sent while the answer that asked for it still streams its last bytes."""

TOOL_LIMIT_S = 610.0
"""Tools time out at 600 s, and the answer takes some hundred ms more; what is beyond is a person's pause."""


class _Call(msgspec.Struct):
    recording: Name
    seq: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    timestamp: str
    prompt_tokens: PromptTokens
    completion_tokens: Tokens
    total_time_s: Seconds
    parent_seq: int | None = None
    n_messages: Tokens = 0
    shared_messages: Tokens = 0
    shared_chars: Tokens = 0
    total_chars: Tokens = 0
    tools_in_last_assistant: list[str] = []


_DECODER = msgspec.json.Decoder(_Call)


class _Placed(msgspec.Struct):
    """A call with its time in seconds."""

    call: _Call
    place: Place
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.call.total_time_s


def recognises(head: Head) -> bool:
    """Whether a file is in this format."""
    return {"recording", "seq", "prompt_tokens"} <= head.keys


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """The recordings of a file, in the order they are first met; a file is held in memory, as counts.

    Raises InputError naming file, line, field, value and expectation.
    """
    recordings: dict[str, list[_Placed]] = {}
    for place, call in source.records(_DECODER, report):
        with source.tolerating(report):
            placed = _Placed(call, place, iso_seconds(call.timestamp, place, "timestamp"))
            recordings.setdefault(call.recording, []).append(placed)
    for calls in recordings.values():
        calls.sort(key=lambda placed: (placed.start_s, placed.call.seq))
    arrivals = from_earliest(calls[0].start_s for calls in recordings.values())
    for (name, calls), arrival_s in zip(recordings.items(), arrivals, strict=True):
        with source.tolerating(report):
            yield Program(name, _turns(calls, report), arrival_s)


def _turns(calls: Sequence[_Placed], report: ReadingReport) -> tuple[Turn, ...]:
    bases = _bases(calls)
    recorded = [_recorded(placed, calls, base) for placed, base in zip(calls, bases, strict=True)]
    links = links_by_time(recorded, TOLERANCE_S)
    if roots := sum(base is None for base in bases[1:]):
        report.inferred[ROOT] += roots
    followers = {call.base: index for index, call in reversed(list(enumerate(recorded))) if call.continues}
    turns = []
    for index, placed in enumerate(calls):
        follower = followers.get(index)
        base = bases[index]
        turns.append(
            Turn(
                turn_id=str(placed.call.seq),
                prompt_tokens=placed.call.prompt_tokens,
                output_tokens=placed.call.completion_tokens,
                reuse_tokens=0 if base is None else _reuse(calls[base].call, placed.call, report),
                kept_output_tokens=placed.call.completion_tokens,
                parents=links[index].parents,
                tools=() if follower is None else _tools(placed, calls[follower], report),
            )
        )
    return turns_in_time(turns, recorded, links, report, TOOL_LIMIT_S)


def _bases(calls: Sequence[_Placed]) -> list[int | None]:
    """For each call the one it shares most with. One that was not over by then is skipped for its own base.

    Raises InputError for a parent_seq that no call has.
    """
    index_of: dict[int, int] = {}
    for index, placed in enumerate(calls):
        first = index_of.setdefault(placed.call.seq, index)
        if first != index:
            raise InputError(
                f"{placed.place}: seq is {placed.call.seq}: expected each once in a recording, and line "
                f"{calls[first].place.line} has it"
            )
    bases: list[int | None] = []
    for index, placed in enumerate(calls):
        parent = placed.call.parent_seq
        if parent is not None and parent not in index_of:
            raise InputError(
                f"{placed.place}: parent_seq is {parent}: expected the seq of a call in the same recording"
            )
        base = None if parent is None else index_of[parent]
        while base is not None and (base >= index or calls[base].end_s > placed.start_s + TOLERANCE_S):
            base = bases[base] if base < index else None
        bases.append(base)
    return bases


def _recorded(placed: _Placed, calls: Sequence[_Placed], base: int | None) -> Recorded:
    before = None if base is None else calls[base].call
    continues = (
        before is not None
        and placed.call.n_messages > before.n_messages
        and placed.call.shared_messages >= before.n_messages - 1
    )
    human = continues and not placed.call.tools_in_last_assistant
    return Recorded(placed.start_s, placed.end_s, base, continues, human)


def _reuse(before: _Call, call: _Call, report: ReadingReport) -> int:
    """What the prompt repeats of the base's. Its first messages, tools before them, are surely the same."""
    if call.shared_chars >= before.total_chars:
        report.inferred[REUSE_WHOLE] += 1
        return min(before.prompt_tokens + before.completion_tokens, call.prompt_tokens)
    report.estimated[REUSE_PART] += 1
    lost = -(-(before.total_chars - call.shared_chars) // CHARS_PER_TOKEN)
    reuse = min(before.prompt_tokens - lost, call.prompt_tokens)
    if call.prompt_tokens < before.prompt_tokens:
        new = -(-max(0, call.total_chars - call.shared_chars) // CHARS_PER_TOKEN)
        reuse = min(reuse, call.prompt_tokens - new)
    return max(0, reuse)


def _tools(placed: _Placed, follower: _Placed, report: ReadingReport) -> tuple[ToolCall, ...]:
    """The tools that the answer asked for, as the call that went on has them; each took the whole gap."""
    names = follower.call.tools_in_last_assistant
    if len(names) > 1:
        report.inferred[PARALLEL_TOOLS] += len(names)
    gap_s = max(0.0, follower.start_s - placed.end_s)
    return tuple(ToolCall(name, gap_s) for name in names)
