"""Codex rollouts: {timestamp, type, payload} a line, one session a file.

A call is what the model wrote (reasoning, messages, tool calls) between two inputs (a person's message, tool
results). Its tokens come from the token_count event after it: input_tokens already includes what was cached,
output_tokens includes reasoning, total_token_usage is cumulative and serves only to tell a repeated event
from a new call. Reasoning does not return into the context. A call without such an event, as in all old
rollouts, is estimated from its text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._decode import Tokens, decode
from agentservesim.workload.formats._growth import REWRITTEN, kept_output, reused
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._reading import Distinct
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._text_tokens import text_tokens
from agentservesim.workload.formats._times import iso_seconds
from agentservesim.workload.formats._waits import Timed, with_waits
from agentservesim.workload.report import ReadingReport

NAME = "codex"
LOOKS_LIKE = '{"timestamp": …, "type": "session_meta", "payload": {…}}'

ESTIMATED = "calls without token counts: estimated from their text, 4 bytes a token"
REPEATED = "token_count events repeated"
NO_RESULT = "tools without a result"
NO_TIME = "records without a time: that of the record before"
NO_TEXT = "token_count events without a record of the call: a call without tools"
ZERO = "prompts of 0 tokens: 1"
NO_CALLS = "sessions without calls"
SUBAGENT = "sub-agent sessions: programs of their own"

_KINDS = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted"})
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
_SERVER_TOOLS = frozenset({"web_search_call", "image_generation_call"})
_ITEMS = _CALLS | _RESULTS | _SERVER_TOOLS | {"message", "reasoning"}


class _Record(msgspec.Struct):
    timestamp: str | None = None
    type: str | None = None
    payload: msgspec.Raw | UnsetType = UNSET


class _Meta(msgspec.Struct):
    id: str | None = None
    instructions: Any = None
    base_instructions: Any = None
    source: Any = None


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    content: Any = None
    name: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    output: Any = None
    call_id: str | None = None


class _Usage(msgspec.Struct):
    input_tokens: Tokens = 0
    cached_input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    reasoning_output_tokens: Tokens = 0
    total_tokens: Tokens = 0


class _Info(msgspec.Struct):
    total_token_usage: _Usage | None = None
    last_token_usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str | None = None
    info: _Info | None = None


class _Compacted(msgspec.Struct):
    message: Any = None
    replacement_history: Any = None


_RECORD = msgspec.json.Decoder(_Record)
_META = msgspec.json.Decoder(_Meta)
_ITEM = msgspec.json.Decoder(_Item)
_EVENT = msgspec.json.Decoder(_Event)
_COMPACTED = msgspec.json.Decoder(_Compacted)


@dataclass
class _Tool:
    name: str
    sent_s: float
    back_s: float | None = None


@dataclass
class _Call:
    """One call to the model. `prompt_text` and `output_text` are estimated tokens."""

    start_s: float
    end_s: float
    prompt_text: int
    human: bool
    compacted: bool
    usage: _Usage | None = None
    output_text: int = 0
    tools: dict[str, _Tool] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.usage.input_tokens if self.usage else self.prompt_text)

    @property
    def output_tokens(self) -> int:
        return self.usage.output_tokens if self.usage else self.output_text


def recognises(head: Head) -> bool:
    """Whether a file is a rollout: by its envelopes or, if very old, by bare items after a first line."""
    for record in head.records:
        if _is_one_of(record.get("type"), _KINDS) and isinstance(record.get("payload"), dict):
            return True
    bare = head.records[1:] if head.records and {"id", "timestamp"} <= head.records[0].keys() else []
    if any(
        _is_one_of(record.get("type"), _ITEMS) and ("content" in record or "call_id" in record)
        for record in bare
    ):
        return True
    return {"timestamp", "type", "payload"} <= head.keys


def _is_one_of(value: object, names: Collection[str]) -> bool:
    return isinstance(value, str) and value in names


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """One program a file; records of unknown kinds are passed over.

    Raises InputError naming file, line, field, value and expectation.
    """
    session = _Session(source.stem, report)
    place = source.place(1)
    for place, raw in source.lines():
        with source.tolerating(report):
            session.add(raw, place)
    program = session.program()
    if program is not None:
        yield Distinct().accept(program, place)


class _Session:
    """The records of a rollout, in order, becoming calls."""

    def __init__(self, name: str, report: ReadingReport) -> None:
        self.name: str | None = None
        self.fallback = name
        self.report = report
        self.calls: list[_Call] = []
        self.instructions = 0
        self.context = 0  # estimated tokens of all text so far
        self.now_s: float | None = None
        self.input_s: float | None = None
        self.pending = True  # inputs have come in since the model last wrote
        self.human = False
        self.compacted = False
        self.open: dict[str, _Tool] = {}
        self.totals: _Usage | None = None

    def add(self, raw: bytes, place: Place) -> None:
        record = decode(_RECORD, raw, place)
        self._move_clock(record, place)
        payload = raw if isinstance(record.payload, UnsetType) else record.payload
        if record.type == "session_meta" or (record.type is None and record.payload is UNSET):
            self._meta(decode(_META, payload, place))
        elif record.type == "event_msg":
            self._event(decode(_EVENT, payload, place))
        elif record.type == "compacted":
            self._compact(decode(_COMPACTED, payload, place))
        elif record.type == "response_item" or record.type in _ITEMS:
            self._item(decode(_ITEM, payload, place))

    def _move_clock(self, record: _Record, place: Place) -> None:
        if record.timestamp is not None:
            self.now_s = iso_seconds(record.timestamp, place, "timestamp")
        elif record.type is not None:
            self.report.estimated[NO_TIME] += 1

    @property
    def time_s(self) -> float:
        return self.now_s or 0.0

    def _meta(self, meta: _Meta) -> None:
        if self.name is None and meta.id:
            self.name = meta.id
            self.instructions = text_tokens(meta.instructions) + text_tokens(meta.base_instructions)
            self.context += self.instructions
            if isinstance(meta.source, dict) and "subagent" in meta.source:
                self.report.inferred[SUBAGENT] += 1

    def _item(self, item: _Item) -> None:
        if item.type in _RESULTS:
            self._result(item)
        elif item.type == "message" and item.role != "assistant":
            self._input(text_tokens(item.content))
            self.human = self.human or (item.role == "user" and bool(self.calls))
        elif item.type == "message" or item.type == "reasoning":
            self._output(text_tokens(item.content) if item.type == "message" else 0)
        elif item.type in _CALLS or item.type in _SERVER_TOOLS:
            call = self._output(sum(map(text_tokens, (item.name, item.arguments, item.input, item.action))))
            if item.type in _CALLS:
                key = item.call_id or f"#{len(call.tools)}"
                tool = _Tool(item.name or item.type or "tool", self.time_s)
                call.tools[key] = self.open[key] = tool

    def _result(self, item: _Item) -> None:
        self._input(text_tokens(item.output))
        tool = self.open.pop(item.call_id or "", None)
        if tool is not None:
            tool.back_s = self.time_s

    def _input(self, tokens: int) -> None:
        self.context += tokens
        self.input_s = self.time_s
        self.pending = True

    def _output(self, tokens: int) -> _Call:
        """The model wrote something: more of the running call, or the first of the next."""
        if self.pending or not self.calls:
            self._begin()
        call = self.calls[-1]
        call.end_s = max(call.end_s, self.time_s)
        call.output_text += tokens
        self.context += tokens
        return call

    def _begin(self) -> None:
        last_s = self.calls[-1].end_s if self.calls else self.time_s
        start_s = last_s if self.input_s is None else self.input_s
        self.calls.append(_Call(start_s, start_s, self.context, self.human, self.compacted))
        self.pending = self.human = self.compacted = False
        self.input_s = None

    def _event(self, event: _Event) -> None:
        if event.type == "user_message":
            self._input(0)
            self.human = self.human or bool(self.calls)
        if event.type != "token_count" or event.info is None:
            return
        totals, last = event.info.total_token_usage, event.info.last_token_usage
        if totals is not None and totals == self.totals:
            self.report.dropped[REPEATED] += 1
            return
        usage = last or _difference(totals, self.totals)
        self.totals = totals
        if usage is None:
            return
        if not self.calls or self.calls[-1].usage is not None:
            if totals is None and self.calls and self.calls[-1].usage == usage:
                self.report.dropped[REPEATED] += 1
                return
            self.report.inferred[NO_TEXT] += 1
            self._begin()
            self.calls[-1].end_s = max(self.calls[-1].end_s, self.time_s)
        call = self.calls[-1]
        call.usage = usage
        self.context += usage.input_tokens - call.prompt_text  # what the text does not show, such as tools

    def _compact(self, compacted: _Compacted) -> None:
        self.compacted = True
        self.context = self.instructions + text_tokens(compacted.replacement_history or compacted.message)
        self.pending = True

    def program(self) -> Program | None:
        """All that was read as one program; None without a call."""
        report = self.report
        if not self.calls:
            report.dropped[NO_CALLS] += 1
            return None
        report.dropped[NO_RESULT] += len(self.open)
        recorded: list[Timed] = []
        for index, call in enumerate(self.calls):
            after = self.calls[index + 1] if index + 1 < len(self.calls) else None
            recorded.append(self._timed(index, call, after, recorded[-1].turn if recorded else None))
        turns = with_waits(recorded, report)
        arrival_s = None if self.now_s is None else max(0.0, self.calls[0].start_s)
        return Program(self.name or self.fallback, turns, arrival_s)

    def _timed(self, index: int, call: _Call, after: _Call | None, before: Turn | None) -> Timed:
        report = self.report
        report.estimated[ESTIMATED] += call.usage is None
        report.clamped[ZERO] += call.usage is not None and call.usage.input_tokens == 0
        growth = after.prompt_tokens - call.prompt_tokens if after else None
        reasoning = call.usage.reasoning_output_tokens if call.usage else 0
        results = [tool.back_s for tool in call.tools.values() if tool.back_s is not None]
        turn = Turn(
            turn_id=f"t{index}",
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
            reuse_tokens=0 if before is None else _reuse(before, call, report),
            kept_output_tokens=kept_output(call.output_tokens, reasoning, growth, report),
            parents=() if before is None else (index - 1,),
            tools=tuple(
                ToolCall(tool.name, max(0.0, (tool.back_s or tool.sent_s) - tool.sent_s))
                for tool in call.tools.values()
            ),
        )
        return Timed(
            turn,
            call.start_s,
            call.end_s,
            anchor=index - 1 if before is not None else None,
            human=call.human,
            tools_end_s=max(results, default=None),
        )


def _reuse(before: Turn, call: _Call, report: ReadingReport) -> int:
    cached = call.usage.cached_input_tokens if call.usage else 0
    kept = before.kept_output_tokens
    if call.compacted:
        report.inferred[REWRITTEN] += 1
        return min(before.prompt_tokens + kept, call.prompt_tokens, cached)
    return reused(before.prompt_tokens, kept, call.prompt_tokens, cached, report)


def _difference(totals: _Usage | None, before: _Usage | None) -> _Usage | None:
    """What one call added to the cumulative counts."""
    if totals is None:
        return None
    before = before or _Usage()
    pairs = ((getattr(totals, name), getattr(before, name)) for name in _Usage.__struct_fields__)
    return _Usage(*(max(0, now - then) for now, then in pairs))
