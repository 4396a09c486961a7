"""Mutated samples: a clear error or counted skips; never a traceback, nor a program that cannot run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentservesim.errors import InputError
from agentservesim.workload.formats import read_programs
from agentservesim.workload.formats._reading import check
from agentservesim.workload.report import ReadingReport

SAMPLES = {  # the format, and how much of the file is mutated
    "tracelab/sanitized__round_trace.jsonl": ("tracelab", 4),
    "tracelab/replay__examples__multi_session_large.csv": ("tracelab", 12),
    "mini_swe_agent/v1_0.traj.json": ("mini-swe-agent", 0),
    "mini_swe_agent/swebench_sample50.jsonl": ("mini-swe-agent", 2),
    "swe_agent/function_calling_simple.traj.json": ("swe-agent", 0),
    "otel_genai/prefix_sharing_example.json": ("otel-genai", 0),
    "otel_genai/fan_in_dependencies.json": ("otel-genai", 0),
    "mooncake/conversation_2000.jsonl": ("mooncake", 6),
    "azure/code_2000.csv": ("azure", 8),
    "agentic_swarm_bench/opus46_calls_stripped.jsonl": ("agentic-swarm-bench", 12),
}
PIECES = (b"null", b"-1", b"1e999", b"NaN", b'"x"', b"[]", b"{}", b"9" * 25, b"0", b"\xff", b"\xed\xa0\x80",
          b'""', b"true", b"\n", b",", b'"', b"1.5", b"-0.0", b"[[[[", b"}")  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A byte changed, a stretch cut, doubled or replaced, or a value swapped for another kind."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        upto = min(len(data), at + draw.choice((1, 1, 4, 30, 400)))
        how = draw.randrange(4)
        if how == 0:
            data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        elif how == 1:
            data = data[:at] + data[upto:]
        elif how == 2:
            data = data[:upto] + data[at:]
        else:
            colon = data.find(b":", at)
            start = colon + 1 if colon >= 0 else at
            end = min((i for i in (data.find(b, start) for b in (b",", b"}", b"\n")) if i >= 0), default=upto)
            data = data[:start] + draw.choice(PIECES) + data[end:]
    return data


def try_many(sample: str, count: int, data_dir: Path, folder: Path) -> None:
    name, lines = SAMPLES[sample]
    data = (data_dir / "traces" / sample).read_bytes()
    if lines:
        data = b"".join(data.splitlines(keepends=True)[:lines])
    path = folder / "sample"
    for seed in range(count):
        draw = random.Random(f"{sample} {seed}")
        path.write_bytes(mutated(data, draw))
        lenient = draw.random() < 0.5
        report = ReadingReport()
        try:
            programs = list(read_programs(path, report, name, lenient=lenient))
        except InputError as error:
            if str(path) not in str(error):
                raise
            continue
        except Exception as error:
            error.add_note(f"{sample}, seed {seed}, lenient {lenient}")
            raise
        for program in programs:
            check(program, "fuzz")
        assert programs or report.dropped


@pytest.mark.data
@pytest.mark.parametrize("sample", SAMPLES)
def test_mutated_samples(sample: str, data_dir: Path, tmp_path: Path) -> None:
    try_many(sample, 150, data_dir, tmp_path)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_many_mutated_samples(sample: str, data_dir: Path, tmp_path: Path) -> None:
    try_many(sample, 2_000, data_dir, tmp_path)
