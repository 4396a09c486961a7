"""Replaying programs against a server: exact counts, causality, and nothing lost silently."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

import pyarrow.parquet as pq
import pytest

from agentservesim import parse_config
from agentservesim.errors import InputError
from agentservesim.live.replay import ReplayOptions, replay
from agentservesim.results.tables import CALLS, PROGRAMS
from fake_server import BLOCK, FakeServer
from helpers import calls_by_name, chain, config_dict, program, rows, run, turn, write_config, write_native
from in_process import cli  # noqa: F401

FAST = {"retries": 10, "vocab_size": 1000}


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


def replayed(folder, programs, server, options=None, **sections):
    source = write_native(folder / "workload.jsonl", programs)
    config = parse_config(config_dict(source, **sections))
    return replay(config, server.url, ReplayOptions(**{**FAST, **(options or {})}))


def sent(server):
    """Requests by 'program/turn', in the order they came."""
    requests = {}
    for seen in server.completions():
        identity = seen.body["vllm_xargs"]
        requests.setdefault(f"{identity['program_id']}/{identity['turn_id']}", []).append(seen)
    return requests


# --- what is asked for, and what is written ---------------------------------------------------------------


def test_counts_are_exact_and_the_request_says_all_that_makes_them_so(tmp_path, server):
    result = replayed(tmp_path, [chain("a", 3), chain("b", 2, arrival_s=0.02)], server)
    assert result.complete and result.summary["calls_completed"] == 5
    for name, requests in sent(server).items():
        (seen,) = requests
        row = calls_by_name(result)[name]
        assert len(seen.body["prompt"]) == row["prompt_tokens"]
        assert seen.body["max_tokens"] == seen.body["min_tokens"] == row["output_tokens"] == 8
        assert seen.body["ignore_eos"] is True and seen.body["temperature"] == 0
        assert seen.body["stream"] is True and seen.body["stream_options"] == {"include_usage": True}
        assert all(4 <= token < 1000 for token in seen.body["prompt"])
    assert result.summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows(result))
    assert result.summary["output_tokens"] == 40
    assert not result.summary["deviations"]


def test_files_are_the_simulators(tmp_path, server, cli):  # noqa: F811
    source = write_native(tmp_path / "work.jsonl", [chain("a", 2), chain("b", 2)])
    config = write_config(tmp_path / "run.yaml", config_dict(source))
    out = tmp_path / "out"
    done = cli("live", "replay", config, "--url", server.url, "--out", out, "--json", "--vocab-size", 900)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    simulated = run(tmp_path, [chain("a", 2)]).summary
    assert set(simulated) <= set(summary)
    assert pq.read_schema(out / "calls.parquet").equals(CALLS)
    assert pq.read_schema(out / "programs.parquet").equals(PROGRAMS)
    calls = pq.read_table(out / "calls.parquet").to_pylist()
    assert [call["scheduled_s"] for call in calls] == [call["preemptions"] for call in calls] == [None] * 4
    chunks = pq.read_table(out / "chunks.parquet").to_pylist()
    assert len(chunks) == 32 and {chunk["tokens"] for chunk in chunks} == {1}
    for call in calls:
        times = [
            c["time_s"]
            for c in chunks
            if (c["program_id"], c["turn_id"]) == (call["program_id"], call["turn_id"])
        ]
        assert times == sorted(times)
        assert (times[0], times[-1]) == (call["first_token_s"], call["completed_s"])
        assert call["released_s"] < call["first_token_s"] < call["completed_s"]
    from agentservesim import load_config

    assert load_config(out / "config.yaml").workload.source == str(source)


def test_the_table_says_what_the_server_does_not_tell(tmp_path, server, cli):  # noqa: F811
    server.cached_tokens = server.token_ids = False
    source = write_native(tmp_path / "work.jsonl", [chain("a", 3)])
    config = write_config(tmp_path / "run.yaml", config_dict(source))
    done = cli("live", "replay", config, "--url", server.url)
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert "3 of 3 completed" in words
    assert "--enable-prompt-tokens-details" in words and "--enable-per-request-metrics" in words
    assert "16 that later prompts repeat were made up" in words


def test_cached_tokens_are_the_reusable_prefix_in_whole_blocks(tmp_path, server):
    programs = [chain("a", 4, prefix=[{"id": "sys", "tokens": 40}]), chain("b", 4, kept_output_tokens=0)]
    result = replayed(tmp_path, programs, server)
    assert result.summary["cached_tokens_known"] and result.summary["token_ids_known"]
    simulated = calls_by_name(run(tmp_path, programs, cluster={"kv_cache_tokens": 65536}))
    real = calls_by_name(result)
    assert {name: row["hit_tokens"] for name, row in real.items()} == {
        name: row["hit_tokens"] for name, row in simulated.items()
    }
    assert result.summary["prefix_hit_tokens"] > 10 * BLOCK


def test_output_is_not_repeated_in_a_replay_of_what_was_recorded(tmp_path, server):
    programs = [chain("a", 3, first=64, output=32)]
    hits = {
        reuse: [row["hit_tokens"] for row in rows(replayed(tmp_path, programs, server, output_reuse=reuse))]
        for reuse in ("deployment", "replay")
    }
    assert hits["deployment"] == [0, 80, 160]
    assert hits["replay"][1] == 64  # a new server cache is not needed: ids depend on the seed alone


def test_the_servers_own_time_is_when_a_call_was_scheduled(tmp_path, server):
    server.per_request_metrics, server.first_s = True, 0.03
    result = replayed(tmp_path, [chain("a", 2)], server)
    for row in rows(result):
        assert row["first_token_s"] - row["scheduled_s"] == pytest.approx(0.03)
    assert result.summary["scheduled_known"] and result.summary["queue_mean_s"] >= 0
    served_s = sum(row["completed_s"] - row["scheduled_s"] for row in rows(result))
    assert rows(result, "programs")[0]["attained_service_s"] == pytest.approx(served_s)


def test_identity_names_the_call_its_tool_and_the_last_call_and_can_be_left_out(tmp_path, server):
    fork = program(
        "f",
        [
            turn(64, 4, tools=[{"name": "grep", "duration_s": 0.01}]),
            turn(64, 4, parents=[0]),
            turn(64, 4, parents=[0]),
            turn(64, 4, parents=[1, 2]),
        ],
    )
    replayed(tmp_path, [fork], server)
    identities = [seen.body["vllm_xargs"] for seen in server.completions()]
    assert identities[0] == {"program_id": "f", "turn_id": "t0", "tool_name": "grep"}
    assert ["last_call" in identity for identity in identities] == [False, False, False, True]
    server.seen.clear()
    replayed(tmp_path, [fork], server, {"identity": False})
    assert all("vllm_xargs" not in seen.body for seen in server.completions())


# --- when -------------------------------------------------------------------------------------------------


def test_a_turn_is_never_sent_before_its_parents_and_their_gaps(tmp_path, server):
    fork = program(
        "f",
        [
            turn(64, 4, gap_s=0.05),
            turn(80, 12, parents=[0], gap_s=0.03),
            turn(80, 2, parents=[0], gap_s=0.08, pause_s=0.02),
            turn(90, 4, parents=[1, 2]),
        ],
        arrival_s=0.03,
    )
    result = replayed(tmp_path, [fork, chain("c", 3, gap_s=0.04)], server)
    calls, requests = calls_by_name(result), sent(server)
    waits = {"f/t1": {"f/t0": 0.05}, "f/t2": {"f/t0": 0.05}, "f/t3": {"f/t1": 0.03, "f/t2": 0.1}}
    waits |= {"c/t1": {"c/t0": 0.04}, "c/t2": {"c/t1": 0.04}}
    for name, parents in waits.items():
        due_s = max(calls[parent]["completed_s"] + wait_s for parent, wait_s in parents.items())
        assert calls[name]["released_s"] >= due_s - 1e-9
        for parent in parents:  # by the server's clock, which saw the parent's end after its last token
            assert requests[name][0].received_s > requests[parent][0].completed_s
    assert calls["f/t0"]["released_s"] >= 0.03
    jct_s = {row["program_id"]: row["jct_s"] for row in rows(result, "programs")}
    assert jct_s["f"] == pytest.approx(calls["f/t3"]["completed_s"] - 0.03)


def test_time_scale_stretches_arrivals_and_gaps(tmp_path, server):
    programs = [chain("a", 2, gap_s=4.0, arrival_s=1.0), chain("b", 1, arrival_s=6.0)]
    calls = calls_by_name(replayed(tmp_path, programs, server, {"time_scale": 0.02}))
    assert 0.02 <= calls["a/t0"]["released_s"] < 1.0
    assert 0.08 <= calls["a/t1"]["released_s"] - calls["a/t0"]["completed_s"] < 4.0
    assert 0.12 <= calls["b/t0"]["released_s"] < 6.0


def test_lanes_keep_so_many_programs_running(tmp_path, server):
    programs = [chain(f"p{n}", 2, gap_s=0.01) for n in range(6)]
    arrivals = {"process": "closed_loop", "lanes": 2}
    result = replayed(
        tmp_path,
        programs,
        server,
        workload={"source": str(tmp_path / "workload.jsonl"), "arrivals": arrivals},
    )
    spans = [(row["arrival_s"], row["completed_s"]) for row in rows(result, "programs")]
    assert len(spans) == 6
    for start_s, _ in spans:
        assert sum(a <= start_s < b for a, b in spans) <= 2


# --- faults -----------------------------------------------------------------------------------------------


def test_faults_are_retried_and_counted(tmp_path, server):
    server.faults = deque(["503", "429", "drop", "drop:3", "cut:2", "error:1:500", "ok", "500"])
    result = replayed(tmp_path, [chain("a", 2)], server)
    summary = result.summary
    assert result.complete and summary["calls_completed"] == 2
    assert summary["retries_by_reason"] == {
        "status 503": 1, "status 429": 1, "connection": 1, "stream broken": 3, "status 500": 1,
    }  # fmt: skip
    assert (summary["retries"], summary["calls_retried"], summary["retry_tokens_dropped"]) == (7, 2, 6)
    reasons = [row["reason"] for row in rows(result)]
    assert "stream broken × 3" in reasons[0] and reasons[1] == "retried: status 500 × 1"
    assert summary["decisions"]["retry"] == 7
    first, *_, again = sent(server)["a/t0"]
    assert first.body["prompt"] == again.body["prompt"]
    assert [row["output_tokens"] for row in rows(result)] == [8, 8]


def test_a_call_that_keeps_failing_fails_its_program_and_the_exit_code_says_so(tmp_path, server, cli):  # noqa: F811
    server.faults = deque(["503"] * 3)
    source = write_native(tmp_path / "w.jsonl", [chain("a", 3), chain("b", 1, arrival_s=1.0)])
    config = write_config(tmp_path / "run.yaml", config_dict(source))
    arguments = ("--url", server.url, "--json", "--retries", "2", "--out", tmp_path / "out")
    done = cli("live", "replay", config, *arguments)
    summary = json.loads(done.stdout)
    assert done.returncode == 3
    assert (summary["calls_failed"], summary["calls_completed"], summary["calls_not_released"]) == (1, 1, 2)
    assert (summary["programs_failed"], summary["programs_completed"], summary["calls_live"]) == (1, 1, 0)
    assert "program a, turn t0: status 503: made to fail, given up after 3 attempts" in done.stderr
    failed = pq.read_table(tmp_path / "out" / "calls.parquet").to_pylist()[0]
    assert failed["status"] == "failed" and "503" in failed["reason"]


def test_a_server_that_dies_and_comes_back_loses_nothing_silently(tmp_path, server):
    programs = [chain(f"p{n}", 4, output=16, gap_s=0.02) for n in range(4)]
    server.hold_after = 5

    def restart():
        while server.held < 4:
            time.sleep(0.005)
        time.sleep(0.1)  # so that the client has seen what was sent
        server.kill()
        server.hold_after = None
        time.sleep(0.25)
        server.start()

    killer = threading.Thread(target=restart)
    killer.start()
    result = replayed(tmp_path, programs, server)
    killer.join()
    summary = result.summary
    assert result.complete and summary["calls_completed"] == 16 and summary["programs_completed"] == 4
    assert summary["retries_by_reason"]["connection"] >= 4
    assert summary["retries_by_reason"]["stream broken"] == 4
    assert summary["retry_tokens_dropped"] == 4 * 5
    assert sum(row["output_tokens"] for row in rows(result)) == 16 * 16


def test_wrong_counts_are_counted_and_named(tmp_path, server):
    server.faults = deque(["short:2", "count:5", "stop"])
    result = replayed(tmp_path, [chain("a", 3)], server)
    summary = result.summary
    assert summary["deviations"] == {"output tokens": 1, "finish reason": 2, "prompt tokens": 1}
    named = " | ".join(summary["deviations_named"])
    assert "turn t0: asked for 8 output tokens, got 2" in named
    assert "turn t1: sent 120 prompt tokens, the server counts 5" in named
    assert "turn t2: finish_reason stop, expected length" in named
    assert [row["output_tokens"] for row in rows(result)] == [2, 8, 8]


def test_fields_a_server_does_not_know(tmp_path, server):
    server.unknown = frozenset({"return_token_ids"})
    result = replayed(tmp_path, [chain("a", 3)], server)
    assert result.complete and result.summary["token_ids_known"] is False
    assert result.summary["retries"] == 0 and result.summary["made_up_tokens"] == 16
    assert sum("return_token_ids" in seen.body for seen in server.completions()) == 1
    server.unknown = frozenset({"vllm_xargs"})
    result = replayed(tmp_path, [chain("a", 1)], server)
    assert result.summary["calls_refused"] == 1 and "--no-identity" in result.summary["refusals"][0]


def test_a_request_that_the_stream_calls_wrong_is_not_repeated(tmp_path, server):
    server.faults = deque(["error:1:400"])
    result = replayed(tmp_path, [chain("a", 1)], server)
    assert (result.summary["calls_refused"], result.summary["retries"]) == (1, 0)
    assert "engine trouble" in result.summary["refusals"][0]


def test_a_server_that_does_not_stream_is_no_use(tmp_path, server):
    server.faults = deque(["plain"])
    result = replayed(tmp_path, [chain("a", 1)], server)
    assert result.summary["calls_refused"] == 1 and result.summary["retries"] == 0
    assert "answers application/json, expected a text/event-stream" in result.summary["refusals"][0]


def test_a_call_that_takes_too_long_fails(tmp_path, server):
    server.first_s = 30.0
    result = replayed(tmp_path, [chain("a", 1)], server, {"timeout_s": 0.1})
    assert result.summary["calls_failed"] == 1 and not result.complete
    assert "not complete after 0.1 s (--timeout)" in result.summary["failures"][0]


def test_calls_too_long_for_the_model(tmp_path, server):
    server.max_model_len = 100
    result = replayed(tmp_path, [chain("a", 1, first=90, output=30), chain("b", 1, first=101)], server)
    summary = result.summary
    assert (summary["calls_clipped"], summary["calls_refused"]) == (1, 1)
    assert calls_by_name(result)["a/t0"]["output_tokens"] == 10
    assert "more than 100" in summary["refusals"][0] and not summary["deviations"]


def test_turns_without_output_are_asked_for_one_token(tmp_path, server):
    result = replayed(tmp_path, [program("p", [turn(64, 0), turn(96, 4)])], server)
    assert result.summary["calls_raised_to_one_token"] == 1
    assert [row["output_tokens"] for row in rows(result)] == [1, 4]


# --- what a user is told ----------------------------------------------------------------------------------


def test_no_server_or_another_model_is_a_wrong_input(tmp_path, server):
    with pytest.raises(InputError, match=r"--model nope: not served: http://127.0.0.1:\d+ serves fake"):
        replayed(tmp_path, [chain("a", 1)], server, {"model": "nope"})
    server.models = ("x", "y")
    with pytest.raises(InputError, match="--model is needed: .* serves x, y"):
        replayed(tmp_path, [chain("a", 1)], server)
    assert replayed(tmp_path, [chain("a", 1)], server, {"model": "y"}).complete
    assert server.completions()[0].body["model"] == "y"
    server.kill()
    with pytest.raises(InputError, match=r"--url http://127.0.0.1:\d+: no server there"):
        replayed(tmp_path, [chain("a", 1)], server)
    config = parse_config(config_dict(write_native(tmp_path / "w.jsonl", [chain("a", 1)])))
    with pytest.raises(InputError, match="--url localhost:8000: expected http://host:port"):
        replay(config, "localhost:8000")


def test_help_does_not_wait_for_what_only_the_verbs_need():
    code = (
        "import sys; sys.argv = ['agentservesim', 'live', '--help']\n"
        "from agentservesim.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'aiohttp', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "replay" in done.stdout and done.stdout.endswith("[]\n")


def test_ctrl_c_writes_what_is_finished(tmp_path, server):
    source = write_native(
        tmp_path / "w.jsonl", [chain("a", 1), chain("b", 3, gap_s=60.0), chain("c", 1, arrival_s=99)]
    )
    config = write_config(tmp_path / "run.yaml", config_dict(source))
    command = [sys.executable, "-m", "agentservesim", "live", "replay", str(config), "--url", server.url]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while sum(seen.completed_s is not None for seen in server.completions()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: 1 of 2 programs that had arrived are unfinished" in errors
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["calls_completed"], summary["programs_completed"], summary["programs_live"]) == (2, 1, 1)
    assert pq.read_table(tmp_path / "out" / "calls.parquet").num_rows == 2
