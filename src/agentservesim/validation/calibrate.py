"""A residual for a GPU, model and engine of one's own: from logged steps, or from requests alone."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from agentservesim.config import RunConfig
from agentservesim.errors import InputError
from agentservesim.step_time import StepTimeModel, build_step_time, gpu, model
from agentservesim.step_time.residual import Residual
from agentservesim.validation.fitting import Fit, fit
from agentservesim.validation.step_log import Step, read_steps


def calibrate_steps(config: RunConfig, log: Path, engine: str = "") -> tuple[Fit, list[Step], Residual]:
    """Fit a residual on the config's back end to a log of real steps. `engine` says what was logged.

    Raises InputError where the log is wrong, or the back end is one that takes no residual.
    """
    steps = read_steps(log)
    fitted = fit(steps, base_step_time(config))
    return fitted, steps, fitted.residual(**facts(config, f"{log.name}, {len(steps)} logged steps", engine))


def base_step_time(config: RunConfig) -> StepTimeModel:
    """The config's back end without a residual.

    Raises InputError unless it is `measured`, with data, or `tables`.
    """
    bare = config.step_time.model_copy(update={"residual": "none"})
    step_time = build_step_time(config.model_copy(update={"step_time": bare}))
    if step_time.backend not in ("measured", "tables"):
        why = f" ({step_time.notice})" if step_time.notice else ""
        raise InputError(
            f"step_time.backend is {step_time.backend!r}{why}: expected measured or tables, for a residual "
            "corrects measured operators"
        )
    return step_time


def facts(config: RunConfig, source: str, engine: str) -> dict[str, Any]:
    """The keys of a residual file that say what it is for and where it comes from."""
    return {
        "gpu": gpu(config.cluster.gpu).name,
        "model": model(config.cluster.model).name,
        "tp": config.cluster.tp,
        "backend": config.step_time.backend,
        "engine": engine or "not said",
        "source": source,
        "date": datetime.date.today().isoformat(),
    }
