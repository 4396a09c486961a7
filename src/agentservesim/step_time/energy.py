"""Joules of a step. A model from board power and utilisation, not a measurement."""

from __future__ import annotations

from typing import NamedTuple

from agentservesim.step_time.hardware import Gpu

IDLE_FRACTION = 0.15
"""Share of the board power that a GPU draws with a model loaded and nothing running. Data-centre boards
idle at 10 to 20 % of their limit (an H100 SXM at 70 to 120 W of 700 W); 15 % lies between."""


class PowerModel(NamedTuple):
    """joules = idle_watts * seconds + active_watts * min(seconds, roofline_seconds), over all GPUs.

    That is tp * seconds * (idle + (limit - idle) * u), with u = roofline seconds / step seconds clipped to
    [0, 1]: a step that runs at the hardware's peak draws the power limit, one that waits draws less.
    """

    idle_watts: float
    active_watts: float

    def joules(self, seconds: float, roofline_seconds: float) -> float:
        """Joules of a step of `seconds` whose ideal time is `roofline_seconds`."""
        return self.idle_watts * seconds + self.active_watts * min(seconds, roofline_seconds)


def power_model(gpu: Gpu, tp: int) -> PowerModel:
    """The power of `tp` GPUs together, in watts."""
    idle = tp * gpu.power_watts * IDLE_FRACTION
    return PowerModel(idle, tp * gpu.power_watts - idle)
