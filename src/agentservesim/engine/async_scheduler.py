"""vLLM's AsyncScheduler: step n + 1 is scheduled while step n runs, so tokens in flight count as computed.

A token that a step in flight will deliver is a placeholder of its request until then. Requests end by
length (max_tokens or max_model_len), which the scheduler foresees; the extra step that vLLM spends on a
request that ends by a stop token is not modelled.
"""

from __future__ import annotations

from itertools import islice

from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput


class AsyncScheduler(Scheduler):
    """A Scheduler whose `schedule` is called once more before the step before has been updated.

    Decodes are counted together between an update and the next schedule, when one token of each is in flight:
    the three counters then stand at 1, 1 and 0. They leave when that token is their last, and are `ending`
    until it is delivered.

    num_output_placeholders    tokens that steps in flight will deliver
    num_in_flight_tokens       tokens that steps in flight compute
    num_stale_tokens           those of them that a preemption has made worthless since
    """

    tokens_in_flight = 1

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput:
        output = super().schedule(now_s)
        scheduled = output.num_scheduled_tokens
        output.sampled.update(islice(scheduled, output.from_decodes))
        for request, num_new_tokens in islice(scheduled.items(), output.from_decodes, None):
            request.num_in_flight_tokens += num_new_tokens
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                output.sampled.add(request)
                request.num_output_placeholders += request.max_tokens > 0
        return output

    def _preempt(self, request: Request) -> None:
        """The token in flight is still delivered, but to a request that starts over."""
        super()._preempt(request)
        if request in self.ending:
            self.ending.remove(request)
        request.num_output_placeholders = 0
        request.num_stale_tokens = request.num_in_flight_tokens

    def update_from_output(self, output: SchedulerOutput, now_s: float = 0.0) -> list[Request]:
        """The oldest step in flight has run. Blocks and slots of what it finishes are free for the step
        after the one already scheduled."""
        finished = []
        for request, num_new_tokens in output.num_scheduled_tokens.items():
            if not request.decodes_alone:
                continue
            request.num_in_flight_tokens -= num_new_tokens
            stale = request.num_stale_tokens > 0
            if stale:
                request.num_stale_tokens -= num_new_tokens
            if request in output.sampled and self._deliver(request, stale, now_s):
                finished.append(request)
        self.ending = self.decodes.deliver() if self.decodes.size else []
        for request in finished:
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove(request)  # it was preempted, and the token in flight was its last
        for request in finished:
            self.on_finished(request)
        self._gather_decodes()
        return finished

    def _is_decode(self, request: Request) -> bool:
        """At the start of a block it waits a step: what is hashed of it depends on how it came there."""
        return (
            request.first_token_s is not None
            and request.num_tokens == request.num_computed_tokens
            and request.num_output_placeholders == request.num_in_flight_tokens == 1
            and request.num_stale_tokens == 0
            and request.num_tokens + 1 < request.num_tokens_at_end
            and request.num_tokens % self.kv_cache.block_size > 0
        )

    def _deliver(self, request: Request, stale: bool, now_s: float) -> bool:
        """Give the request its token; whether it is done with it."""
        if request.first_token_s is None:
            request.first_token_s = now_s
        if request.max_tokens > 0:
            request.num_tokens += 1
            if not stale:
                request.num_output_placeholders -= 1
        if not stale:
            known = request.num_computed_tokens - request.num_output_placeholders
            self.block_pool.cache_full_blocks(
                request.table, request.content, known // self.block_pool.block_size
            )
        if request.num_tokens < request.num_tokens_at_end:
            return False
        request.completed_s = now_s
        return True
