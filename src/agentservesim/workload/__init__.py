"""Where programs come from: trace files in several formats, and seeded generators, bundled or learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from agentservesim.config import WorkloadConfig
from agentservesim.errors import InputError, nearest
from agentservesim.programs.program import Program
from agentservesim.workload.fit import is_fit, read_fit
from agentservesim.workload.formats import NoSuchFile, distinct_ids, read_programs
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.synthetic import BUNDLED, Description, generate
from agentservesim.workload.transforms import transform

__all__ = ["BUNDLED", "ReadingReport", "Workload", "generator_of", "load_all", "load_programs"]


@dataclass(frozen=True)
class Workload:
    """Programs to run, once: `programs` streams them, and `report` is complete when it is exhausted."""

    name: str
    programs: Iterator[Program]
    report: ReadingReport


def load_programs(config: WorkloadConfig | str | Path) -> Workload:
    """Open the workload a config names; a relative path counts from the working directory.

    Takes the first config.programs; by default all of a trace, or a generator's own number; then applies
    config.transforms in order. Raises InputError at once for a name, file, format or transform that is wrong,
    and while streaming for a wrong line or a trace that holds fewer programs than asked for. config.seed
    matters to generated workloads only.
    """
    if not isinstance(config, WorkloadConfig):
        config = WorkloadConfig(source=str(config))
    report = ReadingReport()
    description = generator_of(config.source)
    if description is not None:
        programs = _generated(description, config, report)
    else:
        programs = _from_files(config, report)
    return Workload(config.source, transform(programs, config.transforms, report), report)


def load_all(
    sources: Sequence[str],
    format: str | None = None,
    lenient: bool = False,
    max_pause_s: float | None = None,
) -> Workload:
    """Several traces and generators as one, the generated programs last; else as `load_programs`."""
    report = ReadingReport()
    generators = {name: generator_of(name) for name in sources}
    files = [name for name in sources if generators[name] is None]
    streams: list[tuple[str, Iterator[Program]]] = []
    if files:
        streams.append(("trace", read_programs(files, report, format, lenient, max_pause_s)))
    for name in sources:
        description = generators[name]
        if description is not None:
            config = WorkloadConfig(source=name, format=format)
            streams.append((name, _generated(description, config, report)))
    named = chain.from_iterable(((name, program) for program in stream) for name, stream in streams)
    return Workload(", ".join(sources), distinct_ids(named, report), report)


def generator_of(source: str) -> Description | None:
    """What a workload's name generates programs from: a bundled description, or a fit recognised by its
    content. None for a trace. Raises InputError for a fit that is wrong."""
    if source in BUNDLED:
        return BUNDLED[source]
    return read_fit(source) if is_fit(source) else None


def _generated(description: Description, config: WorkloadConfig, report: ReadingReport) -> Iterator[Program]:
    if config.format is not None:
        what = "bundled " if config.source in BUNDLED else "fit "
        raise InputError(
            f"workload.format is {config.format!r}: expected none, as workload.source is the {what}"
            f"{config.source}"
        )
    return _counted(generate(description, config.seed), config.programs or description.programs, report)


def _counted(programs: Iterator[Program], wanted: int, report: ReadingReport) -> Iterator[Program]:
    for _ in range(wanted):
        program = next(programs)
        report.add(program)
        yield program


def _from_files(config: WorkloadConfig, report: ReadingReport) -> Iterator[Program]:
    try:
        programs = read_programs(config.source, report, config.format, config.lenient, config.max_pause_s)
    except NoSuchFile:
        names = ", ".join(BUNDLED)
        hint = nearest(config.source, BUNDLED)
        raise InputError(
            f"workload.source is {config.source!r}{hint}: no such file; expected a workload file, a folder, "
            f"a glob, - for stdin, or one of {names}"
        ) from None
    return programs if config.programs is None else _first(programs, config.programs, config.source)


def _first(programs: Iterator[Program], wanted: int, source: str) -> Iterator[Program]:
    for taken in range(wanted):
        program = next(programs, None)
        if program is None:
            raise InputError(
                f"workload.programs is {wanted}: expected at most {taken}, all that {source} holds"
            )
        yield program
