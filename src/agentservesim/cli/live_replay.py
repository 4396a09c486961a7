"""`agentservesim live replay`: programs against a real server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentservesim.cli.configs import open_config
from agentservesim.cli.progress import PATIENCE_S, progress_bar, time_left
from agentservesim.cli.run import INTERRUPTED, expected_programs, incomplete
from agentservesim.cli.tables import FIGURES, console, count, percent, seconds, show_facts, show_figures
from agentservesim.live.replay import ReplayOptions, ReplayResult, replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentservesim.live.replay.drive import Drive

NAMED = 5


def replay_command(
    name: str, overrides: list[str], url: str, options: ReplayOptions, out: Path | None, json_output: bool
) -> int:
    """Returns the exit code: 3 when calls were refused, failed or lost, INTERRUPTED after Ctrl-C."""
    config = open_config(name, overrides, {})
    with _watch(partial(expected_programs, config)) as on_progress:
        result = replay(config, url, options, out, on_progress, keep_tables=False)
    if json_output:
        sys.stdout.write(json.dumps(result.summary, indent=2) + "\n")
    else:
        _show(result, out)
    sys.stderr.write(_problems(result.summary))
    if result.summary["interrupted"]:
        return INTERRUPTED
    return 0 if result.complete else 3


@contextmanager
def _watch(total_programs: Callable[[], int | None]) -> Iterator[Callable[[Drive], None] | None]:
    """A progress bar on a terminal, once the run takes a while; None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    total = total_programs()
    started = time.monotonic()
    bar = None

    def on_progress(drive: Drive) -> None:
        nonlocal bar
        elapsed_s = time.monotonic() - started
        if elapsed_s < PATIENCE_S:
            return
        bar = bar or progress_bar("replaying", total)
        recorder = drive.recorder
        ended = recorder.programs_completed + recorder.programs_failed
        bar[0].update(
            bar[1],
            completed=ended,
            known=f"{total:,}" if total else f"{recorder.programs:,} so far",
            clock=f"{recorder.live_calls:,} calls in flight, {recorder.retries.total():,} retries",
            pace=f"{recorder.calls_completed / elapsed_s:,.1f} calls/s",
            left=time_left(elapsed_s, ended, total),
        )

    try:
        yield on_progress
    finally:
        if bar is not None:
            bar[0].stop()


def _problems(summary: dict[str, Any]) -> str:
    """What was refused, failed, lost, or served otherwise than asked for, in words."""
    lines = []
    if summary["calls_failed"]:
        lines.append(f"warning: {summary['calls_failed']} of {summary['calls']} calls failed")
        lines += _first(summary["failures"], summary["calls_failed"])
    if summary["deviations"]:
        kinds = ", ".join(f"{kind} × {count}" for kind, count in summary["deviations"].items())
        lines.append(f"warning: calls were served otherwise than asked for: {kinds}")
        lines += _first(summary["deviations_named"], sum(summary["deviations"].values()))
    return incomplete(summary) + "".join(line + "\n" for line in lines)


def _first(named: list[str], total: int) -> list[str]:
    more = [f"  … and {total - NAMED} more"] if total > NAMED else []
    return [f"  {line}" for line in named[:NAMED]] + more


def _show(result: ReplayResult, out: Path | None) -> None:
    summary = result.summary
    screen = console()
    screen.print(f"[bold]{result.config.workload.source} on {summary['step_time']['source']}[/bold]")
    screen.print()
    show_figures(screen, summary, (*FIGURES, ("ITL (between chunks)", "itl")))
    show_facts(screen, _facts(summary))
    if out is not None:
        files = "config.yaml, summary.json, programs, calls, chunks and decisions.parquet"
        screen.print(f"\nwritten to {out}: {files}")


def _client(summary: dict[str, Any]) -> str:
    """Whether the times of this client can be trusted."""
    words = f"sent no call later than {seconds(summary['release_lag_max_s'])} after its time"
    if summary["client_stalls"]:
        words += (
            f"; did not run when it should have for {seconds(summary['client_stalled_s'])} in all, "
            f"{summary['client_stalls']} times: its times are wrong by as much"
        )
    return words


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The run in sentences, a label each."""
    cached = f"{percent(summary['prefix_hit_rate'])} from the prefix cache"
    if not summary["cached_tokens_known"]:
        cached = "the server does not tell how many were cached (vLLM: --enable-prompt-tokens-details)"
    facts = [
        (
            "programs",
            f"{summary['programs_completed']} of {summary['programs']} completed "
            f"in {seconds(summary['makespan_s'])}",
        ),
        ("calls", f"{count(summary['calls_completed'])} of {count(summary['calls'])} completed"),
        ("prompt tokens", f"{count(summary['prompt_tokens'])}, {cached}"),
        (
            "output tokens",
            f"{count(summary['output_tokens'])}, {count(summary['output_tokens_per_s'])} per second",
        ),
        ("client", _client(summary)),
    ]
    if not summary["scheduled_known"]:
        facts.append(
            ("queueing", "the server does not tell it per call (vLLM: --enable-per-request-metrics)")
        )
    if summary["made_up_tokens"]:
        facts.append(
            (
                "reuse",
                f"the server does not tell the tokens it generates: {count(summary['made_up_tokens'])} that "
                "later prompts repeat were made up and cannot be cached",
            )
        )
    if summary["retries"]:
        kinds = ", ".join(f"{kind} × {count}" for kind, count in summary["retries_by_reason"].items())
        dropped = count(summary["retry_tokens_dropped"])
        words = (
            f"{summary['retries']} in {summary['calls_retried']} calls ({kinds}), {dropped} tokens dropped"
        )
        facts.append(("retries", words))
    for key, words in (
        ("calls_clipped", "calls cut to the model's length"),
        ("calls_raised_to_one_token", "calls without output asked for one token, as servers want it"),
    ):
        if summary[key]:
            facts.append(("changed", f"{count(summary[key])} {words}"))
    return facts
