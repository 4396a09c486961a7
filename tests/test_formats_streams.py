"""Mooncake and Azure request streams: one-turn programs, recorded arrivals, shared prefixes."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program
from agentservesim.workload.formats import mooncake, read_programs
from agentservesim.workload.report import ReadingReport


def read(path: Path, report: ReadingReport | None = None, lenient: bool = False) -> list[Program]:
    return list(read_programs(path, report or ReadingReport(), lenient=lenient))


def shared(left: Program, right: Program) -> int:
    """The leading tokens that two programs share by their groups."""
    tokens = 0
    for one, other in zip(left.prefix, right.prefix, strict=False):
        if one != other:
            break
        tokens += one.tokens
    return tokens


def common(left: dict[str, Any], right: dict[str, Any]) -> int:
    """The same from the hash ids of full blocks."""
    blocks = [row["hash_ids"][: row["input_length"] // 512] for row in (left, right)]
    count = 0
    for one, other in zip(*blocks, strict=False):
        if one != other:
            break
        count += 1
    return 512 * count


@pytest.mark.data
def test_azure_totals(data_dir: Path) -> None:
    path = data_dir / "traces/azure/code_2000.csv"
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    programs = read(path)
    turns = [turn for program in programs for turn in program.turns]
    assert len(programs) == len(turns) == len(rows) == 1_999  # 2,000 lines with the header
    assert sum(turn.prompt_tokens for turn in turns) == sum(int(row["ContextTokens"]) for row in rows)
    assert sum(turn.output_tokens for turn in turns) == sum(int(row["GeneratedTokens"]) for row in rows)
    assert sum(turn.prompt_tokens for turn in turns) == 3_971_460
    assert sum(turn.reuse_tokens for turn in turns) == 0
    times = [datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
    expected = [(time - min(times)).total_seconds() for time in times]
    assert [program.arrival_s for program in programs] == pytest.approx(expected)
    assert programs[0].arrival_s == 0.0


@pytest.mark.data
def test_mooncake_totals_and_sharing(data_dir: Path) -> None:
    path = data_dir / "traces/mooncake/conversation_2000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    report = ReadingReport()
    programs = read(path, report)
    turns = [program.turns[0] for program in programs]
    assert len(programs) == len(rows) == 2_000
    assert sum(turn.prompt_tokens for turn in turns) == sum(row["input_length"] for row in rows) == 27_441_774
    assert sum(turn.output_tokens for turn in turns) == sum(row["output_length"] for row in rows)
    assert [program.arrival_s for program in programs] == [row["timestamp"] / 1000 for row in rows]
    partial = sum(len(row["hash_ids"]) > row["input_length"] // 512 for row in rows)
    assert report.dropped == {mooncake.PARTIAL: partial}
    uses = Counter(block for row in rows for block in row["hash_ids"][: row["input_length"] // 512])
    repeated = sum(512 * uses[b] for b in uses if uses[b] > 1)
    assert sum(group.tokens for program in programs for group in program.prefix) == repeated
    draw = random.Random(0)
    pairs = [draw.sample(range(2_000), 2) for _ in range(20_000)]
    assert all(shared(programs[i], programs[j]) == common(rows[i], rows[j]) for i, j in pairs)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request(*blocks: int, tokens: int | None = None, at_ms: float = 0) -> dict[str, Any]:
    length = 512 * len(blocks) + 1 if tokens is None else tokens
    return {"timestamp": at_ms, "input_length": length, "output_length": 1, "hash_ids": list(blocks)}


def test_runs_of_blocks_are_one_group(tmp_path: Path) -> None:
    rows = [request(1, 2, 3, 9), request(1, 2, 3, 4), request(1, 2, 7), request(8, tokens=300)]
    found = [program.prefix for program in read(write(tmp_path / "m.jsonl", rows))]
    head, tail = PrefixGroup("m/1-2", 1024), PrefixGroup("m/3-3", 512)
    assert found == [(head, tail), (head, tail), (head,), ()]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=8), st.booleans())
def test_sharing_is_exact(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], chained: bool
) -> None:
    """Whether ids stand for all before them or for their block alone."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for text in texts:
        prefixes = [tuple(text[: end + 1]) for end in range(len(text))]
        blocks = [ids.setdefault(prefix, len(ids)) for prefix in prefixes] if chained else text
        rows.append(request(*blocks))
    programs = read(write(tmp_path_factory.mktemp("m") / "m.jsonl", rows))
    for left, one in zip(programs, rows, strict=True):
        for right, other in zip(programs, rows, strict=True):
            if left is not right:
                assert shared(left, right) == common(one, other)


def test_arrivals_count_from_the_earliest_in_any_order(tmp_path: Path) -> None:
    rows = [request(1, at_ms=900.5), request(2, at_ms=400)]
    assert [p.arrival_s for p in read(write(tmp_path / "m.jsonl", rows))] == [0.5005, 0.0]
    path = tmp_path / "a.csv"
    path.write_text("GeneratedTokens,TIMESTAMP,ContextTokens\n1,2024-05-10 00:00:02.5+00:00,5\n"
                    "2,2024-05-10 00:00:00+00:00,6\n")  # fmt: skip
    assert [p.arrival_s for p in read(path)] == [2.5, 0.0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2023-11-16 18:17:04,0,8", r"a.csv:3: contexttokens is '0': expected a whole number from 1"),
        ("2023-11-16 18:17:04,7", r"a.csv:3: generatedtokens is '': expected a whole number"),
        ("yesterday,7,8", r"a.csv:3: timestamp is 'yesterday': expected a time such as"),
        ("2023-11-16 18:17:04,nan,8", r"a.csv:3: contexttokens is 'nan'"),
    ],
)
def test_a_wrong_azure_row_is_named_or_counted(row: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    good = "2023-11-16 18:17:03.9799600,4808,10\n"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{good}{row}\n{good}")
    with pytest.raises(InputError, match=says):
        read(path)
    report = ReadingReport()
    assert [program.program_id for program in read(path, report, lenient=True)] == ["request-1", "request-3"]
    assert report.dropped == {"malformed lines": 1}


def test_wrong_mooncake_lines_are_named_or_counted(tmp_path: Path) -> None:
    rows = [request(1), request(1, 2, tokens=400), {**request(1), "timestamp": -1}]
    path = write(tmp_path / "m.jsonl", rows)
    with pytest.raises(InputError, match=r"m.jsonl:2: hash_ids has 2 ids: expected at most 1"):
        read(path)
    report = ReadingReport()
    assert len(read(path, report, lenient=True)) == 1 and report.dropped["malformed lines"] == 2
