"""What a sequence consists of, without its tokens.

vLLM identifies a full block by a hash over its tokens and everything before them. A simulator needs only
to know which sequences are equal up to where, so tokens are named by the *line* that wrote them: a line is
a string of tokens with one writer and a fixed past. Block i of a sequence is then identified by (the line
that owns its last token, i), and two sequences share a block exactly when these are equal.
"""

from __future__ import annotations

from typing import NamedTuple


class Line:
    """A string of tokens with one writer, at fixed positions after a fixed past; equal only to itself."""

    __slots__ = ("name",)

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Line({self.name})"


class Span(NamedTuple):
    """Tokens [start, end) of a sequence, absolute positions, written by `line`."""

    line: Line
    start: int
    end: int


class Content:
    """A sequence as spans, contiguous from token 0: the prompt and every token it will generate."""

    __slots__ = ("_block_size", "_block_spans", "spans")

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self._block_size = 0
        self._block_spans: list[Span] = []

    def block_spans(self, block_size: int) -> list[Span]:
        """The full blocks of the sequence as (line, first block, end block), in order."""
        if self._block_size != block_size:
            self._block_size = block_size
            self._block_spans = [
                Span(line, start // block_size, end // block_size)
                for line, start, end in self.spans
                if start // block_size < end // block_size
            ]
        return self._block_spans
