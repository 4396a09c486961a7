"""The engine with one rule broken: its modules loaded afresh, with a piece of their source replaced."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

PACKAGE = "agentservesim.engine"


class Edit(NamedTuple):
    """Replaces `old`, which must stand exactly once in the module's source, by `new`."""

    module: str
    old: str
    new: str


class Mutation(NamedTuple):
    rule: str  # the rule of vLLM that is broken
    edits: tuple[Edit, ...]


@contextmanager
def broken(mutation: Mutation) -> Iterator[ModuleType]:
    """The module `simulated`, bound to the engine with the mutation. The engine proper is back afterwards."""
    simulated = f"{__package__}.simulated"
    hidden = {name: module for name, module in sys.modules.items() if _replaced(name, simulated)}
    for name in hidden:
        del sys.modules[name]
    try:
        for name in {edit.module for edit in mutation.edits}:
            _load(name, [edit for edit in mutation.edits if edit.module == name])
        yield importlib.import_module(simulated)
    finally:
        for name in [name for name in sys.modules if _replaced(name, simulated)]:
            del sys.modules[name]
        for name, module in hidden.items():
            sys.modules[name] = module
            parent, _, attribute = name.rpartition(".")
            setattr(sys.modules[parent], attribute, module)


def _replaced(name: str, simulated: str) -> bool:
    return name.startswith(f"{PACKAGE}.") or name == simulated


def _load(name: str, edits: list[Edit]) -> None:
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for edit in edits:
        assert source.count(edit.old) == 1, f"{name}: {source.count(edit.old)} places read {edit.old!r}, not 1"
        source = source.replace(edit.old, edit.new)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
