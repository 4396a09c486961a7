"""Real vLLM with a real model, in this process, against the simulator: every step of whole programs.

The plug-in decides inside vLLM's engine, the model computes, and the simulator is given the measured step
times. Programs of several turns with tool gaps run under memory pressure. Needs vllm: `make test-vllm`.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import msgspec
import pytest

from .live_compare import first_difference
from .live_loads import make_programs
from .loads import Engine
from .test_live import RETENTION, SCHEDULING

pytestmark = pytest.mark.vllm

STEPS = int(os.environ.get("AGENTSERVESIM_PARITY_STEPS", "100000")) // 20


@pytest.fixture(scope="session")
def model_engine(tmp_path_factory):
    from .live_model import ModelEngine

    return ModelEngine(tmp_path_factory.mktemp("models") / "tiny")


def one_run(model_engine, tmp_path, seed, chosen):
    from .live_engine import PREFILL, run_live
    from .live_model import NUM_BLOCKS, OPTIONS
    from .live_simulated import run_simulated

    engine = Engine(
        num_blocks=NUM_BLOCKS,
        policy="fcfs",
        long_prefill_token_threshold=0,
        watermark=0.0,
        scheduler_reserve_full_isl=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        **OPTIONS,
    )
    # Steps are short: so are the gaps, that programs wait for each other and not for their tools.
    arrivals = make_programs(random.Random(seed), engine, 30, time_scale=0.1)
    log = tmp_path / f"decisions-{seed}.jsonl"
    line = msgspec.to_builtins(PREFILL)
    scheduler = model_engine.scheduler({**chosen, "decision_log": str(log), "prefill_line": line})
    live = run_live(arrivals, scheduler, model_engine.execute, log)
    simulated = run_simulated(arrivals, live.seconds, chosen, {"num_blocks": NUM_BLOCKS, **OPTIONS})
    return live, first_difference(live, simulated)


def pairs():
    """Every pair at full length; shortened, every policy once."""
    if STEPS >= 5000:
        return [(retention, scheduling) for retention in RETENTION for scheduling in SCHEDULING]
    return [(retention, SCHEDULING[at % len(SCHEDULING)]) for at, retention in enumerate(RETENTION)]


@pytest.mark.parametrize(("retention", "scheduling"), pairs())
def test_a_real_engine_decides_what_the_simulator_decides(
    model_engine, tmp_path, retention, scheduling, capsys
):
    totals = Counter()
    seed = 0
    while totals["steps"] < STEPS:
        chosen = {"retention": retention, "scheduling": scheduling}
        live, difference = one_run(model_engine, tmp_path, seed, chosen)
        assert difference is None, f"seed {seed}, {chosen}: {difference}"
        assert live.counts["blocks_missing"] == 0
        totals["steps"] += len(live.steps)
        totals["seconds"] += sum(live.seconds)
        totals["hit tokens"] += sum(hit for row in live.steps for _, hit in row.hits)
        totals.update(event for _, event, *_ in live.decisions)
        seed += 1
    with capsys.disabled():
        counts = ", ".join(f"{name} {round(count)}" for name, count in totals.items())
        print(f"\n{retention} x {scheduling}: 0 differences; {counts}")
    assert totals["hit tokens"] > 0


def flushing_load():
    """A program of two turns, two seconds apart, among one-turn programs that together fill the pool many
    times over in between."""
    from agentservesim.programs.program import Program, Turn

    first = Turn("0", 500, 20, kept_output_tokens=20, gap_s=2.0)
    second = Turn("1", 600, 20, reuse_tokens=520, parents=(0,))
    others = [(0.02 * at, Program(f"other{at}", (Turn("0", 330, 8),))) for at in range(1, 400)]
    return [(0.0, Program("agent", (first, second))), *others]


@pytest.mark.parametrize(
    ("retention", "reused_tokens"),
    # The output's last token is never computed: of 519 tokens, 16 blocks of 32.
    [("lru", 0), ("ttl:tau_s=0.5,until=admission", 0), ("ttl:tau_s=20,until=admission", 16 * 32)],
)
def test_what_is_protected_survives_a_load_that_flushes_the_cache(
    model_engine, tmp_path, retention, reused_tokens
):
    from .live_engine import run_live
    from .live_model import NUM_BLOCKS, OPTIONS
    from .live_simulated import run_simulated

    log = tmp_path / "decisions.jsonl"
    chosen = {"retention": retention, "scheduling": "fcfs"}
    scheduler = model_engine.scheduler({**chosen, "decision_log": str(log)})
    live = run_live(flushing_load(), scheduler, model_engine.execute, log)
    simulated = run_simulated(flushing_load(), live.seconds, chosen, {"num_blocks": NUM_BLOCKS, **OPTIONS})
    assert first_difference(live, simulated) is None
    hits = {key: hit for row in live.steps for key, hit in row.hits}
    assert hits["agent", "1"] == reused_tokens
