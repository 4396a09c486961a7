"""What cannot be served is counted and named, costs nobody else anything, and never hangs a run."""

from __future__ import annotations

import itertools
import json

import pytest

from helpers import (
    calls_by_name,
    chain,
    cli,
    config_dict,
    program,
    rows,
    run,
    turn,
    write_config,
    write_native,
)

POOL = 1024
CAPACITY = POOL - 16
"""vLLM keeps one block as its null block."""


def run_cli(folder, programs, *options, **sections):
    source = write_native(folder / "workload.jsonl", programs)
    config = write_config(folder / "run.yaml", config_dict(source, **sections))
    return cli("run", config, "--json", *options)


@pytest.mark.parametrize(
    ("prompt", "output", "reason"),
    [
        (CAPACITY + 1, 1, f"{CAPACITY + 1} tokens of KV > {CAPACITY} in the pool"),
        (CAPACITY, 2, f"{CAPACITY + 1} tokens of KV > {CAPACITY} in the pool"),
        (CAPACITY, 1, None),
        (CAPACITY, 0, None),
        (CAPACITY - 99, 100, None),
    ],
)
def test_a_call_larger_than_the_pool(tmp_path, prompt, output, reason):
    """The last output token is never computed, so it needs no room."""
    result = run(tmp_path, [program("p", [turn(prompt, output)])], cluster={"kv_cache_tokens": POOL})
    assert result.complete == (reason is None)
    assert rows(result)[0]["status"] == ("completed" if reason is None else "refused")
    assert rows(result)[0]["reason"] == reason


@pytest.mark.parametrize(
    ("prompt", "output", "served"), [(500, 1, False), (501, 1, False), (499, 1, True), (499, 50, True)]
)
def test_a_prompt_of_max_model_len(tmp_path, prompt, output, served):
    """A prompt needs room for one more token; a long output is clipped, as vLLM does."""
    result = run(tmp_path, [program("p", [turn(prompt, output)])], engine={"max_model_len": 500})
    call = rows(result)[0]
    assert result.complete is served
    if served:
        assert call["output_tokens"] == 1
    else:
        assert call["reason"] == f"prompt_tokens {prompt} >= max_model_len 500"


def test_a_refused_call_fails_its_program_and_no_other(tmp_path):
    programs = [
        chain("before", 3),
        program(
            "large",
            [turn(64, 4), turn(CAPACITY + 1, 4, turn_id="huge"), turn(64, 4), turn(64, 4)],
            arrival_s=0.1,
        ),
        chain("after", 3, arrival_s=0.2),
    ]
    result = run(tmp_path, programs, cluster={"kv_cache_tokens": POOL})
    summary = result.summary
    assert (summary["calls"], summary["calls_completed"], summary["calls_refused"]) == (8, 7, 1)
    assert (summary["calls_live"], summary["calls_not_released"]) == (0, 2)
    assert (summary["programs_completed"], summary["programs_failed"], summary["programs_live"]) == (2, 1, 0)
    assert summary["refusals"] == [
        f"program large, turn huge: {CAPACITY + 4} tokens of KV > {CAPACITY} in the pool"
    ]
    status = {row["program_id"]: row["status"] for row in rows(result, "programs")}
    assert status == {"before": "completed", "large": "failed", "after": "completed"}
    failed = next(row for row in rows(result, "programs") if row["status"] == "failed")
    assert failed["jct_s"] is None and failed["calls_completed"] == 1 and failed["calls_refused"] == 1


def test_a_refused_program_takes_nothing_from_the_others(tmp_path):
    """The others' calls are the same as without it."""
    others = [chain(f"p{n}", 4, arrival_s=0.05 * n) for n in range(3)]
    refused = program("refused", [turn(CAPACITY + 1, 4), turn(64, 4)], arrival_s=0.07)
    alone = calls_by_name(run(tmp_path, others, cluster={"kv_cache_tokens": POOL}))
    beside = calls_by_name(run(tmp_path, [*others, refused], cluster={"kv_cache_tokens": POOL}))
    del beside["refused/t0"]
    assert beside == alone


def test_a_sibling_under_way_when_its_program_fails_runs_to_its_end(tmp_path):
    turns = [turn(64, 60, parents=[]), turn(CAPACITY + 1, 1, parents=[]), turn(96, 4, parents=[0])]
    result = run(tmp_path, [program("p", turns)], cluster={"kv_cache_tokens": POOL})
    statuses = {name: row["status"] for name, row in calls_by_name(result).items()}
    assert statuses == {"p/t0": "completed", "p/t1": "refused"}
    ended = rows(result, "programs")[0]
    assert ended["status"] == "failed"
    assert ended["completed_s"] == calls_by_name(result)["p/t0"]["completed_s"]
    assert result.summary["calls_not_released"] == 1


def test_what_waits_protected_for_a_refused_call_is_given_back(tmp_path):
    turns = [turn(512, 4, gap_s=1.0), turn(CAPACITY + 1, 4)]
    result = run(
        tmp_path,
        [program("p", turns)],
        cluster={"kv_cache_tokens": POOL},
        policies={"retention": "ttl:tau_s=100,until=admission"},
    )
    events = [row["event"] for row in rows(result, "decisions")]
    assert events == ["protect", "refuse", "release"]


def test_refused_calls_exit_with_3_and_are_named(tmp_path):
    programs = [program(f"large-{n}", [turn(CAPACITY + 1, 4)]) for n in range(30)] + [chain("fine", 2)]
    done = run_cli(tmp_path, programs, "--out", tmp_path / "out", cluster={"kv_cache_tokens": POOL})
    assert done.returncode == 3
    summary = json.loads(done.stdout)
    assert summary["calls_refused"] == 30 and summary["programs_completed"] == 1
    assert "30 of 32 calls were refused" in done.stderr and "large-0, turn t0" in done.stderr
    assert "25 more" in done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["calls_refused"] == 30


# --- admission -------------------------------------------------------------------------------------------

NOBODY = """
class Nobody:
    def admit(self, pcb, now_s, queue):
        return False


class OnlyFirstCalls:
    def admit(self, pcb, now_s, queue):
        return pcb.turn_index == 0


class Later:
    def __init__(self):
        self.asked = 0

    def admit(self, pcb, now_s, queue):  # b's call only when it is asked about a second time
        self.asked += pcb.program_id == "b"
        return pcb.program_id != "b" or self.asked > 1
"""


@pytest.fixture
def nobody(tmp_path):
    file = tmp_path / "nobody.py"
    file.write_text(NOBODY, encoding="utf-8")
    return file


def test_a_policy_that_admits_nobody_leaves_every_call_live_and_named(tmp_path, nobody):
    programs = [chain("a", 3), chain("b", 3, arrival_s=5.0)]
    done = run_cli(tmp_path, programs, "--admission", f"{nobody}:Nobody", "--out", tmp_path / "out")
    assert done.returncode == 3
    summary = json.loads(done.stdout)
    assert (summary["calls"], summary["calls_live"], summary["calls_completed"]) == (2, 2, 0)
    assert (summary["programs"], summary["programs_live"]) == (2, 2)
    assert summary["jct_mean_s"] is None and summary["engine_steps"] == 0
    assert "2 calls were still live" in done.stderr


def test_a_held_call_is_asked_again_when_a_call_completes(tmp_path, nobody):
    """At the first completion of another program's call: not only once that program has ended."""
    programs = [chain("a", 3, gap_s=0.5), chain("b", 1, arrival_s=0.001)]
    calls = calls_by_name(run(tmp_path, programs, policies={"admission": f"{nobody}:Later"}))
    assert calls["b/t0"]["scheduled_s"] == calls["a/t0"]["completed_s"]


def test_a_held_call_is_asked_again_when_a_call_is_refused(tmp_path, nobody):
    programs = [chain("b", 1), program("a", [turn(5000, 1)], arrival_s=1.0)]
    result = run(
        tmp_path, programs, cluster={"kv_cache_tokens": POOL}, policies={"admission": f"{nobody}:Later"}
    )
    assert calls_by_name(result)["b/t0"]["scheduled_s"] == 1.0


def test_live_calls_are_named_in_the_tables(tmp_path, nobody):
    result = run(tmp_path, [chain("a", 3), chain("b", 3)], policies={"admission": f"{nobody}:OnlyFirstCalls"})
    live = [row for row in rows(result) if row["status"] == "live"]
    assert [(row["program_id"], row["turn_id"]) for row in live] == [("a", "t1"), ("b", "t1")]
    assert {row["reason"] for row in live} == {"held by the admission policy"}
    assert not result.complete


def test_live_programs_calls_that_were_never_released_are_counted(tmp_path, nobody):
    """calls + calls_not_released = all turns, also where programs are still live at the end."""
    result = run(tmp_path, [chain("a", 3), chain("b", 3)], policies={"admission": f"{nobody}:OnlyFirstCalls"})
    assert result.summary["calls"] == 4
    assert result.summary["calls"] + result.summary["calls_not_released"] == 6


def test_live_calls_are_named_on_the_command_line(tmp_path, nobody):
    """Counted and named: like refused calls, the first few by program and turn, and why."""
    done = run_cli(tmp_path, [chain("a", 3), chain("b", 3)], "--admission", f"{nobody}:Nobody")
    assert done.returncode == 3
    assert "program a, turn t0" in done.stderr and "held by the admission policy" in done.stderr


@pytest.mark.parametrize("lanes", [None, 3])
def test_program_cap_always_runs_at_least_one_program(tmp_path, lanes):
    """Every program alone is above the cap: they run one after another, all of them."""
    arrivals = {"process": "closed_loop", "lanes": lanes} if lanes else {"process": "recorded"}
    programs = [chain(f"p{n}", 3, first=400, gap_s=0.2) for n in range(4)]
    result = run(
        tmp_path,
        programs,
        workload={"arrivals": arrivals},
        cluster={"kv_cache_tokens": POOL},
        policies={"admission": "program-cap:f=0.1"},
    )
    assert result.complete and result.summary["programs_completed"] == 4
    spans = {}
    for row in rows(result):
        start, _ = spans.get(row["program_id"], (row["scheduled_s"], 0))
        spans[row["program_id"]] = (start, row["completed_s"])
    ordered = [spans[f"p{n}"] for n in range(4)]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    assert result.summary["decisions"]["hold"] >= 3


def test_a_refused_program_frees_its_place_under_program_cap(tmp_path):
    programs = [program("large", [turn(400, 4), turn(5000, 4)]), chain("next", 2, first=400)]
    result = run(
        tmp_path, programs, cluster={"kv_cache_tokens": POOL}, policies={"admission": "program-cap:f=0.5"}
    )
    assert result.summary["programs_completed"] == 1 and result.summary["programs_failed"] == 1
    assert result.summary["calls_live"] == 0
