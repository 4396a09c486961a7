"""LLMServingSim and AgentServeSim JSON Lines: sessions, flat requests and DAGs, one a line.

Keys this reader does not know are ignored: the format has many dialects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from agentservesim.errors import InputError, nearest
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._decode import (
    Nanoseconds,
    PromptTokens,
    Tokens,
    decode,
    quoted,
    top_level_keys,
)
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._reading import Distinct, index_of
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.report import ReadingReport

NAME = "llmservingsim"
LOOKS_LIKE = '{"session_id": …, "sub_requests": […]}, {"workflow_id": …, "nodes": […]} or {"input_toks": …}'
REUSE_INFERRED = "reuse without token ids: the parent's whole prompt and output"
OUTPUT_INFERRED = "reuse without output ids: the parent's output follows its prompt"
REUSE_CLAMPED = "reuse by token ids, down to the parent's input_toks + output_toks"
DELAY_INFERRED = "joins whose edges have different delays after one gap: the longest"

_KINDS = ("sub_requests", "nodes", "input_toks")
_NS = 1e9


class _Kind(msgspec.Struct):
    """Which of the three shapes a row has."""

    sub_requests: msgspec.Raw | UnsetType = UNSET
    nodes: msgspec.Raw | UnsetType = UNSET
    input_toks: msgspec.Raw | UnsetType = UNSET


class _Call(msgspec.Struct):
    input_toks: PromptTokens
    output_toks: Tokens
    tool_duration_ns: Nanoseconds | None = None
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None
    tool: str | None = None
    tool_name: str | None = None


class _Session(msgspec.Struct):
    session_id: str | int
    sub_requests: Annotated[list[_Call], msgspec.Meta(min_length=1)]
    arrival_time_ns: Nanoseconds | None = None


class _Flat(_Call, kw_only=True):
    session_id: str | int | None = None
    request_id: str | int | None = None
    arrival_time_ns: Nanoseconds | None = None


class _Node(_Call, kw_only=True):
    node_id: str | int


class _Edge(msgspec.Struct):
    src: str | int
    dst: str | int
    delay_ns: Nanoseconds | None = None


class _Dag(msgspec.Struct):
    workflow_id: str | int
    nodes: Annotated[list[_Node], msgspec.Meta(min_length=1)]
    edges: list[_Edge] = []
    arrival_time_ns: Nanoseconds | None = None


_KIND = msgspec.json.Decoder(_Kind)
_SESSION = msgspec.json.Decoder(_Session)
_FLAT = msgspec.json.Decoder(_Flat)
_DAG = msgspec.json.Decoder(_Dag)


def recognises(head: Head) -> bool:
    """Whether a file is in this format."""
    return not head.keys.isdisjoint(_KINDS)


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """Stream the programs of a file, one line in memory at a time; kinds of rows may mix.

    Raises InputError naming file, line, field, value and expectation.
    """
    distinct = Distinct()
    for place, raw in source.lines():
        program = None
        with source.tolerating(report):
            program = distinct.accept(_program(raw, place, report), place)
        if program is not None:
            yield program


def _program(raw: bytes, place: Place, report: ReadingReport) -> Program:
    kind = decode(_KIND, raw, place)
    if kind.sub_requests is not UNSET:
        return _from_session(decode(_SESSION, raw, place), place, report)
    if kind.nodes is not UNSET:
        return _from_dag(decode(_DAG, raw, place), place, report)
    if kind.input_toks is not UNSET:
        return _from_flat(decode(_FLAT, raw, place), place)
    raise InputError(
        f"{place}: the line has keys {quoted(sorted(top_level_keys(raw)))}: "
        f"expected one of {', '.join(_KINDS)}"
    )


def _from_session(row: _Session, place: Place, report: ReadingReport) -> Program:
    turns: list[Turn] = []
    for index, call in enumerate(row.sub_requests):
        _check_ids(call, f"sub_requests[{index}]", place)
        reuse = _reuse(row.sub_requests[index - 1], call, report) if index else 0
        parents = (index - 1,) if index else ()
        turns.append(_turn(call, f"t{index}", parents, reuse))
    return Program(str(row.session_id), tuple(turns), _seconds(row.arrival_time_ns))


def _from_flat(row: _Flat, place: Place) -> Program:
    _check_ids(row, "", place)
    given = row.session_id if row.session_id is not None else row.request_id
    name = f"line-{place.line}" if given is None else str(given)
    return Program(name, (_turn(row, "t0", (), 0),), _seconds(row.arrival_time_ns))


def _from_dag(row: _Dag, place: Place, report: ReadingReport) -> Program:
    ids = [str(node.node_id) for node in row.nodes]
    position = index_of(ids, place, "nodes[{}].node_id")
    parents: list[list[int]] = [[] for _ in ids]
    delays: list[dict[int, float]] = [{} for _ in ids]
    for number, edge in enumerate(row.edges):
        src = _end(edge.src, f"edges[{number}].src", position, place)
        dst = _end(edge.dst, f"edges[{number}].dst", position, place)
        if src in parents[dst]:
            raise InputError(f"{place}: edges[{number}].src is {quoted(edge.src)}: expected each edge once")
        parents[dst].append(src)
        delay_s = _seconds(row.nodes[src].tool_duration_ns if edge.delay_ns is None else edge.delay_ns)
        if delay_s is not None:
            delays[src][dst] = delay_s
    gaps = [min(after.values(), default=None) for after in delays]
    turns = []
    for index, node in enumerate(row.nodes):
        _check_ids(node, f"nodes[{index}]", place)
        order = _longest_shared_first(row.nodes, index, parents[index])
        reuse = _reuse(row.nodes[order[0]], node, report) if order else 0
        turn = _turn(node, ids[index], tuple(order), reuse, gaps[index])
        rest_s = _rest(index, order, delays, gaps, report)
        turns.append(msgspec.structs.replace(turn, delay_s=rest_s))
    return Program(str(row.workflow_id), tuple(turns), _seconds(row.arrival_time_ns))


def _rest(
    index: int,
    parents: list[int],
    delays: list[dict[int, float]],
    gaps: list[float | None],
    report: ReadingReport,
) -> float:
    """What a node waits on its own: a delay belongs to an edge, a gap to the node before it.

    The shortest delay that leaves a node is its gap, and the rest of the others is their target's own.
    Where the edges into a node leave different rests the longest holds for all: no call then starts before
    its recorded time, which would let the simulation run ahead of a tool.
    """
    rests = [delays[parent].get(index, 0.0) - (gaps[parent] or 0.0) for parent in parents]
    longest = max(rests, default=0.0)
    if any(rest < longest - 1e-9 for rest in rests):
        report.inferred[DELAY_INFERRED] += 1
    return max(0.0, longest)


def _turn(call: _Call, name: str, parents: tuple[int, ...], reuse: int, gap_s: float | None = None) -> Turn:
    tool = call.tool or call.tool_name
    duration_s = (call.tool_duration_ns or 0.0) / _NS or gap_s or 0.0
    tools = (ToolCall(tool or "tool", duration_s),) if tool or call.tool_duration_ns else ()
    return Turn(
        turn_id=name,
        prompt_tokens=call.input_toks,
        output_tokens=call.output_toks,
        reuse_tokens=reuse,
        kept_output_tokens=call.output_toks,
        parents=parents,
        tools=tools,
        gap_s=gap_s,
    )


def _reuse(parent: _Call, child: _Call, report: ReadingReport) -> int:
    """Leading prompt tokens the child shares with its parent's prompt and output."""
    whole = min(parent.input_toks + parent.output_toks, child.input_toks)
    if parent.input_tok_ids is None or child.input_tok_ids is None:
        report.inferred[REUSE_INFERRED] += 1
        return whole
    shared = _common_prefix(parent.input_tok_ids + (parent.output_tok_ids or []), child.input_tok_ids)
    if parent.output_tok_ids is None and shared == parent.input_toks < child.input_toks:
        report.inferred[OUTPUT_INFERRED] += 1
        return whole
    if shared > whole:  # more output ids than output_toks
        report.clamped[REUSE_CLAMPED] += 1
    return min(shared, whole)


def _common_prefix(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix, by bisection on slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _longest_shared_first(nodes: list[_Node], index: int, parents: list[int]) -> list[int]:
    """Parents in file order, but first the one that shares most ids: reuse is counted against the first."""
    child = nodes[index].input_tok_ids
    if child is None or len(parents) < 2:
        return parents

    def shared(parent: int) -> int:
        node = nodes[parent]
        return _common_prefix((node.input_tok_ids or []) + (node.output_tok_ids or []), child)

    return sorted(parents, key=lambda parent: -shared(parent))


def _end(name: str | int, field: str, position: dict[str, int], place: Place) -> int:
    if str(name) not in position:
        hint = nearest(str(name), position)
        raise InputError(f"{place}: {field} is {quoted(name)}: expected the node_id of a node{hint}")
    return position[str(name)]


def _check_ids(call: _Call, field: str, place: Place) -> None:
    if call.input_tok_ids is not None and len(call.input_tok_ids) != call.input_toks:
        name = f"{field}.input_tok_ids" if field else "input_tok_ids"
        raise InputError(
            f"{place}: {name} has {len(call.input_tok_ids)} ids: expected input_toks, {call.input_toks}"
        )


def _seconds(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / _NS
