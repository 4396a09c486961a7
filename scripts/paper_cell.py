"""Writes docs/paper-cell.md's tables: every retention x scheduling pair on the RTX PRO 6000 cell.

    python scripts/paper_cell.py TRACE.jsonl > tables.md

TRACE is the workload to run, for instance the 50 SWE-bench programs of the shared data.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from agentservesim import parse_config, simulate

RETENTION = ("lru", "immediate-release", "ttl", "pressure-ttl", "tool-ttl", "min-waste")
SCHEDULING = ("fcfs", "program-fcfs", "plas")
BEYOND = (
    ("tool-ttl", "continuum", "none"),
    ("lru", "resident-first", "none"),
    ("lru", "fcfs", "program-cap"),
    ("tool-ttl", "continuum", "program-cap"),
    ("evolved-gap-ema", "evolved-sqrt-plas", "none"),
)
RATES_PER_S = (0.01, 0.02)


def run(trace: str, rate_per_s: float, retention: str, scheduling: str, admission: str) -> dict[str, Any]:
    """The summary of one cell."""
    config = {
        "workload": {
            "source": trace,
            "arrivals": {"process": "poisson", "rate_per_s": rate_per_s, "seed": 42},
        },
        "cluster": {
            "gpu": "rtx_pro_6000_server",
            "model": "llama-3.1-70b",
            "tp": 2,
            "kv_cache_tokens": 115648,
        },
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 16384, "max_model_len": 131072},
        "policies": {"retention": retention, "scheduling": scheduling, "admission": admission},
    }
    return simulate(parse_config(config)).summary


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("trace")
    trace = arguments.parse_args().trace
    cells = [(r, s, "none") for r, s in itertools.product(RETENTION, SCHEDULING)] + list(BEYOND)
    for rate_per_s in RATES_PER_S:
        print(f"\n### {rate_per_s} programs/s\n")
        print(
            "| retention | scheduling | admission | mean JCT, s | vs lru + fcfs | prefix hits | preemptions "
            "| reclaimed |"
        )
        print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
        baseline = None
        for cell in cells:
            summary = run(trace, rate_per_s, *cell)
            mean = summary["jct_mean_s"]
            baseline = baseline or mean
            print(
                f"| {' | '.join(cell)} | {mean:,.0f} | {(mean / baseline - 1) * 100:+.1f} % "
                f"| {summary['prefix_hit_rate'] * 100:.1f} % | {summary['preemptions']} "
                f"| {summary['protected_reclaims']} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
