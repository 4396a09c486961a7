"""Find the order of new tokens that gives programs the mean prompt they had."""

from __future__ import annotations

from itertools import islice

import msgspec

from agentservesim.workload.synthetic.description import Description
from agentservesim.workload.synthetic.generator import generate

_TURNS_DRAWN = 12_000
_PROGRAMS_DRAWN = (10, 400)
_HALVINGS = 7


def with_mean_prompts(description: Description, prompt_tokens: float) -> Description:
    """The description whose programs have, on average, this many prompt tokens in sum, as near as order can.

    Real agents read more at the start than at the end, or the reverse. What is drawn keeps its distribution;
    only which of a line's turns gets the larger additions changes.
    """
    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        order = (low + high) / 2
        if _mean_prompts(msgspec.structs.replace(description, order=order)) < prompt_tokens:
            low = order
        else:
            high = order
    return msgspec.structs.replace(description, order=round((low + high) / 2, 3))


def _mean_prompts(description: Description) -> float:
    """Mean prompt tokens of a program, in sum over its turns."""
    total = turns = programs = 0
    least, most = _PROGRAMS_DRAWN
    for program in islice(generate(description, 0), most):
        programs += 1
        turns += len(program.turns)
        total += sum(turn.prompt_tokens for turn in program.turns)
        if programs >= least and turns >= _TURNS_DRAWN:
            break
    return total / programs
