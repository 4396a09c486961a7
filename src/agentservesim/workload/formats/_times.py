"""Times as files write them, in seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from agentservesim.errors import InputError
from agentservesim.workload.formats._decode import quoted
from agentservesim.workload.formats._lines import Place


def iso_seconds(text: str, place: Place, field: str) -> float:
    """An ISO 8601 time; without a zone, UTC. Raises InputError."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InputError(
            f"{place}: {field} is {quoted(text)}: expected a time such as 2026-06-01T05:40:30.836Z"
        ) from None


def from_earliest(starts: Iterable[float | None]) -> list[float | None]:
    """The same times counted from the earliest of them; None stays None."""
    listed = list(starts)
    origin = min((start for start in listed if start is not None), default=0.0)
    return [None if start is None else start - origin for start in listed]
