"""When programs arrive, for processes whose times do not depend on the run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from agentservesim.config import ArrivalsConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import Program

_CV_RANGE = (1e-3, 1e3)
_CALENDAR_S = 1e8
"""Recorded times from here on (three years) are dates, in seconds since 1970, not since a run's start."""


def open_loop(programs: Iterable[Program], arrivals: ArrivalsConfig) -> Iterator[tuple[float, Program]]:
    """Pair every program with its arrival, in seconds since the run's start, in non-decreasing time.

    recorded   arrival_s of each program; sorted, so all programs are read first; equal times keep file order.
               Dates (seconds since 1970) count from the earliest
    poisson    exponential gaps of mean 1 / rate_per_s; streams
    gamma      gamma gaps of that mean with coefficient of variation cv (1 is poisson); streams
    bursts     `size` programs at once, the bursts as poisson; streams

    The random processes replace recorded times and depend on arrivals.seed alone: not on the workload's own
    seed, and the n-th time not on how many follow. Raises InputError at once for a process that has no times
    of its own (closed_loop releases programs as lanes fall free), or parameters out of range; and once the
    programs are read, for `recorded` without arrival_s.
    """
    if arrivals.process == "recorded":
        return _recorded(programs)
    if arrivals.process == "closed_loop":
        raise InputError(
            f"workload.arrivals.process is 'closed_loop' with {arrivals.lanes} lanes, whose arrivals the run "
            "decides: expected recorded, poisson, gamma or bursts"
        )
    return _timed(programs, _gaps(arrivals), arrivals.size or 1 if arrivals.process == "bursts" else 1)


def _recorded(programs: Iterable[Program]) -> Iterator[tuple[float, Program]]:
    timed: list[tuple[float, Program]] = []
    for program in programs:
        if program.arrival_s is None:
            raise InputError(
                f"program {program.program_id!r} has no arrival_s and workload.arrivals.process is "
                "'recorded': set workload.arrivals.process to poisson, gamma or closed_loop"
            )
        timed.append((program.arrival_s, program))
    timed.sort(key=lambda pair: pair[0])
    origin_s = timed[0][0] if timed and timed[0][0] >= _CALENDAR_S else 0.0
    for arrival_s, program in timed:
        yield arrival_s - origin_s, program


def _timed(
    programs: Iterable[Program], gaps: Iterator[float], at_once: int
) -> Iterator[tuple[float, Program]]:
    now_s = 0.0
    for number, program in enumerate(programs):
        if number % at_once == 0:
            now_s += next(gaps)
        yield now_s, program


def _gaps(arrivals: ArrivalsConfig) -> Iterator[float]:
    """Endless seeded gaps in seconds between arrivals."""
    rate, cv = arrivals.rate_per_s, arrivals.cv
    if rate is None:
        raise InputError(
            f"workload.arrivals.rate_per_s is missing: process {arrivals.process} expects a number > 0"
        )
    if arrivals.process == "gamma" and not _CV_RANGE[0] <= cv <= _CV_RANGE[1]:
        raise InputError(
            f"workload.arrivals.cv is {cv}: expected a number from {_CV_RANGE[0]} to {_CV_RANGE[1]}"
        )
    return _draw(arrivals.process, rate, cv, random.Random(f"arrivals/{arrivals.seed}"))


def _draw(process: str, rate: float, cv: float, rng: random.Random) -> Iterator[float]:
    shape = 1 / (cv * cv)
    while True:
        yield rng.gammavariate(shape, 1 / (shape * rate)) if process == "gamma" else rng.expovariate(rate)
