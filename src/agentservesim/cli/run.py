"""`agentservesim run`: one config, one result."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from agentservesim.cli.configs import open_config
from agentservesim.cli.progress import watch
from agentservesim.cli.tables import (
    FIGURES,
    console,
    count,
    joules,
    percent,
    seconds,
    show_facts,
    show_figures,
)
from agentservesim.config import RunConfig
from agentservesim.policies import registry
from agentservesim.run import Result, simulate
from agentservesim.workload import generator_of

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def run_command(
    name: str, overrides: list[str], policies: dict[str, str | None], out: Path | None, json_output: bool
) -> int:
    """Returns the exit code: 3 when calls were refused or lost, INTERRUPTED after Ctrl-C."""
    config = open_config(name, overrides, policies)
    with watch("simulating", partial(expected_programs, config)) as on_progress:
        result = simulate(config, out, on_progress, keep_tables=False)
    if json_output:
        sys.stdout.write(json.dumps(result.summary, indent=2) + "\n")
    else:
        _show(result, out)
    if not result.complete:
        sys.stderr.write(incomplete(result.summary))
    if result.summary["interrupted"]:
        return INTERRUPTED
    return 0 if result.complete else 3


def expected_programs(config: RunConfig) -> int | None:
    """How many programs a run will have, where that can be told beforehand: from the config, or from the
    lines of a file that has one program a line."""
    if config.workload.transforms:
        return None
    if config.workload.programs is not None:
        return config.workload.programs
    description = generator_of(config.workload.source)
    if description is not None:
        return description.programs
    path = Path(config.workload.source)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        first = file.readline()
        native = b'"program_id"' in first and b'"turns"' in first
        if not native and b'"sub_requests"' not in first:  # other formats have several lines a program
            return None
        return 1 + sum(1 for line in file if line.strip())


def describe(config: RunConfig) -> str:
    """The run in a line: workload, hardware."""
    cluster = config.cluster
    gpus = f"{cluster.tp} × " if cluster.tp > 1 else ""
    instances = f"{cluster.instances} instances of " if cluster.instances > 1 else ""
    return f"{config.workload.source} on {instances}{gpus}{cluster.gpu}, {cluster.model}"


def incomplete(summary: dict[str, Any]) -> str:
    """What was refused or lost, in words."""
    lines = []
    if summary["interrupted"]:
        lines.append(
            f"interrupted: {summary['programs_live']} of {summary['programs']} programs that had arrived are "
            "unfinished; the figures are of the finished ones"
        )
    if summary["calls_refused"]:
        lines.append(
            f"warning: {summary['calls_refused']} of {summary['calls']} calls were refused, "
            f"{summary['programs_failed']} programs failed, "
            f"{summary['calls_not_released']} of their later calls never ran"
        )
        lines += [f"  {line}" for line in summary["refusals"][:5]]
        if summary["calls_refused"] > 5:
            lines.append(f"  … and {summary['calls_refused'] - 5} more, in calls.parquet (--out)")
    if summary["calls_live"] and not summary["interrupted"]:
        lines.append(
            f"warning: {summary['calls_live']} of {summary['calls']} calls were still live when nothing more "
            "could happen"
        )
        lines += [f"  {line}" for line in summary["lost"][:5]]
        if summary["calls_live"] > 5:
            lines.append(f"  … and {summary['calls_live'] - 5} more, in calls.parquet (--out)")
    return "".join(line + "\n" for line in lines)


def _show(result: Result, out: Path | None) -> None:
    summary = result.summary
    screen = console()
    screen.print(f"[bold]{describe(result.config)}[/bold]")
    chosen = [
        f"{axis} {registry.label(axis, getattr(result.config.policies, axis))}" for axis in registry.AXES
    ]
    screen.print(", ".join(chosen), style="dim")
    screen.print()
    show_figures(screen, summary, FIGURES)
    show_facts(screen, _facts(summary))
    if summary["step_time"]["notice"]:
        screen.print(f"\n[yellow]note:[/yellow] {summary['step_time']['notice']}")
    if out is not None:
        screen.print(f"\nwritten to {out}: config.yaml, summary.json, programs, calls and decisions.parquet")


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The run in sentences, a label each."""
    step_time = summary["step_time"]
    return [
        (
            "programs",
            f"{summary['programs_completed']} of {summary['programs']} completed "
            f"in {seconds(summary['makespan_s'])} of simulated time",
        ),
        (
            "calls",
            f"{count(summary['calls_completed'])} of {count(summary['calls'])} completed, "
            f"{count(summary['preemptions'])} preemptions",
        ),
        (
            "prompt tokens",
            f"{count(summary['prompt_tokens'])}, {percent(summary['prefix_hit_rate'])} from the prefix cache",
        ),
        (
            "output tokens",
            f"{count(summary['output_tokens'])}, {count(summary['output_tokens_per_s'])} per second",
        ),
        (
            "KV pool",
            f"{count(summary['kv_cache_tokens'])} tokens an instance, "
            f"{percent(summary['kv_utilization_mean'], 0)} used on average, "
            f"{percent(summary['kv_utilization_max'], 0)} at most, "
            f"{count(summary['protected_reclaims'])} protected entries reclaimed",
        ),
        (
            "GPUs",
            f"busy {percent(summary['busy_fraction'], 0)} of the time, "
            f"{joules(summary['energy_joules'])} (a model, not a measurement)",
        ),
        ("step time", f"{step_time['backend']}: {step_time['source']}"),
        ("coverage", f"{percent(step_time['coverage'], 0)} of the time inside what was measured and fitted"),
        ("expected error", step_time["expected_error"]["words"]),
        (
            "simulated by",
            f"{count(summary['engine_steps'])} engine steps in {seconds(summary['sim_wall_s'])}",
        ),
    ]
