"""Draw programs from a description. Program k depends on (description, seed, k) alone."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, count

import msgspec

from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.synthetic.description import Description

# A program's turns decide most of its tokens, and rare slow tools most of its waiting: independent draws
# would leave 50 programs far off their means. These two are drawn instead by an irrational step from a seeded
# start, which covers [0, 1) evenly over every stretch of programs, and still needs only (seed, index).
_TURNS_STEP = (math.sqrt(5) - 1) / 2
_TOOL_STEP = math.sqrt(2) - 1


def generate(description: Description, seed: int) -> Iterator[Program]:
    """Endless programs, one at a time: the first n are the same however many are taken."""
    return (draw_program(description, seed, index) for index in count())


def draw_program(description: Description, seed: int, index: int) -> Program:
    """Program `index` of the workload with this seed."""
    rng = random.Random(f"{description.name}/{seed}/{index}")
    turns: list[Turn] = []
    prompt = sum(group.tokens for group in description.prefix)
    prompt += round(description.task_tokens.quantile(rng.random()))
    reuse = 0
    wanted = _turn_count(description, seed, index)
    while len(turns) < wanted and (prompt <= description.max_prompt_tokens or not turns):
        output = max(1, round(description.output_tokens.quantile(rng.random())))
        tool = _draw_tool(description, seed, index, len(turns), rng)
        turns.append(
            Turn(
                turn_id=f"t{len(turns)}",
                prompt_tokens=prompt,
                output_tokens=output,
                reuse_tokens=reuse,
                kept_output_tokens=output,
                parents=(len(turns) - 1,) if turns else (),
                tools=(tool,),
            )
        )
        reuse = prompt + output
        prompt = reuse + max(1, round(description.new_tokens.quantile(rng.random())))
    turns[-1] = msgspec.structs.replace(turns[-1], tools=())  # the last answers instead of calling a tool
    return Program(f"{description.name}-{index:05d}", tuple(turns), prefix=description.prefix)


def _turn_count(description: Description, seed: int, index: int) -> int:
    share = (_start(description.name, seed, "turns") + index * _TURNS_STEP) % 1.0
    return max(1, round(description.turns.quantile(share)))


def _draw_tool(
    description: Description, seed: int, index: int, position: int, rng: random.Random
) -> ToolCall:
    """The tool after the turn at `position`; the choice is spread evenly over programs, not positions."""
    edges = list(accumulate(tool.share for tool in description.tools))
    share = (_start(description.name, seed, f"tool/{position}") + index * _TOOL_STEP) % 1.0
    chosen = min(bisect_right(edges, share * edges[-1]), len(edges) - 1)
    tool = description.tools[chosen]
    return ToolCall(tool.name, round(tool.duration_s.quantile(rng.random()), 4))


@lru_cache(maxsize=4096)
def _start(name: str, seed: int, stream: str) -> float:
    """Where, from 0 to 1, the evenly spread draws of a stream begin."""
    return random.Random(f"{name}/{seed}/{stream}").random()
