"""TraceLab: normalised rounds of agent sessions as JSON Lines, and simulator CSVs.

JSON Lines give a round a line, with the provider's cache hits (prefix_tokens), the rest of the prompt
(newly_append_tokens) and times to the millisecond. CSVs give a round a row: prefix_len, input_len (what is
new alone), output_len, and tool_wait_after_ms, which sums tools that ran side by side. Cache hits are not
reuse: a prompt that grows repeats all that was before, whatever the provider's cache then hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._csv import Row, columns_of, csv_rows
from agentservesim.workload.formats._decode import Name, Tokens
from agentservesim.workload.formats._growth import kept_output, reused
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._times import from_earliest, iso_seconds
from agentservesim.workload.report import ReadingReport

NAME = "tracelab"
LOOKS_LIKE = '{"round_index": …, "newly_append_tokens": …} or CSV round_idx,prefix_len,input_len,output_len,…'
NEGATIVE = "negative gaps: 0 s"
NO_RESULT = "tools without a result"
NO_TOOL_TIME = "gaps unknown, as no tool of the round has a result: what the tools took"
SUMMED = "gaps from tool_wait_after_ms, which sums tools that ran side by side"
NO_WAIT = "gaps unknown, as there is no column tool_wait_after_ms: 0 s"
UNEQUAL = "input_tokens_total differs from prefix_tokens + newly_append_tokens: the sum"

_COLUMNS = ("session_id", "round_idx", "prefix_len", "input_len", "output_len")
_WAIT = "tool_wait_after_ms"
_ARRIVAL = "arrival_time"
_Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Tool(msgspec.Struct):
    tool_name: str
    emitted_at: str | None = None
    result_at: str | None = None
    tool_wall_latency_ms: _Milliseconds | None = None


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str


class _Round(msgspec.Struct):
    session_id: Name
    round_index: _Index
    prefix_tokens: Tokens
    newly_append_tokens: Tokens
    output_tokens: Tokens
    input_tokens_total: Tokens | None = None
    reasoning_output_tokens: Tokens | None = None
    timing_events: list[_Event] = []
    tools: list[_Tool] = []


_DECODER = msgspec.json.Decoder(_Round)
_INPUT_EVENTS = ("user_message", "tool_result")


class _Step(msgspec.Struct):
    """A round of either kind. Times are seconds on the recording's clock."""

    place: Place
    round_index: int
    cached: int
    prompt: int
    output: int
    reasoning: int | None = None
    tools: tuple[ToolCall, ...] = ()
    gap_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    asked_s: float | None = None
    """When a person sent the message that began the round."""


def recognises(head: Head) -> bool:
    """Whether a file is in one of the formats."""
    return {"round_index", "newly_append_tokens"} <= head.keys or set(_COLUMNS) <= set(columns_of(head.line))


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """The sessions of a file, in the order they are first met; a file is held in memory, as counts.

    Raises InputError naming file, line, field, value and expectation.
    """
    is_csv = set(_COLUMNS) <= set(columns_of(source.head.line))
    sessions: dict[str, list[_Step]] = {}
    for session, step in _csv_steps(source, report) if is_csv else _json_steps(source, report):
        sessions.setdefault(session, []).append(step)
    for steps in sessions.values():
        steps.sort(key=lambda step: step.round_index)
    arrivals = from_earliest(steps[0].start_s for steps in sessions.values())
    for (session, steps), arrival_s in zip(sessions.items(), arrivals, strict=True):
        with source.tolerating(report):
            _check_distinct(steps)
            yield Program(session, _turns(steps, report), arrival_s)


def _check_distinct(steps: list[_Step]) -> None:
    for before, step in pairwise(steps):
        if before.round_index == step.round_index:
            raise InputError(
                f"{step.place}: round {step.round_index} of its session is already on line "
                f"{before.place.line}; expected each round once"
            )


# --- JSON Lines ------------------------------------------------------------------------------------------


def _json_steps(source: Source, report: ReadingReport) -> Iterator[tuple[str, _Step]]:
    for place, record in source.records(_DECODER, report):
        with source.tolerating(report):
            yield record.session_id, _json_step(record, place, report)


def _json_step(record: _Round, place: Place, report: ReadingReport) -> _Step:
    prompt = record.prefix_tokens + record.newly_append_tokens
    if prompt < 1:
        raise InputError(f"{place}: prefix_tokens + newly_append_tokens is {prompt}: expected at least 1")
    if record.input_tokens_total not in (None, prompt):
        report.inferred[UNEQUAL] += 1
    gap_s, tools = _tool_times(record.tools, place, report)
    times = [
        (event.event_type, iso_seconds(event.timestamp, place, f"timing_events[{number}].timestamp"))
        for number, event in enumerate(record.timing_events)
    ]
    asked = [time for kind, time in times if kind == "user_message"]
    answered = [time for kind, time in times if kind not in _INPUT_EVENTS]
    return _Step(
        place,
        record.round_index,
        cached=record.prefix_tokens,
        prompt=prompt,
        output=record.output_tokens,
        reasoning=record.reasoning_output_tokens,
        tools=tools,
        gap_s=gap_s,
        start_s=min((time for _, time in times), default=None),
        end_s=max(answered, default=None),
        asked_s=max(asked, default=None),
    )


def _tool_times(
    tools: list[_Tool], place: Place, report: ReadingReport
) -> tuple[float | None, tuple[ToolCall, ...]]:
    """From the last tool call sent out to the last result back, and each tool's own time."""
    if not tools:
        return 0.0, ()
    emitted: list[float] = []
    results: list[float] = []
    calls = []
    for number, tool in enumerate(tools):
        sent_s = _optional_time(tool.emitted_at, place, f"tools[{number}].emitted_at")
        back_s = _optional_time(tool.result_at, place, f"tools[{number}].result_at")
        if sent_s is None or back_s is None:
            report.dropped[NO_RESULT] += back_s is None
            calls.append(ToolCall(tool.tool_name, (tool.tool_wall_latency_ms or 0.0) / 1e3))
            continue
        emitted.append(sent_s)
        results.append(back_s)
        wall_ms = tool.tool_wall_latency_ms
        calls.append(
            ToolCall(tool.tool_name, max(0.0, back_s - sent_s) if wall_ms is None else wall_ms / 1e3)
        )
    if not results:
        report.inferred[NO_TOOL_TIME] += 1
        return None, tuple(calls)
    gap_s = max(results) - max(emitted)
    if gap_s < 0:
        report.clamped[NEGATIVE] += 1
    return max(0.0, gap_s), tuple(calls)


def _optional_time(text: str | None, place: Place, field: str) -> float | None:
    return None if text is None else iso_seconds(text, place, field)


# --- CSV -------------------------------------------------------------------------------------------------


def _csv_steps(source: Source, report: ReadingReport) -> Iterator[tuple[str, _Step]]:
    columns = columns_of(source.head.line)
    has_arrival, has_wait = _ARRIVAL in columns, _WAIT in columns
    for row in csv_rows(source, _COLUMNS):
        with source.tolerating(report):
            yield row.text("session_id"), _csv_step(row, has_arrival, has_wait, report)


def _csv_step(row: Row, has_arrival: bool, has_wait: bool, report: ReadingReport) -> _Step:
    cached, new = row.count("prefix_len"), row.count("input_len")
    if cached + new < 1:
        raise InputError(f"{row.place}: prefix_len + input_len is {cached + new}: expected at least 1")
    gap_s = row.number(_WAIT) / 1e3 if has_wait else None
    if gap_s is None:
        report.inferred[NO_WAIT] += 1
    elif gap_s:
        report.inferred[SUMMED] += 1
    return _Step(
        row.place,
        row.count("round_idx"),
        cached=cached,
        prompt=cached + new,
        output=row.count("output_len"),
        gap_s=gap_s,
        start_s=row.number(_ARRIVAL) / 1e3 if has_arrival else None,
    )


# --- sessions to turns -----------------------------------------------------------------------------------


def _turns(steps: list[_Step], report: ReadingReport) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for index, step in enumerate(steps):
        following = steps[index + 1] if index + 1 < len(steps) else None
        growth = following.prompt - step.prompt if following else None
        before = turns[-1] if turns else None
        turns.append(
            Turn(
                turn_id=f"t{step.round_index}",
                prompt_tokens=step.prompt,
                output_tokens=step.output,
                reuse_tokens=0
                if before is None
                else reused(
                    before.prompt_tokens, before.kept_output_tokens, step.prompt, step.cached, report
                ),
                kept_output_tokens=kept_output(step.output, step.reasoning, growth, report),
                parents=(index - 1,) if index else (),
                tools=step.tools,
                gap_s=step.gap_s,
                pause_s=_pause(step, following, report),
            )
        )
    return tuple(turns)


def _pause(step: _Step, following: _Step | None, report: ReadingReport) -> float:
    """The seconds a person took to send the next message, after the answer and its tools."""
    if following is None or following.asked_s is None or step.end_s is None:
        return 0.0
    pause_s = following.asked_s - step.end_s - (step.gap_s or 0.0)
    if pause_s < 0:
        report.clamped[NEGATIVE] += 1
    return max(0.0, pause_s)
