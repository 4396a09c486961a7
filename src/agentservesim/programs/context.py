"""Which tokens of a call equal which tokens of earlier calls: the identity of every prompt and output.

A program writes its context on a main line. What a later prompt does not repeat (dropped reasoning, the
tail lost in a compaction, a sibling branch) stays behind on a line of its own.
"""

from __future__ import annotations

from agentservesim.engine.content import Content, Line, Span
from agentservesim.programs.program import PrefixGroup, Program

Spans = tuple[Span, ...]


class SharedPrefixes:
    """Lines of the token groups that programs share by id. Two programs share a group when everything
    before it is shared too."""

    def __init__(self) -> None:
        self._lines: dict[tuple[PrefixGroup, ...], Line] = {}

    def spans(self, groups: tuple[PrefixGroup, ...]) -> Spans:
        """The groups in order, from token 0."""
        spans: list[Span] = []
        at = 0
        for count, group in enumerate(groups, start=1):
            line = self._lines.setdefault(groups[:count], Line(group.id))
            spans.append(Span(line, at, at + group.tokens))
            at += group.tokens
        return tuple(spans)


class ProgramContext:
    """Builds the Content of a program's calls, each after its parents'.

    deployment    the next prompt repeats the tokens the engine generated; else (a replay, where the
                  engine's output differs from the recorded one) only the prompt part is reusable
    """

    def __init__(self, program: Program, shared: SharedPrefixes, deployment: bool) -> None:
        self._program = program
        self._shared = shared.spans(program.prefix)
        self._deployment = deployment
        self._sequences: dict[int, Spans] = {}
        self._ends: dict[Line, int] = {}

    def content(self, index: int) -> Content:
        """Content of turn `index`: its prompt, then its output."""
        turn = self._program.turns[index]
        base, reuse = self._base(index)
        spans = _cut(base, reuse)
        line = self._writer(spans, reuse)
        end = turn.prompt_tokens + turn.output_tokens
        if self._deployment and turn.kept_output_tokens == turn.output_tokens:
            self._ends[line] = end
        else:
            self._ends[line] = turn.prompt_tokens
            spans = _extend(spans, line, turn.prompt_tokens)
            line = Line(f"{self._program.program_id}/{turn.turn_id}/output")
        spans = _extend(spans, line, end)
        self._sequences[index] = spans
        return Content(spans)

    def forget(self, index: int) -> None:
        """No further turn builds on turn `index`."""
        self._sequences.pop(index, None)

    def _base(self, index: int) -> tuple[Spans, int]:
        """The sequence a prompt starts like, and for how many tokens.

        Output that returns only in part is no prefix hit: what was dropped (reasoning) came before what
        was kept, so the prompt departs from the cached sequence where the output began.
        """
        turn = self._program.turns[index]
        shared = self._shared[-1].end if self._shared else 0
        if turn.parents:
            parent = self._program.turns[turn.parents[0]]
            same = parent.prompt_tokens
            if self._deployment and parent.kept_output_tokens == parent.output_tokens:
                same += parent.output_tokens
            reuse = min(turn.reuse_tokens, same, turn.prompt_tokens)
            if reuse >= shared:
                return self._sequences[turn.parents[0]], reuse
        return self._shared, min(shared, turn.prompt_tokens)

    def _writer(self, spans: Spans, at: int) -> Line:
        """The line that new tokens after `spans` go on: the same one where nothing follows on it yet."""
        if spans and self._ends.get(spans[-1].line) == at:
            return spans[-1].line
        return Line(self._program.program_id)


def _cut(spans: Spans, end: int) -> Spans:
    """The first `end` tokens of a sequence."""
    if not spans or spans[-1].end <= end:
        return spans
    return tuple(Span(line, start, min(stop, end)) for line, start, stop in spans if start < end)


def _extend(spans: Spans, line: Line, end: int) -> Spans:
    """A sequence continued by `line` up to token `end`."""
    start = spans[-1].end if spans else 0
    if end <= start:
        return spans
    if spans and spans[-1].line is line:
        return (*spans[:-1], Span(line, spans[-1].start, end))
    return (*spans, Span(line, start, end))
