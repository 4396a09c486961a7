"""Step time from floating-point operations and bytes: the fallback where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from agentservesim.step_time.decode_line import LinedStepTime, SecondsLine
from agentservesim.step_time.energy import power_model
from agentservesim.step_time.hardware import Gpu
from agentservesim.step_time.interface import Spread
from agentservesim.step_time.models import Model


class Efficiency(NamedTuple):
    """Shares of the peak rates that kernels reach."""

    compute: float
    memory: float
    attention_compute: float


IDEAL = Efficiency(1.0, 1.0, 1.0)

TYPICAL = Efficiency(compute=0.7, memory=0.8, attention_compute=0.5)
"""Large bf16 matrix products reach about 70 % of the peak, streaming reads about 80 %, and the two products
with a softmax between them of a flash-attention prefill about half."""


class Roofline:
    """Seconds of a batch on `tp` GPUs by the roofline.

    seconds = max(linear flops / (F * compute), weight bytes / (B * memory))
            + max(attention flops / (F * attention_compute), KV bytes / (B * memory))
            + all-reduce seconds

    with, a GPU, F the bf16 flops and B the memory bandwidth. For T tokens and S sampled sequences:
    linear flops      2 * (T * weights a token passes through + S * vocabulary * hidden)
    weight bytes      every weight once; of E experts those that T tokens reach, E * (1 - (1 - k / E) ** T)
    attention flops   4 * layers * heads * head_dim a pair of a query and a key it sees
    KV bytes          of every token attended to, once a sequence
    all-reduce        two a layer when tp > 1: latency + 2 * (tp - 1) / tp * T * hidden bytes / link bandwidth
    Activation traffic and launch times are left out.
    """

    def __init__(self, gpu: Gpu, model: Model, tp: int, efficiency: Efficiency) -> None:
        self._flops = gpu.bf16_flops * efficiency.compute
        self._bandwidth = gpu.memory_bandwidth_bytes_per_s * efficiency.memory
        self._attention_flops = gpu.bf16_flops * efficiency.attention_compute
        self._experts, self._per_token = model.experts, model.experts_per_token
        attention = model.layers * model.attention_parameters(tp, model.kv_copies(tp))
        self._expert = model.layers * model.expert_parameters() / tp
        router = model.layers * model.experts * model.hidden
        self._head = model.vocab * model.hidden / tp
        self._always = attention + router
        self._dtype_bytes = model.dtype_bytes
        self._flops_per_pair = 4 * model.layers * model.heads * model.head_dim / tp
        self._kv_bytes = model.kv_bytes_per_token(tp)
        self._reductions = 2 * model.layers if tp > 1 else 0
        self._latency_s = gpu.p2p_latency_s
        self._reduce_s_per_token = (
            2 * (tp - 1) / tp * model.hidden * model.dtype_bytes / gpu.interconnect_bytes_per_s
        )

    def linear_seconds(self, tokens: int, sampled: int) -> float:
        """Matrix products over weights, and the all-reduces between them."""
        passed, reached = max(1, self._per_token), 1.0
        if self._experts:
            reached = self._experts * (1 - (1 - self._per_token / self._experts) ** tokens)
        flops = 2 * (tokens * (self._always + passed * self._expert) + sampled * self._head)
        size = (self._always + reached * self._expert + self._head) * self._dtype_bytes
        reduce = self._reductions * (self._latency_s + tokens * self._reduce_s_per_token)
        return max(flops / self._flops, size / self._bandwidth) + reduce

    def attention_seconds(self, pairs: float, kv_tokens: float) -> float:
        """Attention over `pairs` of query and key, reading the KV of `kv_tokens`."""
        return max(
            pairs * self._flops_per_pair / self._attention_flops, kv_tokens * self._kv_bytes / self._bandwidth
        )

    def seconds(self, prefills: Sequence[tuple[int, int]], decodes: int, decode_context_tokens: int) -> float:
        """Seconds of a batch; the arguments are those of StepTimeModel.step."""
        pairs = kv_tokens = decode_context_tokens
        tokens = decodes
        for new, computed in prefills:
            tokens += new
            pairs += new * computed + new * (new + 1) // 2
            kv_tokens += new + computed
        return self.linear_seconds(tokens, decodes + len(prefills)) + self.attention_seconds(pairs, kv_tokens)

    def decode_line(self, decodes: int) -> tuple[float, float]:
        """Base and slope of a decode-only step's seconds in its context tokens."""
        return self.linear_seconds(decodes, decodes), self.attention_seconds(1, 1)


class RooflineStepTime(LinedStepTime):
    """Step time by the roofline at TYPICAL efficiency; utilisation is against the ideal one."""

    backend = "roofline"

    def __init__(
        self, gpu: Gpu, model: Model, tp: int, max_num_batched_tokens: int, reason: str | None = None
    ) -> None:
        """`reason` says why the roofline stands in for the measurements that were asked for."""
        super().__init__(power_model(gpu, tp), max_num_batched_tokens)
        self._roofline = Roofline(gpu, model, tp, TYPICAL)
        self._ideal = Roofline(gpu, model, tp, IDEAL)
        self.source = f"roofline: {model.name} on {tp} x {gpu.name} ({gpu.source})"
        self.notice = (
            f"{reason}; " if reason else ""
        ) + "step times are a roofline estimate, not a measurement"

    def _seconds_line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> SecondsLine:
        return SecondsLine(*self._roofline.decode_line(decodes), -math.inf, math.inf, False)

    def _roofline_line(self, decodes: int) -> tuple[float, float]:
        return self._ideal.decode_line(decodes)

    def _mixed(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None,
    ) -> tuple[float, float, bool]:
        batch = (prefills, decodes, decode_context_tokens)
        return self._roofline.seconds(*batch), self._ideal.seconds(*batch), False
