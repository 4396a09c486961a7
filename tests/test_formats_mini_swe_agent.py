"""mini-swe-agent trajectories, v1 and v2, and their counts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall
from agentservesim.workload.formats import mini_swe_agent, read_programs, recognise
from agentservesim.workload.formats._commands import UNNAMED, command_name
from agentservesim.workload.formats._growth import REASONING_CLAMPED
from agentservesim.workload.report import ReadingReport


def read(path: Path, report: ReadingReport | None = None, lenient: bool = False) -> list[Program]:
    return list(read_programs(path, report or ReadingReport(), lenient=lenient))


def sums(programs: list[Program]) -> tuple[int, int, int, int]:
    turns = [turn for program in programs for turn in program.turns]
    return (
        len(turns),
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.output_tokens for turn in turns),
        sum(turn.reuse_tokens for turn in turns),
    )


def derived(sessions: list[list[tuple[int, int, int]]]) -> tuple[int, int, int, int]:
    """Calls, prompts, outputs and reuse of sessions of (prompt, output, reasoning)."""
    calls = [call for session in sessions for call in session]
    reuse = sum(
        min(prompt + max(0, output - reasoning), after)
        for session in sessions
        for (prompt, output, reasoning), (after, _, _) in itertools.pairwise(session)
    )
    return len(calls), sum(call[0] for call in calls), sum(call[1] for call in calls), reuse


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v1_0", (17, 61_068, 2_317, 57_950)),
        ("v1_1", (16, 146_111, 6_032, 137_369)),
        ("v1_2", (25, 446_241, 10_988, 426_804)),
    ],
)
def test_totals_of_a_trajectory(name: str, expected: tuple[int, ...], data_dir: Path) -> None:
    path = data_dir / f"traces/mini_swe_agent/{name}.traj.json"
    document = json.loads(path.read_text())
    session = []
    for message in document["messages"]:
        if message["role"] == "assistant":
            usage = message["extra"]["response"]["usage"]
            reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
            session.append((usage["prompt_tokens"], usage["completion_tokens"], reasoning))
    report = ReadingReport()
    programs = read(path, report)
    assert sums(programs) == derived([session]) == expected
    assert programs[0].program_id == document["instance_id"]
    assert all(turn.gap_s is None and turn.tools[0].duration_s == 0.0 for turn in programs[0].turns)
    assert report.inferred[mini_swe_agent.NO_TOOL_TIME] == len(session)


@pytest.mark.data
def test_the_counts_agree_with_the_native_copy(data_dir: Path) -> None:
    lines = (data_dir / "traces/mini_swe_agent/swebench_sample50.jsonl").read_text().splitlines()
    rows = [json.loads(line)["turns"] for line in lines]
    report = ReadingReport()
    programs = read(data_dir / "traces/mini_swe_agent/swebench_sample50.jsonl", report)
    sessions = [
        [(t["prompt_tokens"], t["output_tokens"], t["reasoning_tokens"]) for t in row] for row in rows
    ]
    assert sums(programs) == derived(sessions) == (2_395, 39_022_584, 557_656, 38_255_811)
    starts = [row[0]["created_s"] for row in rows]
    assert [program.arrival_s for program in programs] == [start - min(starts) for start in starts]
    assert [turn.tools[0].name for turn in programs[0].turns] == [turn["tool"] for turn in rows[0]]
    assert report.clamped == {REASONING_CLAMPED: 3}
    native = read(data_dir / "traces/native/swebench50.jsonl")
    assert sums(native) == sums(programs)


def usage(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, **more}


def answer(prompt: int, output: int, timestamp: float | None, *commands: str, **more: Any) -> dict[str, Any]:
    response = {"created": 1_700_000_000, "usage": usage(prompt, output, **more)}
    extra: dict[str, Any] = {"response": response, "actions": [{"command": each} for each in commands]}
    if timestamp is not None:
        extra["timestamp"] = timestamp
    return {"role": "assistant", "content": None, "extra": extra}


def seen(timestamp: float) -> dict[str, Any]:
    return {"role": "tool", "content": "out", "extra": {"timestamp": timestamp, "returncode": 0}}


def write(path: Path, *messages: dict[str, Any], **more: Any) -> Path:
    document = {"info": {}, "messages": messages, "trajectory_format": "mini-swe-agent-1.1", **more}
    path.write_text(json.dumps(document, indent=1))
    return path


def test_v2_has_times_on_both_sides(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        answer(100, 10, 50.5, "cd /x && FOO=1 pytest -q", "ls"),
        seen(53.0),
        seen(53.25),
        answer(150, 20, 60.0, "echo done"),
        {"role": "exit", "content": ""},
    ]
    path = write(tmp_path / "django__django-1.traj.json", *messages)
    assert recognise(path).NAME == "mini-swe-agent"
    (program,) = read(path)
    assert program.program_id == "django__django-1"
    assert [turn.gap_s for turn in program.turns] == [2.75, None]
    assert program.turns[0].tools == (ToolCall("pytest", 2.75), ToolCall("ls", 2.75))
    assert program.turns[1].reuse_tokens == 110


def test_a_clock_that_goes_back_and_calls_without_usage(tmp_path: Path) -> None:
    report = ReadingReport()
    broken = {"role": "assistant", "content": "oops", "extra": {}}
    path = write(tmp_path / "a.json", broken, answer(10, 1, 9.0, "ls"), seen(8.0), instance_id="i")
    (program,) = read(path, report)
    assert program.turns[0].gap_s == 0.0
    assert report.clamped == {mini_swe_agent.NEGATIVE: 1} and report.dropped == {mini_swe_agent.NO_USAGE: 1}


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.json:1: messages holds no answer with usage"):
        read(write(tmp_path / "a.json", {"role": "user", "content": "x"}))
    expected = r"messages\[0\].extra.response.usage.prompt_tokens is -3: expected int >= 1"
    with pytest.raises(InputError, match=expected):
        read(write(tmp_path / "a.json", answer(-3, 1, None)))
    path = tmp_path / "counts.jsonl"
    good = '{"program_id": "a", "turns": [{"prompt_tokens": 5, "output_tokens": 1, "created_s": 7}]}\n'
    path.write_text(good + good.replace("5", '"many"').replace('"a"', '"b"') + good)
    with pytest.raises(InputError, match=r"counts.jsonl:2: turns\[0\].prompt_tokens is 'many'"):
        read(path)
    report = ReadingReport()
    assert [program.program_id for program in read(path, report, lenient=True)] == ["a"]
    assert report.dropped == {"malformed lines": 2}  # the wrong count, and the id that occurs twice


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ls -la", "ls"),
        ("cd /testbed && python -m pytest x", "python"),
        ("cd /testbed; export A=1; sudo -u me env B=2 /usr/bin/git diff", "git"),
        ("time -p timeout -k 5 30s make", "make"),
        ("# look around\n\nsed -n 1,5p f | head", "sed"),
        ("PYTHONPATH=. 'python3' <<'EOF'\nimport os\nEOF", "python3"),
        ("cd /only", "cd"),
        ("sudo", UNNAMED),
        ("", UNNAMED),
        ("# nothing", UNNAMED),
        ("x" * 70, UNNAMED),
    ],
)
def test_the_first_word_of_a_command(command: str, name: str) -> None:
    assert command_name(command) == name
