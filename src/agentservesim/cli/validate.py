"""`agentservesim validate`: a real run beside its simulation."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from agentservesim.cli.configs import open_config
from agentservesim.cli.progress import watch
from agentservesim.cli.run import expected_programs
from agentservesim.cli.tables import console, count, plain_table, seconds, signed
from agentservesim.validation.validate import Validation, validate

NAMED = 20
MEASURES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "latency"), ("jct", "JCT"))


def validate_command(name: str, real: Path, overrides: list[str], out: Path | None, json_output: bool) -> int:
    """Returns the exit code: 3 when a call on either side has no partner."""
    config = open_config(name, overrides, {})
    with watch("simulating", partial(expected_programs, config)) as on_progress:
        result = validate(config, real, on_progress)
    if out is not None:
        result.write(out)
    if json_output:
        sys.stdout.write(json.dumps(result.as_dict(), indent=2) + "\n")
    else:
        _show(result, out)
    if not result.complete:
        sys.stderr.write(_unpaired(result))
    return 0 if result.complete else 3


def _show(result: Validation, out: Path | None) -> None:
    screen = console()
    real, simulated, errors = (result.numbers[key] for key in ("real", "simulated", "errors"))
    start = "engine's queue" if result.real.since == "queued" else "release"
    screen.print(f"[bold]{result.real.path}[/bold] and its simulation")
    screen.print(f"{count(len(result.pairing.pairs))} calls paired; times from the {start}", style="dim")
    screen.print()
    table = plain_table("", "real", "simulated", "error", "MAPE")
    for key, label in MEASURES:
        for statistic in ("mean", "p50", "p90", "p99"):
            entry = f"{key}_{statistic}"
            table.add_row(
                f"{label} {statistic}",
                seconds(real[f"{entry}_s"]),
                seconds(simulated[f"{entry}_s"]),
                signed(errors[entry]),
                signed(errors[f"{key}_mape"]).lstrip("+") if statistic == "mean" else "",
            )
    table.add_row(
        "ITL mean",
        seconds(real["itl_mean_s"]),
        seconds(simulated["itl_mean_s"]),
        signed(errors["itl_mean"]),
        "",
    )
    for key, label in (("output_tokens_per_s", "output tokens/s"), ("calls_per_s", "calls/s")):
        table.add_row(label, _rate(real[key]), _rate(simulated[key]), signed(errors[key]), "")
    screen.print(table)
    screen.print()
    for sentence in result.findings:
        screen.print(f"- {sentence}", markup=False, highlight=False, soft_wrap=True)
    step_time = result.summary["step_time"]
    screen.print(f"\nstep times: {step_time['source']}", style="dim", markup=False)
    if step_time["notice"]:
        screen.print(f"[yellow]note:[/yellow] {step_time['notice']}")
    if out is not None:
        screen.print(f"written to {out}: report.html, paired.parquet, paired.csv, validation.json")


def _unpaired(result: Validation) -> str:
    pairing = result.pairing
    lines = [
        f"{len(pairing.real_alone)} calls of the real run and {len(pairing.simulated_alone)} simulated ones "
        "have no partner; they are left out"
    ]
    named = [*pairing.real_alone, *pairing.simulated_alone]
    lines += [f"  {name}" for name in named[:NAMED]]
    if len(named) > NAMED:
        lines.append(f"  and {len(named) - NAMED} more")
    lines += [f"  refused: {reason}" for reason in result.summary["refusals"]]
    return "\n".join(lines) + "\n"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}"
