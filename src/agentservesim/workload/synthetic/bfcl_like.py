"""examples/bfcl-like: a question-answering agent that searches the web.

Published for BFCL web search (docs/workloads.md): about 9 turns a program, small contexts. The rest is
chosen: result pages of a few hundred tokens, search latencies of about a second and a time-out at 30 s.
"""

from __future__ import annotations

from agentservesim.programs.program import PrefixGroup
from agentservesim.workload.synthetic.description import Description, Kind, Tool
from agentservesim.workload.synthetic.distributions import LogNormal

BFCL_LIKE = Description(
    name="bfcl-like",
    programs=100,
    prefix=(PrefixGroup("bfcl-like/system", 640),),
    kinds=(
        Kind(
            turns=LogNormal.from_cv(mean=9, cv=0.5, low=2, high=40),
            task_tokens=LogNormal.from_mean(p50=90, mean=110, low=20, high=1000),
            new_tokens=LogNormal.from_mean(p50=280, mean=450, low=20, high=6000),
            output_tokens=LogNormal.from_mean(p50=45, mean=65, low=5, high=2048),
        ),
    ),
    tools=(
        Tool("search_engine_query", 0.65, LogNormal.from_p99(p50=0.9, p99=4.0, high=30.0)),
        Tool("fetch_url_content", 0.35, LogNormal.from_p99(p50=0.7, p99=10.0, high=30.0)),
    ),
    max_prompt_tokens=32_000,
)
