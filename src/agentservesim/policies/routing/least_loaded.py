from __future__ import annotations

from collections.abc import Sequence

from agentservesim.policies.interface import PCB, InstanceView


class LeastLoaded:
    """A call goes to the instance with the fewest calls in flight; ties to the lowest index."""

    def route(self, pcb: PCB, now_s: float, instances: Sequence[InstanceView]) -> int:
        return min(instances, key=lambda view: (view.in_flight, view.index)).index
