"""mini-swe-agent trajectories: a JSON document a run, v1 and v2; and token counts of runs, a line each.

v1 ("mini-swe-agent-1") has usage and whole-second `created` on assistant messages: the tools are known by
name, their times are not. v2 ("mini-swe-agent-1.1") has a timestamp on both sides of every command. Counts
(program_id, turns of prompt_tokens, output_tokens, reasoning_tokens, cached_tokens, created_s, tool) know no
more than v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._commands import UNNAMED, command_name
from agentservesim.workload.formats._decode import Name, PromptTokens, Tokens
from agentservesim.workload.formats._growth import kept_output, reused
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._reading import Distinct
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._times import from_earliest
from agentservesim.workload.report import ReadingReport

NAME = "mini-swe-agent"
LOOKS_LIKE = '{"trajectory_format": "mini-swe-agent-…", "messages": […]} or counts with created_s'
NO_TOOL_TIME = "tool times not recorded: 0 s"
NO_USAGE = "model calls without usage"
NEGATIVE = "negative gaps: 0 s"
ARRIVAL = "arrivals: when the first answer was created, in whole seconds"

_FORMAT = "mini-swe-agent-1"
_COUNTS = {"created_s", "cached_tokens", "reasoning_tokens"}
_COMMAND = re.compile(r"```\w*[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_Clock = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Details(msgspec.Struct):
    reasoning_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: PromptTokens
    completion_tokens: Tokens
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Response(msgspec.Struct):
    created: _Clock | None = None
    usage: _Usage | None = None


class _Action(msgspec.Struct):
    command: str = ""


class _Extra(msgspec.Struct):
    response: _Response | None = None
    timestamp: _Clock | None = None
    actions: list[_Action] | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    extra: _Extra | None = None


class _Trajectory(msgspec.Struct):
    messages: list[_Message]
    instance_id: Name | None = None


class _CountedTurn(msgspec.Struct):
    prompt_tokens: PromptTokens
    output_tokens: Tokens
    reasoning_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    created_s: _Clock | None = None
    tool: str | None = None


class _Counted(msgspec.Struct):
    program_id: Name
    turns: Annotated[list[_CountedTurn], msgspec.Meta(min_length=1)]


_TRAJECTORY = msgspec.json.Decoder(_Trajectory)
_LINE = msgspec.json.Decoder(_Counted)


class _Call(msgspec.Struct):
    """A model call with the commands it asked for. answered_s: when the answer came, if known finely."""

    prompt: int
    output: int
    reasoning: int | None
    cached: int | None
    tools: list[str]
    created_s: float | None = None
    answered_s: float | None = None
    observed_s: float | None = None


def recognises(head: Head) -> bool:
    """Whether a file is in one of the formats. A long trajectory has its format at the end, out of sight."""
    names = f'"{_FORMAT}' in head.text or '"mini_version"' in head.text
    return _has_counts(head) or (names and not {"messages", "info"}.isdisjoint(head.keys))


def _has_counts(head: Head) -> bool:
    turns = head.records[0].get("turns") if head.records else None
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and not _COUNTS.isdisjoint(first)


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """The programs of a file: one of a trajectory, one a line of counts.

    Raises InputError naming file, line, field, value and expectation.
    """
    if _has_counts(source.head):
        yield from _counted(source, report)
        return
    place, trajectory = source.document(_TRAJECTORY)
    calls = _calls(trajectory.messages, report)
    if not calls:
        raise InputError(f"{place}: messages holds no answer with usage: expected extra.response.usage")
    yield Program(trajectory.instance_id or source.stem, _turns(calls, report))


# --- counts ----------------------------------------------------------------------------------------------


def _counted(source: Source, report: ReadingReport) -> Iterator[Program]:
    distinct = Distinct()
    programs: list[tuple[Place, _Counted]] = list(source.records(_LINE, report))
    arrivals = from_earliest(line.turns[0].created_s for _, line in programs)
    for (place, line), arrival_s in zip(programs, arrivals, strict=True):
        with source.tolerating(report):
            calls = [
                _Call(
                    turn.prompt_tokens,
                    turn.output_tokens,
                    turn.reasoning_tokens,
                    turn.cached_tokens,
                    tools=[turn.tool] if turn.tool else [],
                )
                for turn in line.turns
            ]
            if arrival_s is not None:
                report.inferred[ARRIVAL] += 1
            yield distinct.accept(Program(line.program_id, _turns(calls, report), arrival_s), place)


# --- trajectories ----------------------------------------------------------------------------------------


def _calls(messages: Sequence[_Message], report: ReadingReport) -> list[_Call]:
    calls: list[_Call] = []
    last: _Call | None = None
    for message in messages:
        extra = message.extra or _Extra()
        if message.role != "assistant":
            if last is not None and extra.timestamp is not None:
                last.observed_s = extra.timestamp
            continue
        last = _call(message, extra)
        if last is None:
            report.dropped[NO_USAGE] += 1
        else:
            calls.append(last)
    return calls


def _call(message: _Message, extra: _Extra) -> _Call | None:
    response = extra.response or _Response()
    if response.usage is None:
        return None
    usage = response.usage
    output_details = usage.completion_tokens_details or _Details()
    prompt_details = usage.prompt_tokens_details or _Details()
    return _Call(
        usage.prompt_tokens,
        usage.completion_tokens,
        output_details.reasoning_tokens,
        prompt_details.cached_tokens,
        tools=_tools(message, extra),
        created_s=response.created,
        answered_s=extra.timestamp,
    )


def _tools(message: _Message, extra: _Extra) -> list[str]:
    """The names of the commands of an answer: v2 lists them, v1 has one in a fenced block."""
    if extra.actions is not None:
        return [command_name(action.command) for action in extra.actions]
    found = _COMMAND.search(message.content) if isinstance(message.content, str) else None
    return [command_name(found[1])] if found else []


def _turns(calls: Sequence[_Call], report: ReadingReport) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for index, call in enumerate(calls):
        growth = calls[index + 1].prompt - call.prompt if index + 1 < len(calls) else None
        gap_s = _gap(call, report)
        reuse = 0
        if turns:
            before = turns[-1]
            reuse = reused(before.prompt_tokens, before.kept_output_tokens, call.prompt, call.cached, report)
        turns.append(
            Turn(
                turn_id=f"t{index}",
                prompt_tokens=call.prompt,
                output_tokens=call.output,
                reuse_tokens=reuse,
                kept_output_tokens=kept_output(call.output, call.reasoning, growth, report),
                parents=(index - 1,) if index else (),
                tools=tuple(ToolCall(name or UNNAMED, gap_s or 0.0) for name in call.tools),
                gap_s=gap_s,
            )
        )
    return tuple(turns)


def _gap(call: _Call, report: ReadingReport) -> float | None:
    """From the answer to what the command printed; None where the file has no such times."""
    if call.answered_s is None or call.observed_s is None:
        if call.tools:
            report.inferred[NO_TOOL_TIME] += 1
        return None
    if call.observed_s < call.answered_s:
        report.clamped[NEGATIVE] += 1
    return max(0.0, call.observed_s - call.answered_s)
