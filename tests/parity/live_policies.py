"""Policies of a user's file: hooks that no built-in policy has, and every way to fail."""

from __future__ import annotations

import math
import time


class Contrary:
    """Scheduling: dynamic, preempts who has computed least, and admits sixteen programs."""

    dynamic = True

    def priority(self, pcb, now_s):
        return (pcb.kv_resident_tokens * 7 + pcb.turn_index * 13) % 11

    def victim(self, candidates, now_s):
        return min(
            range(len(candidates)), key=lambda at: (candidates[at].kv_tokens, candidates[at].submitted_s)
        )

    def admit(self, pcb, now_s, queue):
        return queue.program_admitted or queue.admitted_programs < 16


class Hoarder:
    """Retention: protects everything, for ever, by value; half of it is given back at the next arrival."""

    def on_call_complete(self, pcb, now_s, kv):
        from agentservesim.policies.interface import Protect

        return Protect(math.inf, float(pcb.context_tokens % 5))

    def on_call_arrival(self, pcb, now_s, kv):
        from agentservesim.policies.interface import Protect, Release

        return Release() if pcb.turn_index % 2 else Protect(now_s + 1.0, 9.0)


class Indifferent:
    """Scheduling: every call alike, which is what is left of a policy that fails."""

    def priority(self, pcb, now_s):
        return 0


class Raises:
    def on_call_complete(self, pcb, now_s, kv):
        raise RuntimeError("no idea")

    on_call_arrival = on_call_complete

    def priority(self, pcb, now_s):
        raise KeyError(pcb.program_id)

    def victim(self, candidates, now_s):
        raise SystemExit(1)

    def admit(self, pcb, now_s, queue):
        raise ValueError("no")


class Nonsense:
    def on_call_complete(self, pcb, now_s, kv):
        return "keep it"

    def on_call_arrival(self, pcb, now_s, kv):
        return 17

    def priority(self, pcb, now_s):
        return 0.5

    def victim(self, candidates, now_s):
        return len(candidates)

    def admit(self, pcb, now_s, queue):
        return "perhaps"


class Sleeps:
    def on_call_complete(self, pcb, now_s, kv):
        time.sleep(3600)

    def priority(self, pcb, now_s):
        time.sleep(3600)

    def admit(self, pcb, now_s, queue):
        time.sleep(3600)
