"""How far the ratio of two policies' mean JCT moves when the step times are wrong.

    python scripts/ratio_error.py [--wrong 0.1] [--seeds 3]

The bundled RTX PRO 6000 cell, whose KV pool is short, at two rates under five pairs of policies, once with
the `measured` step times and once with all of them longer, then shorter, by --wrong. Of each pair's JCT over
that of lru + fcfs under the same seeds: how much it changes between the two. The figures of docs/fidelity.md,
and of RATIO_ERRORS.
"""

from __future__ import annotations

import argparse
import statistics

from agentservesim import simulate
from agentservesim.cli.configs import open_config
from agentservesim.config import RunConfig
from agentservesim.step_time.corrected import CorrectedStepTime
from agentservesim.step_time.decode_line import LinedStepTime
from agentservesim.step_time.residual import Regime, Residual
from agentservesim.validation.calibrate import base_step_time
from agentservesim.validation.paired_seeds import with_seeds

CELL, RATES_PER_S = "examples/rtx-pro-6000-70b-tp2", (0.01, 0.02)
PAIRS = (("lru", "fcfs"), ("lru", "plas"), ("tool-ttl", "continuum"), ("lru", "resident-first"),
         ("tool-ttl", "program-fcfs"))  # fmt: skip


def ratios(config: RunConfig, step_time: LinedStepTime) -> list[float]:
    """Mean JCT of each pair over that of the first."""
    found = []
    for retention, scheduling in PAIRS:
        policies = config.policies.model_copy(update={"retention": retention, "scheduling": scheduling})
        run = config.model_copy(update={"policies": policies})
        found.append(simulate(run, keep_tables=False, step_time=step_time).summary["jct_mean_s"])
    return [value / found[0] for value in found[1:]]


def scaled(inner: LinedStepTime, factor: float) -> LinedStepTime:
    """The same step times, `factor` as long."""
    regime = Regime({}, {"operators": factor - 1})
    residual = Residual("", "", 1, inner.backend, "", "", "", 0, 0, {}, regime, regime)
    return CorrectedStepTime(inner, residual)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--wrong", type=float, default=0.1)
    arguments.add_argument("--seeds", type=int, default=3)
    chosen = arguments.parse_args()
    wrong = chosen.wrong
    columns = (
        "programs/s",
        "policies",
        "JCT over lru + fcfs",
        f"moved by {wrong:+.0%}",
        f"moved by {-wrong:+.0%}",
    )
    print(f"| {' | '.join(columns)} |")
    print("| ---: | --- | ---: | ---: | ---: |")
    moves: list[float] = []
    for rate in RATES_PER_S:
        config = open_config(CELL, [f"workload.arrivals.rate_per_s={rate}"], {})
        inner = base_step_time(config)
        assert isinstance(inner, LinedStepTime)
        lists = []
        for seeded in with_seeds(config, chosen.seeds):
            times = (inner, scaled(inner, 1 + wrong), scaled(inner, 1 - wrong))
            lists.append([ratios(seeded, step_time) for step_time in times])
        for number, (retention, scheduling) in enumerate(PAIRS[1:]):
            true, *others = (statistics.mean(one[k][number] for one in lists) for k in range(3))
            changes = [value / true - 1 for value in others]
            moves += [abs(change) for change in changes]
            cells = (f"{true:.3f}", *(f"{change:+.1%}" for change in changes))
            print(f"| {rate} | {retention} + {scheduling} | {' | '.join(cells)} |", flush=True)
    print(f"\nmedian {statistics.median(moves):.1%}, largest {max(moves):.1%}")


if __name__ == "__main__":
    main()
