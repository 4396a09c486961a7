"""The engine with one rule broken: its modules loaded afresh, with a piece of their source replaced."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
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


class _EditedLoader(SourceFileLoader):
    """Loads a module's source with the edits applied, past any cached bytecode."""

    def __init__(self, name: str, path: str, edits: list[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        for module, old, new in self._edits:
            assert source.count(old) == 1, f"{module}: {source.count(old)} places read {old!r}, not 1"
            source = source.replace(old, new)
        return self.source_to_code(source, self.path)


class _EditedFinder(MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, fullname, path, target=None) -> ModuleSpec | None:
        edits = [edit for edit in self._mutation.edits if fullname == f"{PACKAGE}.{edit.module}"]
        found = PathFinder.find_spec(fullname, path, target) if edits else None
        if found is None or found.origin is None:
            return None
        loader = _EditedLoader(fullname, found.origin, edits)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


@contextmanager
def broken(mutation: Mutation) -> Iterator[ModuleType]:
    """The module `simulated`, bound to the engine with the mutation. The engine proper is back afterwards."""
    simulated = f"{__package__}.simulated"
    hidden = {name: module for name, module in sys.modules.items() if _replaced(name, simulated)}
    for name in hidden:
        del sys.modules[name]
    finder = _EditedFinder(mutation)
    sys.meta_path.insert(0, finder)
    try:
        module = importlib.import_module(simulated)
        missing = [edit.module for edit in mutation.edits if f"{PACKAGE}.{edit.module}" not in sys.modules]
        assert not missing, f"nothing imports {missing}"
        yield module
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _replaced(name, simulated)]:
            del sys.modules[name]
        for name, module in hidden.items():
            sys.modules[name] = module
            parent, _, attribute = name.rpartition(".")
            setattr(sys.modules[parent], attribute, module)


def _replaced(name: str, simulated: str) -> bool:
    return name.startswith(f"{PACKAGE}.") or name == simulated
