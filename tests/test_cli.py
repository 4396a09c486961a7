"""The command line: files and keys that other tools rely on, and what a user is told about a wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import yaml

from agentservesim import __version__
from agentservesim.cli.main import main
from helpers import FILES, chain, cli, program, turn, write_native

CONFIG = """\
workload:
  source: work.jsonl
  arrivals: {process: recorded}
cluster:
  gpu: b200_sxm
  model: llama-3.1-8b
  kv_cache_tokens: 65536
  instances: 1
engine:
  max_num_seqs: 8
  block_size: 16
policies:
  retention: lru
  scheduling: fcfs
  admission: none
  routing: session-affinity
step_time:
  backend: linear
  base_s: 0.01
output_reuse: deployment
"""

SUMMARY_KEYS = {
    "programs", "programs_completed", "calls", "calls_refused", "jct_mean_s", "jct_p50_s",
    "jct_p90_s", "jct_p99_s", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s",
    "tpot_p50_s", "tpot_p99_s", "call_latency_mean_s", "queue_mean_s", "makespan_s",
    "output_tokens", "output_tokens_per_s", "prompt_tokens", "prefix_hit_tokens", "prefix_hit_rate",
    "preemptions", "protected_reclaims", "kv_utilization_mean", "kv_utilization_max",
    "energy_joules", "engine_steps", "sim_wall_s", "peak_rss_bytes", "step_time",
}  # fmt: skip
CALL_COLUMNS = {
    "program_id", "turn_id", "instance", "released_s", "scheduled_s", "first_token_s",
    "completed_s", "prompt_tokens", "output_tokens", "hit_tokens", "preemptions",
}  # fmt: skip


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: a config, its workload and nothing else."""
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    write_native(tmp_path / "work.jsonl", [chain("a", 3, gap_s=0.1), chain("b", 2, arrival_s=0.05)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def invoke(folder, monkeypatch, capsys):
    """Run the installed command in this process. An error not meant for the user fails the test."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["agentservesim", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(ended.value.code or 0, captured.out, captured.err)

    return run


def line_of(key):
    """The 1-based line of a key in CONFIG."""
    return next(n for n, line in enumerate(CONFIG.splitlines(), start=1) if line.split(":")[0].strip() == key)


def with_line(folder, key, replacement):
    """CONFIG with the line of `key` replaced; returns where that is, 'run.yaml:N'."""
    number = line_of(key)
    lines = CONFIG.splitlines()
    lines[number - 1] = replacement
    (folder / "run.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"run.yaml:{number}"


def assert_refused(done, *fragments):
    """Exit 2, one message on stderr that holds all of this, and nothing on stdout."""
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: ") and done.err.endswith("\n")
    assert "Traceback" not in done.err
    for fragment in fragments:
        assert fragment in done.err, f"{fragment!r} is missing in: {done.err}"


# --- what a wrong config is told -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "replacement", "fragments"),
    [
        ("instances", "  instnces: 2", ["cluster.instnces", "did you mean 'instances'", "kv_cache_tokens"]),
        ("output_reuse", "output_reus: replay", ["output_reus", "did you mean 'output_reuse'", "workload"]),
        ("arrivals", "  arrivals: {process: poisson, rate: 2}", ["workload.arrivals.rate", "rate_per_s"]),
        (
            "arrivals",
            "  arrivals: {process: poison}",
            ["workload.arrivals.process", "'poison'", "did you mean 'poisson'"],
        ),
        ("arrivals", "  arrivals: {process: poisson}", ["workload.arrivals", "rate_per_s"]),
        ("arrivals", "  arrivals: {process: closed_loop}", ["workload.arrivals", "lanes"]),
        (
            "arrivals",
            "  arrivals: {process: poisson, rate_per_s: -1}",
            ["rate_per_s", "-1", "greater than 0"],
        ),
        ("block_size", "  block_size: -16", ["engine.block_size", "-16", "greater than or equal to 1"]),
        ("block_size", "  block_size: 1.5", ["engine.block_size", "1.5", "integer"]),
        ("block_size", "  block_size: sixteen", ["engine.block_size", "'sixteen'", "integer"]),
        (
            "kv_cache_tokens",
            "  kv_cache_tokens: 0",
            ["cluster.kv_cache_tokens", "0", "greater than or equal to 1"],
        ),
        (
            "backend",
            "  backend: liner",
            ["step_time.backend", "'liner'", "did you mean 'linear'", "roofline"],
        ),
        ("base_s", "  base_s: .nan", ["step_time.base_s", "nan", "finite"]),
        ("output_reuse", "output_reuse: no", ["output_reuse", "False", "deployment"]),
    ],
)
def test_a_wrong_key_or_value_names_its_line(folder, invoke, key, replacement, fragments):
    where = with_line(folder, key, replacement)
    assert_refused(invoke("run", "run.yaml"), where, *fragments)


@pytest.mark.parametrize(
    ("key", "replacement", "fragments"),
    [
        ("gpu", "  gpu: h100", ["cluster.gpu", "'h100'", "did you mean 'h100_", "b200_sxm", "l40s"]),
        (
            "model",
            "  model: llama-3.1-8",
            ["cluster.model", "'llama-3.1-8'", "did you mean 'llama-3.1-8b'", "qwen3-32b"],
        ),
        (
            "source",
            "  source: examples/swebench",
            ["workload.source", "did you mean 'examples/swebench-like'"],
        ),
        (
            "source",
            "  source: work.jsonl\n  format: nativ",
            ["workload.format", "'nativ'", "did you mean 'native'"],
        ),
        ("retention", "  retention: tll", ["retention policy", "'tll'", "did you mean 'ttl'", "min-waste"]),
        ("retention", "  retention: {ttl: {tau: 2}}", ["ttl", "'tau'", "did you mean 'tau_s'", "until"]),
        ("scheduling", "  scheduling: lru", ["scheduling", "lru", "retention axis", "plas"]),
        (
            "admission",
            "  admission: program_cap",
            ["admission", "'program_cap'", "did you mean 'program-cap'"],
        ),
        ("routing", "  routing: least-load", ["routing", "'least-load'", "did you mean 'least-loaded'"]),
        ("kv_cache_tokens", "  kv_cache_tokens: 20", ["cluster.kv_cache_tokens", "20", "32"]),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_the_choices(folder, invoke, key, replacement, fragments):
    with_line(folder, key, replacement)
    assert_refused(invoke("run", "run.yaml"), *fragments)


@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("gpu", "  gpu: h100"),
        ("model", "  model: llama-3.1-8"),
        ("source", "  source: nowhere.jsonl"),
        ("retention", "  retention: tll"),
        ("scheduling", "  scheduling: {plas: {x: 1}}"),
    ],
)
def test_a_name_that_does_not_exist_names_its_file_and_line(folder, invoke, key, replacement):
    where = with_line(folder, key, replacement)
    assert_refused(invoke("run", "run.yaml"), where)


def test_the_nearest_gpu_is_the_one_whose_name_goes_on(folder, invoke):
    """'b200' is b200_sxm cut short, not gb200."""
    with_line(folder, "gpu", "  gpu: b200")
    assert_refused(invoke("run", "run.yaml"), "did you mean 'b200_sxm'")


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ("", ["run.yaml", "mapping", "workload"]),
        ("- a\n", ["run.yaml", "mapping", "workload"]),
        ("workload: {source: x\n", ["run.yaml", "not valid YAML", "line 2"]),
        ("workload: {source: work.jsonl}\n", ["run.yaml", "missing key 'cluster'"]),
        (
            "workload: {}\ncluster: {gpu: b200_sxm}\n",
            ["run.yaml:1", "workload.source", "run.yaml:2", "cluster.model"],
        ),
        ("workload: 3\ncluster: {gpu: b200_sxm, model: llama-3.1-8b}\n", ["run.yaml:1", "workload is 3"]),
        ("a: 2001-99-99\n", ["run.yaml", "not valid YAML"]),
    ],
    ids=["empty", "a list", "malformed", "section missing", "keys missing", "no section", "impossible date"],
)
def test_a_config_that_is_none(folder, invoke, content, fragments):
    (folder / "run.yaml").write_text(content, encoding="utf-8")
    assert_refused(invoke("run", "run.yaml"), *fragments)


def test_two_keys_that_do_not_go_together_name_their_section(folder, invoke):
    with_line(folder, "max_num_seqs", "  max_num_seqs: 99999")
    where = f"run.yaml:{line_of('engine')}"
    assert_refused(invoke("run", "run.yaml"), where, "max_num_seqs (99999)", "max_num_batched_tokens (8192)")


def test_all_problems_are_told_at_once(folder, invoke):
    (folder / "run.yaml").write_text(
        CONFIG.replace("block_size", "blocksize").replace("tokens: 65536", "tokens: -1")
    )
    assert_refused(invoke("run", "run.yaml"), "engine.blocksize", "cluster.kv_cache_tokens is -1")


def test_a_config_that_cannot_be_read(folder, invoke):
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert_refused(invoke("run", "bytes.yaml"), "bytes.yaml", "utf-8")
    assert_refused(invoke("run", "missing.yaml"), "'missing.yaml'", "no such file", "examples/b200-8b-tp1")
    assert_refused(invoke("run", "examples/b200-8b-tp"), "did you mean 'examples/b200-8b-tp1'")
    (folder / "empty").mkdir()
    assert_refused(invoke("run", "empty"), "empty", "the folder is empty")
    assert_refused(invoke("run", "x" * 300), "x" * 300)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("cluster.instances", ["--set cluster.instances", "section.key=value"]),
        ("=3", ["--set =3", "section.key=value"]),
        ("cluster..tp=1", ["--set cluster..tp=1", "section.key=value"]),
        ("cluster.instances=0", ["--set cluster.instances=0", "greater than or equal to 1"]),
        ("cluster.instnces=2", ["--set cluster.instnces=2", "did you mean 'instances'"]),
        ("clustr.instances=2", ["--set clustr.instances=2", "did you mean 'cluster'"]),
        ("cluster=2", ["--set cluster=2", "cluster is 2"]),
        ("cluster.tp=[1", ["--set cluster.tp=[1", "not valid YAML"]),
        ("policies.retention=5", ["--set policies.retention=5", "policies.retention is 5"]),
    ],
)
def test_a_wrong_override(invoke, override, fragments):
    assert_refused(invoke("run", "run.yaml", "--set", override), *fragments)


def test_overrides_and_options_reach_the_run(folder, invoke):
    done = invoke(
        "run",
        "run.yaml",
        "--set",
        "cluster.instances=3",
        "--set",
        "policies.retention.ttl.tau_s=4",
        "--set",
        "engine.max_model_len=2048",
        "--routing",
        "round-robin",
        "--scheduling",
        "plas",
        "--out",
        "out",
    )
    assert done.code == 0
    resolved = yaml.safe_load((folder / "out" / "config.yaml").read_text())
    assert resolved["cluster"]["instances"] == 3 and resolved["engine"]["max_model_len"] == 2048
    assert resolved["policies"] == {
        "retention": {"ttl": {"tau_s": 4}},
        "scheduling": "plas",
        "admission": "none",
        "routing": "round-robin",
    }
    assert set(pq.read_table(folder / "out" / "calls.parquet")["instance"].to_pylist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "arguments", [["run"], ["nothing"], ["run", "run.yaml", "--nothing"], ["trace", "convert", "x"]]
)
def test_a_wrong_command_line(invoke, arguments):
    done = invoke(*arguments)
    assert done.code == 2 and done.out == "" and "Usage: agentservesim" in done.err


# --- what a wrong workload is told -----------------------------------------------------------------------

GOOD = {"program_id": "good", "arrival_s": 0, "turns": [turn(8, 1)]}


def turns_of(*entries, **more):
    return program("bad", entries, **more)


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        (turns_of(turn(-5, 1)), ["turns[0].prompt_tokens is -5", ">= 1"]),
        (turns_of(turn(0, 1)), ["turns[0].prompt_tokens is 0", ">= 1"]),
        (turns_of(turn(1.5, 1)), ["turns[0].prompt_tokens is 1.5", "expected int"]),
        (turns_of(turn("8", 1)), ["turns[0].prompt_tokens is '8'", "expected int"]),
        (turns_of(turn(8, 1), turn(8, -1)), ["turns[1].output_tokens is -1", ">= 0"]),
        (turns_of(turn(8, True)), ["turns[0].output_tokens is True", "expected int"]),
        (turns_of(turn(8, 1, gap_s=-0.1)), ["turns[0].gap_s is -0.1", ">= 0"]),
        (
            turns_of(turn(8, 1, tools=[{"name": "ls", "duration_s": -2}])),
            ["turns[0].tools[0].duration_s is -2", ">= 0"],
        ),
        (turns_of(turn(8, 1, kept_output_tokens=2)), ["kept_output_tokens is 2", "at most", "1"]),
        (turns_of(turn(8, 1), turn(8, 1, reuse_tokens=9)), ["turns[1].reuse_tokens is 9", "at most", "8"]),
        (turns_of(turn(8, 1, prompt_token=8)), ["turns[0].prompt_token", "did you mean 'prompt_tokens'"]),
        (turns_of(turn(8, 1, parents=["t9"])), ["turns[0].parents[0] is 't9'", "turn_id"]),
        (turns_of(turn(8, 1, parents=[1]), turn(8, 1, parents=[0])), ["parents", "cycle", "t0, t1"]),
        (turns_of(turn(8, 1, parents=[0])), ["parents", "cycle", "t0"]),
        (turns_of(), ["turns is []", ">= 1"]),
        (turns_of(turn(8, 1), prefix=[{"id": "s", "tokens": 9}]), ["prefix is 9 tokens", "8"]),
        ({**GOOD, "arrival_s": -3}, ["arrival_s is -3", ">= 0"]),
        (GOOD, ["program id 'good'", "line 1", "once"]),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[0][:40],
)
def test_a_wrong_line_of_a_workload(folder, invoke, line, fragments):
    """The third line of the file, after a blank one."""
    text = f"{json.dumps(GOOD)}\n\n{json.dumps(line)}\n"
    (folder / "work.jsonl").write_text(text, encoding="utf-8")
    assert_refused(invoke("run", "run.yaml"), "work.jsonl:3", *fragments)
    assert_refused(invoke("trace", "inspect", "work.jsonl", "--json"), "work.jsonl:3", *fragments)


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ("", ["work.jsonl", "no programs", "at least one"]),
        ("\n \n", ["work.jsonl", "no programs", "at least one"]),
        ("hello\n", ["work.jsonl:1", "'hello'", "native"]),
        ('{"program_id": "p", "turns"', ["work.jsonl:1", "malformed JSON"]),
        (
            '{"program_id": "p", "arrival_s": NaN, "turns": []}',
            ["work.jsonl:1", "arrival_s is nan", "finite"],
        ),
    ],
)
def test_a_workload_that_is_none(folder, invoke, content, fragments):
    (folder / "work.jsonl").write_text(content, encoding="utf-8")
    assert_refused(invoke("run", "run.yaml"), *fragments)


def test_a_workload_that_cannot_be_read(folder, invoke):
    assert_refused(
        invoke("run", "run.yaml", "--set", "workload.source=nowhere.jsonl"), "nowhere.jsonl", "no such file"
    )
    (folder / "empty").mkdir()
    assert_refused(invoke("run", "run.yaml", "--set", "workload.source=empty"), "empty", "no programs")
    assert_refused(invoke("run", "run.yaml", "--set", f"workload.source={'x' * 300}"), "x" * 300)
    assert_refused(
        invoke("run", "run.yaml", "--set", "workload.programs=3"), "workload.programs is 3", "2", "work.jsonl"
    )
    assert_refused(invoke("trace", "inspect", "nowhere.jsonl"), "nowhere.jsonl", "no such file")


def test_recorded_arrivals_that_are_not_recorded(folder, invoke):
    write_native(folder / "work.jsonl", [{"program_id": "p", "turns": [turn(8, 1)]}])
    assert_refused(invoke("run", "run.yaml"), "'p'", "arrival_s", "workload.arrivals.process", "poisson")


# --- what a wrong policy file is told --------------------------------------------------------------------

POLICY_FILE = """
from agentservesim.policies.interface import Evict, Protect


class Raises:
    def on_call_complete(self, pcb, now_s, kv):
        raise KeyError("what")


class Exits:
    def on_call_complete(self, pcb, now_s, kv):
        raise SystemExit(0)


class Nonsense:
    def on_call_complete(self, pcb, now_s, kv):
        return 42


class Soon:
    def on_call_complete(self, pcb, now_s, kv):
        return Protect("soon")


class Never:
    def on_call_complete(self, pcb, now_s, kv):
        return Protect(float("nan"))


class Worthless:
    def on_call_complete(self, pcb, now_s, kv):
        return Protect(now_s + 1, None)


class EvictsOnArrival:
    def on_call_complete(self, pcb, now_s, kv):
        return None

    def on_call_arrival(self, pcb, now_s, kv):
        return Evict()


class Writes:
    def on_call_complete(self, pcb, now_s, kv):
        pcb.arrival_s = 0.0


class Routes:
    def route(self, pcb, now_s, instances):
        return len(instances)


class Wishes:
    def priority(self, pcb, now_s):
        return 1.5


class Wavers:
    def admit(self, pcb, now_s, queue):
        return None


class Victimless:
    def priority(self, pcb, now_s):
        return 0

    def victim(self, candidates, now_s):
        return len(candidates)


class Stillborn:
    def __init__(self):
        raise RuntimeError("no")

    def on_call_complete(self, pcb, now_s, kv):
        return None
"""


@pytest.fixture
def mine(folder):
    (folder / "mine.py").write_text(POLICY_FILE, encoding="utf-8")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("option", "name", "fragments"),
    [
        (
            "retention",
            "Raises",
            ["Raises.on_call_complete raised KeyError: 'what'", "program a, turn t0", " s"],
        ),
        (
            "retention",
            "Nonsense",
            ["Nonsense.on_call_complete answered 42", "Protect, Release, Evict or None", "turn t0"],
        ),
        ("retention", "Soon", ["Soon.on_call_complete", "'soon'", "number", "turn t0"]),
        ("retention", "Never", ["Never.on_call_complete", "nan", "number", "turn t0"]),
        ("retention", "Worthless", ["Worthless.on_call_complete", "None", "number", "turn t0"]),
        ("retention", "EvictsOnArrival", ["EvictsOnArrival.on_call_arrival answered Evict()", "turn t1"]),
        ("retention", "Writes", ["Writes.on_call_complete raised AttributeError", "PCB"]),
        ("retention", "Exits", ["Exits.on_call_complete raised SystemExit"]),
        ("retention", "Stillborn", ["mine.py", "constructor raised RuntimeError: no"]),
        ("retention", "Routes", ["Routes has no method on_call_complete", "routing axis"]),
        ("retention", "Raise", ["no class 'Raise'", "did you mean 'Raises'", "Nonsense"]),
        ("routing", "Routes", ["Routes.route answered 1", "an instance from 0 to 0", "turn t0"]),
        ("scheduling", "Wishes", ["Wishes.priority answered 1.5", "an int or None"]),
        ("admission", "Wavers", ["Wavers.admit answered None", "True or False"]),
    ],
)
def test_a_policy_that_breaks_its_protocol(invoke, option, name, fragments):
    assert_refused(invoke("run", "run.yaml", "--json", f"--{option}", f"./mine.py:{name}"), *fragments)


@pytest.mark.usefixtures("mine")
def test_a_policy_that_raises_names_its_file_and_line(invoke):
    assert_refused(invoke("run", "run.yaml", "--retention", "./mine.py:Raises"), "mine.py:7")


@pytest.mark.usefixtures("mine")
def test_a_victim_that_is_no_candidate(folder, invoke):
    write_native(folder / "work.jsonl", [program(f"p{n}", [turn(200, 60)]) for n in range(4)])
    done = invoke(
        "run", "run.yaml", "--set", "cluster.kv_cache_tokens=528", "--scheduling", "./mine.py:Victimless"
    )
    assert_refused(done, "Victimless.victim answered", "an index from 0 to")


@pytest.mark.parametrize(
    ("content", "spec", "fragments"),
    [
        (None, "./none.py:Mine", ["none.py", "no such file"]),
        ("", "./new.py", ["./new.py:Class"]),
        ("x = 1\n", "./new.py:Mine", ["no class 'Mine'", "defines no class"]),
        (
            "import nothing_of_that_name\n",
            "./new.py:Mine",
            ["new.py:1", "does not import", "nothing_of_that_name"],
        ),
        ("x = 1\ndef f(:\n", "./new.py:Mine", ["new.py:2", "does not import", "SyntaxError"]),
        ("raise SystemExit(0)\n", "./new.py:Mine", ["new.py:1", "SystemExit"]),
    ],
    ids=["missing", "no class named", "no class", "does not import", "does not parse", "exits"],
)
def test_a_policy_file_that_is_none(folder, invoke, content, spec, fragments):
    if content is not None:
        (folder / "new.py").write_text(content, encoding="utf-8")
    assert_refused(invoke("run", "run.yaml", "--retention", spec), *fragments)


# --- where results cannot go -----------------------------------------------------------------------------


def test_an_out_folder_that_cannot_be_made(invoke):
    assert_refused(invoke("run", "run.yaml", "--out", "work.jsonl"), "--out work.jsonl")
    assert_refused(invoke("run", "run.yaml", "--out", "work.jsonl/below"), "--out work.jsonl/below")


@pytest.mark.parametrize("file", ["calls.parquet", "summary.json"])
def test_an_out_folder_that_cannot_be_written_to(folder, invoke, file):
    """A folder lies where the file should go; the same as no permission, for any user."""
    (folder / "out" / file).mkdir(parents=True)
    assert_refused(invoke("run", "run.yaml", "--out", "out"), "--out out", file)


def test_a_conversion_that_cannot_be_written(folder, invoke):
    assert_refused(
        invoke("trace", "convert", "work.jsonl", "-o", "work.jsonl"), "-o work.jsonl", "also an input"
    )
    assert_refused(invoke("trace", "convert", "work.jsonl", "-o", "no/where.jsonl"), "no/where.jsonl")
    assert_refused(invoke("trace", "convert", "work.jsonl", "-o", "."), "directory")
    assert sorted(path.name for path in folder.iterdir()) == ["run.yaml", "work.jsonl"], (
        "nothing is left behind"
    )


# --- run -------------------------------------------------------------------------------------------------


def test_run_shows_a_person_the_main_numbers(invoke):
    done = invoke("run", "run.yaml")
    assert done.code == 0 and done.err == ""
    for word in (
        "JCT",
        "TTFT",
        "TPOT",
        "prefix cache",
        "2 of 2 completed",
        "5 of 5 completed",
        "retention lru",
    ):
        assert word in done.out
    assert "\x1b" not in done.out, "no colours where nobody looks"


def test_run_json_is_one_object_and_nothing_else(invoke):
    done = invoke("run", "run.yaml", "--json")
    assert done.code == 0 and done.err == ""
    summary = json.loads(done.out)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["step_time"].keys() >= {"backend", "source", "coverage"}
    assert (summary["programs"], summary["calls"], summary["calls_refused"]) == (2, 5, 0)


def test_run_out_writes_the_five_files(folder, invoke):
    done = invoke("run", "run.yaml", "--json", "--out", "deep/out")
    out = folder / "deep" / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert json.loads((out / "summary.json").read_text()) == json.loads(done.out)
    calls, programs, decisions = (
        pq.read_table(out / f"{name}.parquet") for name in ("calls", "programs", "decisions")
    )
    assert set(calls.column_names) >= CALL_COLUMNS and calls.num_rows == 5
    assert (
        set(programs.column_names) >= {"program_id", "arrival_s", "completed_s", "jct_s"}
        and programs.num_rows == 2
    )
    assert set(decisions.column_names) >= {"time_s", "event", "program_id", "turn_id", "instance"}


def test_run_out_again_replaces_the_files(folder, invoke):
    invoke("run", "run.yaml", "--out", "out")
    invoke("run", "run.yaml", "--out", "out", "--set", "workload.programs=1")
    assert json.loads((folder / "out" / "summary.json").read_text())["programs"] == 1
    assert pq.read_table(folder / "out" / "calls.parquet").num_rows == 3


def test_the_resolved_config_spells_out_every_default(folder, invoke):
    invoke("run", "run.yaml", "--out", "out")
    resolved = yaml.safe_load((folder / "out" / "config.yaml").read_text())
    assert (
        resolved["engine"]["max_num_batched_tokens"] == 8192
        and resolved["engine"]["semantics"] == "vllm-0.32"
    )
    again = invoke("run", "out/config.yaml", "--json")
    summaries = [json.loads(text) for text in (again.out, (folder / "out" / "summary.json").read_text())]
    assert summaries[0]["jct_mean_s"] == summaries[1]["jct_mean_s"]


@pytest.mark.parametrize("name", ["b200-8b-tp1", "b200-70b-tp2", "rtx-pro-6000-70b-tp2"])
def test_bundled_names_work_from_any_folder(tmp_path, name):
    done = cli("run", f"examples/{name}", "--set", "workload.programs=1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["programs_completed"] == 1 and summary["step_time"]["backend"] == "measured"
    assert list(tmp_path.iterdir()) == []


def test_a_file_beside_a_bundled_name_wins_only_as_a_file(folder, invoke):
    """A config of one's own under the same relative path is what one means."""
    (folder / "examples").mkdir()
    (folder / "examples" / "b200-8b-tp1").write_text(CONFIG.replace("work.jsonl", "../work.jsonl"))
    assert json.loads(invoke("run", "examples/b200-8b-tp1", "--json").out)["programs"] == 2


def test_a_relative_workload_counts_from_the_configs_folder(folder, invoke, monkeypatch):
    below = folder / "configs"
    below.mkdir()
    (folder / "run.yaml").rename(below / "run.yaml")
    write_native(below / "work.jsonl", [chain("only", 1)])
    assert json.loads(invoke("run", "configs/run.yaml", "--json").out)["programs"] == 1
    monkeypatch.chdir(below)
    assert json.loads(invoke("run", "run.yaml", "--json").out)["programs"] == 1


def test_a_result_can_be_run_again_from_any_folder(folder, invoke, monkeypatch):
    """out/config.yaml still finds the workload when one stands elsewhere."""
    below = folder / "configs"
    below.mkdir()
    (folder / "run.yaml").rename(below / "run.yaml")
    (folder / "work.jsonl").rename(below / "work.jsonl")
    assert invoke("run", "configs/run.yaml", "--out", "out").code == 0
    monkeypatch.chdir("/")
    assert invoke("run", folder / "out" / "config.yaml", "--json").code == 0


# --- compare ---------------------------------------------------------------------------------------------


def test_compare_json_is_runs_in_order(invoke):
    done = invoke(
        "compare",
        "run.yaml",
        "--retention",
        "lru,ttl:tau_s=2,until=admission",
        "--scheduling",
        "fcfs,plas",
        "--json",
    )
    assert done.code == 0 and done.err == ""
    report = json.loads(done.out)
    assert report.keys() == {"runs"}
    assert [(run["policies"]["retention"], run["policies"]["scheduling"]) for run in report["runs"]] == [
        ("lru", "fcfs"),
        ("lru", "plas"),
        ("ttl:tau_s=2,until=admission", "fcfs"),
        ("ttl:tau_s=2,until=admission", "plas"),
    ]
    for run in report["runs"]:
        assert run["summary"].keys() >= SUMMARY_KEYS


def test_compare_gives_each_run_what_it_would_have_alone(invoke):
    both = json.loads(invoke("compare", "run.yaml", "--retention", "evolved-gap-ema,lru", "--json").out)[
        "runs"
    ]
    for run in both:
        alone = json.loads(
            invoke("run", "run.yaml", "--retention", run["policies"]["retention"], "--json").out
        )
        for key in alone.keys() - {"sim_wall_s", "peak_rss_bytes"}:
            assert run["summary"][key] == alone[key], key


def test_compare_shows_the_change_against_the_first_row(folder, invoke):
    write_native(folder / "work.jsonl", [chain(f"p{n}", 3, first=300, gap_s=0.2) for n in range(4)])
    done = invoke("compare", "run.yaml", "--retention", "lru,immediate-release")
    assert done.code == 0
    assert "baseline" in done.out and "immediate-release" in done.out and "%" in done.out


def test_compare_refuses_a_wrong_policy_before_the_first_run(invoke):
    assert_refused(invoke("compare", "run.yaml", "--retention", "lru,tll"), "'tll'", "did you mean 'ttl'")
    assert_refused(invoke("compare", "run.yaml", "--retention", "lru,,ttl"), "'lru,,ttl'")


def test_compare_exits_with_3_when_a_run_refuses_calls(invoke):
    done = invoke(
        "compare", "run.yaml", "--set", "engine.max_model_len=100", "--retention", "lru,ttl", "--json"
    )
    assert done.code == 3
    assert all(run["summary"]["calls_refused"] for run in json.loads(done.out)["runs"])
    assert "refused" in done.err


# --- trace, policies, doctor -----------------------------------------------------------------------------

INSPECTION_KEYS = {
    "programs", "calls", "prompt_tokens", "output_tokens", "structural_reuse", "dropped",
    "estimated", "clamped", "inferred", "warnings",
}  # fmt: skip


@pytest.mark.parametrize("source", ["work.jsonl", "examples/bfcl-like"])
def test_trace_inspect_json(invoke, source):
    done = invoke("trace", "inspect", source, "--json")
    assert done.code == 0 and done.err == ""
    report = json.loads(done.out)
    assert report.keys() >= INSPECTION_KEYS
    assert report["programs"] == (2 if source == "work.jsonl" else 100)
    assert 0 < report["structural_reuse"] < 1


def test_trace_inspect_counts_tokens(invoke):
    """a: prompts 64, 120, 176 with outputs of 8; b: its first two turns. All of the parent is reused."""
    report = json.loads(invoke("trace", "inspect", "work.jsonl", "--json").out)
    assert (report["calls"], report["prompt_tokens"], report["output_tokens"]) == (
        5,
        64 + 120 + 176 + 64 + 120,
        40,
    )
    assert report["structural_reuse"] == pytest.approx((72 + 128 + 72) / 544)
    assert sum(report["inferred"].values()) == 3


def test_trace_inspect_takes_several_files(folder, invoke):
    write_native(folder / "more.jsonl", [chain("c", 1)])
    assert json.loads(invoke("trace", "inspect", "work.jsonl", "more.jsonl", "--json").out)["programs"] == 3
    shown = invoke("trace", "inspect", "work.jsonl", "more.jsonl")
    assert shown.code == 0 and "3 programs, 6 calls" in shown.out


def test_trace_convert_round_trip(folder, invoke):
    done = invoke("trace", "convert", "work.jsonl", "-o", "once.jsonl")
    assert done.code == 0 and done.out == "" and "2 programs, 5 turns" in done.err
    invoke("trace", "convert", "once.jsonl", "-o", "twice.jsonl")
    assert (folder / "once.jsonl").read_bytes() == (folder / "twice.jsonl").read_bytes()
    before, after = (
        json.loads(invoke("trace", "inspect", name, "--json").out) for name in ("work.jsonl", "once.jsonl")
    )
    assert {**before, "inferred": {}} == after
    summaries = [
        json.loads(invoke("run", "run.yaml", "--set", f"workload.source={name}", "--json").out)
        for name in ("work.jsonl", "once.jsonl")
    ]
    assert summaries[0]["jct_mean_s"] == summaries[1]["jct_mean_s"]
    assert summaries[0]["prefix_hit_tokens"] == summaries[1]["prefix_hit_tokens"]


def test_trace_convert_reads_another_format(folder, invoke):
    calls = [
        {"input_toks": 100, "output_toks": 10, "tool_duration_ns": 5e8},
        {"input_toks": 150, "output_toks": 10},
    ]
    (folder / "other.jsonl").write_text(
        json.dumps({"session_id": "s", "arrival_time_ns": 1e9, "sub_requests": calls})
    )
    assert invoke("trace", "convert", "other.jsonl", "-o", "native.jsonl").code == 0
    line = json.loads((folder / "native.jsonl").read_text())
    assert line["program_id"] == "s" and line["arrival_s"] == 1.0
    assert [entry["prompt_tokens"] for entry in line["turns"]] == [100, 150]
    assert line["turns"][1]["reuse_tokens"] == 110


def test_a_bundled_workload_can_be_converted_and_run(folder, invoke):
    assert invoke("trace", "convert", "examples/bfcl-like", "-o", "bfcl.jsonl").code == 0
    arrivals = [
        "--set",
        "workload.arrivals={process: poisson, rate_per_s: 1}",
        "--set",
        "workload.programs=5",
    ]
    converted, bundled = (
        json.loads(invoke("run", "run.yaml", "--json", *arrivals, "--set", f"workload.source={name}").out)
        for name in ("bfcl.jsonl", "examples/bfcl-like")
    )
    assert converted["jct_mean_s"] == bundled["jct_mean_s"] and converted["programs"] == 5


def test_policies_lists_every_axis(invoke):
    listing = json.loads(invoke("policies", "--json").out)
    assert list(listing) == ["retention", "scheduling", "admission", "routing"]
    names = {axis: {entry["name"] for entry in entries} for axis, entries in listing.items()}
    assert names["retention"] >= {
        "lru", "immediate-release", "ttl", "pressure-ttl", "tool-ttl", "min-waste", "evolved-gap-ema",
    }  # fmt: skip
    assert names["scheduling"] >= {
        "fcfs",
        "program-fcfs",
        "plas",
        "continuum",
        "resident-first",
        "evolved-sqrt-plas",
    }
    assert names["admission"] >= {"none", "program-cap"}
    assert names["routing"] >= {"round-robin", "least-loaded", "session-affinity"}
    assert all(entry["rule"] for entries in listing.values() for entry in entries)
    shown = invoke("policies")
    assert shown.code == 0 and all(name in shown.out for axis in names.values() for name in axis)


def test_doctor_says_that_all_works(invoke):
    done = invoke("doctor", "--json")
    report = json.loads(done.out)
    assert done.code == 0 and report["ok"] and report["agentservesim"] == __version__
    assert all(check["ok"] for check in report["checks"].values())
    shown = invoke("doctor")
    assert shown.code == 0 and "ok" in shown.out and __version__ in shown.out


def test_version_and_help(invoke):
    assert invoke("--version").out.strip() == f"agentservesim {__version__}"
    shown = invoke("--help")
    assert shown.code == 0
    for verb in ("run", "compare", "trace", "policies", "doctor"):
        assert verb in shown.out


def test_the_installed_command_is_the_module(tmp_path):
    command = Path(sys.executable).with_name("agentservesim")
    assert command.is_file()
    assert cli("--version", cwd=tmp_path).stdout == f"agentservesim {__version__}\n"


def test_an_error_in_its_own_process_prints_no_traceback(folder):
    done = cli("run", "run.yaml", "--set", "cluster.instnces=2", cwd=folder)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
