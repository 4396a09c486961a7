"""Which policies a vLLM engine runs: from its own configuration, or from the environment.

    vllm serve MODEL --scheduler-cls agentservesim.live.vllm_plugin.LiveScheduler \\
        --additional-config '{"agentservesim": {"retention": "ttl:tau_s=2", "scheduling": "plas"}}'

or, with the same JSON object, AGENTSERVESIM_LIVE='{"retention": "ttl:tau_s=2"}'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentservesim.config import PolicySpec
from agentservesim.errors import InputError, nearest
from agentservesim.policies import registry

ENVIRONMENT = "AGENTSERVESIM_LIVE"
SECTION = "agentservesim"


class PrefillLineSettings(BaseModel):
    """A step's prefill time on this engine, as policies.interface.PrefillLine; min-waste needs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    slope_s_per_token: float
    base_s: float
    knee_tokens: int


class LiveSettings(BaseModel):
    """The policies, in the words of a config's `policies`, and the files to write.

    step_log           JSON lines, a step each, as `calibrate` reads them
    decision_log       JSON lines, a decision each, with the columns of decisions.parquet
    counts             a JSON file with the counts: programs, policy errors, … ; kept up to date
    policy_timeout_s   how long a policy may take to answer
    program_idle_s     after how long without a call a program is forgotten
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    retention: PolicySpec = "lru"
    scheduling: PolicySpec = "fcfs"
    admission: PolicySpec = "none"
    prefill_line: PrefillLineSettings | None = None
    step_log: str | None = None
    decision_log: str | None = None
    counts: str | None = None
    policy_timeout_s: float = Field(default=1.0, gt=0)
    program_idle_s: float = Field(default=3600.0, gt=0)

    def policies(self) -> dict[str, Any]:
        """A fresh policy object on each axis. Raises what the simulator raises for the same words."""
        return {
            axis: registry.build(axis, getattr(self, axis))
            for axis in ("retention", "scheduling", "admission")
        }


def live_settings(additional_config: Any, environment: Mapping[str, str] = os.environ) -> LiveSettings:
    """The settings in vLLM's `additional_config`, else those in the environment, else plain vLLM.

    Raises InputError with the source, the key, the value and what was expected.
    """
    if isinstance(additional_config, Mapping) and SECTION in additional_config:
        source, given = f"--additional-config {SECTION}", additional_config[SECTION]
    elif environment.get(ENVIRONMENT):
        source, text = ENVIRONMENT, environment[ENVIRONMENT]
        try:
            given = json.loads(text)
        except ValueError as error:
            raise InputError(f"{source}: {text!r} is not JSON ({error}); expected an object") from None
    else:
        return LiveSettings()
    if not isinstance(given, Mapping):
        raise InputError(f"{source} is {given!r}, expected an object such as {{'retention': 'ttl:tau_s=2'}}")
    try:
        return LiveSettings(**given)
    except ValidationError as error:
        raise InputError(_first(source, error)) from None
    except TypeError:
        raise InputError(f"{source}: keys must be text") from None


def _first(source: str, error: ValidationError) -> str:
    problem = error.errors()[0]
    key = str(problem["loc"][0])
    if key in ("retention", "scheduling", "admission"):
        expected = "a policy, such as 'ttl:tau_s=2' or {'ttl': {'tau_s': 2}}"
        return f"{source}: {key} is {problem['input']!r}, expected {expected}"
    if problem["type"] == "extra_forbidden":
        known = list(LiveSettings.model_fields)
        return f"{source}: unknown key {key!r}{nearest(key, known)}; expected one of {', '.join(known)}"
    return f"{source}: {'.'.join(map(str, problem['loc']))} is {problem['input']!r}: {problem['msg']}"
