"""What is logically to run: a program is a graph of turns, each an LLM call with the tools it asks for."""

from __future__ import annotations

import msgspec

from agentservesim.errors import InputError


class ToolCall(msgspec.Struct, frozen=True):
    """One tool the model asked for at the end of a turn. `duration_s` is the tool's own wall time."""

    name: str
    duration_s: float


class PrefixGroup(msgspec.Struct, frozen=True):
    """A run of tokens shared by id across programs (a system prompt, tool definitions)."""

    id: str
    tokens: int


class Turn(msgspec.Struct, frozen=True):
    """One LLM call and the tool gap after it.

    prompt_tokens         the whole prompt
    reuse_tokens          how many leading prompt tokens equal the first parent's prompt plus kept output
    output_tokens         tokens the call generates (0: it finishes after prefill)
    kept_output_tokens    what of the output returns into the context of the next turn
    parents               indices, into the program's turns, of the turns that must complete first
    tools                 run side by side after this turn
    gap_s                 the recorded gap after this turn; None: the longest of the tools
    pause_s               a person's pause after this turn, on top of the gap
    delay_s               seconds this turn waits on its own, after its parents and their gaps: the branches
                          of a fork may start at different times
    """

    turn_id: str
    prompt_tokens: int
    output_tokens: int
    reuse_tokens: int = 0
    kept_output_tokens: int = 0
    parents: tuple[int, ...] = ()
    tools: tuple[ToolCall, ...] = ()
    gap_s: float | None = None
    pause_s: float = 0.0
    delay_s: float = 0.0

    def tool_gap_s(self) -> float:
        """Seconds the tools take after this turn: the recorded gap, else the longest of them."""
        if self.gap_s is not None:
            return self.gap_s
        return max((tool.duration_s for tool in self.tools), default=0.0)

    def wait_s(self) -> float:
        """Seconds between this turn's completion and the earliest release of a turn that follows it."""
        return self.tool_gap_s() + self.pause_s


class Program(msgspec.Struct, frozen=True):
    """A program: `turns` in any order that lists no turn before its parents' definition being known.

    `arrival_s` is None when the run's arrival process decides it. `prefix` groups stand, in order, at the
    start of every prompt of the program.
    """

    program_id: str
    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    prefix: tuple[PrefixGroup, ...] = ()

    def children(self) -> list[list[int]]:
        """For each turn, the indices of the turns that wait for it.

        Raises InputError when a parent does not exist or the graph has a cycle.
        """
        children: list[list[int]] = [[] for _ in self.turns]
        forward = True
        for index, turn in enumerate(self.turns):
            for parent in turn.parents:
                if not 0 <= parent < len(self.turns):
                    raise InputError(
                        f"program {self.program_id!r}: turn {turn.turn_id!r} names parent {parent}, "
                        f"expected an index from 0 to {len(self.turns) - 1}"
                    )
                children[parent].append(index)
                forward = forward and parent < index
        if not forward:  # a graph whose turns all follow their parents has no cycle
            self._refuse_cycles(children)
        return children

    def _refuse_cycles(self, children: list[list[int]]) -> None:
        waiting = [len(turn.parents) for turn in self.turns]
        ready = [index for index, count in enumerate(waiting) if count == 0]
        while ready:
            for child in children[ready.pop()]:
                waiting[child] -= 1
                if waiting[child] == 0:
                    ready.append(child)
        stuck = [self.turns[index].turn_id for index, count in enumerate(waiting) if count]
        if stuck:
            raise InputError(
                f"program {self.program_id!r}: field 'parents' makes a cycle through turns "
                f"{', '.join(stuck[:5])}; expected a graph without cycles"
            )
