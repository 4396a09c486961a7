"""What holds at every instant of every run, whatever the workload, the policies and the pool.

docs/invariants.md lists the invariants.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import RETENTION, SCHEDULING, calls_by_name, chain, program, rows, run, setups, turn, workloads

MEASURED_ON_THE_MACHINE = ("sim_wall_s", "peak_rss_bytes")
SUMS_OF_STEPS = ("busy_fraction", "energy_joules", "kv_utilization_mean")
LANES = st.sampled_from((None, None, 1, 2))


def sections_of(setup, lanes):
    return (
        setup
        if lanes is None
        else {**setup, "workload": {"arrivals": {"process": "closed_loop", "lanes": lanes}}}
    )


class Watcher:
    """Looks at the instances after each instant of a run, through the progress hook."""

    def __init__(self):
        self.simulation = None
        self.now_s = 0.0

    def __call__(self, simulation):
        self.simulation = simulation
        assert simulation.clock.now_s >= self.now_s, "time goes back"
        self.now_s = simulation.clock.now_s
        for instance in simulation.instances:
            self.check(instance)

    @staticmethod
    def check(instance):
        scheduler, pool = instance.scheduler, instance.scheduler.block_pool
        assert instance.stepping or not len(scheduler.waiting), "idle while calls wait"
        assert instance.stepping or not scheduler.running, "idle while calls run"
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert instance.in_flight == len(scheduler.running) + len(scheduler.waiting)
        held = sum(request.table.num_blocks for request in scheduler.running)
        assert pool.num_used_blocks <= held, "blocks in use that no running request holds"
        assert all(request.table.num_blocks == 0 for request in scheduler.waiting), (
            "a waiting call holds blocks"
        )
        counts = (pool.num_used_blocks, pool.num_parked, pool.num_hashed_free, pool.num_unhashed_free)
        assert min(counts) >= 0 and sum(counts) == pool.num_usable_blocks

    def check_end(self):
        for instance in self.simulation.instances:
            self.check(instance)
            assert instance.in_flight == 0
            assert instance.scheduler.block_pool.num_used_blocks == 0, "blocks leaked"


def check_counts(result, programs):
    summary, calls = result.summary, rows(result)
    statuses = Counter(row["status"] for row in calls)
    assert (
        summary["calls"]
        == len(calls)
        == summary["calls_completed"] + summary["calls_refused"] + summary["calls_live"]
    )
    assert (statuses["completed"], statuses["refused"], statuses["live"]) == (
        summary["calls_completed"], summary["calls_refused"], summary["calls_live"],
    )  # fmt: skip
    assert len({(row["program_id"], row["turn_id"]) for row in calls}) == len(calls), (
        "a call is recorded twice"
    )
    assert sum(len(line["turns"]) for line in programs) == summary["calls"] + summary["calls_not_released"]
    states = Counter(row["status"] for row in rows(result, "programs"))
    assert (states["completed"], states["failed"], states["live"]) == (
        summary["programs_completed"], summary["programs_failed"], summary["programs_live"],
    )  # fmt: skip
    assert summary["programs"] == len(programs) == sum(states.values())
    assert summary["calls_live"] == summary["programs_live"] == 0, "nothing here may hang"
    completed = [row for row in calls if row["status"] == "completed"]
    for key, column in (("prompt_tokens",) * 2, ("output_tokens",) * 2, ("prefix_hit_tokens", "hit_tokens")):
        assert summary[key] == sum(row[column] for row in completed)


def check_times(result):
    arrivals = {row["program_id"]: row["arrival_s"] for row in rows(result, "programs")}
    ends = []
    for row in rows(result):
        assert arrivals[row["program_id"]] <= row["released_s"]
        if row["status"] == "completed":
            assert row["released_s"] <= row["scheduled_s"] <= row["first_token_s"] <= row["completed_s"]
            assert row["scheduled_s"] < row["completed_s"], "a step takes time"
            ends.append(row["completed_s"])
    assert ends == sorted(ends)
    times = [row["time_s"] for row in rows(result, "decisions")]
    assert times == sorted(times)
    assert result.summary["makespan_s"] == max(ends, default=0.0)


def check_tokens(result, programs, setup):
    limit = setup["engine"]["max_model_len"] or 131072
    asked = {}
    for line in programs:
        prefix = sum(group["tokens"] for group in line["prefix"])
        for index, entry in enumerate(line["turns"]):
            reuse = prefix
            for parent in entry["parents"][:1]:
                before = line["turns"][parent]
                reuse = max(
                    prefix,
                    before["prompt_tokens"] + before.get("kept_output_tokens", before["output_tokens"]),
                )
            asked[line["program_id"], f"t{index}"] = (entry, min(reuse, entry["prompt_tokens"] - 1))
    for row in rows(result):
        entry, structural = asked[row["program_id"], row["turn_id"]]
        assert row["prompt_tokens"] == entry["prompt_tokens"]
        if row["status"] != "completed":
            continue
        assert row["output_tokens"] == min(entry["output_tokens"], limit - entry["prompt_tokens"])
        assert 0 <= row["hit_tokens"] <= structural and row["hit_tokens"] % 16 == 0
        if not setup["engine"]["enable_prefix_caching"]:
            assert row["hit_tokens"] == 0


def check_decisions(result):
    decisions = rows(result, "decisions")
    assert Counter(row["event"] for row in decisions) == Counter(result.summary["decisions"])
    preempted = Counter((row["program_id"], row["turn_id"]) for row in decisions if row["event"] == "preempt")
    recorded = {
        (row["program_id"], row["turn_id"]): row["preemptions"] for row in rows(result) if row["preemptions"]
    }
    assert recorded == dict(preempted)
    assert result.summary["preemptions"] == sum(preempted.values())
    parked = set()
    for row in decisions:
        key = (row["program_id"], row["turn_id"])
        if row["event"] == "protect":
            assert row["deadline_s"] >= row["time_s"]
            if row["blocks"]:
                parked.add(key)
        elif row["event"] in ("expire", "release", "takeover"):
            assert key in parked, f"{row['event']} of what is not protected"
            parked.discard(key)
        elif row["event"] == "reclaim":
            assert key in parked and row["blocks"] >= 0


def check_utilization(result):
    summary = result.summary
    assert 0 <= summary["kv_utilization_mean"] <= summary["kv_utilization_max"] * (1 + 1e-9)
    assert summary["kv_utilization_max"] <= 1
    assert 0 <= summary["busy_fraction"] <= 1 + 1e-9


def test_invariants_hold_on_random_runs(tmp_path_factory):
    seen = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs=workloads(), setup=setups(), lanes=LANES)
    def check(programs, setup, lanes):
        watcher = Watcher()
        result = run(
            tmp_path_factory.mktemp("run"), programs, on_progress=watcher, **sections_of(setup, lanes)
        )
        watcher.check_end()
        check_counts(result, programs)
        check_times(result)
        check_tokens(result, programs, setup)
        check_decisions(result)
        check_utilization(result)
        seen.update(result.summary["decisions"])
        seen["hit"] += result.summary["prefix_hit_tokens"] > 0

    check()
    rare = {
        "preempt",
        "reclaim",
        "hold",
        "refuse",
        "protect",
        "evict",
        "expire",
        "release",
        "takeover",
        "hit",
    }
    assert rare <= seen.keys(), f"the random runs never saw {rare - seen.keys()}"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs=workloads(), setup=setups(), lanes=LANES)
def test_leaps_give_what_single_steps_give(tmp_path_factory, programs, setup, lanes):
    folder = tmp_path_factory.mktemp("modes")
    leapt, stepped = (
        run(
            folder,
            programs,
            **sections_of({**setup, "engine": {**setup["engine"], "step_mode": mode}}, lanes),
        )
        for mode in ("leap", "step")
    )
    for table in leapt.tables:
        assert rows(leapt, table) == rows(stepped, table), table
    for key, value in leapt.summary.items():
        if key in SUMS_OF_STEPS:
            assert value == pytest.approx(stepped.summary[key], rel=1e-9), key
        elif key not in MEASURED_ON_THE_MACHINE:
            assert value == stepped.summary[key], key


# --- the views tell the truth ----------------------------------------------------------------------------

SEEN: list[tuple] = []
"""(hook, pcb, time, other arguments) in the order of asking; the policy file below appends to it."""

RECORDERS = """
import math
import test_invariants
from agentservesim.policies.interface import Protect


class Retention:
    def on_call_complete(self, pcb, now_s, kv):
        test_invariants.SEEN.append(("complete", pcb, now_s, kv))
        return Protect(now_s + 0.1) if pcb.turn_index % 2 else None

    def on_call_arrival(self, pcb, now_s, kv):
        test_invariants.SEEN.append(("arrival", pcb, now_s, kv))
        return Protect(math.inf) if pcb.kv_protected and pcb.turn_index % 3 else None


class Scheduling:
    dynamic = True

    def priority(self, pcb, now_s):
        test_invariants.SEEN.append(("priority", pcb, now_s, None))
        return -pcb.turns_completed

    def admit(self, pcb, now_s, queue):
        test_invariants.SEEN.append(("admit", pcb, now_s, queue))
        return queue.program_admitted or queue.admitted_programs < 3


class Routing:
    def route(self, pcb, now_s, instances):
        test_invariants.SEEN.append(("route", pcb, now_s, list(instances)))
        return pcb.turn_index % len(instances)
"""


@pytest.fixture(scope="module")
def recorders(tmp_path_factory):
    """Policies that remember what they are shown."""
    file = tmp_path_factory.mktemp("policies") / "recorders.py"
    file.write_text(RECORDERS, encoding="utf-8")
    return {axis: f"{file}:{axis.capitalize()}" for axis in ("retention", "scheduling", "routing")}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(("ls", "pip", None))), min_size=1, max_size=6
    ),
    gap_s=st.sampled_from((0.0, 0.02, 0.5)),
    kv_cache_tokens=st.sampled_from((640, 2048)),
    instances=st.integers(1, 2),
    step_mode=st.sampled_from(("leap", "step")),
)
def test_a_pcb_is_what_the_records_say(
    tmp_path_factory, recorders, lengths, gap_s, kv_cache_tokens, instances, step_mode
):
    """Every view that any hook was shown, against the calls table of the same run."""
    programs = [
        chain(
            f"p{n}",
            turns,
            first=80 + 16 * n,
            tools=[{"name": tool, "duration_s": gap_s * (n + 1)}] if tool else [],
            arrival_s=0.03 * n,
        )
        for n, (turns, tool) in enumerate(lengths)
    ]
    tool_of = {f"p{n}": tool for n, (_, tool) in enumerate(lengths)}
    SEEN.clear()
    result = run(
        tmp_path_factory.mktemp("views"),
        programs,
        cluster={"kv_cache_tokens": kv_cache_tokens, "instances": instances},
        engine={"max_num_batched_tokens": 128, "step_mode": step_mode},
        policies=recorders,
    )
    assert result.complete
    calls = defaultdict(list)
    for row in rows(result):
        calls[row["program_id"]].append(row)
    closed: list[tuple[str, float]] = []
    gaps: dict[str, list[float]] = defaultdict(list)
    last_s = 0.0
    for hook, pcb, now_s, other in SEEN:
        assert now_s >= last_s
        last_s = now_s
        own = calls[pcb.program_id]
        done = own[: pcb.turns_completed]
        assert pcb.turn_index == pcb.turns_completed - (hook == "complete")
        call = own[pcb.turn_index]
        assert pcb.prompt_tokens == call["prompt_tokens"]
        assert pcb.arrival_s == own[0]["released_s"]
        assert pcb.attained_service_s == pytest.approx(
            sum(row["completed_s"] - row["scheduled_s"] for row in done)
        )
        assert pcb.context_tokens == (done[-1]["prompt_tokens"] + done[-1]["output_tokens"] if done else 0)
        placed = {done[-1]["instance"] if done else None}
        if hook == "priority":  # asked again while the call waits where it was placed
            placed.add(call["instance"])
        assert pcb.instance in placed
        assert 0 <= pcb.kv_resident_tokens <= pcb.context_tokens and pcb.kv_resident_tokens % 16 == 0
        assert pcb.kv_resident_tokens <= pcb.prompt_tokens or hook == "complete"
        assert pcb.kv_protected == (pcb.kv_deadline_s is not None)
        assert pcb.tool_name == (tool_of[pcb.program_id] if done else None)
        assert pcb.gap_started_s == (done[-1]["completed_s"] if done else None)
        assert pcb.in_gap == (hook in ("complete", "arrival"))
        if hook == "complete":
            assert now_s == call["completed_s"]
        elif hook == "arrival":
            assert now_s == call["released_s"] and done
        elif done and len(gaps[pcb.program_id]) < pcb.turn_index:
            gap = call["released_s"] - done[-1]["completed_s"]
            gaps[pcb.program_id].append(gap)
            closed.append((tool_of[pcb.program_id], gap))
        own_gaps = gaps[pcb.program_id]
        assert pcb.gap_count == len(own_gaps)
        assert pcb.gap_mean_s == (pytest.approx(sum(own_gaps) / len(own_gaps)) if own_gaps else None)
        of_tool = [gap for tool, gap in closed if tool is not None and tool == pcb.tool_name]
        assert pcb.tool_mean_gap_s == (pytest.approx(sum(of_tool) / len(of_tool)) if of_tool else None)
        check_other_view(hook, other, result.summary["kv_cache_tokens"], instances, programs)


def check_other_view(hook, view, capacity, instances, programs):
    if hook in ("complete", "arrival"):
        assert view.capacity_tokens == capacity and 0 <= view.instance < instances
        assert view.used_tokens >= 0 and view.protected_tokens >= 0
        assert view.used_tokens + view.protected_tokens <= capacity and 0 <= view.utilization <= 1
        assert view.running_context_tokens <= view.used_tokens * max(view.running_calls, 1)
    elif hook == "admit":
        assert view.capacity_tokens == capacity * instances
        assert 0 <= view.admitted_programs <= 3 and 0 <= view.held_calls < len(programs)
        assert view.program_admitted <= view.admitted_programs
    elif hook == "route":
        assert [each.index for each in view] == list(range(instances))
        assert all(
            each.in_flight >= 0 and each.used_tokens + each.protected_tokens <= capacity for each in view
        )


@pytest.mark.parametrize("retention", RETENTION)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_protection_never_refuses_or_blocks_a_call(tmp_path, retention, scheduling):
    """More programs than the pool holds, all of them protected in their gaps: everyone still finishes."""
    programs = [
        chain(f"p{n}", 4, first=200, new=60, output=12, tools=[{"name": "ls", "duration_s": 0.4}])
        for n in range(8)
    ]
    result = run(
        tmp_path,
        programs,
        cluster={"kv_cache_tokens": 1024},
        policies={"retention": retention, "scheduling": scheduling},
    )
    assert result.complete and result.summary["calls_completed"] == 32


def test_a_call_as_large_as_the_pool_runs_beside_protected_ones(tmp_path):
    """1024 tokens are 64 blocks, one of them vLLM's null block: 1008 tokens can be held."""
    programs = [
        chain("kept", 2, first=200, gap_s=5.0),
        program("large", [turn(1000, 9)], arrival_s=1.0),
        program("larger", [turn(1000, 10)], arrival_s=1.0),
    ]
    result = run(
        tmp_path, programs, cluster={"kv_cache_tokens": 1024}, policies={"retention": "ttl:tau_s=60"}
    )
    summary = result.summary
    assert summary["kv_cache_tokens"] == 1008
    assert (summary["calls_completed"], summary["calls_refused"]) == (3, 1)
    assert summary["protected_reclaims"] >= 1 and summary["preemptions"] == 0
    assert summary["kv_utilization_max"] == 1


def test_what_is_protected_for_a_call_placed_elsewhere_is_released_where_it_lies(tmp_path):
    """Held until admission, without a deadline: on the other instance nobody would ever take it over."""
    result = run(
        tmp_path,
        [chain("p", 3, first=200, gap_s=0.1)],
        cluster={"instances": 2},
        policies={"retention": "ttl:tau_s=50,until=admission", "routing": "round-robin"},
    )
    events = [(row["event"], row["turn_id"], row["instance"]) for row in rows(result, "decisions")]
    assert events == [
        ("protect", "t0", 0),
        ("release", "t0", 0),
        ("protect", "t1", 1),
        ("release", "t1", 1),
        ("protect", "t2", 0),
    ]


def test_a_reclaim_gets_past_blocks_that_somebody_uses(tmp_path):
    """a and b prefill the same prefix in turns of 24 tokens, so each hashes some of its blocks first and
    both keep copies: whoever hits the prefix later uses blocks of both, and neither's first ones whole."""
    shared = {"prefix": [{"id": "sys", "tokens": 64}]}
    programs = [
        program("a", [turn(65, 1)], **shared),
        program("b", [turn(65, 1)], **shared),
        program("fills the pool", [turn(512, 1)], arrival_s=1.0, **shared),
    ]
    result = run(
        tmp_path,
        programs,
        cluster={"kv_cache_tokens": 33 * 16},
        engine={"long_prefill_token_threshold": 24},
        policies={"retention": "ttl:tau_s=60"},
    )
    assert result.complete and result.summary["preemptions"] == 0
    assert calls_by_name(result)["fills the pool/t0"]["hit_tokens"] == 64
