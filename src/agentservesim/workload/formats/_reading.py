"""Checks that every format shares."""

from __future__ import annotations

import math

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, Turn
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import Place


class Distinct:
    """The program ids of one file."""

    def __init__(self) -> None:
        self._line_of: dict[str, int] = {}

    def accept(self, program: Program, place: Place) -> Program:
        """The program, checked. Raises InputError when its id was met before or its parents make a cycle."""
        if program.program_id in self._line_of:
            raise InputError(
                f"{place}: program id {quoted(program.program_id)} is already on line "
                f"{self._line_of[program.program_id]}; expected each program once"
            )
        try:
            program.children()
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        self._line_of[program.program_id] = place.line
        return program


def check(program: Program, where: str) -> None:
    """Raise InputError for a program that no run could execute: the last line of defence of every reader."""
    names = {turn.turn_id for turn in program.turns}
    if not program.turns or len(names) != len(program.turns):
        raise InputError(f"{where}: program {quoted(program.program_id)} has no turns, or a turn_id twice")
    arrival_s = program.arrival_s
    if arrival_s is not None and not (math.isfinite(arrival_s) and arrival_s >= 0):
        raise InputError(f"{where}: program {quoted(program.program_id)}: arrival_s is {arrival_s}")
    prefix = sum(group.tokens for group in program.prefix)
    for turn in program.turns:
        _check_turn(program, turn, prefix, where)
    program.children()


def _check_turn(program: Program, turn: Turn, prefix: int, where: str) -> None:
    times = [turn.gap_s or 0.0, turn.pause_s, turn.delay_s, *[tool.duration_s for tool in turn.tools]]
    parent = program.turns[turn.parents[0]] if turn.parents else None
    context = parent.prompt_tokens + parent.kept_output_tokens if parent else 0
    if (
        min(times) < 0
        or not math.isfinite(sum(times))
        or not 0 <= turn.kept_output_tokens <= turn.output_tokens
        or not 0 <= turn.reuse_tokens <= min(context, turn.prompt_tokens)
        or turn.prompt_tokens < max(1, prefix)
    ):
        raise InputError(
            f"{where}: program {quoted(program.program_id)}: turn {quoted(turn.turn_id)} has a value out of "
            f"range: {turn}; expected times >= 0, kept output within the output, reuse within the parent's "
            "context and the prompt, and the prefix within the prompt"
        )


def index_of(ids: list[str], place: Place, field: str) -> dict[str, int]:
    """The position of every id. `field` is a template such as 'turns[{}].turn_id'.

    Raises InputError when an id occurs twice.
    """
    index: dict[str, int] = {}
    for position, name in enumerate(ids):
        first = index.setdefault(name, position)
        if first != position:
            raise InputError(
                f"{place}: {field.format(position)} is {quoted(name)}: expected an id that differs "
                f"from {field.format(first)}"
            )
    return index
