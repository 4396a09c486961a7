"""The errors in words: what is off, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from agentservesim.validation.metrics import Array, Side, relative
from agentservesim.validation.pairing import Pair

NOTABLE = 0.02
"""Errors below this are not explained."""


def findings(pairs: Sequence[Pair], real: Side, simulated: Side) -> list[str]:
    """Sentences, the most important first."""
    return [
        *_input_differs(pairs, real, simulated),
        *_decode(real, simulated),
        *_first_token(real, simulated),
        *_drift(real, simulated),
    ] or [f"mean TTFT, TPOT and latency are each within {NOTABLE:.0%} of the real run"]


def _input_differs(pairs: Sequence[Pair], real: Side, simulated: Side) -> Iterator[str]:
    """Errors below mean little where the two runs were not given the same work."""
    other = [
        pair
        for pair in pairs
        if (pair.real.prompt_tokens, pair.real.output_tokens)
        != (pair.simulated["prompt_tokens"], pair.simulated["output_tokens"])
    ]
    if other:
        first = other[0]
        yield (
            f"the work differs: {len(other)} of {len(pairs)} calls have other token counts, the first at "
            f"{first.real.place} ({first.real.prompt_tokens} + {first.real.output_tokens} tokens, simulated "
            f"{first.simulated['prompt_tokens']} + {first.simulated['output_tokens']}); the real run may "
            "have stopped early, or the workload is another one"
        )
    seen: set[str] = set()
    leading = [not (pair.key[0] in seen or seen.add(pair.key[0])) for pair in pairs]  # type: ignore[func-returns-value]
    lag = (simulated.start_s - real.start_s)[np.array(leading)]
    spread_s = float(np.max(np.abs(lag - np.median(lag))))
    if spread_s > max(0.1, NOTABLE * float(real.latency_s.mean())):
        yield (
            f"arrivals differ by up to {spread_s:.2g} s: use those of the real run (workload.arrivals: "
            "{process: recorded}), for the errors of two different loads say little"
        )


def _decode(real: Side, simulated: Side) -> Iterator[str]:
    error = _mean_error(real.tpot_s, simulated.tpot_s)
    if error is None or abs(error) < NOTABLE:
        return
    way = "too short" if error < 0 else "too long"
    yield f"TPOT is {error:+.1%}: steps with decodes are {way}" + _with_load(real, simulated)


def _with_load(real: Side, simulated: Side) -> str:
    """How the error of TPOT depends on how many calls ran at a time."""
    running = _running(real)
    # A real TPOT is 0 where a client read the last tokens together.
    ratio = simulated.tpot_s / np.where(real.tpot_s > 0, real.tpot_s, np.nan) - 1
    usable = ~np.isnan(ratio)
    if usable.sum() < 20:
        return ""
    order = np.argsort(running[usable], kind="stable")
    third = len(order) // 3
    few, many = (float(np.mean(ratio[usable][part])) for part in (order[:third], order[-third:]))
    low, high = (float(np.mean(running[usable][part])) for part in (order[:third], order[-third:]))
    if high < 1.5 * low or abs(many - few) < NOTABLE:
        return ", by as much at every load" if high >= 1.5 * low else ""
    return f" ({few:+.1%} with about {low:.0f} calls running, {many:+.1%} with about {high:.0f})"


def _running(side: Side) -> Array:
    """Calls that decode while a call does: the mean over its own decode time."""
    first = side.start_s + side.ttft_s
    end = side.start_s + side.latency_s
    times = np.concatenate([first, end])
    order = np.argsort(times, kind="stable")
    times = times[order]
    running = np.cumsum(np.concatenate([np.ones(len(first)), -np.ones(len(end))])[order])
    call_seconds = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    during = np.interp(end, times, call_seconds) - np.interp(first, times, call_seconds)
    return np.asarray(during / np.maximum(end - first, 1e-9))


def _first_token(real: Side, simulated: Side) -> Iterator[str]:
    error = _mean_error(real.ttft_s, simulated.ttft_s)
    if error is None or abs(error) < NOTABLE:
        return
    missing_s = float(simulated.ttft_s.mean() - real.ttft_s.mean())
    under = "under" if error < 0 else "over"
    sentence = f"TTFT is {under}-estimated by {abs(missing_s):.3g} s ({error:+.1%})"
    queue = real.queue_s
    if not np.isnan(queue).any():
        queued_s = float(simulated.queue_s.mean() - queue.mean())
        share = queued_s / missing_s
        if share > 0.5:
            sentence += f", {min(share, 1):.0%} of it waiting before the first step: queueing"
            if float(queue.mean()) > float(real.ttft_s.mean()) / 2:
                sentence += " under load, where a small error of the step times adds up"
        else:
            sentence += ", most of it after the first step: prefill, and the time around it"
    elif _waits(real):
        sentence += ": under load, queueing adds up a small error of the step times"
    yield sentence


def _waits(real: Side) -> bool:
    """Whether TTFT tells of queueing: its 90th percentile is far above the shortest."""
    return bool(np.percentile(real.ttft_s, 90) > 5 * max(float(real.ttft_s.min()), 1e-9))


def _drift(real: Side, simulated: Side) -> Iterator[str]:
    """Whether the latency's error grows over the run."""
    if len(real.start_s) < 30:
        return
    order = np.argsort(real.start_s, kind="stable")
    parts = np.array_split(order, 3)
    early, late = (_mean_error(real.latency_s[p], simulated.latency_s[p]) for p in (parts[0], parts[-1]))
    if early is not None and late is not None and abs(late - early) > 2 * NOTABLE:
        yield f"latency's error drifts: {early:+.1%} in the first third of the run, {late:+.1%} in the last"


def _mean_error(real: Array, simulated: Array) -> float | None:
    known = ~(np.isnan(real) | np.isnan(simulated))
    return relative(float(simulated[known].mean()), float(real[known].mean())) if known.any() else None
