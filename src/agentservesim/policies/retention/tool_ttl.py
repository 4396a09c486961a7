from __future__ import annotations

import math

from agentservesim.policies.interface import PCB, KVView, Protect


class ToolTtl:
    """Continuum's pin: protect for pin_s before a tool whose mean gap is at most threshold_s, or unknown.

    A call without a tool, or whose tool's mean gap is above threshold_s, leaves its KV to plain LRU.
    KV still protected when the program's next call arrives is held until that call is admitted.

    pin_s         seconds of protection
    threshold_s   the longest mean gap, in seconds, that is still worth a pin
    """

    def __init__(self, pin_s: float = 2.0, threshold_s: float = 2.0) -> None:
        if not pin_s > 0:
            raise ValueError(f"pin_s must be above 0 seconds, not {pin_s}")
        if not threshold_s >= 0:
            raise ValueError(f"threshold_s must be 0 seconds or more, not {threshold_s}")
        self.pin_s = pin_s
        self.threshold_s = threshold_s

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Protect | None:
        if pcb.tool_name is None:
            return None
        if pcb.tool_mean_gap_s is not None and pcb.tool_mean_gap_s > self.threshold_s:
            return None
        return Protect(now_s + self.pin_s)

    def on_call_arrival(self, pcb: PCB, now_s: float, kv: KVView) -> Protect | None:
        return Protect(math.inf) if pcb.kv_protected else None
