from __future__ import annotations

from agentservesim.policies.interface import PCB, QueueView


class ProgramCap:
    """A program starts only while the contexts of those running plus its prompt stay below f of the KV pool.

    Calls of a started program always enter, and a program always starts where no other runs.

    f   share of all instances' KV pool, in (0, 1]
    """

    def __init__(self, f: float = 0.9) -> None:
        if not 0 < f <= 1:
            raise ValueError(f"f must be a share of the KV pool, above 0 and at most 1, not {f}")
        self.f = f

    def admit(self, pcb: PCB, now_s: float, queue: QueueView) -> bool:
        if queue.program_admitted or queue.admitted_programs == 0:
            return True
        return queue.admitted_context_tokens + pcb.prompt_tokens < self.f * queue.capacity_tokens
