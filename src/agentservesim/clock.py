"""The simulated time, readable by whoever acts inside an event."""


class Clock:
    """`now_s`: float seconds since the run's start. `steps_started`: the steps that start at this instant
    have started; what happens now happens after. Only the simulation sets them."""

    __slots__ = ("now_s", "steps_started")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps_started = False
