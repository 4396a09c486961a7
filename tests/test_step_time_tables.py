"""The tables back end: interpolation by hand, unequal contexts, errors, and leaps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim import parse_config
from agentservesim.errors import InputError
from agentservesim.step_time import StepTimeModel, build_step_time, gpu
from agentservesim.step_time.all_reduce import all_reduce
from agentservesim.step_time.interpolation import Curve, Grid
from helpers import answers_by_leaps_and_steps, program, turn

LAYERS = 32
META = "model: tiny\ngpu: Testing\nvllm_version: 0.19.0\n"
DENSE = """layer,tokens,time_us
embedding,1,3
embedding,101,13
layernorm,1,1
layernorm,101,2
qkv_proj,1,10
qkv_proj,101,110
new_name,1,5
new_name,101,5
final_layernorm,1,7
final_layernorm,101,7
"""
SEQUENCES = "layer,sequences,time_us\nlm_head,1,100\nlm_head,9,180\nsampler,1,20\nsampler,9,20\n"
SKEW = """pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples
0,n<=2,sr<=40%,kvB<=1k,kp=0,0.1,4
0,n<=2,sr<=40%,kvB<=4k,kp=0,0.3,4
0,n<=2,sr>70%,kvB<=1k,kp=0,0.5,4
0,n<=2,sr>70%,kvB<=4k,kp=0,0.5,4
0,n>2,sr<=40%,kvB<=1k,kp=0,0.2,4
100,n<=2,sr<=40%,kvB<=1k,kp=0,0.3,4
"""


def attention_us(chunk: int, cached: int, decodes: int, context: int) -> float:
    """What the made-up attention table holds; linear along every axis, so that answers are exact."""
    return 5 + 0.5 * chunk + 0.01 * cached + decodes * (2 + 0.003 * context)


def attention_csv() -> str:
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for decodes in (1, 2, 8):
        for context in (16, 1024, 4096):
            lines.append(f"0,0,{decodes},{context},{attention_us(0, 0, decodes, context)}")
    for chunk in (20, 100):
        for cached in (0, 1000):
            lines.append(f"{chunk},{cached},0,0,{attention_us(chunk, cached, 0, 0)}")
            for decodes in (1, 2, 8):
                for context in (16, 1024, 4096):
                    us = attention_us(chunk, cached, decodes, context)
                    lines.append(f"{chunk},{cached},{decodes},{context},{us}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A made-up profile without a skew table."""
    tables = tmp_path / "bf16" / "tp1"
    tables.mkdir(parents=True)
    (tables / "dense.csv").write_text(DENSE)
    (tables / "per_sequence.csv").write_text(SEQUENCES)
    (tables / "attention.csv").write_text(attention_csv())
    (tmp_path / "bf16" / "meta.yaml").write_text(META)
    return tmp_path / "bf16"


def built(path: Path, **cluster: Any) -> StepTimeModel:
    return build_step_time(
        parse_config(
            {
                "workload": {"source": "unused"},
                "cluster": {"gpu": "rtx_4090", "model": "llama-3.1-8b", **cluster},
                "step_time": {"backend": "tables", "path": str(path)},
            }
        )
    )


def dense_us(tokens: int) -> float:
    """By hand: layernorm twice a layer, unknown names once a layer, embedding and the last norm once."""
    share = (tokens - 1) / 100
    return (3 + 10 * share) + 7 + LAYERS * (2 * (1 + share) + (10 + 100 * share) + 5)


def sequences_us(sequences: int) -> float:
    return 20 + 100 + 10 * (sequences - 1)


# --- by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decodes", "context"), [(1, 16), (2, 1024), (8, 4095), (5, 300), (3, 2000)])
def test_a_decode_step_is_the_sum_of_its_tables(folder: Path, decodes: int, context: int) -> None:
    cost = built(folder).step([], decodes, decodes * context)
    us = dense_us(decodes) + sequences_us(decodes) + LAYERS * attention_us(0, 0, decodes, context)
    assert cost.seconds == pytest.approx(us * 1e-6, rel=1e-12)
    assert cost.in_grid


@pytest.mark.parametrize(
    ("prefills", "decodes", "context"),
    [([(20, 0)], 0, 0), ([(100, 1000)], 0, 0), ([(60, 250)], 4, 700), ([(20, 1000)], 8, 4096)],
)
def test_a_step_with_a_chunk_is_the_sum_of_its_tables(
    folder: Path, prefills: list[tuple[int, int]], decodes: int, context: int
) -> None:
    cost = built(folder).step(prefills, decodes, decodes * context)
    ((new, cached),) = prefills
    us = dense_us(new + decodes) + sequences_us(decodes + 1)
    us += LAYERS * attention_us(new, cached, decodes, context)
    assert cost.seconds == pytest.approx(us * 1e-6, rel=1e-12)
    assert cost.in_grid == (new + decodes <= 101)


def test_chunks_over_prefixes_count_as_one_with_as_many_pairs(folder: Path) -> None:
    model = built(folder)
    pairs = 30 * 600 + 30 * 30 / 2 + 20 * 400 + 20 * 20 / 2
    us = dense_us(50) + sequences_us(2) + LAYERS * attention_us(50, pairs / 50 - 25, 0, 0)  # type: ignore[arg-type]
    assert model.step([(30, 600), (20, 400)], 0, 0).seconds == pytest.approx(us * 1e-6, rel=1e-12)


def test_chunks_that_begin_prompts_take_no_more_than_one_chunk_of_all(folder: Path) -> None:
    model = built(folder)
    together = model.step([(50, 0), (50, 0)], 0, 0).seconds
    assert model.step([(50, 0)], 0, 0).seconds < together
    assert together <= model.step([(100, 0)], 0, 0).seconds + 11e-6  # the second sequence's logits


def test_beyond_the_tables_times_go_on_linearly_and_say_so(folder: Path) -> None:
    model = built(folder)
    inside, outside = model.step([(100, 0)], 0, 0), model.step([(300, 0)], 0, 0)
    us = dense_us(300) + sequences_us(1) + LAYERS * attention_us(300, 0, 0, 0)
    assert inside.in_grid and not outside.in_grid
    assert outside.seconds == pytest.approx(us * 1e-6, rel=1e-12)
    assert not model.step([], 9, 9 * 100).in_grid
    assert not model.step([], 2, 2 * 5000).in_grid


def test_stairs_go_on_with_the_mean_slope_of_the_last_half() -> None:
    stairs = Curve([(1, 0), (50, 0), (51, 10), (99, 10), (100, 20)])
    assert stairs(150) == pytest.approx(20 + 50 * (20 - 0) / (100 - 50))
    assert stairs(0) == 0 and stairs(100) == 20


def test_a_grid_needs_no_full_corners() -> None:
    grid = Grid({(0, 0): 1.0, (2, 0): 3.0, (2, 4): 7.0})
    assert grid(0, 99) == 1.0  # one point: a constant
    assert grid(2, 2) == 5.0
    assert grid(1, 2) == 3.0
    assert grid.covers(2, 4) and not grid.covers(2, 5) and not grid.covers(3, 0)


# --- unequal contexts ------------------------------------------------------------------------------------


def test_unequal_contexts_move_attention_towards_the_longest(folder: Path) -> None:
    (folder / "tp1" / "skew_fit.csv").write_text(SKEW)
    model = built(folder)
    assert model.uses_spread
    equal, skewed = model.step([], 2, 1200).seconds, model.step([], 2, 1200, (200, 1000)).seconds
    # Rate (600 - 200) / 800 = 0.5 lies between 40 and 70 %, in the bucket above 70 %: alpha 0.5.
    moved = 0.5 * LAYERS * (attention_us(0, 0, 2, 1000) - attention_us(0, 0, 2, 600)) * 1e-6
    assert skewed - equal == pytest.approx(moved, rel=1e-9)
    assert model.step([], 2, 1200, (600, 600)).seconds == equal


def test_a_bucket_is_chosen_by_the_longest_context_and_alpha_is_linear_in_the_chunk(folder: Path) -> None:
    (folder / "tp1" / "skew_fit.csv").write_text(SKEW.replace("0,n<=2,sr>70%", "0,n<=2,sr<=70%"))
    model = built(folder)
    for spread, tokens, alpha in [((200, 1000), 800, 0.5), ((200, 2000), 2200, 0.5)]:
        gap = attention_us(0, 0, 2, spread[1]) - attention_us(0, 0, 2, tokens // 2)
        moved = model.step([], 2, tokens, spread).seconds - model.step([], 2, tokens).seconds
        assert moved >= 0
        assert moved <= alpha * LAYERS * gap * 1e-6 + 1e-12
    low = model.step([(50, 0)], 2, 2 * 300, (100, 900))
    plain = model.step([(50, 0)], 2, 2 * 300)
    gap = attention_us(50, 0, 2, 900) - attention_us(50, 0, 2, 300)
    assert low.seconds - plain.seconds == pytest.approx(0.2 * LAYERS * gap * 1e-6, rel=1e-9)


def test_meta_can_switch_the_skew_table_off(folder: Path) -> None:
    (folder / "tp1" / "skew_fit.csv").write_text(SKEW)
    (folder / "meta.yaml").write_text(META + "skew_fit: {enabled: false}\n")
    model = built(folder)
    assert not model.uses_spread
    assert "without a skew table" in model.source


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_step_equals_its_line_at_every_token_of_a_leap(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    model = _skewed(tmp_path_factory)
    contexts = data.draw(st.lists(st.integers(2, 5000), min_size=1, max_size=12))
    steps = data.draw(st.integers(1, 200))
    tokens, spread, decodes = sum(contexts), (min(contexts), max(contexts)), len(contexts)
    line = model.decode_line(decodes, tokens, spread)
    fresh = _skewed(tmp_path_factory)
    for step in range(steps):
        now = tokens + decodes * step
        if not line.from_tokens <= now < line.until_tokens:
            break
        moved = (spread[0] + step, spread[1] + step)
        for answer in (model.step([], decodes, now, moved), fresh.step([], decodes, now, moved)):
            assert answer.seconds == line.base_s + line.slope_s * now
            assert answer.in_grid == line.in_grid


_CACHE: list[Path] = []


def _skewed(factory: pytest.TempPathFactory) -> StepTimeModel:
    if not _CACHE:
        tables = factory.mktemp("profile") / "tp1"
        tables.mkdir()
        (tables / "dense.csv").write_text(DENSE)
        (tables / "per_sequence.csv").write_text(SEQUENCES)
        (tables / "attention.csv").write_text(attention_csv())
        (tables / "skew_fit.csv").write_text(SKEW)
        _CACHE.append(tables)
    return built(_CACHE[0])


def test_a_run_leaps_and_steps_to_the_same_times(folder: Path, tmp_path: Path) -> None:
    (folder / "tp1" / "skew_fit.csv").write_text(SKEW)
    programs = [program(f"p{i}", [turn(100 * (i % 7) + 3, 40 + i)], arrival_s=0.02 * i) for i in range(12)]
    answers = answers_by_leaps_and_steps(tmp_path, programs, {"backend": "tables", "path": str(folder)})
    assert answers[0] == answers[1]


# --- tensor parallelism and experts ----------------------------------------------------------------------


def test_two_gpus_pay_two_all_reduces_a_layer(folder: Path) -> None:
    shutil.copytree(folder / "tp1", folder / "tp2")
    one, two = built(folder), built(folder, tp=2)
    reduce = all_reduce(gpu("rtx_4090"), 2)
    extra = two.step([], 2, 64).seconds - one.step([], 2, 64).seconds
    assert extra == pytest.approx(2 * LAYERS * reduce.seconds(2 * 4096 * 2), rel=1e-9)


def test_an_all_reduce_is_measured_where_the_library_has_it() -> None:
    measured, specified = all_reduce(gpu("rtx_pro_6000_server"), 2), all_reduce(gpu("rtx_4090"), 2)
    assert measured.source == "measured latency and bandwidth"
    assert 5e-6 < measured.latency_s < 50e-6
    assert 30e9 < 1 / measured.s_per_byte < 45e9  # PCIe 5.0 x16, measured with NCCL
    assert specified.s_per_byte == 1 / 32e9


def test_experts_count_once_a_layer_by_tokens_and_by_how_many_are_reached(folder: Path) -> None:
    (folder / "tp1" / "moe.csv").write_text(
        "tokens,activated_experts,time_us\n1,8,80\n100,8,180\n1,128,1280\n100,128,1380\n"
    )
    model = built(folder, model="qwen3-30b-a3b")
    (folder / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_us\n1,8,0\n100,128,0\n")
    without = built(folder, model="qwen3-30b-a3b")
    for tokens in (1, 2, 4):
        reached = 128 * (1 - (1 - 8 / 128) ** tokens)
        us = 48 * (10 * reached + 100 * (tokens - 1) / 99)
        took = model.step([], tokens, tokens * 20).seconds - without.step([], tokens, tokens * 20).seconds
        assert took == pytest.approx(us * 1e-6, rel=1e-9)


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("dense.csv", None, "dense.csv: cannot read the table: No such file"),
        ("attention.csv", None, "attention.csv: cannot read the table"),
        ("dense.csv", "layer,token,time_us\na,1,1\n", "dense.csv:1: no column 'tokens' (did you"),
        ("dense.csv", "layer,tokens,time_us\n", "dense.csv:2: no rows"),
        ("dense.csv", "layer,tokens,time_us\na,1,1\na,2,x\n", "dense.csv:3: column 'time_us' is 'x': exp"),
        ("per_sequence.csv", "layer,sequences,time_us\na,1\n", "column 'time_us' is None"),
        (
            "attention.csv",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,3\n",
            "column 'prefill_chunk' is never above 0",
        ),
        ("skew_fit.csv", SKEW.replace("n>2", "m>2"), "column 'n_label' has 'm>2': expected a bucket"),
        ("moe.csv", "tokens,activated_experts,time_us\n1,1,1\n", "moe.csv: cluster.model llama-3.1-8b has"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(folder: Path, file: str, text: str | None, message: str) -> None:
    path = folder / "tp1" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(InputError) as error:
        built(folder)
    assert message in str(error.value)


def test_experts_without_a_table_are_an_error(folder: Path) -> None:
    with pytest.raises(InputError, match=r"moe\.csv: cannot read the table"):
        built(folder, model="qwen3-30b-a3b")


def test_the_folder_may_be_named_in_three_ways(folder: Path) -> None:
    costs = [built(path).step([], 2, 64) for path in (folder, folder / "tp1", folder.parent)]
    assert costs[0] == costs[1] == costs[2]


def test_a_missing_folder_names_what_was_found(folder: Path) -> None:
    with pytest.raises(InputError, match=r"expected one folder tp2 in it for cluster\.tp 2; found tp1"):
        built(folder, tp=2)
    with pytest.raises(InputError, match="no such folder"):
        built(folder / "elsewhere")


def test_a_path_belongs_to_tables_and_to_nothing_else() -> None:
    cluster = {"gpu": "rtx_4090", "model": "llama-3.1-8b"}
    config: dict[str, Any] = {"workload": {"source": "x"}, "cluster": cluster}
    for step_time in ({"backend": "tables"}, {"backend": "measured", "path": "x"}):
        with pytest.raises(InputError, match="step_time: path, a folder"):
            parse_config({**config, "step_time": step_time})


# --- real tables -----------------------------------------------------------------------------------------

PROFILES = [("RTX4090", "rtx_4090", 1), ("RTXPRO6000", "rtx_pro_6000_server", 1)]
PROFILES += [("RTXPRO6000", "rtx_pro_6000_server", 2)]


@pytest.mark.data
@pytest.mark.parametrize(("hardware", "name", "tp"), PROFILES)
def test_real_tables_answer_plausibly(data_dir: Path, hardware: str, name: str, tp: int) -> None:
    path = data_dir / "profiles" / hardware / "meta-llama" / "Llama-3.1-8B" / "bf16"
    model = built(path, gpu=name, tp=tp)
    one = model.step([], 1, 512)
    assert one.in_grid and 4e-3 < one.seconds < 25e-3
    longer = model.step([], 64, 64 * 4000, (100, 16000)).seconds
    assert longer > model.step([], 64, 64 * 1000, (100, 4000)).seconds > one.seconds
    chunk = model.step([(1024, 0)], 16, 16 * 500, (400, 600))
    assert chunk.in_grid and chunk.seconds > model.step([(512, 0)], 16, 16 * 500, (400, 600)).seconds
