"""The command line: one thin file a verb, loaded when it is used so that --help answers at once."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from agentservesim.errors import AgentServeSimError

app = typer.Typer(
    name="agentservesim",
    help="Simulate LLM agent programs on vLLM-exact serving engines: which KV-retention, routing and "
    "scheduling policy finishes your agents' jobs soonest, and on how many GPUs.\n\n"
    "Start with: agentservesim compare examples/rtx-pro-6000-70b-tp2 --retention lru,tool-ttl "
    "--scheduling fcfs,continuum",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
trace_app = typer.Typer(
    help="Look at workloads and traces, and convert them.", no_args_is_help=True, rich_markup_mode="rich"
)
app.add_typer(trace_app, name="trace")
live_app = typer.Typer(
    help="Real serving engines: run programs against one, put a router before several.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(live_app, name="live")

Config = Annotated[
    str,
    typer.Argument(
        help="A config file, a bundled one such as examples/rtx-pro-6000-70b-tp2, or a trace: a file, a "
        "folder such as ~/.claude/projects, a glob, or - for stdin."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=v", help="Override one config key; may be repeated."),
]
Lenient = Annotated[
    bool, typer.Option("--lenient", help="Skip and count malformed lines of a trace instead of stopping.")
]
MaxPause = Annotated[
    float | None,
    typer.Option("--max-pause", metavar="SECONDS", min=0, help="Cut people's pauses in a trace to this."),
]
Anonymize = Annotated[
    bool,
    typer.Option("--anonymize", help="Drop names, keep numbers: p0001, t0, tool-a by frequency, prefix-1."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    retention: Annotated[
        str | None, typer.Option(help="What KV survives a tool gap: lru, ttl:tau_s=2, …")
    ] = None,
    scheduling: Annotated[str | None, typer.Option(help="Which call runs first: fcfs, plas, …")] = None,
    admission: Annotated[
        str | None, typer.Option(help="Which programs may start: none, program-cap, …")
    ] = None,
    routing: Annotated[str | None, typer.Option(help="Which instance a call goes to.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for config.yaml, summary.json, programs, calls and decisions.parquet."),
    ] = None,
    lenient: Lenient = False,
    max_pause: MaxPause = None,
    json_output: Json = False,
) -> None:
    """Simulate one config, or a trace with a default config, and show what happened.

    Exit code 3 if calls were refused or lost; they are counted and named. 130 after Ctrl-C: what was
    finished is shown and written.
    """
    from agentservesim.cli.configs import trace_settings
    from agentservesim.cli.run import run_command

    policies = {"retention": retention, "scheduling": scheduling, "admission": admission, "routing": routing}
    settings = [*(overrides or []), *trace_settings(lenient, max_pause)]
    raise typer.Exit(run_command(config, settings, policies, out, json_output))


@app.command()
def compare(
    config: Config,
    overrides: Overrides = None,
    retention: Annotated[
        str | None, typer.Option(help="Comma-separated policies: lru,ttl:tau_s=2,./mine.py:Mine")
    ] = None,
    scheduling: Annotated[str | None, typer.Option(help="Comma-separated policies: fcfs,plas")] = None,
    admission: Annotated[str | None, typer.Option(help="Comma-separated policies: none,program-cap")] = None,
    routing: Annotated[str | None, typer.Option(help="Comma-separated policies.")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Seeds each, the same for all; differences then get an interval.")
    ] = 1,
    json_output: Json = False,
) -> None:
    """Run one config under every combination of policies, in one table. The first is the baseline."""
    from agentservesim.cli.compare import compare_command

    policies = {"retention": retention, "scheduling": scheduling, "admission": admission, "routing": routing}
    raise typer.Exit(compare_command(config, overrides or [], policies, json_output, seeds))


@app.command()
def validate(
    config: Config,
    real: Annotated[
        Path, typer.Option(help="The real run: requests.jsonl of a vLLM benchmark, or per-call records.")
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html, paired.parquet, paired.csv and validation.json."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Simulate a config and compare it with a real run of the same workload, call by call.

    Exit code 3 if calls of one side have no partner; they are counted and named.
    """
    from agentservesim.cli.validate import validate_command

    raise typer.Exit(validate_command(config, real, overrides or [], out, json_output))


@app.command()
def calibrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="A log of real steps (.csv, .jsonl, .parquet), or with --from-requests a real run."
        ),
    ],
    config: Annotated[str, typer.Option(help="The config whose back end is to be corrected.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The residual to write, a YAML file.")],
    overrides: Overrides = None,
    from_requests: Annotated[
        bool,
        typer.Option("--from-requests", help="Fit to the times of requests, where steps were not logged."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Where the plot goes; beside -o by default.")] = None,
    engine: Annotated[str, typer.Option(help="What was measured, for the file: 'vLLM 0.19'.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Draws the half that --from-requests fits to.")] = 0,
    json_output: Json = False,
) -> None:
    """Fit what a back end misses of real steps, to be used as step_time.residual; for the linear back end,
    its coefficients.
    """
    from agentservesim.cli.calibrate import calibrate_command

    raise typer.Exit(
        calibrate_command(file, config, overrides or [], out, from_requests, plot, engine, seed, json_output)
    )


@app.command()
def policies(json_output: Json = False) -> None:
    """List every policy with its rule and parameters."""
    from agentservesim.cli.policies import policies_command

    policies_command(json_output)


@app.command()
def doctor(json_output: Json = False) -> None:
    """Check that this installation works, and say what is missing."""
    from agentservesim.cli.doctor import doctor_command

    raise typer.Exit(doctor_command(json_output))


@trace_app.command("inspect")
def trace_inspect(
    files: Annotated[
        list[str],
        typer.Argument(help="Trace files, folders, globs, -, or bundled workloads (examples/swebench-like)."),
    ],
    format_name: Annotated[
        str | None, typer.Option("--format", help="Format, if not to be recognised.")
    ] = None,
    lenient: Lenient = False,
    max_pause: MaxPause = None,
    model: Annotated[
        str, typer.Option(help="Whose KV the working set counts: a known model, or a config.json.")
    ] = "llama-3.1-8b",
    json_output: Json = False,
) -> None:
    """Say what a workload holds: turns, tokens, reuse, sharing, tools, gaps, and the KV it needs."""
    from agentservesim.cli.trace import inspect_command

    inspect_command(files, format_name, lenient, max_pause, model, json_output)


@trace_app.command("convert")
def trace_convert(
    files: Annotated[list[str], typer.Argument(help="Trace files, folders, globs, -, or bundled workloads.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Native JSON Lines file to write.")],
    format_name: Annotated[
        str | None, typer.Option("--format", help="Format, if not to be recognised.")
    ] = None,
    lenient: Lenient = False,
    max_pause: MaxPause = None,
    transforms: Annotated[
        list[str] | None,
        typer.Option(
            "--transform",
            metavar="NAME:key=value,…",
            help="A what-if change such as sample:programs=20,seed=1 or scale_gaps:factor=2; may be "
            "repeated, applied in order.",
        ),
    ] = None,
    anonymous: Anonymize = False,
) -> None:
    """Write a workload in the native format, changed or without names if asked to."""
    from agentservesim.cli.trace import convert_command

    convert_command(files, out, format_name, lenient, max_pause, transforms or [], anonymous)


@trace_app.command("fit")
def trace_fit(
    files: Annotated[list[str], typer.Argument(help="Trace files, folders, globs, -, or bundled workloads.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The fit to write, a YAML file.")],
    name: Annotated[str, typer.Option(help="What the generated programs' ids begin with.")] = "fit",
    format_name: Annotated[
        str | None, typer.Option("--format", help="Format, if not to be recognised.")
    ] = None,
    lenient: Lenient = False,
    max_pause: MaxPause = None,
    anonymous: Anonymize = False,
) -> None:
    """Learn a generator from a workload: quantiles only, to share or to draw more programs from.

    Run it with workload.source set to the file.
    """
    from agentservesim.cli.trace import fit_command

    fit_command(files, out, name, format_name, lenient, max_pause, anonymous)


@live_app.command("replay")
def live_replay(
    config: Config,
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server: http://host:port")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for config.yaml, summary.json, programs, calls and chunks.parquet."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which model, if the server has several.")] = None,
    vocab_size: Annotated[
        int, typer.Option(metavar="N", help="Prompts are made of token ids below this.")
    ] = 32000,
    seed: Annotated[int, typer.Option(min=0, help="Of the token ids.")] = 0,
    time_scale: Annotated[
        float, typer.Option(metavar="F", min=0, help="Arrivals and gaps take F times as long.")
    ] = 1.0,
    retries: Annotated[int, typer.Option(min=0, help="Attempts after a call's first, with back-off.")] = 10,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="For a call with all its attempts.")
    ] = None,
    no_identity: Annotated[
        bool, typer.Option("--no-identity", help="Leave vllm_xargs, the program's id, out of requests.")
    ] = False,
    lenient: Lenient = False,
    max_pause: MaxPause = None,
    json_output: Json = False,
) -> None:
    """Run a workload's programs in real time against a server, and show what happened.

    Exit code 3 if calls were refused, failed or lost; they are counted and named. 130 after Ctrl-C: what was
    finished is shown and written.
    """
    from agentservesim.cli.configs import trace_settings
    from agentservesim.cli.live_replay import replay_command
    from agentservesim.live.replay import ReplayOptions

    options = ReplayOptions(model, vocab_size, seed, time_scale, retries, timeout, not no_identity)
    settings = [*(overrides or []), *trace_settings(lenient, max_pause)]
    raise typer.Exit(replay_command(config, settings, url, options, out, json_output))


@live_app.command("router")
def live_router(
    servers: Annotated[
        list[str],
        typer.Option(
            "--server", metavar="URL", help="A server behind the router: http://host:port; several."
        ),
    ],
    routing: Annotated[
        str, typer.Option(help="Which server a call goes to: session-affinity, ./mine.py:Mine, …")
    ] = "session-affinity",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: any free port.")] = 8000,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="The servers' own, which they do not tell; session-affinity's limit.")
    ] = 256,
) -> None:
    """Pass OpenAI requests on to several servers; a routing policy chooses where each call goes.

    Programs are told apart by vllm_xargs: {program_id: …}. GET /router/stats says what was done.
    Ctrl-C ends it.
    """
    from agentservesim.cli.live_router import router_command
    from agentservesim.live.router import RouterOptions

    raise typer.Exit(router_command(RouterOptions(tuple(servers), routing, host, port, max_num_seqs)))


@live_app.command("validate")
def live_validate(
    config: Config,
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(min=1, help="Real runs, each on a fresh server.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for validation.json, both sides' tables, reports and logs.")
    ] = None,
    vllm_python: Annotated[
        str | None,
        typer.Option("--vllm-python", metavar="PYTHON", help="A Python that has vLLM; else this one."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Run a config on a real vLLM with a tiny model on this machine's CPU, and compare its simulation.

    The machine's step times are measured first, on another load. Exit code 3 if calls were not served or
    have no partner.
    """
    from agentservesim.cli.live_validate import live_validate_command

    raise typer.Exit(live_validate_command(config, overrides or [], repeats, out, vllm_python, json_output))


def _version(value: bool) -> None:
    if value:
        from agentservesim import __version__

        typer.echo(f"agentservesim {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: errors raised on purpose become one message and their exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × and – still shows the figures
    try:
        app(prog_name="agentservesim")
    except AgentServeSimError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
