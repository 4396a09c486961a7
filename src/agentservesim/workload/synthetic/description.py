"""A synthetic workload as data: what to draw programs from."""

from __future__ import annotations

import math

import msgspec

from agentservesim.programs.program import PrefixGroup
from agentservesim.workload.synthetic.distributions import LogNormal


class Tool(msgspec.Struct, frozen=True):
    """One tool of the mix: `share` of all tool calls, weighed against the others', and seconds it runs."""

    name: str
    share: float
    duration_s: LogNormal


class Description(msgspec.Struct, frozen=True):
    """A chain-shaped agent workload.

    name                the programs' ids begin with it
    programs            how many a run takes unless told otherwise
    prefix              shared by all programs, at the start of every prompt
    turns               calls of a program
    task_tokens         what the first prompt adds to the prefix
    new_tokens          what a tool's answer adds to the next prompt, beside the turn's own output
    output_tokens       of a turn; all stay in the context
    tools               one is called after every turn but the last
    max_prompt_tokens   a program ends before a turn whose prompt would be longer
    """

    name: str
    programs: int
    prefix: tuple[PrefixGroup, ...]
    turns: LogNormal
    task_tokens: LogNormal
    new_tokens: LogNormal
    output_tokens: LogNormal
    tools: tuple[Tool, ...]
    max_prompt_tokens: int

    def gap_mean_and_sd_s(self) -> tuple[float, float]:
        """Mean and standard deviation, in seconds, of the tool gap the mix stands for."""
        total = sum(tool.share for tool in self.tools)
        mean = sum(tool.share * tool.duration_s.mean for tool in self.tools) / total
        square = (
            sum(tool.share * (tool.duration_s.mean**2 + tool.duration_s.sd**2) for tool in self.tools) / total
        )
        return mean, math.sqrt(square - mean**2)
