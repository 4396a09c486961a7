"""`agentservesim trace`: what a workload holds, and the same in the native format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agentservesim.cli.tables import console, count, percent, plain_table, seconds
from agentservesim.errors import InputError
from agentservesim.workload import BUNDLED, load_all
from agentservesim.workload.formats import find_files
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.statistics import inspect

TOOLS_SHOWN = 12


def inspect_command(
    files: list[str], format_name: str | None, lenient: bool, max_pause_s: float | None, json_output: bool
) -> None:
    """Show, or print as JSON, the statistics of the files together."""
    workload = load_all(files, format_name, lenient, max_pause_s)
    plain = inspect(workload.programs, workload.report).to_dict()
    if json_output:
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        _show(", ".join(files), plain)


def convert_command(
    files: list[str], out: Path, format_name: str | None, lenient: bool, max_pause_s: float | None
) -> None:
    """Write the files' programs to `out` in the native format."""
    if out.exists() and any(path.exists() and path.samefile(out) for path in _inputs(files)):
        raise InputError(f"-o {out}: is also an input; expected another file")
    workload = load_all(files, format_name, lenient, max_pause_s)
    try:
        write_native(workload.programs, out)
    except OSError as error:
        raise InputError(f"-o {out}: cannot write: {error}") from None
    write_report(str(out), workload.report)


def _inputs(files: list[str]) -> list[Path]:
    return [path for name in files if name not in BUNDLED for path in find_files(name)]


def write_report(title: str, report: ReadingReport) -> None:
    """Say on stderr what was read, and what was dropped, estimated, clamped or inferred."""
    sys.stderr.write(f"{title}: {report.programs} programs, {report.turns} turns\n")
    for kind, reasons in report.to_dict().items():
        if isinstance(reasons, dict):
            for reason, number in reasons.items():
                sys.stderr.write(f"  {kind}: {number} × {reason}\n")


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
