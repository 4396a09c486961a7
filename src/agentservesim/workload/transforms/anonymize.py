"""Names out of a workload, numbers kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from agentservesim.programs.program import PrefixGroup, Program, ToolCall


def anonymize(programs: Iterable[Program]) -> Iterator[Program]:
    """The programs as p0001, p0002, …, their turns as t0, t1, …, tools as tool-a, tool-b, … from the most
    frequent on, and prefix groups as prefix-1, prefix-2, … as they come; the same name is the same thing all
    over. Times, tokens and the graph stay. Reads all programs first."""
    known = list(programs)
    calls = Counter(tool.name for program in known for turn in program.turns for tool in turn.tools)
    tools = {name: f"tool-{_letters(rank)}" for rank, (name, _) in enumerate(calls.most_common())}
    groups: dict[str, str] = {}
    for program in known:
        for group in program.prefix:
            groups.setdefault(group.id, f"prefix-{len(groups) + 1}")
    for number, program in enumerate(known, start=1):
        yield Program(
            program_id=f"p{number:04d}",
            turns=tuple(
                msgspec.structs.replace(
                    turn,
                    turn_id=f"t{index}",
                    tools=tuple(ToolCall(tools[tool.name], tool.duration_s) for tool in turn.tools),
                )
                for index, turn in enumerate(program.turns)
            ),
            arrival_s=program.arrival_s,
            prefix=tuple(PrefixGroup(groups[group.id], group.tokens) for group in program.prefix),
        )


def _letters(rank: int) -> str:
    """a, b, …, z, aa, ab, …"""
    text = ""
    rank += 1
    while rank:
        rank, digit = divmod(rank - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
