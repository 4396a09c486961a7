"""What reading a workload had to drop, estimate, clamp or infer, in counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agentservesim.programs.program import Program


@dataclass
class ReadingReport:
    """Filled by a reader as it streams: complete once the reader is exhausted.

    programs, turns   how many were read
    dropped           parts of the file that became nothing, by reason
    estimated         values guessed from other values, by reason
    clamped           values moved into their valid range, by reason
    inferred          values the file leaves out that follow from the rest, by reason
    """

    programs: int = 0
    turns: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    estimated: Counter[str] = field(default_factory=Counter)
    clamped: Counter[str] = field(default_factory=Counter)
    inferred: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program) -> None:
        """Count a program that was read."""
        self.programs += 1
        self.turns += len(program.turns)

    def tidy(self) -> None:
        """Forget reasons that were counted zero times."""
        for counts in (self.dropped, self.estimated, self.clamped, self.inferred):
            for reason in [reason for reason, number in counts.items() if not number]:
                del counts[reason]

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain, JSON-ready dictionaries."""
        counts = {kind: dict(getattr(self, kind)) for kind in ("dropped", "estimated", "clamped", "inferred")}
        return {"programs": self.programs, "turns": self.turns, **counts}
