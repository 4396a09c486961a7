"""The same programs through the simulator, step by step, with the step times of a live run."""

from __future__ import annotations

from typing import Any

import msgspec

from agentservesim.engine.async_instance import AsyncInstance
from agentservesim.engine.async_scheduler import AsyncScheduler
from agentservesim.engine.instance import Instance
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput
from agentservesim.policies import registry
from agentservesim.programs.orchestrator import call_of
from agentservesim.simulation import Policies, Simulation

from .live_engine import PLAIN, Run, StepRow, Steps, Watcher


def _watched(base: type[Scheduler], run: Run, **options: Any) -> Scheduler:
    """A scheduler that writes down what it does."""

    class Watched(base):  # type: ignore[misc, valid-type]
        def schedule(self, now_s: float = 0.0) -> SchedulerOutput:
            before = set(self.running)
            output: SchedulerOutput = super().schedule(now_s)
            run.steps.append(
                StepRow(
                    time_s=now_s,
                    batch=tuple((call_of(r).key, n) for r, n in output.num_scheduled_tokens.items()),
                    hits=tuple(
                        (call_of(r).key, r.num_computed_tokens - n)
                        for r, n in output.num_scheduled_tokens.items()
                        if r not in before
                    ),
                    preempted=tuple(call_of(r).key for r in output.preempted),
                    free_blocks=self.block_pool.num_free_blocks,
                    parked_blocks=self.block_pool.num_parked,
                )
            )
            return output

        def update_from_output(self, output: SchedulerOutput, now_s: float = 0.0) -> list[Request]:
            finished: list[Request] = super().update_from_output(output, now_s)
            last = run.steps[-1]
            keys = tuple(call_of(request).key for request in finished)
            run.steps[-1] = msgspec.structs.replace(last, finished=(*last.finished, *keys))
            return finished

    return Watched(**options)


def run_simulated(
    programs: list[tuple[float, Any]],
    seconds: list[float],
    chosen: dict[str, str],
    engine: dict[str, Any],
    async_scheduling: bool = False,
) -> Run:
    """The simulator under the policies `chosen`, its k-th step lasting seconds[k]."""
    run = Run(seconds=seconds)
    policies = Policies(**{axis: registry.build(axis, spec) for axis, spec in (PLAIN | chosen).items()})
    base = AsyncScheduler if async_scheduling else Scheduler
    kind = AsyncInstance if async_scheduling else Instance
    fcfs = (PLAIN | chosen)["scheduling"] == "fcfs"
    scheduler = _watched(base, run, policy="fcfs" if fcfs else "priority", **engine)
    remaining = iter(seconds)
    # Steps beyond the last one of the live run are a difference, found where the runs are compared.
    instance = kind(0, scheduler, Steps(lambda: next(remaining, 1.0)))
    Simulation(iter(programs), [instance], policies, Watcher(run)).run()
    return run
