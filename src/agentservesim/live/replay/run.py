"""From a config and a server's address to a result: the counterpart of `simulate`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentservesim.config import RunConfig
from agentservesim.errors import AgentServeSimError, InputError
from agentservesim.live.http import open_session
from agentservesim.live.replay.client import CompletionClient
from agentservesim.live.replay.drive import Drive
from agentservesim.live.replay.recorder import LiveRecorder
from agentservesim.live.tokens import TokenBook
from agentservesim.results.summary import call_figures, peak_rss_bytes, statistics
from agentservesim.run import Result, write_summary, writing
from agentservesim.workload import load_programs
from agentservesim.workload.arrivals import open_loop

ENGINE_KEYS = (
    "protected_reclaims",
    "kv_cache_tokens",
    "kv_utilization_mean",
    "kv_utilization_max",
    "energy_joules",
    "engine_steps",
    "busy_fraction",
)
"""What a client cannot see of an engine: null in summary.json."""


@dataclass(frozen=True)
class ReplayOptions:
    """How to replay.

    model         which of the served models; None where there is only one
    vocab_size    prompts hold token ids below this
    seed          of the token ids
    time_scale    arrivals and gaps take so many times as long
    retries       attempts after a call's first
    timeout_s     for a call with all its attempts; None: no limit
    identity      requests carry program ids in the field vllm_xargs
    """

    model: str | None = None
    vocab_size: int = 32000
    seed: int = 0
    time_scale: float = 1.0
    retries: int = 10
    timeout_s: float | None = None
    identity: bool = True


@dataclass(frozen=True)
class ReplayResult(Result):
    """What a replay gave."""

    @property
    def complete(self) -> bool:
        """Whether every call was served: nothing refused, nothing failed, nothing lost."""
        return super().complete and not self.summary["calls_failed"]


def replay(
    config: RunConfig,
    url: str,
    options: ReplayOptions | None = None,
    out_dir: Path | None = None,
    on_progress: Callable[[Drive], None] | None = None,
    keep_tables: bool = True,
) -> ReplayResult:
    """Run a config's workload against the server at `url`; its cluster, engine and policies are the server's
    own affair. Files as by `simulate`, and chunks.parquet with the time of every streamed chunk.

    The first Ctrl-C ends the run, so that what is finished can be written. `on_progress` is called now and
    then. Raises InputError for a wrong workload, or if there is no such server or model.
    """
    return asyncio.run(_replay(config, url, options or ReplayOptions(), out_dir, on_progress, keep_tables))


async def _replay(
    config: RunConfig,
    url: str,
    options: ReplayOptions,
    out_dir: Path | None,
    on_progress: Callable[[Drive], None] | None,
    keep_tables: bool,
) -> ReplayResult:
    book = TokenBook(options.seed, options.vocab_size)
    try:
        workload = load_programs(config.workload)
    except AgentServeSimError as error:
        raise config.origin.locate(error) from error
    arrivals = config.workload.arrivals
    closed_loop = arrivals.process == "closed_loop"
    programs = workload.programs
    async with open_session() as session:
        client = CompletionClient(session, url, options.retries, options.timeout_s, options.identity)
        model = await client.choose_model(options.model)
        with writing(out_dir):
            recorder = LiveRecorder(out_dir, keep_tables)
        drive = Drive(
            ((0.0, program) for program in programs) if closed_loop else open_loop(programs, arrivals),
            client,
            book,
            recorder,
            deployment=config.output_reuse == "deployment",
            lanes=arrivals.lanes if closed_loop else None,
            time_scale=options.time_scale,
            max_model_len=model.max_model_len,
        )
        started = time.perf_counter()
        with _interruptible(drive):
            await drive.run(on_progress)
        wall_s = time.perf_counter() - started
    if recorder.programs == 0:
        raise InputError(f"workload {config.workload.source}: no programs; expected at least one")
    summary = _summarize(recorder, drive, book, wall_s)
    summary["live"] = {
        "url": url,
        "model": model.name,
        "max_model_len": model.max_model_len,
        "time_scale": options.time_scale,
        "seed": options.seed,
    }
    summary["step_time"] = {
        "backend": "live",
        "source": f"{model.name} at {url}",
        "coverage": None,
        "notice": None,
    }
    with writing(out_dir):
        tables = recorder.close()
        if out_dir is not None:
            write_summary(out_dir, config, summary)
    return ReplayResult(config, summary, workload.report, tables)


def _summarize(recorder: LiveRecorder, drive: Drive, book: TokenBook, wall_s: float) -> dict[str, Any]:
    """summary.json: the simulator's keys, null where a client cannot know, and what only a client knows.

    retries_by_reason         failed attempts that were made good, or not, by a further one
    retry_tokens_dropped      output that came in failed attempts
    deviations                calls served otherwise than asked for, by how; the first are named below
    made_up_tokens            output that prompts repeat although the server does not tell it
    release_lag_max_s         how late this client sent a call, at worst
    client_stalls, client_stalled_s    how often, and for how long in all, this client got no CPU
    """
    cached_known = recorder.calls_completed == recorder.cached_known
    summary = {
        **call_figures(recorder),
        "preemptions": None,
        **dict.fromkeys(ENGINE_KEYS),
        "decisions": dict(sorted(recorder.events.items())),
        "wall_s": wall_s,
        "sim_wall_s": None,
        "peak_rss_bytes": peak_rss_bytes(),
        "interrupted": drive.interrupted,
        "calls_failed": recorder.calls_failed,
        "failures": recorder.failures,
        "calls_retried": recorder.calls_retried,
        "retries": recorder.retries.total(),
        "retries_by_reason": dict(recorder.retries),
        "retry_tokens_dropped": recorder.dropped_tokens,
        "deviations": dict(recorder.deviations),
        "deviations_named": recorder.named,
        "calls_clipped": drive.clipped,
        "calls_raised_to_one_token": drive.raised,
        "cached_tokens_known": cached_known,
        "token_ids_known": recorder.calls_completed == recorder.token_ids_known,
        "scheduled_known": recorder.calls_completed == recorder.times_known,
        "made_up_tokens": book.made_up_tokens,
        "release_lag_max_s": drive.max_lag_s,
        "client_stalls": drive.stalls,
        "client_stalled_s": drive.stalled_s,
        **statistics("itl", recorder.itl_s, 50, 99),
    }
    if not cached_known:
        summary["prefix_hit_tokens"] = summary["prefix_hit_rate"] = None
    return summary


@contextmanager
def _interruptible(drive: Drive) -> Iterator[None]:
    """The first Ctrl-C ends the run, the second one the process."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        drive.interrupt()

    with suppress(RuntimeError, ValueError):  # not in the main thread, which alone gets signals
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
