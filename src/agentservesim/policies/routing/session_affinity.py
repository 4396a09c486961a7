from __future__ import annotations

from collections.abc import Sequence

from agentservesim.policies.interface import PCB, InstanceView


class SessionAffinity:
    """A call goes where its program's last call ran while that is below its limit, else to the least loaded.

    limit   calls in flight an instance may hold and still take its programs back;
            null: the instance's max_num_seqs
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(
                f"limit must be at least 1 call in flight, or null for max_num_seqs, not {limit}"
            )
        self.limit = limit

    def route(self, pcb: PCB, now_s: float, instances: Sequence[InstanceView]) -> int:
        if pcb.instance is not None and pcb.instance < len(instances):
            home = instances[pcb.instance]
            if home.in_flight < (home.max_num_seqs if self.limit is None else self.limit):
                return home.index
        return min(instances, key=lambda view: (view.in_flight, view.index)).index
