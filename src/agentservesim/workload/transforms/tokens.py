"""Longer or shorter contexts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from agentservesim.programs.program import PrefixGroup, Program, Turn
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.transforms.spec import Factor

_LARGEST = 1 << 40


def scale_tokens(stream: Iterator[Program], report: ReadingReport, *, factor: Factor) -> Iterator[Program]:
    """All token counts times `factor`: prompts, outputs, what is reused and kept, and prefix groups.

    A prompt that repeated all of its parent's context still does, groups that were equal stay equal, and what
    was not empty keeps a token. Prompts may so be a few tokens longer than the product.
    """
    for program in stream:
        yield _scaled(program, factor)


def _scaled(program: Program, factor: float) -> Program:
    prefix = tuple(PrefixGroup(g.id, min(_LARGEST, math.floor(g.tokens * factor))) for g in program.prefix)
    least = max(1, sum(group.tokens for group in prefix))
    scaled: dict[int, Turn] = {}
    for index in _parents_first(program):
        turn = program.turns[index]
        output = _times(turn.output_tokens, factor)
        kept = output
        if turn.kept_output_tokens < turn.output_tokens:
            kept = min(output, _times(turn.kept_output_tokens, factor))
        reuse = 0
        if turn.parents:
            reuse = _reuse(program, turn, scaled[turn.parents[0]], factor)
        scaled[index] = msgspec.structs.replace(
            turn,
            prompt_tokens=max(least, reuse, _times(turn.prompt_tokens, factor)),
            reuse_tokens=reuse,
            output_tokens=output,
            kept_output_tokens=kept,
        )
    turns = tuple(scaled[index] for index in range(len(scaled)))
    return msgspec.structs.replace(program, turns=turns, prefix=prefix)


def _reuse(program: Program, turn: Turn, parent: Turn, factor: float) -> int:
    """What of the first parent's scaled context the turn repeats."""
    before = program.turns[turn.parents[0]]
    context = parent.prompt_tokens + parent.kept_output_tokens
    whole = turn.reuse_tokens == before.prompt_tokens + before.kept_output_tokens
    return context if whole else min(context, _times(turn.reuse_tokens, factor))


def _times(tokens: int, factor: float) -> int:
    """Rounded, but not to nothing."""
    return min(_LARGEST, max(1, round(tokens * factor))) if tokens else 0


def _parents_first(program: Program) -> Iterator[int]:
    """Indices of the turns, each after all of its parents."""
    children = program.children()
    waiting = [len(turn.parents) for turn in program.turns]
    ready = [index for index, count in enumerate(waiting) if not count]
    for index in ready:  # grows while it is read
        yield index
        for child in children[index]:
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
