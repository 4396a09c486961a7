from __future__ import annotations

from agentservesim.policies.interface import PCB


class Fcfs:
    """The engine's own order: calls run first come, first served."""

    def priority(self, pcb: PCB, now_s: float) -> None:
        return None
