"""`agentservesim live validate`: a real vLLM on this machine's CPU, beside its simulation."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentservesim.cli.configs import open_config
from agentservesim.cli.run import INTERRUPTED
from agentservesim.cli.tables import console, plain_table, seconds, signed
from agentservesim.errors import InputError
from agentservesim.live.server import vllm_python
from agentservesim.live.validate import Lab, LiveValidation, live_validate

MEASURES = (("jct", "JCT"), ("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "call latency"))


def live_validate_command(
    name: str,
    overrides: list[str],
    repeats: int,
    out: Path | None,
    python: str | None,
    json_output: bool,
) -> int:
    """Returns the exit code: 3 when a call was not served or has no partner, INTERRUPTED after Ctrl-C."""
    config = open_config(name, overrides, {})
    chosen = vllm_python(python)
    signal.signal(signal.SIGTERM, _terminated)  # so that the server is ended, too
    try:
        with _folder(out) as folder, _parts() as on_part:
            result = live_validate(config, Lab(chosen, folder, on_part), repeats)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the server is stopped\n")
        return INTERRUPTED
    if json_output:
        sys.stdout.write(json.dumps(result.as_dict(), indent=2) + "\n")
    else:
        _show(result, out)
    sys.stderr.write(_problems(result))
    return 0 if result.complete else 3


def _terminated(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The folder for everything that is written; a temporary one where none is named."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="agentservesim-") as folder:
            yield Path(folder)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make the folder: {error}") from None
    yield out


@contextmanager
def _parts() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is being done: on one line of a terminal, else a line a part."""
    terminal = sys.stderr.isatty()
    said = ""

    def on_part(words: str) -> None:
        nonlocal said
        part = words.partition(",")[0]
        if terminal:
            sys.stderr.write(f"\r\x1b[K{words} …")
        elif part != said:
            sys.stderr.write(f"{part} …\n")
        sys.stderr.flush()
        said = part

    try:
        yield on_part
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[K")


def _show(result: LiveValidation, out: Path | None) -> None:
    screen = console()
    jct = result.jct()
    screen.print(f"[bold]{result.config.workload.source} on a real vLLM on this CPU, and simulated[/bold]")
    screen.print()
    table = plain_table("mean JCT", "seconds", "against the real mean")
    for number, real_s in enumerate(jct["real_s"], start=1):
        table.add_row(f"real run {number}", seconds(real_s), signed(real_s / jct["real_mean_s"] - 1))
    table.add_row("simulated", seconds(jct["simulated_s"]), signed(jct["error"]))
    screen.print(table)
    screen.print()
    errors = plain_table("error of the simulation", *(f"real run {n + 1}" for n in range(len(result.runs))))
    for key, label in MEASURES:
        for statistic in ("mean", "p50", "p90"):
            cells = [signed(run.paired.numbers["errors"][f"{key}_{statistic}"]) for run in result.runs]
            errors.add_row(f"{label} {statistic}", *cells)
    screen.print(errors)
    screen.print()
    for number, run in enumerate(result.runs, start=1):
        screen.print(
            f"decisions, real run {number}: {run.decisions.in_words()}", markup=False, soft_wrap=True
        )
    _show_calibration(result)
    if out is not None:
        screen.print(f"\nwritten to {out}: validation.json, simulated/, real-1/, real-1-paired/, … and logs")


def _show_calibration(result: LiveValidation) -> None:
    screen = console()
    calibration = result.calibration
    steps, client = calibration.steps, calibration.client
    error = steps.errors()["held_out"]
    screen.print(
        f"\ncalibrated on {len(steps.real)} steps of {steps.shapes} shapes, held-out error "
        f"{signed(error.median).lstrip('+')} (p90 {signed(error.p90).lstrip('+')}); "
        f"a request takes {seconds(client.request_s)} + {client.request_per_token_s * 1e9:.0f} ns a prompt "
        f"token to the engine and {seconds(client.response_s)} back, measured on {calibration.calls} calls",
        style="dim", markup=False, soft_wrap=True,
    )  # fmt: skip
    for warning in steps.warnings:
        screen.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)


def _problems(result: LiveValidation) -> str:
    lines = []
    for number, run in enumerate(result.runs, start=1):
        alone = [*run.paired.pairing.real_alone, *run.paired.pairing.simulated_alone]
        if alone:
            lines.append(f"warning: real run {number}: {len(alone)} calls have no partner and are left out")
            lines += [f"  {name}" for name in alone[:5]]
        if run.summary["deviations"]:
            kinds = ", ".join(f"{kind} × {count}" for kind, count in run.summary["deviations"].items())
            lines.append(f"warning: real run {number}: calls were served otherwise than asked for: {kinds}")
    return "".join(line + "\n" for line in lines)
