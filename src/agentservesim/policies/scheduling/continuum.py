from __future__ import annotations

from agentservesim.policies.interface import PCB

UNPROTECTED_MS = 10**12
"""Put before the arrival of unprotected calls: orders exactly while runs last under 31 years."""


class Continuum:
    """Calls whose program's KV is protected run first; within each group, by program arrival."""

    def priority(self, pcb: PCB, now_s: float) -> int:
        return round(1000 * pcb.arrival_s) + (0 if pcb.kv_protected else UNPROTECTED_MS)
