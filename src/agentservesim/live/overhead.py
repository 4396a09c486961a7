"""What lies between a client and the engine, from calls that had the engine to themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from agentservesim.config import ClientConfig
from agentservesim.errors import InputError
from agentservesim.validation.fitting import huber

FEW_CALLS = 10


class SoloCall(NamedTuple):
    """A call during which nothing else ran: released and completed at the client, begun and ended in the
    engine, in seconds of one clock."""

    prompt_tokens: int
    released_s: float
    completed_s: float
    begun_s: float
    ended_s: float


def clock_offset_s(rows: Sequence[dict[str, Any]]) -> float:
    """What to add to the times of a step log to get this machine's monotonic clock."""
    return min(float(row["monotonic_s"] - row["ended_s"]) for row in rows)


def solo_calls(
    rows: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]], origin_s: float
) -> list[SoloCall]:
    """Lay calls that came one after the other beside the steps of the log. `origin_s` is the client's zero on
    the machine's monotonic clock. Calls without a step of their own are left out."""
    offset_s = clock_offset_s(rows)
    begun = np.array([row["scheduled_s"] for row in rows]) + offset_s
    ended = np.array([row["ended_s"] for row in rows]) + offset_s
    found = []
    for call in calls:
        if call["status"] != "completed":
            continue
        released_s, completed_s = origin_s + call["released_s"], origin_s + call["completed_s"]
        within = np.flatnonzero((begun >= released_s) & (ended <= completed_s))
        if len(within):
            times = released_s, completed_s, float(begun[within[0]]), float(ended[within[-1]])
            found.append(SoloCall(call["prompt_tokens"], *times))
    return found


def client_overhead(calls: Sequence[SoloCall]) -> ClientConfig:
    """Both ways, as robust means. Raises InputError for fewer than FEW_CALLS calls."""
    if len(calls) < FEW_CALLS:
        raise InputError(
            f"{len(calls)} calls had the engine to themselves: expected at least {FEW_CALLS} to measure what "
            "lies between the client and the engine"
        )
    tokens = np.array([float(call.prompt_tokens) for call in calls])
    request = np.array([call.begun_s - call.released_s for call in calls])
    response = np.array([call.completed_s - call.ended_s for call in calls])
    one = np.ones((len(calls), 1))
    scale = np.full(len(calls), float(np.median(request)))
    (base_s, slope_s), _ = huber(np.column_stack([one, tokens]), request, scale)
    if base_s < 0 or slope_s < 0:
        (base_s,), slope_s = huber(one, request, scale)[0], 0.0
    (response_s,), _ = huber(one, response, np.full(len(calls), float(np.median(response))))
    return ClientConfig(
        request_s=_digits(base_s), request_per_token_s=_digits(slope_s), response_s=_digits(response_s)
    )


def _digits(value: float) -> float:
    return max(0.0, float(f"{value:.6g}"))
