"""Codex rollouts: totals against plain json, and each trap in a few records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload.formats import _growth, codex, read_programs
from agentservesim.workload.report import ReadingReport


def read(path: Path, report: ReadingReport | None = None) -> Program:
    (program,) = read_programs(path, report if report is not None else ReadingReport())
    return program


def record(at: float, kind: str, **payload: Any) -> dict[str, Any]:
    minutes, seconds = divmod(at, 60)
    time = f"2026-03-21T10:{int(minutes):02}:{seconds:06.3f}Z"
    return {"timestamp": time, "type": kind, "payload": payload}


def meta(at: float = 0) -> dict[str, Any]:
    return record(at, "session_meta", id="c1", source="cli", base_instructions={"text": "x" * 400})


def user(at: float, text: str = "do it") -> dict[str, Any]:
    return record(
        at, "response_item", type="message", role="user", content=[{"type": "input_text", "text": text}]
    )


def say(at: float, text: str = "done") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return record(at, "response_item", type="message", role="assistant", content=content)


def tool(at: float, key: str, name: str = "shell") -> dict[str, Any]:
    return record(at, "response_item", type="function_call", name=name, arguments="{}", call_id=key)


def back(at: float, key: str) -> dict[str, Any]:
    return record(at, "response_item", type="function_call_output", call_id=key, output="fine")


def count(at: float, total: int, prompt: int, output: int = 50, reasoning: int = 10, cached: int = 0) -> Any:
    last = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": output}
    last |= {"reasoning_output_tokens": reasoning, "total_tokens": prompt + output}
    info = {"last_token_usage": last, "total_token_usage": {**last, "total_tokens": total}}
    return record(at, "event_msg", type="token_count", info=info)


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in records))
    return path


@pytest.mark.data
def test_rollout_totals(data_dir: Path) -> None:
    path = data_dir / "traces/codex/rollout.jsonl"
    events = [json.loads(line)["payload"] for line in path.read_text().splitlines()]
    infos = [event["info"] for event in events if event.get("type") == "token_count"]
    last = [info["last_token_usage"] for info in infos]
    program = read(path, report := ReadingReport())
    assert [turn.prompt_tokens for turn in program.turns] == [usage["input_tokens"] for usage in last]
    assert [turn.output_tokens for turn in program.turns] == [usage["output_tokens"] for usage in last]
    kept = [usage["output_tokens"] - usage["reasoning_output_tokens"] for usage in last]
    assert [turn.kept_output_tokens for turn in program.turns] == kept
    whole = [0, *(usage["input_tokens"] + k for usage, k in zip(last, kept, strict=True))]
    assert [turn.reuse_tokens for turn in program.turns] == [
        min(before, usage["input_tokens"]) for before, usage in zip(whole, last, strict=False)
    ]
    totals = infos[-1]["total_token_usage"]  # cumulative: the same sums
    assert sum(turn.prompt_tokens for turn in program.turns) == totals["input_tokens"] == 95_819
    assert sum(turn.output_tokens for turn in program.turns) == totals["output_tokens"] == 1_912
    assert len(program.turns) == 9 and sum(turn.reuse_tokens for turn in program.turns) == 84_704
    first = program.turns[0]
    assert [t.name for t in first.tools] == ["exec_command"] * 3
    assert first.gap_s == pytest.approx(6.704 - 5.528)  # three at once: the last result
    assert [i for i, turn in enumerate(program.turns) if turn.pause_s] == [4, 6]
    assert not report.dropped and not report.estimated and not report.clamped


def test_repeated_and_empty_token_counts_make_no_calls(tmp_path: Path) -> None:
    empty = record(3, "event_msg", type="token_count", info=None)
    report = ReadingReport()
    path = write(
        tmp_path / "r", meta(), user(1), say(2), empty, count(3, 150, 100), count(4, 150, 100),
        user(9), say(10), count(10.5, 400, 200),
    )  # fmt: skip
    program = read(path, report)
    assert [turn.prompt_tokens for turn in program.turns] == [100, 200]
    assert report.dropped == {codex.REPEATED: 1}


def test_tokens_that_come_after_the_tools_result_count_for_the_call_before(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r",
        meta(),
        user(1),
        tool(2, "a"),
        back(3, "a"),
        count(3.5, 150, 100),
        say(5),
        count(6, 400, 200),
    )
    program = read(path)
    assert [turn.prompt_tokens for turn in program.turns] == [100, 200]
    assert program.turns[0].gap_s == 1.0 and program.turns[0].kept_output_tokens == 40


def test_only_cumulative_counts(tmp_path: Path) -> None:
    records = [meta(), user(1), say(2), count(3, 1, 100), user(4), say(5), count(6, 2, 250, output=90)]
    for item in records:
        if item["payload"].get("info"):
            item["payload"]["info"]["last_token_usage"] = None
    program = read(write(tmp_path / "r", *records))
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in program.turns] == [(100, 50), (150, 40)]


def test_calls_without_counts_are_estimated(tmp_path: Path) -> None:
    report = ReadingReport()
    path = write(
        tmp_path / "r",
        meta(),
        user(1, "y" * 40),
        tool(2, "a"),
        back(3, "a"),
        say(5, "z" * 80),
        user(99),
        say(100),
    )
    program = read(path, report)
    assert [turn.prompt_tokens for turn in program.turns] == [110, 114, 136]
    assert program.turns[1].output_tokens == 20 and report.estimated == {codex.ESTIMATED: 3}
    assert (program.turns[1].gap_s, program.turns[1].pause_s) == (0.0, 94.0)


def test_the_first_rollouts_had_no_envelopes(tmp_path: Path) -> None:
    bare = [item["payload"] for item in (user(1), tool(2, "a"), back(3, "a"), say(4))]
    head = {"id": "old", "timestamp": "2025-05-01T10:00:00Z", "instructions": "be brief"}
    report = ReadingReport()
    program = read(write(tmp_path / "r", head, {"record_type": "state"}, *bare), report)
    assert program.program_id == "old" and len(program.turns) == 2
    assert report.estimated[codex.ESTIMATED] == 2 and report.estimated[codex.NO_TIME] == 4


def test_a_call_without_counts_goes_on_from_those_before(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r", meta(), user(1), tool(2, "a"), count(2.5, 5050, 5000), back(3, "a"), say(5, "z" * 80)
    )
    assert [turn.prompt_tokens for turn in read(path).turns] == [5000, 5004]


def test_compaction_is_a_rewrite(tmp_path: Path) -> None:
    report = ReadingReport()
    compacted = record(8, "compacted", message="so far")
    path = write(
        tmp_path / "r", meta(), user(1), say(2), count(3, 1, 9000), compacted, user(9), say(10),
        count(11, 2, 8000, cached=1200), user(12), say(13), count(14, 3, 3000, cached=900),
    )  # fmt: skip
    assert [turn.reuse_tokens for turn in read(path, report).turns] == [0, 1200, 900]
    assert report.inferred[_growth.REWRITTEN] == 2


def test_lost_results_counts_without_records_and_sub_agents(tmp_path: Path) -> None:
    first = meta()
    first["payload"]["source"] = {"subagent": "review"}
    report = ReadingReport()
    path = write(
        tmp_path / "r", first, user(1), tool(2, "a"), count(3, 1, 100), count(4, 2, 120, reasoning=60)
    )
    program = read(path, report)
    assert [turn.prompt_tokens for turn in program.turns] == [100, 120]
    assert program.turns[1].kept_output_tokens == 0
    assert report.dropped == {codex.NO_RESULT: 1} and report.clamped == {_growth.REASONING_CLAMPED: 1}
    assert report.inferred[codex.NO_TEXT] == 1 and report.inferred[codex.SUBAGENT] == 1


def test_bad_records_are_named_or_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "r", meta(), user(1), say(2), count(3, 1, -7))
    with pytest.raises(InputError, match=r"r:4: info.last_token_usage.input_tokens is -7: expected int >= 0"):
        read(path)
    report = ReadingReport()
    (program,) = read_programs(path, report, lenient=True)
    assert len(program.turns) == 1 and report.dropped == {"malformed lines": 1}
    with pytest.raises(InputError, match="holds no programs"):
        read(write(tmp_path / "e", meta(), user(1)))
