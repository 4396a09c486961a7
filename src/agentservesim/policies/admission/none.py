from __future__ import annotations

from agentservesim.policies.interface import PCB, QueueView


class AdmitAll:
    """Every ready call enters its instance's queue at once."""

    def admit(self, pcb: PCB, now_s: float, queue: QueueView) -> bool:
        return True
