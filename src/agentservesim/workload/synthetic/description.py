"""A synthetic workload as data: what to draw programs from. `trace fit` learns one; two are bundled."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from agentservesim.programs.program import PrefixGroup
from agentservesim.workload.synthetic.distributions import Marginal

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Kind(msgspec.Struct, frozen=True):
    """One kind of program of a mix: a fit has one for short programs, one for long ones.

    turns           calls of a program, those of its sub-agents left out
    sub_agents      how many a program starts, if the description has any
    task_tokens     what the first prompt adds to the shared prefix
    new_tokens      what a prompt adds to what it repeats: tools' answers, a person's text
    output_tokens   of a turn
    share           of all programs, weighed against the other kinds'
    """

    turns: Marginal
    task_tokens: Marginal
    new_tokens: Marginal
    output_tokens: Marginal
    share: Weight = 1.0
    sub_agents: Marginal | None = None


class Tool(msgspec.Struct, frozen=True):
    """One tool of the mix, by which a gap is named: that of the turn's longest call.

    name          '' stands for turns without a tool
    share         of all gaps, weighed against the others'
    duration_s    seconds it runs
    pause_share   how often a person's pause follows
    """

    name: str
    share: Weight
    duration_s: Marginal
    pause_share: Share = 0.0


class KeptShare(msgspec.Struct, frozen=True):
    """What share of an output of up to `up_to_tokens` tokens returns into the context."""

    up_to_tokens: Count
    share: Marginal


class Rewrite(msgspec.Struct, frozen=True):
    """How contexts are rewritten; a compaction is one.

    rate          how often, of the turns whose prompt has from_tokens or more, and less than below_tokens
    size          the new prompt, as a share of the one before
    reuse         how much of the new prompt still is what stood there before, as a share of it
    """

    rate: Share
    from_tokens: Count
    below_tokens: Count
    size: Marginal
    reuse: Marginal


class SubAgents(msgspec.Struct, frozen=True):
    """Branches that fork off a program's main line, each after a turn chosen evenly, and run beside it.

    turns         calls of one
    task_tokens   its first prompt, beside the shared prefix, where it repeats nothing
    fresh_share   how often it repeats nothing of the turn it forks from; else it continues that context
    join_share    how often the main line's next turn waits for it
    """

    turns: Marginal
    task_tokens: Marginal
    fresh_share: Share
    join_share: Share


class Prefix(msgspec.Struct, frozen=True):
    """Prefix groups that a share of the programs begins with, beside the description's own."""

    share: Share
    groups: tuple[PrefixGroup, ...]


class Description(msgspec.Struct, frozen=True):
    """An agent workload: a main line of turns, with sub-agents where there are any.

    name                the programs' ids begin with it
    programs            how many a run takes unless told otherwise
    kinds               the mix of programs; at least one
    tools               one is called after every turn but the last; at least one
    max_prompt_tokens   no prompt grows beyond it: the context is rewritten, by the first of `rewrites`,
                        or the program ends
    prefix              shared by all programs, at the start of every prompt
    prefixes            more, each shared by some of the programs
    order               of the tokens new in a line of turns: 0 by chance, up to 1 the larger first, down to
                        -1 the larger last. It moves the mean prompt, and no other distribution
    kept_share          of an output, returning into the context: the first row that the output's length fits,
                        else the last; all of it when there is none
    lost_tokens         at the end of a context, not repeated by the next prompt
    rewrites            contexts rewritten
    tools_at_once       tools side by side after a turn that calls any
    side_share          how long the other tools run, as a share of the longest
    pause_s             a person's pauses
    sub_agents          branches beside the main line
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    programs: Annotated[int, msgspec.Meta(ge=1)]
    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1)]
    tools: Annotated[tuple[Tool, ...], msgspec.Meta(min_length=1)]
    max_prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    prefix: tuple[PrefixGroup, ...] = ()
    prefixes: tuple[Prefix, ...] = ()
    order: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.0
    kept_share: tuple[KeptShare, ...] = ()
    lost_tokens: Marginal | None = None
    rewrites: tuple[Rewrite, ...] = ()
    tools_at_once: Marginal | None = None
    side_share: Marginal | None = None
    pause_s: Marginal | None = None
    sub_agents: SubAgents | None = None

    def __post_init__(self) -> None:
        for field in ("kinds", "tools"):
            if not sum(row.share for row in getattr(self, field)) > 0:
                raise ValueError(f"the shares of {field} add up to 0")

    def gap_mean_and_sd_s(self) -> tuple[float, float]:
        """Mean and standard deviation, in seconds, of the tool gap the mix stands for."""
        total = sum(tool.share for tool in self.tools)
        mean = sum(tool.share * tool.duration_s.mean for tool in self.tools) / total
        square = (
            sum(tool.share * (tool.duration_s.mean**2 + tool.duration_s.sd**2) for tool in self.tools) / total
        )
        return mean, math.sqrt(square - mean**2)
