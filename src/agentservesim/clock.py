"""The simulated time, readable by whoever acts inside an event."""


class Clock:
    """`now_s`: float seconds since the run's start. Only the simulation sets it."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0
