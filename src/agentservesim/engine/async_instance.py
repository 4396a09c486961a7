"""An instance with asynchronous scheduling: two steps in flight, one running and one scheduled behind it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agentservesim.clock import Clock
from agentservesim.engine.instance import Instance
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput

if TYPE_CHECKING:
    from agentservesim.step_time.interface import StepTimeModel

STEPS_IN_FLIGHT = 2


class AsyncInstance(Instance):
    """vLLM's engine loop with a batch queue of two: fill the queue, wait for the oldest step, update.

    A call that arrives while a step runs is first seen by the schedule after that step's end. A step
    without tokens takes its place in the queue and no time. Every step is taken singly.
    """

    def __init__(self, index: int, scheduler: Scheduler, step_time: StepTimeModel) -> None:
        super().__init__(index, scheduler, step_time)
        self._in_flight_steps: deque[tuple[SchedulerOutput, float]] = deque()
        self._device_free_s = 0.0

    def start_step(self, now_s: float) -> list[Request] | None:
        """Schedule until two steps are in flight; `step_end_s` is when the oldest ends."""
        preempted: list[Request] = []
        while self.in_flight and len(self._in_flight_steps) < STEPS_IN_FLIGHT:
            output = self.scheduler.schedule(now_s)
            preempted += output.preempted
            if output.num_scheduled_tokens or self._in_flight_steps:
                self._push(output, now_s)
            elif not output.preempted:
                break
        if not self._in_flight_steps:
            return None
        self.step_end_s = self._in_flight_steps[0][1]
        return preempted

    def finish_step(self, now_s: float) -> list[Request]:
        """The oldest step ends; returns the requests it finished, already disposed of."""
        self.step_end_s = None
        output, _ = self._in_flight_steps.popleft()
        while self._in_flight_steps and not self._in_flight_steps[0][0].num_scheduled_tokens:
            self._in_flight_steps.popleft()
        finished = self.scheduler.update_from_output(output, now_s)
        self.in_flight -= len(finished)
        self.usage.observe(now_s, self.scheduler.block_pool)
        return finished

    def sync(self, clock: Clock) -> None:
        """Its state is always the present one."""

    def _push(self, output: SchedulerOutput, now_s: float) -> None:
        start_s = max(now_s, self._device_free_s)
        end_s = start_s
        if output.num_scheduled_tokens:
            cost = self._cost(output)
            self.usage.add_step(now_s, cost, self.scheduler.block_pool)
            end_s = self._device_free_s = start_s + cost.seconds
        self._in_flight_steps.append((output, end_s))
