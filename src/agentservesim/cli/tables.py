"""How numbers are shown to a person: rounded to what is known, units beside them, None as a dash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

FIGURES = (("JCT (a program's completion)", "jct"), ("TTFT", "ttft"), ("TPOT", "tpot"))
"""What a run is judged by: label, key in the summary."""


def console() -> Console:
    """The screen. Wide enough for the tables when the output is not a terminal."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(width=130, highlight=False)


def seconds(value: float | None) -> str:
    """Three significant digits, in ms below a second."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def change(value: float | None, baseline: float | None) -> str:
    """Signed percentage against a baseline."""
    if value is None or not baseline:
        return "–"
    return f"{(value / baseline - 1) * 100:+.1f} %"


def signed(value: float | None, digits: int = 1) -> str:
    """A share with its sign, as errors are shown."""
    return "–" if value is None else f"{value * 100:+.{digits}f} %"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def joules(value: float) -> str:
    return f"{value / 3.6e6:.3g} kWh"


def show_figures(screen: Console, summary: dict[str, Any], figures: Sequence[tuple[str, str]]) -> None:
    """Mean and quantiles of each figure, (label, key in the summary) in order, and the means of calls."""
    table = plain_table("", "mean", "p50", "p90", "p99")
    for label, key in figures:
        table.add_row(label, *(seconds(summary.get(f"{key}_{q}_s")) for q in ("mean", "p50", "p90", "p99")))
    table.add_row("call latency", seconds(summary["call_latency_mean_s"]), "", "", "")
    table.add_row("queueing", seconds(summary["queue_mean_s"]), "", "", "")
    screen.print(table)
    screen.print()


def show_facts(screen: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Sentences, a label each."""
    table = plain_table("", "", numeric_from=2)
    table.show_header = False
    table.columns[1].no_wrap = False
    for label, text in facts:
        table.add_row(label, text)
    screen.print(table)


def plain_table(*headers: str, numeric_from: int = 1) -> Table:
    """A table with right-aligned figures from column `numeric_from` on."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position >= numeric_from else "left", no_wrap=True)
    return table
