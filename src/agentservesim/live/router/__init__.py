"""A reverse proxy before several servers, in which a routing policy chooses where each call goes."""

from agentservesim.live.router.run import Router, RouterOptions

__all__ = ["Router", "RouterOptions"]
