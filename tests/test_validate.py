"""A real run beside its simulation: errors computed independently, pairing, and what a user is told."""

from __future__ import annotations

import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from agentservesim import parse_config, simulate
from agentservesim.errors import InputError
from agentservesim.validation.records import read_real_run
from agentservesim.validation.validate import validate
from helpers import chain, config_dict, program, turn, write_config, write_native
from in_process import cli  # noqa: F401

OFFSET_S = 5000.0
"""Real clocks do not start at zero."""


@pytest.fixture
def single(tmp_path):
    """A config of one-turn programs, and the calls that its simulation gives."""
    work = [program(f"p{n}", [turn(40 + 30 * n, 5 + 3 * n)], arrival_s=0.02 * n) for n in range(12)]
    config = parse_config(config_dict(write_native(tmp_path / "work.jsonl", work)))
    return config, simulate(config).tables["calls"].to_pylist()


@pytest.fixture
def programs(tmp_path):
    """The same for programs of several turns."""
    work = [chain(f"p{n}", 2 + n % 3, gap_s=0.05, arrival_s=0.1 * n) for n in range(6)]
    config = parse_config(config_dict(write_native(tmp_path / "work.jsonl", work)))
    return config, simulate(config).tables["calls"].to_pylist()


def records(calls, **scale):
    """Per-call records made of simulated calls; `ttft` and `decode` stretch parts of each."""
    made = []
    for call in calls:
        ttft = (call["first_token_s"] - call["released_s"]) * scale.get("ttft", 1.0)
        decode = (call["completed_s"] - call["first_token_s"]) * scale.get("decode", 1.0)
        start = call["released_s"] + OFFSET_S
        made.append(
            {
                "program_id": call["program_id"],
                "turn_id": call["turn_id"],
                "released_s": start,
                "first_token_s": start + ttft,
                "completed_s": start + ttft + decode,
                "prompt_tokens": call["prompt_tokens"],
                "output_tokens": call["output_tokens"],
            }
        )
    return made


def write_records(path, made):
    path.write_text("".join(json.dumps(record) + "\n" for record in made), encoding="utf-8")
    return path


def test_a_perfect_run_has_no_error(programs, tmp_path):
    config, calls = programs
    result = validate(config, write_records(tmp_path / "real.jsonl", records(calls)))
    assert result.complete
    assert len(result.pairing.pairs) == len(calls)
    for name, error in result.numbers["errors"].items():
        assert error is None or error == pytest.approx(0, abs=1e-9), name
    assert result.findings == ["mean TTFT, TPOT and latency are each within 2% of the real run"]


def test_its_own_calls_parquet_is_a_real_run(programs, tmp_path):
    config, calls = programs
    simulate(config, tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "calls.parquet"):
        result = validate(config, path)
        assert len(result.pairing.pairs) == len(calls) and result.complete
        assert result.numbers["errors"]["jct_mean"] == pytest.approx(0, abs=1e-12)


def test_errors_are_relative_to_the_real_run(programs, tmp_path):
    """Every number again, from the records and the calls, with numpy alone."""
    config, calls = programs
    made = records(calls, ttft=1.25, decode=0.8)
    result = validate(config, write_records(tmp_path / "real.jsonl", made))
    real, simulated = {}, {}
    for side, rows in ((real, made), (simulated, calls)):
        side["ttft"] = np.array([r["first_token_s"] - r["released_s"] for r in rows])
        side["latency"] = np.array([r["completed_s"] - r["released_s"] for r in rows])
        side["tpot"] = np.array(
            [(r["completed_s"] - r["first_token_s"]) / (r["output_tokens"] - 1) for r in rows]
        )
        ids = sorted({r["program_id"] for r in rows})
        side["jct"] = np.array(
            [
                max(r["completed_s"] for r in rows if r["program_id"] == one)
                - min(r["released_s"] for r in rows if r["program_id"] == one)
                for one in ids
            ]
        )
        span = max(r["completed_s"] for r in rows) - min(r["released_s"] for r in rows)
        side["rate"] = sum(r["output_tokens"] for r in rows) / span
    errors = result.numbers["errors"]
    for name in ("ttft", "tpot", "latency", "jct"):
        a, b = real[name], simulated[name]
        assert result.numbers["real"][f"{name}_mean_s"] == pytest.approx(a.mean())
        assert result.numbers["simulated"][f"{name}_mean_s"] == pytest.approx(b.mean())
        assert errors[f"{name}_mean"] == pytest.approx(b.mean() / a.mean() - 1)
        for p in (50, 90, 99):
            assert errors[f"{name}_p{p}"] == pytest.approx(np.percentile(b, p) / np.percentile(a, p) - 1)
        assert errors[f"{name}_mape"] == pytest.approx(np.mean(np.abs(b - a) / a))
    assert errors["ttft_mean"] == pytest.approx(1 / 1.25 - 1)
    assert errors["tpot_mape"] == pytest.approx(0.25)
    assert errors["output_tokens_per_s"] == pytest.approx(simulated["rate"] / real["rate"] - 1)
    assert any("TTFT is under-estimated" in said for said in result.findings)
    assert any("steps with decodes are too long" in said for said in result.findings)


def engine_record(call, number, start_s, **changes):
    return {
        "request_id": f"bench-{number}",
        "input_toks": call["prompt_tokens"],
        "output_toks": call["output_tokens"],
        "arrival_time": 1.7e9 + call["released_s"],
        "queued_ts": OFFSET_S + start_s,
        "scheduled_ts": OFFSET_S + call["scheduled_s"],
        "first_token_ts": OFFSET_S + call["first_token_s"],
        "last_token_ts": OFFSET_S + call["completed_s"],
        **changes,
    }


def test_requests_of_a_vllm_benchmark_pair_by_number(single, tmp_path):
    """bench-n is the n-th line of the workload, in whatever order the records come."""
    config, calls = single
    by_id = {call["program_id"]: call for call in calls}
    made = [engine_record(by_id[f"p{n}"], n, by_id[f"p{n}"]["released_s"]) for n in reversed(range(12))]
    result = validate(config, write_records(tmp_path / "requests.jsonl", made))
    assert result.complete and result.real.since == "queued"
    assert all(one.real.request_id == f"bench-{one.key[0][1:]}" for one in result.pairing.pairs)
    assert result.numbers["errors"]["tpot_mean"] == pytest.approx(0, abs=1e-6)


def test_both_sides_count_from_the_engines_queue(single, tmp_path):
    """vLLM queues a request between steps: one released during a step is queued at its end. A real engine
    like the simulated one then has no error, and its TTFT is shorter than from the release."""
    config, calls = single
    ends = sorted({t for call in calls for t in (call["first_token_s"], call["completed_s"])})
    by_id = {call["program_id"]: call for call in calls}
    made = []
    for n in range(12):
        call = by_id[f"p{n}"]
        start = call["scheduled_s"] if call["scheduled_s"] == call["released_s"] else None
        if start is None:  # the first end of a step after the release; steps end at multiples of their time
            start = min([t for t in ends if t >= call["released_s"]] + [call["scheduled_s"]])
            start = min(start, call["scheduled_s"])
        made.append(engine_record(call, n, start))
    result = validate(config, write_records(tmp_path / "requests.jsonl", made))
    simulated = result.numbers["simulated"]
    released = np.mean([call["first_token_s"] - call["released_s"] for call in calls])
    assert simulated["ttft_mean_s"] < released
    for one in result.pairing.pairs:
        row = one.simulated
        assert row["released_s"] <= row["start_s"] <= row["scheduled_s"]


def test_what_has_no_partner_is_counted_and_named(programs, tmp_path):
    config, calls = programs
    made = records(calls)
    gone = made.pop(3)
    made[0] = {**made[0], "program_id": "p99"}
    made.append({**gone, "status": "live", "completed_s": None})
    result = validate(config, write_records(tmp_path / "real.jsonl", made))
    assert not result.complete
    assert len(result.pairing.pairs) == len(calls) - 2
    assert len(result.pairing.real_alone) == 2 and len(result.pairing.simulated_alone) == 2
    told = " ".join(result.pairing.real_alone)
    assert f"{gone['program_id']}/{gone['turn_id']} (live)" in told and "p99/t0: not in the workload" in told


def test_other_work_and_other_arrivals_are_said(single, tmp_path):
    config, calls = single
    made = records(calls)
    made[2]["output_tokens"] += 7
    for number, record in enumerate(made):
        for key in ("released_s", "first_token_s", "completed_s"):
            record[key] += number
    said = validate(config, write_records(tmp_path / "real.jsonl", made)).findings
    assert said[0].startswith("the work differs: 1 of 12 calls") and "real.jsonl:3" in said[0]
    assert "arrivals differ by up to" in said[1]


def test_times_between_tokens_are_used_if_noted(single, tmp_path):
    config, calls = single
    made = [{**record, "itls_s": [0.02, 0.04]} for record in records(calls)]
    result = validate(config, write_records(tmp_path / "real.jsonl", made))
    assert result.numbers["real"]["itl_mean_s"] == pytest.approx(0.03)
    decode = sum(call["completed_s"] - call["first_token_s"] for call in calls)
    tokens = sum(call["output_tokens"] - 1 for call in calls)
    assert result.numbers["simulated"]["itl_mean_s"] == pytest.approx(decode / tokens)


def test_the_command_writes_and_prints(programs, tmp_path, cli):  # noqa: F811
    config, calls = programs
    file = write_config(tmp_path / "run.yaml", config.model_dump(mode="json"))
    real = write_records(tmp_path / "real.jsonl", records(calls, ttft=1.1))
    done = cli("validate", file, "--real", real, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"]["ttft_mean"] == pytest.approx(1 / 1.1 - 1)
    assert set(found["real"]) == set(found["simulated"]) and found["paired"] == len(calls)
    table = pq.read_table(tmp_path / "out" / "paired.parquet").to_pylist()
    with (tmp_path / "out" / "paired.csv").open(encoding="utf-8") as lines:
        assert len(list(csv.DictReader(lines))) == len(table) == len(calls)
    assert table[0]["ttft_error"] == pytest.approx(1 / 1.1 - 1)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "TTFT is under-estimated" in page and 'src="http' not in page

    shown = cli("validate", file, "--real", real)
    assert shown.returncode == 0 and "TTFT p99" in shown.stdout and "-9.1 %" in shown.stdout
    write_records(real, records(calls)[1:])
    short = cli("validate", file, "--real", real)
    assert short.returncode == 3
    assert "0 calls of the real run and 1 simulated ones have no partner" in short.stderr


GOOD = {"program_id": "p0", "turn_id": "t0", "released_s": 1.0, "first_token_s": 2.0, "completed_s": 3.0,
        "prompt_tokens": 4, "output_tokens": 5}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{**GOOD, "first_token_s": 0.5}], "real.jsonl:1: first_token_s is 0.5: expected no less than"),
        ([GOOD, {**GOOD, "output_tokens": -1}], "real.jsonl:2: output_tokens is -1: expected int >= 0"),
        ([{**GOOD, "first_token_s": None}], "real.jsonl:1: first_token_s is missing"),
        ([{"text": "hello"}], "real.jsonl:1: the line has keys ['text']: expected a line with program_id"),
        ([{"queued_ts": 1.0, "first_token_ts": 2.0}], "real.jsonl:1: missing key 'input_toks'"),
        ([{**GOOD, "completed_s": None}], "holds no completed call"),
        ([GOOD, engine_record({"prompt_tokens": 1, "output_tokens": 1, "released_s": 0, "scheduled_s": 0,
                               "first_token_s": 0, "completed_s": 0}, 0, 0)], "expected one kind of record"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_named(tmp_path, lines, message):
    with pytest.raises(InputError, match=r"real\.jsonl") as raised:
        read_real_run(write_records(tmp_path / "real.jsonl", lines))
    assert message in str(raised.value)


def test_wrong_files_end_with_exit_code_2(programs, tmp_path, cli):  # noqa: F811
    config, calls = programs
    file = write_config(tmp_path / "run.yaml", config.model_dump(mode="json"))
    missing = cli("validate", file, "--real", tmp_path / "none.jsonl")
    assert missing.returncode == 2 and "none.jsonl: no such file" in missing.stderr
    made = records(calls)
    twice = cli("validate", file, "--real", write_records(tmp_path / "real.jsonl", [*made, made[0]]))
    assert twice.returncode == 2 and "expected one record a call" in twice.stderr
    others = [{**record, "program_id": f"q{n}"} for n, record in enumerate(made)]
    none = cli("validate", file, "--real", write_records(tmp_path / "real.jsonl", others))
    assert none.returncode == 2 and "no call pairs with the workload" in none.stderr
    anonymous = [{k: v for k, v in record.items() if k != "program_id"} for record in made]
    nameless = cli("validate", file, "--real", write_records(tmp_path / "real.jsonl", anonymous))
    assert nameless.returncode == 2 and "program_id is missing" in nameless.stderr


@pytest.mark.data
def test_the_rtx_pro_6000_run_from_its_tables(data_dir):
    """Real vLLM 0.19 on 300 ShareGPT requests: the goals of docs/fidelity.md, and vLLM's own figures."""
    folder = data_dir / "measured" / "vllm_0.19_sharegpt"
    tables = data_dir / "profiles" / "RTXPRO6000" / "meta-llama" / "Llama-3.1-8B" / "bf16"
    config = parse_config(
        {
            "workload": {"source": str(folder / "sharegpt-llama-3.1-8b-300-sps10.jsonl")},
            "cluster": {"gpu": "rtx_pro_6000_server", "model": "llama-3.1-8b"},
            "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "async_scheduling": True},
            "step_time": {"backend": "tables", "path": str(tables)},
            "output_reuse": "replay",
        }
    )
    result = validate(config, folder / "RTXPRO6000_Llama-3.1-8B")
    assert result.complete and len(result.pairing.pairs) == 300
    real, errors = result.numbers["real"], result.numbers["errors"]
    for name, milliseconds in (("ttft", 7097.2), ("tpot", 32.5), ("latency", 28200.7)):  # from summary.txt
        assert real[f"{name}_mean_s"] * 1e3 == pytest.approx(milliseconds, abs=0.06)
        assert abs(errors[f"{name}_mean"]) < 0.025
        assert abs(errors[f"{name}_p99"]) < 0.04
    assert real["ttft_p99_s"] * 1e3 == pytest.approx(19755.3, abs=0.06)
