from __future__ import annotations

import math

from agentservesim.policies.interface import PCB


class EvolvedSqrtPlas:
    """Found by the paper's search: least root of attained service, long contexts later, resident KV sooner.

    The priority is 1000 * sqrt(attained service in s) + 0.03 per context token - 0.10 per resident token,
    read as ms; it may be negative. A first call has neither context nor service: 0.
    """

    def priority(self, pcb: PCB, now_s: float) -> int:
        return round(
            1000 * math.sqrt(pcb.attained_service_s)
            + 0.03 * pcb.context_tokens
            - 0.10 * pcb.kv_resident_tokens
        )
