"""Seconds and joules of an engine step, and the hardware and model facts behind them."""

from __future__ import annotations

from pathlib import Path

from agentservesim.config import RunConfig
from agentservesim.errors import InputError
from agentservesim.step_time.corrected import CorrectedStepTime
from agentservesim.step_time.decode_line import LinedStepTime
from agentservesim.step_time.hardware import Gpu, gpu
from agentservesim.step_time.interface import DecodeLine, StepCost, StepTimeModel
from agentservesim.step_time.kv_pool import KVPool, kv_pool_tokens
from agentservesim.step_time.linear import LinearStepTime
from agentservesim.step_time.measured import MeasuredStepTime
from agentservesim.step_time.models import Model, model
from agentservesim.step_time.operators import NoMeasurements, Operators
from agentservesim.step_time.residual import Residual, load_residual, shipped_residual
from agentservesim.step_time.roofline import RooflineStepTime
from agentservesim.step_time.tables import TablesStepTime

__all__ = [
    "DecodeLine",
    "Gpu",
    "KVPool",
    "Model",
    "StepCost",
    "StepTimeModel",
    "build_step_time",
    "gpu",
    "kv_pool_tokens",
    "model",
]


def build_step_time(config: RunConfig) -> StepTimeModel:
    """The step-time model that a config asks for.

    `measured` falls back to the roofline where nothing was measured; the notice then says why.
    Raises InputError for an unknown GPU or model, for a tp that cannot split the model, and for tables or a
    residual that cannot be read.
    """
    chip, spec, tp = gpu(config.cluster.gpu), model(config.cluster.model), config.cluster.tp
    spec.check_tp(tp)
    budget = config.engine.max_num_batched_tokens
    if config.step_time.backend == "linear":
        return LinearStepTime(config.step_time, chip, tp, budget)
    if config.step_time.backend == "roofline":
        back_end: LinedStepTime = RooflineStepTime(chip, spec, tp, budget)
    elif config.step_time.path is not None:
        back_end = TablesStepTime(Path(config.step_time.path), chip, spec, tp, budget)
    else:
        back_end = _measured(chip, spec, tp, budget)
    residual = _residual(config.step_time.residual, chip, spec, tp, back_end.backend)
    return back_end if residual is None else CorrectedStepTime(back_end, residual)


def _measured(chip: Gpu, spec: Model, tp: int, budget: int) -> LinedStepTime:
    try:
        operators = Operators(chip, spec, tp)
    except NoMeasurements as missing:
        return RooflineStepTime(chip, spec, tp, budget, reason=str(missing))
    return MeasuredStepTime(operators, chip, spec, tp, budget)


def _residual(wanted: str, chip: Gpu, spec: Model, tp: int, backend: str) -> Residual | None:
    if wanted == "none":
        return None
    if wanted == "auto":
        return shipped_residual(chip.name, spec.name, tp, backend)
    residual = load_residual(Path(wanted))
    if residual.backend != backend:
        raise InputError(
            f"{wanted}: field 'backend' is {residual.backend!r}: it corrects that back end, "
            f"and step_time uses {backend!r}"
        )
    return residual
