"""The engine against vLLM's own schedulers, step by step, on random loads. Needs vllm: `make test-vllm`."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from . import simulated
from .compare import first_difference
from .loads import make_load

SEMANTICS = "0.32.0"
STEPS = int(os.environ.get("AGENTSERVESIM_PARITY_STEPS", "100000"))
FIRST_SEED = int(os.environ.get("AGENTSERVESIM_PARITY_SEED", "0"))


@pytest.mark.vllm
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_every_step_equals_vllm(async_scheduling, capsys):
    from . import real

    assert real.VERSION == SEMANTICS
    totals: Counter[str] = Counter()
    seed = FIRST_SEED
    while totals["steps"] < STEPS:
        trial = real.run(make_load(seed, async_scheduling=async_scheduling), seed)
        difference = first_difference(trial, simulated.run(trial))
        assert difference is None, difference
        seed += 1
        totals[f"{trial.engine.policy} trials"] += 1
        totals["steps"] += len(trial.steps)
        totals["requests"] += len(trial.submissions)
        totals["preemptions"] += trial.preemptions()
        totals["hit tokens"] += trial.hit_tokens()
    with capsys.disabled():
        mode = "asynchronous" if async_scheduling else "synchronous"
        seeds = f"seeds {FIRST_SEED} to {seed - 1}"
        print(f"\nvLLM {real.VERSION}, {mode} scheduling, {seeds}, 0 differences:", dict(totals))
    assert totals["preemptions"] >= STEPS // 100
    assert totals["hit tokens"] > 0
    assert totals["fcfs trials"] > 0
    assert totals["priority trials"] > 0
