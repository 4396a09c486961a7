"""Weka JSON (kv-cache-tester, aiperf, InferenceX): a recorded agent session a document, with block hashes.

What the recording says, and what follows from it:

- `t` of a request is its start in whole seconds, `api_time` its service; `t` of a sub-agent is when its
  result came in, `duration_ms` before which it started; the times of its requests count from that start.
- A turn's first parent is the completed request with the longest common prefix of hash_ids, and
  reuse_tokens is that prefix in tokens: whole blocks of the parent's prompt. Its other parents are the
  requests that it waited for: the one before it in its line and, for a join, the last of each sub-agent.
- A request that starts while the one before it still runs does not wait for it: it is a branch of its own.
- Gaps are next start − this end, this end being t + api_time, so that with the recorded service times a
  replay reproduces the recorded starts within the second they were written down in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload.formats._decode import Name, PromptTokens, Seconds, Tokens
from agentservesim.workload.formats._lines import Place
from agentservesim.workload.formats._reading import Distinct
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._waits import Timed, with_waits
from agentservesim.workload.report import ReadingReport

NAME = "weka"
LOOKS_LIKE = '{"block_size": 64, "requests": [{"hash_ids": […]}]}'

UNTIMED = "requests without api_time: their service is in the gap after them"
EMPTY_AGENT = "sub-agents without requests"
EARLY_AGENT = "sub-agents that start before the request that calls them has ended: at its end"
UNJOINED = "sub-agents that end after the session's last request: no join"
LATE_JOIN = "sub-agents that end after the next request has started: joined at a later one"
SAME_TIME = "prefixes shared only with a request that still ran: not reused"
OTHER_MODEL = "calls of a second model: simulated on the one model"
REUSE_CLAMPED = "reuse down to the prompt, as there are more hash_ids than tokens"

_GRAIN_S = 1.0
"""Recorded starts are whole seconds: a request may seem to start this long before the one before it ends."""


class _Request(msgspec.Struct, tag_field="type", tag="n", rename={"prompt": "in", "output": "out"}):
    t: Seconds
    prompt: PromptTokens
    output: Tokens
    hash_ids: list[int] = []
    input_types: list[str] = []
    stop: str | None = None
    api_time: Seconds | None = None
    model: str | None = None


class _Streamed(_Request, tag_field="type", tag="s"):
    """A streamed request."""


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    requests: list[_Request | _Streamed | _Subagent]
    agent_id: str | None = None
    status: str | None = None
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=1e15)] | None = None


class _Trace(msgspec.Struct):
    id: Name
    requests: Annotated[list[_Request | _Streamed | _Subagent], msgspec.Meta(min_length=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 64
    hash_id_scope: str | None = None
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0


_DECODER = msgspec.json.Decoder(_Trace)


@dataclass(eq=False)
class _Call:
    """A request on the trace's clock.

    before   the call it follows: the last of its line, the caller of its sub-agent, or None
    joins    the last calls of the sub-agents it waits for
    chain    a number for every prefix of its hash_ids, the same for the same prefix in the whole trace
    """

    name: str
    request: _Request
    start_s: float
    before: _Call | None
    of_agent: bool
    joins: list[_Call] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    index: int = -1

    @property
    def end_s(self) -> float:
        return self.start_s + (self.request.api_time or 0.0)

    def ended_before(self, start_s: float) -> bool:
        return self.end_s <= start_s + _GRAIN_S


def recognises(head: Head) -> bool:
    """Whether a file is in this format."""
    return "requests" in head.keys and (
        "block_size" in head.keys or '"hash_ids"' in head.text or "hash_id_scope" in head.keys
    )


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """One program a document; a document is a file, or a line of one.

    Raises InputError naming file, line, field, value and expectation.
    """
    distinct = Distinct()
    for place, trace in source.documents(_DECODER, report):
        program = None
        with source.tolerating(report):
            program = _program(trace, place, report, distinct)
        if program is not None:
            yield program


def _program(trace: _Trace, place: Place, report: ReadingReport, distinct: Distinct) -> Program | None:
    calls = _calls(trace, report)
    if not calls:
        return None
    report.estimated[UNTIMED] += sum(call.request.api_time is None for call in calls)
    models = {call.request.model for call in calls}
    if len(models) > 1:
        main = calls[0].request.model
        report.inferred[OTHER_MODEL] += sum(call.request.model != main for call in calls)
    turns = with_waits(_recorded(calls, trace.block_size, report), report)
    turns = tuple(_with_tool(turn, call.request) for turn, call in zip(turns, calls, strict=True))
    return distinct.accept(Program(trace.id, turns, prefix=_prefix(trace, calls)), place)


def _with_tool(turn: Turn, request: _Request) -> Turn:
    """The recording does not name tools: what a request stopped for is called `tool`."""
    if request.stop != "tool_use" or turn.gap_s is None:
        return turn
    return msgspec.structs.replace(turn, tools=(ToolCall("tool", turn.gap_s),))


# --- which call follows which ----------------------------------------------------------------------------


def _calls(trace: _Trace, report: ReadingReport) -> list[_Call]:
    """All requests of a trace in order of start, each knowing the calls it waits for."""
    calls: list[_Call] = []
    _Line(calls, report).add(trace.requests)
    calls.sort(key=lambda call: call.start_s)  # stable: file order at equal times
    for index, call in enumerate(calls):
        call.index = index
    return calls


class _Line:
    """The calls of a session, or of one sub-agent: its times count from start_s."""

    def __init__(
        self,
        calls: list[_Call],
        report: ReadingReport,
        start_s: float = 0.0,
        caller: _Call | None = None,
        name: str = "",
    ) -> None:
        self.all_calls = calls
        self.report = report
        self.start_s = start_s
        self.caller = caller
        self.name = name
        self.calls: list[_Call] = []
        self.pending: list[_Call] = []

    def add(self, entries: list[_Request | _Streamed | _Subagent]) -> _Call | None:
        """Add all requests, with those of nested sub-agents; returns the call that ends last."""
        for number, entry in enumerate(entries):
            if isinstance(entry, _Subagent):
                self._add_agent(entry, number)
            else:
                self._add_request(entry, f"{self.name}r{number}")
        self.report.inferred[UNJOINED] += len(self.pending)
        return max(self.calls, key=lambda call: call.end_s, default=None)

    def _add_request(self, request: _Request, name: str) -> None:
        start_s = self.start_s + request.t
        call = _Call(name, request, start_s, self._before(start_s), bool(self.name))
        call.joins = [last for last in self.pending if last.ended_before(start_s)]
        self.pending = [last for last in self.pending if not last.ended_before(start_s)]
        self.report.inferred[LATE_JOIN] += len(self.pending)
        self.calls.append(call)
        self.all_calls.append(call)

    def _before(self, start_s: float) -> _Call | None:
        """The last call of this line if it has ended, else the last to end of those that have."""
        if self.calls and self.calls[-1].ended_before(start_s):
            return self.calls[-1]
        ended = [call for call in self.calls if call.ended_before(start_s)]
        return max(ended, key=lambda call: call.end_s, default=self.caller)

    def _add_agent(self, agent: _Subagent, number: int) -> None:
        caller = self.calls[-1] if self.calls else self.caller
        start_s = self.start_s + agent.t - (agent.duration_ms or 0.0) / 1000
        earliest_s = caller.end_s if caller else self.start_s
        if start_s < earliest_s:
            self.report.clamped[EARLY_AGENT] += 1
            start_s = earliest_s
        name = f"{self.name}{agent.agent_id or 'agent'}#{number}/"
        last = _Line(self.all_calls, self.report, start_s, caller, name).add(agent.requests)
        if last is None:
            self.report.dropped[EMPTY_AGENT] += 1
        elif agent.status != "async_launched":
            self.pending.append(last)


# --- what a call shares with which -----------------------------------------------------------------------


class _Prefixes:
    """Finds, for a call, the calls before it with the longest common prefix of hash_ids."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._holders: list[list[_Call]] = []

    def add(self, call: _Call) -> None:
        number = -1
        for block in call.request.hash_ids:
            number = self._numbers.setdefault((number, block), len(self._numbers))
            if number == len(self._holders):
                self._holders.append([])
            call.chain.append(number)
        for number in call.chain:
            self._holders[number].append(call)

    def best(self, call: _Call) -> tuple[_Call | None, int, bool]:
        """The completed call that shares most blocks, how many, and whether a running one shares more.

        Of several, the call before it if it is one, else the last to end.
        """
        running = False
        for blocks in range(len(call.chain), 0, -1):
            holders = [other for other in self._holders[call.chain[blocks - 1]] if other is not call]
            ended = [other for other in holders if other.ended_before(call.start_s)]
            if ended:
                nearest = max(ended, key=lambda other: (other is call.before, other.end_s, other.index))
                return nearest, blocks, running
            running = running or bool(holders)
        return None, 0, running


def _recorded(calls: list[_Call], block_size: int, report: ReadingReport) -> list[Timed]:
    """Every call as a turn with its parents and reuse, and when it was recorded."""
    prefixes = _Prefixes()
    recorded = []
    for call in calls:
        prefixes.add(call)
        sharer, blocks, running = prefixes.best(call)
        report.dropped[SAME_TIME] += running
        waits_for = [other for other in (sharer, call.before, *call.joins) if other is not None]
        parents = tuple(dict.fromkeys(other.index for other in waits_for))
        reuse = blocks * block_size if sharer else 0
        limit = min(reuse, call.request.prompt, sharer.request.prompt if sharer else 0)
        report.clamped[REUSE_CLAMPED] += limit < reuse
        recorded.append(
            Timed(
                Turn(
                    turn_id=call.name,
                    prompt_tokens=call.request.prompt,
                    output_tokens=call.request.output,
                    reuse_tokens=limit,
                    kept_output_tokens=call.request.output,
                    parents=parents,
                ),
                call.start_s,
                call.end_s,
                anchor=call.before.index if call.before is not None and not call.joins else None,
                human=_by_person(call),
            )
        )
    return recorded


def _by_person(call: _Call) -> bool:
    """Whether a person's text started the call: text came in, and no tool's result unless after an end."""
    if call.of_agent or call.before is None or "text" not in call.request.input_types:
        return False
    return "tool_result" not in call.request.input_types or call.before.request.stop == "end_turn"


def _prefix(trace: _Trace, calls: list[_Call]) -> tuple[PrefixGroup, ...]:
    """The tool definitions and system prompt, where hashes mean the same in all traces and every prompt
    of this one begins with them; whole blocks, named by the hashes."""
    if trace.hash_id_scope != "global":
        return ()
    first = calls[0].request.hash_ids
    shared = len(first)
    for call in calls:
        pairs = zip(first[:shared], call.request.hash_ids, strict=False)
        shared = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(shared, len(call.request.hash_ids))
        )
    shared = min([shared, *(call.request.prompt // trace.block_size for call in calls)])
    tools = min(shared, trace.tool_tokens // trace.block_size)
    system = min(shared, (trace.tool_tokens + trace.system_tokens) // trace.block_size) - tools
    groups = (
        ("tools", first[:tools], tools),
        ("system", first[: tools + system], system),
    )
    return tuple(
        PrefixGroup(f"{name}-{_digest(ids)}", blocks * trace.block_size)
        for name, ids, blocks in groups
        if blocks
    )


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(msgspec.json.encode(ids)).hexdigest()[:12]
