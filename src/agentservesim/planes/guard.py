"""Asking a policy: what it raises, or answers outside its protocol, becomes a PolicyError with the facts."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable
from typing import Any

from agentservesim.errors import PolicyError


def ask(method: Callable[..., Any], now_s: float, about: str, *arguments: Any) -> Any:
    """Call a policy's method; `about` names the call in question."""
    try:
        return method(*arguments)
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PolicyError(
            f"{frame.filename}:{frame.lineno}: policy {_name(method)} raised {type(error).__name__}: {error} "
            f"(at {now_s:.6f} s, {about})"
        ) from error


def whole_number(answer: object) -> int | None:
    """An answer that should be an integer, as one; None if it is not. NumPy's integers are."""
    if isinstance(answer, bool):
        return None
    try:
        return operator.index(answer)  # type: ignore[arg-type]
    except TypeError:
        return None


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
