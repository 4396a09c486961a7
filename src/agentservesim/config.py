"""RunConfig: everything a run depends on. Unknown keys are errors that name the nearest key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from agentservesim.config_origin import KeyPath, Origin
from agentservesim.errors import InputError, nearest

PolicySpec = str | dict[str, dict[str, Any] | None]
"""A policy: 'lru', with parameters 'ttl:tau_s=2' or {ttl: {tau_s: 2}}, or './file.py:Class'."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


DRAWN = ("poisson", "gamma", "bursts")
"""Arrival processes that draw times from a seed."""


class ArrivalsConfig(_Section):
    """When programs start. `recorded` takes each program's arrival_s; `closed_loop` keeps `lanes` running;
    `bursts` starts `size` programs at once, at Poisson times."""

    process: Literal["recorded", "poisson", "gamma", "bursts", "closed_loop"] = "recorded"
    rate_per_s: Annotated[float, Field(gt=0)] | None = None
    cv: Annotated[float, Field(gt=0, description="gamma: coefficient of variation")] = 1.0
    size: Annotated[int, Field(ge=1, description="bursts: programs a burst")] | None = None
    lanes: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _complete(self) -> ArrivalsConfig:
        if self.process in ("poisson", "gamma") and self.rate_per_s is None:
            raise ValueError(f"process {self.process} needs rate_per_s (programs per second)")
        if self.process == "bursts" and (self.rate_per_s is None or self.size is None):
            raise ValueError("process bursts needs rate_per_s (bursts per second) and size (programs)")
        if self.process == "closed_loop" and self.lanes is None:
            raise ValueError("process closed_loop needs lanes (programs that run at a time)")
        return self


class WorkloadConfig(_Section):
    """Where programs come from: a trace file, folder or glob, `-`, a fit, or a bundled one named examples/….

    lenient       skip and count malformed lines instead of stopping at them
    max_pause_s   longest pause of a person, in seconds; longer ones are cut to it
    programs      the first so many, before any transform
    seed          of generated workloads
    transforms    what-if changes, in order: {name: {key: value}} or name:key=value
    """

    source: str
    format: str | None = None
    lenient: bool = False
    max_pause_s: Annotated[float, Field(ge=0)] | None = None
    programs: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    transforms: tuple[dict[str, dict[str, Any]], ...] = ()
    arrivals: ArrivalsConfig = ArrivalsConfig()

    @field_validator("transforms", mode="before")
    @classmethod
    def _known_transforms(cls, given: object) -> object:
        if not given:
            return ()
        from agentservesim.workload.transforms import parse_transform  # which needs this module

        try:
            return [parse_transform(spec) for spec in (given if isinstance(given, list | tuple) else [given])]
        except InputError as error:
            raise ValueError(str(error)) from None


class ClusterConfig(_Section):
    """The hardware: `instances` identical engines of `tp` GPUs each."""

    gpu: str
    model: str
    tp: Annotated[int, Field(ge=1)] = 1
    instances: Annotated[int, Field(ge=1)] = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_tokens: Annotated[int, Field(ge=1)] | None = None


class EngineConfig(_Section):
    """Engine options under vLLM's own names. max_model_len None: the model's own."""

    semantics: Literal["vllm-0.32", "vllm-0.33"] = "vllm-0.32"
    block_size: Annotated[int, Field(ge=1)] = 16
    max_num_seqs: Annotated[int, Field(ge=1)] = 128
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 8192
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    step_mode: Literal["leap", "step"] = "leap"

    @model_validator(mode="after")
    def _budget(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), as in vLLM"
            )
        return self


class PoliciesConfig(_Section):
    """One policy on each axis."""

    retention: PolicySpec = "lru"
    scheduling: PolicySpec = "fcfs"
    admission: PolicySpec = "none"
    routing: PolicySpec = "session-affinity"


class StepTimeConfig(_Section):
    """What gives a step its seconds.

    tables: `path` is a folder with tp<N>/*.csv, operators measured with LLMServingSim's profiler.
    linear: seconds = base_s + per_prefill_token_s * prefill tokens + per_decode_s * decoding sequences
            + per_context_token_s * (tokens attended to by decoding sequences)
            + per_prefill_s * prefill chunks
            + per_prefill_pair_s * (prefill tokens, each times the tokens it attends to)
    residual: what measured or tables misses of a real step. auto: the shipped one for this GPU, model, tp
            and back end, if there is one; none; or a file, as calibrate writes it.
    """

    backend: Literal["measured", "tables", "roofline", "linear"] = "measured"
    path: str | None = None
    residual: str = "auto"
    base_s: Annotated[float, Field(ge=0)] = 0.0
    per_prefill_token_s: Annotated[float, Field(ge=0)] = 0.0
    per_decode_s: Annotated[float, Field(ge=0)] = 0.0
    per_context_token_s: Annotated[float, Field(ge=0)] = 0.0
    per_prefill_s: Annotated[float, Field(ge=0)] = 0.0
    per_prefill_pair_s: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _tables_folder(self) -> StepTimeConfig:
        if (self.backend == "tables") != (self.path is not None):
            raise ValueError("path, a folder with tp<N>/*.csv, is needed by backend tables and by no other")
        return self


class ClientConfig(_Section):
    """Between a program and the engine's queue: the network, HTTP, the API server. By default nothing.

    A call reaches the queue request_s + request_per_token_s * prompt tokens after its release; the program
    sees a token response_s after the engine's step. `live validate` measures them.
    """

    request_s: Annotated[float, Field(ge=0)] = 0.0
    request_per_token_s: Annotated[float, Field(ge=0)] = 0.0
    response_s: Annotated[float, Field(ge=0)] = 0.0

    def delay_s(self, prompt_tokens: int) -> float:
        """From a call's release to the engine's queue."""
        return self.request_s + self.request_per_token_s * prompt_tokens


class RunConfig(_Section):
    """A run. The same config gives the same result, bit for bit."""

    workload: WorkloadConfig
    cluster: ClusterConfig
    engine: EngineConfig = EngineConfig()
    policies: PoliciesConfig = PoliciesConfig()
    step_time: StepTimeConfig = StepTimeConfig()
    client: ClientConfig = ClientConfig()
    output_reuse: Literal["deployment", "replay"] = "deployment"
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """Where its keys were written."""
        return self._origin

    def with_policies(self, chosen: dict[str, str], given: str) -> RunConfig:
        """The same with other policies; `given` names the option they came from, as in '--{axis} {spec}'."""
        policies = self.policies.model_copy(update=chosen)
        config = self.model_copy(update={"policies": policies})
        options: dict[KeyPath, str] = {
            ("policies", axis): given.format(axis=axis, spec=spec) for axis, spec in chosen.items()
        }
        config._origin = self._origin.with_options(options)
        return config

    def to_yaml(self) -> str:
        """The resolved config as YAML, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML config and apply `a.b=value` overrides (values are YAML).

    Raises InputError with file, line, field, value and expectation.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the config: {error}") from None
    try:
        lines = _key_lines(yaml.compose(text), path)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: not valid YAML, line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # the resolver lets ValueError out on impossible dates
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}:1: expected a mapping with sections {', '.join(RunConfig.model_fields)}")
    given: dict[KeyPath, str] = {}
    for item in overrides or []:
        _apply_override(data, item, given)
    return parse_config(data, Origin(str(path), lines, given))


def parse_config(data: dict[str, Any], origin: Origin | None = None) -> RunConfig:
    """Validate a mapping; relative workload paths stay as given. Raises InputError, one line a problem."""
    origin = origin or Origin()
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise InputError("\n".join(dict.fromkeys(_explain(e, origin) for e in error.errors()))) from None
    config._origin = origin
    return config


def _apply_override(data: dict[str, Any], item: str, given: dict[KeyPath, str]) -> None:
    key, equals, value = item.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise InputError(f"--set {item}: expected section.key=value, for instance cluster.instances=4")
    node = data
    for part in path[:-1]:
        child = node.get(part)
        node[part] = dict(child) if isinstance(child, dict) else {}
        node = node[part]
    try:
        node[path[-1]] = "-" if value == "-" else yaml.safe_load(value)  # standard input, not an empty list
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"--set {item}: the value is not valid YAML: {error}") from None
    given[path] = f"--set {item}"


def _key_lines(node: yaml.Node | None, file: Path, path: KeyPath = ()) -> dict[KeyPath, int]:
    """1-based line of every key in a YAML document, by path. Raises InputError for a key written twice."""
    lines: dict[KeyPath, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below, line = (*path, str(key.value)), key.start_mark.line + 1
            if below in lines:
                raise InputError(
                    f"{file}:{line}: key {'.'.join(below)!r} stands here again, after line {lines[below]}; "
                    "expected it once"
                )
            lines[below] = line
            lines.update(_key_lines(value, file, below))
    return lines


def _explain(error: Any, origin: Origin) -> str:
    """One pydantic error as a sentence: where, field, value, expectation, nearest valid key."""
    # Union branches put type names into the location; only real keys stay.
    path = tuple(
        str(part) for part in error["loc"] if not str(part).startswith(("dict[", "str", "constrained"))
    )
    at = origin.at(path)
    field = ".".join(path) or "config"
    if error["type"] == "extra_forbidden":
        choices = _fields_at(path[:-1])
        return (
            f"{at}: unknown key {field!r}{nearest(path[-1], choices)}; expected one of {', '.join(choices)}"
        )
    if error["type"] == "missing":
        return f"{at}: missing key {field!r}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{at}: {field}: {message}"
    value = error["input"]
    if len(path) > 1 and path[0] == "policies":
        return (
            f"{at}: {'.'.join(path[:2])} is {value!r}: expected a policy by name, with parameters as "
            "{name: {parameter: value}}, or ./file.py:Class"
        )
    if error["type"] == "model_type":
        return f"{at}: {field} is {value!r}: expected a mapping with keys {', '.join(_fields_at(path))}"
    hint = (
        nearest(value, error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
        if error["type"] == "literal_error" and isinstance(value, str)
        else ""
    )
    return f"{at}: {field} is {value!r}: {message[0].lower() + message[1:]}{hint}"


def _fields_at(path: tuple[str, ...]) -> list[str]:
    """The keys a section accepts."""
    model: type[BaseModel] = RunConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        model = next(
            t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, BaseModel)
        )
    return list(model.model_fields)
