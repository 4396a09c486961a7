"""What a policy is: three small protocols, the frozen views it may read, and the decisions it may take.

A policy module imports only this file. Views hold what a deployed engine knows at that moment and
nothing of the trace's future. Units are in the names; time is float seconds since the run's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

# --- views -----------------------------------------------------------------------------------------------


class PCB(msgspec.Struct, frozen=True):
    """A snapshot of one Program Control Block.

    turn_index            calls of this program submitted before the one in question
    attained_service_s    sum over completed calls of (last token - first scheduled); queueing excluded
    instance              where the last call was placed; None before the first placement
    prompt_tokens         prompt of the call in question (at completion: of the call that completed)
    context_tokens        input + output of the last completed call; 0 before the first completion
    kv_resident_tokens    how much of that context still lies in the instance's KV pool
    kv_protected          whether the program holds a protected entry; kv_deadline_s is its deadline
    in_gap                between a completion and the next call's submission
    tool_name             first tool of the last completed call; None: no tool
    gap_started_s         when the last completed call completed
    gap_count, gap_mean_s     closed gaps of this program
    tool_mean_gap_s       running mean of this tool's gaps over all programs; None while unseen
    """

    program_id: str
    arrival_s: float
    turn_index: int
    turns_completed: int
    attained_service_s: float
    instance: int | None
    prompt_tokens: int
    context_tokens: int
    kv_resident_tokens: int
    kv_protected: bool
    kv_deadline_s: float | None
    in_gap: bool
    tool_name: str | None
    gap_started_s: float | None
    gap_count: int
    gap_mean_s: float | None
    tool_mean_gap_s: float | None


class PrefillLine(msgspec.Struct, frozen=True):
    """A step's prefill time as a line, seconds = slope_s_per_token * tokens + base_s, and the knee.

    `knee_tokens` is the number of tokens a step takes before its time starts to grow with them.
    """

    slope_s_per_token: float
    base_s: float
    knee_tokens: int


class KVView(msgspec.Struct, frozen=True):
    """One instance's KV pool as its retention policy sees it. Evictable blocks count as free."""

    instance: int
    capacity_tokens: int
    used_tokens: int
    protected_tokens: int
    running_calls: int
    waiting_calls: int
    running_context_tokens: int
    in_flight_tokens: int
    prefill: PrefillLine

    @property
    def utilization(self) -> float:
        """KV utilisation in [0, 1]: used plus protected tokens over the capacity."""
        return (self.used_tokens + self.protected_tokens) / self.capacity_tokens


class InstanceView(msgspec.Struct, frozen=True):
    """One instance as the router sees it."""

    index: int
    running_calls: int
    waiting_calls: int
    max_num_seqs: int
    capacity_tokens: int
    used_tokens: int
    protected_tokens: int

    @property
    def in_flight(self) -> int:
        """Calls submitted and not completed."""
        return self.running_calls + self.waiting_calls


class QueueView(msgspec.Struct, frozen=True):
    """The cluster as an admission policy sees it.

    admitted_programs         programs with at least one admitted call, not yet complete
    admitted_context_tokens   sum of their present contexts: of each, the larger of its last completed
                              context and its largest submitted prompt
    program_admitted          whether this call's program is one of them
    capacity_tokens           KV pool of all instances together
    held_calls                calls an admission policy holds back, this one not counted
    """

    admitted_programs: int
    admitted_context_tokens: int
    program_admitted: bool
    capacity_tokens: int
    held_calls: int


class RunningCall(msgspec.Struct, frozen=True):
    """A running call that could be preempted."""

    pcb: PCB
    priority: int
    submitted_s: float
    computed_tokens: int
    output_tokens: int
    kv_tokens: int


# --- decisions -------------------------------------------------------------------------------------------


class Protect(msgspec.Struct, frozen=True):
    """Keep the call's KV out of the free queue until `deadline_s`; lower `value` is reclaimed first."""

    deadline_s: float
    value: float = 0.0


class Release(msgspec.Struct, frozen=True):
    """Give the KV back to the free queue, still hashed: plain vLLM."""


class Evict(msgspec.Struct, frozen=True):
    """Drop the KV's hashes and put its blocks at the front of the free queue."""


Decision = Protect | Release | Evict


# --- protocols -------------------------------------------------------------------------------------------


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides what KV survives the gap after a call.

    May also define `on_call_arrival(pcb, now_s, kv) -> Decision | None`, asked when the program's next
    call arrives, before the gap is closed in the PCB, whether or not KV is protected. Release gives
    protected KV back; Protect re-dates it; None leaves it until admission takes it over or its deadline.
    """

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Decision | None: ...


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Orders calls: lower runs first; None leaves the engine's own order.

    With a class attribute `dynamic = True` it is asked again for every waiting call whenever one could be
    admitted. `follows_residency = True` beside it says that the answer depends on kv_resident_tokens and the
    program alone, on no time, gap or protection: it is then asked only where that has changed, which is many
    times cheaper. May also define `victim(candidates: Sequence[RunningCall], now_s) -> int`, the index of
    the call to preempt, and `admit` as an AdmissionPolicy does.
    """

    def priority(self, pcb: PCB, now_s: float) -> int | None: ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Says whether a ready call may enter an instance's queue now; a held call is asked for again
    whenever a call completes or is refused."""

    def admit(self, pcb: PCB, now_s: float, queue: QueueView) -> bool: ...


@runtime_checkable
class RoutingPolicy(Protocol):
    """Chooses the instance of a call, by index; instances[i].index is i."""

    def route(self, pcb: PCB, now_s: float, instances: Sequence[InstanceView]) -> int: ...
