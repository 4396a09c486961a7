"""The orchestrator: when a call is released, and which of its tokens the cache can already hold."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim import parse_config, simulate
from helpers import INFINITELY_FAST, calls_by_name, chain, config_dict, program, rows, run, turn

BLOCK = 16


def programs_by_name(result):
    return {row["program_id"]: row for row in rows(result, "programs")}


def released(result):
    return {name: row["released_s"] for name, row in calls_by_name(result).items()}


# --- when ------------------------------------------------------------------------------------------------


def test_jct_is_the_last_completion_minus_the_arrival(tmp_path):
    late_leaf = program(
        "p",
        [
            turn(64, 4),
            turn(64, 4, parents=[0], gap_s=9.0),
            turn(64, 40, parents=[0]),
            turn(64, 2, parents=[0]),
        ],
        arrival_s=2.5,
    )
    result = run(tmp_path, [late_leaf, chain("q", 2, arrival_s=4.0)])
    for name, row in programs_by_name(result).items():
        ends = [call["completed_s"] for call in rows(result) if call["program_id"] == name]
        assert row["completed_s"] == max(ends)
        assert row["jct_s"] == pytest.approx(max(ends) - row["arrival_s"], abs=1e-12)
    jcts = [row["jct_s"] for row in rows(result, "programs")]
    assert result.summary["jct_mean_s"] == pytest.approx(sum(jcts) / 2)
    assert result.summary["makespan_s"] == max(call["completed_s"] for call in rows(result))


def test_a_gap_after_the_last_turn_is_nobodys_time(tmp_path):
    plain, with_gap = (run(tmp_path, [program("p", [turn(64, 4, gap_s=gap_s)])]) for gap_s in (0.0, 100.0))
    assert plain.summary["jct_mean_s"] == with_gap.summary["jct_mean_s"]
    assert plain.summary["makespan_s"] == with_gap.summary["makespan_s"]


def test_a_chain_releases_each_call_a_gap_after_the_one_before(tmp_path):
    calls = rows(run(tmp_path, [chain("p", 5, gap_s=0.75, arrival_s=1.0)]))
    assert calls[0]["released_s"] == 1.0
    for before, after in pairwise(calls):
        assert after["released_s"] == before["completed_s"] + 0.75


def test_a_fork_releases_all_children_at_once_and_they_run_together(tmp_path):
    fork = [turn(64, 4, gap_s=0.5), *(turn(96, 8, parents=[0]) for _ in range(3))]
    calls = rows(run(tmp_path, [program("p", fork)]))
    parent, children = calls[0], calls[1:]
    assert {call["released_s"] for call in children} == {parent["completed_s"] + 0.5}
    assert len({call["scheduled_s"] for call in children}) == 1


@pytest.mark.parametrize(("left_gap_s", "right_gap_s"), [(5.0, 0.0), (0.0, 5.0), (1.0, 1.0), (0.0, 0.0)])
def test_a_join_waits_for_the_last_of_its_parents_gaps(tmp_path, left_gap_s, right_gap_s):
    turns = [
        turn(32, 4, turn_id="left", parents=[], gap_s=left_gap_s),
        turn(32, 60, turn_id="right", parents=[], gap_s=right_gap_s),
        turn(160, 4, turn_id="join", parents=["left", "right"]),
    ]
    calls = calls_by_name(run(tmp_path, [program("p", turns)]))
    assert calls["p/left"]["completed_s"] < calls["p/right"]["completed_s"]
    assert calls["p/join"]["released_s"] == max(
        calls["p/left"]["completed_s"] + left_gap_s, calls["p/right"]["completed_s"] + right_gap_s
    )


def test_a_diamond_runs_each_turn_once(tmp_path):
    """Turns listed in any order, joins over several levels."""
    turns = [
        turn(400, 2, turn_id="end", parents=["b", "c"]),
        turn(200, 2, turn_id="b", parents=["a"]),
        turn(300, 2, turn_id="c", parents=["a", "b"]),
        turn(100, 2, turn_id="a", parents=[]),
    ]
    result = run(tmp_path, [program("p", turns)])
    assert [row["turn_id"] for row in rows(result)] == ["a", "b", "c", "end"]
    assert result.summary["calls_completed"] == 4 and result.complete


@pytest.mark.parametrize(
    ("after", "wait_s"),
    [
        ({}, 0.0),
        ({"gap_s": None, "tools": [{"name": "a", "duration_s": 0.3}, {"name": "b", "duration_s": 2.0}]}, 2.0),
        ({"gap_s": 0.0, "tools": [{"name": "b", "duration_s": 2.0}]}, 0.0),
        ({"gap_s": 0.5, "tools": [{"name": "b", "duration_s": 2.0}]}, 0.5),
        ({"gap_s": 3.0, "tools": [{"name": "b", "duration_s": 2.0}]}, 3.0),
        ({"pause_s": 7.0}, 7.0),
        ({"pause_s": 7.0, "tools": [{"name": "b", "duration_s": 2.0}]}, 9.0),
        ({"gap_s": 0.0, "pause_s": 7.0, "tools": [{"name": "b", "duration_s": 2.0}]}, 7.0),
    ],
    ids=[
        "nothing",
        "longest tool",
        "gap 0 is no missing gap",
        "gap below",
        "gap above",
        "pause",
        "both",
        "all",
    ],
)
def test_what_lies_between_two_calls(tmp_path, after, wait_s):
    first, second = rows(run(tmp_path, [program("p", [turn(64, 4, **after), turn(96, 4)])]))
    assert second["released_s"] == first["completed_s"] + wait_s


def test_zero_output_tokens_complete_after_prefill(tmp_path):
    """One step each here: the prompt of 600 takes two chunks."""
    calls = rows(run(tmp_path, [program("p", [turn(500, 0), turn(600, 0, reuse_tokens=0), turn(64, 1)])]))
    for call in calls[:2]:
        assert call["output_tokens"] == 0
        assert call["first_token_s"] == call["completed_s"]
    assert calls[0]["completed_s"] - calls[0]["scheduled_s"] == pytest.approx(0.01 + 500e-4)
    assert calls[1]["completed_s"] - calls[1]["scheduled_s"] == pytest.approx(2 * 0.01 + 600e-4)
    assert calls[2]["output_tokens"] == 1


def test_a_run_of_only_zero_output_calls_has_no_tpot(tmp_path):
    result = run(tmp_path, [program("p", [turn(64, 0)])])
    assert result.complete and result.summary["tpot_mean_s"] is None and result.summary["output_tokens"] == 0


# --- arrivals --------------------------------------------------------------------------------------------


def test_recorded_arrivals_are_kept(tmp_path):
    times = [7.25, 0.0, 3.5, 3.5]
    result = run(tmp_path, [chain(f"p{n}", 1, arrival_s=at_s) for n, at_s in enumerate(times)])
    assert {name: row["arrival_s"] for name, row in programs_by_name(result).items()} == {
        f"p{n}": at_s for n, at_s in enumerate(times)
    }
    assert all(call["released_s"] == times[int(call["program_id"][1:])] for call in rows(result))


@settings(max_examples=40, deadline=None)
@given(
    lanes=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=10),
    retention=st.sampled_from(("lru", "ttl")),
)
def test_a_closed_loop_keeps_its_lanes_busy_and_never_runs_more(tmp_path_factory, lanes, lengths, retention):
    folder = tmp_path_factory.mktemp("lanes")
    programs = [chain(f"p{n}", turns, gap_s=0.1, arrival_s=99.0) for n, turns in enumerate(lengths)]
    result = run(
        folder,
        programs,
        workload={"arrivals": {"process": "closed_loop", "lanes": lanes}},
        policies={"retention": retention},
    )
    runs = rows(result, "programs")
    assert len(runs) == len(programs)
    starts = sorted(row["arrival_s"] for row in runs)
    ends = sorted(row["completed_s"] for row in runs)
    assert starts[:lanes] == [0.0] * min(lanes, len(runs))
    assert starts[lanes:] == ends[: max(len(runs) - lanes, 0)], (
        "each end lets exactly one program in, at once"
    )
    for at_s in starts:
        assert sum(row["arrival_s"] <= at_s < row["completed_s"] for row in runs) <= lanes


def test_a_closed_loop_goes_on_after_a_failed_program(tmp_path):
    programs = [
        program("bad", [turn(100_000, 1)]),
        chain("good", 2),
        program("bad2", [turn(100_000, 1)]),
        chain("last", 1),
    ]
    result = run(tmp_path, programs, workload={"arrivals": {"process": "closed_loop", "lanes": 1}})
    assert result.summary["programs_completed"] == 2 and result.summary["programs_failed"] == 2


# --- an infinitely fast engine ---------------------------------------------------------------------------


def test_an_infinitely_fast_engine_reproduces_the_recorded_start_times(tmp_path):
    """Without service, a call starts at its program's arrival plus the waits before it: exactly."""
    programs, expected = [], {}
    for number in range(8):
        arrival_s = 0.37 * number
        waits = [0.0, 1.1, 0.003 * number, 0.25, 2.0]
        turns = [
            turn(
                50 + 40 * k,
                7 * (k % 2),
                tools=[{"name": "t", "duration_s": wait}],
                pause_s=0.5 if k == 3 else None,
            )
            for k, wait in enumerate(waits)
        ]
        programs.append(program(f"p{number}", turns, arrival_s=arrival_s))
        at_s = arrival_s
        for k, wait in enumerate(waits):
            expected[f"p{number}/t{k}"] = at_s
            at_s += wait + (0.5 if k == 3 else 0.0)
    result = run(tmp_path, programs, step_time=INFINITELY_FAST)
    assert result.complete
    for name, call in calls_by_name(result).items():
        assert call["released_s"] == pytest.approx(expected[name], abs=1e-12)
        assert call["released_s"] == call["scheduled_s"] == call["first_token_s"] == call["completed_s"]


def test_a_run_without_any_time_at_all_ends(tmp_path):
    result = run(tmp_path, [chain("p", 3), chain("q", 3)], step_time=INFINITELY_FAST)
    assert (
        result.complete
        and result.summary["makespan_s"] == 0
        and result.summary["output_tokens_per_s"] is None
    )


@pytest.mark.data
def test_an_infinitely_fast_engine_reproduces_a_real_trace(data_dir):
    source = data_dir / "traces" / "native" / "swebench50.jsonl"
    config = config_dict(
        source,
        workload={
            "source": str(source),
            "programs": 3,
            "arrivals": {"process": "poisson", "rate_per_s": 0.04},
        },
        cluster={"kv_cache_tokens": 1 << 24},
        engine={"max_num_seqs": 128, "max_num_batched_tokens": 1 << 20, "max_model_len": 1 << 20},
        step_time=INFINITELY_FAST,
    )
    result = simulate(parse_config(config))
    assert result.complete
    with source.open(encoding="utf-8") as file:
        turns = {line["program_id"]: line["turns"] for line in map(json.loads, islice(file, 3))}
    calls = calls_by_name(result)
    assert len(calls) == sum(map(len, turns.values()))
    for row in rows(result, "programs"):
        at_s = row["arrival_s"]
        for index, recorded in enumerate(turns[row["program_id"]]):
            call = calls[f"{row['program_id']}/t{index}"]
            assert call["released_s"] == call["completed_s"] == pytest.approx(at_s)
            at_s += max((tool["duration_s"] for tool in recorded.get("tools") or ()), default=0.0)


# --- what of a prompt can be in the cache ----------------------------------------------------------------


def hits(folder, turns, **more):
    """Hit tokens a turn on a pool that forgets nothing."""
    prefix = more.pop("prefix", [])
    result = run(folder, [program("p", turns, prefix=prefix)], **more)
    return {row["turn_id"]: row["hit_tokens"] for row in rows(result)}


def blocks(tokens):
    """Whole blocks of `tokens`."""
    return tokens // BLOCK * BLOCK


def test_deployment_hits_the_prompt_and_the_output_replay_the_prompt_alone(tmp_path):
    """Parent: 100 prompt + 60 output tokens, of which the last was never computed. Child: all of it + 40."""
    turns = [turn(100, 60), turn(200, 4)]
    assert hits(tmp_path, turns, output_reuse="deployment") == {"t0": 0, "t1": blocks(159)}
    assert hits(tmp_path, turns, output_reuse="replay") == {"t0": 0, "t1": blocks(100)}


def test_the_token_that_was_never_computed_is_never_hit(tmp_path):
    """65 + 15 tokens are five blocks, but the last output token has no KV: four."""
    assert hits(tmp_path, [turn(65, 15), turn(200, 4)])["t1"] == 64
    assert hits(tmp_path, [turn(65, 16), turn(200, 4)])["t1"] == 80


def test_the_last_token_of_a_prompt_is_always_computed(tmp_path):
    """A child that repeats its parent's prompt whole hits all blocks but the last."""
    assert hits(tmp_path, [turn(160, 1), turn(160, 1)])["t1"] == 144
    assert hits(tmp_path, [turn(161, 1), turn(161, 1)])["t1"] == 160


def test_output_that_is_not_kept_is_not_hit(tmp_path):
    """Dropped reasoning stood before what was kept, so the prompts part where the output began."""
    for kept in (0, 20, 59):
        assert hits(tmp_path, [turn(100, 60, kept_output_tokens=kept), turn(200, 4)])["t1"] == blocks(100)
    assert hits(tmp_path, [turn(100, 60, kept_output_tokens=60), turn(200, 4)])["t1"] == blocks(159)


@pytest.mark.parametrize(("reuse", "hit"), [(0, 0), (15, 0), (16, 16), (95, 80), (100, 96), (160, 144)])
def test_reuse_tokens_limit_the_hit(tmp_path, reuse, hit):
    assert hits(tmp_path, [turn(100, 60), turn(200, 4, reuse_tokens=reuse)])["t1"] == hit


def test_after_a_compaction_the_next_turn_builds_on_the_compacted_prompt(tmp_path):
    """t1 keeps only 40 tokens of t0; t2 repeats t1, not what t0 had beyond token 40."""
    turns = [turn(320, 16), turn(128, 16, reuse_tokens=40), turn(200, 4), turn(320, 4, reuse_tokens=200)]
    assert hits(tmp_path, turns) == {"t0": 0, "t1": 32, "t2": blocks(143), "t3": blocks(200)}


def test_a_grandparents_tokens_dropped_by_the_parent_are_not_hit(tmp_path):
    """t2's prompt is as long as t0's, but shares only what t1 kept."""
    turns = [turn(320, 0), turn(64, 0, reuse_tokens=32), turn(320, 1, parents=[1])]
    assert hits(tmp_path, turns)["t2"] == blocks(64)


def test_forked_turns_reuse_their_parent_and_not_each_other(tmp_path):
    turns = [
        turn(160, 20),
        turn(300, 8, parents=[0]),
        turn(300, 8, parents=[0], gap_s=0.0),
        turn(400, 8, parents=[2]),
    ]
    found = hits(tmp_path, turns)
    assert found["t1"] == found["t2"] == blocks(179)
    assert found["t3"] == blocks(307), "a branch goes on from itself"


def test_a_join_reuses_its_first_parent(tmp_path):
    turns = [
        turn(160, 1),
        turn(320, 1, parents=[]),
        turn(400, 1, parents=[1, 0]),
        turn(400, 1, parents=[0, 1]),
    ]
    found = hits(tmp_path, turns)
    assert found["t2"] == blocks(320) and found["t3"] == blocks(160)


def test_shared_prefix_groups_hit_across_programs(tmp_path):
    """Two programs share 'sys'; a group is shared only where everything before it is too."""
    system, tools = {"id": "sys", "tokens": 100}, {"id": "tools", "tokens": 60}
    programs = [
        program("a", [turn(300, 1)], prefix=[system, tools], arrival_s=0.0),
        program("b", [turn(300, 1)], prefix=[system, tools], arrival_s=1.0),
        program("c", [turn(300, 1)], prefix=[system], arrival_s=2.0),
        program("d", [turn(300, 1)], prefix=[tools], arrival_s=3.0),
        program("e", [turn(300, 1)], arrival_s=4.0),
        program("f", [turn(300, 1)], prefix=[{"id": "sys", "tokens": 99}], arrival_s=5.0),
    ]
    found = {row["program_id"]: row["hit_tokens"] for row in rows(run(tmp_path, programs))}
    assert found == {"a": 0, "b": 160, "c": 96, "d": 0, "e": 0, "f": 0}


def test_a_compaction_keeps_the_programs_prefix(tmp_path):
    """Reuse below the prefix still starts with the prefix: it stands at the start of every prompt."""
    turns = [turn(320, 4), turn(200, 4, reuse_tokens=0)]
    assert hits(tmp_path, turns, prefix=[{"id": "sys", "tokens": 96}])["t1"] == 96


def test_two_programs_without_a_prefix_share_nothing(tmp_path):
    result = run(tmp_path, [chain("a", 1, first=320), chain("b", 1, first=320, arrival_s=1.0)])
    assert result.summary["prefix_hit_tokens"] == 0


def test_without_prefix_caching_nothing_is_hit(tmp_path):
    assert set(
        hits(tmp_path, [turn(100, 60), turn(200, 4)], engine={"enable_prefix_caching": False}).values()
    ) == {0}


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_hits_are_whole_blocks_of_the_configured_size(tmp_path, block_size):
    found = hits(tmp_path, [turn(100, 60), turn(200, 4)], engine={"block_size": block_size})
    assert found["t1"] == 159 // block_size * block_size


def test_a_call_on_another_instance_finds_nothing(tmp_path):
    turns = [turn(160, 16), turn(300, 1)]
    assert hits(tmp_path, turns, cluster={"instances": 2}, policies={"routing": "round-robin"})["t1"] == 0
    assert hits(tmp_path, turns, cluster={"instances": 2}, policies={"routing": "session-affinity"})[
        "t1"
    ] == blocks(175)
