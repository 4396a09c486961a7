"""A progress bar on stderr, for people: only on a terminal, and only once a run takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentservesim.simulation import Simulation

PATIENCE_S = 1.0
INSTANTS_BETWEEN_LOOKS = 256


@contextmanager
def progress(title: str, total_programs: int | None) -> Iterator[Callable[[Simulation], None] | None]:
    """Yields an `on_progress` for Simulation.run; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.fields[known]} programs"),
        TextColumn("{task.fields[simulated]} simulated"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(title, total=total_programs, known=total_programs or "?", simulated="0 s")
    started = time.monotonic()
    looks = 0

    def on_progress(simulation: Simulation) -> None:
        nonlocal looks
        looks += 1
        if looks % INSTANTS_BETWEEN_LOOKS:
            return
        if not bar.live.is_started:
            if time.monotonic() - started < PATIENCE_S:
                return
            bar.start()
        recorder = simulation.recorder
        bar.update(
            task,
            completed=recorder.programs_completed + recorder.programs_failed,
            known=total_programs or f"{recorder.programs}+",
            simulated=f"{simulation.clock.now_s:,.0f} s",
        )

    try:
        yield on_progress
    finally:
        bar.stop()
