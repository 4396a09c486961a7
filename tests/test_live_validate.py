"""`live validate`: calibration, overhead, the server's life, the decisions, and all of it together."""

from __future__ import annotations

import json
import os
import random
import stat
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

from agentservesim import parse_config, simulate
from agentservesim.errors import InputError
from agentservesim.live import calibration
from agentservesim.live.calibration import levels
from agentservesim.live.decision_diff import diff_decisions
from agentservesim.live.overhead import SoloCall, client_overhead, solo_calls
from agentservesim.live.server import ServerError, VllmServer, engine_options, vllm_python
from agentservesim.step_time import build_step_time
from agentservesim.validation.linear_fit import fit_linear
from agentservesim.validation.step_log import Step
from helpers import chain, config_dict, write_config, write_native
from in_process import cli  # noqa: F401

TRUTH = {
    "base_s": 0.004,
    "per_decode_s": 2e-4,
    "per_prefill_token_s": 5e-5,
    "per_context_token_s": 3e-7,
    "per_prefill_s": 1e-3,
    "per_prefill_pair_s": 6e-8,
}
ENGINE = {"block_size": 32, "max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 2048}


# --- the linear back end from a log ----------------------------------------------------------------------


def logged(count, noise, seed=1):
    """Steps as the linear back end says they are, each times `noise(rng)`."""
    step_time = build_step_time(parse_config(config_dict("none", step_time=TRUTH)))
    rng, host = random.Random(seed), random.Random(seed + 1)
    steps = []
    for _ in range(count):
        decodes = rng.choice((0, 1, 2, 4, 8, 16, 32))
        prefills = tuple(
            (round(2 ** rng.uniform(2, 9)), rng.choice((0, 0, 500, 3000)))
            for _ in range(rng.choice((0, 0, 1, 2)) or (not decodes))
        )
        context = sum(rng.randint(50, 4000) for _ in range(decodes))
        seconds = step_time.step(prefills, decodes, context).seconds * noise(host)
        steps.append(Step(prefills, decodes, context, None, seconds))
    return steps


def test_linear_coefficients_come_back():
    found = fit_linear(logged(600, lambda rng: 1.0))
    assert found.coefficients == pytest.approx(TRUTH, rel=1e-4)
    assert found.errors()["held_out"].p90 < 1e-4
    assert found.warnings == []


def test_delays_of_a_busy_host_are_in_the_mean_and_a_hang_is_not():
    """One step in four takes twice its time: what a run adds up is the mean, a quarter longer."""
    found = fit_linear(logged(4000, lambda rng: 2.0 if rng.random() < 0.25 else 1.0))
    exact = fit_linear(logged(4000, lambda rng: 1.0))
    assert found.fitted.sum() == pytest.approx(1.25 * exact.fitted.sum(), rel=0.02)
    steps = logged(4000, lambda rng: 1.0)
    steps[7] = steps[7]._replace(seconds=30.0)
    hung = fit_linear(steps)
    assert hung.fitted.sum() == pytest.approx(exact.fitted.sum(), rel=0.01)
    assert "1 of 4000 steps took over 10 times" in " ".join(hung.warnings)


def test_a_coefficient_that_would_be_negative_is_left_out():
    """A machine that is faster with longer contexts: no config can say so."""
    steps = [
        step._replace(seconds=0.02 - 1e-7 * step.decode_context_tokens)
        for step in logged(500, lambda rng: 1.0)
        if step.decodes and not step.prefills
    ]
    found = fit_linear(steps)
    assert found.coefficients["per_context_token_s"] == 0
    assert min(found.coefficients.values()) >= 0
    assert found.fitted.mean() == pytest.approx(np.mean([step.seconds for step in steps]), rel=0.02)


def test_calibrate_writes_a_step_time_section(tmp_path, cli):  # noqa: F811
    source = write_native(tmp_path / "work.jsonl", [chain("a", 3)])
    config = write_config(tmp_path / "config.yaml", config_dict(source))
    log = tmp_path / "steps.jsonl"
    log.write_text("".join(json.dumps(row(step)) + "\n" for step in logged(400, lambda rng: 1.0)))
    out = tmp_path / "step_time.yaml"
    done = cli("calibrate", log, "--config", config, "-o", out, "--engine", "a made-up engine")
    assert done.returncode == 0, done.stderr
    assert "a made-up engine" in out.read_text()
    section = yaml.safe_load(out.read_text())["step_time"]
    assert section.pop("backend") == "linear"
    assert section == pytest.approx(TRUTH, rel=1e-3)
    data = config_dict(source)
    data["step_time"] = {"backend": "linear", **section}
    assert simulate(parse_config(data)).summary["programs_completed"] == 1


def row(step):
    return {
        "seconds": step.seconds,
        "prefills": step.prefills,
        "decodes": step.decodes,
        "decode_context_tokens": step.decode_context_tokens,
    }


# --- overhead --------------------------------------------------------------------------------------------


def test_overhead_is_what_no_step_accounts_for():
    """3 ms and 2 µs a prompt token there, 1.5 ms back, on two clocks whose zeros lie apart; one call hung."""
    rng = random.Random(2)
    origin_s, engine_zero_s = 5000.0, 4000.0
    rows, calls, now_s = [], [], 1.0
    for number in range(40):
        prompt = rng.randint(20, 2000)
        begun_s = now_s + 0.003 + 2e-6 * prompt + (0.5 if number == 11 else 0)
        ended_s = begun_s + 0.02
        shift_s = origin_s - engine_zero_s
        for start_s, end_s in ((begun_s, begun_s + 0.01), (begun_s + 0.01, ended_s)):
            rows.append(
                {
                    "scheduled_s": start_s + shift_s,
                    "ended_s": end_s + shift_s,
                    "monotonic_s": end_s + origin_s + rng.uniform(0, 1e-5),
                }
            )
        calls.append(
            {
                "status": "completed",
                "prompt_tokens": prompt,
                "released_s": now_s,
                "completed_s": ended_s + 0.0015,
            }
        )
        now_s = ended_s + 0.05
    calls.append({"status": "live", "prompt_tokens": 9, "released_s": now_s, "completed_s": None})
    solo = solo_calls(rows, calls, origin_s)
    assert len(solo) == 40
    found = client_overhead(solo)
    assert found.request_s == pytest.approx(0.003, rel=0.02)
    assert found.request_per_token_s == pytest.approx(2e-6, rel=0.05)
    assert found.response_s == pytest.approx(0.0015, rel=0.02)


def test_too_few_calls_measure_no_overhead():
    with pytest.raises(InputError, match="3 calls had the engine to themselves: expected at least 10"):
        client_overhead([SoloCall(10, 0.0, 1.0, 0.1, 0.9)] * 3)


def test_a_slope_that_would_be_negative_is_none():
    calls = [SoloCall(tokens, 0.0, 1.0, 0.01 - 1e-6 * tokens, 0.9) for tokens in range(100, 2000, 100)]
    found = client_overhead(calls)
    assert found.request_per_token_s == 0
    assert found.request_s == pytest.approx(0.009, abs=0.0005)


# --- decisions -------------------------------------------------------------------------------------------


def decisions(*words):
    rows = []
    for number, word in enumerate(words):
        event, _, call = word.partition(" ")
        program, _, turn = call.partition("/")
        rows.append({"time_s": float(number), "event": event, "program_id": program, "turn_id": turn})
    return rows


def test_equal_decisions_are_equal_whenever_they_were_made():
    real = decisions("protect a/t0", "takeover a/t0", "preempt b/t0")
    later = [{**each, "time_s": each["time_s"] + 9} for each in real]
    found = diff_decisions(real, later)
    assert found.equal and found.same == 3
    assert found.real == {"protect": 1, "takeover": 1, "preempt": 1}
    assert "all 3 decisions are the same" in found.in_words()


def test_the_first_difference_is_named_with_its_time():
    real = decisions("protect a/t0", "retry a/t1", "protect b/t0", "expire a/t0", "release b/t0")
    simulated = decisions("protect a/t0", "protect b/t0", "takeover a/t0", "release b/t0")
    found = diff_decisions(real, simulated)
    assert (found.same, found.real_next, found.simulated_next) == (2, "expire a/t0", "takeover a/t0")
    assert (found.real_next_s, found.simulated_next_s) == (3.0, 2.0), "a client's retry is no decision"
    assert (found.programs, found.programs_same) == (2, 1)
    assert not diff_decisions(real, real[:2]).equal
    assert diff_decisions(real[:1], real).real_next is None


# --- the server ------------------------------------------------------------------------------------------


@pytest.fixture
def fake_python(tmp_path):
    """An interpreter that has a vLLM, as far as this goes."""
    script = tmp_path / "python"
    fake = Path(__file__).with_name("fake_vllm.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.fixture
def config(tmp_path):
    programs = [chain(f"p{n}", 3, gap_s=0.02, arrival_s=0.05 * n) for n in range(4)]
    return config_dict(write_native(tmp_path / "work.jsonl", programs), engine=ENGINE)


def test_a_server_lives_as_long_as_its_block_and_its_children_too(tmp_path, fake_python, config, monkeypatch):
    child_file = tmp_path / "child"
    monkeypatch.setenv("FAKE_VLLM_CHILD", str(child_file))
    waits = []
    log = tmp_path / "server.log"
    with VllmServer(fake_python, tmp_path, parse_config(config), {}, log, waits.append) as server:
        server.reset_prefix_cache()
        assert urllib.request.urlopen(f"{server.url}/health").read() == b"1"
        child = int(child_file.read_text())
        os.kill(child, 0)
    assert waits and waits == sorted(waits)
    assert "--block-size 32" in log.read_text()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/health", timeout=2)
    until = time.monotonic() + 10
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(pid):
    """A killed process may be left as a zombie, where nobody reaps orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_dies_says_so_with_the_end_of_its_log(tmp_path, fake_python, config, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_DIES", "1")
    server = VllmServer(fake_python, tmp_path, parse_config(config), {}, tmp_path / "server.log")
    said = r"(?s)exit code 1; the first error and .*server.log:\n  ValueError: no memory\n.*as it were"
    with pytest.raises(ServerError, match=said):
        server.__enter__()


def test_engine_options_are_vllms(config):
    changed = {**config, "engine": {**ENGINE, "enable_prefix_caching": False, "watermark": 0.1}}
    options = " ".join(engine_options(parse_config(changed)))
    assert "--num-gpu-blocks-override 2048" in options  # 65,536 tokens
    assert "--no-enable-prefix-caching" in options and "--watermark 0.1" in options
    assert "--scheduler-reserve-full-isl" in options and "--max-num-batched-tokens 512" in options


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("engine", {"block_size": 16}, "engine.block_size is 16: expected a multiple of 32"),
        ("engine", {"async_scheduling": True}, "engine.async_scheduling is true: expected false"),
        ("engine", {"max_model_len": None}, "engine.max_model_len is missing"),
        ("engine", {"max_model_len": 65536}, "max_model_len is 65536: expected at most 65504"),
        ("cluster", {"instances": 2}, "cluster.instances is 2: expected 1"),
        ("cluster", {"kv_cache_tokens": None}, "cluster.kv_cache_tokens is missing"),
    ],
)
def test_what_a_cpu_cannot_be_is_refused(tmp_path, fake_python, config, section, values, said, cli):  # noqa: F811
    config[section] = {**config[section], **values}
    file = write_config(tmp_path / "config.yaml", config)
    done = cli("live", "validate", file, "--vllm-python", fake_python)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_python_without_vllm_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--vllm-python .*nowhere: cannot be run.*install_vllm.sh"):
        vllm_python(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"has no vLLM \(.*No module named 'vllm'.*install_vllm.sh"):
        vllm_python(sys.executable)


# --- all of it -------------------------------------------------------------------------------------------


def test_levels_go_up_to_the_largest_batch_and_down():
    assert levels(32) == [2, 4, 8, 16, 32, 16, 8, 4, 2]
    assert levels(6) == [2, 4, 6, 4, 2]
    assert levels(1) == [1]


def test_live_validate_from_end_to_end(tmp_path, fake_python, config, monkeypatch, cli):  # noqa: F811
    for name, value in (("WARM_UP_S", 0.3), ("ALONE_S", 1.0), ("LEVEL_S", 0.5)):
        monkeypatch.setattr(calibration, name, value)
    out = tmp_path / "out"
    file = write_config(tmp_path / "config.yaml", config)
    done = cli(
        "live", "validate", file, "--vllm-python", fake_python, "--out", out, "--repeats", 2, "--json",
        "--set", "policies.retention=ttl:tau_s=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((out / "validation.json").read_text())
    assert len(found["jct"]["real_s"]) == len(found["runs"]) == 2
    assert [run["paired"] for run in found["runs"]] == [12, 12]
    assert found["jct"]["error"] == pytest.approx(
        found["jct"]["simulated_s"] / np.mean(found["jct"]["real_s"]) - 1
    )
    assert found["calibration"]["solo_calls"] >= 10
    assert found["calibration"]["step_time"]["base_s"] > 0.001
    assert found["simulated"]["step_time"]["backend"] == "linear"
    assert found["runs"][0]["decisions"]["real"] == {}, "the fake decides nothing"
    assert found["runs"][0]["decisions"]["simulated_next"] == "protect p0/t0"
    for name in ("simulated/calls.parquet", "real-2/calls.parquet", "real-1-paired/report.html"):
        assert (out / name).is_file()
    settings = (out / "real-1.log").read_text()
    assert '"retention": "ttl:tau_s=2"' in settings and '"prefill_line"' in settings
    assert '"retention": "lru"' in (out / "calibration.log").read_text(), "calibrated under plain vLLM"


def test_live_validate_for_a_person(tmp_path, fake_python, config, monkeypatch, cli):  # noqa: F811
    for name, value in (("WARM_UP_S", 0.3), ("ALONE_S", 1.0), ("LEVEL_S", 0.3)):
        monkeypatch.setattr(calibration, name, value)
    done = cli("live", "validate", write_config(tmp_path / "c.yaml", config), "--vllm-python", fake_python)
    assert done.returncode == 0, done.stderr
    assert "against the real mean" in done.stdout and "no decisions" in done.stdout
    assert "back, measured on" in done.stdout
    assert "real run 1 of 1" in done.stderr
