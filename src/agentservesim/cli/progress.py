"""What a person sees and can do during a run: a progress bar on a terminal, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from agentservesim.simulation import Simulation

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0
INSTANTS_BETWEEN_LOOKS = 256


@contextmanager
def watch(title: str, total_programs: Callable[[], int | None]) -> Iterator[Callable[[Simulation], None]]:
    """Yields an `on_progress` for a run.

    The first Ctrl-C ends the run after the present instant, so that what is finished can be written; the
    second ends the process. The bar goes to stderr, only to a terminal, and only once a run takes a while.
    `total_programs` is asked once, if there is a bar.
    """
    interrupted = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    bar = _Bar(title, total_programs()) if sys.stderr.isatty() else None

    def on_progress(simulation: Simulation) -> None:
        if interrupted:
            simulation.interrupt()
        if bar is not None:
            bar.look(simulation)

    try:
        yield on_progress
    finally:
        signal.signal(signal.SIGINT, previous)
        if bar is not None:
            bar.stop()


class _Bar:
    """Programs ended out of all, simulated time, calls a second, and the time left at this pace."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title = title
        self._total = total
        self._started: float | None = None
        self._looks = 0
        self._bar: tuple[Progress, TaskID] | None = None

    def look(self, simulation: Simulation) -> None:
        if self._started is None:
            self._started = time.monotonic()
        self._looks += 1
        if self._looks % INSTANTS_BETWEEN_LOOKS:
            return
        elapsed_s = time.monotonic() - self._started
        if elapsed_s < PATIENCE_S:
            return
        if self._bar is None:
            self._bar = progress_bar(self._title, self._total)
        progress, task = self._bar
        recorder = simulation.recorder
        ended = recorder.programs_completed + recorder.programs_failed
        progress.update(
            task,
            completed=ended,
            known=f"{self._total:,}" if self._total else f"{recorder.programs:,} so far",
            clock=f"{simulation.clock.now_s:,.0f} s simulated",
            pace=f"{recorder.calls_completed / elapsed_s:,.0f} calls/s",
            left=time_left(elapsed_s, ended, self._total),
        )

    def stop(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()


def time_left(elapsed_s: float, ended: int, total: int | None) -> str:
    """The time left if the rest goes as the run went so far; nothing before a twentieth is done."""
    if not total or ended * 20 < total:
        return ""
    seconds = elapsed_s * (total - ended) / ended
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def progress_bar(title: str, total: int | None) -> tuple[Progress, TaskID]:
    """A bar on stderr, started. Update `completed` and the fields known, clock, pace and left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,.0f}/{task.fields[known]} programs"),
        TextColumn("{task.fields[clock]}"),
        TextColumn("{task.fields[pace]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task(title, total=total, known="", clock="", pace="", left="")
    progress.start()
    return progress, task
