"""The servers behind a router: which are up, what is in flight, and what their /metrics say."""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus

import aiohttp
import msgspec

from agentservesim.live.http import in_words
from agentservesim.policies.interface import InstanceView

LOG = logging.getLogger("agentservesim.live.router")
POLL_S = 1.0
POLL_TIMEOUT_S = 2.0
OUT_OF_REACH = 1 << 30
"""Calls that a server which is down is shown to hold, so that policies which look at the load avoid it."""

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics(msgspec.Struct):
    """What a vLLM server says of itself, summed over its engines; kv_usage is their mean, in [0, 1]."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    capacity_tokens: int | None = None


class Server:
    """One server. `in_flight` is the router's own count; `calls` and `refused` are since its start."""

    def __init__(self, index: int, url: str) -> None:
        self.index = index
        self.url = url
        self.up = True
        self.in_flight = 0
        self.calls = 0
        self.refused = 0
        self.metrics: Metrics | None = None

    def view(self, max_num_seqs: int) -> InstanceView:
        """As a routing policy sees it. in_flight is the router's own count, always of this moment; the
        server's last word divides it into waiting and running. A pool that it does not tell of is 1 token."""
        metrics = self.metrics or Metrics()
        waiting = min(metrics.waiting, self.in_flight)
        capacity = metrics.capacity_tokens or 1
        return InstanceView(
            index=self.index,
            running_calls=self.in_flight - waiting,
            waiting_calls=waiting if self.up else OUT_OF_REACH,
            max_num_seqs=max_num_seqs,
            capacity_tokens=capacity,
            used_tokens=round(metrics.kv_usage * capacity) if metrics.capacity_tokens else 0,
            protected_tokens=0,
        )

    def mark(self, up: bool, why: str = "") -> None:
        """It answers, or it refuses connections."""
        if up != self.up:
            LOG.warning("%s is %s", self.url, "up again" if up else f"down: {why}")
        self.up = up
        if not up:
            self.metrics = None


async def poll(server: Server, session: aiohttp.ClientSession) -> None:
    """Look at a server's /metrics for ever. Whatever it answers, it is up."""
    timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
    while True:
        try:
            async with session.get(f"{server.url}/metrics", timeout=timeout) as response:
                text = await response.text(errors="replace")
                server.mark(up=True)
                server.metrics = read_metrics(text) if response.status == HTTPStatus.OK else None
        except aiohttp.ClientConnectorError as error:
            server.mark(up=False, why=in_words(error))
        except (aiohttp.ClientError, OSError):
            server.metrics = None  # too busy to say; requests will show whether it is there
        await asyncio.sleep(POLL_S)


def read_metrics(text: str) -> Metrics | None:
    """The figures a router needs out of Prometheus text; None if it is not a vLLM server's."""
    metrics, usages = Metrics(), []
    found = False
    for name, labels, value in _SAMPLE.findall(text):
        try:
            if name == "num_requests_running":
                metrics.running += int(float(value))
                found = True
            elif name == "num_requests_waiting":
                metrics.waiting += int(float(value))
            elif name == "kv_cache_usage_perc":
                usages.append(float(value))
            elif name == "cache_config_info":
                label = dict(_LABEL.findall(labels))
                # One block is never used: vLLM's null block.
                tokens = (int(label["num_gpu_blocks"]) - 1) * int(label["block_size"])
                metrics.capacity_tokens = (metrics.capacity_tokens or 0) + tokens
        except (ValueError, KeyError):
            continue
    metrics.kv_usage = sum(usages) / len(usages) if usages else 0.0
    return metrics if found else None
