"""Arrival processes: their law, their seeds, their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, pairwise

import numpy as np
import pytest
from scipy import stats

from agentservesim.config import ArrivalsConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import Program, Turn
from agentservesim.workload.arrivals import open_loop


def program(name: object, arrival_s: float | None = None) -> Program:
    return Program(str(name), (Turn("t0", 10, 1),), arrival_s)


def endless() -> Iterator[Program]:
    return (program(index) for index in count())


def times(config: ArrivalsConfig, number: int) -> list[float]:
    return [time for time, _ in islice(open_loop(endless(), config), number)]


def gaps(config: ArrivalsConfig, number: int = 4000) -> np.ndarray:
    return np.diff(times(config, number), prepend=0.0)


def test_poisson_gaps_are_exponential() -> None:
    sample = gaps(ArrivalsConfig(process="poisson", rate_per_s=0.04, seed=1))
    assert stats.kstest(sample, "expon", args=(0, 25)).pvalue > 0.01


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0])
def test_gamma_gaps_have_the_mean_and_cv(cv: float) -> None:
    sample = gaps(ArrivalsConfig(process="gamma", rate_per_s=2.0, cv=cv, seed=3))
    assert stats.kstest(sample, "gamma", args=(1 / cv**2, 0, cv**2 / 2)).pvalue > 0.01
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.1)


def test_seeds_differ_and_repeat_and_a_prefix_is_a_prefix() -> None:
    one, two = (ArrivalsConfig(process="poisson", rate_per_s=1, seed=seed) for seed in (1, 2))
    assert times(one, 50) == times(one, 100)[:50] != times(two, 50)
    assert all(early <= late for early, late in pairwise(times(one, 100)))


def test_recorded_times_are_sorted_stably() -> None:
    given = [program("a", 3.0), program("b", 1.0), program("c", 3.0), program("d", 1.0)]
    arrived = open_loop(iter(given), ArrivalsConfig())
    assert [(time, p.program_id) for time, p in arrived] == [(1.0, "b"), (1.0, "d"), (3.0, "a"), (3.0, "c")]


def test_recorded_without_times_says_what_to_set() -> None:
    with pytest.raises(InputError, match="'b' has no arrival_s.*set workload.arrivals.process"):
        list(open_loop([program("a", 0.0), program("b")], ArrivalsConfig()))


def test_what_has_no_times_of_its_own_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="'closed_loop' with 8 lanes"):
        open_loop([], ArrivalsConfig(process="closed_loop", lanes=8))
    with pytest.raises(InputError, match="workload.arrivals.cv is 1e-200"):
        open_loop([], ArrivalsConfig(process="gamma", rate_per_s=1, cv=1e-200))
