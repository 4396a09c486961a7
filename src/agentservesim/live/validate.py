"""A config on a real vLLM on this machine's CPU, beside its simulation."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

import agentservesim
from agentservesim.config import PoliciesConfig, RunConfig
from agentservesim.errors import InputError
from agentservesim.live.calibration import Calibration, calibrate
from agentservesim.live.decision_diff import DecisionDiff, diff_decisions, read_decisions
from agentservesim.live.replay import ReplayOptions, ReplayResult, replay
from agentservesim.live.server import VllmServer, check_cpu
from agentservesim.live.tiny_model import Sizes, is_made
from agentservesim.run import Result, simulate
from agentservesim.validation.metrics import relative
from agentservesim.validation.validate import Validation, validate

SIZES = Sizes()
OnPart = Callable[[str], None]


@dataclass(frozen=True)
class Lab:
    """Where real runs are made.

    python    a Python that has vLLM
    folder    takes the tiny model, logs and results
    on_part   told what is being done now
    """

    python: str
    folder: Path
    on_part: OnPart

    def model(self) -> Path:
        """The tiny model, made where it is missing."""
        model = self.folder / "model"
        if not is_made(model, SIZES):
            self.on_part("making a tiny model")
            _make_model(self.python, model, SIZES)
        return model

    def server(self, config: RunConfig, name: str, calibration: Calibration | None = None) -> VllmServer:
        """A server under the config's policies; its logs are <name>.steps.jsonl, <name>.decisions.jsonl and
        <name>.log in the folder. Without a calibration, policies are told no cost of a prefill."""
        policies = config.policies.model_dump()
        live: dict[str, Any] = {
            **{axis: policies[axis] for axis in ("retention", "scheduling", "admission")},
            "step_log": str(self.log(name, "steps")),
            "decision_log": str(self.log(name, "decisions")),
        }
        if calibration is not None:
            live["prefill_line"] = msgspec.structs.asdict(calibration.prefill_line(config))
        waiting = f"starting vLLM ({name})"
        return VllmServer(
            self.python,
            self.model(),
            config,
            live,
            self.folder / f"{name}.log",
            lambda waited_s: self.on_part(f"{waiting}, {waited_s:.0f} s"),
        )

    def log(self, name: str, kind: str) -> Path:
        """A log that the server of that name writes."""
        return self.folder / f"{name}.{kind}.jsonl"

    def calibrate(self, config: RunConfig) -> Calibration:
        """Measure this machine with the config's engine, under plain vLLM."""
        plain = config.model_copy(update={"policies": PoliciesConfig()})
        with self.server(plain, "calibration") as server:
            return self.calibrate_on(server, config, "calibration")

    def calibrate_on(self, server: VllmServer, config: RunConfig, name: str) -> Calibration:
        """Measure this machine with a server that runs, and whose logs are called `name`."""
        log = self.log(name, "steps")
        return calibrate(config, server.url, log, self.folder, SIZES.vocab_size, self.on_part)

    def real_run(self, config: RunConfig, server: VllmServer, out: Path, seed: int) -> ReplayResult:
        """Replay the workload; files into `out`. Raises KeyboardInterrupt after Ctrl-C."""
        options = ReplayOptions(vocab_size=SIZES.vocab_size, seed=seed)
        result = replay(config, server.url, options, out)
        if result.summary["interrupted"]:
            raise KeyboardInterrupt
        server.check_alive()
        return result


@dataclass(frozen=True)
class RealRun:
    """One real run of the config, compared with the simulation."""

    summary: dict[str, Any]
    paired: Validation
    decisions: DecisionDiff

    @property
    def complete(self) -> bool:
        """Whether every call was served, on both sides."""
        return self.paired.complete and not (self.summary["calls_refused"] or self.summary["calls_failed"])


@dataclass(frozen=True)
class LiveValidation:
    """Real runs of a config and its simulation.

    config    as it was simulated: with the calibration's step times and overheads
    """

    config: RunConfig
    calibration: Calibration
    runs: list[RealRun]
    simulated: Result

    @property
    def complete(self) -> bool:
        return all(run.complete for run in self.runs)

    def jct(self) -> dict[str, Any]:
        """Mean JCT: of each real run and of the simulation; its error against the mean of the real runs; and
        how far the real ones lie apart, as (most - least) / mean."""
        real = [run.summary["jct_mean_s"] for run in self.runs]
        mean = float(np.mean(real))
        simulated = self.simulated.summary["jct_mean_s"]
        return {
            "real_s": real,
            "real_mean_s": mean,
            "simulated_s": simulated,
            "error": relative(simulated, mean),
            "spread": (max(real) - min(real)) / mean,
        }

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of `live validate --json`."""
        return {
            "jct": self.jct(),
            "calibration": self.calibration.as_dict(),
            "runs": [
                {**run.paired.as_dict(), "decisions": run.decisions._asdict(), "live": run.summary}
                for run in self.runs
            ],
            "simulated": self.simulated.summary,
        }


def live_validate(
    config: RunConfig, lab: Lab, repeats: int, calibration: Calibration | None = None
) -> LiveValidation:
    """Calibrate, run the config on real vLLM `repeats` times, each on a fresh server, and simulate it.
    An earlier `calibration` of this machine with the same engine takes the place of a new one.

    Raises InputError for a config that vLLM on one CPU cannot run, ServerError where vLLM fails.
    """
    check_cpu(config)
    calibration = calibration or lab.calibrate(config)
    applied = calibration.applied(config)
    simulated = simulate(applied, lab.folder / "simulated")
    runs = []
    for number in range(1, repeats + 1):
        name = f"real-{number}"
        with lab.server(config, name, calibration) as server:
            lab.on_part(f"real run {number} of {repeats}")
            result = lab.real_run(config, server, lab.folder / name, seed=number)
        runs.append(compare(simulated, lab, name, result))
    found = LiveValidation(applied, calibration, runs, simulated)
    (lab.folder / "validation.json").write_text(
        json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8"
    )
    return found


def compare(simulated: Result, lab: Lab, name: str, result: ReplayResult) -> RealRun:
    """A real run, whose files and logs are called `name`, beside its simulation."""
    paired = validate(simulated.config, lab.folder / name)
    paired.write(lab.folder / f"{name}-paired")
    decisions = diff_decisions(
        read_decisions(lab.log(name, "decisions")),
        pq.read_table(lab.folder / "simulated" / "decisions.parquet").to_pylist(),
    )
    return RealRun(result.summary, paired, decisions)


def _make_model(python: str, folder: Path, sizes: Sizes) -> None:
    options = [
        text for name, value in vars(sizes).items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    source = str(Path(agentservesim.__file__).parents[1])
    done = subprocess.run(
        [python, "-m", "agentservesim.live.tiny_model", str(folder), *options],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it fails"]
        raise InputError(f"--vllm-python {python}: cannot make a tiny model: {said[0]}")
