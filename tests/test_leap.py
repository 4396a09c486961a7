"""Leaps change nothing: whole runs with `step_mode: leap` and `step_mode: step` give the same tables."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim import parse_config, simulate

RETENTION = [
    "lru",
    "immediate-release",
    "ttl:tau_s=0.5",
    "ttl:tau_s=2,until=admission",
    "pressure-ttl",
    "tool-ttl",
    "min-waste",
    "evolved-gap-ema",
]
SCHEDULING = ["fcfs", "program-fcfs", "plas", "continuum", "resident-first", "evolved-sqrt-plas"]
ROUTING = ["round-robin", "least-loaded", "session-affinity"]
ADMISSION = ["none", "program-cap:f=0.6"]


def write_programs(path: Path, rng: random.Random, count: int) -> None:
    """Random programs with forks, shared prefixes, rewrites, dropped outputs and round-numbered gaps."""
    with path.open("w") as file:
        for number in range(count):
            turns: list[dict[str, Any]] = []
            prefix = [{"id": "sys", "tokens": 40}] if rng.random() < 0.5 else []
            for index in range(rng.randint(1, 6)):
                parent = rng.randrange(index) if index and rng.random() < 0.2 else index - 1
                turn: dict[str, Any] = {
                    "turn_id": f"t{index}",
                    "output_tokens": rng.choice([0, 1, 2, 17, 40, 90, 250]),
                }
                if index == 0:
                    turn |= {"prompt_tokens": rng.randint(41, 200), "parents": []}
                else:
                    before = turns[parent]
                    reuse = before["prompt_tokens"] + before["kept_output_tokens"]
                    if rng.random() < 0.15:
                        reuse = rng.randint(0, reuse)
                    turn |= {
                        "prompt_tokens": max(reuse + rng.randint(0, 60), 41),
                        "reuse_tokens": reuse,
                        "parents": [f"t{parent}"],
                    }
                kept = turn["output_tokens"] if rng.random() < 0.7 else turn["output_tokens"] // 2
                turn["kept_output_tokens"] = kept
                turn["tools"] = [
                    {"name": rng.choice("abc"), "duration_s": rng.choice([0, 0.1, 0.25, 1.5, rng.random()])}
                ]
                turns.append(turn)
            arrival_s = rng.choice([0, 0, 0.5, round(rng.random() * 5, 2), rng.random() * 5])
            line = {"program_id": f"p{number}", "arrival_s": arrival_s, "prefix": prefix, "turns": turns}
            file.write(json.dumps(line) + "\n")


def config(path: Path, rng: random.Random, step_mode: str) -> dict[str, Any]:
    """A random config; the same generator state gives the same one."""
    per_decode_s = rng.choice([0.0, 0.01, 0.0013])
    return {
        "workload": {
            "source": str(path),
            "arrivals": rng.choice([{"process": "recorded"}, {"process": "closed_loop", "lanes": 8}]),
        },
        "cluster": {
            "gpu": "b200_sxm",
            "model": "llama-3.1-8b",
            "instances": rng.choice([1, 1, 2, 3]),
            "kv_cache_tokens": rng.choice([640, 960, 1600, 6400]),
        },
        "engine": {
            "step_mode": step_mode,
            "max_num_seqs": rng.choice([2, 4, 16]),
            "max_num_batched_tokens": rng.choice([16, 64, 512]),
            "max_model_len": 2048,
            "watermark": rng.choice([0.0, 0.05]),
            "enable_prefix_caching": rng.random() < 0.9,
            "scheduler_reserve_full_isl": rng.random() < 0.7,
        },
        "policies": {
            "retention": rng.choice(RETENTION),
            "scheduling": rng.choice(SCHEDULING),
            "routing": rng.choice(ROUTING),
            "admission": rng.choice(ADMISSION),
        },
        "step_time": {
            "backend": "linear",
            "base_s": rng.choice([0.0, 0.01, 0.0127]),
            "per_decode_s": per_decode_s,
            "per_prefill_token_s": rng.choice([0.0, 0.0001]),
            "per_context_token_s": rng.choice([0.0, 1.7e-6]),
        },
        "output_reuse": rng.choice(["deployment", "replay"]),
    }


def compare(tmp_path: Path, seed: int) -> int:
    """Run one random load both ways; returns its preemptions."""
    rng = random.Random(seed)
    path = tmp_path / f"{seed}.jsonl"
    write_programs(path, rng, rng.choice([2, 8, 20]))
    state = rng.getstate()
    results = []
    for mode in ("step", "leap"):
        rng.setstate(state)
        results.append(simulate(parse_config(config(path, rng, mode))))
    step, leap = results
    for name in ("calls", "programs", "decisions"):
        assert step.tables[name].equals(leap.tables[name]), f"seed {seed}: {name} differ"
    approximate = ("energy_joules", "kv_utilization_mean", "busy_fraction")
    for key, value in step.summary.items():
        if key in approximate:
            assert leap.summary[key] == pytest.approx(value, rel=1e-9, abs=1e-12), f"seed {seed}: {key}"
        elif key not in ("sim_wall_s", "peak_rss_bytes", "step_time"):
            assert leap.summary[key] == value, f"seed {seed}: {key}"
    return step.summary["preemptions"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(min_value=0, max_value=10**9))
def test_leap_equals_step(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    compare(tmp_path_factory.mktemp("leap"), seed)


def test_leaps_are_compared_under_pressure(tmp_path: Path) -> None:
    """The loads above mean something only if some of them preempt."""
    assert sum(compare(tmp_path, seed) for seed in range(40)) > 100


ASKED_EACH_TIME = """
from agentservesim.policies.scheduling.resident_first import ResidentFirst

class EachTime(ResidentFirst):
    follows_residency = False
"""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(min_value=0, max_value=10**9))
def test_asking_only_where_residency_changed_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("residency")
    (folder / "each_time.py").write_text(ASKED_EACH_TIME)
    rng = random.Random(seed)
    path = folder / "programs.jsonl"
    write_programs(path, rng, rng.choice([8, 20, 40]))
    chosen = config(path, rng, "leap")
    chosen["engine"]["max_num_seqs"] = 16
    tables = []
    for scheduling in ("resident-first", f"{folder}/each_time.py:EachTime"):
        chosen["policies"]["scheduling"] = scheduling
        tables.append(simulate(parse_config(chosen)).tables)
    for name in ("calls", "programs", "decisions"):
        assert tables[0][name].equals(tables[1][name]), f"seed {seed}: {name} differ"
