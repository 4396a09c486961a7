"""`agentservesim compare`: every combination of policies on the same input, in one table."""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from typing import Any

from agentservesim.cli.configs import OPTION, open_config
from agentservesim.cli.progress import watch
from agentservesim.cli.run import INTERRUPTED, describe, expected_programs, incomplete
from agentservesim.cli.tables import change, console, count, percent, plain_table, seconds
from agentservesim.config import RunConfig
from agentservesim.policies import registry
from agentservesim.run import simulate
from agentservesim.step_time import StepTimeModel, build_step_time
from agentservesim.validation.paired_seeds import certainty, jct_difference, mean_summary, with_seeds


def compare_command(
    name: str, overrides: list[str], policies: dict[str, str | None], json_output: bool, seeds: int = 1
) -> int:
    """Returns the exit code: 3 when a run refused or lost calls."""
    base = open_config(name, overrides, {})
    configs = list(_combinations(base, policies))
    with_seeds(base, seeds)  # says before the first run if there is nothing to vary
    step_time = build_step_time(base)  # policies do not change it
    runs: list[dict[str, Any]] = []
    for number, config in enumerate(configs, start=1):
        labels = {axis: registry.label(axis, getattr(config.policies, axis)) for axis in registry.AXES}
        title = f"{number}/{len(configs)} {labels['retention']} + {labels['scheduling']}"
        summaries = _simulate(with_seeds(config, seeds), step_time, title)
        if summaries is None:
            sys.stderr.write(f"interrupted in run {number} of {len(configs)}: the finished ones follow\n")
            break
        runs.append({"policies": labels, "summary": summaries[0]})
        if seeds > 1:
            runs[-1]["seeds"] = summaries
        baseline = runs[0]["summary"]["jct_mean_s"]
        if baseline and runs[-1]["summary"]["jct_mean_s"] is not None:
            runs[-1]["jct_mean_change"] = runs[-1]["summary"]["jct_mean_s"] / baseline - 1
        if number > 1:
            runs[-1]["difference"] = jct_difference(runs[-1], runs[0])
    if json_output:
        sys.stdout.write(json.dumps({"runs": runs}, indent=2) + "\n")
    elif runs:
        _show(base, runs)
    if len(runs) < len(configs):
        return INTERRUPTED
    every = [summary for run in runs for summary in run.get("seeds", [run["summary"]])]
    failed = [summary for summary in every if summary["calls_refused"] or summary["calls_live"]]
    if failed:
        sys.stderr.write(incomplete(failed[0]))
    return 3 if failed else 0


def _simulate(configs: list[RunConfig], step_time: StepTimeModel, title: str) -> list[dict[str, Any]] | None:
    """A summary a seed; None after Ctrl-C."""
    summaries = []
    for number, config in enumerate(configs, start=1):
        seed = f", seed {number}/{len(configs)}" if len(configs) > 1 else ""
        with watch(title + seed, partial(expected_programs, config)) as on_progress:
            summary = simulate(config, None, on_progress, False, step_time).summary
        if summary["interrupted"]:
            return None
        summaries.append(summary)
    return summaries


def _combinations(base: RunConfig, policies: dict[str, str | None]) -> list[RunConfig]:
    """Every combination, the first axis varying slowest; all are built once, so that a wrong name is an
    error before the first run."""
    specs = {axis: registry.split_specs(text) for axis, text in policies.items() if text is not None}
    for axis, texts in specs.items():
        for text in texts:
            registry.build(axis, text)
    configs = []
    for combination in itertools.product(*specs.values()):
        configs.append(base.with_policies(dict(zip(specs, combination, strict=True)), OPTION))
    return configs


def _show(base: RunConfig, runs: list[dict[str, Any]]) -> None:
    screen = console()
    screen.print(f"[bold]{describe(base)}[/bold]")
    summary = runs[0]["summary"]
    screen.print(
        f"{summary['programs']} programs, {count(summary['calls'])} calls, KV pool of "
        f"{count(summary['kv_cache_tokens'])} tokens an instance; change against the first row",
        style="dim",
    )
    screen.print()
    axes = [axis for axis in registry.AXES if len({run["policies"][axis] for run in runs}) > 1] or [
        "retention",
        "scheduling",
    ]
    table = plain_table(
        *axes,
        "mean JCT",
        "change",
        "p50",
        "p99",
        "mean TTFT",
        "queueing",
        "prefix hits",
        "preempt.",
        "reclaims",
        numeric_from=len(axes),
    )
    rows = [mean_summary(run.get("seeds", [run["summary"]])) for run in runs]
    best = min(row["jct_mean_s"] or float("inf") for row in rows)
    for run, row in zip(runs, rows, strict=True):
        mean = seconds(row["jct_mean_s"])
        table.add_row(
            *(run["policies"][axis] for axis in axes),
            f"[bold green]{mean}[/bold green]" if row["jct_mean_s"] == best else mean,
            change(row["jct_mean_s"], rows[0]["jct_mean_s"]) if row is not rows[0] else "baseline",
            seconds(row["jct_p50_s"]),
            seconds(row["jct_p99_s"]),
            seconds(row["ttft_mean_s"]),
            seconds(row["queue_mean_s"]),
            percent(row["prefix_hit_rate"]),
            count(row["preemptions"]),
            count(row["protected_reclaims"]),
        )
    screen.print(table)
    screen.print()
    for line in certainty([" + ".join(run["policies"][axis] for axis in axes) for run in runs], runs):
        screen.print(line, markup=False)
    notice = summary["step_time"]["notice"]
    if notice:
        screen.print(f"\n[yellow]note:[/yellow] {notice}")
