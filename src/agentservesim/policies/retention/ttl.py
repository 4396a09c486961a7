from __future__ import annotations

import math
from typing import Literal

from agentservesim.policies.interface import PCB, Decision, KVView, Protect, Release


class Ttl:
    """Protect a call's KV until now + tau_s, or until the program's next call if that comes first.

    tau_s   seconds of protection; the paper takes 2
    until   arrival: the next call's arrival releases the KV, as in the paper;
            admission: once that call has arrived in time, the KV is held until it is admitted
    """

    def __init__(self, tau_s: float = 2.0, until: Literal["arrival", "admission"] = "arrival") -> None:
        if not tau_s > 0:
            raise ValueError(f"tau_s must be above 0 seconds, not {tau_s}")
        if until not in ("arrival", "admission"):
            raise ValueError(f"until must be 'arrival' or 'admission', not {until!r}")
        self.tau_s = tau_s
        self.until = until

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Protect:
        return Protect(now_s + self.tau_s)

    def on_call_arrival(self, pcb: PCB, now_s: float, kv: KVView) -> Decision | None:
        if not pcb.kv_protected:
            return None
        return Protect(math.inf) if self.until == "admission" else Release()
