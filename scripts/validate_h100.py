"""Real vLLM on H100 SXM against the `measured` back end: the table of docs/fidelity.md.

    python scripts/validate_h100.py [$AGENTSERVESIM_DATA/measured/h100_vllm_aggregate.csv]

The load of each stage is rebuilt from its columns, as inference-perf's shared-prefix generator makes it:

- each of system_prompts x users_per_system_prompt users has one question, asked again and again after its
  system prompt, so that all but its first prompt are in the prefix cache;
- prompt_len_mean tokens a prompt (text made of random tokens is a few percent longer once tokenised again);
- output_len tokens an answer. output_len_mean counts the answer's text tokenised again, which for Llama-2 is
  a fifth less; (end to end - TTFT) / TPOT is 2 x output_len in every stage and for both models;
- the arrivals of a "constant" rate: exponential gaps, scaled to fill the duration exactly.

That same factor says that the file's TPOT is per stream event, two a token. Real TPOT is here therefore
(end to end - TTFT) / (output_len - 1). Times were taken at the client; ours are the engine's.

The file does not say which vLLM ran; recent ones schedule asynchronously (--async-scheduling), which adds a
step to TTFT.

Stages with failures or a mean TTFT of seconds are overloaded and left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import tempfile
from pathlib import Path

from agentservesim import parse_config, simulate

SEED = 42
MODELS = {"meta-llama/Llama-2-7b-hf": "llama-2-7b", "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b"}
OVERLOADED_TTFT_S = 1.0


def workload(row: dict[str, str], path: Path) -> None:
    """The stage's requests as a native workload."""
    rng = random.Random(SEED)
    groups, users = int(row["system_prompts"]), int(row["users_per_system_prompt"])
    count, prompt = int(row["requests"]), round(float(row["prompt_len_mean"]))
    system = int(row["system_prompt_len"])
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    scale = float(row["duration_s"]) / sum(gaps)
    now_s = 0.0
    with path.open("w", encoding="utf-8") as file:
        for number, gap in enumerate(gaps):
            now_s += gap * scale
            user = number % (groups * users)
            prefix = [
                {"id": f"system-{user % groups}", "tokens": system},
                {"id": f"question-{user}", "tokens": prompt - system},
            ]
            turn = {"prompt_tokens": prompt, "output_tokens": int(row["output_len"])}
            line = {"program_id": f"r{number}", "arrival_s": now_s, "prefix": prefix, "turns": [turn]}
            file.write(json.dumps(line) + "\n")


def simulated(row: dict[str, str], asynchronous: bool, settings: dict[str, object]) -> dict[str, float]:
    """The summary of a stage."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stage.jsonl")
        workload(row, path)
        config = {
            "workload": {"source": str(path)},
            "cluster": {"gpu": "h100_sxm", "model": MODELS[row["model"]], "tp": int(row["tp"])},
            "engine": {
                "async_scheduling": asynchronous,
                **{key: int(row[key]) for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")},
            },
            **settings,
        }
        return simulate(parse_config(config), keep_tables=False).summary


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    data = Path(os.environ.get("AGENTSERVESIM_DATA", "."))
    arguments.add_argument("csv", nargs="?", default=data / "measured" / "h100_vllm_aggregate.csv")
    arguments.add_argument("--step-time", type=json.loads, default={}, help="the step_time section, as JSON")
    arguments.add_argument("--async-scheduling", action="store_true", help="schedule asynchronously")
    chosen = arguments.parse_args()
    print(
        "| stage | rate /s | TTFT real, ms | ours | error | TPOT real, ms | ours | error "
        "| end to end real, s | ours | error |"
    )
    print("| --- " + "| ---: " * 10 + "|")
    errors: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "end to end": []}
    with open(chosen.csv, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        ttft_s, e2e_s = float(row["ttft_mean_s"]), float(row["e2e_mean_s"])
        name = f"{row['experiment']}, {row['stage']}"
        if int(row["failures"]) or ttft_s > OVERLOADED_TTFT_S:
            print(f"| {name} | {row['rate_rps']} | overloaded" + " |" * 9)
            continue
        summary = simulated(row, chosen.async_scheduling, {"step_time": chosen.step_time})
        pairs = {
            "TTFT": (ttft_s, summary["ttft_mean_s"]),
            "TPOT": ((e2e_s - ttft_s) / (int(row["output_len"]) - 1), summary["tpot_mean_s"]),
            "end to end": (e2e_s, summary["call_latency_mean_s"]),
        }
        cells = []
        for key, (real, ours) in pairs.items():
            error = ours / real - 1
            errors[key].append(error)
            scale = 1.0 if key == "end to end" else 1e3
            cells.append(f"{real * scale:.2f} | {ours * scale:.2f} | {error * 100:+.1f} %")
        print(f"| {name} | {row['rate_rps']} | {' | '.join(cells)} |", flush=True)
    print()
    for key, values in errors.items():
        sizes = [abs(value) for value in values]
        print(
            f"{key}: median |error| {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, "
            f"mean error {statistics.mean(values):+.1%} over {len(values)} stages"
        )


if __name__ == "__main__":
    main()
