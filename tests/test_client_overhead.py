"""`client`: what lies between a program and the engine's queue."""

from __future__ import annotations

import json

import pytest

from helpers import calls_by_name, chain, config_dict, program, rows, run, turn, write_config, write_native
from in_process import cli  # noqa: F401

OVERHEAD = {"request_s": 0.004, "request_per_token_s": 1e-5, "response_s": 0.002}
STEP = {"base_s": 0.01, "per_prefill_token_s": 0.0, "per_decode_s": 0.0}


def test_both_ways_are_in_every_turn(tmp_path):
    """100 + 100·10 µs = 5 ms to the engine, 2 ms back: 7 ms a turn beside steps and gaps."""
    programs = [program("a", [turn(100, 3, gap_s=0.5), turn(200, 2)])]
    plain = run(tmp_path, programs, step_time=STEP)
    result = run(tmp_path, programs, step_time=STEP, client=OVERHEAD)
    first, second = rows(result)
    assert (first["released_s"], first["scheduled_s"]) == (0.0, pytest.approx(0.005))
    assert first["first_token_s"] == pytest.approx(0.005 + 0.01 + 0.002)
    assert first["completed_s"] == pytest.approx(0.005 + 0.03 + 0.002)
    assert second["released_s"] == pytest.approx(first["completed_s"] + 0.5), "the gap begins at the client"
    assert second["scheduled_s"] == pytest.approx(second["released_s"] + 0.006)
    assert result.summary["jct_mean_s"] == pytest.approx(plain.summary["jct_mean_s"] + 0.015)
    assert result.summary["makespan_s"] == pytest.approx(second["completed_s"])
    assert result.summary["tpot_mean_s"] == pytest.approx(plain.summary["tpot_mean_s"])


def test_calls_reach_the_engine_in_the_order_of_their_requests(tmp_path):
    """A long prompt sent first arrives second, and the engine serves first who is there first."""
    programs = [program("long", [turn(400, 1)]), program("short", [turn(10, 1)])]
    result = run(tmp_path, programs, step_time=STEP, client={"request_per_token_s": 1e-4})
    calls = calls_by_name(result)
    assert calls["short/t0"]["scheduled_s"] == pytest.approx(0.001)
    assert calls["long/t0"]["scheduled_s"] == pytest.approx(0.04)


def test_protection_counts_from_the_engine_and_ends_at_the_next_request(tmp_path):
    """The engine sees a gap that is longer than the tool by both ways: 2 + 500 + 4 + 1.2 ms. Another program
    keeps it stepping."""
    programs = [chain("a", 2, gap_s=0.5), program("busy", [turn(16, 9000)])]
    step = {**STEP, "base_s": 1e-4}
    ends = [
        [row["event"] for row in rows(result, "decisions") if row["program_id"] == "a"][1]
        for tau_s in (0.505, 0.509)
        for result in [
            run(
                tmp_path,
                programs,
                step_time=step,
                policies={"retention": f"ttl:tau_s={tau_s}"},
                client=OVERHEAD,
            )
        ]
    ]
    assert ends == ["expire", "release"]


def test_a_real_run_with_the_engines_own_times_is_compared_with_the_engines(tmp_path, cli):  # noqa: F811
    source = write_native(tmp_path / "work.jsonl", [program("a", [turn(100, 3)])])
    data = config_dict(source, step_time=STEP, client=OVERHEAD)
    config = write_config(tmp_path / "config.yaml", data)
    real = tmp_path / "requests.jsonl"
    real.write_text(
        '{"request_id": "a", "input_toks": 100, "output_toks": 3, "queued_ts": 7.0, "first_token_ts": 7.01,'
        ' "last_token_ts": 7.03}\n'
    )
    done = cli("validate", config, "--real", real, "--json")
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)["errors"]
    assert errors["ttft_mean"] == pytest.approx(0, abs=1e-9)
    assert errors["latency_mean"] == pytest.approx(0, abs=1e-9)


def test_negative_overhead_is_refused(tmp_path, cli):  # noqa: F811
    source = write_native(tmp_path / "work.jsonl", [program("a", [turn(100, 3)])])
    config = write_config(tmp_path / "config.yaml", config_dict(source, client={"request_s": -1}))
    done = cli("run", config)
    assert done.returncode == 2
    assert "client.request_s is -1" in done.stderr
