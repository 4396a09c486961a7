"""The bundled workloads hold the published statistics (docs/workloads.md)."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from agentservesim.config import WorkloadConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload import BUNDLED, load_programs
from agentservesim.workload.formats import read_programs
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.synthetic import LogNormal, draw_program, generate

SWEBENCH, BFCL = BUNDLED["examples/swebench-like"], BUNDLED["examples/bfcl-like"]
SEEDS = range(8)


@cache
def take(name: str, seed: int, number: int) -> tuple[Program, ...]:
    return tuple(islice(generate(BUNDLED[f"examples/{name}"], seed), number))


def turns_mean(programs: tuple[Program, ...]) -> float:
    return float(np.mean([len(p.turns) for p in programs]))


def context_mean(programs: tuple[Program, ...]) -> float:
    return float(np.mean([sum(t.prompt_tokens for t in p.turns) for p in programs]))


def output_mean(programs: tuple[Program, ...]) -> float:
    return float(np.mean([t.output_tokens for p in programs for t in p.turns]))


def gaps(programs: tuple[Program, ...], *tools: str) -> np.ndarray:
    calls = [tool for p in programs for t in p.turns for tool in t.tools]
    return np.array([call.duration_s for call in calls if not tools or call.name in tools])


@pytest.mark.parametrize("seed", SEEDS)
def test_swebench_like_as_a_run_takes_it(seed: int) -> None:
    programs = take("swebench-like", seed, 50)
    assert turns_mean(programs) == pytest.approx(57, rel=0.05)
    assert context_mean(programs) == pytest.approx(774_000, rel=0.15)
    assert output_mean(programs) == pytest.approx(94, rel=0.10)
    assert gaps(programs).mean() == pytest.approx(1.2, rel=0.15)
    assert gaps(programs).std() == pytest.approx(4.1, rel=0.25)


@pytest.mark.parametrize("seed", [0, 1])
def test_swebench_like_at_large(seed: int) -> None:
    programs = take("swebench-like", seed, 500)
    assert turns_mean(programs) == pytest.approx(57, rel=0.02)
    assert context_mean(programs) == pytest.approx(774_000, rel=0.05)
    assert output_mean(programs) == pytest.approx(94, rel=0.03)
    assert gaps(programs).mean() == pytest.approx(1.2, rel=0.05)
    assert gaps(programs).std() == pytest.approx(4.1, rel=0.08)
    assert np.quantile(gaps(programs, "sed"), 0.99) < 0.3
    for tool in ("grep", "cat"):
        assert np.median(gaps(programs, tool)) == pytest.approx(0.17, rel=0.08)
        assert np.quantile(gaps(programs, tool), 0.99) == pytest.approx(3.0, rel=0.2)
    assert np.median(gaps(programs, "python")) == pytest.approx(0.6, rel=0.08)
    assert np.quantile(gaps(programs, "git"), 0.99) == pytest.approx(9.0, rel=0.35)  # 14 calls decide it
    assert gaps(programs, "pip").mean() == pytest.approx(20.0, rel=0.05)


def test_swebench_like_default_workload() -> None:
    programs = tuple(load_programs(WorkloadConfig(source="examples/swebench-like")).programs)
    assert len(programs) == 50
    assert turns_mean(programs) == pytest.approx(57, rel=0.02)
    assert context_mean(programs) == pytest.approx(774_000, rel=0.05)


def test_the_mix_holds_the_published_gap_exactly() -> None:
    mean, sd = SWEBENCH.gap_mean_and_sd_s()
    assert mean == pytest.approx(1.2, rel=0.01) and sd == pytest.approx(4.1, rel=0.02)
    by_name = {tool.name: tool.duration_s for tool in SWEBENCH.tools}
    assert by_name["sed"].quantile(0.99) < 0.3
    assert by_name["grep"].quantile(0.5) == pytest.approx(0.17) == by_name["cat"].quantile(0.5)
    assert by_name["grep"].quantile(0.99) == pytest.approx(3.0) == by_name["cat"].quantile(0.99)
    assert by_name["python"].quantile(0.5) == pytest.approx(0.6)
    assert by_name["git"].quantile(0.99) == pytest.approx(9.0)
    assert by_name["pip"].mean == pytest.approx(20.0)
    assert sum(tool.share for tool in SWEBENCH.tools) == pytest.approx(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_bfcl_like(seed: int) -> None:
    programs = take("bfcl-like", seed, 100)
    assert turns_mean(programs) == pytest.approx(9, rel=0.06)
    assert max(t.prompt_tokens for p in programs for t in p.turns) <= BFCL.max_prompt_tokens
    assert np.mean([t.prompt_tokens for p in programs for t in p.turns]) < 5000


@pytest.mark.parametrize("name", BUNDLED)
def test_programs_are_valid_and_grow(name: str, tmp_path: Path) -> None:
    programs = list(load_programs(WorkloadConfig(source=name, programs=200, seed=4)).programs)
    path = tmp_path / "w.jsonl"
    write_native(programs, path)
    assert list(read_programs(path, ReadingReport())) == programs  # so every rule of the format holds
    for program in programs:
        assert not program.turns[-1].tools and program.prefix == BUNDLED[name].prefix
        for before, after in zip(program.turns, program.turns[1:], strict=False):
            assert after.reuse_tokens == before.prompt_tokens + before.output_tokens < after.prompt_tokens


@pytest.mark.parametrize("name", BUNDLED)
def test_program_k_depends_on_seed_and_k_alone(name: str) -> None:
    first = list(load_programs(WorkloadConfig(source=name, programs=3, seed=9)).programs)
    many = load_programs(WorkloadConfig(source=name, programs=30, seed=9))
    assert (
        list(islice(many.programs, 3)) == first and many.report.programs == 3
    )  # drawn as they are asked for
    assert draw_program(BUNDLED[name], 9, 2) == first[2]
    assert first != list(load_programs(WorkloadConfig(source=name, programs=3, seed=10)).programs)


def test_the_bundled_workload_does_not_change_unnoticed() -> None:
    program = draw_program(SWEBENCH, 0, 0)
    assert program.program_id == "swebench-like-00000" and len(program.turns) == 76
    assert program.turns[0].prompt_tokens == 5266 and program.turns[-1].prompt_tokens == 28840
    assert (program.turns[0].tools[0].name, program.turns[0].tools[0].duration_s) == ("pip", 17.323)


def test_turn_counts_follow_their_distribution() -> None:
    counts = np.sort([len(p.turns) for p in take("swebench-like", 0, 500)])
    expected = [SWEBENCH.kinds[0].turns.quantile((rank + 0.5) / 500) for rank in range(500)]
    assert np.abs(counts - expected).mean() < 0.5


def test_tools_do_not_follow_the_length_of_a_program() -> None:
    programs = take("swebench-like", 0, 500)
    by_length = sorted(programs, key=lambda p: len(p.turns))
    for half in (tuple(by_length[:250]), tuple(by_length[250:])):
        assert len(gaps(half, "pip")) / len(gaps(half)) == pytest.approx(0.03, rel=0.15)


def test_log_normal_takes_what_is_published() -> None:
    assert LogNormal.from_p99(0.17, 3.0).quantile(0.99) == pytest.approx(3.0)
    assert LogNormal.from_mean(0.6, 2.0).mean == pytest.approx(2.0)
    made = LogNormal.from_cv(57, 0.43, low=5, high=200)
    assert made.mean == pytest.approx(57) and made.sd == pytest.approx(57 * 0.43)
    assert made.quantile(0.0) == 5 and made.quantile(1.0) == 200


def test_a_bundled_workload_takes_no_format() -> None:
    with pytest.raises(InputError, match="workload.format is 'native': expected none"):
        load_programs(WorkloadConfig(source="examples/bfcl-like", format="native"))
