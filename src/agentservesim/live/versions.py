"""The versions of vLLM whose scheduler this plug-in was compared with, step for step."""

from __future__ import annotations

from agentservesim.errors import InputError

TESTED_VLLM = ("0.32.0",)


def check_vllm(version: str) -> None:
    """Raises InputError for a version of vLLM that was not tested: its rules may differ."""
    public = version.partition("+")[0]
    if public not in TESTED_VLLM:
        raise InputError(
            f"vllm {version}: this plug-in follows the scheduler and the block pool of vLLM "
            f"{', '.join(TESTED_VLLM)} and was tested with no other version; install one of these, or "
            "leave --scheduler-cls out"
        )
