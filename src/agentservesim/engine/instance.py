"""One serving instance: a scheduler and the clock of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentservesim.clock import Clock
from agentservesim.engine.leap import Leap, commit, plan_leap
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput
from agentservesim.engine.usage import Usage

if TYPE_CHECKING:
    from agentservesim.step_time.interface import StepCost, StepTimeModel


class Instance:
    """Runs one step at a time. It knows requests, and neither programs nor policies.

    in_flight          requests submitted and not finished
    last_batch_tokens  tokens computed by the latest step
    step_end_s         when the step or leap in flight ends; None while idle
    on_resync          told when `sync` has changed step_end_s
    """

    def __init__(
        self, index: int, scheduler: Scheduler, step_time: StepTimeModel, may_leap: bool = False
    ) -> None:
        self.index = index
        self.scheduler = scheduler
        self.step_time = step_time
        self.in_flight = 0
        self.last_batch_tokens = 0
        self.usage = Usage(scheduler.block_pool.num_usable_blocks)
        self.step_end_s: float | None = None
        self.on_resync: Callable[[Instance], None] = lambda instance: None
        self._may_leap = may_leap
        self._leap: Leap | None = None
        self._output: SchedulerOutput | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.scheduler.block_pool.num_usable_blocks * self.scheduler.block_pool.block_size

    def num_used_blocks(self, clock: Clock) -> int:
        """Blocks that requests hold now. Looks into a leap without cutting it short."""
        used = self.scheduler.block_pool.num_used_blocks
        if self._leap is not None:
            used += self.scheduler.decodes.new_blocks(self._leap.steps_started(clock))
        return used

    @property
    def stepping(self) -> bool:
        """Whether a step is in flight."""
        return self.step_end_s is not None

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Why this instance can never serve such a call, in words; None if it can.

        vLLM refuses a prompt of max_model_len or more. A sequence that cannot fit into the whole pool
        would block its queue for ever. The last output token is never computed, so it needs no slot.
        """
        limit = self.scheduler.max_model_len
        if prompt_tokens >= limit:
            return f"prompt_tokens {prompt_tokens} >= max_model_len {limit}"
        output_tokens = min(output_tokens, limit - prompt_tokens)
        needed = prompt_tokens + max(output_tokens - 1, 0)
        if -(-needed // self.scheduler.block_pool.block_size) > self.scheduler.block_pool.num_usable_blocks:
            return f"{needed} tokens of KV > {self.capacity_tokens} in the pool"
        return None

    def add_request(self, request: Request) -> None:
        """Queue a request; it is considered at the next step."""
        self.in_flight += 1
        self.scheduler.add_request(request)

    def start_step(self, now_s: float) -> list[Request] | None:
        """Start the next step, or the next leap of steps; `step_end_s` says when it ends. Returns the
        requests preempted for it, or None if there is nothing to run."""
        if self.in_flight == 0:
            return None
        if self._may_leap:
            self._leap = plan_leap(self.scheduler, self.step_time, now_s)
            if self._leap is not None:
                self.step_end_s = self._leap.end_s
                self.last_batch_tokens = self._leap.decodes
                self.usage.observe(now_s, self.scheduler.block_pool)
                return []
        return self._start_single(now_s)

    def finish_step(self, now_s: float) -> list[Request]:
        """What was started ends; returns the requests it finished, already disposed of."""
        self.step_end_s = None
        if self._leap is not None:
            leap, self._leap = self._leap, None
            self._commit(leap, leap.steps)
            return []
        if self._output is None:
            return []  # a leap that somebody looked at in the instant of its end
        output, self._output = self._output, None
        finished = self.scheduler.update_from_output(output, now_s)
        self.in_flight -= len(finished)
        self.usage.observe(now_s, self.scheduler.block_pool)
        return finished

    def sync(self, clock: Clock) -> None:
        """Bring the instance's state to the present, for somebody who is about to look at it or change it:
        a leap under way ends with the step that runs now."""
        if self._leap is None:
            return
        leap, self._leap = self._leap, None
        ended, started = leap.steps_ended(clock.now_s), leap.steps_started(clock)
        self._commit(leap, ended)
        if started > ended:
            self._start_single(leap.times[ended])
        else:
            self.step_end_s = clock.now_s
        self.on_resync(self)

    def _start_single(self, now_s: float) -> list[Request] | None:
        """Schedule and start one step. Preemptions can leave it empty: vLLM then schedules again at once,
        and so do we."""
        preempted: list[Request] = []
        while True:
            output = self.scheduler.schedule(now_s)
            preempted += output.preempted
            if output.num_scheduled_tokens:
                break
            if not output.preempted:
                return None
        self._output = output
        cost = self._cost(output)
        self.usage.add_step(now_s, cost, self.scheduler.block_pool)
        self.step_end_s = now_s + cost.seconds
        return preempted

    def _commit(self, leap: Leap, steps: int) -> None:
        self.usage.add_leap(leap, steps, self.scheduler.decodes.block_seconds(leap.times, steps))
        commit(leap, steps, self.scheduler)
        if steps:
            self.usage.observe(leap.times[steps], self.scheduler.block_pool)

    def _cost(self, output: SchedulerOutput) -> StepCost:
        spread = output.decode_spread() if self.step_time.uses_spread else None
        self.last_batch_tokens = output.decodes + sum([new for new, _ in output.prefills])
        return self.step_time.step(output.prefills, output.decodes, output.decode_context_tokens, spread)
