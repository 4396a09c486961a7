"""Watches a run and changes nothing: rows of the result tables, and the sums of the summary."""

from __future__ import annotations

from array import array
from pathlib import Path

from agentservesim.engine.request import Request
from agentservesim.programs.orchestrator import Call, ProgramRun
from agentservesim.results.tables import CALLS, DECISIONS, PROGRAMS, TableWriter

REFUSALS_NAMED = 20


def name_call(named: list[str], call: Call, words: str) -> None:
    """Say something of a call, if not yet of too many."""
    if len(named) < REFUSALS_NAMED:
        named.append(f"program {call.run.program.program_id}, turn {call.turn.turn_id}: {words}")


class Recorder:
    """Counts and samples of a run; tables go to `out_dir` as Parquet, or stay in memory without one, if
    they are to be kept at all.

    response_s     how much later than the engine the program sees a token
    live_calls     calls released and neither completed nor refused
    refusals, lost    the first REFUSALS_NAMED refused, and still live, calls in words
    """

    def __init__(
        self, out_dir: Path | None = None, keep_tables: bool = True, response_s: float = 0.0
    ) -> None:
        self.response_s = response_s
        self._calls = TableWriter(CALLS, out_dir and out_dir / "calls.parquet", keep_tables)
        self._programs = TableWriter(PROGRAMS, out_dir and out_dir / "programs.parquet", keep_tables)
        self._decisions = TableWriter(DECISIONS, out_dir and out_dir / "decisions.parquet", keep_tables)
        self.programs = self.programs_completed = self.programs_failed = 0
        self.calls_released = self.calls_completed = self.calls_refused = self.calls_not_released = 0
        self.prompt_tokens = self.output_tokens = self.hit_tokens = 0
        self.preemptions = 0
        self.events: dict[str, int] = {}
        self.refusals: list[str] = []
        self.lost: list[str] = []
        self.last_completion_s = 0.0
        self.jct_s = array("d")
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        self.latency_s = array("d")
        self.queue_s = array("d")

    @property
    def live_calls(self) -> int:
        return self.calls_released - self.calls_completed - self.calls_refused

    def program_arrived(self) -> None:
        self.programs += 1

    def call_released(self) -> None:
        self.calls_released += 1

    def call_completed(self, call: Call, request: Request) -> None:
        """A row of calls.parquet, and the call's share of every sum."""
        assert request.scheduled_s is not None and request.first_token_s is not None
        assert request.completed_s is not None and request.first_hit_tokens is not None
        first_token_s = request.first_token_s + self.response_s
        completed_s = request.completed_s + self.response_s
        self.calls_completed += 1
        self.prompt_tokens += request.num_prompt_tokens
        self.output_tokens += request.num_output_tokens
        self.hit_tokens += request.first_hit_tokens
        self.preemptions += request.num_preemptions
        self.last_completion_s = completed_s
        self.ttft_s.append(first_token_s - call.released_s)
        self.latency_s.append(completed_s - call.released_s)
        self.queue_s.append(request.scheduled_s - call.released_s)
        if request.num_output_tokens > 1:
            decode_s = completed_s - first_token_s
            self.tpot_s.append(decode_s / (request.num_output_tokens - 1))
        if not self._calls.wanted:
            return
        self._calls.append(
            (
                call.run.program.program_id,
                call.turn.turn_id,
                "completed",
                call.instance,
                call.released_s,
                request.scheduled_s,
                first_token_s,
                completed_s,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.first_hit_tokens,
                request.num_preemptions,
                None,
            )
        )

    def call_refused(self, call: Call, reason: str) -> None:
        """A call no instance can ever serve."""
        self.calls_refused += 1
        name_call(self.refusals, call, reason)
        self._unfinished(call, "refused", reason)

    def call_lost(self, call: Call, reason: str) -> None:
        """A call that the run ended without."""
        name_call(self.lost, call, reason)
        self._unfinished(call, "live", reason)

    def program_ended(self, run: ProgramRun) -> None:
        """A row of programs.parquet. JCT = last completion - program arrival."""
        pcb = run.pcb
        jct_s = None
        if run.failed:
            self.programs_failed += 1
            self.calls_not_released += len(run.program.turns) - run.calls_completed - run.calls_refused
        else:
            assert run.completed_s is not None
            self.programs_completed += 1
            jct_s = run.completed_s - pcb.arrival_s
            self.jct_s.append(jct_s)
        self._program_row(run, "failed" if run.failed else "completed", jct_s)

    def program_lost(self, run: ProgramRun) -> None:
        """A program that the run ended without."""
        released = run.pcb.calls_submitted
        self.calls_not_released += len(run.program.turns) - released
        self._program_row(run, "live", None)

    def decision(
        self,
        time_s: float,
        event: str,
        key: tuple[str, str],
        instance: int | None,
        blocks: int | None = None,
        deadline_s: float | None = None,
        value: float | None = None,
    ) -> None:
        """A row of decisions.parquet; `key` is (program id, turn id)."""
        self.events[event] = self.events.get(event, 0) + 1
        self._decisions.append((time_s, event, *key, instance, blocks, deadline_s, value))

    def close(self) -> dict[str, object]:
        """Finish the files; the tables kept in memory, by name."""
        writers = {"calls": self._calls, "programs": self._programs, "decisions": self._decisions}
        return {name: table for name, writer in writers.items() if (table := writer.close()) is not None}

    def _unfinished(self, call: Call, status: str, reason: str) -> None:
        request = call.request
        self._calls.append(
            (
                call.run.program.program_id,
                call.turn.turn_id,
                status,
                call.instance,
                call.released_s,
                request.scheduled_s if request else None,
                request.first_token_s if request else None,
                None,
                call.turn.prompt_tokens,
                request.num_output_tokens if request else 0,
                request.first_hit_tokens if request else None,
                request.num_preemptions if request else 0,
                reason,
            )
        )

    def _program_row(self, run: ProgramRun, status: str, jct_s: float | None) -> None:
        self._programs.append(
            (
                run.program.program_id,
                status,
                run.pcb.arrival_s,
                run.completed_s,
                jct_s,
                len(run.program.turns),
                run.calls_completed,
                run.calls_refused,
                run.pcb.attained_service_s,
            )
        )
