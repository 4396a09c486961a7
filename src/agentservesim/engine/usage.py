"""What an instance has spent so far: steps, seconds, joules, and how full its KV pool was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentservesim.engine.block_pool import BlockPool

if TYPE_CHECKING:
    from agentservesim.engine.leap import Leap
    from agentservesim.step_time.interface import StepCost


class Usage:
    """Running sums, added in the order of the steps.

    kv_block_s    integral over time of used plus parked blocks
    """

    __slots__ = (
        "_level",
        "_since_s",
        "busy_s",
        "in_grid_s",
        "joules",
        "kv_block_s",
        "kv_blocks_max",
        "num_usable_blocks",
        "steps",
    )

    def __init__(self, num_usable_blocks: int) -> None:
        self.num_usable_blocks = num_usable_blocks
        self.steps = 0
        self.busy_s = 0.0
        self.in_grid_s = 0.0
        self.joules = 0.0
        self.kv_block_s = 0.0
        self.kv_blocks_max = 0
        self._level = 0
        self._since_s = 0.0

    def add_step(self, now_s: float, cost: StepCost, pool: BlockPool) -> None:
        """Account for a step that starts now."""
        self.steps += 1
        self.busy_s += cost.seconds
        self.joules += cost.joules
        if cost.in_grid:
            self.in_grid_s += cost.seconds
        self.observe(now_s, pool)

    def add_leap(self, leap: Leap, steps: int, block_seconds: float) -> None:
        """Account for the first `steps` steps of a leap, and the blocks they took on the way."""
        self.steps += steps
        self.kv_block_s += block_seconds
        at = 0
        for line, length, context_tokens in leap.segments:
            count = min(length, steps - at)
            if count <= 0:
                break
            seconds = leap.times[at + count] - leap.times[at]
            self.busy_s += seconds
            if line.in_grid:
                self.in_grid_s += seconds
            tokens = count * context_tokens + leap.decodes * (count * (count - 1) // 2)
            self.joules += count * line.base_joules + line.slope_joules * tokens
            at += count

    def observe(self, now_s: float, pool: BlockPool) -> None:
        """The pool may have changed at `now_s`."""
        self.kv_block_s += self._level * (now_s - self._since_s)
        self._since_s = now_s
        self._level = pool.num_usable_blocks - pool.num_unhashed_free - pool.num_hashed_free
        if self._level > self.kv_blocks_max:
            self.kv_blocks_max = self._level
