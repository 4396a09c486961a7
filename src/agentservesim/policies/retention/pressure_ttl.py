from __future__ import annotations

import math
from typing import Literal

from agentservesim.policies.interface import PCB, Decision, KVView, Protect, Release


class PressureTtl:
    """Protect as ttl does, but for less time under KV pressure: down to tau_s / 2 at `hard` utilisation.

    With utilisation u, m = clip((u - soft) / (hard - soft), 0, 1) and the deadline is
    now + tau_s * (1 - 0.5 m).

    tau_s        seconds of protection without pressure
    soft, hard   KV utilisation, in [0, 1], where the shortening starts and where it is complete
    until        arrival: the next call's arrival releases the KV, as in the paper;
                 admission: once that call has arrived in time, the KV is held until it is admitted
    """

    def __init__(
        self,
        tau_s: float = 2.0,
        soft: float = 0.7,
        hard: float = 0.9,
        until: Literal["arrival", "admission"] = "arrival",
    ) -> None:
        if not tau_s > 0:
            raise ValueError(f"tau_s must be above 0 seconds, not {tau_s}")
        if not 0 <= soft < hard <= 1:
            raise ValueError(f"soft and hard must satisfy 0 <= soft < hard <= 1, not {soft} and {hard}")
        if until not in ("arrival", "admission"):
            raise ValueError(f"until must be 'arrival' or 'admission', not {until!r}")
        self.tau_s = tau_s
        self.soft = soft
        self.hard = hard
        self.until = until

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Protect:
        pressure = min(max((kv.utilization - self.soft) / (self.hard - self.soft), 0.0), 1.0)
        return Protect(now_s + self.tau_s * (1 - 0.5 * pressure))

    def on_call_arrival(self, pcb: PCB, now_s: float, kv: KVView) -> Decision | None:
        if not pcb.kv_protected:
            return None
        return Protect(math.inf) if self.until == "admission" else Release()
