"""Priorities of waiting calls under a policy that looks at nothing but what is resident of each."""

from __future__ import annotations

from collections.abc import Callable

from agentservesim.engine.block_pool import BlockPool
from agentservesim.engine.content import Line
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import WaitingQueue
from agentservesim.programs.orchestrator import Call, call_of


class ResidencyOrder:
    """Asks again for a waiting call of one instance when blocks of its content have been cached or evicted
    there since, and gives the answers that asking for every call each time would.

    A call is asked for every time while others of its program are under way, for they may change what the
    policy sees of it, and where the last of them was placed elsewhere, for it is that pool that counts.
    """

    def __init__(self, pool: BlockPool, priority: Callable[[Call], int]) -> None:
        self._priority = priority
        self._changed = pool.watch()
        self._settled: dict[Request, tuple[Line, ...]] = {}

    def __call__(self, waiting: WaitingQueue) -> bool:
        """Bring the priorities up to date; returns whether one has changed."""
        changed = self._changed
        before, self._settled = self._settled, {}
        moved = False
        for request in waiting.in_any_order():
            lines = before.get(request)
            if lines is None or not changed.isdisjoint(lines):
                call = call_of(request)
                priority = self._priority(call)
                if priority != request.priority:
                    request.priority = priority
                    moved = True
                if call.run.in_flight > 1 or call.run.pcb.instance != call.instance:
                    continue
                lines = tuple([span.line for span in call.content.spans])
            self._settled[request] = lines
        changed.clear()
        return moved
