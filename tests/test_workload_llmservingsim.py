"""LLMServingSim and AgentServeSim rows: sessions, flat requests, DAGs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall
from agentservesim.workload.formats import read_programs
from agentservesim.workload.formats.llmservingsim import (
    DELAY_INFERRED,
    OUTPUT_INFERRED,
    REUSE_CLAMPED,
    REUSE_INFERRED,
    _common_prefix,
)
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.statistics import inspect


def read(path: Path, *rows: Any, report: ReadingReport | None = None) -> list[Program]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_programs(path, report or ReadingReport()))


def test_a_session_without_ids_grows_its_context(tmp_path: Path) -> None:
    report = ReadingReport()
    calls = [
        {"input_toks": 100, "output_toks": 10, "tool_duration_ns": 1_500_000_000, "tool": "grep"},
        {"input_toks": 150, "output_toks": 20, "tool_duration_ns": 250_000_000, "prefix_reuse_toks": 1},
        {"input_toks": 120, "output_toks": 5, "tool_duration_ns": 0},
    ]
    row = {"session_id": 7, "arrival_time_ns": 2_000_000_000, "sub_requests": calls}
    (program,) = read(tmp_path / "w", row, report=report)
    assert (program.program_id, program.arrival_s) == ("7", 2.0)
    assert [t.reuse_tokens for t in program.turns] == [0, 110, 120]
    assert [t.parents for t in program.turns] == [(), (0,), (1,)]
    assert [t.tools for t in program.turns] == [(ToolCall("grep", 1.5),), (ToolCall("tool", 0.25),), ()]
    assert [t.wait_s() for t in program.turns] == [1.5, 0.25, 0.0]
    assert report.inferred == {REUSE_INFERRED: 2} and (report.programs, report.turns) == (1, 3)


def session(*calls: tuple[list[int], list[int] | None, int]) -> dict[str, Any]:
    keys = ("input_tok_ids", "output_tok_ids", "output_toks")
    rows = [{"input_toks": len(call[0]), **dict(zip(keys, call, strict=True))} for call in calls]
    return {"session_id": "s", "sub_requests": rows}


@pytest.mark.parametrize(
    ("first", "second", "reuse", "counted"),
    [
        (([1, 2, 3], [4, 5], 2), [1, 2, 3, 4, 5, 6], 5, {}),
        (([1, 2, 3], [4, 5], 2), [1, 2, 3, 4, 9, 6], 4, {}),
        (([1, 2, 3], [4, 5], 2), [1, 9, 3, 4, 5, 6], 1, {}),
        (([1, 2, 3], [4, 5], 2), [9], 0, {}),
        (([1, 2, 3], None, 2), [1, 2, 3, 7, 7, 7], 5, {OUTPUT_INFERRED: 1}),
        (([1, 2, 3], None, 2), [1, 2, 8, 7, 7, 7], 2, {}),
        (([1, 2, 3], None, 2), [1, 2, 3], 3, {}),
        (([1, 2, 3], [4, 5], 1), [1, 2, 3, 4, 5, 6], 4, {REUSE_CLAMPED: 1}),
    ],
)
def test_ids_decide_the_reuse(
    tmp_path: Path,
    first: tuple[list[int], list[int] | None, int],
    second: list[int],
    reuse: int,
    counted: dict[str, int],
) -> None:
    report = ReadingReport()
    (program,) = read(tmp_path / "w", session(first, (second, [], 1)), report=report)
    assert program.turns[1].reuse_tokens == reuse
    assert report.inferred + report.clamped == counted


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    shared = _common_prefix(left, right)
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]


def test_flat_rows_are_programs_of_one_turn(tmp_path: Path) -> None:
    flat = {
        "input_toks": 5,
        "output_toks": 3,
        "arrival_time_ns": 46_926_808,
        "input_tok_ids": [1, 2, 3, 4, 5],
    }
    one, two, three = read(tmp_path / "w", flat, {**flat, "request_id": 9}, session(([1], [], 1)))
    assert (one.program_id, two.program_id, three.program_id) == ("line-1", "9", "s")
    assert one.arrival_s == 0.046926808 and len(one.turns) == 1 and one.turns[0].reuse_tokens == 0


def dag(edges: list[tuple[Any, ...]], **nodes: dict[str, Any]) -> dict[str, Any]:
    keys = ("src", "dst", "delay_ns")
    return {
        "workflow_id": "w",
        "nodes": [
            {"node_id": name, "input_toks": 100, "output_toks": 10, **extra} for name, extra in nodes.items()
        ],
        "edges": [dict(zip(keys, edge, strict=False)) for edge in edges],
    }


def test_a_dag_forks_and_joins(tmp_path: Path) -> None:
    report = ReadingReport()
    row = dag([("a", "b", 2e9), ("a", "c", 2e9), ("b", "d", 0), ("c", "d")], d={}, a={}, b={}, c={})
    (program,) = read(tmp_path / "w", row, report=report)
    d, a, b, c = program.turns
    assert [t.parents for t in program.turns] == [(2, 3), (), (1,), (1,)]
    assert (a.gap_s, b.gap_s, c.gap_s, d.gap_s) == (2.0, 0.0, None, None)
    assert d.reuse_tokens == 100 and DELAY_INFERRED not in report.inferred


def test_differing_delays_are_the_targets_own(tmp_path: Path) -> None:
    report = ReadingReport()
    row = dag([("a", "b", 2e9), ("a", "c", 5e9)], a={"tool": "map"}, b={}, c={})
    (program,) = read(tmp_path / "w", row, report=report)
    a, b, c = program.turns
    assert (a.wait_s(), b.delay_s, c.delay_s) == (2.0, 0.0, 3.0) and a.tools == (ToolCall("map", 2.0),)
    assert not report.inferred[DELAY_INFERRED]


def test_a_join_whose_delays_cannot_all_hold_takes_the_longest(tmp_path: Path) -> None:
    report = ReadingReport()
    edges = [("a", "c", 1e9), ("a", "d", 4e9), ("b", "d", 2e9)]
    (program,) = read(tmp_path / "w", dag(edges, a={}, b={}, c={}, d={}), report=report)
    assert [turn.gap_s for turn in program.turns[:2]] == [1.0, 2.0] and program.turns[3].delay_s == 3.0
    assert report.inferred[DELAY_INFERRED] == 1


def test_a_join_reuses_the_parent_that_shares_most(tmp_path: Path) -> None:
    row = dag(
        [("a", "c"), ("b", "c")],
        a={"input_tok_ids": [1, 9], "input_toks": 2},
        b={"input_tok_ids": [1, 2], "input_toks": 2, "output_tok_ids": [3], "output_toks": 1},
        c={"input_tok_ids": [1, 2, 3, 4], "input_toks": 4},
    )
    (program,) = read(tmp_path / "w", row)
    assert program.turns[2].parents == (1, 0) and program.turns[2].reuse_tokens == 3


CALL = {"input_toks": 5, "output_toks": 1}
BAD = [
    ({"session_id": "s", "sub_requests": []}, "sub_requests is []: expected array of length >= 1"),
    (
        {"session_id": "s", "sub_requests": [{**CALL, "input_toks": 0}]},
        "sub_requests[0].input_toks is 0: expected int",
    ),
    ({"session_id": "s", "sub_requests": [{"input_toks": 5}]}, "missing key 'sub_requests[0].output_toks'"),
    (
        {"session_id": "s", "sub_requests": [{**CALL, "tool_duration_ns": -1}]},
        "tool_duration_ns is -1: expected",
    ),
    (
        {"session_id": "s", "sub_requests": [{**CALL, "input_tok_ids": [1]}]},
        "input_tok_ids has 1 ids: expected input_",
    ),
    ({"sub_requests": [CALL]}, "missing key 'session_id'"),
    ({"input_toks": 5, "output_toks": -1}, "output_toks is -1: expected int >= 0"),
    (
        {"input_toks": 5, "output_toks": 1, "arrival_time_ns": float("nan")},
        "arrival_time_ns is nan: expected a finite",
    ),
    ({"nodes": [{"node_id": "a", **CALL}]}, "missing key 'workflow_id'"),
    (dag([("a", "x")], a={}), "edges[0].dst is 'x': expected the node_id of a node"),
    (dag([("a", "b"), ("a", "b")], a={}, b={}), "edges[1].src is 'a': expected each edge once"),
    (dag([("a", "b"), ("b", "a")], a={}, b={}), "makes a cycle"),
    ({"outputs": 3}, "the line has keys ['outputs']: expected one of sub_requests, nodes, input_toks"),
    ({**CALL, "session_id": "s"}, "program id 's' is already on line 1"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path / "w", session(([1], [], 1)), row)
    assert str(caught.value).startswith(f"{tmp_path / 'w'}:2: ") and message in str(caught.value)


@pytest.mark.data
def test_sharegpt_requests(data_dir: Path) -> None:
    report = ReadingReport()
    path = data_dir / "measured/vllm_0.19_sharegpt/sharegpt-llama-3.1-8b-300-sps10.jsonl"
    found = inspect(read_programs(path, report), report)
    assert (found.programs, found.calls, found.prompt_tokens, found.output_tokens) == (
        300,
        300,
        257_239,
        195_753,
    )
    assert found.structural_reuse == 0 and found.warnings == [] and found.gap_s is None
