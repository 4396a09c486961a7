"""Seeded synthetic workloads: one generator, the two descriptions that come with the package, and fits."""

from agentservesim.workload.synthetic.bfcl_like import BFCL_LIKE
from agentservesim.workload.synthetic.description import Description, Kind, Tool
from agentservesim.workload.synthetic.distributions import LogNormal, Marginal
from agentservesim.workload.synthetic.generator import draw_program, generate
from agentservesim.workload.synthetic.swebench_like import SWEBENCH_LIKE
from agentservesim.workload.synthetic.table import Table

__all__ = [
    "BUNDLED",
    "Description",
    "Kind",
    "LogNormal",
    "Marginal",
    "Table",
    "Tool",
    "draw_program",
    "generate",
]

BUNDLED: dict[str, Description] = {
    "examples/swebench-like": SWEBENCH_LIKE,
    "examples/bfcl-like": BFCL_LIKE,
}
"""The bundled workloads by the name a config gives as workload.source."""
