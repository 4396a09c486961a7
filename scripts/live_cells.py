"""Mean JCT of a real vLLM on this machine's CPU and of its simulation: 2 workloads, 5 arrival rates, 2 policy
pairs.

    python scripts/live_cells.py OUT --vllm-python VENV/bin/python [--repeats 3] [--only coder]

One server for the five rates of a workload and policy pair; its prefix cache is reset before every run, and
the repeats of a rate lie minutes apart, as a shared machine's speed drifts. Neither pair keeps a state
between programs, so that a run finds the server as the first did. A cell's simulation has step times fitted
to all that its server logged apart from the cell's own runs: a calibration load, and the other rates' runs.
OUT/cells.jsonl grows by a server's five lines, and servers that it has are not run again; the table of
docs/fidelity.md goes to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from agentservesim import RunConfig, parse_config, simulate
from agentservesim.live.calibration import Calibration, steps_when
from agentservesim.live.server import vllm_python
from agentservesim.live.validate import Lab
from agentservesim.validation.linear_fit import fit_linear

WORKLOADS: dict[str, dict[str, Any]] = {
    "coder": {
        "source": "examples/swebench-like",
        "transforms": [{"scale_tokens": {"factor": 0.1}}, {"scale_gaps": {"factor": 0.1}}],
    },
    "search": {
        "source": "examples/bfcl-like",
        "transforms": [{"scale_tokens": {"factor": 0.25}}, {"scale_gaps": {"factor": 0.25}}],
    },
}
RATES = {"coder": (0.4, 0.6, 0.8, 0.9, 1.0), "search": (1.0, 1.5, 2.0, 2.25, 2.5)}
PROGRAMS = {"coder": (6, 8, 10, 11, 12), "search": (15, 22, 30, 34, 38)}
"""Programs a second, and as many as arrive in about a quarter of a minute."""
PAIRS: dict[str, dict[str, Any]] = {
    "lru, fcfs": {"retention": "lru", "scheduling": "fcfs"},
    "ttl, plas": {"retention": "ttl:tau_s=1,until=admission", "scheduling": "plas"},
}
POOL_TOKENS = {
    ("coder", "lru, fcfs"): 25_600,
    ("coder", "ttl, plas"): 10_752,
    ("search", "lru, fcfs"): 25_600,
    ("search", "ttl, plas"): 8_800,
}
"""KV to spare under plain vLLM, too little under the other pair."""


def cell_config(workload: str, pair: str, rate: float) -> RunConfig:
    """The config of one cell."""
    programs = PROGRAMS[workload][RATES[workload].index(rate)]
    return parse_config(
        {
            "workload": {
                **WORKLOADS[workload],
                "programs": programs,
                "arrivals": {"process": "poisson", "rate_per_s": rate, "seed": 3},
            },
            "cluster": {
                "gpu": "b200_sxm",
                "model": "llama-3.1-8b",
                "kv_cache_tokens": POOL_TOKENS[workload, pair],
            },
            "engine": {
                "block_size": 32,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 512,
                "max_model_len": 6000,
            },
            "policies": PAIRS[pair],
        }
    )


def run_server(lab: Lab, workload: str, pair: str, repeats: int, file: Path) -> list[dict[str, Any]]:
    """The cells of one server: all real runs first, then each cell's simulation, calibrated on the rest."""
    name = f"{workload}-{pair.replace(', ', '-')}"
    rates = RATES[workload]
    largest = cell_config(workload, pair, max(rates))
    runs: dict[float, list[RunRecord]] = {rate: [] for rate in rates}
    with lab.server(largest, name) as server:
        calibration = lab.calibrate_on(server, largest, name)
        for number in range(1, repeats + 1):
            for rate in rates:
                lab.on_part(f"{workload}, {pair}, {rate} programs/s: real run {number} of {repeats}")
                server.reset_prefix_cache()
                began_s = time.monotonic()
                out = lab.folder / f"{name}-{rate}-{number}"
                result = lab.real_run(cell_config(workload, pair, rate), server, out, seed=number)
                runs[rate].append(RunRecord(began_s, time.monotonic(), result.summary))
    cells = []
    for rate in rates:
        cells.append(judge(lab.log(name, "steps"), calibration, workload, pair, rate, runs[rate]))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(cells[-1]) + "\n")
    return cells


class RunRecord(NamedTuple):
    """A real run: from when to when on the machine's monotonic clock, and its summary."""

    began_s: float
    ended_s: float
    summary: dict[str, Any]


def judge(
    step_log: Path, calibration: Calibration, workload: str, pair: str, rate: float, runs: list[RunRecord]
) -> dict[str, Any]:
    """A cell: its real runs beside its simulation. Step times are fitted to what the server logged apart from
    these runs, the client's overhead is the calibration's."""
    elsewhere = steps_when(
        step_log, lambda time_s: not any(run.began_s <= time_s <= run.ended_s for run in runs)
    )
    fitted = dataclasses.replace(calibration, steps=fit_linear(elsewhere))
    simulated = simulate(fitted.applied(cell_config(workload, pair, rate))).summary
    real = [run.summary for run in runs]
    jct = [run["jct_mean_s"] for run in real]
    mean = statistics.mean(jct)
    return {
        "workload": workload,
        "pair": pair,
        "rate_per_s": rate,
        "real_jct_s": jct,
        "simulated_jct_s": simulated["jct_mean_s"],
        "error": simulated["jct_mean_s"] / mean - 1,
        "spread": (max(jct) - min(jct)) / mean,
        "real_hit_rate": statistics.mean(run["prefix_hit_rate"] for run in real),
        "simulated_hit_rate": simulated["prefix_hit_rate"],
        "real_ttft_s": statistics.mean(run["ttft_mean_s"] for run in real),
        "simulated_ttft_s": simulated["ttft_mean_s"],
        "simulated_preemptions": simulated["preemptions"],
        "calls_not_served": sum(run["calls_refused"] + run["calls_failed"] for run in real),
        "deviations": sum(sum(run["deviations"].values()) for run in real),
        "release_lag_max_s": max(run["release_lag_max_s"] for run in real),
    }


def table(cells: list[dict[str, Any]]) -> str:
    """The cells as Markdown, and what they come to."""
    lines = [
        "| workload | policies | programs/s | real JCT, s | repeats differ by | simulated, s | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        mean = statistics.mean(cell["real_jct_s"])
        lines.append(
            f"| {cell['workload']} | {cell['pair']} | {cell['rate_per_s']} | {mean:.2f} | "
            f"{100 * cell['spread']:.1f} % | {cell['simulated_jct_s']:.2f} | {100 * cell['error']:+.1f} % |"
        )
    sizes = [abs(cell["error"]) for cell in cells]
    lines.append(
        f"\n{len(cells)} cells: |error| median {100 * statistics.median(sizes):.1f} %, largest "
        f"{100 * max(sizes):.1f} %; the real repeats of a cell differ by "
        f"{100 * statistics.median(cell['spread'] for cell in cells):.1f} % in the median, "
        f"{100 * max(cell['spread'] for cell in cells):.1f} % at most."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS), choices=list(PAIRS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "cells.jsonl"
    cells = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(cell["workload"], cell["pair"], cell["rate_per_s"]) for cell in cells}
    said = ""

    def on_part(words: str) -> None:
        nonlocal said
        part = words.partition("), ")[0]  # without the seconds that a start has taken
        if part != said:
            print(part, file=sys.stderr, flush=True)
        said = part

    lab = Lab(vllm_python(given.vllm_python), given.out, on_part)
    for workload in given.only:
        for pair in given.pairs:
            if any((workload, pair, rate) not in done for rate in RATES[workload]):
                cells += run_server(lab, workload, pair, given.repeats, file)
    order = [(w, p, r) for w in WORKLOADS for p in PAIRS for r in RATES[w]]
    cells.sort(key=lambda cell: order.index((cell["workload"], cell["pair"], cell["rate_per_s"])))
    print(table(cells))


if __name__ == "__main__":
    main()
