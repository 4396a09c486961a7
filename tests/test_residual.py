"""Residuals: the file, the fit, and a back end with one on top."""

from __future__ import annotations

import math
import random
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim import parse_config
from agentservesim.errors import InputError
from agentservesim.step_time import StepTimeModel, build_step_time
from agentservesim.step_time.corrected import CorrectedStepTime
from agentservesim.step_time.decode_line import LinedStepTime
from agentservesim.step_time.residual import (
    MIN_SHARE,
    Error,
    Regime,
    Residual,
    load_residual,
    shipped,
    shipped_residual,
    split_term,
)
from agentservesim.step_time.residual_fit import StepSample, fit_residual
from helpers import answers_by_leaps_and_steps, program, turn

SCRIPT = Path(__file__).parents[1] / "scripts" / "fit_residuals.py"
ABOUT: dict[str, Any] = {
    "gpu": "rtx_4090", "model": "llama-3.1-8b", "tp": 1, "backend": "roofline", "engine": "vLLM 0.19",
    "source": "a test", "date": "2026-01-31",
}  # fmt: skip


def residual(**more: Any) -> Residual:
    return Residual(**{**ABOUT, "shapes": 3, "steps": 30, "error": {"held_out": Error(0.01, 0.02)}, **more})


def roofline() -> LinedStepTime:
    built = build_step_time(
        parse_config(
            {
                "workload": {"source": "x"},
                "cluster": {"gpu": "rtx_4090", "model": "llama-3.1-8b"},
                "step_time": {"backend": "roofline"},
            }
        )
    )
    assert isinstance(built, LinedStepTime)
    return built


# --- the file --------------------------------------------------------------------------------------------


def test_a_residual_survives_its_file(tmp_path: Path) -> None:
    whole = residual(
        decode_only=Regime({"decodes": (1.0, 8.0)}, {"step": -12.5}),
        with_prefill=Regime({"prefill_tokens": (0.0, 64.0)}, {"prefill_tokens_over_8": 1.5}),
        notes="none",
    )
    for written in (whole, replace(whole, decode_only=None, notes="")):
        file = tmp_path / "residual.yaml"
        file.write_text(written.to_yaml())
        assert load_residual(file) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a mapping with gpu"),
        ("gpu: [", "not valid YAML"),
        ("gpu: b200_sxm", "field 'model' is None: expected str"),
        ("gpus: 1\ngpu: a\nmodel: b\ntp: 1\nbackend: c", "unknown field 'gpus' (did you mean 'gpu'?)"),
        ("gpu: a\nmodel: b\ntp: 1\nbackend: c\nsteps: many", "field 'steps' is 'many': expected a number"),
        ("gpu: a\nmodel: b\ntp: 1\nbackend: c\ndecode_only: 3", "field 'decode_only' is 3: expected"),
        (
            "gpu: a\nmodel: b\ntp: 1\nbackend: c\ndecode_only: {coefficients: {decode: 1}}",
            "unknown feature 'decode' (did you mean 'decodes'?)",
        ),
        (
            "gpu: a\nmodel: b\ntp: 1\nbackend: c\ndecode_only: {ranges: {decodes: 3}}",
            "field 'decode_only.ranges.decodes' is 3: expected [lowest, highest]",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "residual.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_residual(file)
    assert message in str(error.value) and str(file) in str(error.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the residual"):
        load_residual(tmp_path / "none.yaml")


# --- what ships ------------------------------------------------------------------------------------------


def test_four_residuals_ship_and_each_is_accurate_on_shapes_it_has_not_seen() -> None:
    found = {(r.gpu, r.model, r.tp, r.backend) for r in shipped()}
    assert found == {
        ("b200_sxm", "llama-3.1-8b", 1, "measured"),
        ("b200_sxm", "llama-3.1-70b", 1, "measured"),
        ("rtx_pro_6000_server", "llama-3.1-8b", 1, "measured"),
        ("rtx_pro_6000_server", "llama-3.1-70b", 2, "measured"),
    }
    for each in shipped():
        assert each.error["held_out"].median <= 0.05
        assert each.error["held_out"].median <= each.error["uncorrected"].median
        assert each.source and each.date and each.engine and each.steps > each.shapes > 10


def test_the_shipped_one_is_found_by_all_four_keys() -> None:
    assert shipped_residual("b200_sxm", "llama-3.1-8b", 1, "measured") is not None
    assert shipped_residual("b200_sxm", "llama-3.1-8b", 2, "measured") is None
    assert shipped_residual("b200_sxm", "llama-3.1-8b", 1, "tables") is None


@pytest.mark.data
@pytest.mark.slow
def test_the_script_gives_what_ships(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSERVESIM_DATA", str(data_dir))
    date = shipped()[0].date
    monkeypatch.setattr(sys, "argv", ["fit_residuals.py", "--date", date, "--out", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    fitted = [load_residual(file) for file in sorted(tmp_path.glob("*.yaml"))]
    assert [(r.gpu, r.model, r.shapes) for r in fitted] == [(r.gpu, r.model, r.shapes) for r in shipped()]
    for ours, theirs in zip(fitted, shipped(), strict=True):
        assert ours.error["held_out"].median == pytest.approx(theirs.error["held_out"].median, abs=2e-3)


def test_a_config_chooses_its_residual(tmp_path: Path) -> None:
    def source(**step_time: Any) -> StepTimeModel:
        return build_step_time(
            parse_config(
                {
                    "workload": {"source": "x"},
                    "cluster": {"gpu": "b200_sxm", "model": "llama-3.1-8b"},
                    "step_time": step_time,
                }
            )
        )

    auto, none = source(), source(residual="none")
    assert "residual of" in auto.source and "held-out error" in auto.source
    assert "residual" not in none.source
    assert auto.step([(64, 0)], 4, 2800).seconds > none.step([(64, 0)], 4, 2800).seconds + 2e-3
    file = tmp_path / "mine.yaml"
    file.write_text(residual(backend="measured", decode_only=Regime({}, {"step": 1000.0})).to_yaml())
    mine = source(residual=str(file))
    assert mine.step([], 4, 2800).seconds == pytest.approx(none.step([], 4, 2800).seconds + 1e-3)
    file.write_text(residual().to_yaml())
    with pytest.raises(InputError, match="field 'backend' is 'roofline': it corrects that back end"):
        source(residual=str(file))


# --- on top of a back end --------------------------------------------------------------------------------


def test_features_are_cut_to_their_range() -> None:
    coefficients = {"prefill_tokens": 2.0, "prefill_tokens_over_300": 1.0}
    regime = Regime({"prefill_tokens": (100.0, 500.0)}, coefficients)
    features = {"decodes": 1.0, "prefill_tokens": 400.0}
    assert regime.seconds(features) == pytest.approx((2 * 400 + 100) * 1e-6)
    assert regime.seconds({**features, "prefill_tokens": 9e9}) == pytest.approx((2 * 500 + 200) * 1e-6)
    assert regime.seconds({**features, "prefill_tokens": 1.0}) == pytest.approx(2 * 100 * 1e-6)
    assert regime.covers(features) and not regime.covers({**features, "prefill_tokens": 501.0})
    assert split_term("operators_over_5000") == ("operators", 5000.0)


def test_a_corrected_step_is_never_below_a_share_of_its_operators() -> None:
    inner = roofline()
    model = CorrectedStepTime(
        inner,
        residual(decode_only=Regime({}, {"operators": -2.0}), with_prefill=Regime({}, {"step": -1e9})),
    )
    for batch in ([], [(300, 0)]):
        plain = inner.step(batch, 4, 4000).seconds
        assert model.step(batch, 4, 4000).seconds == pytest.approx(MIN_SHARE * plain)


def test_a_kind_of_step_that_was_not_fitted_is_left_alone_and_outside_the_grid() -> None:
    inner = roofline()
    model = CorrectedStepTime(inner, residual())
    for batch in ([], [(300, 0)]):
        assert model.step(batch, 4, 4000).seconds == inner.step(batch, 4, 4000).seconds
        assert not model.step(batch, 4, 4000).in_grid


TERMS = ("step", "decodes", "context_tokens", "context_tokens_over_3000", "operators", "operators_over_30000")


@settings(max_examples=300, deadline=None)
@given(
    coefficients=st.dictionaries(st.sampled_from(TERMS), st.floats(-3, 3), max_size=5),
    low=st.integers(0, 5000),
    width=st.integers(0, 20000),
    contexts=st.lists(st.integers(2, 8000), min_size=1, max_size=8),
    steps=st.integers(1, 300),
)
def test_a_corrected_decode_step_stays_on_its_line(
    coefficients: dict[str, float], low: int, width: int, contexts: list[int], steps: int
) -> None:
    ranges = {"context_tokens": (float(low), float(low + width)), "operators": (18_000.0, 40_000.0)}
    fitted = residual(decode_only=Regime(ranges, coefficients))
    inner = roofline()
    model, fresh = CorrectedStepTime(inner, fitted), CorrectedStepTime(roofline(), fitted)
    decodes, tokens = len(contexts), sum(contexts)
    line = model.decode_line(decodes, tokens)
    assert line.from_tokens <= tokens < line.until_tokens
    for step in (0, 1, steps):
        now = tokens + decodes * step
        cost = fresh.step([], decodes, now)
        operators_s = inner.step([], decodes, now).seconds
        features = {"decodes": decodes, "context_tokens": now, "operators": operators_s * 1e6}
        direct = max(operators_s + Regime(ranges, coefficients).seconds(features), MIN_SHARE * operators_s)
        assert cost.seconds == pytest.approx(direct, rel=1e-9, abs=2e-8)
        if line.from_tokens <= now < line.until_tokens:
            assert cost.seconds == line.base_s + line.slope_s * now


def test_a_run_with_a_residual_leaps_and_steps_to_the_same_times(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    regime = Regime(
        {"context_tokens": (100.0, 900.0), "operators": (0.0, 21_000.0)},
        {"step": 150.0, "decodes": 12.0, "context_tokens": 0.7, "operators": 0.05},
    )
    file.write_text(residual(decode_only=regime, with_prefill=regime).to_yaml())
    programs = [program(f"p{i}", [turn(80 * (i % 5) + 3, 60 + i)], arrival_s=0.03 * i) for i in range(10)]
    answers = answers_by_leaps_and_steps(tmp_path, programs, {"backend": "roofline", "residual": str(file)})
    assert answers[0] == answers[1]


# --- the fit ---------------------------------------------------------------------------------------------


def made_up_steps(noise: float = 0.0, seed: int = 1) -> list[StepSample]:
    """Real seconds = operators + 300 us + 2 us a decode, or with a prefill + 4 ms + 1.5 us a token."""
    draw = random.Random(seed)
    samples = []
    for chunk in (0, 64, 256, 1024, 4096):
        for decodes in (1, 4, 16, 64):
            operators_s = 5e-3 + 2e-5 * (chunk + decodes)
            missed = 4e-3 + 1.5e-6 * chunk if chunk else 3e-4 + 2e-6 * decodes
            wall_s = (operators_s + missed) * (1 + noise * draw.gauss(0, 1))
            batch = (chunk, int(chunk > 0), decodes, decodes * 500)
            samples.append(StepSample(*batch, operators_s, wall_s, 100))
    return samples


def test_a_fit_finds_what_was_put_in() -> None:
    fitted = fit_residual(made_up_steps(), **ABOUT)
    assert fitted.error["held_out"].p90 < 1e-4
    assert fitted.error["uncorrected"].median > 0.03
    assert fitted.shapes == 20 and fitted.steps == 2000
    assert fitted.decode_only is not None and fitted.with_prefill is not None
    unseen = StepSample(0, 0, 32, 1, 5.64e-3, 1.0)
    assert fitted.decode_only.seconds(unseen.features) == pytest.approx(3.64e-4, rel=1e-3)
    assert fitted.with_prefill.coefficients["step"] == pytest.approx(4000, rel=1e-3)
    assert fitted.with_prefill.ranges["prefill_tokens"] == (64, 4096)


def test_a_fit_is_not_led_astray_by_a_few_wild_steps() -> None:
    samples = made_up_steps(noise=0.002)
    wild = [s._replace(wall_s=3 * s.wall_s) if i % 9 == 0 else s for i, s in enumerate(samples)]
    fitted = fit_residual(wild, **ABOUT)
    clean = [s for i, s in enumerate(samples) if i % 9]
    for s in clean:
        regime = fitted.with_prefill if s.prefill_tokens else fitted.decode_only
        assert regime is not None
        assert s.operators_s + regime.seconds(s.features) == pytest.approx(s.wall_s, rel=0.03)


def test_without_small_chunks_the_residual_goes_to_zero_with_the_tokens() -> None:
    large = [s for s in made_up_steps() if s.prefill_tokens in (0, 1024, 4096)]
    regime = fit_residual(large, **ABOUT).with_prefill
    assert regime is not None
    assert "step" not in regime.coefficients
    assert regime.ranges["prefill_tokens"] == (0, 4096)
    tiny = StepSample(1, 1, 4, 2000, 6e-3, 1.0)
    assert abs(regime.seconds(tiny.features)) < 1e-4


def test_a_fit_needs_steps_that_take_time() -> None:
    with pytest.raises(ValueError, match="no steps"):
        fit_residual([], **ABOUT)
    with pytest.raises(ValueError, match="must be positive"):
        fit_residual([StepSample(0, 0, 1, 1, 1e-3, 0.0)], **ABOUT)
    one = fit_residual([StepSample(0, 0, 1, 1, 1e-3, 2e-3)], **ABOUT)
    assert one.decode_only is not None and not one.decode_only.coefficients
    assert math.isclose(one.error["held_out"].median, 0.5)
