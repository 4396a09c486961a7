"""Fits: a table has its sample's quantiles and mean, and generated programs those of the trace."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from agentservesim.config import WorkloadConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload import BUNDLED, load_all, load_programs
from agentservesim.workload.fit import is_fit, learn, read_fit, to_yaml
from agentservesim.workload.fit.lines import carried_on, lines_of
from agentservesim.workload.formats._reading import check
from agentservesim.workload.native_writer import to_native
from agentservesim.workload.synthetic import Table, generate

numbers = st.lists(st.integers(0, 10**6) | st.floats(0, 10**6), min_size=1, max_size=60)


@settings(deadline=None, max_examples=150)
@given(numbers)
def test_a_table_keeps_the_quantiles_and_the_mean_of_its_sample(sample: list[float]) -> None:
    table = Table.of(sample)
    ordered = sorted(sample)
    size = max(1.0, ordered[-1])
    assert table.mean == pytest.approx(np.mean(sample), abs=1e-3 + 1e-9 * size)
    for share in (0.1, 0.5, 0.9, 0.99):
        exact = ordered[max(0, int(np.ceil(share * len(ordered) - 1e-9)) - 1)]
        assert table.quantile(share) == pytest.approx(exact, abs=1e-3 + 1e-9 * size)
    drawn = [table.quantile((k + 0.5) / 4000) for k in range(4000)]
    assert drawn == sorted(drawn) and drawn[0] >= ordered[0] - 1e-3 and drawn[-1] <= ordered[-1] + 1e-3


def test_a_table_of_a_small_sample_is_the_sample() -> None:
    table = Table.of([5, 1, 9, 3])
    assert [table.quantile(share) for share in (0.1, 0.2, 0.35, 0.55, 0.8, 1.0)] == [1, 1, 3, 5, 9, 9]
    assert Table.of([7]).quantile(0.3) == 7 and Table.of([7]).sd == 0


def test_a_table_of_a_heavy_tail_draws_its_mean() -> None:
    sample = np.random.default_rng(0).lognormal(3, 2, 5000)
    table, shares = Table.of(sample.tolist()), np.random.default_rng(1).random(40_000)
    drawn = [table.quantile(share) for share in shares]
    assert stats.ks_2samp(sample, drawn).statistic < 0.02
    assert np.mean(drawn) == pytest.approx(sample.mean(), rel=0.1)


# SHA-256 of 60 programs of the bundled workloads as they were before fits shared their generator.
BEFORE = {
    ("examples/swebench-like", 0): "70e6b1c8d766c39ace018f8de24833b89d5ca63828dd1b1389b5e6247339446f",
    ("examples/swebench-like", 7): "382cd4ef937b0659475b39c8a10e36d63f9a4d1457b55bcd64596b1030163952",
    ("examples/bfcl-like", 0): "8511e78e21a9d4bf4a9370f9342e790c3b44b7b8a25b6e7fefdb14cef84e5f40",
    ("examples/bfcl-like", 7): "ce0a91ef8b2f712f68d7cdae9cfebc3f91b233c0b59184f18da427f85ed92c1f",
}


@pytest.mark.parametrize(("name", "seed"), BEFORE)
def test_the_bundled_workloads_are_bit_for_bit_what_they_were(name: str, seed: int) -> None:
    digest = hashlib.sha256()
    for program in islice(generate(BUNDLED[name], seed), 60):
        digest.update(msgspec.json.encode(to_native(program)))
    assert digest.hexdigest() == BEFORE[name, seed]


# --- what is reproduced ----------------------------------------------------------------------------------


def marginals(programs: Iterable[Program]) -> dict[str, list[float]]:
    """Computed from the programs alone, not with the fit's own tally."""
    found: dict[str, list[float]] = defaultdict(list)
    for program in programs:
        found["turns"].append(len(program.turns))
        found["first prompt"].append(program.turns[0].prompt_tokens)
        found["prompts a program"].append(sum(turn.prompt_tokens for turn in program.turns))
        awaited = {parent for turn in program.turns for parent in turn.parents}
        for index, turn in enumerate(program.turns):
            found["prompt"].append(turn.prompt_tokens)
            found["reuse"].append(turn.reuse_tokens)
            found["output"].append(turn.output_tokens)
            found["kept"].append(turn.kept_output_tokens / max(1, turn.output_tokens))
            if turn.parents:
                found["new"].append(turn.prompt_tokens - turn.reuse_tokens)
            if index in awaited:
                found["gap"].append(turn.tool_gap_s())
                found["paused"].append(turn.pause_s > 0)
                if turn.tools:
                    found[f"gap of {turn.tools[0].name}"].append(turn.tool_gap_s())
                    found["at once"].append(len(turn.tools))
    return found


def compare(source: Path, drawn: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    real = list(load_all([str(source)], lenient=True).programs)
    learned = learn(real, "fit").description
    generated = list(islice(generate(learned, 1), drawn))
    for program in generated[:40]:
        check(program, "generated")
    return marginals(real), marginals(generated)


def distance(real: list[float], generated: list[float]) -> float:
    """Kolmogorov-Smirnov: the largest difference in the share of values below any."""
    return float(stats.ks_2samp(real, generated).statistic)


def off(real: list[float], generated: list[float]) -> float:
    """The relative error of the mean."""
    return float(np.mean(generated) / np.mean(real) - 1)


@pytest.mark.data
def test_swebench50_is_reproduced(data_dir: Path) -> None:
    real, drawn = compare(data_dir / "traces/native/swebench50.jsonl", 200)
    # 50 programs have 50 turn counts and first prompts: their steps alone are 0.02 high
    for name, limit in (("turns", 0.05), ("first prompt", 0.12), ("new", 0.05), ("output", 0.03)):
        assert distance(real[name], drawn[name]) < limit, name
    for name in ("gap", "kept", "gap of sed", "gap of python"):
        assert distance(real[name], drawn[name]) < 0.07, name
    for name in ("turns", "first prompt", "new", "output", "kept", "prompt", "prompts a program"):
        assert abs(off(real[name], drawn[name])) < 0.1, name
    assert sum(drawn["reuse"]) / sum(drawn["prompt"]) == pytest.approx(0.9803, abs=0.005)
    for name in ("new", "output", "gap"):
        for share in (0.1, 0.5, 0.9, 0.99):
            low, high = np.quantile(real[name], (max(0, share - 0.03), min(1, share + 0.03)))
            assert low <= np.quantile(drawn[name], share) <= high + 1e-9, (name, share)
    long = [n for n, prompts in zip(drawn["turns"], drawn["prompts a program"], strict=True) if prompts > 2e6]
    assert np.mean(long) > 1.5 * np.mean(drawn["turns"])  # long programs are the heavy ones


@pytest.mark.data
@pytest.mark.parametrize(
    ("source", "mean_prompts"), [("weka", 0.1), ("claude_code/session.jsonl", 0.05), ("codex", 0.05)]
)
def test_small_traces_are_reproduced(data_dir: Path, source: str, mean_prompts: float) -> None:
    real, drawn = compare(data_dir / "traces" / source, 300)
    assert abs(off(real["prompts a program"], drawn["prompts a program"])) < mean_prompts
    assert abs(off(real["turns"], drawn["turns"])) < 0.05
    for name in ("output", "kept"):
        assert distance(real[name], drawn[name]) < 0.15 and abs(off(real[name], drawn[name])) < 0.1, name
    for name in ("new", "gap"):
        assert distance(real[name], drawn[name]) < 0.16 and abs(off(real[name], drawn[name])) < 0.15, name
    assert abs(np.mean(real["paused"]) - np.mean(drawn["paused"])) < 0.05
    if "at once" in real:
        assert abs(off(real["at once"], drawn["at once"])) < 0.2


@pytest.mark.data
def test_shared_prefixes_and_sub_agents_are_kept(data_dir: Path) -> None:
    requests = list(load_all([str(data_dir / "traces/mooncake")]).programs)
    learned = learn(requests, "fit")
    drawn = list(islice(generate(learned.description, 0), 2000))
    first = requests[0].prefix[0]
    real_share = sum(p.prefix[:1] == (first,) for p in requests) / len(requests)
    renamed = max(learned.description.prefixes, key=lambda prefix: prefix.share).groups[0].id
    assert sum(bool(p.prefix) and p.prefix[0].id == renamed for p in drawn) / 2000 == pytest.approx(
        real_share, abs=0.05
    )
    assert any("the rest is learned as not shared" in note for note in learned.notes)
    agents = learn(load_all([str(data_dir / "traces/weka")]).programs, "fit").description
    forks = [p for p in islice(generate(agents, 0), 20) if len(lines_of(p)) > 1]
    assert forks and any(len(turn.parents) > 1 for p in forks for turn in p.turns)


# --- the file --------------------------------------------------------------------------------------------


def small() -> list[Program]:
    tools = (ToolCall("secret-tool", 1.5), ToolCall("ls", 0.5))
    return [
        Program(
            f"secret-{number}",
            (
                Turn("secret-a", 1000, 40, kept_output_tokens=20, tools=tools, pause_s=30.0),
                Turn("secret-b", 1200 + number, 50, 1010, 50, parents=(0,)),
            ),
            prefix=(PrefixGroup("secret-prefix", 300),),
        )
        for number in range(6)
    ]


def test_a_fit_is_a_workload_and_holds_no_names(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    learned = learn(small(), "mine")
    path.write_text(to_yaml(learned.description))
    assert is_fit(str(path)) and read_fit(str(path)) == learned.description
    text = path.read_text()
    assert "secret-tool" in text and not re.search("secret-[ab0-9p]", text)
    programs = list(load_programs(WorkloadConfig(source=str(path), programs=9, seed=4)).programs)
    assert programs == list(islice(generate(learned.description, 4), 9)) and len(programs) == 9
    assert [p.program_id for p in programs][:2] == ["mine-00000", "mine-00001"]
    assert programs[0].prefix == (PrefixGroup("mine/prefix-1", 300),)
    assert len(list(load_programs(WorkloadConfig(source=str(path))).programs)) == 6
    first = programs[0].turns[0]
    assert (first.prompt_tokens, first.kept_output_tokens) == (1000, 20)
    assert [len(first.tools), first.pause_s] == [2, 30.0]


@pytest.mark.parametrize(
    ("was", "becomes", "words"),
    [
        ("agentservesim_fit: 1", "agentservesim_fit: 2", "agentservesim_fit is 2: expected 1"),
        ("max_prompt_tokens: ", "max_prompt_tokens: x", "max_prompt_tokens"),
        ("kind: quantiles", "kind: quantile", r"kinds\[0\].turns"),
        ("values: \\[", "values: [-9e9, ", "length"),
        ("programs: 6", "programs: 0", "programs"),
        ("kinds:", "kindz:", "kinds"),
    ],
)
def test_a_wrong_fit_is_refused(tmp_path: Path, was: str, becomes: str, words: str) -> None:
    path = tmp_path / "fit.yaml"
    path.write_text(re.sub(was, becomes, to_yaml(learn(small(), "mine").description), count=1))
    with pytest.raises(InputError, match=f"fit.yaml.*{words}"):
        load_programs(WorkloadConfig(source=str(path)))


def test_no_programs_cannot_be_fitted() -> None:
    with pytest.raises(InputError, match="no programs to fit"):
        learn([], "mine")


def test_times_that_are_unknown_are_said() -> None:
    work = [Program("p", (Turn("a", 9, 1, tools=(ToolCall("x", 0.0),)), Turn("b", 9, 1, parents=(0,))))]
    assert "1 × gaps after tools without a time" in learn(work, "mine").notes[0]


# --- lines -----------------------------------------------------------------------------------------------


def turn(prompt: int, reuse: int, *parents: int) -> Turn:
    return Turn(f"t{prompt}", prompt, 5, reuse, 5, parents=parents)


def test_lines_tell_sub_agents_from_compactions() -> None:
    main = (turn(100, 0), turn(200, 105, 0), turn(40, 0, 1), turn(90, 45, 2))  # rewritten from token 0 on
    assert lines_of(Program("p", main)) == [[0, 1, 2, 3]]
    forked = (turn(100, 0), turn(30, 0, 0), turn(60, 35, 1), turn(200, 105, 0, 2), turn(210, 205, 3))
    assert lines_of(Program("p", forked)) == [[0, 3, 4], [1, 2]]
    assert carried_on(Program("p", forked)) == [2, 3, 4]
    again = (turn(100, 0), turn(30, 0, 0), turn(20, 0, 1), turn(200, 105, 0, 2))  # two side calls in a row
    assert lines_of(Program("p", again)) == [[0, 3], [1], [2]]
