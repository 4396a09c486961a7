"""Every rule of POLICIES.md on hand-computed views."""

from __future__ import annotations

import ast
import math
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from msgspec.structs import replace

import agentservesim.policies
from agentservesim.policies import interface
from agentservesim.policies.admission.none import AdmitAll
from agentservesim.policies.admission.program_cap import ProgramCap
from agentservesim.policies.interface import (
    PCB,
    Evict,
    InstanceView,
    KVView,
    PrefillLine,
    Protect,
    QueueView,
    Release,
)
from agentservesim.policies.retention.evolved_gap_ema import EvolvedGapEma
from agentservesim.policies.retention.immediate_release import ImmediateRelease
from agentservesim.policies.retention.lru import Lru
from agentservesim.policies.retention.min_waste import MinWaste, recompute_waste
from agentservesim.policies.retention.pressure_ttl import PressureTtl
from agentservesim.policies.retention.tool_ttl import ToolTtl
from agentservesim.policies.retention.ttl import Ttl
from agentservesim.policies.routing.least_loaded import LeastLoaded
from agentservesim.policies.routing.round_robin import RoundRobin
from agentservesim.policies.routing.session_affinity import SessionAffinity
from agentservesim.policies.scheduling.continuum import Continuum
from agentservesim.policies.scheduling.evolved_sqrt_plas import EvolvedSqrtPlas
from agentservesim.policies.scheduling.fcfs import Fcfs
from agentservesim.policies.scheduling.plas import Plas
from agentservesim.policies.scheduling.program_fcfs import ProgramFcfs
from agentservesim.policies.scheduling.resident_first import ResidentFirst


def pcb(**changes):
    """A program in the gap after its first call, which asked for the tool `ls`."""
    base = PCB(
        program_id="p", arrival_s=1.5, turn_index=1, turns_completed=1, attained_service_s=4.0, instance=0,
        prompt_tokens=900, context_tokens=1000, kv_resident_tokens=0, kv_protected=False, kv_deadline_s=None,
        in_gap=True, tool_name="ls", gap_started_s=10.0, gap_count=0, gap_mean_s=None, tool_mean_gap_s=None,
    )  # fmt: skip
    return replace(base, **changes)


def kv(utilization=0.5, **changes):
    base = KVView(
        instance=0, capacity_tokens=1000, used_tokens=round(1000 * utilization), protected_tokens=0,
        running_calls=1, waiting_calls=0, running_context_tokens=300, in_flight_tokens=0,
        prefill=PrefillLine(slope_s_per_token=0.001, base_s=0.01, knee_tokens=256),
    )  # fmt: skip
    return replace(base, **changes)


def instance(index, running=0, waiting=0, max_num_seqs=4):
    return InstanceView(
        index=index, running_calls=running, waiting_calls=waiting, max_num_seqs=max_num_seqs,
        capacity_tokens=1000, used_tokens=0, protected_tokens=0,
    )  # fmt: skip


def queue(**changes):
    base = QueueView(
        admitted_programs=1,
        admitted_context_tokens=400,
        program_admitted=False,
        capacity_tokens=1000,
        held_calls=0,
    )
    return replace(base, **changes)


# --- retention -------------------------------------------------------------------------------------------


def test_lru_and_immediate_release():
    assert Lru().on_call_complete(pcb(), 10.0, kv()) is None
    assert ImmediateRelease().on_call_complete(pcb(), 10.0, kv()) == Evict()


def test_ttl_protects_for_tau():
    assert Ttl().on_call_complete(pcb(), 10.0, kv()) == Protect(12.0, 0.0)
    assert Ttl(tau_s=0.5).on_call_complete(pcb(), 10.0, kv(1.0)) == Protect(10.5, 0.0)


@pytest.mark.parametrize("policy", [Ttl, PressureTtl])
def test_the_next_arrival_releases_or_holds_what_is_still_protected(policy):
    protected, expired = pcb(kv_protected=True, kv_deadline_s=12.0), pcb()
    assert policy().on_call_arrival(protected, 11.0, kv()) == Release()
    assert policy(until="admission").on_call_arrival(protected, 11.0, kv()) == Protect(math.inf)
    for until in ("arrival", "admission"):
        assert policy(until=until).on_call_arrival(expired, 13.0, kv()) is None


@pytest.mark.parametrize(
    ("utilization", "tau_s"),
    [(0.0, 2.0), (0.7, 2.0), (0.75, 1.75), (0.8, 1.5), (0.9, 1.0), (1.0, 1.0)],
)
def test_pressure_ttl_shortens_between_soft_and_hard(utilization, tau_s):
    decision = PressureTtl().on_call_complete(pcb(), 10.0, kv(utilization))
    assert decision.deadline_s == pytest.approx(10 + tau_s, abs=1e-12)
    assert decision.value == 0.0


def test_protected_tokens_count_as_pressure():
    decision = PressureTtl().on_call_complete(pcb(), 10.0, kv(used_tokens=500, protected_tokens=300))
    assert decision.deadline_s == pytest.approx(11.5)


@pytest.mark.parametrize(
    ("tool_name", "tool_mean_gap_s", "deadline_s"),
    [("ls", None, 12.0), ("ls", 0.1, 12.0), ("ls", 2.0, 12.0), ("ls", 2.0001, None), (None, None, None)],
)
def test_tool_ttl_pins_short_and_unseen_tools(tool_name, tool_mean_gap_s, deadline_s):
    state = pcb(tool_name=tool_name, tool_mean_gap_s=tool_mean_gap_s)
    expected = None if deadline_s is None else Protect(deadline_s)
    assert ToolTtl().on_call_complete(state, 10.0, kv()) == expected


def test_tool_ttl_holds_a_waiting_call_until_admission():
    assert ToolTtl().on_call_arrival(pcb(kv_protected=True), 11.0, kv()) == Protect(math.inf)
    assert ToolTtl().on_call_arrival(pcb(), 11.0, kv()) is None
    # The bounds are parameters: a slow tool is pinned for as long as asked.
    slow = pcb(tool_mean_gap_s=5.0)
    assert ToolTtl(pin_s=8, threshold_s=5).on_call_complete(slow, 10.0, kv()) == Protect(18.0)


def exact_recompute_waste(context, view):
    """The formula of POLICIES.md in exact arithmetic, written apart from the policy."""
    a, c = Fraction(view.prefill.slope_s_per_token), Fraction(view.prefill.base_s)
    s, r = view.prefill.knee_tokens, view.running_context_tokens
    c_h = max(s - view.in_flight_tokens, 1)
    n = max(math.ceil(Fraction(context, c_h)) - 1, 0)
    last = context - n * c_h
    return (a * s + c) * (1 + n) * Fraction(n, 2) * c_h + a * c_h * n * r + a * last * r


@pytest.mark.parametrize("context", [0, 1, 255, 256, 257, 512, 1000, 100_000])
@pytest.mark.parametrize("in_flight", [0, 56, 255, 256, 5000])
@pytest.mark.parametrize("running", [0, 300])
def test_recompute_waste_is_the_formula(context, in_flight, running):
    view = kv(in_flight_tokens=in_flight, running_context_tokens=running)
    exact = float(exact_recompute_waste(context, view))
    assert recompute_waste(context, view) == pytest.approx(exact, rel=1e-12)


def test_recompute_waste_by_hand():
    # knee 256, nothing in flight: 1000 tokens are 3 whole chunks of 256 and 232 more.
    # own: (0.256 + 0.01) s * 4 * 1.5 * 256 tokens; the 300 running tokens wait 0.768 s and 0.232 s.
    assert recompute_waste(1000, kv()) == pytest.approx(0.266 * 6 * 256 + 0.768 * 300 + 0.232 * 300)


def test_min_waste_weighs_the_gap_against_recomputing():
    saved_per_token_s = recompute_waste(1000, kv()) / 1000  # 0.708576 s: a gap this long is worth keeping
    shorter = MinWaste().on_call_complete(pcb(tool_mean_gap_s=0.5), 10.0, kv())
    assert shorter.deadline_s == 10.5
    assert shorter.value == pytest.approx(1000 * (saved_per_token_s - 0.5))
    assert MinWaste().on_call_complete(pcb(tool_mean_gap_s=0.71), 10.0, kv()) == Evict()
    # Equal wastes keep: W_keep <= W_evict. Nothing costs nothing here.
    idle = kv(running_context_tokens=0)
    assert MinWaste().on_call_complete(pcb(tool_mean_gap_s=0.0), 10.0, idle).deadline_s == 10.0
    short = pcb(context_tokens=200, tool_mean_gap_s=0.0)
    assert MinWaste().on_call_complete(short, 10.0, idle) == Protect(10.0)
    assert MinWaste().on_call_complete(replace(short, tool_mean_gap_s=0.001), 10.0, idle) == Evict()


def test_min_waste_takes_the_gap_from_the_tool_then_the_program_then_leaves_it_to_lru():
    policy = MinWaste()
    assert policy.on_call_complete(pcb(gap_mean_s=9.0, tool_mean_gap_s=0.5), 10.0, kv()).deadline_s == 10.5
    assert policy.on_call_complete(pcb(gap_mean_s=0.25), 10.0, kv()).deadline_s == 10.25
    assert policy.on_call_complete(pcb(), 10.0, kv()) is None


def test_evolved_gap_ema_learns_per_tool():
    policy = EvolvedGapEma()

    def protected_s(**changes):
        state = pcb(context_tokens=20_000, **changes)
        return policy.on_call_complete(state, 10.0, kv()).deadline_s - 10

    assert protected_s() == 2.0  # nothing known
    assert protected_s(gap_mean_s=7.0) == 7.0  # the program's own gaps
    policy.on_call_arrival(pcb(gap_started_s=10.0), 14.0, kv())
    assert protected_s(gap_mean_s=7.0) == pytest.approx(4.0)  # the first observation
    policy.on_call_arrival(pcb(gap_started_s=20.0, kv_protected=True), 29.0, kv())
    assert protected_s() == pytest.approx(0.8 * 4 + 0.2 * 9)
    assert protected_s(tool_name="grep") == 2.0
    assert protected_s(tool_name=None) == 2.0


def test_evolved_gap_ema_answers_nothing_at_arrival():
    policy = EvolvedGapEma()
    assert policy.on_call_arrival(pcb(kv_protected=True), 11.0, kv()) is None
    assert policy.on_call_arrival(pcb(gap_started_s=None, turns_completed=0, in_gap=False), 0.0, kv()) is None


@pytest.mark.parametrize(
    ("context_tokens", "utilization", "protected_s"),
    [
        (0, 0.5, 1.0),
        (10_000, 0.5, 1.0),
        (20_000, 0.7, 2.0),
        (60_000, 0.5, 6.0),
        (20_000, 0.8, 1.5),
        (60_000, 0.95, 3.0),
    ],
)
def test_evolved_gap_ema_scales_with_context_and_pressure(context_tokens, utilization, protected_s):
    decision = EvolvedGapEma().on_call_complete(pcb(context_tokens=context_tokens), 10.0, kv(utilization))
    assert decision.deadline_s == pytest.approx(10 + protected_s)


# --- scheduling ------------------------------------------------------------------------------------------


def test_orders_by_arrival_and_service_in_ms():
    assert Fcfs().priority(pcb(), 20.0) is None
    assert ProgramFcfs().priority(pcb(arrival_s=1.2344), 20.0) == 1234
    assert Plas().priority(pcb(attained_service_s=0.0), 20.0) == 0
    assert Plas().priority(pcb(attained_service_s=4.0006), 20.0) == 4001
    for policy in (ProgramFcfs(), Plas(), Continuum(), ResidentFirst(), EvolvedSqrtPlas()):
        assert type(policy.priority(pcb(), 20.0)) is int


def test_continuum_runs_protected_programs_first_then_by_arrival():
    states = [(9e8, True), (2.0, True), (0.0, False), (1.0, False)]
    calls = [pcb(arrival_s=arrival_s, kv_protected=protected) for arrival_s, protected in states]
    ranked = sorted(calls, key=lambda call: Continuum().priority(call, 20.0))
    assert [call.arrival_s for call in ranked] == [2.0, 9e8, 0.0, 1.0]


def test_resident_first_wants_more_than_half():
    def first(context, resident):
        call = pcb(arrival_s=9e8, context_tokens=context, kv_resident_tokens=resident)
        return ResidentFirst().priority(call, 20.0) < ResidentFirst().priority(pcb(arrival_s=0.0), 20.0)

    assert ResidentFirst.dynamic is True
    assert first(1000, 501) and first(1, 1) and first(1000, 1000)
    assert not first(1000, 500) and not first(1, 0) and not first(0, 0)
    assert ResidentFirst().priority(pcb(kv_resident_tokens=1000), 20.0) == 1500


@pytest.mark.parametrize(
    ("service_s", "context", "resident", "priority"),
    [
        (0.0, 0, 0, 0),
        (4.0, 0, 0, 2000),
        (2.0, 0, 0, 1414),
        (4.0, 1000, 0, 2030),
        (4.0, 1000, 1000, 1930),
        (0.0, 10_000, 10_000, -700),
    ],
)
def test_evolved_sqrt_plas(service_s, context, resident, priority):
    call = pcb(attained_service_s=service_s, context_tokens=context, kv_resident_tokens=resident)
    assert EvolvedSqrtPlas().priority(call, 20.0) == priority


# --- admission and routing -------------------------------------------------------------------------------


def test_admit_all():
    assert AdmitAll().admit(pcb(), 0.0, queue(admitted_context_tokens=10**9)) is True


def test_program_cap_holds_a_first_call_that_does_not_fit_below_f():
    policy = ProgramCap(f=0.5)
    assert policy.admit(pcb(prompt_tokens=99), 0.0, queue()) is True
    assert policy.admit(pcb(prompt_tokens=100), 0.0, queue()) is False  # 500 is not below 500
    assert policy.admit(pcb(prompt_tokens=100), 0.0, queue(program_admitted=True)) is True
    alone = queue(admitted_programs=0, admitted_context_tokens=0)
    assert policy.admit(pcb(prompt_tokens=9999), 0.0, alone) is True
    assert ProgramCap().admit(pcb(prompt_tokens=499), 0.0, queue()) is True
    assert ProgramCap().admit(pcb(prompt_tokens=500), 0.0, queue()) is False


def test_round_robin_takes_turns():
    policy, instances = RoundRobin(), [instance(0), instance(1), instance(2)]
    assert [policy.route(pcb(instance=2), 0.0, instances) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_counts_waiting_calls_and_breaks_ties_low():
    assert LeastLoaded().route(pcb(), 0.0, [instance(0, 2), instance(1, 0, 1), instance(2, 1)]) == 1
    assert LeastLoaded().route(pcb(), 0.0, [instance(0, 1), instance(1), instance(2)]) == 1


def test_session_affinity_returns_below_the_limit():
    instances = [instance(0), instance(1, 1, 1), instance(2, 3, 0)]
    assert SessionAffinity().route(pcb(instance=2), 0.0, instances) == 2
    assert SessionAffinity(limit=3).route(pcb(instance=2), 0.0, instances) == 0
    assert SessionAffinity(limit=3).route(pcb(instance=1), 0.0, instances) == 1
    assert SessionAffinity().route(pcb(instance=None), 0.0, instances) == 0
    full = [instance(0), instance(1, running=3, waiting=1, max_num_seqs=4)]
    assert SessionAffinity().route(pcb(instance=1), 0.0, full) == 0


# --- parameters and imports ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Ttl(tau_s=0), "tau_s"),
        (lambda: Ttl(tau_s=math.nan), "tau_s"),
        (lambda: Ttl(until="never"), "until"),
        (lambda: PressureTtl(tau_s=-1), "tau_s"),
        (lambda: PressureTtl(soft=0.9, hard=0.9), "soft < hard"),
        (lambda: PressureTtl(soft=-0.1), "soft < hard"),
        (lambda: PressureTtl(hard=1.1), "soft < hard"),
        (lambda: PressureTtl(until=""), "until"),
        (lambda: ToolTtl(pin_s=0), "pin_s"),
        (lambda: ToolTtl(threshold_s=-0.1), "threshold_s"),
        (lambda: EvolvedGapEma(ema_old=1), "ema_old"),
        (lambda: EvolvedGapEma(scale_context_tokens=0), "scale_context_tokens"),
        (lambda: EvolvedGapEma(unseen_gap_s=0), "unseen_gap_s"),
        (lambda: EvolvedGapEma(soft=1.0, hard=1.0), "soft < hard"),
        (lambda: ProgramCap(f=0), "share"),
        (lambda: ProgramCap(f=1.01), "share"),
        (lambda: SessionAffinity(limit=0), "limit"),
    ],
)
def test_a_wrong_value_is_refused_by_name(build, named):
    with pytest.raises(ValueError, match=named):
        build()


def test_bounds_that_are_allowed():
    PressureTtl(soft=0.0, hard=1.0)
    ToolTtl(threshold_s=0)
    EvolvedGapEma(ema_old=0)
    ProgramCap(f=1)
    Ttl(math.inf)


def test_a_policy_imports_only_the_interface_and_the_standard_library():
    root = Path(agentservesim.policies.__file__).parent
    files = [file for file in root.rglob("*.py") if file.parent != root]
    assert len(files) == 18 + 4  # with the packages' own
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module in {*sys.stdlib_module_names, "collections.abc", interface.__name__}
            elif isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= sys.stdlib_module_names
