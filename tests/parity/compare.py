"""The first difference between what vLLM did and what the engine does, in words."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .recording import Step, Trial


def first_difference(trial: Trial, steps: Iterable[Step]) -> str | None:
    """None where `steps` equal those of `trial` to the end."""
    for at, (expected, got) in enumerate(zip(trial.steps, steps, strict=True)):
        if got == expected:
            continue
        for name in Step.__struct_fields__:
            want, have = getattr(expected, name), getattr(got, name)
            if want != have:
                return (
                    f"seed {trial.seed}, step {at} of {len(trial.steps)}, {name}: expected {want}, got {have}"
                    f" (engine: {msgspec.structs.asdict(trial.engine)})"
                )
    return None
