"""GPU descriptions: the systems that aiconfigurator-core ships, and a few that it lacks."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from agentservesim.errors import InputError, nearest


@dataclass(frozen=True)
class Gpu:
    """One GPU as its vendor specifies it; all rates are peaks.

    memory_bytes                   device memory
    memory_bandwidth_bytes_per_s   device memory, read
    bf16_flops                     dense bf16 tensor operations a second
    power_watts                    board power limit
    interconnect_bytes_per_s       to the other GPUs of its node, one direction
    p2p_latency_s                  one message to a neighbour
    source                         where these numbers come from
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    bf16_flops: float
    power_watts: float
    interconnect_bytes_per_s: float
    p2p_latency_s: float
    source: str


_OWN = {
    gpu.name: gpu
    for gpu in (
        # Memory as torch reports it; the rest from NVIDIA's public specification (dense bf16 with fp32
        # accumulation). Two of them talk over PCIe 4.0 x16: the board has no NVLink.
        Gpu("rtx_4090", 25_250_627_584, 1.008e12, 165.2e12, 450.0, 32e9, 1e-5, "public specification"),
    )
}


def systems_folder() -> Path:
    """The wheel's folder of system descriptions and operator data, found without importing the wheel."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("aiconfigurator-core is not installed", name="aiconfigurator_core")
    return Path(spec.submodule_search_locations[0]) / "systems"


def gpu_names() -> list[str]:
    """Every name that `gpu` accepts, sorted."""
    return sorted({*_OWN, *(path.name for path in (systems_folder() / "data").iterdir() if path.is_dir())})


@cache
def gpu(name: str) -> Gpu:
    """The GPU called `name` (aiconfigurator system names: b200_sxm, h100_sxm, ...; any case).

    Raises InputError for an unknown name, with the nearest one and all of them.
    """
    key = name.strip().lower()
    if key in _OWN:
        return _OWN[key]
    choices = gpu_names()
    if key not in choices:
        raise InputError(
            f"cluster.gpu is {name!r}: unknown GPU{nearest(key, choices)}; "
            f"expected one of {', '.join(choices)}"
        )
    facts = yaml.safe_load((systems_folder() / f"{key}.yaml").read_text(encoding="utf-8"))
    chip, node = facts["gpu"], facts["node"]
    return Gpu(
        name=key,
        memory_bytes=int(chip["mem_capacity"]),
        memory_bandwidth_bytes_per_s=float(chip["mem_bw"]),
        bf16_flops=float(chip["bfloat16_tc_flops"]),
        power_watts=float(chip["power"]),
        interconnect_bytes_per_s=float(node["intra_node_bw"]),
        p2p_latency_s=float(node["p2p_latency"]),
        source=f"aiconfigurator-core systems/{key}.yaml",
    )
