"""Mutated samples of every format: a clear error or a counted skip, never anything else."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agentservesim.errors import InputError
from agentservesim.programs.program import Program
from agentservesim.workload.formats import READERS, read_programs, recognise
from agentservesim.workload.report import ReadingReport

pytestmark = pytest.mark.data

FAST_INPUTS = 400
SLOW_INPUTS = 24_000
LIMIT_S = 10.0
"""Far more than any of these inputs needs, on any machine."""

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 10**400, 0.5, -0.0, 1e308, -1e-9, "", "x", "1", "NaN",
    "2026-06-01T05:40:20.151Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", [], {}, [None], [[]], {"": 1},
    {"type": "x"}, "\ud800", "\x00", float("nan"), float("inf"),
]  # fmt: skip


def cut(value: Any, depth: int = 0) -> Any:
    """A JSON value with short lists and texts."""
    if isinstance(value, list):
        return [cut(item, depth + 1) for item in value[:7]]
    if isinstance(value, dict):
        return {key: cut(item, depth + 1) for key, item in value.items()}
    return value[:60] if isinstance(value, str) else value


Sample = list[Any]
"""The lines of a small sample: JSON values, or texts for a CSV."""


def small(path: Path) -> Sample:
    text = path.read_text()
    if not text.lstrip().startswith(("{", "[")):
        return text.splitlines()[:12]
    try:
        return [cut(json.loads(text))]
    except ValueError:
        return [cut(json.loads(line)) for line in text.splitlines()[:40]]


def as_bytes(sample: Sample) -> bytes:
    lines = (item if isinstance(item, str) else json.dumps(item) for item in sample)
    return "".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="session")
def samples(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    """Small samples of all formats, by path; each is still read."""
    found: dict[str, Sample] = {}
    for path in sorted((data_dir / "traces").rglob("*")):
        if path.is_file():
            found[f"{path.parent.name}/{path.name}"] = small(path)
    readers = {recognise(path).NAME for path in (data_dir / "traces").rglob("*") if path.is_file()}
    assert readers >= {reader.NAME for reader in READERS} - {"llmservingsim"}
    call = {"input_toks": 9, "output_toks": 2, "tool_duration_ns": 5}
    session = {"session_id": "s", "arrival_time_ns": 1, "sub_requests": [call, {**call, "input_toks": 12}]}
    nodes = [{"node_id": name, **call} for name in "abc"]
    dag = {"workflow_id": "w", "nodes": nodes, "edges": [{"src": "a", "dst": "b", "delay_ns": 7}]}
    found["llmservingsim"] = [session, dag, {"session_id": "f", **call}]
    return found


def attempt(
    raw: bytes, path: Path, format: str | None, lenient: bool
) -> tuple[list[Program] | None, ReadingReport]:
    """The programs of a file, None after an InputError; anything else fails the test."""
    path.write_bytes(raw)
    report = ReadingReport()
    started = time.perf_counter()
    try:
        programs = list(read_programs(path, report, format, lenient))
    except InputError as error:
        if not str(error).startswith(str(path)):
            raise AssertionError("the error does not name the file") from error
        return None, report
    finally:
        assert time.perf_counter() - started < LIMIT_S
    for program in programs:
        for turn in program.turns:
            times = [turn.wait_s(), turn.delay_s, turn.pause_s, *(tool.duration_s for tool in turn.tools)]
            assert all(math.isfinite(value) and value >= 0 for value in times)
    assert report.programs == len(programs)
    return programs, report


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(value, key) for key, _ in items] + [place for _, below in items for place in places(below)]


def changed(sample: Sample, chance: random.Random) -> Sample:
    """The sample with one to three values replaced, deleted, repeated or renamed."""
    lines: Sample = json.loads(json.dumps(sample))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        spots = places(lines)
        if not spots:
            break
        holder, key = chance.choice(spots)
        kind = chance.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), holder[key])
        elif kind == 2 and isinstance(holder, dict):
            holder[chance.choice(("type", "t", "id", "x", key + "x"))] = holder.pop(key)
        elif kind == 3 and isinstance(holder[key], int | float) and abs(holder[key]) < 1e300:
            holder[key] = holder[key] * chance.choice((-1, 0, 1e-3, 1e6, 1e300))
        else:
            holder[key] = chance.choice(ODD_VALUES)
    return lines


def mangled(raw: bytes, chance: random.Random) -> bytes:
    """The bytes with one to eight of them changed, cut, repeated or inserted."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            data[at:at] = chance.choice(
                (b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"9", b"\n", b"\xff", b"\0")
            )
        elif kind == 2:
            del data[at : at + chance.randint(1, 40)]
        elif kind == 3:
            data[at:at] = data[at : at + chance.randint(1, 200)]
        elif kind == 4 and chance.random() < 0.2:
            del data[at:]
        else:
            data[at : at + 1] = chance.choice((b"1", b"e", b".", b"t", b" "))
    return bytes(data)


def try_many(samples: dict[str, Sample], path: Path, first: int, inputs: int) -> int:
    """How many of the inputs were still read as programs."""
    names = sorted(samples)
    raws = {name: as_bytes(sample) for name, sample in samples.items()}
    reader_of = {}
    for name, raw in raws.items():
        path.write_bytes(raw)
        reader_of[name] = recognise(path).NAME
    read = 0
    failures: list[str] = []
    for seed in range(first, first + inputs):
        chance = random.Random(seed)
        name = names[seed % len(names)]
        raw = (
            mangled(raws[name], chance) if chance.random() < 0.5 else as_bytes(changed(samples[name], chance))
        )
        format = reader_of[name] if chance.random() < 0.6 else None
        try:
            programs, _ = attempt(raw, path, format, lenient=chance.random() < 0.5)
        except Exception as error:
            failures.append(f"seed {seed}: {name}, format {format}: {type(error).__name__}: {error}")
            continue
        read += programs is not None
    assert not failures, "\n".join(failures[:20])
    return read


def test_every_small_sample_is_read(samples: dict[str, Sample], tmp_path: Path) -> None:
    for name, sample in samples.items():
        programs, report = attempt(as_bytes(sample), tmp_path / "w", None, lenient=False)
        assert programs and report.turns, name


def test_mutated_samples(samples: dict[str, Sample], tmp_path: Path) -> None:
    assert try_many(samples, tmp_path / "w", 0, FAST_INPUTS) > FAST_INPUTS // 20


@pytest.mark.slow
def test_many_mutated_samples(samples: dict[str, Sample], tmp_path: Path) -> None:
    assert try_many(samples, tmp_path / "w", 1_000_000, SLOW_INPUTS) > SLOW_INPUTS // 20


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_program_is_lost_unmentioned(
    samples: dict[str, Sample], tmp_path: Path, data: st.DataObject
) -> None:
    """One value replaced: as many programs as before, or an error, or something counted as dropped."""
    name = data.draw(st.sampled_from(sorted(samples)))
    path = tmp_path / "w"
    raw = as_bytes(samples[name])
    before, _ = attempt(raw, path, None, lenient=False)
    assert before is not None
    reader = recognise(path).NAME
    lines: Sample = json.loads(json.dumps(samples[name]))
    spots = places(lines)
    holder, key = spots[data.draw(st.integers(0, len(spots) - 1))]
    value = ODD_VALUES[data.draw(st.integers(0, len(ODD_VALUES) - 1))]
    assume(holder is not lines or value != "")  # a blank line is none
    holder[key] = value
    for lenient in (False, True):
        programs, report = attempt(as_bytes(lines), path, reader, lenient)
        if programs is not None and len(programs) < len(before):
            assert sum(report.dropped.values()), (name, key, holder[key])


KEYS = (
    "type", "payload", "id", "timestamp", "content", "message", "uuid", "sessionId", "program_id", "turns",
    "session_id", "sub_requests", "workflow_id", "nodes", "input_toks", "requests", "hash_ids", "block_size",
    "trajectory", "info", "messages", "resourceSpans", "spans", "attributes", "input_length",
    "trajectory_format",
)  # fmt: skip
ODD_RECORDS = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD_VALUES))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(
        st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD_VALUES)), min_size=1, max_size=3
    )
)
def test_records_of_no_format_are_refused_in_words(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """Keys of every format with values of any type: each reader looks at them before it is chosen."""
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        list(read_programs([path], ReadingReport()))
    except InputError as error:
        assert "odd.jsonl" in str(error)
