"""Finding a config and its workload by the name a user gives."""

from __future__ import annotations

import json
import os
import sys
from importlib import resources
from pathlib import Path

from agentservesim.cli.trace import write_report
from agentservesim.config import DRAWN, RunConfig, load_config
from agentservesim.errors import InputError, nearest
from agentservesim.workload import BUNDLED, load_programs
from agentservesim.workload.fit import is_fit
from agentservesim.workload.formats import STDIN, NoSuchFile, find_files, recognise

PREFIX = "examples/"
TRACE_CONFIG = "examples/b200-8b-tp1"
"""What a trace that is named in place of a config runs on."""
OPTION = "--{axis} {spec}"
"""How an error names a policy that came from the command line."""
TRACE_RATE_PER_S = 0.04
"""Programs per second, for traces that do not say when their programs arrived."""


def bundled_configs() -> list[str]:
    """Names of the configs that come with the package."""
    folder = resources.files("agentservesim") / "examples"
    return sorted(
        PREFIX + entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def trace_settings(lenient: bool, max_pause_s: float | None) -> list[str]:
    """The options for reading a trace, as --set has them."""
    settings = ["workload.lenient=true"] if lenient else []
    return settings if max_pause_s is None else [*settings, f"workload.max_pause_s={max_pause_s}"]


def open_config(name: str, overrides: list[str], policies: dict[str, str | None]) -> RunConfig:
    """The config of that name, or one for the trace of that name, with --set and policy options applied.

    A relative workload path counts from the config's folder first, then from the working directory.
    """
    chosen = {axis: spec for axis, spec in policies.items() if spec is not None}
    path = _find(name)
    if path is None:
        config = _for_trace(name, overrides)
        return config.with_policies(chosen, OPTION)
    config = load_config(path, overrides)
    source = config.workload.source
    if source not in BUNDLED and not os.path.isabs(source) and os.path.exists(path.parent / source):
        workload = config.workload.model_copy(update={"source": str(path.parent / source)})
        config = config.model_copy(update={"workload": workload})
    return config.with_policies(chosen, OPTION)


def _find(name: str) -> Path | None:
    """The config file of that name; None when the name stands for a trace."""
    path = Path(name)
    if name in BUNDLED:
        return None
    bundled = bundled_configs()
    if name.removesuffix(".yaml") in bundled and not os.path.isfile(path):
        return _bundled_path(name)
    if path.suffix in (".yaml", ".yml") and os.path.isfile(path):
        return None if is_fit(name) else path
    try:
        files = find_files(name)
    except NoSuchFile:
        raise InputError(
            f"config {name!r}: no such file{nearest(name, bundled)}; "
            f"expected a YAML file, a trace, or one of {', '.join(bundled)}"
        ) from None
    if len(files) == 1 and name != STDIN and os.path.isfile(os.path.expanduser(name)):
        try:
            recognise(files[0])
        except InputError:
            return files[0]
    return None


def _bundled_path(name: str) -> Path:
    return Path(str(resources.files("agentservesim") / (name.removesuffix(".yaml") + ".yaml")))


def _for_trace(name: str, overrides: list[str]) -> RunConfig:
    """A config for a trace: the hardware of TRACE_CONFIG, recorded arrivals if there are any, and room for
    the longest call. What was assumed is said on stderr."""
    base = _bundled_path(TRACE_CONFIG)
    workload = {"source": name, "arrivals": {"process": "poisson", "rate_per_s": TRACE_RATE_PER_S}}
    config = load_config(base, [f"workload={json.dumps(workload)}", *overrides])
    trace = load_programs(config.workload)
    recorded, longest = True, 1
    for program in trace.programs:
        recorded = recorded and program.arrival_s is not None
        longest = max(longest, *(turn.prompt_tokens + turn.output_tokens for turn in program.turns))
    settings = [f"workload={json.dumps(workload)}"]
    if recorded:
        settings = [f"workload={json.dumps({'source': name})}"]
    length = config.engine.max_model_len
    if length is not None and longest > length:
        settings.append(f"engine.max_model_len={longest}")
    config = load_config(base, [*settings, *overrides])
    write_report(name, trace.report)
    _say_assumed(config, recorded)
    return config


def _say_assumed(config: RunConfig, recorded: bool) -> None:
    cluster, arrivals = config.cluster, config.workload.arrivals
    how = f"{arrivals.process} arrivals"
    if arrivals.process in DRAWN:
        how += f" at {arrivals.rate_per_s} programs/s"
    why = "" if recorded else " (the trace has no times of its own)"
    sys.stderr.write(
        f"  assumed: {cluster.instances} × {cluster.gpu}, {cluster.model} tp {cluster.tp}, "
        f"max_model_len {config.engine.max_model_len}, {how}{why}; "
        f"change with --set, or start from {TRACE_CONFIG}\n"
    )
