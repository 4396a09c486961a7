"""An OpenAI-compatible server without a model: deterministic tokens, and every fault a real one can have.

It runs in a thread of its own, so that clients and the command line can be driven in the test's process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BLOCK = 16


@dataclass
class Seen:
    """A request that reached the server. Times are of time.monotonic()."""

    path: str
    body: dict[str, Any]
    received_s: float
    headers: dict[str, str]
    completed_s: float | None = None
    disconnected: bool = False


@dataclass
class FakeServer:
    """A completion takes `first_s` to its first token and `token_s` for each further one.

    faults      what happens to the next completions, one each, in order: a status such as '503',
                'drop' (the connection dies at once), 'drop:3' (after three tokens), 'short:2' (ends after
                two), 'count:5' (says it saw five prompt tokens), 'stop' (finish_reason stop),
                'plain' (no stream), 'cut:3' (the stream ends as if that were all), 'error:3:500' (an error of
                that code in the stream), 'ok'
    refuse      a status and body that every completion gets
    hold_after  completions stop after so many tokens until this is None again; `held` of them do now
    unknown     fields that are answered with status 400, as strict servers do
    """

    first_s: float = 0.002
    token_s: float = 0.0005
    token_ids: bool = True
    cached_tokens: bool = True
    per_request_metrics: bool = False
    max_model_len: int | None = None
    models: tuple[str, ...] = ("fake",)
    running: int = 0
    waiting: int = 0
    faults: deque[str] = field(default_factory=deque)
    refuse: tuple[int, str] | None = None
    unknown: frozenset[str] = frozenset()
    seen: list[Seen] = field(default_factory=list)
    open_calls: int = 0
    hold_after: int | None = None
    held: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._cache: set[tuple[int, ...]] = set()
        self._thread: threading.Thread | None = None

    # --- life --------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Listen; on the same port after a `kill`. The prefix cache is empty then."""
        self._cache = set()
        self.open_calls = self.held = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def kill(self) -> None:
        """Die as a crashed process does: open connections are reset, the port refuses."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._thread = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def completions(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == "/v1/completions"]

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        site = web.SockSite(runner, listener)
        await site.start()
        ready.set()
        await self._stop.wait()
        assert runner.server is not None
        await site.stop()
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    # --- answers -----------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        seen = Seen(request.path, body, time.monotonic(), dict(request.headers))
        self.seen.append(seen)
        if request.path == "/v1/models":
            cards = [{"id": name, "max_model_len": self.max_model_len} for name in self.models]
            return web.json_response({"object": "list", "data": cards})
        if request.path == "/metrics":
            return web.Response(text=self._metrics())
        if request.path not in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            return web.json_response({"error": {"message": f"no {request.path}"}}, status=404)
        if self.refuse is not None:
            return web.Response(status=self.refuse[0], text=self.refuse[1])
        for name in sorted(self.unknown & body.keys()):
            return _error(400, f"unknown field {name}")
        self.open_calls += 1
        try:
            return await self._complete(request, body, seen)
        except (asyncio.CancelledError, ConnectionError):
            seen.disconnected = True
            raise
        finally:
            self.open_calls -= 1

    async def _complete(self, request: web.Request, body: dict[str, Any], seen: Seen) -> web.StreamResponse:
        fault, _, argument = (self.faults.popleft() if self.faults else "ok").partition(":")
        if fault.isdecimal():
            return _error(int(fault), "made to fail")
        prompt = body.get("prompt") or [4]
        tokens = body.get("max_tokens", 4)
        if isinstance(prompt, list) and self.max_model_len and len(prompt) + tokens > self.max_model_len:
            return _error(400, f"{len(prompt)} + {tokens} tokens are more than {self.max_model_len}")
        cached = self._look_up(prompt)
        output = _tokens(prompt, tokens)
        argument, _, code = argument.partition(":")
        last = int(argument) if fault in ("drop", "short", "cut", "error") and argument else tokens
        if fault == "drop" and not argument:
            request.transport.abort()
            return web.Response()
        if fault == "plain":
            return web.json_response({"choices": [{"text": "all at once"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place, token in enumerate(output[:last]):
            await asyncio.sleep(self.token_s if place else self.first_s)
            await self._hold(place)
            ends = place == last - 1 and fault not in ("drop", "cut", "error")
            choice: dict[str, Any] = {"index": 0, "text": f" w{token}", "finish_reason": None}
            if ends:
                choice["finish_reason"] = "stop" if fault in ("short", "stop") else "length"
            if self.token_ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
                if place == 0:
                    choice["prompt_token_ids"] = prompt
            await _send(response, {"choices": [choice]})
        if fault == "drop":
            request.transport.abort()
            return response
        if fault == "error":
            await _send(response, {"error": {"message": "engine trouble", "code": int(code)}})
        if fault in ("cut", "error"):
            await response.write_eof()
            return response
        self._remember([*prompt, *output[:last]][:-1])
        usage: dict[str, Any] = {
            "prompt_tokens": int(argument) if fault == "count" else len(prompt),
            "completion_tokens": last,
        }
        if self.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        final: dict[str, Any] = {"choices": [], "usage": usage}
        if self.per_request_metrics:
            final["metrics"] = {"time_to_first_token_ms": self.first_s * 1000}
        await _send(response, final)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        seen.completed_s = time.monotonic()
        return response

    async def _hold(self, place: int) -> None:
        if place != self.hold_after:
            return
        self.held += 1
        try:
            while place == self.hold_after:
                await asyncio.sleep(0.002)
        finally:
            self.held -= 1

    def _look_up(self, prompt: list[int]) -> int:
        """Cached tokens, in whole blocks; the last token is always computed."""
        blocks = 0
        while (blocks + 1) * BLOCK < len(prompt) and tuple(prompt[: (blocks + 1) * BLOCK]) in self._cache:
            blocks += 1
        return blocks * BLOCK

    def _remember(self, tokens: list[int]) -> None:
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            self._cache.add(tuple(tokens[:end]))

    def _metrics(self) -> str:
        return (
            "# HELP vllm:num_requests_running running\n"
            f'vllm:num_requests_running{{engine="0",model_name="fake"}} {float(self.running)}\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="fake"}} {float(self.waiting)}\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.25\n'
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        )


def _tokens(prompt: Iterable[int] | str, count: int) -> list[int]:
    """Output that depends on the prompt alone, as at temperature 0."""
    seed = hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()
    return [
        4 + int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=4).digest(), "big") % 996
        for place in range(count)
    ]


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
