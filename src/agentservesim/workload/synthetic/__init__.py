"""Seeded synthetic workloads, and the two that come with the package."""

from agentservesim.workload.synthetic.bfcl_like import BFCL_LIKE
from agentservesim.workload.synthetic.description import Description, Tool
from agentservesim.workload.synthetic.distributions import LogNormal
from agentservesim.workload.synthetic.generator import draw_program, generate
from agentservesim.workload.synthetic.swebench_like import SWEBENCH_LIKE

__all__ = ["BUNDLED", "Description", "LogNormal", "Tool", "draw_program", "generate"]

BUNDLED: dict[str, Description] = {
    "examples/swebench-like": SWEBENCH_LIKE,
    "examples/bfcl-like": BFCL_LIKE,
}
"""The bundled workloads by the name a config gives as workload.source."""
