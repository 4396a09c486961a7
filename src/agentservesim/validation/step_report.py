"""A page that shows a fit to logged steps."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentservesim.step_time.residual import Residual
from agentservesim.validation.fitting import Fit
from agentservesim.validation.report import subplots, write_page
from agentservesim.validation.step_log import Step

MOST_POINTS = 5000


def write_step_report(path: Path, fitted: Fit, steps: Sequence[Step], residual: Residual) -> None:
    """Real against predicted seconds, and the held-out error over what the batch was. At most MOST_POINTS
    steps are drawn, evenly taken."""
    figure = subplots(
        1, ["real and predicted, ms", "held-out error over prefill tokens", "held-out error over decodes"]
    )
    drawn = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).astype(int))
    real = fitted.real[drawn] * 1e3
    for label, values in (("back end alone", fitted.base), ("held out", fitted.held_out)):
        figure.add_scatter(
            x=real.tolist(), y=(values[drawn] * 1e3).tolist(), mode="markers", name=label,
            marker={"size": 4, "opacity": 0.6}, row=1, col=1,
        )  # fmt: skip
    ends = [float(real.min()), float(real.max())]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "#888"}, row=1, col=1)
    for column, name in ((2, "prefill_tokens"), (3, "decodes")):
        at = [getattr(steps[index], name) for index in drawn]
        for label, values in (("back end alone", fitted.base), ("held out", fitted.held_out)):
            figure.add_scatter(
                x=at, y=(values[drawn] / fitted.real[drawn] - 1).tolist(), mode="markers", name=label,
                showlegend=False, marker={"size": 4, "opacity": 0.6}, row=1, col=column,
            )  # fmt: skip
        figure.update_yaxes(tickformat="+.0%", row=1, col=column)
    body = "".join(f"<li>{html.escape(warning)}</li>" for warning in fitted.warnings)
    write_page(path, "A residual and the steps it was fitted to", f"<ul>{body}</ul><pre>"
               f"{html.escape(residual.to_yaml())}</pre>", figure)  # fmt: skip
