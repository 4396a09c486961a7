"""Builders shared by the system tests: programs as native lines, configs, runs, and tables as rows.

Everything goes through the public interface: a native file on disk, a config, `simulate`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from agentservesim import Result, parse_config, simulate

FILES = ("config.yaml", "summary.json", "programs.parquet", "calls.parquet", "decisions.parquet")

RETENTION = (
    "lru",
    "immediate-release",
    "ttl:tau_s=1",
    "ttl:tau_s=1,until=admission",
    "pressure-ttl",
    "tool-ttl",
    "min-waste",
    "evolved-gap-ema",
)
SCHEDULING = ("fcfs", "program-fcfs", "plas", "continuum", "resident-first", "evolved-sqrt-plas")
ADMISSION = ("none", "program-cap:f=0.5")
ROUTING = ("round-robin", "least-loaded", "session-affinity")


def turn(prompt_tokens: int, output_tokens: int, **more: Any) -> dict[str, Any]:
    """One turn of a native line."""
    return {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, **more}


def program(program_id: str, turns: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """One native line; arrives at 0 unless `arrival_s` says otherwise."""
    return {"program_id": program_id, "arrival_s": 0.0, **more, "turns": list(turns)}


def chain(
    program_id: str, turns: int, *, first: int = 64, new: int = 48, output: int = 8, **more: Any
) -> dict[str, Any]:
    """A program whose prompts grow by `new` tokens and the output of the turn before."""
    of_turn = {key: more.pop(key) for key in ("gap_s", "tools", "kept_output_tokens") if key in more}
    return program(
        program_id,
        (turn(first + index * (new + output), output, **of_turn) for index in range(turns)),
        **more,
    )


def write_native(path: Path, programs: Iterable[dict[str, Any]]) -> Path:
    """Write native JSON Lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in programs), encoding="utf-8")
    return path


def config_dict(source: Path | str, **sections: dict[str, Any] | Any) -> dict[str, Any]:
    """A config with the linear backend on a small pool; `sections` are merged into it key by key.

    A step takes 10 ms, plus 0.1 ms a prefill token and 1 ms a decoding sequence.
    """
    data: dict[str, Any] = {
        "workload": {"source": str(source)},
        "cluster": {"gpu": "b200_sxm", "model": "llama-3.1-8b", "kv_cache_tokens": 65536},
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        "step_time": {
            "backend": "linear",
            "base_s": 0.01,
            "per_prefill_token_s": 1e-4,
            "per_decode_s": 1e-3,
        },
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return data


INFINITELY_FAST = {"base_s": 0.0, "per_prefill_token_s": 0.0, "per_decode_s": 0.0, "per_context_token_s": 0.0}


def run(
    folder: Path,
    programs: Iterable[dict[str, Any]],
    *,
    on_progress: Callable[[Any], None] | None = None,
    **sections: Any,
) -> Result:
    """Simulate programs; the workload file goes into `folder`, and `on_progress` sees every instant."""
    source = write_native(folder / "workload.jsonl", programs)
    return simulate(parse_config(config_dict(source, **sections)), on_progress=on_progress)


def rows(result: Result, table: str = "calls") -> list[dict[str, Any]]:
    """A result table as dictionaries."""
    return result.tables[table].to_pylist()


def calls_by_name(result: Result) -> dict[str, dict[str, Any]]:
    """calls.parquet by 'program/turn'."""
    return {f"{row['program_id']}/{row['turn_id']}": row for row in rows(result)}


def cli(*arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
    """The command line in a process of its own: returncode, stdout, stderr."""
    return subprocess.run(
        [sys.executable, "-m", "agentservesim", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write_config(path: Path, data: dict[str, Any]) -> Path:
    """A config file; JSON is YAML."""
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return path


# --- random workloads ------------------------------------------------------------------------------------

TOOLS = ("ls", "grep", "python", "pip")
GAPS_S = (0.0, 0.013, 0.05, 0.2, 0.9)
PREFIXES = ((), ({"id": "sys", "tokens": 40},), ({"id": "sys", "tokens": 40}, {"id": "tools", "tokens": 24}))


@st.composite
def workloads(
    draw: Any, max_programs: int = 6, max_turns: int = 5, max_prompt: int = 400
) -> list[dict[str, Any]]:
    """Small programs: chains, forks and joins, with or without tools, gaps, pauses and shared prefixes."""
    programs = []
    for number in range(draw(st.integers(1, max_programs))):
        prefix = draw(st.sampled_from(PREFIXES))
        shared = sum(group["tokens"] for group in prefix)
        turns: list[dict[str, Any]] = []
        for index in range(draw(st.integers(1, max_turns))):
            growing = draw(st.booleans()) and index > 0
            floor = turns[-1]["prompt_tokens"] + turns[-1]["output_tokens"] if growing else max(shared, 1)
            made = turn(
                draw(st.integers(min(floor, max_prompt), max_prompt)),
                draw(st.integers(0, 40)),
                parents=draw(_parents(index)),
                tools=[
                    {"name": name, "duration_s": draw(st.sampled_from(GAPS_S))}
                    for name in draw(st.lists(st.sampled_from(TOOLS), max_size=2))
                ],
                gap_s=draw(st.sampled_from((None, *GAPS_S))),
                pause_s=draw(st.sampled_from((None, 0.0, 0.3))),
            )
            if draw(st.booleans()):
                made["kept_output_tokens"] = draw(st.integers(0, made["output_tokens"]))
            turns.append(made)
        arrival_s = draw(st.sampled_from((0.0, 0.0, 0.01, 0.1, 0.4, 1.0)))
        programs.append(program(f"p{number}", turns, arrival_s=arrival_s, prefix=list(prefix)))
    return programs


@st.composite
def _parents(draw: Any, index: int) -> list[int]:
    """Mostly the turn before; sometimes none, a fork or a join."""
    if index == 0:
        return []
    if draw(st.integers(0, 3)):
        return [index - 1]
    return sorted(draw(st.sets(st.integers(0, index - 1), max_size=3)))


@st.composite
def setups(draw: Any) -> dict[str, Any]:
    """Sections of a config: every policy axis, small pools, one to three instances."""
    return {
        "cluster": {
            "kv_cache_tokens": draw(st.sampled_from((528, 640, 1024, 4096))),
            "instances": draw(st.integers(1, 3)),
        },
        "engine": {
            "max_num_seqs": draw(st.sampled_from((1, 2, 8))),
            "max_num_batched_tokens": draw(st.sampled_from((32, 128, 512))),
            "long_prefill_token_threshold": draw(st.sampled_from((0, 0, 24))),
            "watermark": draw(st.sampled_from((0.0, 0.0, 0.05))),
            "scheduler_reserve_full_isl": draw(st.booleans()),
            "enable_prefix_caching": draw(st.integers(0, 5)) > 0,
            "max_model_len": draw(st.sampled_from((None, None, 380))),
            "step_mode": draw(st.sampled_from(("leap", "step"))),
        },
        "policies": {
            "retention": draw(st.sampled_from(RETENTION)),
            "scheduling": draw(st.sampled_from(SCHEDULING)),
            "admission": draw(st.sampled_from(ADMISSION)),
            "routing": draw(st.sampled_from(ROUTING)),
        },
        "output_reuse": draw(st.sampled_from(("deployment", "replay"))),
    }


def answers_by_leaps_and_steps(
    folder: Path, programs: list[Any], step_time: dict[str, Any]
) -> list[list[Any]]:
    """When each call of an RTX 4090 had its first and last token, in leaps and step by step."""
    answers = []
    for mode in ("leap", "step"):
        result = run(
            folder,
            programs,
            cluster={"gpu": "rtx_4090"},
            engine={"step_mode": mode},
            step_time={**step_time, "base_s": 0.0, "per_prefill_token_s": 0.0, "per_decode_s": 0.0},
        )
        answers.append([(r["program_id"], r["first_token_s"], r["completed_s"]) for r in rows(result)])
    return answers
