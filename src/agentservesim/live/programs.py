"""The programs an engine knows: from requests that name their program to PCBs, calls and gaps."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from agentservesim.live.identity import Identity
from agentservesim.programs.orchestrator import Call, ProgramRun
from agentservesim.programs.pcb import Gap, ProgramControlBlock, ProgramTable
from agentservesim.programs.program import Program, ToolCall, Turn

GAPS_KEPT = 256
"""Completed calls of one program that later calls may name as their parents."""


class LiveProgram(ProgramRun):
    """A program under way whose turns are not known beforehand.

    gaps_after      the gap after each of the latest completed calls, by turn id
    in_flight       calls that are held, waiting or running
    last_active_s   when its last call arrived or completed
    ending          whether its last call has arrived: the program ends with what is in flight
    """

    def __init__(self, program_id: str, pcb: ProgramControlBlock) -> None:
        self.program = Program(program_id, ())
        self.pcb = pcb
        self.gaps_after: OrderedDict[str, Gap] = OrderedDict()
        self.in_flight = 0
        self.last_active_s = pcb.arrival_s
        self.ending = False


class LiveCall(Call):
    """One request of a program.

    vllm_request   vLLM's Request
    content        the hashes of its full blocks, from which residency is read
    priority       what the scheduling policy answered
    scheduled_s    when it was first admitted; None before
    """

    run: LiveProgram
    content: Any
    request: Any

    def __init__(
        self, run: LiveProgram, identity: Identity, vllm_request: Any, now_s: float, parents: tuple[str, ...]
    ) -> None:
        self.run = run
        self.ordinal = run.pcb.calls_submitted
        run.pcb.calls_submitted += 1
        self.turn = Turn(
            turn_id=identity.turn_id or str(self.ordinal),
            prompt_tokens=vllm_request.num_prompt_tokens,
            output_tokens=vllm_request.max_tokens,
            tools=(ToolCall(identity.tool_name, 0.0),) if identity.tool_name else (),
        )
        self.content = vllm_request.block_hashes
        self.released_s = now_s
        self.after = -1
        self.gap = run.gaps_after.get(parents[0]) if parents else None
        self.instance = None
        self.request = None
        self.vllm_request = vllm_request
        self.priority: int | None = None
        self.scheduled_s: float | None = None
        self._parents = parents

    def parent_keys(self) -> tuple[tuple[str, str], ...]:
        return tuple((self.run.program.program_id, parent) for parent in self._parents)


class LivePrograms:
    """The programs with calls in flight, or whose last call is not long ago.

    idle_s   after how long without a call a program is forgotten
    """

    def __init__(self, idle_s: float) -> None:
        self.table = ProgramTable()
        self._idle_s = idle_s
        self._programs: OrderedDict[str, LiveProgram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def arrived(self, identity: Identity, vllm_request: Any, now_s: float) -> LiveCall:
        """A request of a program has arrived, perhaps the program's first. Its gap is not yet closed."""
        program = self._programs.get(identity.program_id)
        if program is None:
            pcb = self.table.open(identity.program_id, now_s)
            program = self._programs[identity.program_id] = LiveProgram(identity.program_id, pcb)
        parents = identity.parent_turn_ids
        if parents is None:
            parents = tuple(list(program.gaps_after)[-1:])
        program.in_flight += 1
        program.ending = program.ending or bool(identity.last_call)
        self._touch(program, now_s)
        return LiveCall(program, identity, vllm_request, now_s, parents)

    def completed(self, call: LiveCall, now_s: float) -> Gap:
        """A call has its last token: account for it and open the gap after it."""
        assert call.scheduled_s is not None
        program = call.run
        tools = call.turn.tools
        gap = self.table.call_completed(
            program.pcb,
            now_s,
            service_s=now_s - call.scheduled_s,
            context_tokens=call.vllm_request.num_tokens,
            tool_name=tools[0].name if tools else None,
        )
        gaps = program.gaps_after
        gaps.pop(call.turn.turn_id, None)
        gaps[call.turn.turn_id] = gap
        if len(gaps) > GAPS_KEPT:
            gaps.popitem(last=False)
        self._left(program, now_s)
        return gap

    def aborted(self, call: LiveCall, now_s: float) -> None:
        """A call has left without completing."""
        self._left(call.run, now_s)

    def end(self, program: LiveProgram) -> None:
        """Forget a program."""
        if self._programs.pop(program.program.program_id, None) is not None:
            self.table.close(program.pcb)

    def idle(self, now_s: float) -> list[LiveProgram]:
        """Programs without a call for so long that they are to be forgotten."""
        idle = []
        for program in self._programs.values():
            if program.last_active_s + self._idle_s >= now_s:
                break
            if program.in_flight == 0:
                idle.append(program)
        return idle

    def _left(self, program: LiveProgram, now_s: float) -> None:
        program.in_flight -= 1
        self._touch(program, now_s)

    def _touch(self, program: LiveProgram, now_s: float) -> None:
        program.last_active_s = now_s
        if program.program.program_id in self._programs:
            self._programs.move_to_end(program.program.program_id)
