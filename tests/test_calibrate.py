"""Residuals from logged steps and from requests: known coefficients come back."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentservesim import parse_config, simulate
from agentservesim.errors import InputError
from agentservesim.step_time import build_step_time
from agentservesim.step_time.corrected import CorrectedStepTime
from agentservesim.step_time.residual import Regime, Residual, load_residual
from agentservesim.validation.calibrate import base_step_time, calibrate_steps
from agentservesim.validation.fitting import fit
from agentservesim.validation.nelder_mead import minimise
from agentservesim.validation.request_fit import calibrate_requests
from agentservesim.validation.step_log import Step, read_steps
from helpers import config_dict, program, turn, write_config, write_native
from in_process import cli  # noqa: F401

DECODE_ONLY = {"step": 300.0, "decodes": 12.0, "context_tokens": 0.01}
WITH_PREFILL = {
    "step": 900.0,
    "prefills": 150.0,
    "prefill_tokens": 2.0,
    "decodes": 20.0,
    "context_tokens": 0.02,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    source = write_native(tmp_path_factory.mktemp("work") / "work.jsonl", [program("a", [turn(64, 8)])])
    data = config_dict(source)
    data["step_time"] = {"backend": "measured"}
    return parse_config(data)


@pytest.fixture(scope="module")
def backend(config):
    return base_step_time(config)


def shape(rng):
    decodes = rng.choice((0, 1, 2, 4, 8, 16, 32, 64, 100))
    prefills = tuple(
        (rng.randint(1, 2048), rng.choice((0, 0, 512, 4096))) for _ in range(rng.choice((0, 0, 1, 2, 4)))
    )
    if not decodes and not prefills:
        return shape(rng)
    return prefills, decodes, sum(rng.randint(64, 4096) for _ in range(decodes))


def synthetic(backend, count, seed=1, outliers=0.05, noise=0.003):
    """Steps that take the back end's time and a known residual, with noise and a few that hung."""
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        prefills, decodes, context = shape(rng)
        terms = WITH_PREFILL if prefills else DECODE_ONLY
        values = {"step": 1, "prefills": len(prefills), "prefill_tokens": sum(new for new, _ in prefills),
                  "decodes": decodes, "context_tokens": context}  # fmt: skip
        seconds = backend.step(prefills, decodes, context).seconds
        seconds += 1e-6 * sum(value * values[name] for name, value in terms.items())
        seconds *= 1 + rng.gauss(0, noise)
        if rng.random() < outliers:
            seconds *= rng.uniform(2, 10)
        steps.append(Step(prefills, decodes, context, None, seconds))
    return steps


def test_known_coefficients_come_back_despite_outliers(backend):
    found = fit(synthetic(backend, 3000), backend)
    for kind, terms in (("decode_only", DECODE_ONLY), ("with_prefill", WITH_PREFILL)):
        assert set(found.regimes[kind].coefficients) == set(terms)
        for name, value in terms.items():
            assert found.regimes[kind].coefficients[name] == pytest.approx(value, rel=0.15), (kind, name)
    errors = found.errors()
    assert errors["held_out"].median < 0.004 < errors["uncorrected"].median
    assert errors["held_out"].median == pytest.approx(errors["in_sample"].median, rel=0.2)
    assert found.warnings == []


def test_exact_steps_give_exact_coefficients(backend):
    found = fit(synthetic(backend, 400, outliers=0.0, noise=0.0), backend)
    for name, value in DECODE_ONLY.items():
        assert found.regimes["decode_only"].coefficients[name] == pytest.approx(value, rel=1e-4)
    assert found.errors()["held_out"].p90 < 1e-4


def test_the_residual_is_used_by_a_run(config, backend, tmp_path):
    """What calibrate writes corrects the steps it was fitted to."""
    steps = synthetic(backend, 400, outliers=0.0, noise=0.0)
    path = write_log(tmp_path / "steps.jsonl", steps)
    _, _, residual = calibrate_steps(config, path, "made up")
    file = tmp_path / "residual.yaml"
    file.write_text(residual.to_yaml(), encoding="utf-8")
    assert load_residual(file).described.count("made up") == 1
    changed = config.model_copy(
        update={"step_time": config.step_time.model_copy(update={"residual": str(file)})}
    )
    corrected = build_step_time(changed)
    for step in steps[:50]:
        cost = corrected.step(step.prefills, step.decodes, step.decode_context_tokens)
        assert cost.seconds == pytest.approx(step.seconds, rel=1e-3)


def test_logs_that_are_too_small_or_narrow_are_warned_of(backend):
    steps = [Step((), 8, 8 * 512 + n, None, 0.006) for n in range(30)]
    said = " ".join(fit(steps, backend).warnings)
    assert "30 steps are few" in said and "1 shapes are few" in said
    assert "0 steps with prefill are too few to correct" in said
    assert "decodes lie between 8 and 8" in said
    rng = random.Random(3)
    noise = [Step(*shape(rng), None, 10 ** rng.uniform(-4, 0)) for _ in range(300)]
    assert any("another GPU, model or tp" in warning for warning in fit(noise, backend).warnings)


def write_log(path, steps):
    rows = [
        {
            "seconds": step.seconds,
            "prefills": [list(chunk) for chunk in step.prefills],
            "decodes": step.decodes,
            "decode_context_tokens": step.decode_context_tokens,
        }
        for step in steps
    ]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        lines = ["seconds,prefills,decodes,decode_context_tokens"]
        for row in rows:
            chunks = " ".join(f"{new}:{computed}" for new, computed in row["prefills"])
            lines.append(f"{row['seconds']!r},{chunks},{row['decodes']},{row['decode_context_tokens']}")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_form_of_log_reads_alike(backend, tmp_path, suffix):
    steps = synthetic(backend, 20)
    assert read_steps(write_log(tmp_path / f"steps{suffix}", steps)) == steps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seconds,decodes\n1,2\n", "expected prefills among them"),
        (
            "seconds,prefills,decodes,decode_context_tokens\n-1,,2,40\n",
            "steps.csv:2: seconds is -1.0: expected",
        ),
        ("seconds,prefills,decodes,decode_context_tokens\n1,512,0,0\n", "steps.csv:2: prefills has '512'"),
        ("seconds,prefills,decodes,decode_context_tokens\n1,,0,0\n", "expected a step with sequences"),
        ("seconds,prefills,decodes,decode_context_tokens\n1,,4,2\n", "expected at least decodes, 4"),
        ("seconds,prefills,decodes,decode_context_tokens\n1,,x,2\n", "steps.csv:2: Expected int"),
        ("seconds,prefills,decodes,decode_context_tokens\n", "holds no step"),
    ],
)
def test_a_wrong_log_is_named(tmp_path, text, message):
    path = tmp_path / "steps.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"steps\.csv") as raised:
        read_steps(path)
    assert message in str(raised.value)


def test_the_search_finds_a_minimum():
    point, value = minimise(lambda p: (p[0] - 3) ** 2 + 10 * (p[1] + 1) ** 2 + 1, (0.0, 0.0), (1.0, 1.0), 200)
    assert point == pytest.approx((3, -1), abs=0.05) and value == pytest.approx(1, abs=0.005)


@pytest.fixture(scope="module")
def requests(tmp_path_factory, backend):
    """A config, and a run of it under a known residual."""
    folder = tmp_path_factory.mktemp("requests")
    rng = random.Random(5)
    work = [
        program(f"p{n}", [turn(rng.randint(100, 1500), rng.randint(20, 80))], arrival_s=0.03 * n)
        for n in range(60)
    ]
    data = config_dict(write_native(folder / "work.jsonl", work))
    data["step_time"] = {"backend": "measured", "residual": "none"}
    data["engine"] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    config = parse_config(data)
    plain = {"step": 1500.0, "decodes": 20.0}
    residual = Residual("b200_sxm", "llama-3.1-8b", 1, "measured", "", "", "", 0, 0, {},
                        Regime({}, plain), Regime({}, {**plain, "prefill_tokens": 3.0}))  # fmt: skip
    calls = simulate(config, step_time=CorrectedStepTime(backend, residual)).tables["calls"].to_pylist()
    real = folder / "real.jsonl"
    real.write_text("".join(json.dumps(call) + "\n" for call in calls), encoding="utf-8")
    return write_config(folder / "run.yaml", data), config, real


def test_requests_alone_give_a_residual(requests):
    _, config, real = requests
    found = calibrate_requests(config, real, seed=1)
    assert found.coefficients["prefill_tokens"] == pytest.approx(3, rel=0.2)
    for half in ("training", "held_out"):
        before, after = found.errors[half]["before"], found.errors[half]["after"]
        assert before["latency_mape"] > 0.1 > 0.02 > after["latency_mape"]
        assert abs(after["ttft_mean"]) < 0.05
    again = calibrate_requests(config, real, seed=1)
    assert again.residual == found.residual
    assert calibrate_requests(config, real, seed=2, evaluations=5).errors != found.errors


def test_the_command(requests, backend, tmp_path, cli):  # noqa: F811
    file, _, _ = requests
    log = write_log(tmp_path / "steps.jsonl", synthetic(backend, 300))
    out = tmp_path / "residual.yaml"
    done = cli("calibrate", log, "--config", file, "-o", out, "--engine", "made up")
    assert done.returncode == 0, done.stderr
    assert "on shapes it has not seen" in done.stdout
    assert load_residual(out).engine == "made up"
    page = (tmp_path / "residual.html").read_text(encoding="utf-8")
    assert "held-out error" in page and 'src="http' not in page
    used = cli("run", file, "--set", f"step_time.residual={out}", "--json")
    assert used.returncode == 0 and "made up" in json.loads(used.stdout)["step_time"]["source"]

    wrong = cli("calibrate", log, "--config", file, "-o", out, "--set", "step_time.backend=roofline")
    assert wrong.returncode == 2 and "expected measured or tables" in wrong.stderr
    assert cli("calibrate", tmp_path / "no.csv", "--config", file, "-o", out).returncode == 2
    assert cli("calibrate", log, "--config", file, "-o", tmp_path / "no" / "r.yaml").returncode == 2
