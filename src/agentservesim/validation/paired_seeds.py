"""Whether two policies differ by more than seeds do, and by more than the model's error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentservesim.config import DRAWN, RunConfig
from agentservesim.errors import InputError
from agentservesim.validation.students_t import t_quantile
from agentservesim.workload import generator_of

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """Values under a policy minus those under the baseline, paired by seed.

    mean, low, high   of the difference, with its confidence interval (Student's t); no interval from one seed
    relative          mean difference / mean of the baseline
    shown             whether the data show a difference; `why` says what speaks against it
    """

    seeds: int
    mean: float
    low: float | None
    high: float | None
    relative: float
    shown: bool
    why: str


def difference(
    values: Sequence[float], baseline: Sequence[float], ratio_error: float | None = None
) -> Difference:
    """The paired difference. `ratio_error` is the error of a ratio of two results of the back end, as a
    share: a smaller difference is not shown, whatever the seeds say."""
    count = len(values)
    if count != len(baseline) or not count:
        raise ValueError(
            f"{count} values and {len(baseline)} baselines; expected as many of each, at least one"
        )
    differences = [value - other for value, other in zip(values, baseline, strict=True)]
    mean = math.fsum(differences) / count
    base = math.fsum(baseline) / count
    relative = mean / base if base else 0.0
    if count == 1:
        return Difference(1, mean, None, None, relative, False, "one seed shows no interval")
    variance = math.fsum((value - mean) ** 2 for value in differences) / (count - 1)
    half = t_quantile((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(variance / count)
    low, high = mean - half, mean + half
    if not any(differences):
        why = "the runs are alike under every seed"
    elif low <= 0 <= high:
        why = f"the {CONFIDENCE:.0%} interval includes 0"
    elif ratio_error is not None and abs(relative) < ratio_error:
        why = f"it is below the model's error on ratios, {ratio_error:.1%}"
    else:
        why = ""
    return Difference(count, mean, low, high, relative, not why, why)


def with_seeds(config: RunConfig, count: int) -> list[RunConfig]:
    """The config under `count` seeds, the first its own: workload.arrivals.seed where arrivals are drawn,
    else workload.seed where the workload is generated.

    Raises InputError where nothing of the run depends on a seed and `count` is above 1.
    """
    workload = config.workload
    drawn = workload.arrivals.process in DRAWN
    generated = generator_of(workload.source) is not None
    if count > 1 and not (drawn or generated):
        raise InputError(
            f"--seeds {count}: workload.arrivals.process is {workload.arrivals.process!r} and "
            f"{workload.source} is read from a file, so nothing depends on a seed; expected --seeds 1, or "
            f"arrivals that are {', '.join(DRAWN)}"
        )
    configs = []
    for step in range(count):
        change: dict[str, object] = {}
        if drawn:
            seed = workload.arrivals.seed + step
            change["arrivals"] = workload.arrivals.model_copy(update={"seed": seed})
        elif generated:
            change["seed"] = workload.seed + step
        configs.append(config.model_copy(update={"workload": workload.model_copy(update=change)}))
    return configs


def jct_difference(run: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any] | None:
    """The difference in mean JCT of two runs of `compare`: each has `summary`, and `seeds`, a summary a seed,
    if it has several. None where no program completed."""
    values, others = (
        [summary["jct_mean_s"] for summary in one.get("seeds", [one["summary"]])] for one in (run, baseline)
    )
    if None in values or None in others:
        return None
    ratio = run["summary"]["step_time"]["expected_error"]["ratio"]
    found = difference(values, others, ratio)
    return {
        "seeds": found.seeds,
        "jct_mean_s": found.mean,
        "ci95_s": None if found.low is None else [found.low, found.high],
        "relative": found.relative,
        "shown": found.shown,
        "why": found.why,
    }


def mean_summary(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means over seeds of a summary's numbers; None where a seed has none."""
    numeric = {
        key
        for key, value in summaries[0].items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
    means: dict[str, Any] = {}
    for key in numeric:
        values = [summary[key] for summary in summaries]
        means[key] = None if None in values else math.fsum(values) / len(values)
    return means


def certainty(labels: Sequence[str], runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines below the table of `compare`: what the differences from its first row are worth."""
    lines = []
    for label, run in zip(labels[1:], runs[1:], strict=True):
        found = run["difference"]
        if found is None or found["ci95_s"] is None:
            continue
        low, high = found["ci95_s"]
        line = f"{label}: {found['jct_mean_s']:+.3g} s mean JCT, 95 % interval {low:+.3g} to {high:+.3g} s"
        lines.append(line if found["shown"] else f"{line}: no difference shown, {found['why']}")
    seeds = len(runs[0].get("seeds", [1]))
    if len(runs) > 1 and seeds == 1:
        lines.append("one seed shows no interval: --seeds 10 tells policies from chance")
    elif len(runs) > 1:
        lines.append(f"{seeds} seeds, the same for every row; figures are their means")
    error = runs[0]["summary"]["step_time"]["expected_error"]
    lines.append(f"expected error: {error['words']}")
    if error["ratio"] is not None and len(runs) > 1:
        small = [
            label
            for label, run in zip(labels[1:], runs[1:], strict=True)
            if run["difference"]
            and run["difference"]["ci95_s"] is None
            and abs(run["difference"]["relative"]) < error["ratio"]
        ]
        if small:
            lines.append(f"below the model's error on ratios, {error['ratio']:.1%}: {'; '.join(small)}")
    return lines
