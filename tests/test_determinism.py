"""The same config gives the same files, byte for byte: in another process, under another hash seed, again."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim import parse_config, simulate
from helpers import (
    FILES,
    calls_by_name,
    chain,
    cli,
    config_dict,
    program,
    rows,
    turn,
    write_config,
    write_native,
)

MEASURED_ON_THE_MACHINE = ("sim_wall_s", "peak_rss_bytes")

BUSY = {"kv_cache_tokens": 3072}
COMBINATIONS = {
    "plain": {},
    "continuum": {
        "policies": {"retention": "tool-ttl", "scheduling": "continuum"},
        "workload": {"arrivals": {"process": "poisson", "rate_per_s": 4.0, "seed": 3}},
        "cluster": BUSY,
    },
    "every-hook": {
        "policies": {
            "retention": "min-waste",
            "scheduling": "resident-first",
            "admission": "program-cap:f=0.8",
            "routing": "least-loaded",
        },
        "workload": {"arrivals": {"process": "gamma", "rate_per_s": 6.0, "cv": 2.0, "seed": 5}},
        "cluster": {**BUSY, "instances": 3},
    },
    "closed-loop": {
        "policies": {
            "retention": "evolved-gap-ema",
            "scheduling": "evolved-sqrt-plas",
            "routing": "round-robin",
        },
        "workload": {"arrivals": {"process": "closed_loop", "lanes": 5}},
        "cluster": {**BUSY, "instances": 2},
    },
    "pressure": {
        "policies": {"retention": "pressure-ttl:tau_s=1,until=admission", "scheduling": "plas"},
        "cluster": {**BUSY, "instances": 2},
        "output_reuse": "replay",
    },
}


def workload():
    """Chains, forks and joins, with tools, shared prefixes and arrivals at equal times."""
    rng = random.Random(11)
    tools = ("ls", "grep", "python", "pip")
    programs = []
    for number in range(12):
        shared = {"prefix": [{"id": f"sys-{number % 2}", "tokens": 96}], "arrival_s": float(number // 3)}
        if number % 4 == 3:
            programs.append(
                program(
                    f"dag-{number}",
                    [
                        turn(128, 8, turn_id="plan", tools=[{"name": "ls", "duration_s": 0.2}]),
                        turn(200, 16, turn_id="left", parents=["plan"], gap_s=0.1),
                        turn(220, 4, turn_id="right", parents=["plan"], gap_s=0.3),
                        turn(400, 8, turn_id="join", parents=["left", "right"]),
                    ],
                    **shared,
                )
            )
            continue
        tool = {"name": rng.choice(tools), "duration_s": round(rng.expovariate(2), 3)}
        programs.append(chain(f"chain-{number}", 5, first=160, new=64, output=12, tools=[tool], **shared))
    return programs


def run_to_files(folder, name, sections, hash_seed):
    source = write_native(folder / "workload.jsonl", workload())
    config = write_config(folder / "run.yaml", config_dict(source, **sections))
    out = folder / name
    done = cli("run", config, "--out", out, env={"PYTHONHASHSEED": hash_seed})
    assert done.returncode == 0, done.stderr
    return out


def assert_same_files(one, other):
    for file in FILES:
        if file == "summary.json":
            summaries = [json.loads((folder / file).read_text()) for folder in (one, other)]
            for summary in summaries:
                for key in MEASURED_ON_THE_MACHINE:
                    del summary[key]
            assert summaries[0] == summaries[1]
        else:
            assert (one / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.parametrize("name", COMBINATIONS)
def test_two_runs_under_two_hash_seeds_write_identical_files(tmp_path, name):
    one = run_to_files(tmp_path, "one", COMBINATIONS[name], "1")
    other = run_to_files(tmp_path, "other", COMBINATIONS[name], "31415")
    assert_same_files(one, other)
    summary = json.loads((one / "summary.json").read_text())
    if name != "plain":
        assert summary["preemptions"] or summary["queue_mean_s"] > 0, "too idle a run to show anything"


def test_the_resolved_config_reproduces_the_run(tmp_path):
    out = run_to_files(tmp_path, "one", COMBINATIONS["every-hook"], "1")
    done = cli("run", out / "config.yaml", "--out", tmp_path / "again", env={"PYTHONHASHSEED": "2"})
    assert done.returncode == 0, done.stderr
    assert_same_files(out, tmp_path / "again")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_second_run_in_one_process_remembers_nothing_of_the_first(tmp_path, name):
    source = write_native(tmp_path / "workload.jsonl", workload())
    config = parse_config(config_dict(source, **COMBINATIONS[name]))
    first, second = simulate(config), simulate(config)
    for table, kept in first.tables.items():
        assert kept.equals(second.tables[table]), table


def test_tables_in_memory_are_those_in_the_files(tmp_path):
    import pyarrow.parquet as pq

    source = write_native(tmp_path / "workload.jsonl", workload())
    config = parse_config(config_dict(source, **COMBINATIONS["every-hook"]))
    in_memory, on_disk = simulate(config), simulate(config, tmp_path / "out")
    assert on_disk.tables == {}
    for table, kept in in_memory.tables.items():
        assert kept.equals(pq.read_table(tmp_path / "out" / f"{table}.parquet")), table


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(6)))
def test_programs_that_arrive_at_different_times_may_stand_in_any_order_in_the_file(tmp_path_factory, order):
    folder = tmp_path_factory.mktemp("order")
    programs = [chain(f"p{n}", 3, arrival_s=0.05 * n, gap_s=0.1) for n in range(6)]
    results = [
        simulate(parse_config(config_dict(write_native(folder / f"{name}.jsonl", lines), cluster=BUSY)))
        for name, lines in (("sorted", programs), ("shuffled", [programs[n] for n in order]))
    ]
    assert calls_by_name(results[0]) == calls_by_name(results[1])
    assert rows(results[0], "decisions") == rows(results[1], "decisions")
