"""The first difference between a live run and its simulation, in words."""

from __future__ import annotations

from typing import Any

import msgspec


def first_difference(live: Any, simulated: Any) -> str | None:
    """None where steps, decisions and calls are the same to the end, times included, bit for bit."""
    for at, (real, ours) in enumerate(zip(live.steps, simulated.steps, strict=False)):
        if real != ours:
            real, ours = msgspec.structs.asdict(real), msgspec.structs.asdict(ours)
            fields = ", ".join(f"{n}: {real[n]} against {ours[n]}" for n in real if real[n] != ours[n])
            return f"step {at} of {len(live.steps)}: {fields}"
    if len(live.steps) != len(simulated.steps):
        return f"{len(live.steps)} steps against {len(simulated.steps)}"
    # Preemptions are compared by the step; the simulator notes them when the step is complete.
    real, ours = (
        [row for row in run.decisions if row[1] not in ("preempt", "refuse")] for run in (live, simulated)
    )
    for at, rows in enumerate(zip(real, ours, strict=False)):
        if rows[0] != rows[1]:
            return f"decision {at}: {rows[0]} against {rows[1]}"
    if len(real) != len(ours):
        return f"{len(real)} decisions against {len(ours)}"
    for key, call in live.calls.items():
        if call != simulated.calls.get(key):
            return f"call {key}: {call} against {simulated.calls.get(key)}"
    return None if len(live.calls) == len(simulated.calls) else "calls differ in number"
