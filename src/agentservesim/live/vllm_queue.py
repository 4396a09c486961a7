"""vLLM's waiting queue under PRIORITY, for a scheduling policy that is asked again while calls wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.request import Request


class DynamicQueue(PriorityRequestQueue):
    """Asks for new priorities once a step, when the first waiting request could be admitted: that is when
    vLLM first peeks."""

    def __init__(self, reprioritize: Callable[[Sequence[Request]], None]) -> None:
        super().__init__()
        self._reprioritize = reprioritize
        self._up_to_date = False

    def begin_step(self) -> None:
        """A new schedule() begins."""
        self._up_to_date = False

    def peek_request(self) -> Request:
        if not self._up_to_date:
            self._up_to_date = True
            self._reprioritize(sorted(self._heap))
            heapq.heapify(self._heap)
        return super().peek_request()
