"""Paired seeds: intervals against SciPy, and what compare says of a difference."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from agentservesim import parse_config
from agentservesim.errors import InputError
from agentservesim.step_time.known_errors import KNOWN, expected_error
from agentservesim.validation.paired_seeds import difference, with_seeds
from agentservesim.validation.students_t import t_quantile
from helpers import chain, config_dict, write_config, write_native
from in_process import cli  # noqa: F401


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 9, 30, 101])
def test_quantiles_of_students_t(degrees):
    for probability in (0.5, 0.75, 0.9, 0.975, 0.9995):
        expected = stats.t.ppf(probability, degrees)
        assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 10, 25])
def test_the_interval_is_that_of_a_paired_t_test(count):
    rng = np.random.default_rng(count)
    baseline = rng.normal(100, 10, count)
    values = baseline * 0.97 + rng.normal(0, 2, count)
    found = difference(values.tolist(), baseline.tolist())
    test = stats.ttest_rel(values, baseline)
    low, high = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.mean == pytest.approx((values - baseline).mean())
    assert found.relative == pytest.approx((values - baseline).mean() / baseline.mean())
    assert found.shown == (test.pvalue < 0.05)


def test_when_no_difference_is_shown():
    assert difference([90.0], [100.0]).why == "one seed shows no interval"
    assert "includes 0" in difference([90.0, 110.0], [100.0, 101.0]).why
    sure = ([99.0, 98.9, 99.1], [100.0, 99.9, 100.0])
    assert difference(*sure).shown
    assert "below the model's error on ratios, 2.0%" in difference(*sure, ratio_error=0.02).why
    assert difference([5.0, 6.0], [5.0, 6.0]).why == "the runs are alike under every seed"


def test_seeds_vary_the_arrivals_and_nothing_else(tmp_path):
    source = write_native(tmp_path / "work.jsonl", [chain("a", 2)])
    poisson = {"source": str(source), "arrivals": {"process": "poisson", "rate_per_s": 1.0, "seed": 7}}
    configs = with_seeds(parse_config(config_dict(source, workload=poisson)), 3)
    assert [c.workload.arrivals.seed for c in configs] == [7, 8, 9]
    assert len({c.model_copy(update={"workload": None}).model_dump_json() for c in configs}) == 1
    bundled = {"source": "examples/bfcl-like", "arrivals": {"process": "closed_loop", "lanes": 2}}
    configs = with_seeds(parse_config(config_dict(source, workload=bundled)), 2)
    assert [c.workload.seed for c in configs] == [0, 1]
    with pytest.raises(InputError, match="nothing depends on a seed"):
        with_seeds(parse_config(config_dict(source)), 2)


@pytest.fixture
def config(tmp_path):
    work = [chain(f"p{n}", 4, first=200, new=100, output=20, gap_s=0.3) for n in range(12)]
    source = write_native(tmp_path / "work.jsonl", work)
    arrivals = {"process": "poisson", "rate_per_s": 4.0, "seed": 1}
    data = config_dict(
        source,
        workload={"arrivals": arrivals},
        cluster={"kv_cache_tokens": 4096},
        engine={"max_num_seqs": 4},
    )
    return write_config(tmp_path / "run.yaml", data)


def test_compare_with_seeds(config, cli):  # noqa: F811
    done = cli("compare", config, "--scheduling", "fcfs,program-fcfs,plas", "--seeds", "4", "--json")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [len(run["seeds"]) for run in runs] == [4, 4, 4]
    assert all(run["summary"] == run["seeds"][0] for run in runs)
    baseline = [summary["jct_mean_s"] for summary in runs[0]["seeds"]]
    assert len(set(baseline)) == 4
    for run in runs[1:]:
        values = [summary["jct_mean_s"] for summary in run["seeds"]]
        interval = stats.ttest_rel(values, baseline).confidence_interval(0.95)
        assert run["difference"]["ci95_s"] == pytest.approx(list(interval))
        assert run["difference"]["jct_mean_s"] == pytest.approx(np.mean(values) - np.mean(baseline))
    shown = cli("compare", config, "--scheduling", "fcfs,program-fcfs", "--seeds", "3")
    assert "95 % interval" in shown.stdout and "3 seeds" in shown.stdout


def test_one_seed_says_that_it_shows_no_interval(config, cli):  # noqa: F811
    done = cli("compare", config, "--scheduling", "fcfs,plas")
    assert done.returncode == 0 and "one seed shows no interval" in done.stdout
    assert "expected error: " in done.stdout
    found = json.loads(cli("compare", config, "--scheduling", "fcfs,plas", "--json").stdout)["runs"]
    assert found[1]["difference"]["ci95_s"] is None and "seeds" not in found[1]


def test_seeds_that_change_nothing_are_refused(config, cli):  # noqa: F811
    done = cli(
        "compare", config, "--set", "workload.arrivals={process: closed_loop, lanes: 2}", "--seeds", "3"
    )
    assert done.returncode == 2 and "--seeds 3" in done.stderr
    assert cli("compare", config, "--seeds", "0").returncode == 2


def test_the_expected_error_is_in_the_summary(config, cli):  # noqa: F811
    summary = json.loads(cli("run", config, "--json").stdout)
    assert summary["step_time"]["expected_error"]["jct_mean"] is None
    assert "given coefficients" in summary["step_time"]["expected_error"]["words"]


def test_known_errors_are_found_by_back_end_gpu_and_kind_of_model(tmp_path):
    source = write_native(tmp_path / "work.jsonl", [chain("a", 2)])
    for known in KNOWN:
        name = "qwen3-30b-a3b" if known.experts else "llama-3.1-70b"
        config = parse_config(config_dict(source, cluster={"gpu": known.gpu, "model": name, "tp": 2}))
        found = expected_error(config, known.backend)
        assert found.jct_mean == known.typical
        assert known.gpu in found.words and known.backend in found.words and known.what in found.words
    config = parse_config(config_dict(source, cluster={"gpu": "a100_sxm"}))
    assert expected_error(config, "measured").words.startswith("not known")
