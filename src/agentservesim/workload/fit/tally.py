"""What is remembered of a trace that is being fitted: numbers by quantity, and no program."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from agentservesim.programs.program import PrefixGroup, Program, Turn
from agentservesim.workload.fit.lines import lines_of

COMPACTED = 0.6
"""A prompt below this share of the one before is a compaction."""
REWRITTEN = 0.9
"""A prompt that repeats less than this of the context before it is a rewrite; else a tail was lost."""
OTHER = "other"
"""Tools without a name, and rare ones."""
Groups = tuple[PrefixGroup, ...]


@dataclass
class Size:
    """What one program contributes to the kind it will belong to."""

    turns: int
    sub_agents: int
    first_prompt: int
    prefix: Groups
    prompt_tokens: int = 0
    new_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)


class Tally:
    """What is remembered of a trace: numbers by quantity, none by program but its sizes."""

    def __init__(self) -> None:
        self.programs: list[Size] = []
        self.longest = 1
        self.prefixes: Counter[Groups] = Counter()
        self.kept: list[tuple[int, int]] = []
        self.lost: list[int] = []
        self.parent_prompts: list[int] = []
        self.compactions: list[tuple[int, float, float]] = []
        self.rewrites: list[tuple[int, float, float]] = []
        self.gaps: dict[str, list[float]] = defaultdict(list)
        self.pauses: Counter[str] = Counter()
        self.pause_s: list[float] = []
        self.at_once: list[int] = []
        self.side_shares: list[float] = []
        self.agent_turns: list[int] = []
        self.agent_tasks: list[int] = []
        self.agents_joined = 0
        self.untimed = 0
        self.delays = 0

    def add(self, program: Program) -> None:
        prefix = sum(group.tokens for group in program.prefix)
        main, *branches = lines_of(program)
        turns = program.turns
        size = Size(len(main), len(branches), turns[main[0]].prompt_tokens, program.prefix)
        self.programs.append(size)
        self.prefixes[program.prefix] += 1
        awaited = {parent for turn in turns for parent in turn.parents}
        for index, turn in enumerate(turns):
            self._turn(turn, size)
            if index in awaited:
                self._gap(turn)
        for line in (main, *branches):
            for before, after in pairwise(line):
                self._step(turns[before], turns[after], size)
        for line in branches:
            self._branch(program, line, size, prefix, line[-1] in awaited)

    def _turn(self, turn: Turn, size: Size) -> None:
        self.longest = max(self.longest, turn.prompt_tokens)
        size.prompt_tokens += turn.prompt_tokens
        size.output_tokens.append(turn.output_tokens)
        self.kept.append((turn.output_tokens, turn.kept_output_tokens))
        self.delays += turn.delay_s > 0

    def _gap(self, turn: Turn) -> None:
        longest = max(turn.tools, key=lambda tool: tool.duration_s, default=None)
        name = longest.name or OTHER if longest is not None else ""
        self.gaps[name].append(turn.tool_gap_s())
        if turn.pause_s:
            self.pauses[name] += 1
            self.pause_s.append(turn.pause_s)
        if longest is None:
            return
        self.untimed += turn.gap_s is None and longest.duration_s == 0
        self.at_once.append(len(turn.tools))
        if longest.duration_s > 0:
            others = sorted(tool.duration_s for tool in turn.tools)[:-1]
            self.side_shares += [other / longest.duration_s for other in others]

    def _step(self, before: Turn, after: Turn, size: Size) -> None:
        """A turn that carries the context of the one before it on."""
        context = before.prompt_tokens + before.kept_output_tokens
        self.parent_prompts.append(before.prompt_tokens)
        ratio = after.prompt_tokens / before.prompt_tokens
        how = (before.prompt_tokens, ratio, after.reuse_tokens / after.prompt_tokens)
        if ratio < COMPACTED:
            self.compactions.append(how)
        elif after.reuse_tokens < REWRITTEN * context:
            self.rewrites.append(how)
        else:
            self.lost.append(context - after.reuse_tokens)
            size.new_tokens.append(after.prompt_tokens - after.reuse_tokens)

    def _branch(self, program: Program, line: list[int], size: Size, prefix: int, joined: bool) -> None:
        first = program.turns[line[0]]
        self.agent_turns.append(len(line))
        self.agents_joined += joined
        if first.parents and first.reuse_tokens > first.prompt_tokens / 2:
            parent = program.turns[first.parents[0]]
            context = parent.prompt_tokens + parent.kept_output_tokens
            self.lost.append(context - first.reuse_tokens)
            size.new_tokens.append(first.prompt_tokens - first.reuse_tokens)
        else:
            self.agent_tasks.append(first.prompt_tokens - prefix)
