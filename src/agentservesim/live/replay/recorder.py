"""What a client can see of a run, in the simulator's tables and sums; what it cannot see is null."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

import pyarrow as pa

from agentservesim.live.replay.client import Attempts
from agentservesim.live.replay.stream import Answer
from agentservesim.programs.orchestrator import Call, ProgramRun
from agentservesim.results.recorder import Recorder, name_call
from agentservesim.results.tables import TableWriter

CHUNKS = pa.schema(
    [
        ("program_id", pa.string()),
        ("turn_id", pa.string()),
        ("time_s", pa.float64()),
        ("tokens", pa.int32()),
    ]
)


class LiveRecorder(Recorder):
    """A Recorder of calls that a real server answered.

    calls_failed      calls given up after retries or time ran out; refused ones are not among them
    retries           attempts that failed, by what happened
    dropped_tokens    output that came in attempts that failed
    deviations        calls that were served otherwise than asked for, by how; `named` has the first in words
    token_ids_known, cached_known, times_known    calls of which the server told these
    """

    def __init__(self, out_dir: Path | None, keep_tables: bool) -> None:
        super().__init__(out_dir, keep_tables)
        self._chunks = TableWriter(CHUNKS, out_dir and out_dir / "chunks.parquet", keep_tables)
        self.calls_failed = self.calls_retried = self.dropped_tokens = 0
        self.token_ids_known = self.cached_known = self.times_known = 0
        self.retries: Counter[str] = Counter()
        self.deviations: Counter[str] = Counter()
        self.named: list[str] = []
        self.failures: list[str] = []
        self.itl_s = array("d")

    @property
    def live_calls(self) -> int:
        return super().live_calls - self.calls_failed

    def attempted(self, call: Call, attempts: Attempts, now_s: float) -> None:
        """What a call that has ended, in whatever way, went through."""
        self.calls_retried += bool(attempts.retries)
        self.dropped_tokens += attempts.dropped_tokens
        for kind, _ in attempts.retries:
            self.retries[kind] += 1
            self.decision(now_s, "retry", call.key, attempts.instance)

    def call_served(self, call: Call, answer: Answer, attempts: Attempts) -> None:
        """A row of calls.parquet, and the call's share of every sum."""
        scheduled_s, first_s, last_s = served_times(call, answer)
        output_tokens = answer.output_tokens if answer.output_tokens is not None else answer.received_tokens()
        self.calls_completed += 1
        self.prompt_tokens += call.turn.prompt_tokens
        self.output_tokens += output_tokens
        self.token_ids_known += answer.token_ids is not None
        self.last_completion_s = max(self.last_completion_s, last_s)
        self.ttft_s.append(first_s - call.released_s)
        self.latency_s.append(last_s - call.released_s)
        if output_tokens > 1:
            self.tpot_s.append((last_s - first_s) / (output_tokens - 1))
        if scheduled_s is not None:
            self.times_known += 1
            self.queue_s.append(scheduled_s - call.released_s)
            call.run.pcb.attained_service_s += last_s - scheduled_s
        if answer.cached_tokens is not None:
            self.cached_known += 1
            self.hit_tokens += answer.cached_tokens
        self._chunk_rows(call, answer)
        self._calls.append(
            (
                *call.key,
                "completed",
                attempts.instance,
                call.released_s,
                scheduled_s,
                first_s,
                last_s,
                call.turn.prompt_tokens,
                output_tokens,
                answer.cached_tokens,
                None,
                _retried(attempts),
            )
        )

    def call_failed(self, call: Call, reason: str) -> None:
        """A call the server might have served and did not."""
        self.calls_failed += 1
        name_call(self.failures, call, reason)
        self._unfinished(call, "failed", reason)

    def deviation(self, call: Call, kind: str, words: str) -> None:
        """A call was served otherwise than asked for."""
        self.deviations[kind] += 1
        name_call(self.named, call, words)

    def close(self) -> dict[str, object]:
        tables = super().close()
        chunks = self._chunks.close()
        return tables if chunks is None else {**tables, "chunks": chunks}

    def _chunk_rows(self, call: Call, answer: Answer) -> None:
        before_s: float | None = None
        for time_s, tokens in answer.chunks:
            self._chunks.append((*call.key, time_s, tokens))
            if before_s is not None:
                self.itl_s.append(time_s - before_s)
            before_s = time_s

    def _unfinished(self, call: Call, status: str, reason: str) -> None:
        times = (call.released_s, None, None, None)
        tokens = (call.turn.prompt_tokens, 0, None, None)
        self._calls.append((*call.key, status, call.instance, *times, *tokens, reason))

    def _program_row(self, run: ProgramRun, status: str, jct_s: float | None) -> None:
        served_s = run.pcb.attained_service_s if self.times_known == self.calls_completed else None
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
                served_s,
            )
        )


def served_times(call: Call, answer: Answer) -> tuple[float | None, float, float]:
    """(first scheduled, first token, last token) of an answer, in seconds since the run's start.

    The first is told only by servers that report times of their own; it is counted back from the first token.
    """
    first_s, last_s = answer.chunks[0][0], answer.chunks[-1][0]
    if answer.server_ttft_s is None:
        return None, first_s, last_s
    return max(call.released_s, first_s - answer.server_ttft_s), first_s, last_s


def _retried(attempts: Attempts) -> str | None:
    """What a call that was served at last went through."""
    if not attempts.retries:
        return None
    counts = Counter(kind for kind, _ in attempts.retries)
    kinds = ", ".join(f"{kind} × {count}" for kind, count in counts.items())
    return f"retried: {kinds}"
