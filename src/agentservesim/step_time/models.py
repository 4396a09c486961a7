"""Model descriptions: a table of well-known models, and any Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentservesim.errors import InputError, nearest


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with grouped-query attention, dense or mixture-of-experts.

    name                      short name, or the path it was read from
    hf_name                   Hugging Face id, None when read from a path
    architecture              class name in the config, such as LlamaForCausalLM
    experts                   routed experts a layer; 0: dense, then `intermediate` is the MLP's width
    experts_per_token         experts that each token visits
    moe_intermediate          width of one expert
    max_position_embeddings   longest context in tokens
    dtype_bytes               bytes of a weight and of a KV element
    """

    name: str
    hf_name: str | None
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    tie_embeddings: bool = False
    max_position_embeddings: int = 131_072
    dtype_bytes: int = 2

    def parameters(self) -> int:
        """Parameters of the whole model, embeddings included."""
        return (
            self.vocab * self.hidden * (1 if self.tie_embeddings else 2)
            + self.layers * self._layer_parameters(1, 1)
            + self.hidden
        )

    def weight_bytes(self, tp: int = 1) -> int:
        """Bytes of weights on each of `tp` GPUs. Norms and routers are copied; KV heads too once
        kv_heads < tp.

        Raises InputError when the heads cannot be split over `tp` GPUs.
        """
        self.check_tp(tp)
        table = -(-self.vocab // tp) * self.hidden * (1 if self.tie_embeddings else 2)
        layer = self._layer_parameters(tp, self.kv_copies(tp))
        return (table + self.layers * layer + self.hidden) * self.dtype_bytes

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes that a token's keys and values take on each of `tp` GPUs.

        Raises InputError when the heads cannot be split over `tp` GPUs.
        """
        self.check_tp(tp)
        return 2 * self.layers * self.kv_heads_per_gpu(tp) * self.head_dim * self.dtype_bytes

    def kv_heads_per_gpu(self, tp: int) -> int:
        """KV heads that each of `tp` GPUs holds; at least one."""
        return max(1, self.kv_heads // tp)

    def kv_copies(self, tp: int) -> int:
        """How many of `tp` GPUs hold the same KV head."""
        return max(1, tp // self.kv_heads)

    def check_tp(self, tp: int) -> None:
        """Raise InputError unless vLLM can split the heads over `tp` GPUs."""
        if self.heads % tp or max(tp, self.kv_heads) % min(tp, self.kv_heads):
            valid = [n for n in range(1, self.heads + 1) if not self.heads % n]
            valid = [n for n in valid if not max(n, self.kv_heads) % min(n, self.kv_heads)]
            raise InputError(
                f"cluster.tp is {tp}: {self.name} has {self.heads} attention heads and {self.kv_heads} KV "
                f"heads, which split over {', '.join(map(str, valid))} GPUs only"
            )

    def attention_parameters(self, tp: int, kv_copies: int) -> int:
        """Parameters of one layer's attention on one of `tp` GPUs, without its norms."""
        q = self.hidden * self.heads * self.head_dim
        kv = 2 * self.hidden * self.kv_heads * self.head_dim * kv_copies
        biases = {
            "Qwen2ForCausalLM": (self.heads + 2 * self.kv_heads * kv_copies) * self.head_dim,
            "PhiMoEForCausalLM": (self.heads + 2 * self.kv_heads * kv_copies) * self.head_dim
            + self.hidden * tp,
        }
        return (2 * q + kv + biases.get(self.architecture, 0)) // tp

    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer (of the MLP when dense), over all GPUs."""
        return 3 * self.hidden * (self.moe_intermediate if self.experts else self.intermediate)

    def _layer_parameters(self, tp: int, kv_copies: int) -> int:
        norms = 2 * self.hidden + (2 * self.head_dim if self.architecture.startswith("Qwen3") else 0)
        mlp = max(1, self.experts) * self.expert_parameters() // tp + self.experts * self.hidden
        return self.attention_parameters(tp, kv_copies) + mlp + norms


_LLAMA, _MISTRAL, _MIXTRAL = "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"
_QWEN2, _QWEN3, _QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"

# From each model's config.json: layers, hidden, heads, KV heads, head dim, MLP width, vocabulary; then
# experts, experts a token, expert width; tied embeddings; longest context.
# fmt: off
_TABLE = (
    Model("llama-2-7b", "meta-llama/Llama-2-7b-hf", _LLAMA, 32, 4096, 32, 32, 128, 11008, 32000,
          max_position_embeddings=4096),
    Model("llama-2-13b", "meta-llama/Llama-2-13b-hf", _LLAMA, 40, 5120, 40, 40, 128, 13824, 32000,
          max_position_embeddings=4096),
    Model("llama-2-70b", "meta-llama/Llama-2-70b-hf", _LLAMA, 80, 8192, 64, 8, 128, 28672, 32000,
          max_position_embeddings=4096),
    Model("codellama-34b", "codellama/CodeLlama-34b-hf", _LLAMA, 48, 8192, 64, 8, 128, 22016, 32000,
          max_position_embeddings=16_384),
    Model("llama-3.1-8b", "meta-llama/Llama-3.1-8B", _LLAMA, 32, 4096, 32, 8, 128, 14336, 128_256),
    Model("llama-3.1-70b", "meta-llama/Llama-3.1-70B", _LLAMA, 80, 8192, 64, 8, 128, 28672, 128_256),
    Model("llama-3.1-405b", "meta-llama/Llama-3.1-405B", _LLAMA, 126, 16384, 128, 8, 128, 53248, 128_256),
    Model("llama-3.2-1b", "meta-llama/Llama-3.2-1B", _LLAMA, 16, 2048, 32, 8, 64, 8192, 128_256,
          tie_embeddings=True),
    Model("llama-3.2-3b", "meta-llama/Llama-3.2-3B", _LLAMA, 28, 3072, 24, 8, 128, 8192, 128_256,
          tie_embeddings=True),
    Model("llama-3.3-70b", "meta-llama/Llama-3.3-70B", _LLAMA, 80, 8192, 64, 8, 128, 28672, 128_256),
    Model("mistral-7b", "mistralai/Mistral-7B-v0.3", _MISTRAL, 32, 4096, 32, 8, 128, 14336, 32_768,
          max_position_embeddings=32_768),
    Model("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", _MIXTRAL, 32, 4096, 32, 8, 128, 14336, 32_000,
          8, 2, 14336, max_position_embeddings=32_768),
    Model("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", _MIXTRAL, 56, 6144, 48, 8, 128, 16384, 32_768,
          8, 2, 16384, max_position_embeddings=65_536),
    Model("phi-3.5-moe", "microsoft/Phi-3.5-MoE", "PhiMoEForCausalLM", 32, 4096, 32, 8, 128, 6400, 32_064,
          16, 2, 6400),
    Model("qwen2.5-7b", "Qwen/Qwen2.5-7B", _QWEN2, 28, 3584, 28, 4, 128, 18944, 152_064),
    Model("qwen2.5-14b", "Qwen/Qwen2.5-14B", _QWEN2, 48, 5120, 40, 8, 128, 13824, 152_064),
    Model("qwen2.5-32b", "Qwen/Qwen2.5-32B", _QWEN2, 64, 5120, 40, 8, 128, 27648, 152_064),
    Model("qwen2.5-72b", "Qwen/Qwen2.5-72B", _QWEN2, 80, 8192, 64, 8, 128, 29568, 152_064),
    Model("qwen3-0.6b", "Qwen/Qwen3-0.6B", _QWEN3, 28, 1024, 16, 8, 128, 3072, 151_936,
          tie_embeddings=True, max_position_embeddings=40_960),
    Model("qwen3-1.7b", "Qwen/Qwen3-1.7B", _QWEN3, 28, 2048, 16, 8, 128, 6144, 151_936,
          tie_embeddings=True, max_position_embeddings=40_960),
    Model("qwen3-4b", "Qwen/Qwen3-4B", _QWEN3, 36, 2560, 32, 8, 128, 9728, 151_936,
          tie_embeddings=True, max_position_embeddings=40_960),
    Model("qwen3-8b", "Qwen/Qwen3-8B", _QWEN3, 36, 4096, 32, 8, 128, 12288, 151_936,
          max_position_embeddings=40_960),
    Model("qwen3-14b", "Qwen/Qwen3-14B", _QWEN3, 40, 5120, 40, 8, 128, 17408, 151_936,
          max_position_embeddings=40_960),
    Model("qwen3-32b", "Qwen/Qwen3-32B", _QWEN3, 64, 5120, 64, 8, 128, 25600, 151_936,
          max_position_embeddings=40_960),
    Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", _QWEN3_MOE, 48, 2048, 32, 4, 128, 6144, 151_936,
          128, 8, 768, max_position_embeddings=40_960),
    Model("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", _QWEN3_MOE, 94, 4096, 64, 4, 128, 12288, 151_936,
          128, 8, 1536, max_position_embeddings=40_960),
    Model("qwen3-coder-30b-a3b", "Qwen/Qwen3-Coder-30B-A3B", _QWEN3_MOE, 48, 2048, 32, 4, 128, 6144, 151_936,
          128, 8, 768, max_position_embeddings=262_144),
    Model("qwen3-coder-480b-a35b", "Qwen/Qwen3-Coder-480B-A35B", _QWEN3_MOE, 62, 6144, 96, 8, 128, 8192,
          151_936, 160, 8, 2560, max_position_embeddings=262_144),
)
# fmt: on
_BY_NAME = {m.name: m for m in _TABLE} | {m.hf_name.lower(): m for m in _TABLE if m.hf_name}

_REFUSED = {
    "kv_lora_rank": "multi-head latent attention is",
    "linear_attn_config": "linear attention is",
    "linear_num_value_heads": "linear attention is",
    "hybrid_override_pattern": "mixing kinds of layers is",
    "quantization_config": "quantised weights are",
    "n_shared_experts": "shared experts are",
    "shared_expert_intermediate_size": "shared experts are",
    "text_config": "multimodal models are",
    "first_k_dense_replace": "dense layers among experts are",
    "mlp_only_layers": "dense layers among experts are",
}


def model_names() -> list[str]:
    """The short names that `model` accepts, sorted."""
    return sorted(m.name for m in _TABLE)


@cache
def model(name_or_path: str) -> Model:
    """The model by short name or Hugging Face id (any case, -Instruct or not), or from a config.json or
    its folder.

    Raises InputError for an unknown name with the nearest one and all of them, and for a config.json that
    lacks a field or describes what is not modelled, with the file and the field.
    """
    key = name_or_path.strip().lower().replace("/meta-llama-3", "/llama-3").removesuffix("-instruct")
    key = key.replace("-instruct-hf", "-hf")
    if key in _BY_NAME:
        return _BY_NAME[key]
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(path)
    raise InputError(
        f"cluster.model is {name_or_path!r}: unknown model{nearest(key, _BY_NAME)}, and no config.json lies "
        f"at that path; expected one of {', '.join(model_names())}, a Hugging Face id of those, or a path"
    )


def _from_config(path: Path) -> Model:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read the model's config: {error}") from None
    if not isinstance(facts, dict):
        raise InputError(f"{path}: expected a JSON object with a model's fields")
    _refuse_unmodelled(path, facts)
    experts_field = next((f for f in ("num_local_experts", "num_experts") if facts.get(f)), None)
    heads, hidden = _number(path, facts, "num_attention_heads"), _number(path, facts, "hidden_size")
    width = _number(path, facts, "intermediate_size")
    names = facts.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise InputError(f"{path}: field 'architectures' is {names!r}: expected a list with a class name")
    return Model(
        name=str(path),
        hf_name=None,
        architecture=names[0],
        layers=_number(path, facts, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(path, facts, "num_key_value_heads", heads),
        head_dim=_number(path, facts, "head_dim", hidden // heads),
        intermediate=width,
        vocab=_number(path, facts, "vocab_size"),
        experts=_number(path, facts, experts_field) if experts_field else 0,
        experts_per_token=_number(path, facts, "num_experts_per_tok") if experts_field else 0,
        moe_intermediate=_number(path, facts, "moe_intermediate_size", width) if experts_field else 0,
        tie_embeddings=bool(facts.get("tie_word_embeddings", False)),
        max_position_embeddings=_number(path, facts, "max_position_embeddings"),
    )


def _refuse_unmodelled(path: Path, facts: dict[str, Any]) -> None:
    for field, what in _REFUSED.items():
        if facts.get(field):
            raise InputError(f"{path}: field {field!r}: {what} not modelled")
    if facts.get("sliding_window") and facts.get("use_sliding_window", True):
        raise InputError(f"{path}: field 'sliding_window': sliding-window attention is not modelled")
    kinds = facts.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise InputError(f"{path}: field 'layer_types': only full_attention layers are modelled")
    if facts.get("decoder_sparse_step", 1) != 1:
        raise InputError(f"{path}: field 'decoder_sparse_step': only 1, experts in every layer, is modelled")
    dtype = facts.get("dtype") or facts.get("torch_dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):  # vLLM runs float32 checkpoints in 16 bits
        raise InputError(f"{path}: field 'torch_dtype' is {dtype!r}: only 16-bit weights are modelled")


def _number(path: Path, facts: dict[str, Any], field: str, default: int | None = None) -> int:
    value = facts.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "is missing" if field not in facts else f"is {value!r}"
        raise InputError(f"{path}: field {field!r} {found}: expected a whole number of at least 1")
    return value
