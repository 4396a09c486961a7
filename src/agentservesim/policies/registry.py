"""Every policy by name, built fresh for each run.

A built-in policy is registered in one place, the table below. Others need no registration: a file's class is
named where it is used ('./mine.py:Mine'), a package's through the entry-point group `agentservesim.policies`.
"""

from __future__ import annotations

import importlib
import inspect
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, overload

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from agentservesim.config import PolicySpec
from agentservesim.errors import AgentServeSimError, InputError, PolicyError, nearest
from agentservesim.policies.interface import AdmissionPolicy, RetentionPolicy, RoutingPolicy, SchedulingPolicy
from agentservesim.policies.loading import (
    class_from_entry_point,
    class_from_file,
    package_of,
    published,
    where_raised,
)
from agentservesim.policies.specs import ParsedSpec, Value, parse_spec, spec_text, split_specs, value_text

__all__ = ["AXES", "PolicyInfo", "available", "build", "label", "split_specs"]

AXES = ("retention", "scheduling", "admission", "routing")

_BUILT_IN: dict[str, dict[str, str]] = {
    "retention": {
        "lru": "lru:Lru",
        "immediate-release": "immediate_release:ImmediateRelease",
        "ttl": "ttl:Ttl",
        "pressure-ttl": "pressure_ttl:PressureTtl",
        "tool-ttl": "tool_ttl:ToolTtl",
        "min-waste": "min_waste:MinWaste",
        "evolved-gap-ema": "evolved_gap_ema:EvolvedGapEma",
    },
    "scheduling": {
        "fcfs": "fcfs:Fcfs",
        "program-fcfs": "program_fcfs:ProgramFcfs",
        "plas": "plas:Plas",
        "continuum": "continuum:Continuum",
        "resident-first": "resident_first:ResidentFirst",
        "evolved-sqrt-plas": "evolved_sqrt_plas:EvolvedSqrtPlas",
    },
    "admission": {
        "none": "none:AdmitAll",
        "program-cap": "program_cap:ProgramCap",
    },
    "routing": {
        "round-robin": "round_robin:RoundRobin",
        "least-loaded": "least_loaded:LeastLoaded",
        "session-affinity": "session_affinity:SessionAffinity",
    },
}
"""axis -> name -> 'module:Class' below the axis's package."""

_REQUIRED: dict[str, tuple[str, tuple[str, ...]]] = {
    "retention": ("on_call_complete", ("pcb", "now_s", "kv")),
    "scheduling": ("priority", ("pcb", "now_s")),
    "admission": ("admit", ("pcb", "now_s", "queue")),
    "routing": ("route", ("pcb", "now_s", "instances")),
}
_OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "retention": {"on_call_arrival": ("pcb", "now_s", "kv")},
    "scheduling": {"victim": ("candidates", "now_s"), "admit": ("pcb", "now_s", "queue")},
    "admission": {},
    "routing": {},
}
"""Methods are called with these arguments, by position."""


class PolicyInfo(NamedTuple):
    """A policy for a list: `parameters` are (name, type, default), the default '' where one must be given."""

    name: str
    summary: str
    parameters: list[tuple[str, str, str]]
    source: str


@overload
def build(axis: Literal["retention"], spec: PolicySpec) -> RetentionPolicy: ...
@overload
def build(axis: Literal["scheduling"], spec: PolicySpec) -> SchedulingPolicy: ...
@overload
def build(axis: Literal["admission"], spec: PolicySpec) -> AdmissionPolicy: ...
@overload
def build(axis: Literal["routing"], spec: PolicySpec) -> RoutingPolicy: ...
@overload
def build(axis: str, spec: PolicySpec) -> object: ...
def build(axis: str, spec: PolicySpec) -> object:
    """A fresh policy, checked against the axis's protocol.

    Raises InputError when the spec is wrong (form, name, file, parameter) and PolicyError when the class is.
    """
    parsed, cls = _find(axis, spec)
    arguments = _check_parameters(axis, parsed, cls)
    try:
        policy = cls(**arguments)
    except Exception as error:
        at = where_raised(error, parsed.file)
        if isinstance(error, ValueError):  # how a policy refuses a value
            raised = f" (raised at {at})" if at else ""
            raise InputError(f"{axis} policy {parsed.name}: {error}{raised}") from error
        raise PolicyError(
            f"{axis} policy {parsed.name}: {at + ': ' if at else ''}its constructor raised "
            f"{type(error).__name__}: {error}"
        ) from error
    _check_methods(axis, parsed.name, policy)
    return policy


def label(axis: str, spec: PolicySpec) -> str:
    """The canonical short text of a spec, 'ttl:tau_s=2': the parameters given, in the policy's own order."""
    parsed, cls = _find(axis, spec)
    return spec_text(parsed.name, _check_parameters(axis, parsed, cls))


def available(axis: str) -> list[PolicyInfo]:
    """The built-in policies of an axis, then those of installed packages. One that fails to load says so."""
    _check_axis(axis)
    infos = [_info(name, _import_built_in(axis, name), "built-in") for name in _BUILT_IN[axis]]
    for point in published():
        if point.name in _BUILT_IN[axis]:
            continue
        try:
            cls = class_from_entry_point(axis, point)
        except AgentServeSimError as error:  # its axis is unknown, so every axis lists it
            infos.append(PolicyInfo(point.name, f"cannot be used: {error}", [], package_of(point)))
            continue
        if axis in _axes_of(cls):
            infos.append(_info(point.name, cls, package_of(point)))
    return infos


# --- the class of a spec ---------------------------------------------------------------------------------


def _find(axis: str, spec: PolicySpec) -> tuple[ParsedSpec, type]:
    """The class a spec names; it has the axis's method, and can be instantiated."""
    _check_axis(axis)
    parsed = parse_spec(axis, spec)
    name = parsed.name
    if parsed.file is not None and parsed.class_name is not None:
        cls = class_from_file(axis, parsed.file, parsed.class_name)
    elif name in _BUILT_IN[axis]:
        return parsed, _import_built_in(axis, name)
    elif points := published(name):
        classes = {point: class_from_entry_point(axis, point) for point in points}
        fitting = [point for point in points if axis in _axes_of(classes[point])]
        if len(fitting) > 1:
            packages = " and ".join(f"{package_of(point)} ({point.value})" for point in fitting)
            raise PolicyError(f"{axis} policy {name}: published by {packages}; uninstall one")
        cls = classes[(fitting or points)[0]]
    else:
        raise _unknown(axis, name)
    if axis not in _axes_of(cls):
        raise PolicyError(f"{axis} policy {name}: {_misfit(axis, cls)}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise PolicyError(f"{axis} policy {name}: {cls.__name__} is abstract, it does not define {missing}")
    return parsed, cls


def _import_built_in(axis: str, name: str) -> type:
    module, _, class_name = _BUILT_IN[axis][name].partition(":")
    cls: type = getattr(importlib.import_module(f"agentservesim.policies.{axis}.{module}"), class_name)
    return cls


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        choices = ", ".join(AXES)
        raise InputError(f"unknown policy axis {axis!r}{nearest(axis, AXES)}; expected one of {choices}")


def _unknown(axis: str, name: str) -> AgentServeSimError:
    others = [other for other in AXES if name in _BUILT_IN[other]]
    if others:
        return PolicyError(
            f"{axis} policy {name}: {name} is a policy of the {others[0]} axis; "
            f"expected one of {', '.join(_BUILT_IN[axis])}"
        )
    choices = [info.name for info in available(axis)]
    return InputError(
        f"unknown {axis} policy {name!r}{nearest(name, choices)}; "
        f"expected one of {', '.join(choices)}, or ./file.py:Class"
    )


def _method(cls: type, name: str) -> object | None:
    """A method the class has of its own; a protocol it inherits from declares without defining."""
    for base in cls.__mro__:
        if name in vars(base) and not getattr(base, "_is_protocol", False):
            found: object = vars(base)[name]
            return found
    return None


def _axes_of(cls: type) -> list[str]:
    return [axis for axis in AXES if _method(cls, _REQUIRED[axis][0]) is not None]


def _misfit(axis: str, cls: type) -> str:
    needed = _call(*_REQUIRED[axis])
    text = f"{cls.__name__} has no method {needed}"
    if hooks := [hook for hook in _OPTIONAL[axis] if _method(cls, hook) is not None]:
        text += f"; {' and '.join(hooks)} only add to it"
    fits = _axes_of(cls)
    if not hooks and not fits:
        own = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
        text += f"; it defines {', '.join(own)}" if own else "; it defines no method"
    if fits:
        text += "; it fits the " + " and ".join(f"{fit} axis (it has {_REQUIRED[fit][0]})" for fit in fits)
    return text


def _call(method: str, parameters: tuple[str, ...]) -> str:
    return f"{method}({', '.join(parameters)})"


def _check_methods(axis: str, name: str, policy: object) -> None:
    """Every method of the axis can be called with the protocol's arguments."""
    cls = type(policy)
    for method, arguments in (_REQUIRED[axis], *_OPTIONAL[axis].items()):
        if _method(cls, method) is None:
            continue
        bound = getattr(policy, method)
        problem = None
        if not callable(bound):
            problem = f"is {bound!r}, not a method"
        elif inspect.iscoroutinefunction(bound) or inspect.isgeneratorfunction(bound):
            problem = "is async or a generator; expected a plain method"
        else:
            signature = inspect.signature(bound)
            try:
                signature.bind(*arguments)
            except TypeError:
                problem = f"takes {str(signature).partition(' ->')[0]}; expected ({', '.join(arguments)})"
        if problem:
            raise PolicyError(f"{axis} policy {name}: {cls.__name__}.{method} {problem}")
    if axis == "scheduling" and not isinstance(getattr(policy, "dynamic", False), bool):
        raise PolicyError(f"{axis} policy {name}: {cls.__name__}.dynamic must be True or False")


# --- parameters ------------------------------------------------------------------------------------------


def _parameters(cls: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """The keyword parameters of a constructor, annotations resolved, and whether it takes any others."""
    try:
        signature = inspect.signature(cls, eval_str=True)
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError):
        try:
            signature = inspect.signature(cls)  # what only a type checker can resolve checks nothing
        except (TypeError, ValueError):  # a constructor written in C
            return {}, True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = {name: parameter for name, parameter in signature.parameters.items() if parameter.kind in kinds}
    return found, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())


def _check_parameters(axis: str, parsed: ParsedSpec, cls: type) -> dict[str, Any]:
    """The given parameters, validated against the constructor's annotations, in its order."""
    policy = f"{axis} policy {parsed.name}"
    accepted, any_other = _parameters(cls)
    takes = ", ".join(_parameter_text(parameter) for parameter in accepted.values())
    for key in parsed.given:
        if key not in accepted and not any_other:
            raise InputError(
                f"{policy}: unknown parameter {key!r}{nearest(key, accepted)}; "
                + (f"it takes {takes}" if takes else "it takes no parameters")
            )
    for key, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and key not in parsed.given:
            raise InputError(f"{policy}: {key} must be given; it takes {takes}")
    ordered = [key for key in accepted if key in parsed.given]
    ordered += [key for key in parsed.given if key not in accepted]
    types = {key: parameter.annotation for key, parameter in accepted.items()}
    return {key: _check_value(policy, key, parsed.given[key], types.get(key, Any)) for key in ordered}


def _check_value(policy: str, key: str, given: Value, annotation: Any) -> Any:
    """The value as the annotation has it: no number for a truth value, no fraction for an integer."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return given.value
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except (PydanticUserError, NameError, TypeError):  # a type pydantic knows nothing of
        return given.value
    attempts = [(given.value, True)]
    if given.text is not None:
        attempts.append((given.text, True))  # text that YAML takes for something else, 'on' for one
    if not isinstance(given.value, (bool, int, float)):
        attempts.append((given.value, False))  # 1e-3, which YAML takes for text; a list for a tuple
    for value, strict in attempts:
        try:
            return adapter.validate_python(value, strict=strict)
        except ValidationError:
            continue
    expected = _type_text(annotation)
    shown = given.text if given.text is not None else given.value
    hint = nearest(shown, expected.split(" | ")) if isinstance(shown, str) else ""
    raise InputError(f"{policy}: {key} is {shown!r}; expected {expected}{hint}")


def _parameter_text(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_type_text(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        text += f" = {value_text(parameter.default)}"
    return text


def _type_text(annotation: Any) -> str:
    """A type as one writes its values: 'float', 'int | null', 'arrival | admission'."""
    if annotation is inspect.Parameter.empty:
        return "any"
    if annotation in (None, NoneType):
        return "null"
    if get_origin(annotation) is Literal:
        return " | ".join(value_text(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_type_text(part) for part in get_args(annotation))
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _info(name: str, cls: type, source: str) -> PolicyInfo:
    parameters = [
        (key, _type_text(p.annotation), "" if p.default is inspect.Parameter.empty else value_text(p.default))
        for key, p in _parameters(cls)[0].items()
    ]
    summary = (inspect.getdoc(cls) or "no description").partition("\n")[0]
    return PolicyInfo(name, summary, parameters, source)
