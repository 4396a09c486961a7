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
        self._pool = pool
        self._priority = priority
        self._changed = pool.watch()
        self._num_added = -1
        self._lines: dict[Request, tuple[Line, ...]] = {}
        self._requests: dict[Line, list[Request]] = {}

    def __call__(self, waiting: WaitingQueue) -> bool:
        """Bring the priorities up to date; returns whether one has changed."""
        if waiting.num_added != self._num_added:
            moved = self._look_at_all(waiting)
        else:
            moved = False
            for line in self._changed.intersection(self._requests):
                for request in self._requests[line]:
                    if request.table.num_blocks:  # it runs; should it wait again, it is new here
                        self._lines.pop(request, None)
                    else:
                        moved |= self._ask(request)
        self._changed.clear()
        return moved

    def holds_for(self, num_blocks: int) -> int:
        """How many blocks, `num_blocks` or fewer, decodes can take before an answer might change; -1: it
        might at any time. No call that waits is of what decodes write, or it is asked for each time."""
        return self._pool.blocks_before(self._requests, num_blocks) if self._num_added >= 0 else -1

    def _look_at_all(self, waiting: WaitingQueue) -> bool:
        """As long as nobody is added, those whose lines are known here are all who wait."""
        self._num_added = waiting.num_added
        before, self._lines, self._requests = self._lines, {}, {}
        moved = False
        for request in waiting.in_any_order():
            lines = before.get(request)
            if lines is None or not self._changed.isdisjoint(lines):
                moved |= self._ask(request)
                call = call_of(request)
                if call.run.in_flight > 1 or call.run.pcb.instance != call.instance:
                    self._num_added = -1  # look at all the next time, too
                    continue
                lines = tuple([span.line for span in call.content.spans])
            self._lines[request] = lines
            for line in lines:
                self._requests.setdefault(line, []).append(request)
        return moved

    def _ask(self, request: Request) -> bool:
        priority = self._priority(call_of(request))
        moved = priority != request.priority
        request.priority = priority
        return moved
