"""The numbers of a run, by the names other tools rely on."""

from __future__ import annotations

import resource
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentservesim.engine.instance import Instance
from agentservesim.results.recorder import Recorder


def call_figures(recorder: Recorder) -> dict[str, Any]:
    """What calls and programs came to: the part of summary.json that a real run has too. Times in seconds
    since the run's start. Quantiles interpolate linearly. A mean or quantile of nothing is None.

    makespan_s        from the run's start to the last completion
    queue_mean_s      release to first scheduled
    """
    makespan_s = recorder.last_completion_s
    return {
        "programs": recorder.programs,
        "programs_completed": recorder.programs_completed,
        "programs_failed": recorder.programs_failed,
        "programs_live": recorder.programs - recorder.programs_completed - recorder.programs_failed,
        "calls": recorder.calls_released,
        "calls_completed": recorder.calls_completed,
        "calls_refused": recorder.calls_refused,
        "calls_live": recorder.live_calls,
        "calls_not_released": recorder.calls_not_released,
        "refusals": recorder.refusals,
        "lost": recorder.lost,
        **statistics("jct", recorder.jct_s, 50, 90, 99),
        **statistics("ttft", recorder.ttft_s, 50, 90, 99),
        **statistics("tpot", recorder.tpot_s, 50, 90, 99),
        "call_latency_mean_s": _mean(recorder.latency_s),
        "queue_mean_s": _mean(recorder.queue_s),
        "makespan_s": makespan_s,
        "output_tokens": recorder.output_tokens,
        "output_tokens_per_s": recorder.output_tokens / makespan_s if makespan_s else None,
        "prompt_tokens": recorder.prompt_tokens,
        "prefix_hit_tokens": recorder.hit_tokens,
        "prefix_hit_rate": recorder.hit_tokens / recorder.prompt_tokens if recorder.prompt_tokens else None,
        "preemptions": recorder.preemptions,
    }


def summarize(
    recorder: Recorder, instances: Sequence[Instance], end_s: float, sim_wall_s: float
) -> dict[str, Any]:
    """summary.json: `call_figures`, and what the simulated instances spent. sim_wall_s and peak_rss_bytes are
    measured on the machine that ran the simulation; other times are simulated.

    energy_joules     joules of the steps plus idle power for the rest of the makespan
    protected_reclaims    protected entries that lost blocks to an allocation, each counted once
    decisions         rows of decisions.parquet, by event
    """
    makespan_s = recorder.last_completion_s
    usages = [instance.usage for instance in instances]
    busy_s = sum(usage.busy_s for usage in usages)
    for instance in instances:
        instance.usage.observe(end_s, instance.scheduler.block_pool)
    capacity = sum(usage.num_usable_blocks for usage in usages)
    joules = sum(
        instance.usage.joules + instance.step_time.idle_watts * max(makespan_s - instance.usage.busy_s, 0.0)
        for instance in instances
    )
    step_time = instances[0].step_time
    return {
        **call_figures(recorder),
        "protected_reclaims": sum(
            instance.scheduler.kv_cache.parking.num_reclaimed for instance in instances
        ),
        "decisions": dict(sorted(recorder.events.items())),
        "kv_cache_tokens": instances[0].capacity_tokens,
        "kv_utilization_mean": sum(usage.kv_block_s for usage in usages) / (capacity * end_s)
        if end_s
        else 0.0,
        "kv_utilization_max": max(usage.kv_blocks_max / usage.num_usable_blocks for usage in usages),
        "energy_joules": joules,
        "engine_steps": sum(usage.steps for usage in usages),
        "busy_fraction": busy_s / (len(instances) * end_s) if end_s else 0.0,
        "sim_wall_s": sim_wall_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "step_time": {
            "backend": step_time.backend,
            "source": step_time.source,
            "coverage": sum(usage.in_grid_s for usage in usages) / busy_s if busy_s else None,
            "notice": step_time.notice,
        },
    }


def statistics(name: str, values: array[float], *percentiles: int) -> dict[str, float | None]:
    """Mean and percentiles of a measure, by the keys of summary.json."""
    found: dict[str, float | None] = {f"{name}_mean_s": _mean(values)}
    quantiles = np.percentile(values, percentiles) if values else [None] * len(percentiles)
    for percentile, value in zip(percentiles, quantiles, strict=True):
        found[f"{name}_p{percentile}_s"] = None if value is None else float(value)
    return found


def _mean(values: array[float]) -> float | None:
    return float(np.mean(values)) if values else None


def peak_rss_bytes() -> int:
    """The most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
