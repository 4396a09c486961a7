"""Transforms: what they change, what they leave, what they refuse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agentservesim.config import ArrivalsConfig, RunConfig, WorkloadConfig, parse_config
from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload import load_programs
from agentservesim.workload.arrivals import open_loop
from agentservesim.workload.formats import read_programs
from agentservesim.workload.formats._reading import check
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.transforms import TRANSFORMS, parse_transform, transform
from agentservesim.workload.transforms.anonymize import anonymize

tokens = st.integers(0, 5000)
times = st.floats(0, 700, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def programs(draw: st.DrawFn, name: str = "p") -> Program:
    """Any graph of turns that the readers would accept; parents may come later in the list."""
    prefix = tuple(PrefixGroup(f"g{k}", draw(st.integers(0, 50))) for k in range(draw(st.integers(0, 2))))
    least = max(1, sum(group.tokens for group in prefix))
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 6))):
        parents = tuple(draw(st.sets(st.integers(0, index - 1), max_size=2))) if index else ()
        prompt, output = least + draw(tokens), draw(tokens)
        context = 0
        if parents:
            context = turns[parents[0]].prompt_tokens + turns[parents[0]].kept_output_tokens
        turns.append(
            Turn(
                f"turn-{index}",
                prompt,
                output,
                reuse_tokens=min(context, prompt) - draw(st.integers(0, min(context, prompt))),
                kept_output_tokens=draw(st.integers(0, output)),
                parents=parents,
                tools=tuple(
                    ToolCall(draw(st.sampled_from(["cat", "make", "ls"])), draw(st.just(0.0) | times))
                    for _ in range(draw(st.integers(0, 2)))
                ),
                gap_s=draw(st.none() | times),
                pause_s=draw(times),
                delay_s=draw(times),
            )
        )
    count = len(turns)
    if draw(st.booleans()):
        turns = [replace(t, parents=tuple(count - 1 - p for p in t.parents)) for t in reversed(turns)]
    return Program(name, tuple(turns), draw(st.none() | times), prefix)


@st.composite
def workloads(draw: st.DrawFn) -> list[Program]:
    return [draw(programs(f"p{number}")) for number in range(draw(st.integers(1, 5)))]


def apply(work: Iterable[Program], *specs: object, report: ReadingReport | None = None) -> list[Program]:
    checked = [parse_transform(spec) for spec in specs]
    return list(transform(iter(work), checked, report or ReadingReport()))


def assert_valid(work: Iterable[Program]) -> None:
    for program in work:
        check(program, "here")


CHANGES = st.sampled_from(
    [
        "scale_tokens:factor=0.37",
        "scale_tokens:factor=0",
        "scale_tokens:factor=2.5",
        "scale_gaps:factor=0.3",
        "cap_pauses:max_s=5",
        "draw_tool_times:seed=3",
        "sample:programs=1,seed=4",
        "take:programs=1",
    ]
)


@settings(deadline=None, max_examples=150)
@given(workloads(), st.lists(CHANGES, max_size=3))
def test_any_chain_of_transforms_keeps_the_structure_and_repeats_itself(
    work: list[Program], specs: list[str]
) -> None:
    done = apply(work, *specs)
    assert_valid(done)
    assert done == apply(work, *specs)
    by_name = {program.program_id: program for program in work}
    for program in done:
        before = by_name[program.program_id]
        assert [t.parents for t in program.turns] == [t.parents for t in before.turns]
        assert program.arrival_s == before.arrival_s


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_identity_parameters_change_nothing(work: list[Program]) -> None:
    timed = [
        replace(p, turns=tuple(replace(t, gap_s=t.gap_s if t.gap_s is not None else 1.0) for t in p.turns))
        for p in work
    ]
    everything = len(work)
    for spec in (
        "scale_tokens:factor=1",
        "scale_gaps:factor=1",
        "cap_pauses:max_s=700",
        f"take:programs={everything}",
        f"sample:programs={everything},seed=9",
    ):
        assert apply(work, spec) == work, spec
    assert apply(timed, "draw_tool_times") == timed


@settings(deadline=None, max_examples=60)
@given(workloads(), st.floats(0.01, 50))
def test_scaled_tokens_are_close_to_the_product_and_whole_reuse_stays_whole(
    work: list[Program], factor: float
) -> None:
    for before, after in zip(work, apply(work, {"scale_tokens": {"factor": factor}}), strict=True):
        slack = len(before.turns) + 2
        for old, new in zip(before.turns, after.turns, strict=True):
            assert abs(new.prompt_tokens - old.prompt_tokens * factor) <= slack
            assert abs(new.output_tokens - old.output_tokens * factor) <= 1
            if old.parents:
                base, scaled = before.turns[old.parents[0]], after.turns[new.parents[0]]
                if old.reuse_tokens == base.prompt_tokens + base.kept_output_tokens:
                    assert new.reuse_tokens == scaled.prompt_tokens + scaled.kept_output_tokens


def chain(name: str, arrival_s: float | None = None, **turn: object) -> Program:
    first = Turn("a", 100, 10, kept_output_tokens=10, **turn)  # type: ignore[arg-type]
    return Program(name, (first, Turn("b", 150, 20, 110, 20, parents=(0,))), arrival_s)


def test_scale_gaps_leaves_pauses_alone() -> None:
    work = [chain("p", tools=(ToolCall("ls", 2.0),), gap_s=3.0, pause_s=4.0, delay_s=5.0)]
    (program,) = apply(work, "scale_gaps:factor=2")
    turn = program.turns[0]
    assert (turn.tools[0].duration_s, turn.gap_s, turn.pause_s, turn.delay_s) == (4.0, 6.0, 4.0, 10.0)


def test_cap_pauses_counts_what_it_cut() -> None:
    report = ReadingReport()
    (program,) = apply([chain("p", pause_s=90.0)], "cap_pauses:max_s=60", report=report)
    assert program.turns[0].pause_s == 60 and list(report.clamped.values()) == [1]


def test_a_sample_is_uniform_seeded_and_without_replacement() -> None:
    work = [chain(f"p{number}") for number in range(10)]
    counts = dict.fromkeys((p.program_id for p in work), 0)
    for seed in range(400):
        names = [p.program_id for p in apply(work, f"sample:programs=3,seed={seed}")]
        assert len(set(names)) == 3 and names == sorted(names)
        for name in names:
            counts[name] += 1
    assert all(80 < count < 160 for count in counts.values())  # 120 expected, sd 9


@pytest.mark.parametrize("name", ["take", "sample"])
def test_more_programs_than_there_are_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match=f"transform {name}: programs is 3: expected at most 2"):
        apply([chain("a"), chain("b")], f"{name}:programs=3")


def test_take_stops_reading() -> None:
    stream = iter([chain("a"), chain("b"), chain("c")])
    assert len(list(transform(stream, [parse_transform("take:programs=1")], ReadingReport()))) == 1
    assert next(stream).program_id == "b"


def test_tool_times_are_drawn_only_where_there_are_none() -> None:
    none, some = (ToolCall("grep", 0.0), ToolCall("make", 0.0)), (ToolCall("grep", 0.0), ToolCall("ls", 1.0))
    work = [chain("p", tools=none), chain("q", tools=some), chain("r", tools=none, gap_s=0.0)]
    report = ReadingReport()
    done = apply(work, "draw_tool_times", report=report)
    assert all(tool.duration_s > 0 for tool in done[0].turns[0].tools) and done[1:] == work[1:]
    assert list(report.estimated.values()) == [1, 1]  # grep by its row, make as other commands
    assert done[0] == apply(work[:1], "draw_tool_times")[0]  # whatever else is in the workload
    assert done[0] != apply(work[:1], "draw_tool_times:seed=1")[0]


def test_a_table_of_tool_times() -> None:
    work = [
        Program(f"p{number}", (Turn("a", 9, 1, tools=(ToolCall("make", 0.0), ToolCall("x", 0.0))),))
        for number in range(2000)
    ]
    done = apply(work, "draw_tool_times:seed=0,table={make: {p50: 2, p99: 20}}")
    drawn = sorted(program.turns[0].tools[0].duration_s for program in done)
    assert drawn[1000] == pytest.approx(2, rel=0.1) and drawn[1980] == pytest.approx(20, rel=0.3)
    assert all(program.turns[0].tools[1].duration_s == 0 for program in done)  # no row, no row `other`


def test_merge_takes_one_of_each_in_turn_with_their_own_times(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    write_native([chain("a", 7.0), chain("x", 8.0)], other)
    report = ReadingReport()
    done = apply([chain("a", 1.0)], {"merge": {"sources": [str(other)]}}, report=report)
    assert [p.arrival_s for p in done] == [1.0, 7.0, 8.0]
    assert [p.program_id for p in done] == ["a", f"{other}/a", "x"]
    assert report.programs == 2 and sum(report.inferred.values()) == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("scale_gap:factor=2", "unknown.*did you mean 'scale_gaps'.*expected one of take"),
        ("scale_gaps:factr=2", "unknown parameter 'factr'.*did you mean 'factor'"),
        ("scale_gaps:factor=-1", "factor is -1: expected float >= 0"),
        ("scale_gaps:factor=x", "factor is 'x': expected float"),
        ("scale_gaps", "factor is missing"),
        ("take:programs=0", "programs is 0: expected int >= 1"),
        ("take:programs", "expected key=value"),
        ("merge:sources=[]", "sources is"),
        ("draw_tool_times:table={make: {p50: 2}}", "table is .*missing required field p99"),
        ({"take": 3}, "expected name:key=value"),
        (7, "expected name:key=value"),
    ],
)
def test_what_is_wrong_is_said(spec: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_transform(spec)


def test_the_config_checks_applies_and_records_transforms() -> None:
    source = {"source": "examples/bfcl-like", "programs": 6, "seed": 2}
    plain = list(load_programs(WorkloadConfig(**source)).programs)  # type: ignore[arg-type]
    data = {
        "workload": {**source, "transforms": ["sample:programs=3,seed=1", {"scale_gaps": {"factor": 2}}]},
        "cluster": {"gpu": "h100_sxm", "model": "llama-3.1-8b"},
    }
    config = parse_config(data)
    done = list(load_programs(config.workload).programs)
    assert done == apply(plain, "sample:programs=3,seed=1", "scale_gaps:factor=2")
    assert "- sample:\n      programs: 3\n      seed: 1" in config.to_yaml()
    assert RunConfig.model_validate(config.model_dump(mode="json")).to_yaml() == config.to_yaml()
    data["workload"]["transforms"] = ["smaple:programs=3"]  # type: ignore[index]
    with pytest.raises(InputError, match=r"workload.transforms: .*did you mean 'sample'"):
        parse_config(data)


def test_every_transform_is_documented() -> None:
    for name, function in TRANSFORMS.items():
        assert function.__doc__, name


# --- anonymize, bursts -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_anonymize_keeps_every_number(work: list[Program]) -> None:
    done = list(anonymize(work))
    assert_valid(done)
    tools: dict[str, str] = {}
    groups: dict[str, str] = {}
    for number, (before, after) in enumerate(zip(work, done, strict=True), start=1):
        assert after.program_id == f"p{number:04d}" and after.arrival_s == before.arrival_s
        for old, new in zip(before.prefix, after.prefix, strict=True):
            assert new.tokens == old.tokens and groups.setdefault(old.id, new.id) == new.id
        for index, (was, now) in enumerate(zip(before.turns, after.turns, strict=True)):
            for tool, renamed in zip(was.tools, now.tools, strict=True):
                assert tools.setdefault(tool.name, renamed.name) == renamed.name
                assert renamed.duration_s == tool.duration_s
            assert replace(was, turn_id=f"t{index}", tools=now.tools) == now
    assert len(set(tools.values())) == len(tools) and all(name.startswith("tool-") for name in tools.values())


def test_tools_are_named_by_frequency() -> None:
    calls = [ToolCall("rare", 1.0), ToolCall("often", 1.0), ToolCall("often", 2.0)]
    (program,) = anonymize([chain("secret", tools=tuple(calls))])
    assert [tool.name for tool in program.turns[0].tools] == ["tool-b", "tool-a", "tool-a"]


def test_native_round_trip_is_the_identity(tmp_path: Path, data_dir: Path) -> None:
    original = data_dir / "traces/native/swebench50.jsonl"
    write_native(read_programs(original, ReadingReport()), tmp_path / "once.jsonl")
    write_native(read_programs(tmp_path / "once.jsonl", ReadingReport()), tmp_path / "twice.jsonl.gz")
    once, twice = (
        list(read_programs(path, ReadingReport())) for path in (original, tmp_path / "twice.jsonl.gz")
    )
    assert once == twice


def test_bursts_start_programs_together() -> None:
    arrivals = ArrivalsConfig(process="bursts", rate_per_s=0.5, size=3, seed=1)
    work = [chain(str(number)) for number in range(7)]
    at = [time for time, _ in open_loop(work, arrivals)]
    assert at[0] == at[1] == at[2] < at[3] == at[5] < at[6]
    single = ArrivalsConfig(process="poisson", rate_per_s=0.5, seed=1)
    assert sorted(set(at)) == [time for time, _ in open_loop(work[:3], single)]
    with pytest.raises(ValueError, match="bursts needs rate_per_s"):
        ArrivalsConfig(process="bursts", rate_per_s=1)
