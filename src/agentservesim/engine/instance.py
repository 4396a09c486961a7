"""One serving instance: a scheduler and the clock of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput
from agentservesim.engine.usage import Usage

if TYPE_CHECKING:
    from agentservesim.step_time.interface import StepCost, StepTimeModel


class Instance:
    """Runs one step at a time. It knows requests, and neither programs nor policies.

    in_flight          requests submitted and not finished
    last_batch_tokens  tokens computed by the latest step
    """

    def __init__(self, index: int, scheduler: Scheduler, step_time: StepTimeModel) -> None:
        self.index = index
        self.scheduler = scheduler
        self.step_time = step_time
        self.in_flight = 0
        self.last_batch_tokens = 0
        self.usage = Usage(scheduler.block_pool.num_usable_blocks)
        self._step: SchedulerOutput | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.scheduler.block_pool.num_usable_blocks * self.scheduler.block_pool.block_size

    @property
    def stepping(self) -> bool:
        """Whether a step is in flight."""
        return self._step is not None

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

    def start_step(self, now_s: float) -> tuple[float, SchedulerOutput] | None:
        """Schedule and start a step; returns when it ends and what is in it, or None if there is nothing
        to run. Preemptions can leave a step empty: vLLM then schedules again at once, and so do we."""
        if self.in_flight == 0:
            return None
        preempted: list[Request] = []
        while True:
            output = self.scheduler.schedule(now_s)
            preempted += output.preempted
            if output.num_scheduled_tokens:
                break
            if not output.preempted:
                return None
        output.preempted = preempted
        self._step = output
        seconds = self.usage.add_step(now_s, self._cost(output), self.scheduler.block_pool)
        return now_s + seconds, output

    def finish_step(self, now_s: float) -> list[Request]:
        """The step in flight ends; returns the requests it finished, already disposed of."""
        assert self._step is not None
        output, self._step = self._step, None
        finished = self.scheduler.update_from_output(output, now_s)
        self.in_flight -= len(finished)
        self.usage.observe(now_s, self.scheduler.block_pool)
        return finished

    def _cost(self, output: SchedulerOutput) -> StepCost:
        """Describe the batch to the step-time model. One new token on top of a context is a decode,
        whatever the request calls it."""
        prefills: list[tuple[int, int]] = []
        decodes = decode_context_tokens = tokens = 0
        for request, num_new_tokens in output.num_scheduled_tokens.items():
            tokens += num_new_tokens
            if num_new_tokens == 1 and request.num_computed_tokens > 1:
                decodes += 1
                decode_context_tokens += request.num_computed_tokens
            else:
                prefills.append((num_new_tokens, request.num_computed_tokens - num_new_tokens))
        self.last_batch_tokens = tokens
        return self.step_time.step(prefills, decodes, decode_context_tokens)
