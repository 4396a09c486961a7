"""Seeded random programs for the comparison of the plug-in with the simulator."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn

from .loads import Engine, make_engine

Arrivals = list[tuple[float, Program]]


def make_live_engine(rng: random.Random, async_scheduling: bool) -> Engine:
    """An engine with a pool small enough for reclaims and preemptions."""
    engine = make_engine(rng, async_scheduling)
    return msgspec.structs.replace(engine, policy="fcfs", num_blocks=max(engine.num_blocks, 60))


def options_of(engine: Engine) -> dict[str, Any]:
    """The simulator's options for that engine; the policy of its queue follows from the scheduling policy."""
    options = msgspec.structs.asdict(engine)
    del options["policy"], options["async_scheduling"]
    return options


def make_programs(rng: random.Random, engine: Engine, count: int, time_scale: float = 1.0) -> Arrivals:
    """Programs in order of arrival, most a chain of turns with tool gaps, some that fork and join; their
    calls fit the engine one at a time, and together they do not. `time_scale` stretches arrivals and gaps."""
    longest = min(engine.capacity(), engine.max_model_len) - 1
    time_s = 0.0
    arrivals = []
    for number in range(count):
        time_s += rng.expovariate(1 / 0.4) * time_scale
        arrivals.append((time_s, _program(rng, number, longest, time_scale)))
    return arrivals


def _program(rng: random.Random, number: int, longest: int, time_scale: float) -> Program:
    prefix = (PrefixGroup("system", min(64, longest // 4)),) if rng.random() < 0.5 else ()
    shared = prefix[0].tokens if prefix else 0
    turns: list[Turn] = []
    prompt = rng.randrange(shared + 1, max(shared + 2, longest // 3))
    parent: int | None = None
    branches: list[int] = []
    for index in range(rng.randrange(1, 8)):
        output = rng.randrange(1, max(2, min(60, longest - prompt)))
        before = turns[parent] if parent is not None else None
        gap_s = rng.choice([0.0, rng.expovariate(2.0), rng.expovariate(1 / 3)]) * time_scale
        joined = branches if branches and rng.random() < 0.5 else []
        turn = _turn(rng, index, prompt, output, before, parent, gap_s)
        turns.append(msgspec.structs.replace(turn, parents=(*turn.parents, *joined)))
        branches = [branch for branch in branches if branch not in joined]
        if index and rng.random() < 0.15:
            branches.append(index)
            continue  # the next turn has the same parent as this one: a fork
        parent = index
        prompt += turns[-1].kept_output_tokens + rng.randrange(1, max(2, longest // 8))
        if prompt + 2 > longest:
            break
    return Program(f"p{number}", tuple(turns), prefix=prefix)


def _turn(
    rng: random.Random,
    index: int,
    prompt: int,
    output: int,
    before: Turn | None,
    parent: int | None,
    gap_s: float,
) -> Turn:
    reuse = min(before.prompt_tokens + before.kept_output_tokens, prompt) if before is not None else 0
    tools = (ToolCall(rng.choice("abc"), 0.0),) if rng.random() < 0.8 else ()
    return Turn(
        turn_id=str(index),
        prompt_tokens=prompt,
        output_tokens=output,
        reuse_tokens=reuse,
        kept_output_tokens=output if rng.random() < 0.8 else rng.randrange(output + 1),
        parents=(parent,) if parent is not None else (),
        tools=tools,
        gap_s=gap_s,
    )
