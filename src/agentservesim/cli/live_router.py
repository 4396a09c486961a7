"""`agentservesim live router`: a routing policy before real servers."""

from __future__ import annotations

import asyncio
import signal
import sys

from agentservesim.cli.configs import OPTION
from agentservesim.config_origin import Origin
from agentservesim.errors import AgentServeSimError
from agentservesim.live.router import Router, RouterOptions
from agentservesim.policies import registry
from agentservesim.policies.interface import RoutingPolicy


def router_command(options: RouterOptions) -> int:
    """Runs until Ctrl-C or SIGTERM."""
    asyncio.run(_serve(Router(options, _policy(options.routing)), options))
    return 0


def _policy(spec: str) -> RoutingPolicy:
    """The policy, refused in the words of `run` if it is wrong."""
    try:
        return registry.build("routing", spec)
    except AgentServeSimError as error:
        path = ("policies", "routing")
        option = OPTION.format(axis="routing", spec=spec)
        raise Origin(given={path: option}).locate(error, path) from error


async def _serve(router: Router, options: RouterOptions) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        """The first signal ends the router, calls in flight included in time; the second one the process."""
        stopping.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await router.start()
    servers = f"{len(options.servers)} server{'s' if len(options.servers) > 1 else ''}"
    _say(f"routing to {servers} by {registry.label('routing', options.routing)} on {router.url}")
    await stopping.wait()
    _say("stopping: calls in flight may end; once more to stop at once")
    await router.stop()
    stats = router.stats()
    completed, calls = stats.get("calls_completed", 0), stats.get("calls", 0)
    _say(f"stopped after {calls} calls, {completed} completed")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
