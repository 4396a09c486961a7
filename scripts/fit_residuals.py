"""Fit the residuals that the package ships, from the step walls in AGENTSERVESIM_DATA.

    AGENTSERVESIM_DATA=/path/to/data python scripts/fit_residuals.py [--date 2026-01-31] [--out FOLDER]

Each row of measured/step_walls/*_step_overhead.csv is the median of many real steps of one shape. The files
do not say what the steps attended to; these two rules make the numbers agree:

- Prefixes. A prompt of P tokens computed in chunks of c has (P - c) / 2 cached before a chunk, on average.
  With P = 16,384 a 70B chunk of 1,024 on a B200 takes what the same device took for a whole prompt of 1,024
  tokens (infercept_profile_b200_70B_tp1.json, 124.4 ms) plus the attention over that prefix: 142 ms. The
  short chunks of the B200 8B file (64 to 1,900 tokens, up to 120 decodes) are a second run, with prompts of
  1,900.
- Decode contexts. Of each decode-only row, the context at which the back end's operators take kernel_us, the
  profiled kernels' sum. Chunks beside as many decodes take the same; in the short run all take SHORT_CONTEXT.

So a decode-only residual is wall minus kernels, and one with prefill is wall minus the back end's prediction.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from agentservesim import parse_config
from agentservesim.step_time import StepTimeModel, build_step_time
from agentservesim.step_time.residual import SHIPPED
from agentservesim.step_time.residual_fit import StepSample, fit_residual

LONG_PROMPT, SHORT_PROMPT, SHORT_CONTEXT = 16_384, 1900, 700
LONGEST_CONTEXT = 32_768


class Walls(NamedTuple):
    """One file of step walls, and the back end whose residual it gives."""

    file: str
    gpu: str
    model: str
    tp: int
    whole_prompts: str | None = None
    notes: str = ""


WALLS = (
    Walls("B200_meta-llama_Llama-3.1-8B_bf16_tp1", "b200_sxm", "llama-3.1-8b", 1),
    Walls("B200_meta-llama_Llama-3.1-70B_bf16_tp1", "b200_sxm", "llama-3.1-70b", 1),
    Walls("RTXPRO6000_meta-llama_Llama-3.1-8B_bf16_tp1", "rtx_pro_6000_server", "llama-3.1-8b", 1),
    Walls(
        "RTXPRO6000_meta-llama_Llama-3.1-70B_bf16_tp2",
        "rtx_pro_6000_server",
        "llama-3.1-70b",
        2,
        "infercept_profile_rtx6000_70B_tp2.json",
        "The table has two rows for 16,384 tokens with 4 and with 8 decodes, 24 % apart. Kept: the one "
        "nearer to the time of a whole prompt in infercept_profile_rtx6000_70B_tp2.json.",
    ),
)


class Row(NamedTuple):
    """A row of a step-wall file, in seconds."""

    chunk: int
    decodes: int
    wall_s: float
    kernels_s: float
    steps: int

    @property
    def short_run(self) -> bool:
        """Whether it belongs to the B200 8B file's second run."""
        return 0 < self.chunk <= SHORT_PROMPT or self.decodes > 16


def main() -> None:
    """Fit every residual and write it."""
    parser = argparse.ArgumentParser(description="Fit the shipped residuals.")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--out", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    folder = Path(os.environ["AGENTSERVESIM_DATA"], "measured", "step_walls")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for walls in WALLS:
        samples = list(to_samples(walls, folder))
        residual = fit_residual(
            samples,
            gpu=walls.gpu,
            model=walls.model,
            tp=walls.tp,
            backend="measured",
            engine="vLLM 0.19",
            source=f"step_walls/{walls.file}_step_overhead.csv, median step of each shape",
            date=arguments.date,
            notes=walls.notes,
        )
        file = arguments.out / f"{walls.gpu}_{walls.model}_tp{walls.tp}_measured.yaml"
        file.write_text(residual.to_yaml(), encoding="utf-8")
        errors = " ".join(f"{k} {100 * e.median:.1f}/{100 * e.p90:.1f} %" for k, e in residual.error.items())
        print(f"{file.name}: {residual.shapes} shapes, {errors}")


def to_samples(walls: Walls, folder: Path) -> Iterator[StepSample]:
    """The file's rows beside what the `measured` back end says of them."""
    back_end = build_step_time(
        parse_config(
            {
                "workload": {"source": "none"},
                "cluster": {"gpu": walls.gpu, "model": walls.model, "tp": walls.tp},
                "step_time": {"backend": "measured", "residual": "none"},
            }
        )
    )
    rows = list(_rows(folder / f"{walls.file}_step_overhead.csv"))
    two_runs = any(row.decodes > 16 for row in rows)
    contexts = {row.decodes: _context(back_end, row) for row in rows if not row.chunk}
    for row in _undisputed(rows, folder / walls.whole_prompts if walls.whole_prompts else None):
        short = two_runs and row.short_run
        context = SHORT_CONTEXT if short and row.chunk else contexts[row.decodes]
        prompt = SHORT_PROMPT if short else LONG_PROMPT
        prefills = [(row.chunk, max(prompt - row.chunk, 0) // 2)] if row.chunk else []
        tokens = round(row.decodes * context)
        operators_s = back_end.step(prefills, row.decodes, tokens).seconds
        yield StepSample(row.chunk, len(prefills), row.decodes, tokens, operators_s, row.wall_s, row.steps)


def _rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            yield Row(
                int(row["prefill_chunk"]),
                int(row["n_decode"]),
                float(row["wall_us"]) * 1e-6,
                float(row["kernel_us"]) * 1e-6,
                int(row["n_samples"]),
            )


def _context(back_end: StepTimeModel, row: Row) -> float:
    """The context at which the decode-only step's operators take as long as its kernels did."""
    low, high = 1.0, float(LONGEST_CONTEXT)
    for _ in range(40):
        middle = (low + high) / 2
        late = back_end.step([], row.decodes, round(row.decodes * middle)).seconds > row.kernels_s
        low, high = (low, middle) if late else (middle, high)
    return low


def _undisputed(rows: list[Row], whole_prompts: Path | None) -> list[Row]:
    """One row a shape: of several, the nearest to the time of a whole prompt with as many tokens."""
    if whole_prompts is None:
        return rows
    points = json.loads(whole_prompts.read_text(encoding="utf-8"))["raw"]
    whole_s = {point["num_tokens"]: point["t_fwd_ms_median"] * 1e-3 for point in points}
    chosen: dict[tuple[int, int], Row] = {}
    for row in rows:
        other = chosen.setdefault((row.chunk, row.decodes), row)
        if abs(row.wall_s - whole_s.get(row.chunk, 0)) < abs(other.wall_s - whole_s.get(row.chunk, 0)):
            chosen[row.chunk, row.decodes] = row
    return list(chosen.values())


if __name__ == "__main__":
    main()
