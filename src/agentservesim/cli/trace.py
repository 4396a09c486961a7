"""`agentservesim trace`: what a workload holds, the same in the native format, and a generator like it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agentservesim.cli.tables import console, count, percent, plain_table, seconds
from agentservesim.errors import InputError
from agentservesim.step_time.models import Model, model
from agentservesim.workload import BUNDLED, load_all
from agentservesim.workload.fit import learn, to_yaml
from agentservesim.workload.formats import find_files
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.statistics import Inspection, inspect
from agentservesim.workload.transforms import parse_transform, text_of, transform
from agentservesim.workload.transforms.anonymize import anonymize

TOOLS_SHOWN = 12


def inspect_command(
    files: list[str],
    format_name: str | None,
    lenient: bool,
    max_pause_s: float | None,
    model_name: str,
    json_output: bool,
) -> None:
    """Show, or print as JSON, the statistics of the files together, with the KV working set for a model."""
    known = model(model_name)
    workload = load_all(files, format_name, lenient, max_pause_s)
    found = inspect(workload.programs, workload.report)
    plain = {**found.to_dict(), "kv_working_set": _working_set(found, known)}
    if json_output:
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        _show(", ".join(files), plain)


def convert_command(
    files: list[str],
    out: Path,
    format_name: str | None,
    lenient: bool,
    max_pause_s: float | None,
    transforms: list[str],
    anonymous: bool,
) -> None:
    """Write the files' programs, transformed, to `out` in the native format."""
    specs = [parse_transform(spec) for spec in transforms]
    _refuse_input(files, out)
    workload = load_all(files, format_name, lenient, max_pause_s)
    programs = transform(workload.programs, specs, workload.report)
    try:
        written = write_native(anonymize(programs) if anonymous else programs, out)
    except OSError as error:
        raise InputError(f"-o {out}: cannot write: {error}") from None
    write_report(str(out), workload.report)
    for spec in specs:
        sys.stderr.write(f"  transform: {text_of(spec)}\n")
    if specs:
        sys.stderr.write(f"  written: {written} programs\n")
    if anonymous:
        sys.stderr.write("  anonymized: names of programs, turns, tools and prefix groups\n")


def fit_command(
    files: list[str],
    out: Path,
    name: str,
    format_name: str | None,
    lenient: bool,
    max_pause_s: float | None,
    anonymous: bool,
) -> None:
    """Write a generator learned from the files' programs to `out`."""
    _refuse_input(files, out)
    workload = load_all(files, format_name, lenient, max_pause_s)
    learned = learn(anonymize(workload.programs) if anonymous else workload.programs, name)
    try:
        out.write_text(to_yaml(learned.description), encoding="utf-8")
    except OSError as error:
        raise InputError(f"-o {out}: cannot write: {error.strerror or error}") from None
    write_report(str(out), workload.report)
    for note in learned.notes:
        sys.stderr.write(f"  not in the fit: {note}\n")


def _refuse_input(files: list[str], out: Path) -> None:
    inputs = [path for name in files if name not in BUNDLED for path in find_files(name)]
    if out.exists() and any(path.exists() and path.samefile(out) for path in inputs):
        raise InputError(f"-o {out}: is also an input; expected another file")


def _working_set(found: Inspection, known: Model) -> dict[str, Any]:
    """GiB of KV for the contexts that live programs hold, as `live_context_tokens` has them."""
    token_bytes = known.kv_bytes_per_token()
    last, live = found.last_context_tokens, found.live_context_tokens
    gib = token_bytes / 2**30
    return {
        "model": known.name,
        "bytes_per_token": token_bytes,
        "program_mean_gib": last.mean * gib if last else None,
        "program_max_gib": last.max * gib if last else None,
        "mean_gib": live.mean * gib if live else None,
        "max_gib": live.max * gib if live else None,
    }


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
    screen.print()
    for sentence in _sentences(plain):
        screen.print(sentence)
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


def _sentences(plain: dict[str, Any]) -> list[str]:
    """Sharing, concurrency and the KV working set in words."""
    sharing, live, kv = plain["sharing"], plain["live_programs"], plain["kv_working_set"]
    said = []
    if sharing["programs"]:
        said.append(
            f"shared across programs: {count(sharing['groups'])} prefix groups, in "
            f"{count(sharing['programs'])} programs, {count(sharing['tokens'])} tokens in sum"
        )
    else:
        said.append("shared across programs: nothing that the trace records")
    if live:
        said.append(
            f"live at a time, with an infinitely fast engine: {live['mean']:.1f} programs, "
            f"at most {count(live['max'])}"
        )
    if kv["program_mean_gib"] is not None:
        text = f"KV for {kv['model']}: {kv['program_mean_gib']:.2f} GiB for a program's last context"
        if kv["max_gib"] is not None:
            text += f", {kv['mean_gib']:.2f} GiB for all live ones, at most {kv['max_gib']:.2f}"
        said.append(text)
    return said
