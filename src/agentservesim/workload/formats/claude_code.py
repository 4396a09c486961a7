"""Claude Code sessions: a JSON record for every content block, in one file or several.

- A call is an API message: its blocks repeat one usage and are grouped by message.id. The prompt is
  input + cache_creation + cache_read tokens. output_tokens may be a placeholder written while the answer
  streamed; where the text is far longer it is estimated from the text.
- The gap after a call runs from its last block to the last of its tools' results; what follows until a
  person's text is a pause.
- A sub-agent (isSidechain, agentId, its own file in <session>/subagents) forks from the call that started it
  and is joined by the first call after its result, unless it runs in the background.
- After a compaction (isCompactSummary, compact_boundary, or a prompt below 60 % of the one before) only what
  the provider's cache then hit is known to be shared. Smaller losses are drift in the counts.
- Files that share a session id or records (a session resumed under a new id) are read as one program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._claude_records import (
    AGENT_TOOLS,
    PERSON_TOOLS,
    Call,
    Sessions,
    Thread,
    read_sessions,
)
from agentservesim.workload.formats._growth import REWRITE, REWRITTEN, kept_output, reused
from agentservesim.workload.formats._reading import Distinct
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._waits import TOOL_LIMIT_S, Timed, with_waits
from agentservesim.workload.report import ReadingReport

NAME = "claude-code"
LOOKS_LIKE = '{"type": "user", "sessionId": …, "message": {…}}'

ESTIMATED = "calls without token counts: estimated from their text, 4 bytes a token"
PLACEHOLDER = "output_tokens that are a streaming placeholder: estimated from the text"
NO_RESULT = "tools without a result"
NO_CALLS = "sessions without calls"
SIDE_CALL = "calls of another model with a small prompt: a branch of their own, sharing nothing"
REWOUND = "calls after a rewind: they continue an earlier call"
BY_TIME = "sub-agents matched to the call that started them by time"
UNLINKED = "sub-agents that no call started: after the call before them, no join"
UNJOINED = "sub-agents that end after the next call has started: no join"

_PLACEHOLDER_FACTOR = 4
_PLACEHOLDER_SLACK = 16


def recognises(head: Head) -> bool:
    """Whether a file is a session or a sub-agent's part of one."""
    for record in head.records:
        if "sessionId" in record and ("type" in record or "uuid" in record):
            return True
        if record.get("type") in ("summary", "file-history-snapshot") and (
            "leafUuid" in record or "messageId" in record
        ):
            return True
    return {"sessionId", "type"} <= head.keys and not head.records


def group(head: Head) -> frozenset[str]:
    """Files of one session: those with the same session id, or whose first record with an id is the same."""
    keys = {f"session {record['sessionId']}" for record in head.records if record.get("sessionId")}
    first = next((record["uuid"] for record in head.records if record.get("uuid")), None)
    return frozenset(keys | ({f"record {first}"} if first else set()))


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """One program a session; a session is kept in memory while it is read.

    Raises InputError naming file, line, field, value and expectation.
    """
    sessions = read_sessions(source, report)
    distinct = Distinct()
    for session in dict.fromkeys(thread.session for thread in sessions.threads.values()):
        threads = [
            thread for thread in sessions.threads.values() if thread.session == session and thread.calls
        ]
        if not threads:
            report.dropped[NO_CALLS] += 1
            continue
        report.dropped[NO_RESULT] += sum(
            tool.back_s is None for thread in threads for call in thread.calls for tool in call.tools.values()
        )
        nodes = _Graph(sessions, threads, report).nodes()
        turns = with_waits(_recorded(nodes, report), report)
        program = Program(session or source.stem, turns, max(0.0, nodes[0].call.start_s) or None)
        yield distinct.accept(program, source.place(1))


@dataclass(eq=False)
class _Node:
    """A call with the calls it waits for. `base` is the one whose prompt it continues; None: none."""

    call: Call
    base: _Node | None = None
    before: _Node | None = None
    joins: list[_Node] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    side: bool = False
    index: int = -1

    def parents(self) -> list[_Node]:
        """First the one that reuse counts against, and no call that is not placed before this one."""
        all_parents = (self.base, self.before, *self.joins)
        return [p for p in dict.fromkeys(all_parents) if p is not None and p.index < self.index]


class _Graph:
    """Finds out which call of a session waits for which."""

    def __init__(self, sessions: Sessions, threads: list[Thread], report: ReadingReport) -> None:
        self.sessions = sessions
        self.threads = threads
        self.report = report
        self.node_of: dict[Call, _Node] = {}
        self.used_tools: set[str] = set(sessions.tool_of_agent.values())

    def nodes(self) -> list[_Node]:
        """All calls in order of start."""
        for thread in self.threads:
            self._chain(thread)
        for thread in self.threads:
            if thread.agent is not None:
                self._attach(thread, thread.agent)
        nodes = sorted(self.node_of.values(), key=lambda node: node.call.start_s)
        for index, node in enumerate(nodes):
            node.index = index
        for node in nodes:
            if node.base is not None:
                node.base.children.append(node)
        return nodes

    def _chain(self, thread: Thread) -> None:
        """The calls of one thread: each follows the one before, or the one that its records say."""
        usual = Counter(call.model for call in thread.calls).most_common(1)[0][0]
        main: _Node | None = None
        for place, call in enumerate(thread.calls):
            node = self.node_of[call] = _Node(call)
            node.side = call.model != usual and _is_side(thread.calls, place, usual)
            node.before = main
            if node.side:
                self.report.inferred[SIDE_CALL] += 1
                continue
            node.base = main
            said = self.node_of.get(call.previous) if call.previous is not None else None
            if said is not None and said is not main and not said.side and call.previous in thread.calls:
                self.report.inferred[REWOUND] += 1
                node.base = said
            main = node

    def _attach(self, thread: Thread, agent: str) -> None:
        """A sub-agent follows the call that started it; the next call after its result waits for its last."""
        first = self.node_of[thread.calls[0]]
        last = max((self.node_of[call] for call in thread.calls), key=lambda node: node.call.end_s)
        key = self._tool_that_started(thread, agent)
        caller = self.sessions.call_of_tool.get(key or "")
        if caller is None or caller not in self.node_of or caller.thread is thread:
            self.report.inferred[UNLINKED] += 1
            first.before = self._before(first.call, thread)
            return
        first.before = self.node_of[caller]
        first.call.start_s = max(first.call.start_s, caller.start_s)
        tool = caller.tools[key or ""]
        if tool.back_s is None or key in self.sessions.background:
            return
        later = [call for call in caller.thread.calls if call.start_s >= tool.back_s and call is not caller]
        if later and last.call.end_s <= later[0].start_s:
            self.node_of[later[0]].joins.append(last)
        elif later:
            self.report.inferred[UNJOINED] += 1

    def _tool_that_started(self, thread: Thread, agent: str) -> str | None:
        said = self.sessions.tool_of_agent.get(agent)
        if said is not None:
            return said
        start_s = thread.calls[0].start_s
        open_tools = [
            (tool, key)
            for call in self.node_of
            if call.thread is not thread
            for key, tool in call.tools.items()
            if tool.name in AGENT_TOOLS and key not in self.used_tools
        ]
        for tool, key in open_tools:
            if tool.prompt is not None and tool.prompt == thread.prompt:
                self.used_tools.add(key)
                return key
        sent = [(tool, key) for tool, key in open_tools if tool.sent_s <= start_s + 1]
        if not sent:
            return None
        self.report.inferred[BY_TIME] += 1
        _, key = max(sent, key=lambda pair: pair[0].sent_s)
        self.used_tools.add(key)
        return key

    def _before(self, call: Call, thread: Thread) -> _Node | None:
        """The last call of another thread that had ended when `call` started."""
        ended = [
            other
            for other in self.node_of
            if other.thread is not thread and other.thread.agent is None and other.end_s <= call.start_s
        ]
        return self.node_of[max(ended, key=lambda other: other.end_s)] if ended else None


def _is_side(calls: list[Call], place: int, usual: str | None) -> bool:
    """Whether a call of an unusual model stands beside the context: it is small, before and after are not."""
    before = next((call for call in reversed(calls[:place]) if call.model == usual), None)
    after = next((call for call in calls[place + 1 :] if call.model == usual), None)
    larger = [other for other in (before, after) if other is not None]
    return bool(larger) and all(_prompt(calls[place]) < REWRITE * _prompt(other) for other in larger)


def _prompt(call: Call) -> int:
    counted = call.usage.prompt if call.usage is not None else 0
    return max(1, counted or call.text_prompt)


def _output(call: Call, report: ReadingReport | None = None) -> int:
    counted = call.usage.output_tokens if call.usage is not None and call.usage.prompt else None
    if counted is None:
        return call.text_output
    if call.text_output > _PLACEHOLDER_FACTOR * counted + _PLACEHOLDER_SLACK:
        if report is not None:
            report.estimated[PLACEHOLDER] += 1
        return call.text_output
    return counted


def _recorded(nodes: list[_Node], report: ReadingReport) -> list[Timed]:
    """Every call as a turn with its parents and reuse, and when it was recorded."""
    recorded: list[Timed] = []
    names: set[str] = set()
    for node in nodes:
        parents = node.parents()
        base = recorded[node.base.index].turn if node.base in parents and node.base is not None else None
        anchor = node.before if not node.joins and node.before in parents else None
        name = _name(node.call, names)
        names.add(name)
        recorded.append(
            Timed(
                _turn(node, name, tuple(parent.index for parent in parents), base, report),
                node.call.start_s,
                node.call.end_s,
                anchor=anchor.index if anchor is not None else None,
                human=node.call.human,
                tools_end_s=_tools_end(node.call),
                tool_limit_s=float("inf") if _starts_agents(node.call) else TOOL_LIMIT_S,
            )
        )
    return recorded


def _turn(node: _Node, name: str, parents: tuple[int, ...], base: Turn | None, report: ReadingReport) -> Turn:
    call = node.call
    if call.usage is None or not call.usage.prompt:
        report.estimated[ESTIMATED] += 1
    prompt, output = _prompt(call), _output(call, report)
    grown = [_prompt(child.call) - prompt for child in node.children]
    return Turn(
        turn_id=name,
        prompt_tokens=prompt,
        output_tokens=output,
        reuse_tokens=0 if base is None else _reuse(base, call, report),
        kept_output_tokens=kept_output(output, None, grown[0] if grown else None, report),
        parents=parents,
        tools=tuple(
            ToolCall(tool.name, max(0.0, (tool.back_s or tool.sent_s) - tool.sent_s))
            for tool in call.tools.values()
        ),
    )


def _reuse(base: Turn, call: Call, report: ReadingReport) -> int:
    cached = (call.usage.cache_read_input_tokens or 0) if call.usage is not None else 0
    if call.compacted:
        report.inferred[REWRITTEN] += 1
        return min(base.prompt_tokens + base.kept_output_tokens, _prompt(call), cached)
    return reused(base.prompt_tokens, base.kept_output_tokens, _prompt(call), cached, report)


def _name(call: Call, taken: set[str]) -> str:
    """The message's id, as it is the same in other tools' records of it."""
    name, number = call.key, 2
    while name in taken:
        name, number = f"{call.key}~{number}", number + 1
    return name


def _tools_end(call: Call) -> float | None:
    """When the last result came in that was no person's answer."""
    results = [t.back_s for t in call.tools.values() if t.back_s is not None and t.name not in PERSON_TOOLS]
    return max(results, default=None)


def _starts_agents(call: Call) -> bool:
    return any(tool.name in AGENT_TOOLS for tool in call.tools.values())
