"""What a workload is made of, in numbers: the content of `trace inspect`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from agentservesim.programs.program import PrefixGroup, Program, Turn
from agentservesim.workload.fit.lines import carried_on
from agentservesim.workload.live_profile import Level, LiveProfile
from agentservesim.workload.report import ReadingReport

LONG_GAP_S = 600.0
"""Tools time out by ten minutes at the latest; a longer gap is usually a person."""
SHRINK = 0.6
"""A prompt below this share of its parent's is a compaction; smaller losses are drift in the counts."""


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution in five numbers, in the unit of the field that holds it."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class ToolUse(msgspec.Struct, frozen=True):
    """How often a tool was called, and its summed wall time."""

    calls: int
    total_s: float


class Sharing(msgspec.Struct, frozen=True):
    """What programs begin with that others begin with, too.

    groups     different prefix groups that more than one program has, with all groups before them the same
    programs   how many begin with any
    tokens     summed over programs, each counted once; a cache that never forgets computes each group once
    """

    groups: int
    programs: int
    tokens: int


class Inspection(msgspec.Struct, frozen=True):
    """The totals and distributions of a workload.

    structural_reuse is the sum of reuse_tokens over the sum of prompt_tokens: the share of prompt tokens that
    a cache which never forgets could serve from the same program. Prefix groups count only where a turn
    repeats its parent's prompt: what a first turn could share with another program is not in it.
    gap_s covers the turns that another turn waits for, people's pauses left out. live_programs and
    live_context_tokens are of the recorded arrivals under an infinitely fast engine, None without arrivals: a
    program's context is its latest call's prompt and output. last_context_tokens is that of a program's last.
    """

    programs: int
    calls: int
    prompt_tokens: int
    output_tokens: int
    structural_reuse: float
    turns_per_program: Quantiles | None
    prompt_tokens_per_call: Quantiles | None
    output_tokens_per_call: Quantiles | None
    gap_s: Quantiles | None
    pause_total_s: float
    sharing: Sharing
    live_programs: Level | None
    live_context_tokens: Level | None
    last_context_tokens: Quantiles | None
    tools: dict[str, ToolUse]
    dropped: dict[str, int]
    estimated: dict[str, int]
    clamped: dict[str, int]
    inferred: dict[str, int]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain, JSON-ready values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def inspect(programs: Iterable[Program], report: ReadingReport | None = None) -> Inspection:
    """Read all programs, keeping a few numbers a call and no program.

    `report`, the one their reader fills, lends its counts. Raises what the programs' iterator raises.
    """
    tally = _Tally()
    for program in programs:
        tally.add(program)
    return tally.result(report or ReadingReport())


class _Tally:
    """Sums and samples over programs."""

    def __init__(self) -> None:
        self.turns = array("q")
        self.prompts = array("q")
        self.outputs = array("q")
        self.gaps = array("d")
        self.reuse_tokens = 0
        self.pause_s = 0.0
        self.tool_calls: Counter[str] = Counter()
        self.tool_s: dict[str, float] = {}
        self.without_arrival = 0
        self.shrunk = 0
        self.untimed = 0
        self.unknown_gaps = 0
        self.live = LiveProfile()
        self.last_contexts = array("q")
        self.prefixes: Counter[tuple[PrefixGroup, ...]] = Counter()
        self.group_tokens: dict[str, set[int]] = {}

    def add(self, program: Program) -> None:
        self.turns.append(len(program.turns))
        self.without_arrival += program.arrival_s is None
        for group in program.prefix:
            self.group_tokens.setdefault(group.id, set()).add(group.tokens)
        self.prefixes[program.prefix] += 1
        self.last_contexts.append(self.live.add(program))
        for index in carried_on(program):
            turn = program.turns[index]
            self.shrunk += turn.prompt_tokens < SHRINK * program.turns[turn.parents[0]].prompt_tokens
        awaited = {parent for turn in program.turns for parent in turn.parents}
        for index, turn in enumerate(program.turns):
            self.prompts.append(turn.prompt_tokens)
            self.outputs.append(turn.output_tokens)
            self.reuse_tokens += turn.reuse_tokens
            self.pause_s += turn.pause_s
            if index in awaited:
                self._gap(turn)
            for tool in turn.tools:
                self.tool_calls[tool.name] += 1
                self.tool_s[tool.name] = self.tool_s.get(tool.name, 0.0) + tool.duration_s

    def _gap(self, turn: Turn) -> None:
        """The gap after a turn that another waits for."""
        self.gaps.append(turn.tool_gap_s())
        if turn.gap_s is None:
            self.unknown_gaps += not turn.tools
            self.untimed += bool(turn.tools) and not any(tool.duration_s for tool in turn.tools)

    def _sharing(self) -> Sharing:
        users: Counter[tuple[PrefixGroup, ...]] = Counter()
        for groups, number in self.prefixes.items():
            for length in range(1, len(groups) + 1):
                users[groups[:length]] += number
        shared = {groups for groups, number in users.items() if number > 1}
        tokens = sum(users[groups] * groups[-1].tokens for groups in shared)
        programs = sum(number for groups, number in self.prefixes.items() if groups[:1] in shared)
        return Sharing(len(shared), programs, tokens)

    def result(self, report: ReadingReport) -> Inspection:
        prompt_tokens = sum(self.prompts)
        return Inspection(
            programs=len(self.turns),
            calls=len(self.prompts),
            prompt_tokens=prompt_tokens,
            output_tokens=sum(self.outputs),
            structural_reuse=self.reuse_tokens / prompt_tokens if prompt_tokens else 0.0,
            turns_per_program=_quantiles(self.turns),
            prompt_tokens_per_call=_quantiles(self.prompts),
            output_tokens_per_call=_quantiles(self.outputs),
            gap_s=_quantiles(self.gaps),
            pause_total_s=self.pause_s,
            sharing=self._sharing(),
            live_programs=self.live.programs(),
            live_context_tokens=self.live.context_tokens(),
            last_context_tokens=_quantiles(self.last_contexts),
            tools={name: ToolUse(calls, self.tool_s[name]) for name, calls in self.tool_calls.most_common()},
            dropped=dict(report.dropped),
            estimated=dict(report.estimated),
            clamped=dict(report.clamped),
            inferred=dict(report.inferred),
            warnings=self.warnings(),
        )

    def warnings(self) -> list[str]:
        """What the reader of the numbers should know, in words."""
        total = len(self.turns)
        found = []
        if self.without_arrival:
            found.append(
                f"{self.without_arrival} of {total} programs have no arrival_s: "
                "a run needs workload.arrivals.process poisson, gamma or closed_loop"
            )
        if self.shrunk:
            found.append(
                f"{self.shrunk} prompts are below {SHRINK:.0%} of their parent's: compactions of the context"
            )
        if long := sum(gap > LONG_GAP_S for gap in self.gaps):
            found.append(f"{long} gaps are longer than {LONG_GAP_S:.0f} s: probably people or stuck tools")
        if self.untimed:
            found.append(
                f"{self.untimed} gaps have tools, but no time for them: counted as 0 s; the transform "
                "draw_tool_times draws times by command"
            )
        if self.unknown_gaps:
            found.append(
                f"{self.unknown_gaps} gaps have neither a tool nor a recorded length: counted as 0 s"
            )
        for group, sizes in self.group_tokens.items():
            if len(sizes) > 1:
                found.append(
                    f"prefix group {group!r} has {len(sizes)} different token counts: {sorted(sizes)[:5]}"
                )
        return found


def _quantiles(values: array[int] | array[float]) -> Quantiles | None:
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.quantile(sample, (0.5, 0.9, 0.99))
    return Quantiles(float(sample.mean()), float(p50), float(p90), float(p99), float(sample.max()))
