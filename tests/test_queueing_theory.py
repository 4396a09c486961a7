"""With one-token requests and one slot, an instance is a textbook queue: its waiting times are known.

Two kinds of evidence. On every sample path waiting obeys Lindley's recursion, exactly. And the means and
probabilities agree with the formulas within a confidence interval of independent replications, each
thrown away until the queue has forgotten that it started empty; the intervals are narrow enough to tell
M/D/1 from M/M/1, and from the same queue at a load a few per cent off.
"""

from __future__ import annotations

import math
import random
from functools import cache

import numpy as np
import pytest
from scipy import stats

from helpers import rows, run

REPLICATIONS = 16
CALLS = 1200
WARM_UP = 200
CONFIDENCE = 0.99
"""Of each interval. The seeds are fixed, so a test that passes passes always."""

SERVICE_S = 0.5
TOKENS = 20_000
"""Mean prompt of an M/M/1 request: fine enough to call its length continuous."""


def one_token(prompt_tokens):
    return [
        {"program_id": str(n), "turns": [{"prompt_tokens": tokens, "output_tokens": 1}]}
        for n, tokens in enumerate(prompt_tokens)
    ]


def queue(folder, prompt_tokens, utilization, seed, *, base_s=0.0, per_prefill_token_s=0.0):
    """The calls of an M/G/1 run in order of arrival, and the run's result."""
    result = run(
        folder,
        one_token(prompt_tokens),
        workload={"arrivals": {"process": "poisson", "rate_per_s": utilization / SERVICE_S, "seed": seed}},
        cluster={"kv_cache_tokens": 1 << 24},
        engine={"max_num_seqs": 1, "max_num_batched_tokens": 1 << 20, "max_model_len": 1 << 22},
        step_time={"base_s": base_s, "per_prefill_token_s": per_prefill_token_s, "per_decode_s": 0.0},
    )
    calls = sorted(rows(result), key=lambda row: row["released_s"])
    assert result.complete and len(calls) == len(prompt_tokens)
    return calls, result


def md1(folder, utilization, seed, calls=CALLS):
    return queue(folder, [1] * calls, utilization, seed, base_s=SERVICE_S)


def mm1(folder, utilization, seed, calls=CALLS):
    rng = random.Random(f"service/{seed}")
    prompts = [max(1, round(rng.expovariate(1 / TOKENS))) for _ in range(calls)]
    return queue(folder, prompts, utilization, seed, per_prefill_token_s=SERVICE_S / TOKENS)


@pytest.fixture(scope="module")
def replications(tmp_path_factory):
    """The waiting times of each replication, once the queue is warm."""

    @cache
    def measure(kind, utilization):
        folder = tmp_path_factory.mktemp("queue")
        return [waits(kind(folder, utilization, seed)[0])[WARM_UP:] for seed in range(REPLICATIONS)]

    return measure


def waits(calls):
    return np.array([row["scheduled_s"] - row["released_s"] for row in calls])


def services(calls):
    return np.array([row["completed_s"] - row["scheduled_s"] for row in calls])


def interval(values):
    """Mean of independent replications and the half-width of its confidence interval."""
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half)


def assert_agrees(values, expected, relative_width):
    """`expected` lies in the interval, and the interval is narrow enough for that to say something."""
    mean, half = interval(values)
    assert half < relative_width * expected, f"interval {mean} ± {half} is too wide to test {expected}"
    assert abs(mean - expected) <= half, f"measured {mean} ± {half}, expected {expected}"


@pytest.mark.parametrize("kind", [md1, mm1])
@pytest.mark.parametrize("utilization", [0.3, 0.8])
def test_every_wait_follows_lindleys_recursion(tmp_path, kind, utilization):
    calls, _ = kind(tmp_path, utilization, seed=99)
    arrived = [row["released_s"] for row in calls]
    wait = waits(calls)
    service = services(calls)
    expected = [0.0]
    for n in range(1, len(calls)):
        expected.append(max(0.0, expected[-1] + service[n - 1] - (arrived[n] - arrived[n - 1])))
    assert max(wait) > 2 * SERVICE_S
    np.testing.assert_allclose(wait, expected, atol=1e-6)


@pytest.mark.parametrize(("utilization", "width"), [(0.3, 0.10), (0.6, 0.12), (0.8, 0.20)])
def test_md1_mean_wait(replications, utilization, width):
    """Wq = rho D / (2 (1 - rho)), and a call finds the server free with probability 1 - rho."""
    measured = replications(md1, utilization)
    assert_agrees([w.mean() for w in measured], utilization * SERVICE_S / (2 * (1 - utilization)), width)
    assert_agrees([(w == 0).mean() for w in measured], 1 - utilization, 0.15)


@pytest.mark.parametrize(("utilization", "width"), [(0.3, 0.20), (0.6, 0.25), (0.8, 0.30)])
def test_mm1_wait(replications, utilization, width):
    """Wq = rho / (mu - lambda); P(W = 0) = 1 - rho; P(W > t) = rho exp(-(mu - lambda) t)."""
    rate = (1 - utilization) / SERVICE_S
    measured = replications(mm1, utilization)
    assert_agrees([w.mean() for w in measured], utilization / rate, width)
    assert_agrees([(w == 0).mean() for w in measured], 1 - utilization, 0.15)
    for share in (0.5, 0.1):
        beyond_s = -math.log(share) / rate
        assert_agrees([(w > beyond_s).mean() for w in measured], share * utilization, 0.7)


def test_md1_waits_half_as_long_as_mm1(replications):
    """The Pollaczek-Khinchine formula: waiting grows with 1 + cv² of the service time."""
    fixed, exponential = (interval([w.mean() for w in replications(kind, 0.6)]) for kind in (md1, mm1))
    assert fixed[0] + fixed[1] < exponential[0] - exponential[1]
    assert exponential[0] / fixed[0] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("kind", [md1, mm1])
def test_littles_law(tmp_path, kind):
    """Over a run that starts and ends empty, the time average of the number in the system is the
    arrival rate times the mean sojourn: exactly, whatever the distributions."""
    calls, result = kind(tmp_path, 0.6, seed=7)
    end_s = result.summary["makespan_s"]
    changes = sorted([(row["released_s"], 1) for row in calls] + [(row["completed_s"], -1) for row in calls])
    area, level, since_s = 0.0, 0, 0.0
    for at_s, change in changes:
        area += level * (at_s - since_s)
        level, since_s = level + change, at_s
    assert level == 0 and since_s == pytest.approx(end_s)
    assert area / end_s == pytest.approx(len(calls) / end_s * result.summary["call_latency_mean_s"], rel=1e-9)
    assert result.summary["queue_mean_s"] == pytest.approx(waits(calls).mean(), rel=1e-9)
    assert result.summary["busy_fraction"] == pytest.approx(services(calls).sum() / end_s, rel=1e-9)
