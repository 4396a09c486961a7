from __future__ import annotations

from agentservesim.policies.interface import PCB

NOT_RESIDENT_MS = 10**12
"""Put before the arrival of calls without their KV: orders exactly while runs last under 31 years."""


class ResidentFirst:
    """Calls with more than half of their context still in the KV pool run first; then by program arrival.

    Asked again while calls wait, for what is resident changes. A first call has no context and no claim.
    """

    dynamic = True
    follows_residency = True

    def priority(self, pcb: PCB, now_s: float) -> int:
        resident = 2 * pcb.kv_resident_tokens > pcb.context_tokens > 0
        return round(1000 * pcb.arrival_s) + (0 if resident else NOT_RESIDENT_MS)
