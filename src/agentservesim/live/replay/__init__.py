"""A workload's programs, run in real time against an OpenAI-compatible server."""

from agentservesim.live.replay.run import ReplayOptions, ReplayResult, replay

__all__ = ["ReplayOptions", "ReplayResult", "replay"]
