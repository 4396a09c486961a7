"""trace inspect, convert and fit: sharing, live programs, the KV working set, and the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentservesim.cli.main import app
from agentservesim.cli.run import expected_programs
from agentservesim.config import RunConfig, parse_config
from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload.formats import read_programs
from agentservesim.workload.live_profile import start_times
from agentservesim.workload.native_writer import write_native
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.statistics import inspect

SYS, DOC = PrefixGroup("sys", 100), PrefixGroup("doc", 50)


def program(name: str, arrival_s: float | None, gap_s: float | None = 10.0, prefix: object = ()) -> Program:
    turns = (
        Turn("a", 1000, 24, kept_output_tokens=24, gap_s=gap_s),
        Turn("b", 2000, 48, 1024, parents=(0,)),
    )
    return Program(name, turns, arrival_s, prefix)  # type: ignore[arg-type]


def test_start_times_with_forks_joins_and_delays() -> None:
    turns = (
        Turn("a", 9, 1, gap_s=2.0, pause_s=1.0),
        Turn("b", 9, 1, parents=(0,), tools=(ToolCall("x", 4.0), ToolCall("y", 6.0))),
        Turn("c", 9, 1, parents=(0,), gap_s=0.0, delay_s=5.0),
        Turn("d", 9, 1, parents=(1, 2), delay_s=0.5),
    )
    assert start_times(Program("p", turns)) == [0.0, 3.0, 8.0, 9.5]


def test_live_programs_and_what_they_hold() -> None:
    found = inspect([program("p", 0.0), program("q", 5.0), program("r", 30.0)])
    live, held = found.live_programs, found.live_context_tokens
    assert live is not None and held is not None
    assert live.max == 2 and live.mean == pytest.approx(30 / 40)
    assert held.mean == pytest.approx(3 * 10 * 1024 / 40)
    assert held.max == 2048 + 1024  # p's second call starts while q holds its first context
    assert found.last_context_tokens is not None and found.last_context_tokens.mean == 2048


def test_without_arrivals_there_is_no_profile() -> None:
    found = inspect([program("p", 0.0), program("q", None)])
    assert found.live_programs is None and found.live_context_tokens is None
    assert found.last_context_tokens is not None and found.last_context_tokens.max == 2048
    assert inspect([]).live_programs is None


def test_sharing_counts_beginnings_that_others_have() -> None:
    work = [
        program("p", None, prefix=(SYS, DOC)),
        program("q", None, prefix=(SYS, DOC)),
        program("r", None, prefix=(SYS,)),
        program("s", None, prefix=(DOC, SYS)),  # the same groups, but not at the same place
    ]
    sharing = inspect(work).sharing
    assert (sharing.groups, sharing.programs, sharing.tokens) == (2, 3, 3 * 100 + 2 * 50)


def test_unknown_times_and_gaps_are_said() -> None:
    untimed = Program(
        "u", (Turn("a", 9, 1, tools=(ToolCall("x", 0.0),)), Turn("b", 9, 1, parents=(0,), gap_s=None)), 0.0
    )
    found = inspect([untimed, program("v", 0.0, gap_s=None), program("w", 0.0, gap_s=0.0)])
    assert [w.split(":")[0] for w in found.warnings] == [
        "1 gaps have tools, but no time for them",
        "1 gaps have neither a tool nor a recorded length",
    ]


def test_a_fresh_sub_agent_is_no_compaction() -> None:
    turns = (
        Turn("a", 1000, 1, gap_s=1.0),
        Turn("agent", 100, 1, 0, parents=(0,), gap_s=1.0),
        Turn("b", 1100, 1, 1000, parents=(0, 1), gap_s=1.0),
    )
    assert inspect([Program("p", turns, 0.0)]).warnings == []
    compacted = (*turns, Turn("c", 200, 1, 100, parents=(2,)))
    assert inspect([Program("p", compacted, 0.0)]).warnings[0].startswith("1 prompts are below 60%")


# --- commands --------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "work.jsonl"
    write_native([program(f"secret-{n}", 5.0 * n, prefix=(SYS,)) for n in range(5)], path)
    return path


def test_inspect_says_the_working_set_of_a_model(trace: Path) -> None:
    small = json.loads(invoke("trace", "inspect", str(trace), "--json")[0])
    large = json.loads(invoke("trace", "inspect", str(trace), "--model", "llama-3.1-70b", "--json")[0])
    assert small["kv_working_set"]["bytes_per_token"] == 131072 == 2 * 32 * 8 * 128 * 2
    assert small["kv_working_set"]["program_mean_gib"] == 2048 * 131072 / 2**30
    assert large["kv_working_set"]["max_gib"] == 2.5 * small["kv_working_set"]["max_gib"]
    shown = invoke("trace", "inspect", str(trace))[0]
    assert "in 5 programs" in shown and "KV for llama-3.1-8b" in shown
    with pytest.raises(InputError, match=r"llama-3\.1-9b.*did you mean"):
        invoke("trace", "inspect", str(trace), "--model", "llama-3.1-9b")


def test_convert_records_its_transforms(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    change = ["--transform", "take:programs=4", "--transform", "sample:programs=2,seed=1"]
    said = invoke("trace", "convert", str(trace), "-o", str(out), *change, "--anonymize")[1]
    assert "transform: take(programs=4)\n  transform: sample(programs=2, seed=1)" in said
    assert "written: 2 programs" in said
    text = out.read_text()
    assert "secret" not in text and '"p0001"' in text and '"prefix-1"' in text


def test_convert_without_flags_is_the_identity(trace: Path, tmp_path: Path) -> None:
    invoke("trace", "convert", str(trace), "-o", str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == trace.read_bytes()


def test_fit_writes_a_workload(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit.yaml"
    invoke("trace", "fit", str(trace), "-o", str(out), "--name", "mine", "--anonymize")
    assert "secret" not in out.read_text()
    found = json.loads(invoke("trace", "inspect", str(out), "--json")[0])
    assert found["programs"] == 5 and found["calls"] == 10 and found["sharing"]["programs"] == 5
    with pytest.raises(InputError, match="is also an input"):
        invoke("trace", "fit", str(trace), "-o", str(trace))


def config(source: Path, **workload: object) -> RunConfig:
    cluster = {"gpu": "h100_sxm", "model": "llama-3.1-8b"}
    return parse_config({"workload": {"source": str(source), **workload}, "cluster": cluster})


def test_expected_programs_only_where_a_line_is_a_program(trace: Path, tmp_path: Path) -> None:
    assert expected_programs(config(trace)) == 5
    assert expected_programs(config(trace, programs=3)) == 3
    assert expected_programs(config(trace, programs=3, transforms=["take:programs=1"])) is None
    for line, number in (
        ('{"session_id": "s", "sub_requests": []}', 2),
        ('{"session_id": "s", "round": 1}', None),  # TraceLab: a line a round
    ):
        path = tmp_path / "lines.jsonl"
        path.write_text(f"{line}\n{line}\n")
        assert expected_programs(config(path)) == number
    fit = tmp_path / "fit.yaml"
    invoke("trace", "fit", str(trace), "-o", str(fit))
    assert expected_programs(config(fit)) == 5


@pytest.mark.data
def test_weka_sub_agents_are_no_compactions(data_dir: Path) -> None:
    report = ReadingReport()
    found = inspect(read_programs(data_dir / "traces/weka", report), report)
    compactions = [w for w in found.warnings if "compactions" in w]
    assert len(compactions) == 1 and compactions[0].startswith("2 prompts")
