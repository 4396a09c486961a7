"""OpenTelemetry GenAI spans: OTLP-JSON, flat JSON, or either a line each.

A trace is a program, its chat spans are the turns, execute_tool spans the tools. What overlaps is a fork,
what starts after several branches is a join; calls below invoke_agent (or an agent run as a tool) are a
sub-agent: they wait for what came before it, and what follows waits for them if it was over. Where spans
record their messages, they say which prompt goes on from which, and how far prompts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._genai_attributes import Usage, attributes_of, messages_of, usage_of
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._messages import Message, shared_messages, tokens_of
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._timeline import Links, Recorded, links_by_time, turns_in_time
from agentservesim.workload.formats._times import from_earliest, iso_seconds
from agentservesim.workload.report import ReadingReport

NAME = "otel-genai"
LOOKS_LIKE = '{"resourceSpans": […]} (OTLP-JSON) or {"spans": [{"trace_id": …, "attributes": {…}}]}'
OTHER = "spans that are no model call, tool or agent"
NO_TOKENS = "model calls with neither usage nor text"
ESTIMATED = "tokens of calls without usage: estimated from their text at 4 bytes a token"
REUSE_PART = "reuse of a part of a prompt: by the share of its text"
REUSE_INFERRED = "reuse without recorded messages: the parent's whole prompt and output"
ONE_TRACE = "traces without any model call"
LOOSE_TOOL = "tools without a model call before them"
CACHE_ADDED = "input tokens below the cached ones: the cached ones added"

_CHAT = ("chat", "text_completion", "generate_content")
_TOOL = "execute_tool"
_AGENT = ("invoke_agent", "create_agent")
_NANO = 1e9


class _Context(msgspec.Struct):
    trace_id: str | None = None
    span_id: str | None = None


class _Span(msgspec.Struct):
    """A span in any of the spellings; `attributes` is an object or a list of {key, value}."""

    trace_id: str | None = None
    traceId: str | None = None
    span_id: str | None = None
    spanId: str | None = None
    parent_span_id: str | None = None
    parentSpanId: str | None = None
    parent_id: str | None = None
    context: _Context | None = None
    name: str = ""
    start_time: str | float | None = None
    startTimeUnixNano: str | int | None = None
    end_time: str | float | None = None
    endTimeUnixNano: str | int | None = None
    attributes: Any = None


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct):
    scopeSpans: list[_Scope] = []
    instrumentationLibrarySpans: list[_Scope] = []


class _Record(_Span, kw_only=True):
    """A document, or a line: OTLP, a list of spans with a header, or a span."""

    resourceSpans: list[_Resource] | None = None
    spans: list[_Span] | None = None


_DECODER = msgspec.json.Decoder(_Record | list[_Span])


class _Node(msgspec.Struct):
    """A span as needed here; times in seconds."""

    span_id: str
    parent_id: str | None
    kind: str
    name: str
    start_s: float
    end_s: float
    usage: Usage = Usage(None, None, None)
    prompt: tuple[Message, ...] = ()
    answer: Message | None = None


def recognises(head: Head) -> bool:
    """Whether a file is in one of the formats."""
    if "resourceSpans" in head.keys:
        return True
    ids = {"trace_id", "traceId", "context"} & head.keys
    return ("spans" in head.keys or bool(ids)) and "gen_ai." in head.text


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """The traces of a file, by their start; a file is held in memory, texts as digests and estimates.

    Raises InputError naming file, line, field, value and expectation.
    """
    traces: dict[str, list[_Node]] = {}
    for place, field, span in _spans(source, report):
        with source.tolerating(report, "malformed spans"):
            node = _node(span, place, field, report)
            traces.setdefault(_trace_id(span, place, field), []).append(node)
    order = sorted(traces, key=lambda trace: min(node.start_s for node in traces[trace]))
    read_traces = []
    for trace in order:
        turns = _turns(traces.pop(trace), report)
        if turns is None:
            report.dropped[ONE_TRACE] += 1
        else:
            read_traces.append((trace, *turns))
    arrivals = from_earliest(start_s for _, start_s, _ in read_traces)
    for (trace, _, placed), arrival_s in zip(read_traces, arrivals, strict=True):
        yield Program(trace, placed, arrival_s)


# --- spans -----------------------------------------------------------------------------------------------


def _spans(source: Source, report: ReadingReport) -> Iterator[tuple[Place, str, _Span]]:
    """Every span with its place and the field it stands in."""
    for place, record in _records(source, report):
        if isinstance(record, list):
            yield from ((place, f"[{number}].", span) for number, span in enumerate(record))
        elif record.resourceSpans is not None:
            for number, resource in enumerate(record.resourceSpans):
                scopes = (*resource.scopeSpans, *resource.instrumentationLibrarySpans)
                for at, scope in enumerate(scopes):
                    field = f"resourceSpans[{number}].scopeSpans[{at}].spans"
                    yield from ((place, f"{field}[{n}].", span) for n, span in enumerate(scope.spans))
        elif record.spans is not None:
            yield from ((place, f"spans[{number}].", span) for number, span in enumerate(record.spans))
        else:
            yield place, "", record


def _records(source: Source, report: ReadingReport) -> Iterator[tuple[Place, _Record | list[_Span]]]:
    """The file as lines if its first line is complete, else as one document."""
    try:
        msgspec.json.decode(source.head.line)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        yield source.document(_DECODER)
        return
    yield from source.records(_DECODER, report)


def _trace_id(span: _Span, place: Place, field: str) -> str:
    trace = span.trace_id or span.traceId or (span.context.trace_id if span.context else None)
    if not trace:
        raise InputError(f"{place}: {field}trace_id is missing: expected the id of a trace")
    return trace


def _node(span: _Span, place: Place, field: str, report: ReadingReport) -> _Node:
    attributes = attributes_of(span.attributes, place, f"{field}attributes")
    usage = usage_of(attributes, place, f"{field}attributes")
    if usage.cache_added:
        report.inferred[CACHE_ADDED] += 1
    kind = _kind(str(attributes.get("gen_ai.operation.name", "")), span.name, usage)
    start_s = _time(span.start_time, span.startTimeUnixNano, place, f"{field}start_time")
    end_s = _time(span.end_time, span.endTimeUnixNano, place, f"{field}end_time")
    node = _Node(
        span_id=span.span_id or span.spanId or (span.context.span_id if span.context else None) or "",
        parent_id=span.parent_span_id or span.parentSpanId or span.parent_id or None,
        kind=kind,
        name=str(attributes.get("gen_ai.tool.name") or span.name or "tool"),
        start_s=start_s,
        end_s=max(start_s, end_s),
        usage=usage,
    )
    if kind == "chat":
        node.prompt, node.answer = messages_of(attributes)
    return node


def _kind(operation: str, name: str, usage: Usage) -> str:
    if operation in _CHAT or (not operation and (usage.prompt is not None or name.startswith("chat "))):
        return "chat"
    if operation == _TOOL:
        return "tool"
    return "agent" if operation in _AGENT else "other"


def _time(plain: str | float | None, nano: str | int | None, place: Place, field: str) -> float:
    """Seconds since 1970 from nano-epoch, ISO text or a number of seconds. Raises InputError."""
    if nano is not None:
        if str(nano).isdecimal() and len(str(nano)) < 22:
            return int(nano) / _NANO
        raise InputError(f"{place}: {field}UnixNano is {quoted(nano)}: expected nanoseconds since 1970")
    if plain is None:
        raise InputError(f"{place}: {field} is missing: expected a time")
    if isinstance(plain, str):
        return iso_seconds(plain, place, field)
    if not 0 <= plain < 1e12:
        raise InputError(f"{place}: {field} is {plain}: expected seconds since 1970")
    return plain


# --- traces to programs ----------------------------------------------------------------------------------


class _Threads:
    """Who may have waited for whom: the agents above every call, innermost first."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self._node_of = {node.span_id: node for node in nodes if node.span_id}

    def owners(self, node: _Node) -> tuple[_Node, ...]:
        """The agents, and tools that are agents, in whose time a span lies, innermost first."""
        owners = []
        seen = {node.span_id}
        above = self._node_of.get(node.parent_id or "")
        while above is not None and above.span_id not in seen:
            seen.add(above.span_id)
            if above.kind in ("agent", "tool") and above.start_s <= node.start_s <= above.end_s:
                owners.append(above)
            above = self._node_of.get(above.parent_id or "")
        return tuple(owners)

    @staticmethod
    def visible(earlier: _Node, its: tuple[_Node, ...], later: _Node, theirs: tuple[_Node, ...]) -> bool:
        """Whether `later` can have waited for `earlier`: same agent; above, before the agent was called; or
        below, in an agent that was over."""
        inner = [owner for owner in its if owner not in theirs]
        if inner and inner[-1].end_s > later.start_s:
            return False
        outer = [owner for owner in theirs if owner not in its]
        return not outer or earlier.end_s <= outer[-1].start_s


def _turns(nodes: list[_Node], report: ReadingReport) -> tuple[float, tuple[Turn, ...]] | None:
    """When a trace's first call was sent, and its turns; None if it has no call with tokens."""
    if other := sum(node.kind == "other" for node in nodes):
        report.dropped[OTHER] += other
    calls = [node for node in nodes if node.kind == "chat" and _has_tokens(node)]
    if lost := sum(node.kind == "chat" for node in nodes) - len(calls):
        report.dropped[NO_TOKENS] += lost
    if not calls:
        return None
    calls.sort(key=lambda node: (node.start_s, node.end_s))
    threads = _Threads(nodes)
    owners = [threads.owners(node) for node in calls]

    def visible(earlier: int, later: int) -> bool:
        return threads.visible(calls[earlier], owners[earlier], calls[later], owners[later])

    kin = [_kin(calls, index, visible) for index in range(len(calls))]
    recorded = [
        Recorded(node.start_s, node.end_s, base=of.base, continues=of.continues)
        for node, of in zip(calls, kin, strict=True)
    ]
    links = links_by_time(recorded, 0.0, visible)
    tools = _tools(nodes, calls, owners, threads, report)
    turns = _untimed(calls, kin, links, tools, report)
    return calls[0].start_s, turns_in_time(turns, recorded, links, report)


def _has_tokens(node: _Node) -> bool:
    return node.usage.prompt is not None or bool(node.prompt)


class _Kin(NamedTuple):
    """The earlier call that a prompt shares most with, by messages: `same` of them, the answer included."""

    base: int | None = None
    same: int = 0
    continues: bool = False


def _kin(calls: Sequence[_Node], index: int, visible: Callable[[int, int], bool]) -> _Kin:
    best = _Kin()
    node = calls[index]
    for earlier in range(index - 1, -1, -1):
        other = calls[earlier]
        if not node.prompt or other.end_s > node.start_s or not visible(earlier, index):
            continue
        said = other.prompt if other.answer is None else (*other.prompt, other.answer)
        if best.continues and len(said) <= best.same:
            continue
        same = shared_messages(said, node.prompt)
        continues = same >= len(other.prompt) > 0
        if (same, continues) > (best.same, best.continues):
            best = _Kin(earlier, same, continues)
    return best


def _untimed(
    calls: Sequence[_Node],
    kin: Sequence[_Kin],
    links: Sequence[Links],
    tools: Sequence[tuple[ToolCall, ...]],
    report: ReadingReport,
) -> list[Turn]:
    turns: list[Turn] = []
    names = _names(calls)
    for index, node in enumerate(calls):
        prompt, output = _tokens(node, report)
        parents = links[index].parents
        reuse = 0
        if parents:
            reuse = _reuse(turns[parents[0]], calls[parents[0]], node, prompt, kin[index], report)
        turns.append(
            Turn(
                turn_id=names[index],
                prompt_tokens=prompt,
                output_tokens=output,
                reuse_tokens=reuse,
                kept_output_tokens=max(0, output - (node.usage.reasoning or 0)),
                parents=parents,
                tools=tools[index],
            )
        )
    return turns


def _names(calls: Sequence[_Node]) -> list[str]:
    """Span ids; positions where one is missing or occurs twice."""
    ids = [node.span_id for node in calls]
    return ids if all(ids) and len(set(ids)) == len(ids) else [f"t{index}" for index in range(len(ids))]


def _tokens(node: _Node, report: ReadingReport) -> tuple[int, int]:
    prompt, output = node.usage.prompt, node.usage.output
    if prompt is None or output is None:
        report.estimated[ESTIMATED] += 1
    if prompt is None:
        prompt = tokens_of(node.prompt)
    if output is None:
        output = node.answer.tokens if node.answer else 0
    return max(1, prompt), output


def _reuse(before: Turn, other: _Node, node: _Node, prompt: int, kin: _Kin, report: ReadingReport) -> int:
    """What a prompt repeats of its first parent's prompt and answer."""
    limit = min(before.prompt_tokens + before.kept_output_tokens, prompt)
    if not node.prompt or not other.prompt:
        report.inferred[REUSE_INFERRED] += 1
        return limit
    if kin.base is None:
        return 0
    if kin.same > len(other.prompt):
        return limit
    if kin.same == len(other.prompt):
        return min(before.prompt_tokens, prompt)
    report.estimated[REUSE_PART] += 1
    whole = max(1, tokens_of(other.prompt))
    return min(limit, before.prompt_tokens * tokens_of(other.prompt[: kin.same]) // whole)


def _tools(
    nodes: Sequence[_Node],
    calls: Sequence[_Node],
    owners: Sequence[tuple[_Node, ...]],
    threads: _Threads,
    report: ReadingReport,
) -> list[tuple[ToolCall, ...]]:
    """The tools after each call: those of the same agent that started once it was over, before the next."""
    tools: list[list[ToolCall]] = [[] for _ in calls]
    for node in nodes:
        if node.kind != "tool":
            continue
        its = threads.owners(node)
        asked = [
            index for index, call in enumerate(calls) if owners[index] == its and call.end_s <= node.start_s
        ]
        if asked:
            last = max(asked, key=lambda index: calls[index].end_s)
            tools[last].append(ToolCall(node.name, node.end_s - node.start_s))
        else:
            report.dropped[LOOSE_TOOL] += 1
    return [tuple(each) for each in tools]
