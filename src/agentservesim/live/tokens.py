"""Real token ids for calls whose content the simulator knows only as lines and positions.

Two positions of two sequences hold the same id exactly when the simulator calls them equal (the same line,
the same place), up to chance. An id is drawn by hashing (seed, line, position), so nothing is stored for a
prompt; what is stored is the output that a server really generated, as later prompts may repeat it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentservesim.engine.content import Line
from agentservesim.errors import InputError
from agentservesim.programs.orchestrator import Call, ProgramRun

FIRST_ID = 4
"""Ids below are padding, begin, end and unknown in most vocabularies."""

Ids = npt.NDArray[np.int64]


class _Output:
    """Tokens [start, end) of a line, written by a server: the first `len(ids)` of them are known."""

    __slots__ = ("end", "ids", "start", "used")

    def __init__(self, start: int, end: int, ids: Ids) -> None:
        self.start = start
        self.end = end
        self.ids = ids
        self.used = False


class _LineState:
    """What a line's ids are drawn from, and the outputs on it."""

    __slots__ = ("key", "outputs")

    def __init__(self, key: int) -> None:
        self.key = key
        self.outputs: list[_Output] = []


class TokenBook:
    """Token ids of prompts, from FIRST_ID to vocab_size - 1, for as many programs as are live.

    made_up_tokens    output tokens that a later prompt repeats although nobody said what they are; drawn ids
                      stand in for them, each counted once

    Raises InputError for a vocabulary too small to tell tokens apart.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        if vocab_size < FIRST_ID + 2:
            raise InputError(f"vocabulary of {vocab_size} tokens: expected at least {FIRST_ID + 2}")
        self._seed = seed
        self._range = vocab_size - FIRST_ID
        self._programs: dict[ProgramRun, dict[Line, _LineState]] = {}
        self.made_up_tokens = 0

    def __len__(self) -> int:
        """Programs whose tokens are kept."""
        return len(self._programs)

    def prompt(self, call: Call) -> list[int]:
        """Ids of the call's prompt; the same again if asked again. Ask for a program's calls in the order of
        their release."""
        states = self._states(call)
        ids = np.empty(call.turn.prompt_tokens, np.int64)
        for line, start, end in call.content.spans:
            end = min(end, call.turn.prompt_tokens)
            if start < end:
                state = states[line]
                ids[start:end] = self._draw(state.key, start, end)
                for output in state.outputs:
                    self._copy(output, ids, start, end)
        found: list[int] = ids.tolist()
        return found

    def completed(self, call: Call, output_ids: Sequence[int] | None) -> None:
        """The call generated these tokens, or some that the server does not tell. Where they are fewer than
        the turn has, drawn ids stand in for the rest; what is beyond it is left out."""
        end = call.turn.prompt_tokens + call.turn.output_tokens
        if call.turn.output_tokens == 0 or not call.run.children[call.index]:
            return
        known = np.asarray(output_ids if output_ids is not None else (), np.int64)
        line = call.content.spans[-1].line
        output = _Output(call.turn.prompt_tokens, end, known[: call.turn.output_tokens])
        self._states(call)[line].outputs.append(output)

    def forget(self, run: ProgramRun) -> None:
        """The program has ended: nothing repeats its tokens."""
        self._programs.pop(run, None)

    def _copy(self, output: _Output, ids: Ids, start: int, end: int) -> None:
        """Put what is known of an output into the prompt's [start, end); count what is not, once."""
        start, end = max(start, output.start), min(end, output.end)
        if start >= end:
            return
        known_end = min(end, output.start + len(output.ids))
        if known_end > start:
            ids[start:known_end] = output.ids[start - output.start : known_end - output.start]
        if not output.used:
            output.used = True
            self.made_up_tokens += end - max(start, known_end)

    def _states(self, call: Call) -> dict[Line, _LineState]:
        """The lines of the call and its program. New ones are named by who wrote them first, so that ids do
        not depend on the order in which programs run."""
        states = self._programs.setdefault(call.run, {})
        program = call.run.program
        # Token groups that programs share come first, as far as the prompt goes.
        shared_end = min(sum(group.tokens for group in program.prefix), call.turn.prompt_tokens)
        new = 0
        for place, span in enumerate(call.content.spans):
            if span.line in states:
                continue
            if span.start < shared_end:
                groups = program.prefix[: place + 1]
                key = self._key("prefix", *(f"{group.id}/{group.tokens}" for group in groups))
            else:
                key = self._key("program", program.program_id, call.turn.turn_id, str(new))
                new += 1
            states[span.line] = _LineState(key)
        return states

    def _key(self, *names: str) -> int:
        text = "\0".join((str(self._seed), *names))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _draw(self, key: int, start: int, end: int) -> Ids:
        """Ids of positions [start, end): the output of the SplitMix64 generator at that place."""
        state = np.arange(start + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
            key
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
        drawn: Ids = (state % np.uint64(self._range)).astype(np.int64) + FIRST_ID
        return drawn
