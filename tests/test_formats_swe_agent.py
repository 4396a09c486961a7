"""SWE-agent trajectories: tokens from text, scaled to the run's totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall
from agentservesim.workload.formats import read_programs, swe_agent
from agentservesim.workload.formats._text_tokens import estimate_tokens, scale_to_total
from agentservesim.workload.report import ReadingReport


def read(path: Path, report: ReadingReport | None = None) -> list[Program]:
    return list(read_programs(path, report or ReadingReport()))


@pytest.mark.data
def test_totals_are_those_of_model_stats(data_dir: Path) -> None:
    path = data_dir / "traces/swe_agent/pydicom-1458.traj.json"
    document = json.loads(path.read_text())
    stats = document["info"]["model_stats"]
    report = ReadingReport()
    (program,) = read(path, report)
    assert program.program_id == "pydicom-1458"
    assert len(program.turns) == stats["api_calls"] == len(document["trajectory"]) == 12
    assert sum(turn.prompt_tokens for turn in program.turns) == stats["tokens_sent"] == 122_612
    assert sum(turn.output_tokens for turn in program.turns) == stats["tokens_received"] == 1_369
    assert report.estimated == {swe_agent.SCALED: 12}
    chars = [0]
    for said in document["history"]:
        chars.append(chars[-1] + -(-len(said["content"].encode()) // 4))
    asked = [chars[at] for at, said in enumerate(document["history"]) if said["role"] == "assistant"]
    scale = stats["tokens_sent"] / sum(asked)
    for turn, text in zip(program.turns, asked, strict=True):
        assert abs(turn.prompt_tokens - text * scale) < 1
    pairs = zip(program.turns, program.turns[1:], strict=False)
    assert all(b.reuse_tokens == a.prompt_tokens + a.kept_output_tokens for a, b in pairs)
    assert sum(turn.reuse_tokens for turn in program.turns) == 110_053


@pytest.mark.data
def test_a_history_alone_is_estimated(data_dir: Path) -> None:
    path = data_dir / "traces/swe_agent/function_calling_simple.traj.json"
    answers = [said for said in json.loads(path.read_text())["history"] if said["role"] == "assistant"]
    report = ReadingReport()
    (program,) = read(path, report)
    assert len(program.turns) == len(answers) == 5
    assert sum(turn.prompt_tokens for turn in program.turns) == 7_278
    assert [turn.tools[0].name for turn in program.turns] == ["find_file", "open", "edit", "python", "submit"]
    assert report.estimated == {swe_agent.ESTIMATED: 5} and report.inferred == {swe_agent.NO_TOOL_TIME: 5}


def step(response: str, action: str = "ls", **more: Any) -> dict[str, Any]:
    return {"action": action, "observation": "o" * 40, "response": response, **more}


def write(path: Path, **document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_execution_time_is_the_gap_and_0_is_not_missing(tmp_path: Path) -> None:
    steps = [step("a" * 40, execution_time=1.5), step("b" * 40, "submit", execution_time=0), step("")]
    report = ReadingReport()
    (program,) = read(write(tmp_path / "x.traj", trajectory=steps), report)
    assert [turn.gap_s for turn in program.turns] == [1.5, 0.0]
    assert program.turns[0].tools == (ToolCall("ls", 1.5),)
    assert program.turns[1].prompt_tokens == 20 and program.turns[1].reuse_tokens == 11
    assert report.dropped == {swe_agent.NO_ANSWER: 1} and not report.inferred


def test_query_says_what_was_cut_out_of_the_history(tmp_path: Path) -> None:
    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    first = [user("s" * 400), user("t" * 400)]
    second = [user("s" * 400), user("old output cut".ljust(200)), user("u" * 200)]
    steps = [step("a" * 40, query=first), step("b" * 40, query=second)]
    (program,) = read(write(tmp_path / "x.traj", trajectory=steps))
    assert [turn.prompt_tokens for turn in program.turns] == [200, 200]
    assert program.turns[1].reuse_tokens == 100


def test_calls_that_are_not_listed_are_counted(tmp_path: Path) -> None:
    stats = {"tokens_sent": 1000, "tokens_received": 31, "api_calls": 5}
    report = ReadingReport()
    steps = [step("a" * 40), step("b" * 80)]
    (program,) = read(write(tmp_path / "x", trajectory=steps, info={"model_stats": stats}), report)
    assert sum(turn.prompt_tokens for turn in program.turns) == 1000
    assert [turn.output_tokens for turn in program.turns] == [10, 21]
    assert report.inferred[swe_agent.NOT_LISTED] == 3


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x:1: trajectory\[0\].execution_time is -1: expected float >= 0"):
        read(write(tmp_path / "x", trajectory=[step("a", execution_time=-1)]))
    with pytest.raises(InputError, match=r"x:1: trajectory and history hold no answer"):
        read(write(tmp_path / "x", trajectory=[step("")]))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(0, 10**6))
def test_scaling_keeps_the_total(weights: list[int], total: int) -> None:
    shares = scale_to_total(weights, total)
    assert sum(shares) == total and min(shares) >= 0
    if whole := sum(weights):
        assert all(abs(s - w * total / whole) < 1 for s, w in zip(shares, weights, strict=True))


def test_text_is_4_bytes_a_token() -> None:
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "abcde", "ääää", "\ud800")] == [
        0,
        1,
        1,
        2,
        2,
        1,
    ]
