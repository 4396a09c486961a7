"""agentic-swarm-bench recordings: forks, side calls, gaps and time-outs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall
from agentservesim.workload.formats import agentic_swarm_bench as bench
from agentservesim.workload.formats import read_programs
from agentservesim.workload.formats._waits import NEGATIVE
from agentservesim.workload.report import ReadingReport


def read(path: Path, report: ReadingReport | None = None, lenient: bool = False) -> list[Program]:
    return list(read_programs(path, report or ReadingReport(), lenient=lenient))


def seconds(row: dict[str, Any]) -> float:
    return datetime.fromisoformat(row["timestamp"]).timestamp()


@pytest.fixture
def rows(data_dir: Path) -> list[dict[str, Any]]:
    path = data_dir / "traces/agentic_swarm_bench/opus46_calls_stripped.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def report() -> ReadingReport:
    return ReadingReport()


@pytest.fixture
def programs(data_dir: Path, report: ReadingReport) -> list[Program]:
    return read(data_dir / "traces/agentic_swarm_bench/opus46_calls_stripped.jsonl", report)


@pytest.mark.data
def test_totals(programs: list[Program], rows: list[dict[str, Any]], report: ReadingReport) -> None:
    turns = [turn for program in programs for turn in program.turns]
    assert (len(programs), len(turns)) == (len({row["recording"] for row in rows}), len(rows)) == (3, 351)
    assert sum(t.prompt_tokens for t in turns) == sum(row["prompt_tokens"] for row in rows) == 27_634_065
    assert sum(t.output_tokens for t in turns) == sum(row["completion_tokens"] for row in rows) == 77_829
    by_seq = {(row["recording"], row["seq"]): row for row in rows}
    whole = part = reuse = 0
    for row in rows:
        before = by_seq.get((row["recording"], row["parent_seq"]))
        if before is None:
            continue
        lost = before["total_chars"] - row["shared_chars"]
        if lost <= 0:
            whole += 1
            reuse += min(before["prompt_tokens"] + before["completion_tokens"], row["prompt_tokens"])
        else:
            part += 1
            upto = min(before["prompt_tokens"] - -(-lost // 3), row["prompt_tokens"])
            if row["prompt_tokens"] < before["prompt_tokens"]:
                new = -(-(row["total_chars"] - row["shared_chars"]) // 3)
                upto = min(upto, row["prompt_tokens"] - new)
            reuse += max(0, upto)
    assert sum(t.reuse_tokens for t in turns) == reuse == 27_018_404
    assert report.inferred[bench.REUSE_WHOLE] == whole and report.estimated == {bench.REUSE_PART: part}
    assert report.inferred[bench.ROOT] == sum(row["parent_seq"] is None for row in rows) - 3


@pytest.mark.data
def test_starts_are_the_recorded_ones(programs: list[Program], rows: list[dict[str, Any]]) -> None:
    first = min(seconds(row) for row in rows)
    for program in programs:
        by_seq = {str(row["seq"]): row for row in rows if row["recording"] == program.program_id}
        ends: list[float] = []
        for turn in program.turns:
            ready = max(
                (ends[p] + program.turns[p].wait_s() for p in turn.parents), default=program.arrival_s
            )
            assert ready is not None
            start = ready + turn.delay_s
            assert start == pytest.approx(seconds(by_seq[turn.turn_id]) - first, abs=0.11)
            ends.append(start + by_seq[turn.turn_id]["total_time_s"])
    assert programs[0].arrival_s == 0.0


@pytest.mark.data
def test_time_outs_are_tools_and_a_person_is_a_pause(programs: list[Program]) -> None:
    gaps = [turn.gap_s or 0.0 for program in programs for turn in program.turns]
    assert sum(599.0 < gap < 601.0 for gap in gaps) == 28 + 2
    pauses = [(turn.turn_id, turn.pause_s) for p in programs for turn in p.turns if turn.pause_s]
    assert pauses == [("133", pytest.approx(5371.455, abs=0.01))]


def call(seq: int, start: float, took: float, parent: int | None = None, **more: Any) -> dict[str, Any]:
    time = f"2026-04-21T11:{int(start) // 60:02d}:{start % 60:09.6f}+00:00"
    return {
        "recording": "r",
        "seq": seq,
        "timestamp": time,
        "total_time_s": took,
        "prompt_tokens": 1000 * seq,
        "completion_tokens": 10,
        "n_messages": 2 * seq,
        "parent_seq": parent,
        "shared_messages": 2 * parent if parent else 0,
        "shared_chars": 100 * parent if parent else 0,
        "total_chars": 100 * seq,
        "tools_in_last_assistant": ["Bash"] if parent else [],
        **more,
    }


def write(path: Path, *calls: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in calls))
    return path


def test_a_small_overlap_is_a_negative_gap_and_a_large_one_a_fork(tmp_path: Path) -> None:
    report = ReadingReport()
    calls = [call(1, 0, 10), call(2, 9.9, 5, 1), call(3, 20, 10, 2), call(4, 21, 3, 3)]
    (program,) = read(write(tmp_path / "r.jsonl", *calls), report)
    assert [turn.parents for turn in program.turns] == [(), (0,), (1,), (1,)]
    assert program.turns[0].gap_s == 0.0 and report.clamped == {NEGATIVE: 1}
    assert program.turns[3].delay_s == pytest.approx(1.0)
    assert program.turns[3].reuse_tokens == 2010  # of the second call's prompt, as the third was not over


def test_a_side_call_holds_up_the_next(tmp_path: Path) -> None:
    report = ReadingReport()
    calls = [call(1, 0, 2), call(9, 2, 3, prompt_tokens=50), call(2, 6, 1, 1)]
    (program,) = read(write(tmp_path / "r.jsonl", *calls), report)
    assert [turn.parents for turn in program.turns] == [(), (0,), (0, 1)]
    assert program.turns[0].tools == (ToolCall("Bash", 4.0),)
    assert program.turns[1].reuse_tokens == 0 and report.inferred[bench.ROOT] == 1


def test_what_is_wrong_is_named_or_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"r.jsonl:2: parent_seq is 7: expected the seq of a call"):
        read(write(tmp_path / "r.jsonl", call(1, 0, 1), call(2, 2, 1, 7)))
    with pytest.raises(InputError, match=r"r.jsonl:2: seq is 1: expected each once in a recording"):
        read(write(tmp_path / "r.jsonl", call(1, 0, 1), call(1, 2, 1)))
    path = write(tmp_path / "r.jsonl", call(1, 0, 1), call(2, 2, -1, 1), {**call(3, 4, 1), "timestamp": "x"})
    with pytest.raises(InputError, match=r"r.jsonl:2: total_time_s is -1"):
        read(path)
    report = ReadingReport()
    (program,) = read(path, report, lenient=True)
    assert len(program.turns) == 1 and report.dropped == {"malformed lines": 2}
