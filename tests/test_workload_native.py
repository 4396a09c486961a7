"""The native format: defaults, round trip, and what is said about bad lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentservesim.config import WorkloadConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload import load_programs
from agentservesim.workload.formats import read_programs
from agentservesim.workload.native_writer import to_native, write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.statistics import inspect

EXAMPLE: dict[str, Any] = {
    "program_id": "p1",
    "arrival_s": None,
    "prefix": [{"id": "sys-a", "tokens": 1200}],
    "turns": [
        {
            "turn_id": "a",
            "parents": [],
            "prompt_tokens": 1920,
            "reuse_tokens": 0,
            "output_tokens": 405,
            "kept_output_tokens": 56,
            "tools": [{"name": "ls", "duration_s": 0.04}],
            "gap_s": None,
            "pause_s": None,
        },
        {
            "turn_id": "b",
            "parents": ["a"],
            "prompt_tokens": 2100,
            "output_tokens": 10,
            "gap_s": 0,
            "pause_s": 2,
        },
        {"turn_id": "c", "parents": ["a"], "prompt_tokens": 1950, "output_tokens": 20},
        {
            "turn_id": "d",
            "parents": ["b", "c"],
            "prompt_tokens": 2200,
            "reuse_tokens": 2000,
            "output_tokens": 0,
        },
    ],
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[Program]:
    return list(read_programs(path, ReadingReport()))


def changed(**changes: Any) -> dict[str, Any]:
    """The example with its second turn changed; None as a value deletes the key."""
    line = json.loads(json.dumps(EXAMPLE))
    for key, value in changes.items():
        line["turns"][1][key] = value
    return line


def test_example_reads_with_its_defaults(tmp_path: Path) -> None:
    report = ReadingReport()
    (program,) = read_programs(write(tmp_path / "w.jsonl", EXAMPLE), report)
    a, b, c, d = program.turns
    assert program.prefix == (PrefixGroup("sys-a", 1200),) and program.arrival_s is None
    assert (a.kept_output_tokens, a.gap_s, a.wait_s()) == (56, None, 0.04)
    assert b.reuse_tokens == 1976 and b.kept_output_tokens == 10
    assert (b.gap_s, b.tool_gap_s(), b.wait_s()) == (0.0, 0.0, 2.0)  # a recorded 0 is not a missing gap
    assert c.reuse_tokens == 1950  # no more than its own prompt
    assert d.parents == (1, 2) and d.output_tokens == 0
    assert (report.programs, report.turns, sum(report.inferred.values())) == (1, 4, 2)


def test_missing_parents_mean_the_turn_before_and_ids_count(tmp_path: Path) -> None:
    turn = {"prompt_tokens": 100, "output_tokens": 5}
    (program,) = read(
        write(tmp_path / "w", {"program_id": "p", "turns": [turn, {**turn, "prompt_tokens": 300}, turn]})
    )
    assert [t.turn_id for t in program.turns] == ["t0", "t1", "t2"]
    assert [t.parents for t in program.turns] == [(), (0,), (1,)]
    assert [t.reuse_tokens for t in program.turns] == [0, 105, 100]


def test_parents_may_come_later_and_be_indices(tmp_path: Path) -> None:
    turn = {"prompt_tokens": 100, "output_tokens": 5}
    turns = [
        {**turn, "parents": ["last"]},
        {**turn, "parents": [2]},
        {**turn, "turn_id": "last", "parents": []},
    ]
    (program,) = read(write(tmp_path / "w", {"program_id": "p", "turns": turns}))
    assert [t.parents for t in program.turns] == [(2,), (2,), ()]
    assert program.children() == [[], [], [0, 1]]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_gzip_bom_crlf_and_blank_lines(tmp_path: Path, ending: str) -> None:
    text = "\ufeff" + ending + json.dumps(EXAMPLE) + ending * 2
    (tmp_path / "w").write_bytes(gzip.compress(text.encode()))
    assert [p.program_id for p in read(tmp_path / "w")] == ["p1"]


BAD_TURNS = [
    ({"prompt_tokens": -5}, "turns[1].prompt_tokens is -5: expected int >= 1"),
    ({"prompt_tokens": 0}, "turns[1].prompt_tokens is 0: expected int >= 1"),
    ({"prompt_tokens": True}, "turns[1].prompt_tokens is True: expected int, got bool"),
    ({"prompt_tokens": 2100.0}, "turns[1].prompt_tokens is 2100.0: expected int, got float"),
    ({"prompt_tokens": None}, "turns[1].prompt_tokens is None: expected int, got null"),
    ({"prompt_tokens": 2**41}, "turns[1].prompt_tokens is 2199023255552: expected int <="),
    ({"prompt_tokens": 10**60}, "turns[1].prompt_tokens is 1e+60: expected int <= 1099511627776"),
    ({"output_tokens": "7"}, "turns[1].output_tokens is '7': expected int, got str"),
    ({"output_tokens": "x" * 500}, "turns[1].output_tokens is '" + "x" * 58 + "…: expected int"),
    ({"gap_s": -1}, "turns[1].gap_s is -1: expected float >= 0"),
    ({"gap_s": float("nan")}, "turns[1].gap_s is nan: expected a finite number"),
    ({"pause_s": float("inf")}, "turns[1].pause_s is inf: expected a finite number"),
    (
        {"tools": [{"name": "ls", "duration_s": -0.5}]},
        "turns[1].tools[0].duration_s is -0.5: expected float >= 0",
    ),
    ({"tools": [{"name": "ls"}]}, "missing key 'turns[1].tools[0].duration_s'"),
    ({"tools": [{"nam": "ls"}]}, "unknown key 'turns[1].tools[0].nam' (did you mean 'name'?)"),
    ({"promt_tokens": 5}, "unknown key 'turns[1].promt_tokens' (did you mean 'prompt_tokens'?)"),
    ({"turn_id": "a"}, "turns[1].turn_id is 'a': expected an id that differs from turns[0].turn_id"),
    ({"turn_id": ""}, "turns[1].turn_id is '': expected str of length >= 1"),
    (
        {"parents": ["aa"]},
        "turns[1].parents[0] is 'aa': expected a turn_id of this program (did you mean 'a'?)",
    ),
    (
        {"parents": [4]},
        "turns[1].parents[0] is 4: expected a turn_id of this program, or an index from 0 to 3",
    ),
    ({"parents": [-1]}, "turns[1].parents[0] is -1: expected a turn_id"),
    ({"parents": [True]}, "turns[1].parents[0] is True: expected int | str"),
    ({"parents": ["a", 0]}, "turns[1].parents[1] is 0: expected each parent once"),
    ({"parents": ["d"]}, "makes a cycle"),
    ({"parents": ["b"]}, "makes a cycle"),
    ({"reuse_tokens": 2101}, "turns[1].reuse_tokens is 2101: expected at most its prompt_tokens, 2100"),
    (
        {"reuse_tokens": 1977},
        "turns[1].reuse_tokens is 1977: expected at most its parent's prompt and kept output, 1976",
    ),
    (
        {"parents": [], "reuse_tokens": 1},
        "turns[1].reuse_tokens is 1: expected at most 0, as it has no parent",
    ),
    ({"kept_output_tokens": 11}, "turns[1].kept_output_tokens is 11: expected at most its output_tokens, 10"),
    (
        {"prompt_tokens": 1100, "output_tokens": 2000},
        "prefix is 1200 tokens in all: expected at most turns[1].prompt_tokens, 1100",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_TURNS)
def test_a_bad_turn_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "w.jsonl", {**EXAMPLE, "program_id": "fine"}, "", changed(**change))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 250


BAD_LINES = [
    ('{"program_id": "q", "turns": [', "malformed JSON"),
    ("not json", "malformed JSON"),
    ("[1]", "the line is [1]: expected object, got array"),
    ('{"program_id": "q", "turns": []}', "turns is []: expected array of length >= 1"),
    ('{"program_id": "q"}', "missing key 'turns'"),
    ('{"turns": [{"prompt_tokens": 1, "output_tokens": 1}]}', "missing key 'program_id'"),
    ('{"program_id": "q", "turns": [{"prompt_tokens": 1, "output_tokens": 1}]} x', "malformed JSON"),
    ('{"program_id": "q", "turn": []}', "unknown key 'turn' (did you mean 'turns'?)"),
    (
        '{"program_id": 7, "turns": [{"prompt_tokens": 1, "output_tokens": 1}]}',
        "program_id is 7: expected str",
    ),
    (json.dumps({**EXAMPLE, "program_id": "fine"}), "program id 'fine' is already on line 1"),
    (json.dumps({**EXAMPLE, "arrival_s": -1}), "arrival_s is -1: expected float >= 0"),
    (
        json.dumps({**EXAMPLE, "prefix": [{"id": "s", "tokens": -1}]}),
        "prefix[0].tokens is -1: expected int >= 0",
    ),
    ('{"program_id": ' + "[" * 100_000, "program_id"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "w.jsonl", {**EXAMPLE, "program_id": "fine"}, line)
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


@pytest.mark.parametrize(("line", "message"), [case for case in BAD_LINES if "turn" in case[0]])
def test_a_bad_first_line_is_named_too(tmp_path: Path, line: str, message: str) -> None:
    if "already on line" not in message:
        with pytest.raises(InputError) as caught:
            read(write(tmp_path / "w.jsonl", line))
        assert str(caught.value).startswith(f"{tmp_path / 'w.jsonl'}:1: ") and message in str(caught.value)


def test_nan_in_the_first_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r":1: turns\[1\].gap_s is nan: expected a finite number"):
        read(write(tmp_path / "w.jsonl", changed(gap_s=float("nan"))))


def test_bad_files_are_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good", EXAMPLE).read_bytes()
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "latin").write_bytes(good + good.replace(b"p1", b"p\xe9"))
    (tmp_path / "broken.gz").write_bytes(gzip.compress(good)[:-4])
    (tmp_path / "other").write_text('{"a": 1}\n')
    cases = {
        "missing": "no such file",
        "empty": "holds no programs",
        "latin": ":2: byte 18 of the line is b'\\xe9",
        "broken.gz": ":2: cannot read the workload",
        "other": ":1: the first line is '{\"a\": 1}', which no reader recognises",
    }
    for name, message in cases.items():
        with pytest.raises(InputError) as caught:
            read(tmp_path / name)
        assert message in str(caught.value), name
    with pytest.raises(InputError, match=r"workload.format is 'nativ' \(did you mean 'native'\?\)"):
        read_programs(tmp_path / "good", ReadingReport(), "nativ")


def test_load_programs_takes_the_first_and_says_when_there_are_too_few(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", EXAMPLE, {**EXAMPLE, "program_id": "p2"}, "not json")
    workload = load_programs(WorkloadConfig(source=str(path), programs=2))
    assert [p.program_id for p in workload.programs] == ["p1", "p2"]  # the bad third line is never read
    assert workload.report.programs == 2
    write(path, EXAMPLE)
    with pytest.raises(InputError, match="workload.programs is 60: expected at most 1"):
        list(load_programs(WorkloadConfig(source=str(path), programs=60)).programs)


def test_load_programs_names_the_bundled_workload_meant() -> None:
    with pytest.raises(InputError, match="did you mean 'examples/swebench-like'.*examples/bfcl-like"):
        load_programs(WorkloadConfig(source="examples/swebench"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", EXAMPLE, "not json")
    before = path.read_bytes()
    with pytest.raises(InputError):
        write_native(read_programs(path, ReadingReport()), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["w.jsonl"]
    with pytest.raises(InputError, match="cannot write the workload"):
        write_native([], tmp_path / "no" / "w.jsonl")


counts = st.integers(0, 1 << 40)
seconds = st.floats(0, 1e6)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any valid program: forks, joins, several roots, parents listed after their children."""
    size = draw(st.integers(1, 6))
    order = draw(st.permutations(range(size)))
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=size, max_size=size, unique=True))
    prefix = draw(st.lists(st.builds(PrefixGroup, st.text(max_size=4), st.integers(0, 1000)), max_size=2))
    least = max(1, sum(group.tokens for group in prefix))
    turns: dict[int, Turn] = {}
    for rank, index in enumerate(order):
        earlier = draw(st.lists(st.sampled_from(order[:rank]), unique=True)) if rank else []
        output, prompt = draw(counts), draw(st.integers(least, 1 << 40))
        context = turns[earlier[0]].prompt_tokens + turns[earlier[0]].kept_output_tokens if earlier else 0
        turns[index] = Turn(
            names[index],
            prompt,
            output,
            draw(st.integers(0, min(prompt, context))),
            draw(st.integers(0, output)),
            tuple(earlier),
            tuple(draw(st.lists(st.builds(ToolCall, st.text(max_size=4), seconds), max_size=2))),
            draw(st.none() | seconds),
            draw(seconds),
        )
    arrival_s = draw(st.none() | seconds)
    return Program(
        draw(st.text(min_size=1, max_size=8)), tuple(turns[i] for i in range(size)), arrival_s, tuple(prefix)
    )


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.lists(programs(), min_size=1, max_size=3, unique_by=lambda p: p.program_id))
def test_what_is_written_reads_back_equal(tmp_path: Path, suffix: str, written: list[Program]) -> None:
    path = tmp_path / f"w.{suffix}"
    assert write_native(written, path) == len(written)
    assert read(path) == written
    again = path.read_bytes()
    write_native(read_programs(path, ReadingReport()), path)
    assert path.read_bytes() == again


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["a", "b", 0, 1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(value, key) for key, _ in items] + [place for _, below in items for place in places(below)]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_line_is_a_program_or_an_input_error(tmp_path: Path, data: st.DataObject) -> None:
    line = json.loads(json.dumps(EXAMPLE))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(line)))
        if data.draw(st.booleans()):
            container[key] = data.draw(json_values)
        else:
            del container[key]
        if not places(line):
            break
    expect_program_or_input_error(tmp_path / "w", json.dumps(line).encode())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 600), st.integers(0, 8), st.binary(max_size=6))
@example(0, 0, b"\xff\xfe")
@example(0, 600, b'{"program_id":"\\ud800"}')
def test_mutated_bytes_are_a_program_or_an_input_error(tmp_path: Path, at: int, cut: int, put: bytes) -> None:
    line = json.dumps(EXAMPLE).encode()
    expect_program_or_input_error(tmp_path / "w", line[:at] + put + line[at + cut :])


def expect_program_or_input_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for name in (None, "native", "llmservingsim"):
        try:
            for program in read_programs(path, ReadingReport(), name):
                assert json.loads(json.dumps(to_native(program)))
                program.children()
        except InputError as error:
            assert str(path) in str(error)


@pytest.mark.data
def test_swebench50_totals(data_dir: Path) -> None:
    report = ReadingReport()
    found = inspect(read_programs(data_dir / "traces/native/swebench50.jsonl", report), report)
    assert (found.programs, found.calls) == (50, 2395) == (report.programs, report.turns)
    assert (found.prompt_tokens, found.output_tokens) == (39_022_584, 557_656)
    assert found.structural_reuse == 38_255_811 / 39_022_584
    assert found.tools["sed"].calls == 450 and not report.inferred
    assert found.warnings[0].startswith("50 of 50 programs have no arrival_s")


def test_inspect_in_words_and_numbers(tmp_path: Path) -> None:
    turns = [
        {"prompt_tokens": 1000, "output_tokens": 10, "gap_s": 700.0},
        {"prompt_tokens": 500, "output_tokens": 30},
    ]
    lines = [
        {"program_id": f"p{size}", "prefix": [{"id": "s", "tokens": size}], "turns": turns}
        for size in (100, 200)
    ]
    report = ReadingReport()
    found = inspect(read_programs(write(tmp_path / "w", *lines), report), report)
    assert found.structural_reuse == 1000 / 3000 and found.gap_s is not None and found.gap_s.max == 700.0
    assert found.turns_per_program is not None and found.turns_per_program.mean == 2
    assert found.to_dict()["inferred"] == dict(report.inferred)
    assert [warning.split()[0] for warning in found.warnings] == ["2", "2", "2", "prefix"]
    assert inspect([]).structural_reuse == 0.0
