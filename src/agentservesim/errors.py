"""Every error a user can meet. The command line prints the message and exits with `exit_code`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AgentServeSimError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 2


class InputError(AgentServeSimError):
    """A config, workload or argument is wrong; the message names where, which value and what was expected."""


class PolicyError(AgentServeSimError):
    """A policy could not be loaded, raised, or answered something outside its protocol."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """' (did you mean X?)' for the choice closest to `name`, or '' when none is close."""
    choices = list(choices)
    match = [choice for choice in choices if name and choice.startswith(name)]
    match = match or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
