"""How fast this machine's engine is: a load of its own, apart from every run that is judged by it."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentservesim.config import ArrivalsConfig, ClientConfig, RunConfig, WorkloadConfig
from agentservesim.live.overhead import client_overhead, solo_calls
from agentservesim.live.replay import ReplayOptions, replay
from agentservesim.live.replay.drive import Drive
from agentservesim.policies.interface import PrefillLine
from agentservesim.step_time import build_step_time
from agentservesim.validation.linear_fit import LinearFit, fit_linear
from agentservesim.validation.step_log import Step, read_steps
from agentservesim.workload import load_programs

WARM_UP_S = 4.0
ALONE_S = 8.0
LEVEL_S = 1.5
ROUNDS = 3
"""Seconds of each part: before anything counts, one call at a time, and each level of concurrency in each
round. A machine that others use is a fifth faster in one minute than in another; in rounds, that is spread
over all shapes."""
SHORTEST_PROMPT = 16
TURNS = 6
ADDED_TOKENS = (4, 256)
OUTPUT_TOKENS = (2, 64)
PROGRAMS = 2000
"""More than any level gets through."""
PAUSE_S = 0.02


@dataclass(frozen=True)
class Calibration:
    """What a simulation of this machine's engine needs.

    steps     the fit of the step times
    client    what lies between the client and the engine
    calls     calls that the latter was measured on
    """

    steps: LinearFit
    client: ClientConfig
    calls: int

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with this machine's step times and overheads."""
        return config.model_copy(update={"step_time": self.steps.step_time, "client": self.client})

    def prefill_line(self, config: RunConfig) -> PrefillLine:
        """A prefill's cost, for policies that weigh a recomputation: the simulation's own."""
        return build_step_time(self.applied(config)).prefill_line()

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        errors = {name: error.__dict__ for name, error in self.steps.errors().items()}
        return {
            "steps": len(self.steps.real),
            "shapes": self.steps.shapes,
            "step_time": self.steps.coefficients,
            "step_error": errors,
            "client": self.client.model_dump(),
            "solo_calls": self.calls,
            "warnings": self.steps.warnings,
        }


def calibrate(
    config: RunConfig,
    url: str,
    step_log: Path,
    folder: Path,
    vocab_size: int,
    on_part: Callable[[str], None],
) -> Calibration:
    """Load the server at `url`, whose plug-in writes `step_log`, and fit what it logs.

    The load's prompts reach from short ones to the longest of the config's workload; it shares neither
    programs nor seeds nor arrivals with it. One call at a time first, with pauses, then, in rounds, levels of
    concurrency up to max_num_seqs and down.
    """
    source = _write_load(folder / "calibration.jsonl", _longest_prompt(config), seed=1)
    run = _Load(config, url, source, vocab_size)
    on_part("calibrating: warm-up")
    run.part(lanes=4, seconds=WARM_UP_S, seed=101)
    warm_s = time.monotonic()
    on_part("calibrating: one call at a time")
    origin_s, calls = run.part(lanes=1, seconds=ALONE_S, seed=102)
    alone_s = time.monotonic()
    for number, lanes in enumerate(levels(config.engine.max_num_seqs) * ROUNDS):
        on_part(f"calibrating: {lanes} at a time")
        run.part(lanes=lanes, seconds=LEVEL_S, seed=103 + number)
    time.sleep(1.5)  # the recorder's rows of the last second
    rows = read_rows(step_log)
    alone = [row for row in rows if warm_s <= row["monotonic_s"] <= alone_s]
    solo = solo_calls(alone, calls, origin_s)
    steps = steps_when(step_log, lambda time_s: time_s >= warm_s)
    return Calibration(fit_linear(steps), client_overhead(solo), len(solo))


def read_rows(step_log: Path) -> list[dict[str, Any]]:
    """The rows of a step log, with what only the recorder writes."""
    return [json.loads(line) for line in step_log.read_text(encoding="utf-8").splitlines() if line]


def steps_when(step_log: Path, wanted: Callable[[float], bool]) -> list[Step]:
    """The steps that ended when it was `wanted`, by this machine's monotonic clock."""
    times = [row["monotonic_s"] for row in read_rows(step_log)]
    return [step for step, time_s in zip(read_steps(step_log), times, strict=True) if wanted(time_s)]


def levels(most: int) -> list[int]:
    """Calls at a time: doubling up to `most`, and down again."""
    up = [lanes for lanes in (2**power for power in range(1, 12)) if lanes < most] + [most]
    return [*up, *reversed(up[:-1])]


class _Load:
    """Parts of a calibration: the same programs, other tokens and other concurrency."""

    def __init__(self, config: RunConfig, url: str, source: Path, vocab_size: int) -> None:
        self._config = config
        self._url = url
        self._source = source
        self._vocab_size = vocab_size

    def part(self, lanes: int, seconds: float, seed: int) -> tuple[float, list[dict[str, Any]]]:
        """Keep `lanes` programs running for so long. Returns the client's zero on the monotonic clock, and
        its calls. Raises KeyboardInterrupt after Ctrl-C."""
        arrivals = ArrivalsConfig(process="closed_loop", lanes=lanes)
        workload = WorkloadConfig(source=str(self._source), arrivals=arrivals)
        config = self._config.model_copy(update={"workload": workload})
        over = False
        origin_s = 0.0

        def on_progress(drive: Drive) -> None:
            nonlocal over, origin_s
            origin_s = time.monotonic() - drive.now_s()
            if drive.now_s() >= seconds:
                over = True
                drive.interrupt()

        options = ReplayOptions(vocab_size=self._vocab_size, seed=seed)
        result = replay(config, self._url, options, on_progress=on_progress)
        if result.summary["interrupted"] and not over:
            raise KeyboardInterrupt
        return origin_s, result.tables["calls"].to_pylist()


def _longest_prompt(config: RunConfig) -> int:
    """The longest of the workload that the engine can take, with room for what the load adds to it."""
    assert config.engine.max_model_len is not None and config.cluster.kv_cache_tokens is not None  # check_cpu
    limit = min(config.engine.max_model_len, config.cluster.kv_cache_tokens)
    longest: int = max(
        turn.prompt_tokens for p in load_programs(config.workload).programs for turn in p.turns
    )
    room = TURNS * (OUTPUT_TOKENS[1] + ADDED_TOKENS[1])
    return max(SHORTEST_PROMPT, min(longest, limit - room))


def _write_load(path: Path, longest: int, seed: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for program in _programs(longest, random.Random(seed)):
            file.write(json.dumps(program) + "\n")
    return path


def _programs(longest: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Programs of a prompt that nothing is known of, and turns that add to its context. Half of the prompts
    are longer than a quarter of the longest: most of an agent's steps attend to as much."""

    def drawn(low: int, high: int) -> int:
        return round(low * math.pow(high / low, rng.random()))

    for number in range(PROGRAMS):
        turns, context = [], 0
        for turn in range(TURNS):
            first = SHORTEST_PROMPT + round((longest - SHORTEST_PROMPT) * rng.random() ** 2)
            prompt = context + drawn(*ADDED_TOKENS) if turn else first
            output = drawn(*OUTPUT_TOKENS)
            turns.append({"prompt_tokens": prompt, "output_tokens": output, "gap_s": PAUSE_S})
            context = prompt + output
        yield {"program_id": f"calibration-{number}", "turns": turns}
