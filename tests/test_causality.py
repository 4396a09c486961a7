"""No policy sees what a deployed engine could not, and nothing of the future changes the past."""

from __future__ import annotations

import gc
import itertools
import types
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import chain, program, rows, run, setups, turn, workloads

# --- a policy that looks for the future ------------------------------------------------------------------

HOME_OF_VIEWS = "agentservesim.policies"
AXES = ("retention", "scheduling", "admission", "routing")


class Lookout:
    """Walks whatever a policy is handed, and compares it with what is not known yet.

    hidden    value -> the event that reveals it, ('arrival' or 'completion', program, turn index)
    """

    def __init__(self, hidden):
        self.hidden = hidden
        self.revealed = set()
        self.hooks = set()
        self.found = set()

    def look(self, hook, event, pcb, *arguments):
        self.hooks.add(hook)
        if event is not None:
            self.revealed.add((event, pcb.program_id, pcb.turn_index))
            self.revealed.add(("arrival", pcb.program_id, pcb.turn_index))
        for path, value in reachable((pcb, *arguments)):
            home = type(value).__module__ or ""
            if home.startswith("agentservesim") and not home.startswith(HOME_OF_VIEWS):
                self.found.add(f"{hook}{path} is a {home}.{type(value).__name__}")
            if isinstance(value, int | float | str) and self.hidden.get(value, None) not in {
                None,
                *self.revealed,
            }:
                self.found.add(f"{hook}{path} is {value!r}, unknown before {self.hidden[value]}")


def reachable(arguments, limit=200_000):
    """Everything reachable from the arguments with a readable path, modules, types and globals left out."""
    seen = set()
    todo = deque((f"[{n}]", value) for n, value in enumerate(arguments))
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, types.ModuleType | type | types.FrameType | types.CodeType):
            continue
        seen.add(id(value))
        assert len(seen) < limit, f"{path}: too much is reachable"
        yield path, value
        if isinstance(value, str | bytes | int | float | None | types.BuiltinFunctionType):
            continue
        todo.extend((path + step, below) for step, below in _below(value))


def _below(value):
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield "<closure>", cell.cell_contents
        yield "<defaults>", value.__defaults__
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield "<key>", key
            yield f"[{key!r}]", item
        return
    if isinstance(value, list | tuple):
        yield from ((f"[{n}]", item) for n, item in enumerate(value))
        return
    for name in dir(value):
        if not name.startswith("__"):
            try:
                item = getattr(value, name)
            except Exception:
                continue
            if not isinstance(item, types.MethodType | types.BuiltinMethodType):
                yield f".{name}", item
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        yield from ((f"[{n}]", item) for n, item in enumerate(value))
    yield from (("<referent>", item) for item in gc.get_referents(value))


LOOKOUT: Lookout | None = None
"""The lookout of the run under way; the policy file below reports to it."""

SPIES = """
import math
import test_causality
from agentservesim.policies.interface import Protect


def look(*arguments):
    test_causality.LOOKOUT.look(*arguments)


class Retention:
    def on_call_complete(self, pcb, now_s, kv):
        look("on_call_complete", "completion", pcb, now_s, kv)
        return Protect(now_s + 0.5)

    def on_call_arrival(self, pcb, now_s, kv):
        look("on_call_arrival", "arrival", pcb, now_s, kv)
        return Protect(math.inf) if pcb.kv_protected else None


class Scheduling:
    dynamic = True

    def priority(self, pcb, now_s):
        look("priority", "arrival", pcb, now_s)
        return -pcb.turns_completed

    def victim(self, candidates, now_s):
        look("victim", None, candidates, now_s)
        return 0

    def admit(self, pcb, now_s, queue):
        look("scheduling.admit", "arrival", pcb, now_s, queue)
        return True


class Admission:
    def admit(self, pcb, now_s, queue):
        look("admit", "arrival", pcb, now_s, queue)
        return queue.program_admitted or queue.admitted_programs < 5


class Routing:
    def route(self, pcb, now_s, instances):
        look("route", "arrival", pcb, now_s, instances)
        return instances[pcb.turn_index % len(instances)].index
"""


def test_a_policy_finds_nothing_of_the_future(tmp_path, monkeypatch):
    """Every number and name of the workload is unmistakable, and every hook searches for those to come."""
    hidden, programs = {}, []
    for n in range(6):
        turns = []
        for k in range(4):
            # No sum of blocks equals these: they are no multiples of the block size.
            prompt, output, tool = 2005 + 1008 * k + 112 * n, 34 + 16 * k, f"tool-{n}-{k}"
            seconds = [round(base + 0.1 * n + 0.01 * k, 6) for base in (0.013701, 0.007307, 0.019013)]
            gap_s, pause_s, duration_s = seconds
            turns.append(
                turn(
                    prompt,
                    output,
                    turn_id=f"turn-{n}-{k}",
                    tools=[{"name": tool, "duration_s": duration_s}],
                    gap_s=gap_s,
                    pause_s=pause_s,
                )
            )
            hidden |= {prompt: ("arrival", f"p{n}", k), prompt + output: ("completion", f"p{n}", k)}
            hidden |= {tool: ("completion", f"p{n}", k), f"turn-{n}-{k}": ("arrival", f"p{n}", k)}
            hidden |= dict.fromkeys(seconds, ("arrival", f"p{n}", k + 1))
        programs.append(program(f"p{n}", turns, arrival_s=0.01 * n))
    lookout = Lookout(hidden)
    monkeypatch.setattr("test_causality.LOOKOUT", lookout)
    spies = tmp_path / "spies.py"
    spies.write_text(SPIES, encoding="utf-8")
    result = run(
        tmp_path,
        programs,
        cluster={"kv_cache_tokens": 12_800, "instances": 2},
        policies={axis: f"{spies}:{axis.capitalize()}" for axis in AXES},
    )
    assert result.complete and result.summary["preemptions"] > 0
    assert lookout.hooks == {
        "on_call_complete", "on_call_arrival", "priority", "victim", "scheduling.admit", "admit", "route",
    }  # fmt: skip
    assert not lookout.found, "\n".join(sorted(lookout.found, key=len)[:10])


def test_the_lookout_sees_through_attributes_closures_and_containers():
    """The search itself finds what is hidden from it."""

    class Slotted:
        __slots__ = ("inner",)

    def keeps(value):
        return lambda: value

    hidden = {4242: ("arrival", "p", 9)}
    for hide in (keeps, lambda v: {"k": [v]}, lambda v: {v}, lambda v: (keeps((v,)),), lambda v: iter([v])):
        holder = Slotted()
        holder.inner = hide(4242)
        assert any(value in hidden for _, value in reachable((holder,)) if isinstance(value, int))


CHAOS = """
from zlib import crc32
from agentservesim.policies.interface import Evict, Protect


def number(*seen):
    return crc32(repr(seen).encode())


class Retention:
    def on_call_complete(self, pcb, now_s, kv):
        drawn = number(pcb, now_s, kv)
        return [None, Evict(), Protect(now_s + drawn % 97 / 100), Protect(now_s + 0.3, drawn % 7)][drawn % 4]

    def on_call_arrival(self, pcb, now_s, kv):
        drawn = number(pcb, now_s, kv)
        return Protect(now_s + drawn % 97 / 100) if pcb.kv_protected and drawn % 2 else None


class Scheduling:
    dynamic = True

    def priority(self, pcb, now_s):
        return number(pcb, now_s) % 100

    def victim(self, candidates, now_s):
        return number(candidates, now_s) % len(candidates)


class Admission:
    def admit(self, pcb, now_s, queue):
        return number(pcb, now_s, queue) % 4 > 0


class Routing:
    def route(self, pcb, now_s, instances):
        return number(pcb, now_s, list(instances)) % len(instances)
"""
"""Policies whose decisions hang on every digit they are shown: whatever leaks into a view changes the run."""


# --- the future changed ----------------------------------------------------------------------------------


def named(programs):
    """The same programs with their turns' ids and parents spelled out."""
    for line in programs:
        for index, entry in enumerate(line["turns"]):
            entry.setdefault("turn_id", f"t{index}")
            entry.setdefault("parents", [index - 1] if index else [])
    return programs


@st.composite
def futures(draw, programs, result, at_s, more_programs):
    """The same workload up to `at_s` of the run, and another one after it.

    A turn's output, tools and whether anything follows it are known once it has completed; how long the gap
    takes only when the next call arrives.
    """
    calls = {(row["program_id"], row["turn_id"]): row for row in rows(result)}
    arrivals = {row["program_id"]: row["arrival_s"] for row in rows(result, "programs")}
    changed = []
    for line in programs:
        name = line["program_id"]
        if arrivals.get(name, at_s) >= at_s and draw(st.booleans()):
            continue
        floor = max(1, sum(group["tokens"] for group in line.get("prefix", ())))

        def released(turn_id, name=name):
            row = calls.get((name, turn_id))
            return row is not None and row["released_s"] < at_s

        def finished_s(turn_id, name=name):
            row = calls.get((name, turn_id))
            done_s = row["completed_s"] if row and row["status"] == "completed" else None
            return done_s if done_s is not None and done_s < at_s else None

        turns = [dict(entry) for entry in line["turns"]]
        for index, entry in enumerate(turns):
            children = [other["turn_id"] for other in turns if index in other["parents"]]
            done_s = finished_s(entry["turn_id"])
            if not released(entry["turn_id"]):
                entry["prompt_tokens"] = draw(st.integers(floor, 400))
                entry["output_tokens"] = draw(st.integers(0, 60))
                entry["tools"] = [{"name": "new", "duration_s": draw(st.sampled_from((0.0, 0.7)))}]
                entry["gap_s"] = draw(st.sampled_from((None, 0.0, 0.25)))
                entry.pop("kept_output_tokens", None)
            elif done_s is None:
                entry["output_tokens"] += draw(st.integers(0, 30))
                entry["gap_s"] = draw(st.sampled_from((None, 0.0, 0.25)))
            elif not any(map(released, children)):
                entry["gap_s"] = at_s - done_s + draw(st.sampled_from((1e-9, 0.1, 3.0)))
        if finished_s(turns[-1]["turn_id"]) is None and draw(st.booleans()):
            turns.append(turn(draw(st.integers(floor, 400)), 9, turn_id="more", parents=[len(turns) - 1]))
        changed.append({**line, "turns": turns})
    for number in range(draw(st.integers(0, 2)) if more_programs else 0):
        changed.append(named([chain(f"new-{number}", 2, arrival_s=at_s + number)])[0])
    return changed


def past(result, at_s):
    calls = [row for row in rows(result) if row["completed_s"] is not None and row["completed_s"] < at_s]
    return calls, [row for row in rows(result, "decisions") if row["time_s"] < at_s]


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    programs=workloads(),
    setup=setups(),
    lanes=st.sampled_from((None, None, 1, 2)),
    chaotic=st.booleans(),
)
def test_another_future_leaves_the_past_as_it_was(tmp_path_factory, data, programs, setup, lanes, chaotic):
    folder = tmp_path_factory.mktemp("causal")
    if chaotic:
        (folder / "chaos.py").write_text(CHAOS, encoding="utf-8")
        setup = {**setup, "policies": {axis: f"{folder}/chaos.py:{axis.capitalize()}" for axis in AXES}}
    programs = named(programs)
    if lanes:
        setup = {**setup, "workload": {"arrivals": {"process": "closed_loop", "lanes": lanes}}}
    before = run(folder, programs, **setup)
    times = {row["time_s"] for row in rows(before, "decisions")}
    times |= {row[key] for row in rows(before) for key in ("released_s", "completed_s") if row[key]}
    at_s = data.draw(st.sampled_from(sorted(times) or [0.0])) + data.draw(st.sampled_from((0.0, 1e-6, 0.004)))
    changed = data.draw(
        futures(programs, before, at_s, more_programs=not lanes)
    )  # a free lane takes one at once
    if not changed:
        return
    after = run(folder, changed, **setup)
    assert past(after, at_s) == past(before, at_s)


def test_a_recorded_arrival_is_no_input_to_the_next_call(tmp_path):
    """A slower engine releases the successors later: their arrivals are results."""
    line = chain("p", 4, gap_s=0.5)
    fast, slow = (rows(run(tmp_path, [line], step_time={"base_s": base_s})) for base_s in (0.001, 0.1))
    for calls in (fast, slow):
        for call, successor in itertools.pairwise(calls):
            assert successor["released_s"] == call["completed_s"] + 0.5
    assert [s["released_s"] > f["released_s"] for f, s in zip(fast, slow, strict=True)] == [
        False,
        True,
        True,
        True,
    ]
