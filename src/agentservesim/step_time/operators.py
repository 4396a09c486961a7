"""Measured operator times from aiconfigurator-core, one query a component of a step.

The library's own step predictions assume one length for all sequences; here its operators are asked one by
one, so that any batch can be put together from them.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from agentservesim.step_time.hardware import Gpu, systems_folder
from agentservesim.step_time.models import Model

# Our architecture name: the library's for the same layer shapes.
_ARCHITECTURES = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "LlamaForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "Qwen3ForCausalLM",
    "MixtralForCausalLM": "MixtralForCausalLM",
    "PhiMoEForCausalLM": "MixtralForCausalLM",
    "Qwen3MoeForCausalLM": "Qwen3MoeForCausalLM",
}
_PREFILL_ATTENTION, _DECODE_ATTENTION = "context_attention", "generation_attention"
_LOGITS = "generation_logits_gemm"


class NoMeasurements(Exception):
    """The library has no data for this GPU and model; the message says what is missing, in words."""


class Grid(NamedTuple):
    """What was measured for a model's attention and matrix products on a GPU.

    tokens            largest token count of the matrix products
    prefill_tokens    longest prefill attention; 0: no point at this head shape
    decode_batches    measured decode batch sizes, ascending
    decode_contexts   longest context measured at each of them
    """

    tokens: int
    prefill_tokens: int
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]

    def longest_context(self, decodes: int) -> int:
        """Longest mean context that lies inside the grid for a batch; 0: none does."""
        at = bisect_left(self.decode_batches, decodes)
        return self.decode_contexts[at] if at < len(self.decode_batches) else 0


class Operators:
    """Seconds of a step's components for one GPU, model and tensor-parallel size, under vLLM's kernels.

    Raises NoMeasurements when the library cannot answer for them.
    """

    def __init__(self, gpu: Gpu, model: Model, tp: int) -> None:
        if model.architecture not in _ARCHITECTURES:
            raise NoMeasurements(f"aiconfigurator-core does not support architecture {model.architecture}")
        self.version = _current_version(gpu.name)
        if not _operator_data(gpu, "attention", self.version).is_dir():
            raise NoMeasurements(f"aiconfigurator-core has no vLLM operator data for GPU {gpu.name}")
        try:
            self._engine = _compile(gpu, model, tp, self.version)
            context, generation = self._engine.run_static_per_op(1, 1, 16, 2, 0, 1.0, 1.0)
        except Exception as error:  # the library raises many types, some of them from its native half
            detail = (str(error).splitlines() or ["no details"])[0][:160]
            raise NoMeasurements(
                f"aiconfigurator-core has no usable data for {model.name} with tp {tp} on {gpu.name} "
                f"({type(error).__name__}: {detail})"
            ) from error
        prefill_ops, decode_ops = [op[0] for op in context], [op[0] for op in generation]
        self._prefill = [prefill_ops.index(_PREFILL_ATTENTION)]
        self._decode = [decode_ops.index(_DECODE_ATTENTION)]
        # Logits are asked of the decode list: for mixtures of experts the prefill list lacks them.
        self._logits = [decode_ops.index(_LOGITS)]
        self._shared = [i for i in range(len(decode_ops)) if i not in (*self._decode, *self._logits)]
        self.grid = _grid(gpu, model, tp, self.version)
        self._attention, self._fold = self._engine, 1
        if not self.grid.decode_batches:
            self._fold_heads(gpu, model, tp)
        library = importlib.metadata.version("aiconfigurator-core")
        self.source = (
            f"aiconfigurator-core {library}: vLLM {self.version} kernels, {model.name} on {tp} x {gpu.name}"
        )

    def _fold_heads(self, gpu: Gpu, model: Model, tp: int) -> None:
        """Answer for decode attention of a head shape that was not measured from one that was, if there is.

        Sequences and KV heads are independent there: n sequences with H query and K KV heads are as much
        work, in as many equal parts, as n * f sequences with H / f and K / f. The grid stays empty.
        """
        own = model.kv_heads_per_gpu(tp)
        for fold in (fold for fold in range(2, own + 1) if own % fold == 0):
            part = replace(model, heads=model.heads // fold, kv_heads=own // fold * tp)
            if _grid(gpu, part, tp, self.version).decode_batches:
                self._attention, self._fold = _compile(gpu, part, tp, self.version), fold
                return

    def shared_seconds(self, tokens: int) -> float:
        """Everything but attention and logits, for `tokens` tokens: products, norms, all-reduces."""
        return float(sum(op[1] for op in self._engine.evaluate_generation_ops(self._shared, tokens, 1))) / 1e3

    def logits_seconds(self, sequences: int) -> float:
        """The output projection for the sequences that sample; in vLLM all of the batch."""
        return float(self._engine.evaluate_generation_ops(self._logits, sequences, 1)[0][1]) / 1e3

    def prefill_attention_seconds(self, sequences: int, new: int, computed: int) -> float:
        """Attention of `sequences` equal chunks of `new` tokens over `computed` cached ones."""
        return float(self._engine.evaluate_context_ops(self._prefill, sequences, new, computed)[0][1]) / 1e3

    def decode_attention_seconds(self, decodes: int, context: int) -> float:
        """Attention of `decodes` sequences, one token each, over `context` tokens each."""
        batch = decodes * self._fold
        return float(self._attention.evaluate_generation_ops(self._decode, batch, context)[0][1]) / 1e3


def _current_version(gpu_name: str) -> str:
    """The vLLM version whose data the wheel serves for a GPU."""
    slots = yaml.safe_load((systems_folder() / "query_versions.yaml").read_text(encoding="utf-8"))
    override = slots.get("overrides", {}).get(gpu_name, {}).get("vllm")
    return str((override or slots["defaults"]["vllm"])["current"])


def _operator_data(gpu: Gpu, family: str, version: str) -> Path:
    return systems_folder() / "data" / gpu.name / family / "vllm" / version


def _compile(gpu: Gpu, model: Model, tp: int, version: str) -> Any:
    """A native engine that answers for the model.

    The library's compile_engine spends a second on choosing attention kernels by how densely each was
    measured; without a database object it takes the kernels' default order, which answers the same
    (tests/test_step_time.py compares the two).
    """
    import aiconfigurator_core
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.engine import build_engine_spec_json
    from aiconfigurator_core.sdk.models import get_model

    config = build_model_config(
        tp_size=tp, pp_size=1, attention_dp_size=1, moe_tp_size=tp if model.experts else 1, moe_ep_size=1
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_config_json(model)), encoding="utf-8")
        built = get_model(folder, config, "vllm")
    spec = build_engine_spec_json(
        built,
        model_path=model.name,
        system=gpu.name,
        backend="vllm",
        backend_version=version,
        kv_block_size=None,
        systems_path=None,
        nextn=0,
        database=None,
    )
    return aiconfigurator_core.AicEngine.from_spec(
        bytes(aiconfigurator_core.engine_spec_bincode_from_json(spec))
    )


def _config_json(model: Model) -> dict[str, Any]:
    """The model as the Hugging Face config that the library reads."""
    facts: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model.architecture]],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_position_embeddings,
        "torch_dtype": "bfloat16",
    }
    if model.experts:
        facts |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.moe_intermediate,
        }
    return facts


def _grid(gpu: Gpu, model: Model, tp: int, version: str) -> Grid:
    """The measured range, read from the wheel's tables. Head shapes that were not measured have none."""
    from pyarrow import parquet

    shape = [
        ("num_heads", "=", model.heads // tp),
        ("num_key_value_heads", "=", model.kv_heads_per_gpu(tp)),
        ("head_dim", "=", model.head_dim),
        ("kv_cache_dtype", "=", "bfloat16"),
    ]

    def longest(kind: str) -> dict[int, int]:
        file = _operator_data(gpu, "attention", version) / f"{kind}_attention_perf.parquet"
        if not file.is_file():
            return {}
        rows = parquet.read_table(file, columns=["batch_size", "isl", "step"], filters=shape).to_pydict()
        reach: dict[int, int] = {}
        for batch, new, past in zip(rows["batch_size"], rows["isl"], rows["step"], strict=True):
            reach[batch] = max(reach.get(batch, 0), new + past)
        return reach

    products = _operator_data(gpu, "gemm", version) / "gemm_perf.parquet"
    sizes = []
    if products.is_file():
        table = parquet.read_table(products, columns=["m"], filters=[("gemm_dtype", "=", "bfloat16")])
        sizes = table["m"].unique().to_pylist()
    decode = sorted(longest("generation").items())
    return Grid(
        tokens=max(sizes, default=0),
        prefill_tokens=longest("context").get(1, 0),
        decode_batches=tuple(batch for batch, _ in decode),
        decode_contexts=tuple(context for _, context in decode),
    )
