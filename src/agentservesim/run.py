"""From a config to a result: builds the parts, runs the simulation, writes the files."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentservesim.config import RunConfig
from agentservesim.engine.async_instance import AsyncInstance
from agentservesim.engine.async_scheduler import AsyncScheduler
from agentservesim.engine.instance import Instance
from agentservesim.engine.scheduler import Scheduler
from agentservesim.errors import AgentServeSimError, InputError
from agentservesim.policies import registry
from agentservesim.policies.scheduling.fcfs import Fcfs
from agentservesim.results.recorder import Recorder
from agentservesim.results.summary import summarize
from agentservesim.simulation import Policies, Simulation
from agentservesim.step_time import StepTimeModel, build_step_time, kv_pool_tokens, model
from agentservesim.step_time.known_errors import expected_error
from agentservesim.workload import load_programs
from agentservesim.workload.arrivals import open_loop
from agentservesim.workload.report import ReadingReport

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Result:
    """What a run gave.

    summary     the keys of summary.json
    reading     what reading the workload dropped, estimated, clamped or inferred
    tables      calls, programs and decisions as Arrow tables; empty when they went to files
    """

    config: RunConfig
    summary: dict[str, Any]
    reading: ReadingReport
    tables: dict[str, pa.Table] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every call was served: nothing refused, nothing lost."""
        return not (self.summary["calls_refused"] or self.summary["calls_live"])


def simulate(
    config: RunConfig,
    out_dir: Path | None = None,
    on_progress: Callable[[Simulation], None] | None = None,
    keep_tables: bool = True,
    step_time: StepTimeModel | None = None,
) -> Result:
    """Run a config. With `out_dir`, config.yaml, summary.json and the Parquet tables are written there;
    else the tables are kept in memory, unless keep_tables is False.

    `on_progress` is called after each instant of simulated time, and may call `interrupt`. `step_time` takes
    the place of the model that the config names.

    Raises InputError for a wrong config or workload, PolicyError for a policy that fails.
    """
    try:
        workload = load_programs(config.workload)
        policies = _policies(config)
        instances = _instances(config, policies, step_time or build_step_time(config))
    except AgentServeSimError as error:
        raise config.origin.locate(error) from error
    arrivals = config.workload.arrivals
    closed_loop = arrivals.process == "closed_loop"
    programs = workload.programs
    with writing(out_dir):
        recorder = Recorder(out_dir, keep_tables, config.client.response_s)
    simulation = Simulation(
        ((0.0, program) for program in programs) if closed_loop else open_loop(programs, arrivals),
        instances,
        policies,
        recorder,
        deployment=config.output_reuse == "deployment",
        lanes=arrivals.lanes if closed_loop else None,
        client=config.client,
    )
    with _few_collections():
        simulation.run(on_progress)
    if recorder.programs == 0:
        raise InputError(f"workload {config.workload.source}: no programs; expected at least one")
    summary = summarize(recorder, instances, simulation.clock.now_s, simulation.sim_wall_s)
    summary["interrupted"] = simulation.interrupted
    summary["step_time"]["expected_error"] = expected_error(config, summary["step_time"]["backend"]).as_dict()
    with writing(out_dir):
        tables = recorder.close()
        if out_dir is not None:
            write_summary(out_dir, config, summary)
    return Result(config, summary, workload.report, tables)


def _instances(config: RunConfig, policies: Policies, step_time: StepTimeModel) -> list[Instance]:
    engine = config.engine
    options: dict[str, Any] = {
        "num_blocks": kv_pool_tokens(config.cluster, engine).num_blocks,
        "block_size": engine.block_size,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len or model(config.cluster.model).max_position_embeddings,
        "policy": "fcfs" if isinstance(policies.scheduling, Fcfs) else "priority",
        "long_prefill_token_threshold": engine.long_prefill_token_threshold,
        "watermark": engine.watermark,
        "scheduler_reserve_full_isl": engine.scheduler_reserve_full_isl,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "semantics": engine.semantics,
    }
    indices = range(config.cluster.instances)
    if engine.async_scheduling:
        return [AsyncInstance(index, AsyncScheduler(**options), step_time) for index in indices]
    may_leap = engine.step_mode == "leap"
    return [Instance(index, Scheduler(**options), step_time, may_leap) for index in indices]


def _policies(config: RunConfig) -> Policies:
    chosen: dict[str, Any] = {}
    for axis in registry.AXES:
        try:
            chosen[axis] = registry.build(axis, getattr(config.policies, axis))
        except AgentServeSimError as error:
            raise config.origin.locate(error, ("policies", axis)) from error
    return Policies(**chosen)


def _from_anywhere(config: RunConfig) -> RunConfig:
    """The config with its workload's path made absolute, so that a copy of it runs from any folder."""
    source = config.workload.source
    if not os.path.exists(source):
        return config
    workload = config.workload.model_copy(update={"source": os.path.abspath(source)})
    return config.model_copy(update={"workload": workload})


def write_summary(out_dir: Path, config: RunConfig, summary: dict[str, Any]) -> None:
    """config.yaml and summary.json of a run."""
    (out_dir / "config.yaml").write_text(_from_anywhere(config).to_yaml(), encoding="utf-8")
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run makes and drops millions of objects and no cycles: looking for cycles every 700 objects costs 5 %
    of its time and finds none."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def writing(out_dir: Path | None) -> Iterator[None]:
    """Whatever cannot be written below --out is the user's to know."""
    try:
        if out_dir is not None:
            out_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"--out {out_dir}: cannot write there: {error}") from None
