"""The numbers of a real run and of its simulation, and the errors between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentservesim.validation.pairing import Pair

Array = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)


class Side(NamedTuple):
    """The calls of one side, a value each, in the order of the pairs. Seconds; nan where there is none.

    start_s      since the side's first start
    queue_s      start to the first step
    ttft_s       start to the first token
    tpot_s       (last token - first) / (output tokens - 1); nan for fewer than two tokens
    latency_s    start to the last token
    decode_s     first token to the last
    output_tokens
    itl_mean_s   mean time between tokens: as noted down, else decode_s over all tokens but the first
    jct_s        a program each, its first start to its last token
    """

    start_s: Array
    queue_s: Array
    ttft_s: Array
    tpot_s: Array
    latency_s: Array
    decode_s: Array
    output_tokens: Array
    itl_mean_s: float | None
    jct_s: Array


def sides(pairs: Sequence[Pair]) -> tuple[Side, Side]:
    """The real and the simulated side of the pairs."""
    programs = [pair.key[0] for pair in pairs]
    real = _side(
        programs,
        [pair.real.start_s for pair in pairs],
        [pair.real.scheduled_s for pair in pairs],
        [pair.real.first_token_s for pair in pairs],
        [pair.real.completed_s for pair in pairs],
        [pair.real.output_tokens for pair in pairs],
        [gap for pair in pairs for gap in pair.real.itls_s],
    )
    simulated = _side(
        programs,
        [pair.simulated["start_s"] for pair in pairs],
        [pair.simulated["scheduled_s"] for pair in pairs],
        [pair.simulated["first_token_s"] for pair in pairs],
        [pair.simulated["completed_s"] for pair in pairs],
        [pair.simulated["output_tokens"] for pair in pairs],
        [],
    )
    return real, simulated


def _side(
    programs: list[str],
    start: list[float],
    scheduled: list[float | None],
    first: list[float],
    end: list[float],
    tokens: list[int],
    gaps: list[float],
) -> Side:
    # Subtracting the side's first start keeps the digits of clocks that count from 1970.
    zero = min(start)
    start_s, first_s, end_s = (np.array(times) - zero for times in (start, first, end))
    scheduled_s = np.array([np.nan if time is None else time for time in scheduled]) - zero
    output = np.array(tokens, dtype=np.float64)
    decode_s = end_s - first_s
    steps = np.where(output > 1, output - 1, np.nan)
    spans: dict[str, tuple[float, float]] = {}
    for program, began, ended in zip(programs, start_s.tolist(), end_s.tolist(), strict=True):
        before = spans.get(program, (began, ended))
        spans[program] = (min(before[0], began), max(before[1], ended))
    many = float(np.nansum(steps))
    itl_s = float(np.mean(gaps)) if gaps else float(decode_s[output > 1].sum()) / many if many else None
    return Side(
        start_s,
        scheduled_s - start_s,
        first_s - start_s,
        decode_s / steps,
        end_s - start_s,
        decode_s,
        output,
        itl_s,
        np.array([end - begin for begin, end in spans.values()]),
    )


def numbers(side: Side) -> dict[str, float | None]:
    """Means, quantiles (linear between samples) and rates of one side.

    The rates are over the makespan, the first start to the last token.
    """
    makespan_s = float((side.start_s + side.latency_s).max())
    output = float(side.output_tokens.sum())
    return {
        **_statistics("ttft", side.ttft_s),
        **_statistics("tpot", side.tpot_s),
        "itl_mean_s": side.itl_mean_s,
        **_statistics("latency", side.latency_s),
        **_statistics("queue", side.queue_s),
        **_statistics("jct", side.jct_s),
        "makespan_s": makespan_s,
        "output_tokens_per_s": output / makespan_s if makespan_s else None,
        "calls_per_s": len(side.start_s) / makespan_s if makespan_s else None,
    }


def errors(real: Side, simulated: Side) -> dict[str, float | None]:
    """Relative errors, simulated / real - 1, by the names of `numbers` without the unit; and `*_mape`, the
    mean over calls (jct: over programs) of the absolute relative error. None where the real value is 0."""
    left, right = numbers(real), numbers(simulated)
    found = {name.removesuffix("_s"): relative(right[name], left[name]) for name in left}
    found["output_tokens_per_s"] = found.pop("output_tokens_per")
    found["calls_per_s"] = found.pop("calls_per")
    for name in ("ttft", "tpot", "latency", "jct"):
        found[f"{name}_mape"] = _mape(getattr(real, f"{name}_s"), getattr(simulated, f"{name}_s"))
    return found


def relative(value: float | None, reference: float | None) -> float | None:
    """value / reference - 1; None where either is missing or the reference is 0."""
    return value / reference - 1 if value is not None and reference else None


def _statistics(name: str, values: Array) -> dict[str, float | None]:
    known = values[~np.isnan(values)]
    keys = [f"{name}_mean_s", *(f"{name}_p{p}_s" for p in PERCENTILES)]
    if not len(known):
        return dict.fromkeys(keys)
    figures = [float(known.mean()), *np.percentile(known, PERCENTILES).tolist()]
    return dict(zip(keys, figures, strict=True))


def _mape(real: Array, simulated: Array) -> float | None:
    usable = (real > 0) & ~np.isnan(simulated)
    return float(np.mean(np.abs(simulated[usable] / real[usable] - 1))) if usable.any() else None


def paired_rows(pairs: Sequence[Pair], real: Side, simulated: Side) -> list[dict[str, Any]]:
    """The paired table: a row a call, both sides beside each other, and the relative errors."""
    rows = []
    for index, pair in enumerate(pairs):
        row: dict[str, Any] = {
            "program_id": pair.key[0],
            "turn_id": pair.key[1],
            "prompt_tokens_real": pair.real.prompt_tokens,
            "prompt_tokens_simulated": pair.simulated["prompt_tokens"],
            "output_tokens_real": pair.real.output_tokens,
            "output_tokens_simulated": pair.simulated["output_tokens"],
            "preemptions_simulated": pair.simulated["preemptions"],
        }
        for name in ("start", "queue", "ttft", "tpot", "latency"):
            values = [_number(getattr(side, f"{name}_s")[index]) for side in (real, simulated)]
            row[f"{name}_real_s"], row[f"{name}_simulated_s"] = values
            if name not in ("start", "queue"):
                row[f"{name}_error"] = relative(values[1], values[0])
        rows.append(row)
    return rows


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
