"""Claude Code's session records, grouped into threads of calls: the main one and those of sub-agents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentservesim.workload.formats._decode import Tokens, decode
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._source import Source
from agentservesim.workload.formats._text_tokens import text_tokens
from agentservesim.workload.formats._times import iso_seconds
from agentservesim.workload.report import ReadingReport

REPEATED = "records repeated by a resumed session"
SYNTHETIC = "messages that no model wrote (API errors, interruptions)"
NO_TIME = "records without a time: that of the record before"

AGENT_TOOLS = frozenset({"Task", "Agent"})
PERSON_TOOLS = frozenset({"AskUserQuestion", "ExitPlanMode"})
"""Tools whose result is a person's answer."""

_READ = frozenset({"user", "assistant", "system", "progress", "attachment"})


class Usage(msgspec.Struct):
    """Token counts of one API message."""

    input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None

    @property
    def prompt(self) -> int:
        cached = (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)
        return (self.input_tokens or 0) + cached


class _Message(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    content: Any = None
    usage: Usage | None = None


class _Kind(msgspec.Struct):
    type: str | None = None


class _Record(msgspec.Struct):
    type: str | None = None
    subtype: str | None = None
    uuid: str | None = None
    parentUuid: str | None = None
    logicalParentUuid: str | None = None
    timestamp: str | None = None
    sessionId: str | None = None
    agentId: str | None = None
    requestId: str | None = None
    isSidechain: bool | None = None
    isMeta: bool | None = None
    isCompactSummary: bool | None = None
    isApiErrorMessage: bool | None = None
    message: _Message | None = None
    toolUseResult: Any = None
    attachment: Any = None
    parentToolUseID: str | None = None
    data: Any = None


_KIND = msgspec.json.Decoder(_Kind)
_RECORD = msgspec.json.Decoder(_Record)


@dataclass
class Tool:
    """A tool that a call asked for; `back_s` is when its result came in."""

    name: str
    sent_s: float
    prompt: str | None
    back_s: float | None = None


@dataclass(eq=False)
class Call:
    """One API message, all its content blocks together.

    start_s         when the last input before it was there: a tool result or a person's text
    text_prompt     tokens of the prompt, estimated from the text and the counts before it
    text_output     tokens of its blocks, estimated from their text
    previous        the call its records follow by parentUuid; None: not said
    """

    key: str
    thread: Thread
    start_s: float
    end_s: float
    model: str | None
    human: bool
    compacted: bool
    text_prompt: int
    usage: Usage | None = None
    text_output: int = 0
    previous: Call | None = None
    tools: dict[str, Tool] = field(default_factory=dict)


@dataclass(eq=False)
class Thread:
    """The calls of a session or of one sub-agent, in order of time.

    agent    the sub-agent's id; None: the session itself
    prompt   the first text a sub-agent was given
    """

    session: str
    agent: str | None
    calls: list[Call] = field(default_factory=list)
    prompt: str | None = None
    tokens: int = 0
    input_s: float | None = None
    text_s: float | None = None
    answer_s: float | None = None
    result_s: float | None = None
    compacted: bool = False


@dataclass
class Sessions:
    """All threads of the files read together, and what their records say of each other.

    tool_of_agent   sub-agent id -> id of the tool_use that started it
    background      ids of tool_uses whose sub-agent runs on while the caller goes on
    """

    threads: dict[tuple[str, str | None], Thread] = field(default_factory=dict)
    tool_of_agent: dict[str, str] = field(default_factory=dict)
    background: set[str] = field(default_factory=set)
    call_of_tool: dict[str, Call] = field(default_factory=dict)


class _Timed(msgspec.Struct):
    time_s: float
    place: Place
    record: _Record


def read_sessions(source: Source, report: ReadingReport) -> Sessions:
    """The records of a file and its companions, in order of time, each uuid once."""
    builder = _Builder(report)
    for timed in sorted(_records(source, report), key=lambda item: item.time_s):
        builder.add(timed)
    return builder.sessions


def _records(source: Source, report: ReadingReport) -> Iterable[_Timed]:
    seen: set[str] = set()
    for part in (source, *source.companions):
        time_s: float | None = None
        waiting: list[_Timed] = []
        for place, raw in part.lines():
            record = None
            with part.tolerating(report):
                kind = decode(_KIND, raw, place).type
                record = decode(_RECORD, raw, place) if kind in _READ else None
                if record is not None and record.timestamp is not None:
                    time_s = iso_seconds(record.timestamp, place, "timestamp")
            if record is None:
                continue
            if record.uuid is not None and record.uuid in seen:
                report.dropped[REPEATED] += 1
                continue
            seen.add(record.uuid or "")
            if time_s is None:
                waiting.append(_Timed(0.0, place, record))
                continue
            report.estimated[NO_TIME] += (record.timestamp is None) + len(waiting)
            yield from (_Timed(time_s, early.place, early.record) for early in waiting)
            waiting.clear()
            yield _Timed(time_s, place, record)
        report.estimated[NO_TIME] += len(waiting)
        yield from waiting  # there is no time in the whole file


class _Builder:
    """Takes records in order of time and makes calls of them."""

    def __init__(self, report: ReadingReport) -> None:
        self.report = report
        self.sessions = Sessions()
        self.parent_of: dict[str, str | None] = {}
        self.call_of: dict[str, Call] = {}
        self.thread_of: dict[str, Thread] = {}
        self.calls: dict[str, Call] = {}
        self.tools: dict[str, Tool] = {}

    def add(self, timed: _Timed) -> None:
        record, now_s = timed.record, timed.time_s
        if record.type == "progress":
            self._progress(record)
            return
        thread = self._thread(record)
        if record.uuid is not None:
            self.parent_of[record.uuid] = record.parentUuid or record.logicalParentUuid
            self.thread_of[record.uuid] = thread
        if record.type == "assistant" and record.message is not None:
            self._assistant(record, record.message, thread, now_s)
        elif record.type == "user" and record.message is not None:
            self._user(record, record.message, thread, now_s)
        elif record.type == "attachment":
            thread.tokens += text_tokens(record.attachment)
        elif record.subtype == "compact_boundary":
            thread.compacted = True

    def _thread(self, record: _Record) -> Thread:
        """The thread of a record: by agent, else that of the record it follows."""
        parent = self.thread_of.get(record.parentUuid or record.logicalParentUuid or "")
        session = parent.session if parent is not None else record.sessionId or ""
        agent = record.agentId
        if agent is None and record.isSidechain:
            agent = parent.agent if parent is not None and parent.agent else f"sidechain-{record.uuid}"
        return self.sessions.threads.setdefault((session, agent), Thread(session, agent))

    def _progress(self, record: _Record) -> None:
        agent = record.data.get("agentId") if isinstance(record.data, dict) else None
        if isinstance(agent, str) and record.parentToolUseID is not None:
            self.sessions.tool_of_agent.setdefault(agent, record.parentToolUseID)

    def _assistant(self, record: _Record, message: _Message, thread: Thread, now_s: float) -> None:
        if record.isApiErrorMessage or message.model == "<synthetic>":
            self.report.dropped[SYNTHETIC] += 1
            return
        key = message.id or record.requestId or record.uuid or f"call-{len(self.calls)}"
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = self._begin(key, record, message, thread, now_s)
        call.end_s = max(call.end_s, now_s)
        call.usage = _later(call.usage, message.usage)
        tokens = text_tokens(message.content)
        call.text_output += tokens
        if record.uuid is not None:
            self.call_of[record.uuid] = call
        for block in _blocks(message.content, "tool_use"):
            self._tool_use(block, call, now_s)
        usage = call.usage
        if usage is not None and usage.prompt:
            output = max(usage.output_tokens or 0, call.text_output)
            thread.tokens = usage.prompt + output
        else:
            thread.tokens += tokens

    def _begin(self, key: str, record: _Record, message: _Message, thread: Thread, now_s: float) -> Call:
        last_s = thread.calls[-1].end_s if thread.calls else now_s
        text_s, result_s = thread.text_s, thread.result_s
        human = text_s is not None and (result_s is None or text_s >= result_s) and bool(thread.calls)
        answered = thread.answer_s is not None and (result_s is None or thread.answer_s >= result_s)
        call = Call(
            key,
            thread,
            last_s if thread.input_s is None else min(thread.input_s, now_s),
            now_s,
            message.model,
            human or answered,
            thread.compacted,
            thread.tokens,
            previous=self._previous(record),
        )
        thread.calls.append(call)
        thread.input_s = thread.text_s = thread.answer_s = thread.result_s = None
        thread.compacted = False
        return call

    def _previous(self, record: _Record) -> Call | None:
        """The call that the record follows by parentUuid."""
        at = record.parentUuid or record.logicalParentUuid
        passed: set[str] = set()
        while at is not None and at not in passed:
            passed.add(at)
            if at in self.call_of:
                return self.call_of[at]
            at = self.parent_of.get(at)
        return None

    def _tool_use(self, block: dict[str, Any], call: Call, now_s: float) -> None:
        name, key, given = block.get("name"), block.get("id"), block.get("input")
        prompt = given.get("prompt") if isinstance(given, dict) else None
        key = key if isinstance(key, str) else f"{call.key}#{len(call.tools)}"
        if key in call.tools:
            return
        tool = Tool(name if isinstance(name, str) and name else "tool", now_s, _text(prompt))
        call.tools[key] = self.tools[key] = tool
        self.sessions.call_of_tool[key] = call

    def _user(self, record: _Record, message: _Message, thread: Thread, now_s: float) -> None:
        thread.input_s = now_s
        if record.isCompactSummary:
            thread.compacted = True
            thread.tokens = 0
        thread.tokens += text_tokens(message.content)
        results = _blocks(message.content, "tool_result")
        for block in results:
            self._tool_result(block, record.toolUseResult, thread, now_s)
        if results:
            return
        if thread.prompt is None:
            thread.prompt = _text(message.content)
        if not record.isMeta and not record.isCompactSummary and thread.agent is None:
            thread.text_s = now_s

    def _tool_result(self, block: dict[str, Any], detail: Any, thread: Thread, now_s: float) -> None:
        key = block.get("tool_use_id")
        tool = self.tools.get(key) if isinstance(key, str) else None
        if tool is None or not isinstance(key, str):
            thread.result_s = now_s
            return
        tool.back_s = now_s
        if tool.name in PERSON_TOOLS:
            thread.answer_s = now_s
        else:
            thread.result_s = now_s
        if isinstance(detail, dict):
            agent = detail.get("agentId")
            if isinstance(agent, str):
                self.sessions.tool_of_agent[agent] = key
            if detail.get("isAsync") is True or detail.get("status") == "async_launched":
                self.sessions.background.add(key)


def _later(before: Usage | None, now: Usage | None) -> Usage | None:
    """Usage is repeated on every block; the one that counts most output is the final one."""
    if before is None or now is None:
        return before if now is None else now
    return now if (now.output_tokens or 0) >= (before.output_tokens or 0) else before


def _blocks(content: Any, kind: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return []
    return [block for block in content if isinstance(block, dict) and block.get("type") == kind]


def _text(content: Any) -> str | None:
    """The text of a message, if that is all it is."""
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in _blocks(content, "text")]
    return "\n".join(text for text in texts if isinstance(text, str)) or None
