"""Simulate a config and compare it, call by call, with a real run of the same workload."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentservesim.config import ClientConfig, RunConfig
from agentservesim.errors import InputError
from agentservesim.run import simulate
from agentservesim.simulation import Simulation
from agentservesim.step_time import StepTimeModel
from agentservesim.validation.findings import findings
from agentservesim.validation.metrics import Side, errors, numbers, paired_rows, sides
from agentservesim.validation.pairing import CallNames, Pairing, pair
from agentservesim.validation.records import RealRun, read_real_run
from agentservesim.workload import load_programs


@dataclass(frozen=True)
class Validation:
    """A real run beside its simulation.

    numbers     {"real": …, "simulated": …, "errors": …}, as printed by --json
    findings    what is off, in words
    summary     summary.json of the simulated run
    """

    real: RealRun
    pairing: Pairing
    sides: tuple[Side, Side]
    numbers: dict[str, dict[str, float | None]]
    findings: list[str]
    summary: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every call on either side has a partner, and none was refused or lost."""
        return self.pairing.complete and not (self.summary["calls_refused"] or self.summary["calls_live"])

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of `validate --json`."""
        return {
            **self.numbers,
            "since": self.real.since,
            "paired": len(self.pairing.pairs),
            "unpaired_real": self.pairing.real_alone,
            "unpaired_simulated": self.pairing.simulated_alone,
            "findings": self.findings,
            "step_time": self.summary["step_time"],
        }

    def write(self, folder: Path) -> None:
        """Write validation.json, paired.parquet, paired.csv and report.html."""
        from agentservesim.validation.report import write_report

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {folder}: cannot make the folder: {error}") from None
        rows = paired_rows(self.pairing.pairs, *self.sides)
        pq.write_table(pa.Table.from_pylist(rows), folder / "paired.parquet")
        with (folder / "paired.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (folder / "validation.json").write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        write_report(folder / "report.html", self)


def validate(
    config: RunConfig, real_path: Path, on_progress: Callable[[Simulation], None] | None = None
) -> Validation:
    """Simulate the config's workload and pair it with the real run in `real_path`.

    Both sides count TTFT and latency from the same event: the engine's queue where the records have
    queued_ts, else the release. Calls are named as CallNames says. Raises InputError where the file is wrong
    or no call of it is in the workload.
    """
    real = read_real_run(real_path)
    names = CallNames(load_programs(config.workload).programs)
    rows, summary = simulated_calls(config, real.since == "queued", on_progress)
    pairing = pair(real, rows, names)
    if not pairing.pairs:
        shown = "; ".join(pairing.real_alone[:3])
        raise InputError(f"{real.path}: no call pairs with the workload {config.workload.source}: {shown}")
    left, right = sides(pairing.pairs)
    found = {"real": numbers(left), "simulated": numbers(right), "errors": errors(left, right)}
    return Validation(real, pairing, (left, right), found, findings(pairing.pairs, left, right), summary)


def simulated_calls(
    config: RunConfig,
    from_queue: bool,
    on_progress: Callable[[Simulation], None] | None = None,
    step_time: StepTimeModel | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of calls.parquet, each with start_s: its release, or its entry into the engine's queue."""
    watch = _QueueWatch(config.client, on_progress)
    result = simulate(config, None, watch if from_queue else on_progress, step_time=step_time)
    rows = result.tables["calls"].to_pylist()
    for row in rows:
        row["start_s"] = watch.queued_s(row) if from_queue else row["released_s"]
        if from_queue and row["completed_s"] is not None:  # the engine's own times, not the client's
            row["first_token_s"] -= config.client.response_s
            row["completed_s"] -= config.client.response_s
    return rows, result.summary


class _QueueWatch:
    """When calls enter an engine's queue: vLLM takes new requests in between steps, so one that is released
    during a step is queued at its end."""

    def __init__(self, client: ClientConfig, then: Callable[[Simulation], None] | None) -> None:
        self._client = client
        self._then = then
        self._released = 0
        self._step_ends: dict[float, list[float | None]] = {}

    def __call__(self, simulation: Simulation) -> None:
        if simulation.recorder.calls_released != self._released:
            self._released = simulation.recorder.calls_released
            self._step_ends[simulation.clock.now_s] = [i.step_end_s for i in simulation.instances]
        if self._then is not None:
            self._then(simulation)

    def queued_s(self, row: dict[str, Any]) -> float:
        """The time a call of calls.parquet entered its engine's queue."""
        arrived_s: float = row["released_s"] + self._client.delay_s(row["prompt_tokens"])
        if row["instance"] is None or row["scheduled_s"] is None:
            return arrived_s
        end_s = self._step_ends[arrived_s][row["instance"]]
        return arrived_s if end_s is None else min(end_s, float(row["scheduled_s"]))
