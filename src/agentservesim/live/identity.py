"""Which program a request belongs to, in fields that a stock OpenAI client can send.

vLLM passes the request field `vllm_xargs` on to its engine:

    client.chat.completions.create(..., extra_body={"vllm_xargs": {"program_id": "agent-17", "turn_id": "4",
                                                                   "tool_name": "bash"}})

A request without `program_id` belongs to no program and is served as plain vLLM serves it. Servers that do
not read the field ignore it, or say that they do not know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentservesim.programs.orchestrator import Call

INSTANCE_HEADER = "X-AgentServeSim-Instance"
"""Response header in which a router says, by index, which server answered."""


class IdentityError(ValueError):
    """A field of a request's identity has the wrong type."""


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request says of itself: the object in `vllm_xargs`.

    turn_id           names the call within its program; None: the engine counts
    parent_turn_ids   the calls it follows, the one whose gap ended last in front; None: the program's
                      last completed call
    tool_name         the tool that runs after this call, where the client knows it beforehand
    last_call         1: no further call of the program follows, it ends with those in flight
    """

    program_id: str
    turn_id: str | None = None
    parent_turn_ids: tuple[str, ...] | None = None
    tool_name: str | None = None
    last_call: int = 0


def identity_of(extra_args: Mapping[str, Any] | None) -> Identity | None:
    """The identity in a request's `vllm_xargs`; None if there is no `program_id`.

    Raises IdentityError for a field of the wrong type, with the field, the value and what was expected.
    """
    if not extra_args or extra_args.get("program_id") is None:
        return None
    program_id = _text(extra_args, "program_id")
    if not program_id:
        raise IdentityError("vllm_xargs.program_id is empty, expected the program's name")
    parents = extra_args.get("parent_turn_ids")
    if parents is not None:
        if not isinstance(parents, list | tuple) or not all(isinstance(one, str | int) for one in parents):
            raise IdentityError(f"vllm_xargs.parent_turn_ids is {parents!r}, expected a list of turn ids")
        parents = tuple(str(one) for one in parents)
    last_call = extra_args.get("last_call", 0)
    if last_call not in (0, 1):
        raise IdentityError(f"vllm_xargs.last_call is {last_call!r}, expected 0 or 1")
    return Identity(
        program_id=program_id,
        turn_id=_text(extra_args, "turn_id") or None,
        parent_turn_ids=parents,
        tool_name=_text(extra_args, "tool_name") or None,
        last_call=int(last_call),
    )


def identity_of_call(call: Call) -> Identity:
    """What a client that knows the whole program says of one of its calls."""
    turns = call.run.program.turns
    return Identity(
        program_id=call.run.program.program_id,
        turn_id=call.turn.turn_id,
        parent_turn_ids=tuple(turns[parent].turn_id for parent in call.parents()) or None,
        tool_name=call.turn.tools[0].name if call.turn.tools else None,
        last_call=int(call.ordinal + 1 == len(turns)),
    )


def _text(extra_args: Mapping[str, Any], field: str) -> str:
    value = extra_args.get(field)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise IdentityError(f"vllm_xargs.{field} is {value!r}, expected text")
    return str(value)
