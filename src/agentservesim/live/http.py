"""HTTP as a client of serving engines speaks it."""

from __future__ import annotations

import os
from typing import Any

import aiohttp

CONNECT_S = 10.0
KEEPALIVE_S = 2.0
"""Connections idle for longer are not used again: servers close theirs after 5 s, which would look like a
fault."""


def open_session(**options: Any) -> aiohttp.ClientSession:
    """A session without limits of its own: how many calls are open, and for how long, is others' to say."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        **options,
    )


def in_words(error: BaseException) -> str:
    """What went wrong with a connection, for a person."""
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return str(cause) or type(error).__name__
