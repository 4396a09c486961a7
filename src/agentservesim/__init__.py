"""AgentServeSim: simulate LLM agent programs on vLLM-exact serving engines.

from agentservesim import load_config, simulate
result = simulate(load_config("config.yaml"))
result.summary["jct_mean_s"], result.tables["calls"]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agentservesim.config import RunConfig, load_config, parse_config
    from agentservesim.errors import AgentServeSimError, InputError, PolicyError
    from agentservesim.run import Result, simulate
    from agentservesim.workload import load_programs

_HOMES = {
    "AgentServeSimError": "errors",
    "InputError": "errors",
    "PolicyError": "errors",
    "Result": "run",
    "RunConfig": "config",
    "load_config": "config",
    "load_programs": "workload",
    "parse_config": "config",
    "simulate": "run",
}

__all__ = [
    "AgentServeSimError",
    "InputError",
    "PolicyError",
    "Result",
    "RunConfig",
    "load_config",
    "load_programs",
    "parse_config",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that the command line starts fast."""
    if name in _HOMES:
        return getattr(import_module(f"agentservesim.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'agentservesim' has no attribute {name!r}")
