from __future__ import annotations

from collections.abc import Sequence

from agentservesim.policies.interface import PCB, InstanceView


class RoundRobin:
    """Calls go to the instances in turn."""

    def __init__(self) -> None:
        self._routed = 0

    def route(self, pcb: PCB, now_s: float, instances: Sequence[InstanceView]) -> int:
        chosen = instances[self._routed % len(instances)]
        self._routed += 1
        return chosen.index
