from __future__ import annotations

from agentservesim.policies.interface import PCB


class ProgramFcfs:
    """Calls of the program that arrived first run first: the priority is its arrival, in ms."""

    def priority(self, pcb: PCB, now_s: float) -> int:
        return round(1000 * pcb.arrival_s)
