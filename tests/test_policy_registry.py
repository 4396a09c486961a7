"""Naming, building and refusing policies."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentservesim.errors import InputError, PolicyError
from agentservesim.policies import interface, registry
from agentservesim.policies.registry import AXES, available, build, label, split_specs
from agentservesim.policies.specs import parse_spec, spec_text

NAMES = [(axis, name) for axis in AXES for name in registry._BUILT_IN[axis]]
PROTOCOLS = {
    "retention": interface.RetentionPolicy,
    "scheduling": interface.SchedulingPolicy,
    "admission": interface.AdmissionPolicy,
    "routing": interface.RoutingPolicy,
}

MINE = '''
import abc
from dataclasses import dataclass
from agentservesim.policies.interface import SchedulingPolicy

built = []

class Mine:
    """Keep a while."""
    def __init__(self, keep_s: float = 1.0, tools: list[str] | None = None, note: str = "", strict=False):
        self.keep_s, self.tools, self.note, self.strict = keep_s, tools, note, strict
        built.append(self)
    def on_call_complete(self, pcb, now_s, kv): return len(built)
    def priority(self, pcb, now_s): return 7

@dataclass
class Data:
    weight: int = 2
    def priority(self, pcb, now_s): return self.weight

class Short:
    def on_call_complete(self, pcb, now_s): return None

class Late:
    def on_call_complete(self, pcb, now_s, kv): return None
    def on_call_arrival(self, pcb): return None

class Hooks:
    def victim(self, candidates, now_s): return 0
    def admit(self, pcb, now_s, queue): return True

class Picky:
    def __init__(self, share: float = 0.5):
        if share > 1:
            raise ValueError(f"share must be at most 1, not {share}")
    def priority(self, pcb, now_s): return 0

class Broken:
    def __init__(self): {}["missing"]
    def priority(self, pcb, now_s): return 0

class Abstract(abc.ABC):
    @abc.abstractmethod
    def priority(self, pcb, now_s): ...

class Async:
    async def priority(self, pcb, now_s): return 0

class Constant:
    priority = 3

class Inherits(SchedulingPolicy):
    pass

class Typo:
    def prioritise(self, pcb, now_s): return 0

class Dynamic:
    dynamic = "yes"
    def priority(self, pcb, now_s): return 0

class Needs:
    def __init__(self, k: int): self.k = k
    def priority(self, pcb, now_s): return self.k

class Loose:
    def __init__(self, **options): self.options = options
    def priority(self, pcb, now_s): return 0

class Unresolved:
    def __init__(self, x: "NotHere" = 1): self.x = x
    def priority(self, pcb, now_s): return 0

number = 3
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def refusal(kind, axis, spec):
    with pytest.raises(kind) as caught:
        build(axis, spec)
    return str(caught.value)


# --- built-ins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "name"), NAMES)
def test_every_built_in_is_listed_and_built_fresh(axis, name):
    assert isinstance(build(axis, name), PROTOCOLS[axis])
    assert build(axis, name) is not build(axis, name)
    info = next(info for info in available(axis) if info.name == name)
    assert info.source == "built-in"
    assert info.summary.endswith(".") and len(info.summary) <= 110
    defaults = ",".join(f"{key}={default}" for key, _, default in info.parameters)
    same = build(axis, f"{name}:{defaults}" if defaults else name)
    assert vars(same) == vars(build(axis, name))


def test_the_names_are_those_of_the_specification():
    assert {axis: list(names) for axis, names in registry._BUILT_IN.items()} == {
        "retention": [
            "lru", "immediate-release", "ttl", "pressure-ttl", "tool-ttl", "min-waste", "evolved-gap-ema",
        ],
        "scheduling": ["fcfs", "program-fcfs", "plas", "continuum", "resident-first", "evolved-sqrt-plas"],
        "admission": ["none", "program-cap"],
        "routing": ["round-robin", "least-loaded", "session-affinity"],
    }  # fmt: skip


def test_parameters_are_described():
    ttl = next(info for info in available("retention") if info.name == "ttl")
    assert ttl.parameters == [("tau_s", "float", "2"), ("until", "arrival | admission", "arrival")]
    affinity = next(info for info in available("routing") if info.name == "session-affinity")
    assert affinity.parameters == [("limit", "int | null", "null")]


def test_a_built_in_is_imported_only_when_asked_for(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("agentservesim.policies.routing.")]:
        monkeypatch.delitem(sys.modules, name)
    build("routing", "round-robin")
    assert "agentservesim.policies.routing.round_robin" in sys.modules
    assert "agentservesim.policies.routing.least_loaded" not in sys.modules


# --- forms of a spec -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "tau_s", "until", "text"),
    [
        ("ttl", 2.0, "arrival", "ttl"),
        (" ttl ", 2.0, "arrival", "ttl"),
        ({"ttl": None}, 2.0, "arrival", "ttl"),
        ({"ttl": {}}, 2.0, "arrival", "ttl"),
        ("ttl:tau_s=2", 2.0, "arrival", "ttl:tau_s=2"),
        ({"ttl": {"tau_s": 2}}, 2.0, "arrival", "ttl:tau_s=2"),
        ("ttl: until = admission , tau_s = 2.0", 2.0, "admission", "ttl:tau_s=2,until=admission"),
        ("ttl:tau_s=1e-3", 0.001, "arrival", "ttl:tau_s=0.001"),
        ("ttl:tau_s=1e-7", 1e-7, "arrival", "ttl:tau_s=1.0e-07"),
        ({"ttl": {"tau_s": "1e-3"}}, 0.001, "arrival", "ttl:tau_s=0.001"),
        ("ttl:tau_s=.inf", math.inf, "arrival", "ttl:tau_s=.inf"),
    ],
)
def test_forms(spec, tau_s, until, text):
    policy = build("retention", spec)
    assert (policy.tau_s, policy.until) == (tau_s, until)
    assert label("retention", spec) == text
    assert label("retention", text) == text
    assert vars(build("retention", text)) == vars(policy)


def test_null_and_none_bounds():
    assert build("routing", "session-affinity:limit=null").limit is None
    assert build("routing", {"session-affinity": {"limit": 3}}).limit == 3


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("lru", ["lru"]),
        ("lru,ttl:tau_s=2,until=admission,./a.py:A", ["lru", "ttl:tau_s=2,until=admission", "./a.py:A"]),
        ("ttl:tau_s=2,ttl:tau_s=4", ["ttl:tau_s=2", "ttl:tau_s=4"]),
        ("./a.py:A:x=1,y=b:c,lru", ["./a.py:A:x=1,y=b:c", "lru"]),
        (" lru , ttl ", ["lru", "ttl"]),
        ('a:x=[1,2],y="p,q",b', ['a:x=[1,2],y="p,q"', "b"]),
    ],
)
def test_split_specs(text, specs):
    assert split_specs(text) == specs
    assert split_specs(",".join(specs)) == specs


@pytest.mark.parametrize("text", ["", "lru,", ",lru", "lru,,ttl", "tau_s=2", "lru,tau_s=2"])
def test_split_specs_refuses(text):
    with pytest.raises(InputError, match="policy list"):
        split_specs(text)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = scalars | st.lists(scalars, max_size=3)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), values, max_size=4))
def test_the_text_of_parameters_reads_back(parameters):
    text = spec_text("mine", parameters)
    assert split_specs(f"lru,{text},ttl:tau_s=2") == ["lru", text, "ttl:tau_s=2"]
    read = {key: given.value for key, given in parse_spec("retention", text).given.items()}
    assert read == parameters


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "expected name, name:key=value"),
        (3, "expected name, name:key=value"),
        ({}, "expected one name"),
        ({"ttl": None, "lru": None}, "expected one name"),
        ({"ttl": 3}, "expected {key: value} below it, not 3"),
        ({"ttl": {3: 4}}, "parameter name 3"),
        ({"ttl:tau_s=1": {"tau_s": 2}}, "not both"),
        ("ttl:", "expected key=value after ':', not ''"),
        ("ttl:tau_s", "expected key=value after ':', not 'tau_s'"),
        ("ttl:tau_s=", "expected key=value"),
        ("ttl:tau_s=1,tau_s=2", "tau_s is given twice"),
        ("ttl:tau_s=}", "tau_s is '}': expected a YAML value"),
        ("ttl:until=2024-13-45", "until is '2024-13-45'"),
        ("./mine.py", "./mine.py:Class"),
        ("./mine.py:", "./mine.py:Class"),
        ("./mine.py:Mine,keep_s=3", "./mine.py:Class:key=value"),
    ],
)
def test_a_malformed_spec_is_refused(spec, says):
    assert says in refusal(InputError, "retention", spec)


# --- names and parameters --------------------------------------------------------------------------------


def test_unknown_names():
    message = refusal(InputError, "retention", "tll:tau_s=2")
    assert "unknown retention policy 'tll' (did you mean 'ttl'?)" in message
    assert all(name in message for name in registry._BUILT_IN["retention"])
    assert "./file.py:Class" in message
    assert "did you mean 'pressure-ttl'" in refusal(InputError, "retention", "pressure_ttl")
    assert "unknown policy axis 'rooting' (did you mean 'routing'?)" in refusal(InputError, "rooting", "x")
    for ask in (available, lambda axis: label(axis, "x")):
        with pytest.raises(InputError, match="unknown policy axis"):
            ask("rooting")


def test_a_built_in_on_the_wrong_axis():
    message = refusal(PolicyError, "retention", "plas")
    assert "plas is a policy of the scheduling axis" in message
    assert "lru" in message


@pytest.mark.parametrize(
    ("axis", "spec", "says"),
    [
        ("retention", "ttl:tau=2", "unknown parameter 'tau' (did you mean 'tau_s'?); it takes tau_s: float"),
        ("retention", "lru:tau_s=2", "unknown parameter 'tau_s'; it takes no parameters"),
        ("retention", "ttl:tau_s=soon", "tau_s is 'soon'; expected float"),
        ("retention", {"ttl": {"tau_s": [2]}}, "tau_s is [2]; expected float"),
        ("retention", "ttl:tau_s=true", "tau_s is 'true'; expected float"),
        ("retention", {"ttl": {"tau_s": True}}, "tau_s is True; expected float"),
        ("retention", "ttl:until=admision", "expected arrival | admission (did you mean 'admission'?)"),
        ("retention", "ttl:tau_s=-1", "tau_s must be above 0 seconds, not -1"),
        ("retention", "pressure-ttl:soft=0.95", "0 <= soft < hard <= 1, not 0.95 and 0.9"),
        ("routing", "session-affinity:limit=2.5", "limit is '2.5'; expected int | null"),
        ("routing", {"session-affinity": {"limit": 2.0}}, "limit is 2.0; expected int | null"),
        ("admission", "program-cap:f=90", "f must be a share of the KV pool"),
    ],
)
def test_wrong_parameters(axis, spec, says):
    message = refusal(InputError, axis, spec)
    assert says in message
    name = spec.partition(":")[0] if isinstance(spec, str) else next(iter(spec))
    assert message.startswith(f"{axis} policy {name}: ")


# --- files -----------------------------------------------------------------------------------------------


def test_a_class_in_a_file(folder):
    policy: Any = build("retention", "./mine.py:Mine:keep_s=3,tools=[ls,cat],note=on,strict=true")
    assert (policy.keep_s, policy.tools, policy.note, policy.strict) == (3.0, ["ls", "cat"], "on", True)
    text = label("retention", {"./mine.py:Mine": {"note": "a,b: c", "keep_s": 3}})
    assert text == './mine.py:Mine:keep_s=3,note="a,b: c"'
    assert build("retention", text).note == "a,b: c"
    assert build("retention", f"{folder}/mine.py:Mine").keep_s == 1.0
    assert build("scheduling", "./mine.py:Mine").priority(None, 0.0) == 7  # a class may serve several axes
    assert build("scheduling", "./mine.py:Data:weight=4").priority(None, 0.0) == 4
    assert build("admission", "./mine.py:Hooks").admit(None, 0.0, None) is True
    assert build("scheduling", "./mine.py:Needs:k=5").k == 5
    assert build("scheduling", "./mine.py:Loose:a=1,b=x").options == {"a": 1, "b": "x"}
    assert build("scheduling", "./mine.py:Unresolved:x=2").x == 2


def test_nothing_carries_over_between_builds(folder):
    for _ in range(2):
        assert build("retention", "./mine.py:Mine").on_call_complete(None, 0.0, None) == 1
    assert not list(folder.glob("__pycache__"))


def test_an_edit_takes_effect_at_once(folder):
    file = folder / "edited.py"
    template = "class P:\n    def priority(self, pcb, now_s): return {}\n"
    for value in (1, 2):
        file.write_text(template.format(value))
        os.utime(file, (1, 1))  # same size, same time: what an import cache would miss
        assert build("scheduling", "./edited.py:P").priority(None, 0.0) == value


def test_two_files_with_the_same_class_live_side_by_side(folder):
    for name, value in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        (folder / name / "p.py").write_text(f"class P:\n    def priority(self, pcb, now_s): return {value}\n")
    first, second = build("scheduling", "a/p.py:P"), build("scheduling", "b/p.py:P")
    assert [first.priority(None, 0.0), second.priority(None, 0.0)] == [1, 2]
    assert type(first).__module__ != type(second).__module__


@pytest.mark.parametrize(
    ("kind", "axis", "class_name", "says"),
    [
        (PolicyError, "retention", "Mime", "no class 'Mime' (did you mean 'Mine'?); it defines Mine, Data"),
        (PolicyError, "retention", "number", "number is not a class; it defines Mine"),
        (PolicyError, "retention", "Short", "Short.on_call_complete takes (pcb, now_s); expected"),
        (PolicyError, "retention", "Late", "Late.on_call_arrival takes (pcb); expected (pcb, now_s, kv)"),
        (PolicyError, "routing", "Short",
         "no method route(pcb, now_s, instances); it fits the retention axis (it has on_call_complete)"),
        (PolicyError, "scheduling", "Hooks",
         "no method priority(pcb, now_s); victim and admit only add to it; it fits the admission axis"),
        (PolicyError, "scheduling", "Inherits", "no method priority(pcb, now_s); it defines no method"),
        (PolicyError, "scheduling", "Typo", "no method priority(pcb, now_s); it defines prioritise"),
        (PolicyError, "scheduling", "Abstract", "Abstract is abstract, it does not define priority"),
        (PolicyError, "scheduling", "Async", "Async.priority is async or a generator"),
        (PolicyError, "scheduling", "Constant", "Constant.priority is 3, not a method"),
        (PolicyError, "scheduling", "Dynamic", "Dynamic.dynamic must be True or False"),
        (PolicyError, "scheduling", "Broken", "its constructor raised KeyError: 'missing'"),
        (InputError, "scheduling", "Picky:share=2", "share must be at most 1, not 2.0 (raised at ./mine.py:"),
        (InputError, "scheduling", "Needs", "k must be given; it takes k: int"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_class_is_said(folder, kind, axis, class_name, says):
    message = refusal(kind, axis, f"./mine.py:{class_name}")
    assert says in message
    assert message.startswith(f"{axis} policy ./mine.py:{class_name.partition(':')[0]}: ")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\nimport not_installed\n", "./bad.py:2: the file does not import: ModuleNotFoundError: No "),
        ("x = 1\n\ndef f(:\n", "./bad.py:3: the file does not import: SyntaxError: "),
        ("def f():\n    1 / 0\n\nf()\n", "./bad.py:2: the file does not import: ZeroDivisionError: div"),
        ("raise SystemExit(2)\n", "./bad.py:1: the file does not import: SystemExit: 2"),
        ("raise KeyError\n", "./bad.py:1: the file does not import: KeyError"),
        ('x = "\udcff"\n', "the file does not import: "),
        ("x = 1\n", "no class 'Mine'; it defines no class"),
    ],
)
def test_a_file_that_does_not_import(folder, source, says):
    (folder / "bad.py").write_bytes(source.encode("utf-8", "surrogateescape"))
    before = set(sys.modules)
    message = refusal(PolicyError, "retention", "./bad.py:Mine")
    assert says in message
    if "does not import" in says:
        assert set(sys.modules) <= before


def test_a_file_that_cannot_be_read(folder):
    assert f"no such file (looked for {folder}/none.py)" in refusal(InputError, "retention", "./none.py:Mine")
    (folder / "folder.py").mkdir()
    assert "./folder.py: cannot read it" in refusal(InputError, "retention", "./folder.py:Mine")


# --- published policies ----------------------------------------------------------------------------------


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Install a fake distribution that publishes the given entry points."""

    def publish(package, source, **points):
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / f"{package}_module.py").write_text(source)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name.replace('_', '-')} = {package}_module:{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[agentservesim.policies]", *lines, ""]))
        importlib.invalidate_caches()

    yield publish
    for name in [name for name in sys.modules if name.endswith("_module")]:
        del sys.modules[name]


def test_a_published_policy_is_used_like_a_built_in(publish):
    publish("pub", MINE, my_mine="Mine", my_hooks="Hooks", lru="Data")
    assert build("retention", "my-mine:keep_s=4").keep_s == 4.0
    assert build("scheduling", "my-mine").priority(None, 0.0) == 7
    assert build("admission", "my-hooks").admit(None, 0.0, None)
    assert label("retention", {"my-mine": {"keep_s": 4}}) == "my-mine:keep_s=4"
    assert "it fits the retention axis" in refusal(PolicyError, "routing", "my-mine")
    assert "(did you mean 'my-mine'?)" in refusal(InputError, "retention", "my-mime")
    info = next(info for info in available("retention") if info.name == "my-mine")
    assert (info.summary, info.source) == ("Keep a while.", "package pub 1.2")
    assert info.parameters[0] == ("keep_s", "float", "1")
    assert [i.name for i in available("admission")] == ["none", "program-cap", "my-hooks"]
    # A built-in's name stays the built-in's.
    assert type(build("retention", "lru")).__name__ == "Lru"
    assert [i.source for i in available("retention") if i.name == "lru"] == ["built-in"]


def test_a_broken_publication_is_named_and_does_not_break_the_list(publish):
    publish("pub", "number = 3\n", gone="Nothing", number="number")
    message = refusal(PolicyError, "retention", "gone")
    assert "policy gone (package pub 1.2): pub_module:Nothing does not import: AttributeError" in message
    assert "is 3, expected a class" in refusal(PolicyError, "retention", "number")
    broken = {info.name: info.summary for info in available("routing") if info.source != "built-in"}
    assert set(broken) == {"gone", "number"}
    assert broken["gone"].startswith("cannot be used: ")
    assert refusal(InputError, "retention", "unheard-of").startswith("unknown retention policy")


def test_one_name_from_two_packages(publish):
    publish("one", MINE, my_mine="Mine")
    publish("two", MINE, my_mine="Mine")
    message = refusal(PolicyError, "retention", "my-mine")
    assert "package one 1.2 (one_module:Mine) and package two 1.2 (two_module:Mine)" in message


# --- the documentation -----------------------------------------------------------------------------------

DOCS = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")


def test_the_example_of_the_documentation_runs(folder):
    (folder / "mine.py").write_text(re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)[1])
    policy = build("retention", "./mine.py:Mine:keep_s=3")
    pcb = type("View", (), {"context_tokens": 4000})
    assert policy.on_call_complete(pcb, 10.0, None) == interface.Protect(13.0)
    pcb.context_tokens = 3999
    assert policy.on_call_complete(pcb, 10.0, None) is None


@pytest.mark.parametrize(("axis", "name"), NAMES)
def test_the_documentation_has_every_policy_with_its_defaults(axis, name):
    row = next(line for line in DOCS.splitlines() if line.startswith(f"| `{name}` |"))
    info = next(info for info in available(axis) if info.name == name)
    for key, _, default in info.parameters:
        assert f"{key} = {default}" in row
