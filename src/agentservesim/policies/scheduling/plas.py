from __future__ import annotations

from agentservesim.policies.interface import PCB


class Plas:
    """Program-level least attained service: the priority is the service the program has had, in ms."""

    def priority(self, pcb: PCB, now_s: float) -> int:
        return round(1000 * pcb.attained_service_s)
