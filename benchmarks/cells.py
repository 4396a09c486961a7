"""Benchmarks: calls a second, engine steps a second, event-loop seconds and peak memory of fixed cells.

    python benchmarks/cells.py              every cell
    python benchmarks/cells.py agents-10k   one of them

Prints one JSON object a cell. Each runs in a process of its own, three times; the fastest is reported, with
all three. `loop_s` is the wall time of the event loop alone, `total_s` of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import write_agents

REPEATS = 3
B200_8B = {"gpu": "b200_sxm", "model": "llama-3.1-8b", "tp": 1}
ENGINE = {"max_num_seqs": 128, "max_num_batched_tokens": 16384, "max_model_len": 131072}


def _poisson(source: str, rate_per_s: float) -> dict[str, Any]:
    return {"source": source, "arrivals": {"process": "poisson", "rate_per_s": rate_per_s, "seed": 42}}


def _agents(folder: Path, programs: int, lanes: int, **cluster: Any) -> dict[str, Any]:
    path = folder / f"agents-{programs}.jsonl"
    write_agents(path, programs)
    arrivals = {"process": "closed_loop", "lanes": lanes}
    return {"workload": {"source": str(path), "arrivals": arrivals}, "cluster": {**B200_8B, **cluster}}


def cells(folder: Path) -> dict[str, Any]:
    """Name -> a function that makes the config; the load grows in load-1x .. load-8x, all else equal."""
    swebench = Path(os.environ.get("AGENTSERVESIM_DATA", "")) / "traces/native/swebench50.jsonl"
    roomy = {"kv_cache_tokens": 64 * 60_000}
    named: dict[str, Any] = {
        "swebench-like": lambda: {"workload": _poisson("examples/swebench-like", 0.04), "cluster": B200_8B},
        "agents-10k": lambda: _agents(folder, 500, 64),
        "agents-10k-roomy": lambda: _agents(folder, 500, 64, **roomy),
        "agents-10k-quarter": lambda: _agents(folder, 500, 64, kv_cache_tokens=64 * 21_000 // 4),
    }
    if swebench.is_file():
        named["swebench50"] = lambda: {"workload": _poisson(str(swebench), 0.04), "cluster": B200_8B}
    for factor in (1, 2, 4, 8):
        named[f"load-{factor}x"] = lambda factor=factor: _agents(folder, 125 * factor, 32, **roomy)
    return named


def measure(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a config in a process of its own, REPEATS times."""
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "engine": ENGINE}))
    runs = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        command = [sys.executable, "-m", "agentservesim", "run", str(path), "--json"]
        summary = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        summary["total_s"] = time.perf_counter() - started
        runs.append(summary)
    best = min(runs, key=lambda run: run["sim_wall_s"])
    return {
        "calls": best["calls"],
        "engine_steps": best["engine_steps"],
        "preemptions": best["preemptions"],
        "calls_per_s": round(best["calls"] / best["sim_wall_s"]),
        "engine_steps_per_s": round(best["engine_steps"] / best["sim_wall_s"]),
        "loop_s": round(best["sim_wall_s"], 3),
        "loop_s_all": [round(run["sim_wall_s"], 3) for run in runs],
        "total_s": round(min(run["total_s"] for run in runs), 2),
        "peak_rss_mb": round(best["peak_rss_bytes"] / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cell", nargs="*")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        named = cells(folder)
        for cell in parser.parse_args().cell or named:
            if cell not in named:
                parser.error(f"unknown cell {cell!r}; expected one of {', '.join(named)}")
            print(json.dumps({"cell": cell, **measure(named[cell](), folder)}), flush=True)


if __name__ == "__main__":
    main()
