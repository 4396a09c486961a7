"""`agentservesim calibrate`: a residual for one's own GPU, model and engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agentservesim.cli.configs import open_config
from agentservesim.cli.tables import console, plain_table, signed
from agentservesim.config import RunConfig
from agentservesim.errors import InputError
from agentservesim.step_time.residual import Residual

MEASURES = ("ttft_mean", "tpot_mean", "latency_mean", "ttft_p99", "latency_p99", "tpot_mape", "latency_mape")


def calibrate_command(
    file: Path,
    name: str,
    overrides: list[str],
    out: Path,
    from_requests: bool,
    plot: Path | None,
    engine: str,
    seed: int,
    json_output: bool,
) -> int:
    """Returns the exit code."""
    config = open_config(name, overrides, {})
    if not out.parent.is_dir():
        raise InputError(f"-o {out}: no such folder: {out.parent}; expected the name of a file to write")
    if from_requests:
        return _from_requests(config, file, out, engine, seed, json_output)
    if config.step_time.backend == "linear":
        return _linear(file, out, engine, json_output)
    return _from_steps(config, file, out, plot, engine, json_output)


def _from_steps(
    config: RunConfig, file: Path, out: Path, plot: Path | None, engine: str, json_output: bool
) -> int:
    from agentservesim.validation.calibrate import calibrate_steps
    from agentservesim.validation.step_report import write_step_report

    fitted, steps, residual = calibrate_steps(config, file, engine)
    out.write_text(residual.to_yaml(), encoding="utf-8")
    page = plot or out.with_suffix(".html")
    write_step_report(page, fitted, steps, residual)
    if json_output:
        _print_json(residual, fitted.warnings, out)
        return 0
    screen = console()
    screen.print(f"[bold]{len(steps)} steps of {fitted.shapes} shapes[/bold]\n")
    table = plain_table("|predicted - real| / real", "median", "p90")
    for label, key in (
        ("back end alone", "uncorrected"),
        ("with the residual", "in_sample"),
        ("on shapes it has not seen", "held_out"),
    ):
        table.add_row(
            label, *(signed(getattr(residual.error[key], q)).lstrip("+") for q in ("median", "p90"))
        )
    screen.print(table)
    _say(fitted.warnings)
    screen.print(f"\nwritten to {out}, and a plot to {page}; use it with step_time: {{residual: {out}}}")
    return 0


def _linear(file: Path, out: Path, engine: str, json_output: bool) -> int:
    """The linear back end has nothing to correct: its coefficients themselves are fitted."""
    from agentservesim.validation.linear_fit import fit_linear_log

    fitted = fit_linear_log(file)
    out.write_text(fitted.to_yaml(f"{engine or 'an engine'}, {file.name}"), encoding="utf-8")
    errors = fitted.errors()
    if json_output:
        content = {
            "step_time": str(out),
            "error": {name: error.__dict__ for name, error in errors.items()},
            "coefficients": fitted.coefficients,
            "warnings": fitted.warnings,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return 0
    screen = console()
    screen.print(f"[bold]{len(fitted.real)} steps of {fitted.shapes} shapes[/bold]\n")
    table = plain_table("|predicted - real| / real", "median", "p90")
    for label, key in (("the steps of the fit", "in_sample"), ("on shapes it has not seen", "held_out")):
        table.add_row(label, *(signed(getattr(errors[key], q)).lstrip("+") for q in ("median", "p90")))
    screen.print(table)
    for name, value in fitted.coefficients.items():
        screen.print(f"{name}: {value:.4g}", highlight=False)
    _say(fitted.warnings)
    screen.print(f"\nwritten to {out}: a step_time section for the config")
    return 0


def _from_requests(
    config: RunConfig, file: Path, out: Path, engine: str, seed: int, json_output: bool
) -> int:
    from agentservesim.validation.request_fit import EVALUATIONS, HALVES, calibrate_requests

    def on_try(number: int, value: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\rsimulation {number} of at most about {EVALUATIONS}, distance {value:.4f} ")

    fitted = calibrate_requests(config, file, seed, engine, on_try=on_try)
    out.write_text(fitted.residual.to_yaml(), encoding="utf-8")
    if json_output:
        _print_json(fitted.residual, fitted.warnings, out, errors=fitted.errors)
        return 0
    screen = console()
    screen.print(f"[bold]{fitted.evaluations} simulations[/bold]\n")
    table = plain_table(
        "error", *(f"{half.replace('_', ' ')}, {w}" for half in HALVES for w in ("before", "after"))
    )
    for key in MEASURES:
        cells = [fitted.errors[half][when][key] for half in HALVES for when in ("before", "after")]
        table.add_row(key, *(signed(cell) for cell in cells))
    screen.print(table)
    for term, value in fitted.coefficients.items():
        screen.print(f"{term}: {value:+.4g} µs", highlight=False)
    _say(fitted.warnings)
    screen.print(f"\nwritten to {out}; use it with step_time: {{residual: {out}}}")
    return 0


def _say(warnings: list[str]) -> None:
    screen = console()
    for warning in warnings:
        screen.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)


def _print_json(residual: Residual, warnings: list[str], out: Path, **more: object) -> None:
    regimes = {"decode_only": residual.decode_only, "with_prefill": residual.with_prefill}
    content = {
        "residual": str(out),
        "error": {name: error.__dict__ for name, error in residual.error.items()},
        "coefficients": {name: dict(regime.coefficients) for name, regime in regimes.items() if regime},
        "warnings": warnings,
        **more,
    }
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
