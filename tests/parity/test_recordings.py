"""The engine against recordings of vLLM's own schedulers, step by step. vLLM itself is not needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from . import recording, simulated
from .compare import first_difference

FOLDER = Path(__file__).parent / "recordings"
PATHS = sorted(FOLDER.glob("*.jsonl.gz"))


@cache
def trials_of(path: Path) -> tuple[recording.Trial, ...]:
    return tuple(recording.read(path)[1])


def all_trials(async_scheduling: bool | None = None) -> list[recording.Trial]:
    """All recorded trials, or those of one kind of scheduling."""
    trials = [trial for path in PATHS for trial in trials_of(path)]
    return [trial for trial in trials if async_scheduling in (None, trial.engine.async_scheduling)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_every_step_equals_the_recording(path):
    for trial in trials_of(path):
        difference = first_difference(trial, simulated.run(trial))
        assert difference is None, difference


def test_recordings_are_of_the_pinned_version():
    assert PATHS
    assert {recording.read(path)[0].vllm for path in PATHS} == {"0.32.0"}


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_recordings_exercise_the_rules(async_scheduling):
    trials = all_trials(async_scheduling)
    assert sum(len(trial.steps) for trial in trials) >= 5_000
    for policy in ("fcfs", "priority"):
        under = [trial for trial in trials if trial.engine.policy == policy]
        assert sum(trial.preemptions() for trial in under) >= 200
        assert sum(trial.hit_tokens() for trial in under) >= 20_000
    engines = [trial.engine for trial in trials]
    assert any(engine.watermark > 0 for engine in engines)
    assert any(engine.long_prefill_token_threshold > 0 for engine in engines)
    assert {engine.scheduler_reserve_full_isl for engine in engines} == {True, False}
    assert {engine.enable_prefix_caching for engine in engines} == {True, False}
