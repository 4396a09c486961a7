"""Seconds of an all-reduce over the GPUs of a node: a measured latency and bandwidth where there are any."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from agentservesim.step_time.hardware import Gpu, systems_folder

_SMALL_ELEMENTS, _ELEMENT_BYTES = 8192, 2


class AllReduce(NamedTuple):
    """seconds = latency_s + bytes * s_per_byte, for the buffer that each GPU holds."""

    latency_s: float
    s_per_byte: float
    source: str

    def seconds(self, size_bytes: float) -> float:
        """Seconds to sum a buffer of `size_bytes`."""
        return self.latency_s + size_bytes * self.s_per_byte


@cache
def all_reduce(gpu: Gpu, tp: int) -> AllReduce:
    """The all-reduce among `tp` GPUs.

    The latency is that of vLLM's own kernel in a CUDA graph at 8,192 bf16 elements, the bandwidth NCCL's at
    the largest message, both as aiconfigurator-core measured them. Without such data: the description's
    peer-to-peer latency and 2 (tp - 1) / tp transfers over the link.
    """
    small = _measured(gpu, "vllm", "custom_allreduce_perf", tp)
    large = _measured(gpu, "nccl", "nccl_perf", tp)
    sent = 2 * (tp - 1) / tp
    latency_s, s_per_byte = gpu.p2p_latency_s, sent / gpu.interconnect_bytes_per_s
    sources = []
    if small:
        latency_s = min(small, key=lambda point: abs(point[0] - _SMALL_ELEMENTS))[1]
        sources.append("latency")
    if large:
        elements, seconds = max(large)
        s_per_byte = seconds / (elements * _ELEMENT_BYTES)
        sources.append("bandwidth")
    measured = " and ".join(sources)
    return AllReduce(latency_s, s_per_byte, f"measured {measured}" if measured else gpu.source)


def _measured(gpu: Gpu, library: str, table: str, gpus: int) -> list[tuple[int, float]]:
    """(elements, seconds) of 16-bit all-reduces, from the newest version of a library that has some."""
    from pyarrow import parquet

    folder = systems_folder() / "data" / gpu.name / "comm" / library
    files = folder.glob(f"*/{table}.parquet")
    for file in sorted(files, key=lambda file: _version(file.parent.name), reverse=True):
        points = [
            (int(row["message_size"]), float(row["latency"]) / 1e3)
            for row in parquet.read_table(file).to_pylist()
            if row["op_name"] == "all_reduce"
            and row["num_gpus"] == gpus
            and (row.get("nccl_dtype") or row.get("allreduce_dtype")) in ("half", "bfloat16")
            and "eager" not in row["kernel_source"]
        ]
        if points:
            return points
    return []


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())
