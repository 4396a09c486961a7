"""Where the decisions of a real engine and of its simulation part."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentservesim.errors import InputError

EVENTS = ("protect", "evict", "release", "takeover", "expire", "reclaim", "preempt", "hold")
"""What an engine and its planes decide; a client's retries and refusals are not among them."""


class Decision(NamedTuple):
    """One decision, without its time: two runs on two clocks never have the same."""

    event: str
    program_id: str
    turn_id: str

    def __str__(self) -> str:
        return f"{self.event} {self.program_id}/{self.turn_id}"


class DecisionDiff(NamedTuple):
    """The decisions of two runs, side by side.

    real, simulated        how many, by event
    same                   how many are the same from the start on
    real_next, simulated_next   the first that differ; None where a run has no more
    real_next_s, simulated_next_s   when those were made, on each run's own clock
    programs, programs_same     programs with decisions, and those with the same ones in the same order
    """

    real: dict[str, int]
    simulated: dict[str, int]
    same: int
    real_next: str | None
    simulated_next: str | None
    real_next_s: float | None
    simulated_next_s: float | None
    programs: int
    programs_same: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.real_next is None and self.simulated_next is None

    def in_words(self) -> str:
        """A sentence."""
        programs = (
            f"{self.programs_same} of {self.programs} programs have the same decisions in the same order"
        )
        if self.equal:
            return (
                f"all {self.same} decisions are the same, in the same order" if self.same else "no decisions"
            )
        return (
            f"the first {self.same} decisions are the same; then the real engine decides "
            f"{_at(self.real_next, self.real_next_s)}, the simulated one "
            f"{_at(self.simulated_next, self.simulated_next_s)}; {programs}"
        )


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """The rows of a live engine's decision log. Raises InputError for a file that is none."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as error:
        raise InputError(f"decision log {path}: cannot be read: {error}") from None


def diff_decisions(real: Iterable[dict[str, Any]], simulated: Iterable[dict[str, Any]]) -> DecisionDiff:
    """Compare rows with the columns of decisions.parquet, in their order."""
    left, right = ([row for row in rows if row["event"] in EVENTS] for rows in (real, simulated))
    ours, theirs = [_decision(row) for row in left], [_decision(row) for row in right]
    same = next(
        (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    by_program = _by_program(ours), _by_program(theirs)
    programs = by_program[0].keys() | by_program[1].keys()
    return DecisionDiff(
        _counts(ours),
        _counts(theirs),
        same,
        str(ours[same]) if same < len(ours) else None,
        str(theirs[same]) if same < len(theirs) else None,
        left[same]["time_s"] if same < len(left) else None,
        right[same]["time_s"] if same < len(right) else None,
        len(programs),
        sum(by_program[0].get(name) == by_program[1].get(name) for name in programs),
    )


def _decision(row: dict[str, Any]) -> Decision:
    return Decision(row["event"], row["program_id"], row["turn_id"])


def _by_program(decisions: Sequence[Decision]) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        found[decision.program_id].append(decision)
    return found


def _counts(decisions: Sequence[Decision]) -> dict[str, int]:
    found = dict.fromkeys(EVENTS, 0)
    for decision in decisions:
        found[decision.event] += 1
    return {event: count for event, count in found.items() if count}


def _at(decision: str | None, time_s: float | None) -> str:
    return "nothing more" if decision is None else f"{decision} (at {time_s:.3f} s)"
