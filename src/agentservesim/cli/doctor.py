"""`agentservesim doctor`: does this installation work?"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from functools import partial

from agentservesim import __version__
from agentservesim.cli.tables import console, plain_table
from agentservesim.config import parse_config

LIBRARIES = ("aiconfigurator-core", "msgspec", "numpy", "plotly", "pyarrow", "pydantic", "rich", "typer")


def doctor_command(json_output: bool) -> int:
    """Returns the exit code: 2 when something does not work."""
    checks: list[tuple[str, bool, str]] = [
        _check("python", lambda: f"{platform.python_version()} on {platform.machine()}"),
        *(_check(name, partial(importlib.metadata.version, name)) for name in LIBRARIES),
        _check("measured step times", _measured),
        _check("a run", _small_run),
    ]
    works = all(ok for _, ok, _ in checks)
    if json_output:
        report = {name: {"ok": ok, "detail": detail} for name, ok, detail in checks}
        sys.stdout.write(
            json.dumps({"agentservesim": __version__, "ok": works, "checks": report}, indent=2) + "\n"
        )
        return 0 if works else 2
    table = plain_table("check", "", "detail", numeric_from=9)
    for name, ok, detail in checks:
        table.add_row(name, "[green]ok[/green]" if ok else "[red]fails[/red]", detail)
    screen = console()
    screen.print(f"[bold]agentservesim {__version__}[/bold]\n")
    screen.print(table)
    return 0 if works else 2


def _check(name: str, probe: Callable[[], str]) -> tuple[str, bool, str]:
    """A doctor reports what fails, whatever it raises."""
    try:
        return name, True, probe()
    except Exception as error:
        return name, False, f"{type(error).__name__}: {error}"


def _measured() -> str:
    from agentservesim.step_time import build_step_time

    config = parse_config(
        {
            "workload": {"source": "examples/bfcl-like"},
            "cluster": {"gpu": "b200_sxm", "model": "llama-3.1-8b"},
        }
    )
    step_time = build_step_time(config)
    if step_time.backend != "measured":
        raise RuntimeError(step_time.notice)
    milliseconds = step_time.step([], 8, 8 * 4096).seconds * 1e3
    return f"8 sequences of 4,096 tokens decode in {milliseconds:.2f} ms on b200_sxm"


def _small_run() -> str:
    from agentservesim.run import simulate

    config = parse_config(
        {
            "workload": {
                "source": "examples/bfcl-like",
                "programs": 3,
                "arrivals": {"process": "poisson", "rate_per_s": 1.0},
            },
            "cluster": {"gpu": "b200_sxm", "model": "llama-3.1-8b"},
            "step_time": {"backend": "linear", "base_s": 0.005},
        }
    )
    summary = simulate(config).summary
    if summary["programs_completed"] != 3:
        raise RuntimeError(f"{summary['programs_completed']} of 3 programs completed")
    return f"3 programs, {summary['calls_completed']} calls"
