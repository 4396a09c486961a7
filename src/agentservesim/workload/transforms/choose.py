"""Fewer programs."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.transforms.spec import Count, Seed


def take(stream: Iterator[Program], report: ReadingReport, *, programs: Count) -> Iterator[Program]:
    """The first `programs`. Raises InputError when there are fewer."""
    for taken in range(programs):
        program = next(stream, None)
        if program is None:
            raise _too_few("take", programs, taken)
        yield program


def sample(
    stream: Iterator[Program], report: ReadingReport, *, programs: Count, seed: Seed = 0
) -> Iterator[Program]:
    """So many programs, each set of that size as likely, in the order they came; holds them in memory.

    Raises InputError when there are fewer.
    """
    rng = random.Random(f"sample/{seed}")
    kept: list[tuple[int, Program]] = []
    for number, program in enumerate(stream):
        if number < programs:
            kept.append((number, program))
        elif (place := rng.randrange(number + 1)) < programs:
            kept[place] = (number, program)
    if len(kept) < programs:
        raise _too_few("sample", programs, len(kept))
    yield from (program for _, program in sorted(kept, key=lambda pair: pair[0]))


def _too_few(name: str, wanted: int, found: int) -> InputError:
    return InputError(f"transform {name}: programs is {wanted}: expected at most {found}, all that there are")
