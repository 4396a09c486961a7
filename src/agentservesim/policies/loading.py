"""Find a policy class that is not built in: in a user's file, or published by an installed package."""

from __future__ import annotations

import hashlib
import importlib.metadata
import linecache
import os
import sys
import traceback
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from types import CodeType, ModuleType

from agentservesim.errors import InputError, PolicyError, nearest

ENTRY_POINT_GROUP = "agentservesim.policies"


def class_from_file(axis: str, file: str, class_name: str) -> type:
    """The class in the file as it is now. The file runs anew each time: nothing carries over between runs."""
    module = _run_file(axis, file)
    found = vars(module).get(class_name)
    if isinstance(found, type):
        return found
    own = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
    has = f"it defines {', '.join(own)}" if own else "it defines no class"
    if found is None:
        what = f"no class {class_name!r}{nearest(class_name, own)}"
    else:
        what = f"{class_name} is not a class"
    raise PolicyError(f"{axis} policy {file}:{class_name}: {what}; {has}")


def published(name: str | None = None) -> list[importlib.metadata.EntryPoint]:
    """Entry points of installed packages, all or those of one name; each once."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    once = {(point.name, point.value): point for point in found if name is None or point.name == name}
    return [once[key] for key in sorted(once)]


def class_from_entry_point(axis: str, point: importlib.metadata.EntryPoint) -> type:
    policy = f"{axis} policy {point.name} ({package_of(point)})"
    try:
        found = point.load()
    except Exception as error:
        raise PolicyError(f"{policy}: {point.value} does not import: {_describe(error)}") from error
    if not isinstance(found, type):
        raise PolicyError(f"{policy}: {point.value} is {found!r}, expected a class")
    return found


def package_of(point: importlib.metadata.EntryPoint) -> str:
    return f"package {point.dist.name} {point.dist.version}" if point.dist else "package unknown"


def where_raised(error: BaseException, file: str | None) -> str:
    """'file:line' of the last frame in `file`, or '' where it never ran."""
    if file is None:
        return ""
    path = _absolute(file)
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{file}:{lines[-1]}" if lines else ""


class _FreshLoader(SourceFileLoader):
    """Compiles the file each time: the import system's cache takes an edit within a second for no edit."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _run_file(axis: str, file: str) -> ModuleType:
    path = _absolute(file)
    try:
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        raise InputError(f"{axis} policy {file}: no such file (looked for {path})") from None
    except OSError as error:
        raise InputError(f"{axis} policy {file}: cannot read it: {error.strerror}") from None

    # One module name a path: two files may hold the same class, and reloading a file leaves no copies behind.
    name = f"agentservesim_policy_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    loader = _FreshLoader(name, path)
    module = module_from_spec(ModuleSpec(name, loader, origin=path))
    sys.modules[name] = module  # dataclasses and type hints look themselves up
    linecache.checkcache(path)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        at = where_raised(error, file) or file
        raise PolicyError(f"{axis} policy {at}: the file does not import: {_describe(error)}") from error
    return module


def _absolute(file: str) -> str:
    return os.path.abspath(os.path.expanduser(file))


def _describe(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
