"""examples/swebench-like: a coding agent that fixes issues in a repository through a shell.

Fitted to published figures of SWE-bench runs (docs/workloads.md): per program about 57 turns and 774,000
prompt tokens in sum, about 94 output tokens a turn, tool gaps of mean 1.2 s and sd 4.1 s, and the per-command
figures noted below. The shares of the commands, and what is not noted as published, are chosen so that all of
these hold together: pip, rare and slow, makes half of the overall mean and most of the overall sd.
"""

from __future__ import annotations

from agentservesim.programs.program import PrefixGroup
from agentservesim.workload.synthetic.description import Description, Kind, Tool
from agentservesim.workload.synthetic.distributions import LogNormal

SWEBENCH_LIKE = Description(
    name="swebench-like",
    programs=50,
    prefix=(PrefixGroup("swebench-like/system", 1600),),
    kinds=(
        Kind(
            turns=LogNormal.from_cv(mean=57, cv=0.43, low=5, high=200),
            task_tokens=LogNormal.from_mean(p50=700, mean=1000, low=100, high=12000),
            new_tokens=LogNormal.from_mean(p50=90, mean=240, low=5, high=16000),
            output_tokens=LogNormal.from_mean(p50=60, mean=94, low=5, high=4096),
        ),
    ),
    tools=(
        Tool("sed", 0.20, LogNormal.from_p99(p50=0.05, p99=0.25)),  # published: p99 < 0.3 s
        Tool("cat", 0.17, LogNormal.from_p99(p50=0.17, p99=3.0)),  # published: both
        Tool("grep", 0.18, LogNormal.from_p99(p50=0.17, p99=3.0)),  # published: both
        Tool("python", 0.25, LogNormal.from_mean(p50=0.6, mean=1.0)),  # published: p50
        Tool("ls", 0.06, LogNormal.from_p99(p50=0.04, p99=0.3)),
        Tool("git", 0.05, LogNormal.from_p99(p50=0.12, p99=9.0)),  # published: p99
        Tool("pytest", 0.06, LogNormal.from_mean(p50=2.2, mean=2.8)),
        Tool("pip", 0.03, LogNormal.from_mean(p50=17.6, mean=20.0)),  # published: mean
    ),
    max_prompt_tokens=120_000,
)
