"""Frozen views of instances and calls, made for policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from agentservesim.clock import Clock
from agentservesim.engine.instance import Instance
from agentservesim.engine.parking import ParkedEntry
from agentservesim.policies.interface import PCB, InstanceView, KVView
from agentservesim.programs.orchestrator import Call
from agentservesim.programs.pcb import ProgramTable


def kv_view(instance: Instance, clock: Clock) -> KVView:
    """One instance's KV pool, now."""
    instance.sync(clock)
    pool = instance.scheduler.block_pool
    return KVView(
        instance=instance.index,
        capacity_tokens=instance.capacity_tokens,
        used_tokens=pool.num_used_blocks * pool.block_size,
        protected_tokens=pool.num_parked * pool.block_size,
        running_calls=len(instance.scheduler.running),
        waiting_calls=len(instance.scheduler.waiting),
        running_context_tokens=instance.scheduler.num_computed_tokens,
        in_flight_tokens=instance.last_batch_tokens,
        prefill=instance.step_time.prefill_line(),
    )


class InstanceViews(Sequence[InstanceView]):
    """Views of all instances, each made when looked at. It leads to instances: for our own routers only."""

    def __init__(self, instances: Sequence[Instance], clock: Clock) -> None:
        self._instances = instances
        self._clock = clock

    def __len__(self) -> int:
        return len(self._instances)

    @overload
    def __getitem__(self, index: int) -> InstanceView: ...
    @overload
    def __getitem__(self, index: slice) -> list[InstanceView]: ...
    def __getitem__(self, index: int | slice) -> InstanceView | list[InstanceView]:
        if isinstance(index, slice):
            return [_instance_view(instance, self._clock) for instance in self._instances[index]]
        return _instance_view(self._instances[index], self._clock)


def _instance_view(instance: Instance, clock: Clock) -> InstanceView:
    scheduler = instance.scheduler
    pool = scheduler.block_pool
    return InstanceView(
        index=instance.index,
        running_calls=len(scheduler.running),
        waiting_calls=len(scheduler.waiting),
        max_num_seqs=scheduler.max_num_seqs,
        capacity_tokens=instance.capacity_tokens,
        used_tokens=instance.num_used_blocks(clock) * pool.block_size,
        protected_tokens=pool.num_parked * pool.block_size,
    )


def protected_entry(call: Call, instances: Sequence[Instance]) -> ParkedEntry | None:
    """The KV parked for a call by the calls before it, on the instance they ran on."""
    placed = call.run.pcb.instance
    if placed is None:
        return None
    parking = instances[placed].scheduler.kv_cache.parking
    for key in call.parent_keys():
        entry = parking.get(key)
        if entry is not None:
            return entry
    return None


def pcb_view(call: Call, table: ProgramTable, instances: Sequence[Instance], clock: Clock) -> PCB:
    """The PCB as of a call that has arrived or waits."""
    pcb = call.run.pcb
    resident = 0
    if pcb.instance is not None and pcb.context_tokens:
        instances[pcb.instance].sync(clock)
        pool = instances[pcb.instance].scheduler.block_pool
        reusable = min(pcb.context_tokens, call.turn.prompt_tokens)
        resident = pool.num_hit_blocks(call.content, reusable // pool.block_size) * pool.block_size
    entry = protected_entry(call, instances)
    return table.view(
        pcb,
        turn_index=call.ordinal,
        prompt_tokens=call.turn.prompt_tokens,
        gap=call.gap,
        kv_resident_tokens=resident,
        kv_deadline_s=entry.deadline_s if entry is not None else None,
    )
