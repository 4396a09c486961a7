"""Claude Code sessions: totals against plain json, and each trap in a few records."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload.formats import _claude_records, _growth, claude_code, read_programs
from agentservesim.workload.report import ReadingReport


def read(path: Path, report: ReadingReport | None = None) -> Program:
    (program,) = read_programs(path, report if report is not None else ReadingReport())
    return program


def clock(seconds: float) -> str:
    return datetime.fromtimestamp(1_780_000_000 + seconds, UTC).isoformat().replace("+00:00", "Z")


class Log:
    """Writes records of a session, each following the one before."""

    def __init__(self, session: str = "s1", **common: Any) -> None:
        self.records: list[dict[str, Any]] = []
        self.common = {"sessionId": session, "isSidechain": False, **common}
        self.last: str | None = None

    def add(self, kind: str, at: float, message: Any, **other: Any) -> str:
        who = "agent" if self.common["isSidechain"] else self.common["sessionId"]
        uuid = f"{who}-{len(self.records)}"
        record = {"type": kind, "uuid": uuid, "parentUuid": self.last, "timestamp": clock(at)}
        self.records.append({**record, **self.common, "message": message, **other})
        self.last = uuid
        return uuid

    def text(self, at: float, text: str = "do it", **other: Any) -> str:
        return self.add("user", at, {"role": "user", "content": text}, **other)

    def result(self, at: float, tool: str, **other: Any) -> str:
        content = [{"type": "tool_result", "tool_use_id": tool, "content": "ok"}]
        return self.add("user", at, {"role": "user", "content": content}, **other)

    def call(
        self,
        at: float,
        name: str,
        prompt: int,
        output: int = 20,
        tools: dict[str, str] | None = None,
        cached: int = 0,
        text: str = "",
        model: str = "opus",
        **other: Any,
    ) -> str:
        usage = {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "output_tokens": output}
        message = {"id": name, "model": model, "usage": {**usage, "cache_read_input_tokens": cached}}
        uuid = self.add("assistant", at, {**message, "content": [{"type": "text", "text": text}]}, **other)
        for key, tool in (tools or {}).items():
            block = {"type": "tool_use", "id": key, "name": tool, "input": {"prompt": f"prompt of {key}"}}
            uuid = self.add("assistant", at, {**message, "content": [block]}, **other)
        return uuid

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        return path


def parents(program: Program) -> dict[str, list[str]]:
    names = [turn.turn_id for turn in program.turns]
    return {turn.turn_id: [names[parent] for parent in turn.parents] for turn in program.turns}


# --- the samples -----------------------------------------------------------------------------------------


@pytest.mark.data
def test_session_totals(data_dir: Path) -> None:
    path = data_dir / "traces/claude_code/session.jsonl"
    usage: dict[str, dict[str, int]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "assistant":
            usage[record["message"]["id"]] = record["message"]["usage"]
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    prompts = [sum(counts[kind] for kind in kinds) for counts in usage.values()]
    outputs = [counts["output_tokens"] for counts in usage.values()]
    report = ReadingReport()
    program = read(path, report)
    assert [turn.prompt_tokens for turn in program.turns] == prompts and len(prompts) == 10
    assert [turn.output_tokens for turn in program.turns] == outputs
    whole = [0, *(p + o for p, o in zip(prompts, outputs, strict=True))]
    assert [turn.reuse_tokens for turn in program.turns] == [
        min(before, prompt) for before, prompt in zip(whole, prompts, strict=False)
    ]
    assert sum(prompts) == 418_193 and sum(turn.reuse_tokens for turn in program.turns) == 378_459
    assert set(parents(program)[list(usage)[5]]) == {list(usage)[4]}
    assert not report.dropped and not report.estimated and not report.clamped


@pytest.mark.data
def test_session_gaps_are_last_result_minus_last_block(data_dir: Path) -> None:
    first, second, *_ = (turns := read(data_dir / "traces/claude_code/session.jsonl").turns)
    assert [tool.name for tool in first.tools] == ["Bash", "WebSearch"]
    assert first.gap_s == pytest.approx(50.938 - 31.647)  # side by side: the longest
    assert second.gap_s == pytest.approx(17.550 - 4.862)
    assert turns[4].gap_s == 0.0 and turns[4].pause_s == pytest.approx(43.333 - 23.420)  # a person read it
    assert turns[-1].gap_s is None and sum(turn.pause_s > 0 for turn in turns) == 1


@pytest.mark.data
def test_session_without_usage_is_estimated_and_says_so(data_dir: Path) -> None:
    report = ReadingReport()
    program = read(data_dir / "traces/claude_code/session_without_usage.jsonl", report)
    assert len(program.turns) == 3 and report.estimated == {claude_code.ESTIMATED: 3}
    prompts = [turn.prompt_tokens for turn in program.turns]
    assert prompts == sorted(prompts) and all(turn.output_tokens for turn in program.turns)
    assert (program.turns[1].gap_s, program.turns[1].pause_s) == (
        5.0,
        40.0,
    )  # tool until :20, a person at 1:00


# --- traps -----------------------------------------------------------------------------------------------


def test_streaming_placeholders_are_estimated_from_the_text(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    log.call(5, "m1", 1000, output=2, text="word " * 100)
    log.text(9)
    log.call(15, "m2", 1200, output=3, text="short")
    report = ReadingReport()
    first, second = read(log.write(tmp_path / "s.jsonl"), report).turns
    assert (first.output_tokens, second.output_tokens) == (125, 3)
    assert report.estimated == {claude_code.PLACEHOLDER: 1}


def test_compaction_by_marker_and_by_size_and_drift(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    log.call(1, "m1", 10_000, tools={"a": "Bash"})
    log.result(2, "a")
    log.call(3, "m2", 9_500, tools={"b": "Bash"}, cached=9_000)  # drift
    log.result(4, "b")
    log.call(5, "m3", 5_000, tools={"c": "Bash"}, cached=3_000)  # below 60 %: a rewrite
    log.result(6, "c")
    log.records.append(
        {"type": "system", "subtype": "compact_boundary", "uuid": "cb", "timestamp": clock(7)}
        | {"sessionId": "s1", "parentUuid": None, "logicalParentUuid": log.last}
    )
    log.last = "cb"
    log.text(7, "summary of it all", isCompactSummary=True)
    log.call(8, "m4", 4_800, cached=2_500)  # not smaller by much, but said to be a compaction
    report = ReadingReport()
    program = read(log.write(tmp_path / "s.jsonl"), report)
    assert [turn.reuse_tokens for turn in program.turns] == [0, 9_500, 3_000, 2_500]
    assert report.inferred[_growth.REWRITTEN] == 2 and program.turns[2].pause_s == 0
    assert [turn.parents for turn in program.turns] == [(), (0,), (1,), (2,)]


def agent_log(**common: Any) -> Log:
    log = Log(isSidechain=True, **common)
    log.text(3, "prompt of t1")
    log.call(5, "a1", 3000, tools={"x": "Grep"})
    log.result(6, "x")
    log.call(9, "a2", 3500)
    return log


def main_log(**detail: Any) -> Log:
    log = Log()
    log.text(0)
    log.call(2, "m1", 10_000, tools={"t1": "Task", "b": "Bash"})
    log.result(2.5, "b")
    log.result(10, "t1", toolUseResult=detail)
    log.call(14, "m2", 10_500)
    return log


@pytest.mark.parametrize("kind", ["same file", "own file", "by text", "by time"])
def test_sub_agents_fork_and_join(tmp_path: Path, kind: str) -> None:
    log = main_log(**({"agentId": "ag"} if kind == "own file" else {}))
    agent = agent_log(**({"agentId": "ag"} if kind != "same file" else {}))
    if kind == "by time":
        agent.records[0]["message"]["content"] = "another text"
    if kind == "same file":
        log.records[3:3] = agent.records
        log.write(tmp_path / "p/s1.jsonl")
    else:
        log.write(tmp_path / "p/s1.jsonl")
        agent.write(tmp_path / "p/s1/subagents/agent-ag.jsonl")
    report = ReadingReport()
    program = read(tmp_path / "p", report)
    assert parents(program) == {"m1": [], "a1": ["m1"], "a2": ["a1"], "m2": ["m1", "a2"]}
    m1, a1, a2, m2 = program.turns
    assert (m1.gap_s, a1.gap_s, a2.gap_s, m2.delay_s) == (1.0, 1.0, 0.0, 1.0)
    assert (a1.reuse_tokens, m2.reuse_tokens) == (0, 10_020)
    assert report.inferred[claude_code.BY_TIME] == (kind == "by time")


def test_background_agents_do_not_join(tmp_path: Path) -> None:
    log = main_log(agentId="ag", isAsync=True)
    log.records[-2]["timestamp"] = clock(2.7)
    log.records[-1]["timestamp"] = clock(4)
    log.write(tmp_path / "s1.jsonl")
    agent_log(agentId="ag").write(tmp_path / "z.jsonl")
    program = read(tmp_path)
    assert parents(program) == {"m1": [], "m2": ["m1"], "a1": ["m1"], "a2": ["a1"]}
    assert program.turns[1].delay_s == 0 and program.turns[2].delay_s == pytest.approx(0.3)


def test_a_lone_sub_agent_file_is_a_program(tmp_path: Path) -> None:
    report = ReadingReport()
    program = read(agent_log(agentId="ag").write(tmp_path / "agent-ag.jsonl"), report)
    assert len(program.turns) == 2 and report.inferred[claude_code.UNLINKED] == 1


def test_side_calls_of_a_small_model_share_nothing(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    log.call(1, "m1", 10_000, tools={"a": "Bash"})
    log.result(2, "a")
    log.call(3, "title", 300, model="haiku")
    log.call(4, "m2", 10_400)
    report = ReadingReport()
    program = read(log.write(tmp_path / "s.jsonl"), report)
    assert parents(program) == {"m1": [], "title": ["m1"], "m2": ["m1"]}
    assert [turn.reuse_tokens for turn in program.turns] == [0, 0, 10_020]
    assert report.inferred[claude_code.SIDE_CALL] == 1


def test_a_rewind_continues_the_earlier_call(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    fork = log.call(1, "m1", 1000)
    log.text(5)
    log.call(6, "m2", 1100)
    log.last = fork
    log.text(60)
    log.call(62, "m3", 1150)
    report = ReadingReport()
    program = read(log.write(tmp_path / "s.jsonl"), report)
    assert parents(program)["m3"] == ["m1", "m2"] and report.inferred[claude_code.REWOUND] == 1
    assert program.turns[1].pause_s == 54 and program.turns[2].reuse_tokens == 1020


def test_a_resumed_session_is_one_program_and_repeats_nothing(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    log.call(1, "m1", 1000)
    log.write(tmp_path / "one.jsonl")
    log.common["sessionId"] = "s2"
    log.text(5000)
    log.call(5002, "m2", 1100)
    log.write(tmp_path / "two.jsonl")
    report = ReadingReport()
    program = read(tmp_path, report)
    assert parents(program) == {"m1": [], "m2": ["m1"]} and program.turns[0].pause_s == 4999
    assert report.dropped == {_claude_records.REPEATED: 2} and program.program_id == "s1"
    for name in ("one", "two"):  # each alone is a session, too
        assert read(tmp_path / f"{name}.jsonl").turns[0].turn_id == "m1"


def test_errors_retries_questions_and_lost_results(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    log.add("assistant", 1, {"id": "e", "model": "<synthetic>", "content": []}, isApiErrorMessage=True)
    log.call(2, "m1", 1000, tools={"q": "AskUserQuestion", "b": "Bash", "lost": "Bash"})
    log.result(3, "b")
    log.result(90, "q")
    log.call(92, "m2", 1100)
    report = ReadingReport()
    program = read(log.write(tmp_path / "s.jsonl"), report)
    assert (program.turns[0].gap_s, program.turns[0].pause_s) == (1.0, 87.0)
    assert report.dropped == {_claude_records.SYNTHETIC: 1, claude_code.NO_RESULT: 1}


def test_several_sessions_in_a_file_and_no_times(tmp_path: Path) -> None:
    first, second = Log("s1"), Log("s2")
    for log in (first, second):
        log.text(0)
        log.call(1, f"m-{log.common['sessionId']}", 100)
    first.records += second.records
    path = first.write(tmp_path / "s.jsonl")
    assert [p.program_id for p in read_programs(path, ReadingReport())] == ["s1", "s2"]
    for record in first.records:
        del record["timestamp"]
    report = ReadingReport()
    programs = list(read_programs(first.write(path), report))
    assert [p.arrival_s for p in programs] == [None, None] and report.estimated[_claude_records.NO_TIME] == 4


def test_bad_records_are_named_or_skipped(tmp_path: Path) -> None:
    log = Log()
    log.text(0)
    log.call(1, "m1", 100)
    log.text(2)
    log.records[-1]["timestamp"] = "yesterday"
    path = log.write(tmp_path / "s.jsonl")
    with pytest.raises(InputError, match=r"s\.jsonl:3: timestamp is 'yesterday': expected a time such as"):
        read(path)
    log.records[-1] = {**log.records[1], "message": {"usage": {"input_tokens": -5}}}
    with pytest.raises(InputError, match=r":3: message.usage.input_tokens is -5: expected int >= 0"):
        read(log.write(path))
    report = ReadingReport()
    (program,) = read_programs(path, report, lenient=True)
    assert len(program.turns) == 1
    assert report.dropped == {"malformed lines": 1}
