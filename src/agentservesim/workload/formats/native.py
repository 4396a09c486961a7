"""The native format: JSON Lines, one program a line (docs/workloads.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from agentservesim.errors import InputError, nearest
from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload.formats._decode import (
    Name,
    PromptTokens,
    Seconds,
    Tokens,
    decode,
    quoted,
)
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._reading import Distinct, index_of
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.report import ReadingReport

NAME = "native"
LOOKS_LIKE = '{"program_id": …, "turns": […]}'
REUSE_INFERRED = "reuse_tokens missing: the parent's whole prompt and kept output"


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    duration_s: Seconds


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    tokens: Tokens


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: PromptTokens
    output_tokens: Tokens
    turn_id: Name | None = None
    parents: list[str | int] | None = None
    reuse_tokens: Tokens | None = None
    kept_output_tokens: Tokens | None = None
    tools: list[_Tool] | None = None
    gap_s: Seconds | None = None
    pause_s: Seconds | None = None
    delay_s: Seconds | None = None


class _Program(msgspec.Struct, forbid_unknown_fields=True):
    program_id: Name
    turns: Annotated[list[_Turn], msgspec.Meta(min_length=1)]
    arrival_s: Seconds | None = None
    prefix: list[_Group] | None = None


_DECODER = msgspec.json.Decoder(_Program)


def recognises(head: Head) -> bool:
    """Whether a file is in the native format."""
    return not head.keys.isdisjoint({"program_id", "turns"})


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """Stream the programs of a native file, one line in memory at a time.

    Raises InputError naming file, line, field, value and expectation.
    """
    distinct = Distinct()
    for place, raw in source.lines():
        program = None
        with source.tolerating(report):
            program = distinct.accept(_program(decode(_DECODER, raw, place), place, report), place)
        if program is not None:
            yield program


def _program(line: _Program, place: Place, report: ReadingReport) -> Program:
    program = Program(
        program_id=line.program_id,
        turns=_turns(line, place, report),
        arrival_s=line.arrival_s,
        prefix=tuple(PrefixGroup(group.id, group.tokens) for group in line.prefix or ()),
    )
    _check_prefix(program, place)
    return program


def _turns(line: _Program, place: Place, report: ReadingReport) -> tuple[Turn, ...]:
    ids = [turn.turn_id or f"t{index}" for index, turn in enumerate(line.turns)]
    position = index_of(ids, place, "turns[{}].turn_id")
    kept = [_kept(turn, index, place) for index, turn in enumerate(line.turns)]
    turns = []
    for index, turn in enumerate(line.turns):
        parents = _parents(turn, index, position, place)
        context = line.turns[parents[0]].prompt_tokens + kept[parents[0]] if parents else 0
        if turn.reuse_tokens is None and parents:
            report.inferred[REUSE_INFERRED] += 1
        turns.append(
            Turn(
                turn_id=ids[index],
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                reuse_tokens=_reuse(turn, index, context, place),
                kept_output_tokens=kept[index],
                parents=parents,
                tools=tuple(ToolCall(tool.name, tool.duration_s) for tool in turn.tools or ()),
                gap_s=turn.gap_s,
                pause_s=turn.pause_s or 0.0,
                delay_s=turn.delay_s or 0.0,
            )
        )
    return tuple(turns)


def _kept(turn: _Turn, index: int, place: Place) -> int:
    """The output tokens that return into the context; all of them when the file does not say."""
    kept = turn.output_tokens if turn.kept_output_tokens is None else turn.kept_output_tokens
    if kept > turn.output_tokens:
        raise InputError(
            f"{place}: turns[{index}].kept_output_tokens is {kept}: "
            f"expected at most its output_tokens, {turn.output_tokens}"
        )
    return kept


def _reuse(turn: _Turn, index: int, context: int, place: Place) -> int:
    """The leading prompt tokens shared with the first parent, whose context is `context` tokens."""
    limit = min(context, turn.prompt_tokens)
    reuse = limit if turn.reuse_tokens is None else turn.reuse_tokens
    if reuse <= limit:
        return reuse
    if reuse > turn.prompt_tokens:
        bound = f"its prompt_tokens, {turn.prompt_tokens}"
    elif context:
        bound = f"its parent's prompt and kept output, {context}"
    else:
        bound = "0, as it has no parent (tokens shared between programs belong in 'prefix')"
    raise InputError(f"{place}: turns[{index}].reuse_tokens is {reuse}: expected at most {bound}")


def _parents(turn: _Turn, index: int, position: dict[str, int], place: Place) -> tuple[int, ...]:
    """Indices of the turn's parents, given by turn_id or index, in this program; missing: the turn before."""
    if turn.parents is None:
        return (index - 1,) if index else ()
    parents: list[int] = []
    for number, given in enumerate(turn.parents):
        field = f"{place}: turns[{index}].parents[{number}] is {quoted(given)}"
        parent = position.get(given, -1) if isinstance(given, str) else given
        if not 0 <= parent < len(position):
            hint = nearest(given, position) if isinstance(given, str) else ""
            last = len(position) - 1
            raise InputError(
                f"{field}: expected a turn_id of this program{hint}, or an index from 0 to {last}"
            )
        if parent in parents:
            raise InputError(f"{field}: expected each parent once")
        parents.append(parent)
    return tuple(parents)


def _check_prefix(program: Program, place: Place) -> None:
    """Refuse prefix groups longer than a prompt that is to start with them."""
    total = sum(group.tokens for group in program.prefix)
    for index, turn in enumerate(program.turns):
        if total > turn.prompt_tokens:
            raise InputError(
                f"{place}: prefix is {total} tokens in all: expected at most "
                f"turns[{index}].prompt_tokens, {turn.prompt_tokens}"
            )
