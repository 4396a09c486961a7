"""KV pool, model and GPU facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentservesim.config import ClusterConfig, EngineConfig
from agentservesim.errors import InputError
from agentservesim.step_time import gpu, kv_pool_tokens, model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def cluster(gpu_name: str = "rtx_4090", model_name: str = "llama-3.1-8b", **more: Any) -> ClusterConfig:
    return ClusterConfig(gpu=gpu_name, model=model_name, **more)


def test_pool_of_the_measured_rtx_4090_engine() -> None:
    """vLLM 0.19 reported 2,588 blocks; the reserve was fitted to it, so this guards the arithmetic."""
    pool = kv_pool_tokens(cluster(), EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256))
    assert pool.num_blocks == pytest.approx(2588, rel=0.001)
    assert pool.block_bytes == 16 * 131072
    assert pool.tokens == 16 * pool.num_blocks
    assert pool.usable_blocks == pool.num_blocks - 1
    left = pool.budget_bytes - pool.weight_bytes - pool.activation_bytes - pool.reserve_bytes - pool.kv_bytes
    assert 0 <= left < pool.block_bytes


def test_kv_cache_tokens_override_counts_whole_blocks() -> None:
    pool = kv_pool_tokens(cluster(kv_cache_tokens=115_650), EngineConfig(block_size=16))
    assert (pool.num_blocks, pool.tokens) == (7228, 115_648)
    with pytest.raises(InputError, match=r"cluster\.kv_cache_tokens is 31: .*32"):
        kv_pool_tokens(cluster(kv_cache_tokens=31), EngineConfig())


def test_more_memory_and_smaller_profile_give_more_blocks() -> None:
    def blocks(budget: int, **more: Any) -> int:
        return kv_pool_tokens(
            cluster("h100_sxm", **more), EngineConfig(max_num_batched_tokens=budget)
        ).num_blocks

    assert blocks(8192) > blocks(65536)
    assert blocks(8192, gpu_memory_utilization=0.95) > blocks(8192)
    assert blocks(8192, tp=2) > 2 * blocks(8192)


def test_model_that_does_not_fit_names_the_shortfall_and_the_smallest_tp() -> None:
    with pytest.raises(
        InputError, match=r"llama-3.1-70b does not fit on 1 x h100_sxm .* GiB a GPU.*fits is 4"
    ):
        kv_pool_tokens(cluster("h100_sxm", "llama-3.1-70b", gpu_memory_utilization=0.8), EngineConfig())
    short = 70_553_706_496 * 2 + model("llama-3.1-70b").kv_bytes_per_token() * 32 - 0.5 * 85_899_345_920
    with pytest.raises(InputError) as caught:
        kv_pool_tokens(cluster("h100_sxm", "llama-3.1-70b", gpu_memory_utilization=0.5), EngineConfig())
    stated = float(str(caught.value).split(" GiB")[0].split()[-1])
    assert short / 2**30 < stated < short / 2**30 + 3
    with pytest.raises(InputError, match="no tp up to 64 fits"):
        kv_pool_tokens(cluster("l4", "llama-3.1-405b", gpu_memory_utilization=0.2), EngineConfig())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-2-7b", 6_738_415_616),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    assert model(name).parameters() == parameters


def test_kv_bytes_and_weights_split_over_gpus() -> None:
    assert model("llama-3.1-8b").kv_bytes_per_token() == 131_072
    assert model("llama-3.1-70b").kv_bytes_per_token(2) == 163_840
    qwen = model("qwen3-30b-a3b")  # 4 KV heads: copied, not split further, from tp 8 on
    assert qwen.kv_bytes_per_token(4) == qwen.kv_bytes_per_token(8) == qwen.kv_bytes_per_token(1) // 4
    llama = model("llama-3.1-70b")
    assert llama.weight_bytes(1) == 2 * llama.parameters()
    assert llama.weight_bytes(2) / llama.weight_bytes(1) == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(InputError, match=r"cluster\.tp is 3: llama-3.1-70b .*1, 2, 4, 8, 16, 32, 64"):
        llama.weight_bytes(3)


@pytest.mark.parametrize(
    "name",
    ["meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct", "LLAMA-3.1-8B", " llama-3.1-8b "],
)
def test_names_of_one_model(name: str) -> None:
    assert model(name) is model("llama-3.1-8b")


def test_model_from_a_config_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    read = model(str(file))
    assert read == model(str(tmp_path))
    assert read.hf_name is None
    assert read.parameters() == model("llama-3.1-8b").parameters()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "field 'num_hidden_layers' is None: expected a whole number"),
        ({"hidden_size": "4096"}, "field 'hidden_size' is '4096'"),
        ({"architectures": []}, "field 'architectures'"),
        ({"kv_lora_rank": 512}, "multi-head latent attention is not modelled"),
        ({"sliding_window": 4096}, "sliding-window attention is not modelled"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not modelled"),
        ({"layer_types": ["linear_attention"]}, "only full_attention layers"),
        ({"torch_dtype": "float8_e4m3fn"}, "only 16-bit weights"),
    ],
)
def test_unusable_model_configs_name_file_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | change))
    with pytest.raises(InputError) as caught:
        model(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_config_without_a_field_or_without_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}))
    with pytest.raises(InputError, match="field 'vocab_size' is missing"):
        model(str(file))
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(InputError, match=r"bad\.json: cannot read"):
        model(str(bad))


def test_unknown_names_are_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(
        InputError, match=r"cluster\.gpu is 'h100': .*did you mean 'h100_\w+'.*b200_sxm.*rtx_4090"
    ):
        gpu("h100")
    with pytest.raises(
        InputError, match=r"cluster\.model is 'llama3.1-8b': .*did you mean 'llama-3.1-8b'.*qwen3-32b"
    ):
        model("llama3.1-8b")


def test_gpu_facts_come_from_the_library_and_our_own_table() -> None:
    assert gpu("B200_SXM").memory_bytes == 193_273_528_320
    assert gpu("b200_sxm").power_watts == 1000
    assert gpu("rtx_4090").memory_bytes == 25_250_627_584
    for name in ("h100_sxm", "h200_sxm", "gb200", "rtx_pro_6000_server", "l40s", "a100_sxm"):
        assert gpu(name).bf16_flops > 1e14
