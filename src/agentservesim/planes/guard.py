"""Asking a policy: what it raises, or answers outside its protocol, becomes a PolicyError with the facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentservesim.errors import PolicyError


def ask(method: Callable[..., Any], now_s: float, about: str, *arguments: Any) -> Any:
    """Call a policy's method; `about` names the call in question."""
    try:
        return method(*arguments)
    except Exception as error:
        raise PolicyError(
            f"policy {_name(method)} raised {type(error).__name__}: {error} (at {now_s:.6f} s, {about})"
        ) from error


def reject(
    method: Callable[..., Any], answer: object, expected: str, now_s: float, about: str
) -> PolicyError:
    """The error for an answer outside the protocol."""
    return PolicyError(
        f"policy {_name(method)} answered {answer!r}, expected {expected} (at {now_s:.6f} s, {about})"
    )


def _name(method: Callable[..., Any]) -> str:
    owner = getattr(method, "__self__", None)
    return f"{type(owner).__name__}.{method.__name__}" if owner is not None else str(method)
