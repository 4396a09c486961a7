"""The Program Control Block: what a deployed engine knows of a program, carried across its calls."""

from __future__ import annotations

from agentservesim.policies.interface import PCB


class Mean:
    """A running count and mean."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / self.count


class Gap:
    """A tool gap that has begun: after which call, with which tool."""

    __slots__ = ("closed", "started_s", "tool_name")

    def __init__(self, tool_name: str | None, started_s: float) -> None:
        self.tool_name = tool_name
        self.started_s = started_s
        self.closed = False


class ProgramControlBlock:
    """State of one program; policies see it as a frozen `PCB` made by `view`. Holds no future."""

    __slots__ = (
        "arrival_s",
        "attained_service_s",
        "calls_submitted",
        "context_tokens",
        "gaps",
        "instance",
        "last_gap",
        "program_id",
        "turns_completed",
    )

    def __init__(self, program_id: str, arrival_s: float) -> None:
        self.program_id = program_id
        self.arrival_s = arrival_s
        self.turns_completed = 0
        self.calls_submitted = 0
        self.attained_service_s = 0.0
        self.instance: int | None = None
        self.context_tokens = 0
        self.gaps = Mean()
        self.last_gap: Gap | None = None


class ProgramTable:
    """The PCBs of live programs, and what is known of each tool over all programs."""

    def __init__(self) -> None:
        self._blocks: dict[str, ProgramControlBlock] = {}
        self._tools: dict[str, Mean] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def open(self, program_id: str, arrival_s: float) -> ProgramControlBlock:
        """A program has arrived."""
        pcb = self._blocks[program_id] = ProgramControlBlock(program_id, arrival_s)
        return pcb

    def close(self, pcb: ProgramControlBlock) -> None:
        """A program has ended."""
        del self._blocks[pcb.program_id]

    def call_completed(
        self,
        pcb: ProgramControlBlock,
        now_s: float,
        service_s: float,
        context_tokens: int,
        tool_name: str | None,
    ) -> Gap:
        """Account for a completed call and open the gap after it."""
        pcb.turns_completed += 1
        pcb.attained_service_s += service_s
        pcb.context_tokens = context_tokens
        pcb.last_gap = Gap(tool_name, now_s)
        return pcb.last_gap

    def close_gap(self, pcb: ProgramControlBlock, gap: Gap, now_s: float) -> None:
        """The first call after a gap has arrived: the gap's length is now known."""
        if gap.closed:
            return
        gap.closed = True
        gap_s = now_s - gap.started_s
        pcb.gaps.add(gap_s)
        if gap.tool_name is not None:
            self._tools.setdefault(gap.tool_name, Mean()).add(gap_s)

    def view(
        self,
        pcb: ProgramControlBlock,
        turn_index: int,
        prompt_tokens: int,
        gap: Gap | None,
        kv_resident_tokens: int,
        kv_deadline_s: float | None,
    ) -> PCB:
        """A frozen snapshot for a policy, of the call with that index and prompt, at or after `gap`.

        kv_deadline_s is None when the call finds nothing protected.
        """
        tool = self._tools.get(gap.tool_name) if gap is not None and gap.tool_name is not None else None
        return PCB(
            program_id=pcb.program_id,
            arrival_s=pcb.arrival_s,
            turn_index=turn_index,
            turns_completed=pcb.turns_completed,
            attained_service_s=pcb.attained_service_s,
            instance=pcb.instance,
            prompt_tokens=prompt_tokens,
            context_tokens=pcb.context_tokens,
            kv_resident_tokens=kv_resident_tokens,
            kv_protected=kv_deadline_s is not None,
            kv_deadline_s=kv_deadline_s,
            in_gap=gap is not None and not gap.closed,
            tool_name=gap.tool_name if gap is not None else None,
            gap_started_s=gap.started_s if gap is not None else None,
            gap_count=pcb.gaps.count,
            gap_mean_s=pcb.gaps.mean if pcb.gaps.count else None,
            tool_mean_gap_s=tool.mean if tool is not None else None,
        )
