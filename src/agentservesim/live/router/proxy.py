"""Passes requests on to a server and answers back, chunk by chunk, changing neither."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from agentservesim.live.http import in_words
from agentservesim.live.identity import INSTANCE_HEADER
from agentservesim.live.router.body import AnswerTail, read_body
from agentservesim.live.router.placement import Placement, RoutedCall
from agentservesim.live.router.servers import LOG, Server

CALL_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
STATS_PATH = "/router/stats"
NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers that speak of one connection and not of the message."""


class Proxy:
    """The handler of every request."""

    def __init__(
        self, placement: Placement, servers: Sequence[Server], session: aiohttp.ClientSession, routing: str
    ) -> None:
        self._placement = placement
        self._servers = servers
        self._session = session
        self._routing = routing
        self._started_s = time.monotonic()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer with a server's answer, whatever it is."""
        if request.path == STATS_PATH:
            return web.json_response(self.stats())
        body = await request.read()
        if request.method != "POST" or request.path not in CALL_PATHS:
            return await self._pass_on(request, body, None)
        call = self._placement.arrive(read_body(body), self._now_s())
        try:
            return await self._pass_on(request, body, call)
        finally:
            self._placement.left(call, self._now_s())

    def stats(self) -> dict[str, Any]:
        """What the router has done since its start."""
        return {
            "uptime_s": self._now_s(),
            "routing": self._routing,
            "programs_live": len(self._placement),
            **self._placement.counts,
            "servers": [
                {
                    "url": server.url,
                    "up": server.up,
                    "in_flight": server.in_flight,
                    "calls": server.calls,
                    "connections_refused": server.refused,
                    "running": server.metrics.running if server.metrics else None,
                    "waiting": server.metrics.waiting if server.metrics else None,
                    "kv_usage": server.metrics.kv_usage if server.metrics else None,
                    "kv_cache_tokens": server.metrics.capacity_tokens if server.metrics else None,
                }
                for server in self._servers
            ],
        }

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    async def _pass_on(
        self, request: web.Request, body: bytes, call: RoutedCall | None
    ) -> web.StreamResponse:
        """Find a server that takes the request; another one as long as connections are refused."""
        tried: list[Server] = []
        while (server := self._placement.place(call, tried, self._now_s())) is not None:
            server.in_flight += call is not None
            try:
                return await self._exchange(request, body, call, server)
            except NO_CONNECTION as error:
                server.refused += 1
                server.mark(up=False, why=in_words(error))
                self._placement.counts["rerouted_connection_refused"] += 1
                tried.append(server)
            finally:
                server.in_flight -= call is not None
        self._placement.counts["no_server"] += 1
        return _error(503, "no server takes connections: " + ", ".join(s.url for s in self._servers))

    async def _exchange(
        self, request: web.Request, body: bytes, call: RoutedCall | None, server: Server
    ) -> web.StreamResponse:
        """One server's answer. Raises one of NO_CONNECTION if it takes none; nothing was sent then."""
        counts = self._placement.counts
        try:
            answer = await self._session.request(
                request.method,
                URL(server.url + request.raw_path, encoded=True),
                data=body or None,
                headers=_passed(request.headers, drop=("host", "content-length")),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                allow_redirects=False,
            )
        except NO_CONNECTION:
            raise
        except asyncio.CancelledError:
            counts["client_disconnects"] += 1
            raise
        except (aiohttp.ClientError, OSError) as error:
            counts["server_broke_off"] += 1
            return _error(502, f"{server.url} broke off: {in_words(error)}")
        server.calls += call is not None
        try:
            return await self._stream(request, answer, call, server)
        finally:
            answer.close()  # a no-op for an answer that was read to its end

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, call: RoutedCall | None, server: Server
    ) -> web.StreamResponse:
        counts = self._placement.counts
        headers = _passed(answer.headers)
        headers[INSTANCE_HEADER] = str(server.index)
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        tail = AnswerTail()
        try:
            await response.prepare(request)
            pieces = answer.content.iter_any()
            while (piece := await _next(pieces, counts)) is not None:
                tail.add(piece)
                await response.write(piece)
            await response.write_eof()
        except _BrokeOff as error:
            # An answer without its end: the client must see that, so its connection ends as abruptly.
            LOG.warning("%s broke off in an answer: %s", server.url, error)
            if request.transport is not None:
                request.transport.abort()
            return response
        except asyncio.CancelledError:
            counts["client_disconnects"] += 1
            raise
        except ConnectionError:
            counts["client_disconnects"] += 1
            return response
        if call is not None:
            if answer.ok:
                self._placement.completed(call, tail, self._now_s())
            else:
                counts["answers_with_error_status"] += 1
        return response


class _BrokeOff(Exception):
    """The server ended its answer before its end."""


async def _next(pieces: Any, counts: Any) -> bytes | None:
    """The next piece of an answer, None at its end. What fails here is the server's side of it."""
    try:
        piece: bytes | None = await anext(pieces, None)
    except (aiohttp.ClientError, OSError) as error:
        counts["server_broke_off"] += 1
        raise _BrokeOff(in_words(error)) from None
    return piece


def _passed(headers: Any, drop: tuple[str, ...] = ()) -> CIMultiDict[str]:
    """The headers that speak of the message."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    left_out = HOP_BY_HOP | named | set(drop)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


def _error(status: int, message: str) -> web.Response:
    """An error in the form of the OpenAI interface."""
    text = json.dumps({"error": {"message": message, "type": "router_error", "code": status}})
    return web.Response(status=status, text=text, content_type="application/json")
