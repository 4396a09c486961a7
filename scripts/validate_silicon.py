"""A sample of the measured TTFT/TPOT rows that aiconfigurator-core ships, against simulated closed loops.

    python scripts/validate_silicon.py [--rows 320] [--seed 42]

Rows of `systems/silicon_sample.csv` that are aggregated vLLM, of a model this simulator describes (dense or
mixture of experts with grouped-query attention), without data-parallel attention and with a tensor-parallel
size that splits the model. nvidia/Llama-3.1-8B-Instruct-FP8 is left out: at tp 1 its rows imply more prompt
tokens a second than an H200 has flops for, so they are of several engines. Of the others `--rows` are drawn
at random with `--seed`. Each is simulated as it was run:

- as many programs at a time as its silicon_concurrency, one call each, no shared prefixes, 10 x concurrency
  calls in all, all lanes starting at once; means over all calls;
- rows of InferenceMAX (a dated source_file, or a db-dump): lengths drawn from 80 to 100 % of isl and osl, as
  that benchmark does; other rows: exactly isl and osl, but the first answer of each lane cut to a random
  length, so that the lanes do not stay in step;
- vLLM's defaults: 8,192 batched tokens, 1,024 sequences, 0.9 of the memory; asynchronous scheduling from
  version 0.14 on;
- step times from the `measured` operators at the precision that the row names. The product's back end is
  bf16; that the library is asked for fp8, nvfp4 or int4 products and experts is done here and nowhere else.
  KV is bf16.

Times were taken at the client; ours are the engine's. The printed tables are those of
docs/fidelity.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agentservesim import parse_config, simulate
from agentservesim.errors import InputError
from agentservesim.step_time import gpu, model
from agentservesim.step_time.hardware import systems_folder
from agentservesim.step_time.measured import MeasuredStepTime
from agentservesim.step_time.models import Model
from agentservesim.step_time.operators import NoMeasurements, Operators

ROUNDS = 10
RESERVE_BYTES = 4 * 2**30
BATCHED_TOKENS = 8192
BYTES = {"fp8": 1.0, "fp8_block": 1.0, "nvfp4": 9 / 16, "int4_wo": 0.5, "": 2.0}
MINIMAX = Model(  # from its config.json; the layer shapes are those of Qwen3's mixtures
    "minimax-m2.5", None, "Qwen3MoeForCausalLM", 62, 3072, 48, 8, 128, 1536, 200_064, 256, 8, 1536,
    max_position_embeddings=196_608,
)  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    "meta-llama/Llama-3.1-70B": lambda: model("llama-3.1-70b"),
    "Qwen/Qwen3-32B": lambda: model("qwen3-32b"),
    "Qwen/Qwen3-235B-A22B-FP8": lambda: model("qwen3-235b-a22b"),
    "MiniMaxAI/MiniMax-M2.5": lambda: MINIMAX,
}


def usable(row: dict[str, str]) -> bool:
    """Whether a row is of the kind described above."""
    if row["backend"] != "vllm" or row["mode"] != "agg" or row["model_path"] not in MODELS:
        return False
    if concurrency(row) is None or float(row["attention_dp_size"] or 1) > 1:
        return False
    experts = int(float(row["moe_tp_size"] or 1)) * int(float(row["moe_ep_size"] or 1))
    return not MODELS[row["model_path"]]().experts or experts == int(float(row["tp_size"]))


def concurrency(row: dict[str, str]) -> int | None:
    found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    return int(found[1]) if found else None


@cache
def step_time(system: str, name: str, tp: int, ep: int, gemm: str, moe: str) -> MeasuredStepTime:
    """The measured back end at a precision. `build_model_config` is the library's own switch for it."""
    from aiconfigurator_core.sdk import config_builders

    chip, spec = gpu(system), MODELS[name]()
    plain = config_builders.build_model_config

    def quantised(**settings: Any) -> Any:
        if spec.experts:
            settings |= {"moe_tp_size": tp // ep, "moe_ep_size": ep, "moe_quant_mode": moe or None}
        return plain(**settings, gemm_quant_mode=gemm or None)

    config_builders.build_model_config = quantised
    try:
        operators = Operators(chip, spec, tp)
    finally:
        config_builders.build_model_config = plain
    return MeasuredStepTime(operators, chip, spec, tp, BATCHED_TOKENS)


def run(row: dict[str, str], seed: int) -> tuple[float, float]:
    """Mean TTFT and TPOT in seconds, simulated."""
    lanes, tp = concurrency(row), int(float(row["tp_size"]))
    assert lanes is not None
    isl, osl = int(row["isl"]), int(row["osl"])
    spec, chip = MODELS[row["model_path"]](), gpu(row["system"])
    gemm, moe = row["gemm_quant_mode"], row["moe_quant_mode"]
    times = step_time(
        row["system"], row["model_path"], tp, int(float(row["moe_ep_size"] or 1)) or 1, gemm, moe
    )
    weights = spec.weight_bytes(tp) * BYTES[moe if spec.experts else gemm] / spec.dtype_bytes
    room = chip.memory_bytes * 0.9 - weights - RESERVE_BYTES
    inferencemax = bool(re.match(r"source_file=\d{4}-|db-dump", row["silicon_data_source"]))
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop.jsonl")
        with path.open("w", encoding="utf-8") as file:
            for number in range(lanes * ROUNDS):
                prompt, output = isl, osl
                if inferencemax:
                    prompt, output = (max(1, round(n * rng.uniform(0.8, 1.0))) for n in (isl, osl))
                elif number < lanes:
                    output = rng.randint(1, osl)
                turn = {"prompt_tokens": prompt, "output_tokens": output}
                file.write(json.dumps({"program_id": f"r{number}", "turns": [turn]}) + "\n")
        version = re.match(r"0\.(\d+)", row["backend_version"])
        config = {
            "workload": {"source": str(path), "arrivals": {"process": "closed_loop", "lanes": lanes}},
            "cluster": {
                "gpu": row["system"],
                "model": "llama-3.1-8b",  # only its name is read: pool and step times are given
                "kv_cache_tokens": int(max(room, 0) / spec.kv_bytes_per_token(tp)),
            },
            "engine": {
                "max_num_seqs": 1024,
                "max_num_batched_tokens": BATCHED_TOKENS,
                "max_model_len": isl + osl + 256,
                "async_scheduling": bool(version and int(version[1]) >= 14),
            },
        }
        calls = simulate(parse_config(config), step_time=times).tables["calls"].to_pylist()
    done = [call for call in calls if call["status"] == "completed"]
    ttft = [call["first_token_s"] - call["released_s"] for call in done]
    tpot = [(c["completed_s"] - c["first_token_s"]) / max(c["output_tokens"] - 1, 1) for c in done]
    return statistics.mean(ttft), statistics.mean(tpot)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--rows", type=int, default=320)
    arguments.add_argument("--seed", type=int, default=42)
    arguments.add_argument("--csv", type=Path, help="write a row a simulated row here")
    arguments.add_argument("--tables", type=Path, help="only print the tables of an earlier --csv")
    chosen = arguments.parse_args()
    if chosen.tables:
        with chosen.tables.open(encoding="utf-8") as file:
            tables(list(csv.DictReader(file)))
        return
    with (systems_folder() / "silicon_sample.csv").open(encoding="utf-8") as file:
        population = [row for row in csv.DictReader(file) if usable(row)]
    sample = random.Random(chosen.seed).sample(population, min(chosen.rows, len(population)))
    results, skipped, started = [], defaultdict(int), time.perf_counter()
    for row in sample:
        try:
            ttft_s, tpot_s = run(row, chosen.seed)
        except (NoMeasurements, InputError) as problem:
            skipped[f"{row['system']} {row['model_path']} tp {row['tp_size']}: {str(problem)[:90]}"] += 1
            continue
        real = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
        results.append({**row, "ttft_error": ttft_s / real[0] - 1, "tpot_error": tpot_s / real[1] - 1,
                        "ttft_ms": ttft_s * 1e3, "tpot_ms": tpot_s * 1e3})  # fmt: skip
    took_s = time.perf_counter() - started
    print(f"{len(results)} of {len(population)} rows, seed {chosen.seed}, {took_s:.0f} s\n")
    tables(results)
    for reason, count in skipped.items():
        print(f"skipped {count}: {reason}")
    if chosen.csv:
        with chosen.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(results[0]))
            writer.writeheader()
            writer.writerows(results)


def tables(results: list[dict[str, Any]]) -> None:
    """Markdown tables of the errors by group. End to end is TTFT + (osl - 1) * TPOT on both sides."""
    for row in results:
        real, ours = (
            float(row[f"{prefix}ttft_ms"]) + (int(row["osl"]) - 1) * float(row[f"{prefix}tpot_ms"])
            for prefix in ("silicon_", "")
        )
        row["e2e_error"] = ours / real - 1
    for title, key in (
        ("GPU", lambda r: r["system"]),
        ("model", lambda r: short(r)),
        ("precision", lambda r: r["gemm_quant_mode"] or "bf16"),
        ("model, GPU", lambda r: f"{short(r)}, {r['system']}"),
    ):
        table(title, results, key)


def short(row: dict[str, Any]) -> str:
    return str(row["model_path"].split("/")[-1])


def table(title: str, results: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> None:
    """One of them."""
    print(
        f"| {title} | rows | TTFT median | p90 | TPOT median | p90 | mean | end to end median | p90 | mean |"
    )
    print("| --- " + "| ---: " * 9 + "|")
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
        groups["all"].append(result)
    for name in sorted(groups, key=lambda n: (n == "all", n)):
        cells = []
        for measure in ("ttft_error", "tpot_error", "e2e_error"):
            errors = [float(r[measure]) for r in groups[name]]
            sizes = sorted(abs(e) for e in errors)
            p90 = statistics.quantiles(sizes, n=10)[-1] if len(sizes) > 1 else sizes[0]
            cells.append(f"{statistics.median(sizes):.1%} | {p90:.1%}")
            if measure != "ttft_error":
                cells.append(f"{statistics.mean(errors):+.1%}")
        print(f"| {name} | {len(groups[name])} | {' | '.join(cells)} |")
    print()


if __name__ == "__main__":
    main()
