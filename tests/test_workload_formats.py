"""What holds for all formats: recognition, folders, globs, gzip, stdin, ids, leniency, pauses, round trip."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentservesim.cli.main import app
from agentservesim.config import ArrivalsConfig, WorkloadConfig
from agentservesim.errors import InputError
from agentservesim.programs.program import Program, Turn
from agentservesim.workload import load_all, load_programs
from agentservesim.workload.arrivals import open_loop
from agentservesim.workload.formats import (
    BROKEN,
    EMPTY,
    PAUSE_CAPPED,
    READERS,
    RENAMED,
    UNRECOGNISED,
    WITHOUT_PROGRAMS,
    _lines,
    find_files,
    read_programs,
    recognise,
)
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport

PROGRAM = {"program_id": "p", "turns": [{"prompt_tokens": 10, "output_tokens": 2, "pause_s": 90, "gap_s": 5}]}
SESSION = {"session_id": "p", "sub_requests": [{"input_toks": 5, "output_toks": 1}]}

OF_FOLDER = {
    "native": "native",
    "mini_swe_agent": "mini-swe-agent",
    "weka": "weka",
    "claude_code": "claude-code",
    "codex": "codex",
    "tracelab": "tracelab",
    "agentic_swarm_bench": "agentic-swarm-bench",
    "swe_agent": "swe-agent",
    "otel_genai": "otel-genai",
    "mooncake": "mooncake",
    "azure": "azure",
}


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(source: Any, report: ReadingReport | None = None, **options: Any) -> list[Program]:
    return list(read_programs(source, report if report is not None else ReadingReport(), **options))


def sample_files(data_dir: Path) -> list[Path]:
    return sorted(path for path in (data_dir / "traces").rglob("*") if path.is_file())


# --- the samples -----------------------------------------------------------------------------------------


@pytest.mark.data
def test_every_sample_is_recognised_whatever_its_name(data_dir: Path, tmp_path: Path) -> None:
    for path in sample_files(data_dir):
        assert OF_FOLDER[path.parent.name] == recognise(path).NAME, path
        link = tmp_path / "x"
        link.symlink_to(path)
        assert OF_FOLDER[path.parent.name] == recognise(link).NAME, path
        link.unlink()


@pytest.mark.data
def test_no_reader_takes_the_files_of_another(data_dir: Path) -> None:
    """The order of the table decides nothing but for the counts of mini-swe-agent, which look native."""
    from agentservesim.workload.formats import Source

    for path in sample_files(data_dir):
        takers = {reader.NAME for reader in READERS if reader.recognises(Source(path).head)}
        assert takers - {OF_FOLDER[path.parent.name]} <= {"native"}, path


@pytest.mark.data
def test_gzip_and_the_native_round_trip_are_the_identity(data_dir: Path, tmp_path: Path) -> None:
    for path in sample_files(data_dir):
        programs = read(path)
        native, packed = tmp_path / "n.jsonl", tmp_path / path.name
        write_native(programs, native)
        assert read(native) == programs, path
        again = native.read_bytes()
        write_native(read_programs(native, ReadingReport()), native)
        assert native.read_bytes() == again
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert read(packed) == programs, path


@pytest.mark.data
def test_the_whole_folder_reads_as_one_workload(data_dir: Path) -> None:
    report = ReadingReport()
    programs = read(data_dir / "traces", report)
    assert len({program.program_id for program in programs}) == len(programs) == report.programs
    assert report.turns == sum(len(read_one.turns) for read_one in programs)
    assert not report.dropped[UNRECOGNISED] and not report.dropped[WITHOUT_PROGRAMS]
    alone = [program for path in sample_files(data_dir) for program in read(path)]
    assert [program.turns for program in alone] == [program.turns for program in programs]


# --- where files come from -------------------------------------------------------------------------------


def test_folder_glob_and_list_give_the_same_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a.jsonl", "b/1.log"):
        write(tmp_path / name, {**PROGRAM, "program_id": name})
    names = ["a.jsonl", "b/1.log", "b/2.jsonl"]
    assert [p.program_id for p in read(tmp_path)] == names
    assert [p.program_id for p in read(f"{tmp_path}/**/*[.]*")] == names
    assert [p.program_id for p in read([tmp_path / "a.jsonl", tmp_path / "b"])] == names
    assert find_files(f"{tmp_path}/b") == [tmp_path / "b/1.log", tmp_path / "b/2.jsonl"]
    with pytest.raises(InputError, match="no such file; expected a workload file, a folder"):
        read(f"{tmp_path}/*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="the folder is empty"):
        read(tmp_path / "empty")


def test_what_is_no_trace_is_counted_and_nothing_recognised_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "notes.md", "# notes")
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "image").write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="none of the 3 files is recognised"):
        read(tmp_path)
    write(tmp_path / "w.jsonl", PROGRAM)
    report = ReadingReport()
    assert len(read(tmp_path, report)) == 1
    assert report.dropped == {UNRECOGNISED: 2, EMPTY: 1}


def test_stdin_pipes_and_gzip_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write(tmp_path / "w.jsonl", PROGRAM).read_bytes()

    class Input:
        buffer = io.BytesIO(gzip.compress(raw))

    monkeypatch.setattr(sys, "stdin", Input)
    _lines._standard_input.cache_clear()
    assert read("-") == read("-") == read(tmp_path / "w.jsonl")  # it may be read twice
    Input.buffer = io.BytesIO(b"what\n")
    _lines._standard_input.cache_clear()
    with pytest.raises(InputError, match="<stdin>:1: the first line is 'what'"):
        read("-")
    _lines._standard_input.cache_clear()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(raw))
    writer.start()
    assert read(pipe) == read(tmp_path / "w.jsonl")
    writer.join()


def test_ids_that_clash_are_prefixed_with_the_files_name(tmp_path: Path) -> None:
    for name in ("a", "b", "sub/b"):
        write(tmp_path / f"{name}.jsonl", PROGRAM)
    report = ReadingReport()
    assert [p.program_id for p in read(tmp_path, report)] == ["p", "b/p", "b/p~2"]
    assert report.inferred == {RENAMED: 2}
    workload = load_all(["examples/bfcl-like", str(tmp_path / "a.jsonl"), "examples/bfcl-like"])
    programs = list(workload.programs)
    assert programs[0].program_id == "p" and len({p.program_id for p in programs}) == len(programs)
    assert workload.report.programs == len(programs)


def test_format_overrides_and_wrong_names_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "w", SESSION)
    assert read(path, format="llmservingsim")[0].program_id == "p"
    with pytest.raises(InputError, match=r"w:1: unknown key 'session_id'"):
        read(path, format="native")
    with pytest.raises(InputError, match=r"workload.format is 'wekka' \(did you mean 'weka'\?\)"):
        read(path, format="wekka")


# --- lenient, pauses, arrivals ---------------------------------------------------------------------------


def test_lenient_skips_and_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", PROGRAM, "{broken", {**PROGRAM, "program_id": "q"})
    write(tmp_path / "b.json", json.dumps({"id": "x", "block_size": 64, "requests": [{"type": "n"}]}))
    with pytest.raises(InputError, match=r"a.jsonl:2: malformed JSON"):
        read(tmp_path)
    report = ReadingReport()
    assert [p.program_id for p in read(tmp_path, report, lenient=True)] == ["p", "q"]
    assert report.dropped == {"malformed lines": 2, WITHOUT_PROGRAMS: 1}
    path.write_bytes(gzip.compress(path.read_bytes())[:-9])
    report = ReadingReport()
    read(tmp_path / "a.jsonl", report, lenient=True)
    assert report.dropped[BROKEN] == 1
    config = WorkloadConfig(source=str(tmp_path), lenient=True)
    assert load_programs(config).report.dropped == {}  # nothing is read yet
    with pytest.raises(InputError, match=r"b.json: holds no programs \(1 × malformed lines"):
        read(tmp_path / "b.json", lenient=True)


def test_pauses_are_capped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", PROGRAM)
    report = ReadingReport()
    (program,) = read(path, report, max_pause_s=60)
    assert (program.turns[0].gap_s, program.turns[0].pause_s) == (5, 60)
    assert report.clamped == {PAUSE_CAPPED: 1}
    report = ReadingReport()
    assert read(path, report, max_pause_s=90) == read(path) and not report.clamped
    config = WorkloadConfig(source=str(path), max_pause_s=0)
    assert next(load_programs(config).programs).turns[0].pause_s == 0


def test_dates_count_from_the_earliest(tmp_path: Path) -> None:
    def arrivals(*times: float) -> list[float]:
        programs = [Program(str(i), (Turn("t", 1, 1),), at) for i, at in enumerate(times)]
        return [time_s for time_s, _ in open_loop(programs, ArrivalsConfig())]

    assert arrivals(1.78e9 + 7, 1.78e9) == [0, 7]
    assert arrivals(9, 5) == [5, 9]  # seconds since the run's start stay


def test_delay_is_written_and_read(tmp_path: Path) -> None:
    turns = (Turn("a", 9, 1), Turn("b", 9, 1, parents=(0,), delay_s=2.5))
    write_native([Program("p", turns)], tmp_path / "w")
    assert read(tmp_path / "w")[0].turns == turns


# --- the command line ------------------------------------------------------------------------------------


def invoke(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, catch_exceptions=False)


@pytest.mark.data
def test_one_command_from_a_folder_of_sessions_to_a_table(data_dir: Path, tmp_path: Path) -> None:
    for name in ("claude_code/session.jsonl", "codex/rollout.jsonl"):
        link = tmp_path / "projects" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(data_dir / "traces" / name)
    write(tmp_path / "projects/readme.txt", "hello")
    shown = invoke("run", str(tmp_path / "projects"), "--max-pause", "60")
    assert shown.exit_code == 0 and "JCT" in shown.output and "2 of 2 completed" in shown.output
    assert "recorded arrivals" in shown.stderr and "1 × files that no reader recognises" in shown.stderr
    plain = json.loads(
        invoke(
            "run",
            str(data_dir / "traces/weka/*.json"),
            "--json",
            "--set",
            "workload.programs=2",
            "--set",
            "workload.arrivals.process=closed_loop",
            "--set",
            "workload.arrivals.lanes=1",
        ).stdout
    )
    assert plain["programs_completed"] == 2 and plain["calls"] == 30 + 55


@pytest.mark.data
def test_inspect_and_convert_take_folders(data_dir: Path, tmp_path: Path) -> None:
    plain = json.loads(invoke("trace", "inspect", "--json", str(data_dir / "traces/codex")).stdout)
    assert (plain["programs"], plain["calls"], plain["prompt_tokens"]) == (1, 9, 95_819)
    out = tmp_path / "out.jsonl"
    done = invoke("trace", "convert", str(data_dir / "traces/codex"), "-o", str(out), "--max-pause", "1")
    assert "clamped: 2 × pauses longer than the cap" in done.stderr
    assert max(turn.pause_s for turn in read(out)[0].turns) == 1
    with pytest.raises(InputError, match="is also an input"):
        invoke("trace", "convert", str(tmp_path), "-o", str(out))


def test_a_trace_without_times_gets_a_rate_that_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "w", {**SESSION, "sub_requests": [{"input_toks": 200_000, "output_toks": 5}]})
    shown = invoke("run", str(path), "--json")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["calls_refused"] == 0
    assert "poisson arrivals at 0.04 programs/s" in shown.stderr and "max_model_len 200005" in shown.stderr


def test_what_is_neither_config_nor_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config 'examples/b200-8b': no such file \(did you mean"):
        invoke("run", "examples/b200-8b")
    with pytest.raises(InputError, match="expected a mapping with sections"):
        invoke("run", str(write(tmp_path / "w", "hello there")))
