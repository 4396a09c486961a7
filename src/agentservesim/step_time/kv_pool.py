"""How many KV blocks an engine gets: vLLM's start-up profiling, as arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from agentservesim.config import ClusterConfig, EngineConfig
from agentservesim.errors import InputError
from agentservesim.step_time.hardware import Gpu, gpu
from agentservesim.step_time.models import Model, model

SAMPLER_BYTES_PER_LOGIT = 26
"""Peak of vLLM's profiled sampling step: bf16 logits (2), their fp32 copy (4), the sorted values (4) and
int64 indices (8) of top-k/top-p, their probabilities (4) and cumulative sum (4)."""

RESERVE_BYTES = 334 * 2**20
"""CUDA graphs, cuBLAS and attention workspaces, allocator slack. Fitted to the one measured pool that
docs/step-time.md names."""

_TP_TRIED = (1, 2, 4, 8, 16, 32, 64)


class KVPool(NamedTuple):
    """An instance's KV pool, and where each GPU's memory goes. Bytes are those of one GPU.

    num_blocks         vLLM's num_gpu_blocks; block 0 is the null block, so `usable_blocks` hold KV
    tokens             num_blocks * block_size
    budget_bytes       memory * gpu_memory_utilization
    activation_bytes   peak of the profiling run
    reserve_bytes      CUDA graphs and workspaces
    kv_bytes           num_blocks * block_bytes
    """

    num_blocks: int
    tokens: int
    block_bytes: int
    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    reserve_bytes: int
    kv_bytes: int

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold KV: all but the null block."""
        return self.num_blocks - 1


def kv_pool_tokens(cluster: ClusterConfig, engine: EngineConfig) -> KVPool:
    """The KV pool of one instance.

    num_blocks = (memory * gpu_memory_utilization - weights - activations - reserve) // block bytes, or
    cluster.kv_cache_tokens // block_size where that is given.
    Raises InputError for an unknown GPU or model, a tp that cannot split the model, kv_cache_tokens below
    two blocks, and a model that does not fit: by how much, and the smallest tp that does.
    """
    chip, spec = gpu(cluster.gpu), model(cluster.model)
    pool = _profiled(chip, spec, cluster.tp, cluster, engine)
    if cluster.kv_cache_tokens is not None:
        blocks = cluster.kv_cache_tokens // engine.block_size
        if blocks < 2:
            raise InputError(
                f"cluster.kv_cache_tokens is {cluster.kv_cache_tokens}: expected at least two blocks of "
                f"engine.block_size, {2 * engine.block_size} (vLLM keeps one as its null block)"
            )
        return pool._replace(
            num_blocks=blocks, tokens=blocks * engine.block_size, kv_bytes=blocks * pool.block_bytes
        )
    if pool.num_blocks < 2:
        short = 2 * pool.block_bytes + pool.weight_bytes + pool.activation_bytes + pool.reserve_bytes
        fits = next((tp for tp in _TP_TRIED if _fits(chip, spec, tp, cluster, engine)), None)
        raise InputError(
            f"cluster.model {spec.name} does not fit on {cluster.tp} x {chip.name} at gpu_memory_utilization "
            f"{cluster.gpu_memory_utilization:g}: "
            f"{(short - pool.budget_bytes) / 2**30:.1f} GiB a GPU too little; "
            + (
                f"the smallest cluster.tp that fits is {fits}"
                if fits
                else f"no tp up to {_TP_TRIED[-1]} fits"
            )
        )
    return pool


def _fits(chip: Gpu, spec: Model, tp: int, cluster: ClusterConfig, engine: EngineConfig) -> bool:
    try:
        return _profiled(chip, spec, tp, cluster, engine).num_blocks >= 2
    except InputError:  # tp does not split the heads
        return False


def _profiled(chip: Gpu, spec: Model, tp: int, cluster: ClusterConfig, engine: EngineConfig) -> KVPool:
    budget = int(chip.memory_bytes * cluster.gpu_memory_utilization)
    weights = spec.weight_bytes(tp)
    activations = _activation_bytes(spec, tp, engine)
    block = spec.kv_bytes_per_token(tp) * engine.block_size
    blocks = max(0, (budget - weights - activations - RESERVE_BYTES) // block)
    return KVPool(
        blocks, blocks * engine.block_size, block, budget, weights, activations, RESERVE_BYTES, blocks * block
    )


def _activation_bytes(spec: Model, tp: int, engine: EngineConfig) -> int:
    """Peak of the profiling run: the widest layer at max_num_batched_tokens, or the sampler after it."""
    tokens = engine.max_num_batched_tokens
    attention = 2 * (spec.heads // tp + spec.kv_heads_per_gpu(tp)) * spec.head_dim
    if spec.experts:
        mlp = spec.experts_per_token * (3 * spec.moe_intermediate // tp + spec.hidden)
    else:
        mlp = 3 * spec.intermediate // tp
    residual = 2 * spec.hidden * tokens * spec.dtype_bytes
    layer = max(attention, mlp) * tokens * spec.dtype_bytes
    sampler = min(engine.max_num_seqs, tokens) * spec.vocab * SAMPLER_BYTES_PER_LOGIT
    return residual + max(layer, sampler)
