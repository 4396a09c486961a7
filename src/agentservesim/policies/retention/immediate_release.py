from __future__ import annotations

from agentservesim.policies.interface import PCB, Evict, KVView


class ImmediateRelease:
    """Evict a call's KV as soon as it completes: the floor, nothing is reused across a gap."""

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Evict:
        return Evict()
