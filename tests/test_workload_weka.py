"""Weka recordings: totals, parents by shared prefix, sub-agents as forks and joins, starts reproduced."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentservesim.config import parse_config
from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program
from agentservesim.run import simulate
from agentservesim.workload.formats import read_programs, weka
from agentservesim.workload.formats._waits import NEGATIVE
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport

NAMES = ("0142", "0202", "0277", "0291")
GRAIN_S = 1.0


def read(path: Path, report: ReadingReport | None = None) -> Program:
    (program,) = read_programs(path, report or ReadingReport())
    return program


def request(start_s: float, ids: list[int], **other: Any) -> dict[str, Any]:
    types = ["tool_result"] if start_s else ["text"]
    base = {"t": start_s, "type": "n", "in": 64 * len(ids) + 3, "out": 5, "hash_ids": ids}
    return {**base, "input_types": types, "stop": "tool_use", "api_time": 2.0, **other}


def agent(t: float, duration_s: float, *requests: dict[str, Any], **other: Any) -> dict[str, Any]:
    base = {"t": t, "type": "subagent", "duration_ms": duration_s * 1000, "status": "completed"}
    return {**base, "agent_id": "a", "requests": list(requests), **other}


def trace(path: Path, *requests: dict[str, Any], **other: Any) -> Path:
    document = {"id": "w", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **other}
    path.write_text(json.dumps(document))
    return path


# --- the samples, against plain json ---------------------------------------------------------------------


def recorded(document: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """(start, request) of every request, sub-agents' times put on the session's clock."""
    found = []
    for entry in document["requests"]:
        if entry["type"] == "subagent":
            started_s = entry["t"] - entry["duration_ms"] / 1000
            found += [(started_s + inner["t"], inner) for inner in entry["requests"]]
        else:
            found.append((entry["t"], entry))
    return sorted(found, key=lambda pair: pair[0])


def shared_blocks(left: list[int], right: list[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def end_s(start_s: float, entry: dict[str, Any]) -> float:
    return start_s + float(entry.get("api_time", 0.0))


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_totals_are_those_of_the_document(data_dir: Path, name: str) -> None:
    path = data_dir / f"traces/weka/trace_{name}.json"
    document = json.loads(path.read_bytes())
    calls = recorded(document)
    program = read(path)
    totals = document["totals"]["combined_tokens"]
    assert len(program.turns) == len(calls)
    assert sum(turn.prompt_tokens for turn in program.turns) == totals["input"]
    assert sum(turn.output_tokens for turn in program.turns) == totals["output"]
    reuse = [
        64
        * max(
            (shared_blocks(a["hash_ids"], b["hash_ids"]) for s, a in calls[:i] if end_s(s, a) <= t + 1),
            default=0,
        )
        for i, (t, b) in enumerate(calls)
    ]
    assert [turn.reuse_tokens for turn in program.turns] == reuse


def replayed(program: Program, service_s: list[float]) -> list[float]:
    """Start of every turn when each takes the time it took in the recording."""
    starts: list[float] = []
    for turn in program.turns:
        ready = [starts[p] + service_s[p] + program.turns[p].wait_s() for p in turn.parents]
        starts.append(max(ready, default=0.0) + turn.delay_s)
    return starts


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_starts_are_reproduced_within_the_recordings_grain(data_dir: Path, name: str) -> None:
    path = data_dir / f"traces/weka/trace_{name}.json"
    calls = recorded(json.loads(path.read_bytes()))
    starts = replayed(read(path), [entry.get("api_time", 0.0) for _, entry in calls])
    assert max(abs(start - t) for start, (t, _) in zip(starts, calls, strict=True)) <= GRAIN_S


def released(path: Path) -> dict[str, float]:
    """When each call of a workload is released, by an engine whose steps take no time."""
    config = parse_config(
        {
            "workload": {"source": str(path)},
            "cluster": {"gpu": "b200_sxm", "model": "llama-3.1-8b", "kv_cache_tokens": 1_000_000},
            "engine": {"max_model_len": 200_000},
            "step_time": {"backend": "linear"},
        }
    )
    return {row["turn_id"]: row["released_s"] for row in simulate(config).tables["calls"].to_pylist()}


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_an_infinitely_fast_engine_reproduces_the_starts(data_dir: Path, tmp_path: Path, name: str) -> None:
    """The whole simulator with steps of no time, and each call's recorded service added to its gap."""
    path = data_dir / f"traces/weka/trace_{name}.json"
    calls = recorded(json.loads(path.read_bytes()))
    program = read(path)
    turns = [
        msgspec.structs.replace(turn, gap_s=(turn.gap_s or 0.0) + entry.get("api_time", 0.0))
        for turn, (_, entry) in zip(program.turns, calls, strict=True)
    ]
    whole = msgspec.structs.replace(program, turns=tuple(turns), arrival_s=0.0)
    write_native([whole], tmp_path / "w.jsonl")
    starts = released(tmp_path / "w.jsonl")
    assert len(starts) == len(calls)
    for turn, (t, _) in zip(whole.turns, calls, strict=True):
        assert abs(starts[turn.turn_id] - t) <= GRAIN_S


@pytest.mark.data
def test_sub_agents_of_0277_fork_and_join(data_dir: Path) -> None:
    program = read(data_dir / "traces/weka/trace_0277.json")
    index = {turn.turn_id: i for i, turn in enumerate(program.turns)}
    names = [[program.turns[p].turn_id for p in turn.parents] for turn in program.turns]
    for number in (1, 2, 3):  # three run side by side after the first request
        assert names[index[f"agent_00{number}#{number}/r0"]] == ["r0"]
    joined = ["r0", "agent_001#1/r3", "agent_002#2/r11", "agent_003#3/r16"]
    assert names[index["r4"]] == joined
    assert "r9" in names[index["agent_004#10/r0"]]
    assert names[index["r11"]] == ["r9", "agent_004#10/r10"]
    last = max(replayed(program, [0.0] * len(program.turns))[index[name]] for name in joined[1:])
    assert program.turns[index["r4"]].delay_s > 0 and last >= 0


@pytest.mark.data
def test_0202_is_a_chain_with_a_rewrite(data_dir: Path) -> None:
    """It has no sub-agents; after its compaction a prompt is most like the session's first, not the last."""
    report = ReadingReport()
    program = read(data_dir / "traces/weka/trace_0202.json", report)
    chain: list[tuple[int, ...]] = [(i,) for i in range(len(program.turns) - 1)]
    chain[47] = (0, 47)
    assert [turn.parents for turn in program.turns[1:]] == chain
    assert program.turns[48].prompt_tokens == 19292 and program.turns[48].reuse_tokens == 64 * 259
    assert program.turns[47].pause_s == pytest.approx(3437 - 3365 - 31.4)  # its text came from a person
    assert program.turns[42].pause_s == pytest.approx(3261 - 3140, abs=1)  # aborted: without api_time
    assert report.estimated == {weka.UNTIMED: 1}


# --- traps -----------------------------------------------------------------------------------------------


def test_the_parent_is_the_longest_shared_prefix_not_the_one_before(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "w", request(0, [1, 2, 3]), request(4, [1, 9]), request(9, [1, 2, 3, 4]), request(15, [7])
    )
    program = read(path)
    assert [turn.parents for turn in program.turns] == [(), (0,), (0, 1), (2,)]
    assert [turn.reuse_tokens for turn in program.turns] == [0, 64, 192, 0]
    assert [turn.gap_s for turn in program.turns] == [2.0, 3.0, 4.0, None]


def test_overlapping_requests_fork(tmp_path: Path) -> None:
    slow = request(5, [1, 2], api_time=30.0)
    program = read(trace(tmp_path / "w", request(0, [1]), slow, request(7, [1, 3]), request(40, [1, 2, 4])))
    assert [turn.parents for turn in program.turns] == [(), (0,), (0,), (1, 2)]
    assert program.turns[0].gap_s == 3.0 and program.turns[2].delay_s == 2.0
    assert replayed(program, [2.0, 30.0, 2.0, 2.0]) == [0, 5, 7, 40]


def test_a_request_beside_the_first_is_a_root_of_its_own(tmp_path: Path) -> None:
    slow = request(0, [1], api_time=30.0)
    program = read(trace(tmp_path / "w", slow, request(5, [1, 2]), request(9, [1, 2, 3])))
    assert [turn.parents for turn in program.turns] == [(), (), (1,)]
    assert replayed(program, [30.0, 2.0, 2.0]) == [0, 5, 9]
    whole = msgspec.structs.replace(program, arrival_s=0.0)
    write_native([whole], tmp_path / "n.jsonl")
    assert released(tmp_path / "n.jsonl") == {"r0": 0, "r1": 5, "r2": 7}  # no service: 5 + a gap of 2


def test_async_agents_do_not_join_and_nested_ones_do(tmp_path: Path) -> None:
    inner = agent(20, 10, request(0, [5]))
    outer = agent(30, 27, request(0, [4]), inner, request(24, [4, 6]))
    report = ReadingReport()
    program = read(
        trace(
            tmp_path / "w",
            request(0, [1]),
            outer,
            agent(3, 0.5, request(0, [8]), request(100, [8, 9]), status="async_launched"),
            request(40, [1, 2]),
        ),
        report,
    )
    names = [turn.turn_id for turn in program.turns]
    parents = {turn.turn_id: [names[p] for p in turn.parents] for turn in program.turns}
    assert parents["r3"] == ["r0", "a#1/r2"]
    assert parents["a#1/a#1/r0"] == ["a#1/r0"] and parents["a#1/r2"] == ["a#1/r0", "a#1/a#1/r0"]
    assert parents["a#2/r0"] == ["r0"] and parents["a#2/r1"] == ["a#2/r0"]


def test_an_agent_that_outlives_the_next_request_joins_later(tmp_path: Path) -> None:
    report = ReadingReport()
    late = agent(20, 17, request(0, [5], api_time=15.0))
    path = trace(tmp_path / "w", request(0, [1]), late, request(10, [1, 2]), request(30, [1, 2, 3]))
    assert [turn.parents for turn in read(path, report).turns] == [(), (0,), (0,), (2, 1)]
    assert report.inferred == {weka.LATE_JOIN: 1}


def test_people_and_tools(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "w",
        request(0, [1]),
        request(10, [1, 2], stop="end_turn"),
        request(80, [1, 2, 3], input_types=["text"]),
        request(3000, [1, 2, 3, 4]),
    )
    report = ReadingReport()
    first, second, third, _ = read(path, report).turns
    assert (first.gap_s, first.pause_s, first.tools[0].name) == (8.0, 0.0, "tool")
    assert (second.gap_s, second.pause_s, second.tools) == (0.0, 68.0, ())
    assert (third.gap_s, third.pause_s) == (600.0, 2318.0)  # longer than any tool's time-out: a person
    capped = ReadingReport()
    (program,) = read_programs(path, capped, max_pause_s=60)
    assert [turn.pause_s for turn in program.turns] == [0, 60, 60, 0] and sum(capped.clamped.values()) == 2


def test_negative_gaps_are_clamped_and_starts_do_not_drift(tmp_path: Path) -> None:
    report = ReadingReport()
    tight = [request(3.0 * i, [1, i + 2], api_time=3.4) for i in range(20)]
    program = read(trace(tmp_path / "w", *tight, request(70, [1])), report)
    assert all(turn.wait_s() >= 0 for turn in program.turns) and report.clamped[NEGATIVE] == 19
    assert replayed(program, [3.4] * 21)[-1] == pytest.approx(70)


def test_hashes_shared_with_a_running_request_are_not_reused(tmp_path: Path) -> None:
    report = ReadingReport()
    path = trace(tmp_path / "w", request(0, [1]), request(3, [1, 2, 3], api_time=50.0), request(5, [1, 2, 3]))
    assert [turn.reuse_tokens for turn in read(path, report).turns] == [0, 64, 64]
    assert report.dropped == {weka.SAME_TIME: 1}


def test_prefix_groups_only_with_global_hashes(tmp_path: Path) -> None:
    other = {"tool_tokens": 130, "system_tokens": 70}
    requests = [request(0, [1, 2, 3, 4]), request(9, [1, 2, 3, 5])]
    assert read(trace(tmp_path / "l", *requests, **other)).prefix == ()
    first = read(trace(tmp_path / "g", *requests, hash_id_scope="global", **other)).prefix
    again = read(trace(tmp_path / "h", request(0, [1, 2, 3, 9]), hash_id_scope="global", **other)).prefix
    moved = read(trace(tmp_path / "i", request(0, [6, 2, 3, 9]), hash_id_scope="global", **other)).prefix
    assert [group.tokens for group in first] == [128, 64] and first == again
    assert isinstance(first[0], PrefixGroup) and moved[0].id != first[0].id


def test_lines_gzip_and_pretty_printing_give_the_same(tmp_path: Path) -> None:
    path = trace(tmp_path / "one", request(0, [1]), request(9, [1, 2]))
    document = json.loads(path.read_text())
    (tmp_path / "pretty").write_text(json.dumps(document, indent=1))
    (tmp_path / "packed").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "lines").write_text(path.read_text() + "\n" + json.dumps({**document, "id": "v"}) + "\n")
    assert read(path) == read(tmp_path / "pretty") == read(tmp_path / "packed")
    assert [p.program_id for p in read_programs(tmp_path / "lines", ReadingReport())] == ["w", "v"]


BAD: list[tuple[Any, str]] = [
    ({"in": -1}, "requests[1].in is -1: expected int >= 1"),
    ({"t": "x"}, "requests[1].t is 'x': expected float"),
    ({"hash_ids": [1, None]}, "requests[1].hash_ids[1] is None: expected int"),
    ({"type": "q"}, "requests[1].type is 'q': invalid value 'q'"),
    ({"api_time": -3}, "requests[1].api_time is -3: expected float >= 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_request_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = trace(tmp_path / "w", request(0, [1]), request(9, [1, 2], **change))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:1: ") and message in str(caught.value)


def test_broken_json_is_named_by_line(tmp_path: Path) -> None:
    path = trace(tmp_path / "w", request(0, [1]))
    broken = json.dumps(json.loads(path.read_text()), indent=1).replace('"out": 5', '"out": 5 5')
    path.write_text(broken)
    line = broken[: broken.index("5 5")].count("\n") + 1
    with pytest.raises(InputError, match=f":{line}: malformed JSON"):
        read(path)
