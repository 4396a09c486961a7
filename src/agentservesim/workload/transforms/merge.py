"""Several workloads at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from agentservesim.config import WorkloadConfig
from agentservesim.programs.program import Program
from agentservesim.workload.formats import distinct_ids
from agentservesim.workload.report import ReadingReport

Sources = Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]


def merge(stream: Iterator[Program], report: ReadingReport, *, sources: Sources) -> Iterator[Program]:
    """The programs of other workloads, too: one of each in turn until all have ended.

    A source is what workload.source may be; a generator gives its own number of programs. An id that another
    workload used is prefixed with its source's name. Recorded arrivals and prefix groups stay as they are:
    groups with the same id and tokens are taken to be the same text.
    """
    from agentservesim.workload import load_programs  # which applies transforms

    others = [load_programs(WorkloadConfig(source=source)) for source in sources]
    streams = [("", stream), *((other.name, other.programs) for other in others)]
    yield from distinct_ids(_in_turn(streams), report)
    for other in others:
        _add(report, other.report)


def _in_turn(streams: list[tuple[str, Iterator[Program]]]) -> Iterator[tuple[str, Program]]:
    while streams:
        running = []
        for name, stream in streams:
            program = next(stream, None)
            if program is not None:
                yield name, program
                running.append((name, stream))
        streams = running


def _add(report: ReadingReport, other: ReadingReport) -> None:
    report.programs += other.programs
    report.turns += other.turns
    for kind in ("dropped", "estimated", "clamped", "inferred"):
        getattr(report, kind).update(getattr(other, kind))
