"""A program's graph of turns, taken apart into lines: the main one, and the sub-agents beside it."""

from __future__ import annotations

from agentservesim.programs.program import Program


def lines_of(program: Program) -> list[list[int]]:
    """The lines of turns that carry each other's context on: the main one, from the first turn on, then the
    others in order of their first turns.

    Of the turns with the same first parent, one carries on: of those that repeat some of it the one with the
    longest line, or where none does, a single one whose context was rewritten from the first token on. Beside
    the main line that last case is a fresh start.
    """
    heirs = _heirs(program)
    roots = [index for index, turn in enumerate(program.turns) if not turn.parents]
    main = _follow(roots[0], heirs)
    taken = set(main)
    fresh = {heir for at, heir in heirs.items() if at not in taken and not program.turns[heir].reuse_tokens}
    heirs = {at: heir for at, heir in heirs.items() if heir not in fresh}
    heads = sorted(set(range(len(program.turns))) - set(heirs.values()) - taken)
    return [main, *(_follow(head, heirs) for head in heads)]


def carried_on(program: Program) -> list[int]:
    """The turns that carry their first parent's context on."""
    return sorted(turn for line in lines_of(program) for turn in line[1:])


def _heirs(program: Program) -> dict[int, int]:
    """For each turn that another carries on, that other turn."""
    turns = program.turns
    children: list[list[int]] = [[] for _ in turns]
    for index, turn in enumerate(turns):
        if turn.parents:
            children[turn.parents[0]].append(index)
    order = [index for index, turn in enumerate(turns) if not turn.parents]
    for index in order:  # grows while it is read: first parents make a forest
        order.extend(children[index])
    length = [1] * len(turns)
    heirs: dict[int, int] = {}
    for index in reversed(order):
        below = children[index]
        able = [child for child in below if turns[child].reuse_tokens or len(below) == 1]
        if able:
            heirs[index] = max(able, key=lambda child: (length[child], turns[child].reuse_tokens, -child))
            length[index] = 1 + length[heirs[index]]
    return heirs


def _follow(head: int, heirs: dict[int, int]) -> list[int]:
    line = [head]
    while line[-1] in heirs:
        line.append(heirs[line[-1]])
    return line
