"""Starts and stops a router."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from agentservesim.errors import InputError
from agentservesim.live.http import open_session
from agentservesim.live.router.placement import Placement
from agentservesim.live.router.proxy import Proxy
from agentservesim.live.router.servers import Server, poll
from agentservesim.policies.interface import RoutingPolicy

MAX_BODY_BYTES = 1 << 30
GRACE_S = 30.0
"""How long calls in flight may go on once the router is to stop."""


@dataclass(frozen=True)
class RouterOptions:
    """Where to listen, and what is told of the servers.

    port            0: any free one
    max_num_seqs    the servers' own, which they do not tell: the limit of session-affinity
    """

    servers: tuple[str, ...]
    routing: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_num_seqs: int = 256


class Router:
    """A reverse proxy that runs between `start` and `stop`, in one event loop."""

    def __init__(self, options: RouterOptions, policy: RoutingPolicy) -> None:
        self._options = options
        urls = [url.rstrip("/").removesuffix("/v1") for url in options.servers]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise InputError(f"--server {url}: expected http://host:port")
            if urls.count(url) > 1:
                raise InputError(f"--server {url}: given {urls.count(url)} times, expected once")
        self._servers = [Server(index, url) for index, url in enumerate(urls)]
        self._placement = Placement(policy, self._servers, options.max_num_seqs)
        self._polls: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._options.host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises InputError where that is not possible."""
        self._session = open_session(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        self._proxy = Proxy(self._placement, self._servers, self._session, self._options.routing)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._proxy.handle)
        # A client that goes away cancels its handler, which closes the connection to the server: an abort.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S
        )
        await self._runner.setup()
        host, port = self._options.host, self._options.port
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, socket.gaierror) as error:
            await self.stop()
            raise InputError(f"--host {host} --port {port}: cannot listen there: {error}") from None
        self._port = self._runner.addresses[0][1]
        self._polls = [asyncio.create_task(poll(server, self._session)) for server in self._servers]

    async def stop(self) -> None:
        """Take no more requests, let those in flight end for GRACE_S, close everything."""
        for task in self._polls:
            task.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        await self._runner.cleanup()
        await self._session.close()

    def stats(self) -> dict[str, object]:
        """As GET /router/stats answers."""
        return self._proxy.stats()
