"""What-if changes of a workload: a list of named transforms, applied in order.

A transform is a function from an iterator of programs to an iterator, a row in TRANSFORMS:

    def take(stream: Iterator[Program], report: ReadingReport, *, programs: Count) -> Iterator[Program]: ...

Its keyword-only parameters are those of the config, checked against their annotations. What it clamps or
estimates it counts in `report`. The same stream and parameters give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from agentservesim.programs.program import Program
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.transforms.choose import sample, take
from agentservesim.workload.transforms.merge import merge
from agentservesim.workload.transforms.spec import Spec, check, parse, text_of
from agentservesim.workload.transforms.times import cap_pauses, scale_gaps
from agentservesim.workload.transforms.tokens import scale_tokens
from agentservesim.workload.transforms.tool_times import draw_tool_times

__all__ = ["TRANSFORMS", "parse_transform", "text_of", "transform"]

TRANSFORMS: dict[str, Callable[..., Iterator[Program]]] = {
    "take": take,
    "sample": sample,
    "scale_gaps": scale_gaps,
    "cap_pauses": cap_pauses,
    "scale_tokens": scale_tokens,
    "merge": merge,
    "draw_tool_times": draw_tool_times,
}


def parse_transform(given: object) -> Spec:
    """A transform as {name: {parameter: value}}, from that or from 'name:key=value,…', checked.

    Raises InputError for unknown names and parameters, with the nearest, and for values out of range.
    """
    spec = parse(given, TRANSFORMS)
    check(spec, TRANSFORMS)
    return spec


def transform(programs: Iterator[Program], specs: Sequence[Spec], report: ReadingReport) -> Iterator[Program]:
    """The programs after all transforms, in order; streams where the transforms do."""
    for spec in specs:
        name, parameters = check(spec, TRANSFORMS)
        programs = partial(TRANSFORMS[name], **parameters)(programs, report)
    return programs
