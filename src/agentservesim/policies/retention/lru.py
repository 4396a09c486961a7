from __future__ import annotations

from agentservesim.policies.interface import PCB, KVView


class Lru:
    """No retention, plain vLLM: a finished call's KV joins the free queue and leaves it oldest first."""

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> None:
        return None
