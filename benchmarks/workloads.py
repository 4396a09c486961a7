"""Workloads of the benchmarks, made on the spot and seeded."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_agents(
    path: Path,
    programs: int,
    turns: int = 20,
    first_tokens: int = 2000,
    last_tokens: int = 40000,
    seed: int = 1,
) -> None:
    """Native JSON Lines: each program's context grows evenly from `first_tokens` to `last_tokens`; about
    100 output tokens a turn, exponential tool gaps of 1 s on average."""
    rng = random.Random(seed)
    grow = (last_tokens - first_tokens) / max(turns - 1, 1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(programs):
            lines = []
            prompt = first_tokens + rng.randrange(-200, 200)
            for _ in range(turns):
                output = rng.randrange(20, 180)
                tools = [{"name": rng.choice(("bash", "edit", "search")), "duration_s": rng.expovariate(1.0)}]
                lines.append({"prompt_tokens": prompt, "output_tokens": output, "tools": tools})
                prompt += output + max(1, int(rng.gauss(grow - output, 200)))
            file.write(json.dumps({"program_id": f"p{number}", "turns": lines}) + "\n")
