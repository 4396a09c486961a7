"""`agentservesim trace`: what a workload holds, and the same in the native format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from agentservesim.cli.tables import console, count, percent, plain_table, seconds
from agentservesim.config import WorkloadConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload import Workload, load_programs
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.statistics import inspect

TOOLS_SHOWN = 12


def inspect_command(files: list[str], format_name: str | None, json_output: bool) -> None:
    """Show, or print as JSON, the statistics of the files together."""
    workloads = _open(files, format_name)
    programs = chain.from_iterable(workload.programs for workload in workloads)
    plain = inspect(programs).to_dict()
    _merge_reports(plain, [workload.report for workload in workloads])
    if json_output:
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        _show(", ".join(files), plain)


def convert_command(files: list[str], out: Path, format_name: str | None) -> None:
    """Write the files' programs to `out` in the native format."""
    if out.exists() and any(Path(name).exists() and Path(name).samefile(out) for name in files):
        raise InputError(f"-o {out}: is also an input; expected another file")
    workloads = _open(files, format_name)
    try:
        write_native(_distinct(workloads), out)
    except OSError as error:
        raise InputError(f"-o {out}: cannot write: {error}") from None
    reports = [workload.report for workload in workloads]
    programs, turns = sum(report.programs for report in reports), sum(report.turns for report in reports)
    sys.stderr.write(f"{out}: {programs} programs, {turns} turns\n")
    counts: dict[str, Any] = {}
    _merge_reports(counts, reports)
    for kind, reasons in counts.items():
        for reason, number in reasons.items():
            sys.stderr.write(f"  {kind}: {number} × {reason}\n")


def _open(files: list[str], format_name: str | None) -> list[Workload]:
    return [load_programs(WorkloadConfig(source=name, format=format_name)) for name in files]


def _distinct(workloads: list[Workload]) -> Iterator[Program]:
    """All programs; an id used by two files is an error, since one workload needs it unique."""
    seen: dict[str, str] = {}
    for workload in workloads:
        for program in workload.programs:
            if program.program_id in seen:
                raise InputError(
                    f"{workload.name}: program_id {program.program_id!r} is also in "
                    f"{seen[program.program_id]}; expected ids unique over all files"
                )
            seen[program.program_id] = workload.name
            yield program


def _merge_reports(plain: dict[str, Any], reports: list[ReadingReport]) -> None:
    for kind in ("dropped", "estimated", "clamped", "inferred"):
        merged: dict[str, int] = {}
        for report in reports:
            for reason, number in getattr(report, kind).items():
                merged[reason] = merged.get(reason, 0) + number
        plain[kind] = merged


def _show(title: str, plain: dict[str, Any]) -> None:
    screen = console()
    screen.print(f"[bold]{title}[/bold]")
    screen.print(
        f"{count(plain['programs'])} programs, {count(plain['calls'])} calls, "
        f"{count(plain['prompt_tokens'])} prompt tokens "
        f"({percent(plain['structural_reuse'])} structurally reusable), "
        f"{count(plain['output_tokens'])} output tokens\n"
    )
    table = plain_table("", "mean", "p50", "p90", "p99", "max")
    for label, key, show in (
        ("turns a program", "turns_per_program", count),
        ("prompt tokens a call", "prompt_tokens_per_call", count),
        ("output tokens a call", "output_tokens_per_call", count),
        ("gap after a call", "gap_s", seconds),
    ):
        if plain[key]:
            table.add_row(label, *(show(plain[key][q]) for q in ("mean", "p50", "p90", "p99", "max")))
    screen.print(table)
    tools = sorted(plain["tools"].items(), key=lambda item: (-item[1]["total_s"], item[0]))
    if tools:
        screen.print()
        table = plain_table("tool", "calls", "total", "mean")
        for name, use in tools[:TOOLS_SHOWN]:
            table.add_row(
                name, count(use["calls"]), seconds(use["total_s"]), seconds(use["total_s"] / use["calls"])
            )
        if len(tools) > TOOLS_SHOWN:
            rest = [use for _, use in tools[TOOLS_SHOWN:]]
            table.add_row(
                f"{len(rest)} more",
                count(sum(u["calls"] for u in rest)),
                seconds(sum(u["total_s"] for u in rest)),
                "",
            )
        screen.print(table)
    for kind in ("dropped", "estimated", "clamped", "inferred"):
        for reason, number in plain[kind].items():
            screen.print(f"{kind}: {count(number)} × {reason}", style="dim")
    for warning in plain["warnings"]:
        screen.print(f"[yellow]warning:[/yellow] {warning}")
