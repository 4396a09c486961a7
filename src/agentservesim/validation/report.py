"""A page with both runs' distributions and their course over time. It needs no network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentservesim.validation.metrics import Array

if TYPE_CHECKING:
    from agentservesim.validation.validate import Validation

PANELS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "latency"), ("jct", "JCT of a program"))
COLOURS = {"real": "#1f77b4", "simulated": "#d62728"}
_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em auto;max-width:1100px;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}td:first-child,th:first-child"
    "{text-align:left}tr:nth-child(even){background:#f5f5f5}"
)


def write_report(path: Path, validation: Validation) -> None:
    """Write the page; plotly.js is inside it."""
    real, simulated = validation.sides
    figure = subplots(
        2,
        [f"{label}, share of calls below" for _, label in PANELS]
        + [f"{label} over the run" for _, label in PANELS],
    )
    for column, (name, _) in enumerate(PANELS, start=1):
        for side, label in ((real, "real"), (simulated, "simulated")):
            values = getattr(side, f"{name}_s")
            style = {"name": label, "legendgroup": label, "showlegend": column == 1}
            known = np.sort(values[~np.isnan(values)])
            shares = np.arange(1, len(known) + 1) / max(len(known), 1)
            figure.add_scatter(
                x=known.tolist(), y=shares.tolist(), line={"color": COLOURS[label], "shape": "hv"},
                mode="lines", row=1, col=column, **style,
            )  # fmt: skip
            at = side.start_s if len(values) == len(side.start_s) else np.arange(len(values), dtype=float)
            figure.add_scatter(
                x=at.tolist(), y=_plain(values), marker={"color": COLOURS[label], "size": 4, "opacity": 0.6},
                mode="markers", row=2, col=column, **style | {"showlegend": False},
            )  # fmt: skip
        figure.update_xaxes(title_text="seconds", row=1, col=column)
        figure.update_xaxes(title_text="start, seconds into the run", row=2, col=column)
    write_page(path, "A real run and its simulation", _facts(validation), figure)


def write_page(path: Path, title: str, body: str, figure: Any) -> None:
    """A page of text over a figure."""
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{body}{plot}</body></html>\n",
        encoding="utf-8",
    )


def subplots(rows: int, titles: list[str]) -> Any:
    """A plotly figure of panels, `rows` of them high."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=rows, cols=len(titles) // rows, subplot_titles=titles)
    figure.update_layout(height=380 * rows, template="plotly_white", margin={"l": 40, "r": 20})
    return figure


def _plain(values: Array) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _facts(validation: Validation) -> str:
    found = validation.numbers
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_text(value)}</td><td>{_text(found['simulated'][name])}</td>"
        f"<td>{_percent(found['errors'].get(name) or found['errors'].get(name.removesuffix('_s')))}</td></tr>"
        for name, value in found["real"].items()
    )
    mapes = "".join(
        f"<tr><td>{name}</td><td></td><td></td><td>{_percent(value)}</td></tr>"
        for name, value in found["errors"].items()
        if name.endswith("_mape")
    )
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in validation.findings)
    return (
        f"<p>{html.escape(str(validation.real.path))}: {len(validation.pairing.pairs)} calls paired, "
        f"{len(validation.pairing.real_alone)} real and {len(validation.pairing.simulated_alone)} simulated "
        f"without a partner. Step times: {html.escape(validation.summary['step_time']['source'])}.</p>"
        f"<ul>{said}</ul><table><tr><th></th><th>real</th><th>simulated</th><th>error</th></tr>"
        f"{cells}{mapes}</table>"
    )


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
