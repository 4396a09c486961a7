"""Records vLLM's schedulers on random loads, for tests/parity/test_recordings.py.

usage: python scripts/record_vllm.py [--first-seed N] [--steps N]
Run it in the environment that scripts/install_vllm.sh makes. The files it writes are committed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from parity import real, recording  # noqa: E402
from parity.loads import make_load  # noqa: E402

FOLDER = ROOT / "tests" / "parity" / "recordings"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first-seed", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20_000, help="steps to record for each file")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    header = recording.Header(vllm=real.VERSION, format=recording.FORMAT, first_seed=arguments.first_seed)
    for async_scheduling in (False, True):
        for policy, trials in record(arguments.first_seed, arguments.steps, async_scheduling).items():
            path = FOLDER / f"{'async-' if async_scheduling else ''}{policy}.jsonl.gz"
            recording.write(path, header, trials)
            print(
                f"{path.name}: {len(trials)} trials, {sum(len(trial.steps) for trial in trials)} steps,"
                f" {sum(trial.preemptions() for trial in trials)} preemptions,"
                f" {sum(trial.hit_tokens() for trial in trials)} hit tokens, {path.stat().st_size} bytes"
            )


def record(first_seed: int, at_least: int, async_scheduling: bool) -> dict[str, list[recording.Trial]]:
    """Trials of at least so many steps under each policy."""
    kept: dict[str, list[recording.Trial]] = {"fcfs": [], "priority": []}
    steps = dict.fromkeys(kept, 0)
    seed = first_seed
    while min(steps.values()) < at_least:
        load = make_load(seed, calls=40, async_scheduling=async_scheduling)
        policy = load.engine.policy
        if steps[policy] < at_least:
            trial = real.run(load, seed)
            # Mostly loads under pressure; every eighth seed as it comes; none that is long.
            if len(trial.steps) <= 1_000 and (seed % 8 == 0 or trial.preemptions() * 50 >= len(trial.steps)):
                kept[policy].append(trial)
                steps[policy] += len(trial.steps)
        seed += 1
    return kept


if __name__ == "__main__":
    main()
