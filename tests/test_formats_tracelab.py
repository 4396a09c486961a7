"""TraceLab rounds and CSVs: totals against plain json and csv, and the traps in small files."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall
from agentservesim.workload.formats import read_programs, tracelab
from agentservesim.workload.formats._growth import KEPT_INFERRED, REUSE_INFERRED, REWRITTEN
from agentservesim.workload.report import ReadingReport

CSVS = ("multi_session_example", "multi_session_large", "session_workload_example")


def read(path: Path, report: ReadingReport | None = None, lenient: bool = False) -> list[Program]:
    return list(read_programs(path, report or ReadingReport(), lenient=lenient))


def totals(programs: list[Program]) -> dict[str, int]:
    turns = [turn for program in programs for turn in program.turns]
    return {
        "programs": len(programs),
        "calls": len(turns),
        "prompt": sum(turn.prompt_tokens for turn in turns),
        "output": sum(turn.output_tokens for turn in turns),
        "reuse": sum(turn.reuse_tokens for turn in turns),
    }


def growth(sessions: dict[str, list[tuple[int, int, int]]]) -> dict[str, int]:
    """Totals of sessions of (prompt, output, kept output), which only grow."""
    rounds = [each for session in sessions.values() for each in session]
    reuse = sum(
        min(prompt + kept, after)
        for session in sessions.values()
        for (prompt, _, kept), (after, _, _) in itertools.pairwise(session)
    )
    return {
        "programs": len(sessions),
        "calls": len(rounds),
        "prompt": sum(each[0] for each in rounds),
        "output": sum(each[1] for each in rounds),
        "reuse": reuse,
    }


@pytest.mark.data
@pytest.mark.parametrize("name", ["sanitized", "derived"])
def test_totals_of_the_rounds(name: str, data_dir: Path) -> None:
    path = data_dir / f"traces/tracelab/{name}__round_trace.jsonl"
    sessions: dict[str, list[tuple[int, int, int]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        kept = row["output_tokens"] - (row["reasoning_output_tokens"] or 0)
        sessions.setdefault(row["session_id"], []).append(
            (row["input_tokens_total"], row["output_tokens"], kept)
        )
    assert totals(read(path)) == growth(sessions)
    assert totals(read(path)) == {
        "programs": 2,
        "calls": 19,
        "prompt": 514_012,
        "output": 11_335,
        "reuse": 463_163,
    }


@pytest.mark.data
@pytest.mark.parametrize("name", CSVS)
def test_totals_of_the_csvs(name: str, data_dir: Path) -> None:
    path = data_dir / f"traces/tracelab/replay__examples__{name}.csv"
    sessions: dict[str, list[tuple[int, int, int]]] = {}
    waits_ms = 0
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            prompt, output = int(row["prefix_len"]) + int(row["input_len"]), int(row["output_len"])
            sessions.setdefault(row["session_id"], []).append((prompt, output, output))
            waits_ms += int(row["tool_wait_after_ms"])
    programs = read(path)
    assert totals(programs) == growth(sessions)
    gaps = [turn.gap_s for program in programs for turn in program.turns]
    assert None not in gaps
    assert sum(gap or 0.0 for gap in gaps) == pytest.approx(waits_ms / 1e3)


@pytest.mark.data
def test_a_cache_that_missed_is_no_rewrite(data_dir: Path) -> None:
    path = data_dir / "traces/tracelab/replay__examples__session_workload_example.csv"
    (program,) = read(path)
    assert program.turns[-1].reuse_tokens == 56_851 + 527 + 524  # its prefix_len is 48,060


ROUND = {
    "session_id": "s",
    "round_index": 0,
    "prefix_tokens": 10,
    "newly_append_tokens": 90,
    "output_tokens": 40,
}


def rounds(path: Path, *rows: dict[str, Any], report: ReadingReport | None = None) -> list[Program]:
    lines = [json.dumps({**ROUND, **row}) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return read(path, report)


def tool(name: str, emitted: str | None, result: str | None, **more: Any) -> dict[str, Any]:
    return {"tool_name": name, "emitted_at": emitted, "result_at": result, **more}


def at(second: float) -> str:
    return f"2026-06-01T00:00:{second:06.3f}Z"


def test_the_gap_is_last_result_less_last_call(tmp_path: Path) -> None:
    tools = [tool("a", at(1), at(9)), tool("b", at(3), at(5), tool_wall_latency_ms=1900)]
    (program,) = rounds(tmp_path / "t", {"tools": tools}, {"round_index": 1, "prefix_tokens": 130})
    assert program.turns[0].gap_s == pytest.approx(6.0)
    assert program.turns[0].tools == (ToolCall("a", 8.0), ToolCall("b", 1.9))


def test_a_recorded_gap_of_0_is_not_a_missing_one(tmp_path: Path) -> None:
    report = ReadingReport()
    known = {"tools": [tool("a", at(1), at(1))]}
    unknown = {"round_index": 1, "prefix_tokens": 130, "tools": [tool("a", at(1), None)]}
    (program,) = rounds(tmp_path / "t", known, unknown, report=report)
    assert [turn.gap_s for turn in program.turns] == [0.0, None]
    assert report.dropped == {tracelab.NO_RESULT: 1} and report.inferred[tracelab.NO_TOOL_TIME] == 1


def test_results_before_the_last_call_are_clamped(tmp_path: Path) -> None:
    report = ReadingReport()
    tools = [tool("a", at(1), at(2)), tool("b", at(4), at(3), tool_wall_latency_ms=0)]
    (program,) = rounds(tmp_path / "t", {"tools": tools}, report=report)
    assert program.turns[0].gap_s == 0.0 and report.clamped == {tracelab.NEGATIVE: 1}


def test_a_person_pauses_apart_from_tools(tmp_path: Path) -> None:
    def event(kind: str, second: float) -> dict[str, Any]:
        return {"event_type": kind, "timestamp": at(second)}

    first = {"timing_events": [event("user_message", 0), event("text", 2)]}
    second = {"timing_events": [event("user_message", 50), event("text", 51)]}
    (program,) = rounds(tmp_path / "t", first, {"round_index": 1, "prefix_tokens": 130, **second})
    assert (program.turns[0].gap_s, program.turns[0].pause_s) == (0.0, 48.0)


def test_cache_hits_bound_reuse_after_a_rewrite_alone(tmp_path: Path) -> None:
    report = ReadingReport()
    grown = {"round_index": 1, "prefix_tokens": 0, "newly_append_tokens": 900}
    fallen = {"round_index": 2, "prefix_tokens": 70, "newly_append_tokens": 200}
    (program,) = rounds(tmp_path / "t", {}, grown, fallen, report=report)
    assert [turn.reuse_tokens for turn in program.turns] == [0, 140, 70]
    assert report.inferred == {REUSE_INFERRED: 1, REWRITTEN: 1}


def test_what_returns_is_bounded_by_growth_where_reasoning_is_not_known(tmp_path: Path) -> None:
    report = ReadingReport()
    (program,) = rounds(tmp_path / "t", {}, {"round_index": 1, "prefix_tokens": 35}, report=report)
    assert program.turns[0].kept_output_tokens == 25 and report.inferred[KEPT_INFERRED] == 1


def test_interleaved_sessions_and_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "output_len, tool_wait_after_ms ,session_id,round_idx,arrival_time,prefix_len,input_len\n"
        "5,250,b,1,700,110,10\n10,0,a,0,400,0,50\n7,1000,b,0,700,0,100\n"
    )
    b, a = read(path)
    assert (a.program_id, a.arrival_s, b.program_id, b.arrival_s) == ("a", 0.0, "b", pytest.approx(0.3))
    assert [(turn.prompt_tokens, turn.gap_s) for turn in b.turns] == [(100, 1.0), (120, 0.25)]
    assert b.turns[1].reuse_tokens == 107


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("x", "input_len is 'x': expected a whole number"),
        ("-1", "input_len is '-1'"),
        ("", "input_len is ''"),
    ],
)
def test_a_wrong_cell_is_named_or_counted(cell: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    head = "session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
    path.write_text(head + f"0,0,0,5,1,0\n0,1,6,{cell},1,0\n")
    with pytest.raises(InputError, match=rf"t\.csv:3: {says}"):
        read(path)
    report = ReadingReport()
    (program,) = read(path, report, lenient=True)
    assert len(program.turns) == 1 and report.dropped == {"malformed lines": 1}


def test_a_round_twice_and_a_time_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t:2: round 0 of its session is already on line 1"):
        rounds(tmp_path / "t", {}, {})
    with pytest.raises(InputError, match=r"t:1: tools\[0\].result_at is 'noon': expected a time"):
        rounds(tmp_path / "t", {"tools": [tool("a", at(1), "noon")]})
