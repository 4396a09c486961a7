"""Step time through its public interface."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim.config import RunConfig, parse_config
from agentservesim.errors import InputError
from agentservesim.policies.interface import PrefillLine
from agentservesim.step_time import StepTimeModel, build_step_time, gpu, model
from agentservesim.step_time.decode_line import LinedStepTime
from agentservesim.step_time.energy import power_model

WIGGLE = 0.08
"""Measured kernels change with the batch: the products of 33 tokens are up to 7 % slower than those of 49."""


def config(
    backend: str = "measured",
    gpu_name: str = "b200_sxm",
    model_name: str = "llama-3.1-8b",
    tp: int = 1,
    **step: Any,
) -> RunConfig:
    return parse_config(
        {
            "workload": {"source": "unused"},
            "cluster": {"gpu": gpu_name, "model": model_name, "tp": tp},
            "step_time": {"backend": backend, "residual": "none", **step},
        }
    )


@cache
def built(
    backend: str = "measured", gpu_name: str = "b200_sxm", model_name: str = "llama-3.1-8b", tp: int = 1
) -> Any:
    return build_step_time(config(backend, gpu_name, model_name, tp))


@cache
def library(hf_name: str, system: str, tp: int) -> Any:
    """The library's own engine, by its own slower compile path."""
    import aiconfigurator_core
    from aiconfigurator_core.sdk.engine import compile_engine

    spec = compile_engine(hf_name, system, "vllm", None, tp_size=tp, moe_tp_size=tp)
    return aiconfigurator_core.AicEngine.from_spec(spec)


LIBRARY_CASES = [
    ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", "b200_sxm", 1),
    ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B", "h200_sxm", 2),
    ("qwen3-32b", "Qwen/Qwen3-32B", "rtx_pro_6000_server", 1),
]


# --- measured --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "hf_name", "system", "tp"), LIBRARY_CASES)
def test_decode_steps_reproduce_the_library(name: str, hf_name: str, system: str, tp: int) -> None:
    ours, theirs = built("measured", system, name, tp), library(hf_name, system, tp)
    draw = random.Random(7)
    errors = []
    for _ in range(400):
        batch, context = draw.randint(1, 256), int(2 ** draw.uniform(4, 16))
        direct_ms = theirs.predict_decode_latency(batch, context - 1, 2)  # it attends to isl + 1
        errors.append(abs(ours.step([], batch, batch * context).seconds * 1e3 / direct_ms - 1))
    errors.sort()
    assert statistics.median(errors) < 0.001
    assert errors[int(0.99 * len(errors))] < 0.02


@pytest.mark.parametrize(("name", "hf_name", "system", "tp"), LIBRARY_CASES)
def test_one_prefill_reproduces_the_library(name: str, hf_name: str, system: str, tp: int) -> None:
    """Exactly, but for short chunks over a short prefix, where we keep the kernel's fixed time whole."""
    ours, theirs = built("measured", system, name, tp), library(hf_name, system, tp)
    draw = random.Random(8)
    for _ in range(200):
        new, computed = draw.randint(256, 8192), draw.choice([0, draw.randint(1, 100_000)])
        direct_ms = theirs.predict_prefill_latency(1, new + computed, computed)
        assert ours.step([(new, computed)], 0, 0).seconds * 1e3 == pytest.approx(direct_ms, rel=0.01)
    for new in (1, 16, 100):
        direct_ms = theirs.predict_prefill_latency(1, new, 0)
        assert ours.step([(new, 0)], 0, 0).seconds * 1e3 == pytest.approx(direct_ms, rel=1e-9)


def test_mixture_of_experts_reproduces_the_library() -> None:
    ours, theirs = (
        built("measured", "h100_sxm", "qwen3-30b-a3b", 2),
        library("Qwen/Qwen3-30B-A3B", "h100_sxm", 2),
    )
    for batch, context in ((1, 1024), (16, 4096), (64, 2048)):
        direct_ms = theirs.predict_decode_latency(batch, context - 1, 2)
        assert ours.step([], batch, batch * context).seconds * 1e3 == pytest.approx(direct_ms, rel=0.01)


def test_mixed_step_is_between_its_parts() -> None:
    ours = built()
    prefill, decode = ours.step([(1024, 2048)], 0, 0).seconds, ours.step([], 32, 32 * 4096).seconds
    both = ours.step([(1024, 2048)], 32, 32 * 4096).seconds
    assert max(prefill, decode) < both < prefill + decode


def test_equal_chunks_cost_one_batched_attention() -> None:
    """Eight prompts of 300 tokens take one kernel, not eight: the library's own batch of eight."""
    direct_ms = library("meta-llama/Meta-Llama-3.1-8B", "b200_sxm", 1).predict_prefill_latency(8, 300, 0)
    assert built().step([(300, 0)] * 8, 0, 0).seconds * 1e3 == pytest.approx(direct_ms, rel=0.01)


def test_answers_do_not_depend_on_the_order_of_questions() -> None:
    questions: list[tuple[list[tuple[int, int]], int, int]] = [
        ([], b, b * c) for b in (1, 7, 64) for c in (10, 777, 9000)
    ]
    questions += [([(n, p)], b, 1000 * b) for n in (1, 500) for p in (0, 4000) for b in (0, 3)]
    forward = build_step_time(config())
    backward = build_step_time(config())
    first = [forward.step(*q) for q in questions]
    assert first == list(reversed([backward.step(*q) for q in reversed(questions)]))


def test_grid_limits_are_reported() -> None:
    ours = built()
    assert ours.step([], 8, 8 * 32_000).in_grid
    assert not ours.step([], 8, 8 * 80_000).in_grid  # beyond the longest context measured
    assert not ours.step([], 4096, 4096 * 100).in_grid  # beyond the largest batch measured
    assert ours.step([(8192, 0)], 4, 4000).in_grid
    assert not ours.step([(512, 60_000)], 0, 0).in_grid


def test_beyond_the_grid_time_grows_linearly() -> None:
    ours = built()
    at = [ours.step([], 4, 4 * context).seconds for context in (200_000, 300_000, 400_000)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0], rel=1e-9)


def test_decode_step_is_fast_and_loading_is_quiet() -> None:
    ours = built()
    ours.step((), 64, 64 * 4200)
    best = min(_seconds_of(lambda: [ours.step((), 64, 64 * 4200 + i) for i in range(2000)]) for _ in range(5))
    assert best / 2000 < 10e-6  # 0.7 us on an idle core; the limit allows for a busy one
    script = (
        "from agentservesim.config import parse_config\n"
        "from agentservesim.step_time import build_step_time\n"
        "m = build_step_time(parse_config({'workload': {'source': 'x'}, 'cluster': "
        "{'gpu': 'a100_sxm', 'model': 'qwen3-8b'}}))\n"
        "m.step([(100, 0)], 4, 4000)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def _seconds_of(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- all back ends ---------------------------------------------------------------------------------------

BACKENDS = ["measured", "roofline"]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(
    new=st.integers(1, 8000),
    more=st.integers(0, 8000),
    computed=st.integers(0, 60_000),
    longer=st.integers(0, 60_000),
    decodes=st.integers(0, 200),
    context=st.integers(1, 30_000),
)
def test_more_work_is_never_faster(
    backend: str, new: int, more: int, computed: int, longer: int, decodes: int, context: int
) -> None:
    """Beyond the wiggle of the measured kernels themselves."""
    ours = built(backend)
    tolerance = WIGGLE if backend == "measured" else 1e-9
    less = ours.step([(new, computed)], decodes, decodes * context)
    for greater in (
        ours.step([(new + more, computed)], decodes, decodes * context),
        ours.step([(new, computed + longer)], decodes, decodes * context),
        ours.step([(new, computed)], decodes + 1, (decodes + 1) * context),
        ours.step([(new, computed), (max(1, more), longer)], decodes, decodes * context),
    ):
        assert greater.seconds >= less.seconds * (1 - tolerance)


@pytest.mark.parametrize("backend", [*BACKENDS, "linear"])
@settings(max_examples=100, deadline=None)
@given(
    prefills=st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 50_000)), max_size=5),
    decodes=st.integers(0, 256),
    context=st.integers(1, 60_000),
)
def test_power_lies_between_idle_and_limit(
    backend: str, prefills: list[tuple[int, int]], decodes: int, context: int
) -> None:
    ours = build_step_time(config("linear", base_s=0.01)) if backend == "linear" else built(backend)
    if not prefills and not decodes:
        with pytest.raises(ValueError, match="without sequences"):
            ours.step([], 0, 0)
        return
    cost = ours.step(prefills, decodes, decodes * context)
    watts = cost.joules / cost.seconds
    assert ours.idle_watts <= watts * (1 + 1e-9)
    assert watts <= gpu("b200_sxm").power_watts * (1 + 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(decodes=st.integers(1, 256), context=st.integers(1, 100_000))
def test_decode_line_gives_the_step_over_its_whole_range(backend: str, decodes: int, context: int) -> None:
    ours: LinedStepTime = built(backend)
    tokens = decodes * context
    line = ours.decode_line(decodes, tokens)
    assert line.from_tokens <= tokens < line.until_tokens
    inside = [int(max(line.from_tokens, decodes)), tokens, int(min(line.until_tokens, 1e9)) - 1]
    fresh = build_step_time(config("roofline")) if backend == "roofline" else ours
    for at in inside:
        cost = fresh.step([], decodes, at)
        assert cost.seconds == line.base_s + line.slope_s * at
        assert cost.joules == line.base_joules + line.slope_joules * at
        assert cost.in_grid == line.in_grid


def test_growing_contexts_cross_the_knots_as_single_questions_do() -> None:
    """A batch that decodes step by step costs what each step costs a model that was asked nothing else."""
    walked, jumped = build_step_time(config()), build_step_time(config())
    for tokens in range(8 * 380, 8 * 520, 3):  # over the knots 384 and 512
        jumped.step([], 8, 8)
        assert walked.step([], 8, tokens) == jumped.step([], 8, tokens)


def test_power_is_clipped_at_the_limit() -> None:
    power = power_model(gpu("b200_sxm"), 2)
    assert power.joules(3.0, 9.0) == pytest.approx(6000)
    assert power.joules(3.0, 0.0) == pytest.approx(900)


def test_busy_steps_draw_more_than_waiting_ones() -> None:
    ours = built()
    prefill, decode = ours.step([(8192, 0)], 0, 0), ours.step([], 1, 1)
    assert prefill.joules / prefill.seconds > 1.5 * ours.idle_watts
    assert decode.joules / decode.seconds > ours.idle_watts
    assert built("measured", "h200_sxm", "llama-3.1-70b", 2).idle_watts == pytest.approx(2 * 700 * 0.15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_line_describes_prefills(backend: str) -> None:
    ours = built(backend)
    line = ours.prefill_line()
    assert 1 < line.knee_tokens < 2048
    for tokens in (3072, 4096, 6144):
        assert line.slope_s_per_token * tokens + line.base_s == pytest.approx(
            ours.step([(tokens, 0)], 0, 0).seconds, rel=0.06
        )
    flat, knee = ours.step([(1, 0)], 0, 0).seconds, line.slope_s_per_token * line.knee_tokens + line.base_s
    assert knee == pytest.approx(flat, abs=2 * line.slope_s_per_token)


# --- roofline --------------------------------------------------------------------------------------------


def test_roofline_decode_by_hand() -> None:
    """H100, Llama 8B, 4 sequences of 1,000 tokens: weights less the embedding table, then KV, from memory."""
    weights = 2 * (32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336) + 128256 * 4096)
    kv = 4 * 1000 * 131072
    by_hand = (weights + kv) / (3.35e12 * 0.8)
    cost = built("roofline", "h100_sxm").step([], 4, 4000)
    assert cost.seconds == pytest.approx(by_hand, rel=1e-12)
    assert not cost.in_grid
    assert cost.joules == pytest.approx(cost.seconds * 700 * (0.15 + 0.85 * 0.8), rel=1e-9)


def test_roofline_prefill_by_hand() -> None:
    """H100, Llama 8B: 1,024 tokens over 3,072 cached, compute bound in products and attention."""
    layer = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336
    products = 2 * (1024 * 32 * layer + 128256 * 4096) / (0.989e15 * 0.7)
    pairs = 1024 * 3072 + 1024 * 1025 // 2
    attention = 4 * 32 * 4096 * pairs / (0.989e15 * 0.5)
    seconds = built("roofline", "h100_sxm").step([(1024, 3072)], 0, 0).seconds
    assert seconds == pytest.approx(products + attention, rel=1e-12)


def test_roofline_all_reduce_by_hand() -> None:
    """H200, Llama 70B on 4 GPUs, one token: a quarter of the weights each, and 160 all-reduces of 16 KiB."""
    layer = 8192 * (8192 * 2 + 1024 * 2) + 3 * 8192 * 28672
    weights = 2 * (80 * layer + 128256 * 8192) / 4 / (4.8e12 * 0.8)
    kv = 100 * 81_920 / (4.8e12 * 0.8)
    reduce = 160 * (1e-5 + 2 * 3 / 4 * 8192 * 2 / 450e9)
    seconds = built("roofline", "h200_sxm", "llama-3.1-70b", 4).step([], 1, 100).seconds
    assert seconds == pytest.approx(weights + kv + reduce, rel=1e-9)


def test_roofline_reads_only_the_experts_that_are_reached() -> None:
    ours = built("roofline", "h100_sxm", "qwen3-30b-a3b")
    one, many = ours.step([], 1, 1).seconds, ours.step([], 256, 256).seconds
    expert = 2 * 48 * 3 * 2048 * 768
    assert many - one == pytest.approx(120 * expert / (3.35e12 * 0.8), rel=0.02)


# --- linear ----------------------------------------------------------------------------------------------


def test_linear_formula() -> None:
    ours = build_step_time(
        config("linear", base_s=1.0, per_prefill_token_s=0.5, per_decode_s=0.25, per_context_token_s=0.125)
    )
    assert ours.step([], 4, 8) == (3.0, 3000.0, False)
    assert ours.step([(2, 100), (4, 0)], 4, 8) == (6.0, 6000.0, False)
    assert ours.prefill_line() == PrefillLine(0.5, 1.0, 1)
    assert ours.notice is None


def test_linear_chunks_and_pairs() -> None:
    ours = build_step_time(config("linear", base_s=1.0, per_prefill_s=0.5, per_prefill_pair_s=0.25))
    assert ours.step([], 4, 8).seconds == 1.0
    # the second and third of three tokens attend to two and three: 101 + 102, 1 + 2 + 3
    assert ours.step([(2, 100), (3, 0)], 0, 0).seconds == 1.0 + 2 * 0.5 + 0.25 * (203 + 6)
    assert ours.prefill_line().slope_s_per_token > 0


# --- choosing a back end ---------------------------------------------------------------------------------


def test_measured_says_what_it_is() -> None:
    ours: StepTimeModel = built()
    assert (ours.backend, ours.notice) == ("measured", None)
    assert "vLLM 0.24.0" in ours.source
    assert "aiconfigurator-core 0.12" in ours.source


@pytest.mark.parametrize(
    ("gpu_name", "model_name", "why"),
    [
        ("rtx_4090", "llama-3.1-8b", "no vLLM operator data for GPU rtx_4090"),
        ("l4", "llama-3.1-8b", "no vLLM operator data for GPU l4"),
        ("b200_sxm", "phi-3.5-moe", "no usable data for phi-3.5-moe"),
    ],
)
def test_without_data_the_roofline_stands_in_and_says_why(gpu_name: str, model_name: str, why: str) -> None:
    ours = build_step_time(config("measured", gpu_name, model_name))
    assert ours.backend == "roofline"
    assert ours.notice is not None
    assert why in ours.notice
    assert "roofline estimate, not a measurement" in ours.notice


def test_model_by_path_is_measured_where_the_architecture_is_known(tmp_path: Path) -> None:
    facts = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(facts))
    ours = build_step_time(config("measured", model_name=str(tmp_path)))
    assert ours.step([(700, 50)], 3, 3000) == built().step([(700, 50)], 3, 3000)
    (tmp_path / "other.json").write_text(json.dumps(facts | {"architectures": ["NewForCausalLM"]}))
    other = build_step_time(config("measured", model_name=str(tmp_path / "other.json")))
    assert other.backend == "roofline"
    assert other.notice is not None
    assert "does not support architecture NewForCausalLM" in other.notice


def test_unusable_clusters_are_refused() -> None:
    for backend in ("measured", "roofline", "linear"):
        with pytest.raises(InputError, match=r"cluster\.gpu"):
            build_step_time(config(backend, gpu_name="b20_sxm"))
        with pytest.raises(InputError, match=r"cluster\.model"):
            build_step_time(config(backend, model_name="llama"))
        with pytest.raises(InputError, match=r"cluster\.tp is 5"):
            build_step_time(config(backend, tp=5))


def test_every_bundled_model_has_a_step_time() -> None:
    from agentservesim.step_time.models import model_names

    for name in model_names():
        assert build_step_time(config("roofline", model_name=name)).step([], 1, 100).seconds > 0
        assert model(name).name == name
