"""Runs programs in real time: waits for arrivals and gaps, and releases calls through the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain, islice

from agentservesim.live.identity import identity_of_call
from agentservesim.live.replay.client import Attempts, CallFailed, CallRejected, CompletionClient
from agentservesim.live.replay.recorder import LiveRecorder, served_times
from agentservesim.live.replay.stream import Answer
from agentservesim.live.tokens import TokenBook
from agentservesim.programs.orchestrator import Call, Orchestrator, ProgramRun
from agentservesim.programs.pcb import ProgramTable
from agentservesim.programs.program import Program
from agentservesim.workload.transforms.times import with_longer_waits

LOOK_S = 0.2
STALL_S = 0.01
"""Not having run for this long, when it should have, is a stall of the client."""


class Drive:
    """A real-time run over `arrivals`, (time, program) in order of time, or, with `lanes`, over programs that
    start as soon as one of `lanes` concurrent ones ends. The counterpart of the simulator's `Simulation`.

    now_s         seconds since the run's start
    max_lag_s     how late this client has sent a call, at worst
    stalls, stalled_s    how often, and for how long in all, this process did not run although it should have:
                  its times are wrong by as much
    clipped       calls whose output was cut to the model's max_model_len
    raised        calls that were to generate nothing, and were asked for one token
    """

    def __init__(
        self,
        arrivals: Iterator[tuple[float, Program]],
        client: CompletionClient,
        book: TokenBook,
        recorder: LiveRecorder,
        deployment: bool,
        lanes: int | None,
        time_scale: float,
        max_model_len: int | None,
    ) -> None:
        self._arrivals = arrivals
        self._client = client
        self._book = book
        self.recorder = recorder
        self._lanes = lanes
        self._time_scale = time_scale
        self._max_model_len = max_model_len
        self._orchestrator = Orchestrator(ProgramTable(), deployment, self._release_at)
        self._live_programs: dict[ProgramRun, None] = {}
        self._live_calls: dict[Call, None] = {}
        self._main: asyncio.Task[None] | None = None
        self.interrupted = False
        self.max_lag_s = self.stalled_s = 0.0
        self.stalls = 0
        self.clipped = self.raised = 0

    async def run(self, on_progress: Callable[[Drive], None] | None = None) -> None:
        """Run until every program has ended, or `interrupt`. `on_progress` is called now and then."""
        first = list(islice(self._arrivals, 1))  # reading may take a while, and is not the run's time
        self._arrivals = chain(first, self._arrivals)
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._origin_s = loop.time()
        self._main = loop.create_task(self._run_programs())
        stalls = loop.create_task(self._watch_stalls())
        while not self._main.done():
            await asyncio.wait([self._main], timeout=LOOK_S)
            if on_progress is not None:
                on_progress(self)
        stalls.cancel()
        if not self._main.cancelled():
            self._main.result()
        self._report_lost()

    def interrupt(self) -> None:
        """End the run; what is unfinished then stays live."""
        self.interrupted = True
        if self._main is not None:
            self._main.cancel()

    def now_s(self) -> float:
        return self._clock() - self._origin_s

    async def _run_programs(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for _ in range(self._lanes or 1):
                    self._next_arrival()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _watch_stalls(self) -> None:
        while True:
            due_s = self.now_s() + STALL_S
            await asyncio.sleep(STALL_S)
            late_s = self.now_s() - due_s
            if late_s > STALL_S:
                self.stalls += 1
                self.stalled_s += late_s

    async def _until(self, time_s: float) -> float:
        """Wait for a time. Returns the time it then is: that one, or later."""
        while (wait_s := time_s - self.now_s()) > 0:
            await asyncio.sleep(wait_s)
        return self.now_s()

    # --- programs ----------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        """Bring in the next program: at its time, or now if a lane is free for it."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            time_s, program = arrival
            due_s = self.now_s() if self._lanes is not None else time_s * self._time_scale
            self._tasks.create_task(self._arrive(due_s, program))

    async def _arrive(self, due_s: float, program: Program) -> None:
        await self._until(due_s)
        self.recorder.program_arrived()
        program = with_longer_waits(program, self._time_scale, self._time_scale)
        run = self._orchestrator.start(program, due_s)
        self._live_programs[run] = None
        if self._lanes is None:
            self._next_arrival()

    def _end_program(self, run: ProgramRun) -> None:
        """If that was the program's last call: record it and let the next one in."""
        if run.completed_s is None or run not in self._live_programs:
            return
        del self._live_programs[run]
        self._book.forget(run)
        self.recorder.program_ended(run)
        if self._lanes is not None:
            self._next_arrival()

    # --- calls -------------------------------------------------------------------------------------------

    def _release_at(self, time_s: float, run: ProgramRun, index: int) -> None:
        self._tasks.create_task(self._serve(time_s, run, index))

    async def _serve(self, due_s: float, run: ProgramRun, index: int) -> None:
        """Release a turn when its time has come, have it served, and account for what came of it."""
        now_s = await self._until(due_s)
        call = self._orchestrator.release(run, index, now_s)
        if call is None:
            self._end_program(run)
            return
        self.recorder.call_released()
        self._live_calls[call] = None
        attempts = Attempts()
        asked = self._asked_tokens(call)
        prompt = self._book.prompt(call)
        self.max_lag_s = max(self.max_lag_s, self.now_s() - due_s)
        try:
            answer = await self._client.complete(prompt, asked, identity_of_call(call), attempts, self.now_s)
        except CallRejected as error:
            self.recorder.call_refused(call, str(error))
            self._failed(call, "refuse")
        except CallFailed as error:
            self.recorder.call_failed(call, str(error))
            self._failed(call, "fail")
        else:
            self._completed(call, answer, asked, attempts)
        finally:
            self.recorder.attempted(call, attempts, self.now_s())
        self._end_program(run)

    def _asked_tokens(self, call: Call) -> int:
        """Output to ask for: the turn's, as far as the model's length goes, and at least one token."""
        asked = call.turn.output_tokens
        if self._max_model_len is not None:
            asked = min(asked, self._max_model_len - call.turn.prompt_tokens)
            self.clipped += 0 < asked < call.turn.output_tokens
        self.raised += call.turn.output_tokens == 0
        return max(asked, 1)

    def _completed(self, call: Call, answer: Answer, asked: int, attempts: Attempts) -> None:
        if not answer.chunks:  # no output came: its end is all there is to see
            answer.chunks.append((self.now_s(), 0))
        call.instance = attempts.instance
        self._compare(call, answer, asked)
        self._book.completed(call, answer.token_ids)
        self.recorder.call_served(call, answer, attempts)
        del self._live_calls[call]
        self._orchestrator.complete(call, served_times(call, answer)[2])

    def _failed(self, call: Call, event: str) -> None:
        now_s = self.now_s()
        self.recorder.decision(now_s, event, call.key, None)
        del self._live_calls[call]
        self._orchestrator.fail(call, now_s)

    def _compare(self, call: Call, answer: Answer, asked: int) -> None:
        """Note where the answer is not what was asked for."""
        sent = call.turn.prompt_tokens
        if answer.prompt_tokens is None or answer.output_tokens is None:
            self.recorder.deviation(call, "no usage", "the server does not say how many tokens it counts")
        if answer.prompt_tokens not in (None, sent):
            words = f"sent {sent} prompt tokens, the server counts {answer.prompt_tokens}"
            self.recorder.deviation(call, "prompt tokens", words)
        got = answer.received_tokens() if answer.output_tokens is None else answer.output_tokens
        if got != asked:
            words = f"asked for {asked} output tokens, got {got}"
            self.recorder.deviation(call, "output tokens", words)
        if answer.finish_reason != "length":
            words = f"finish_reason {answer.finish_reason}, expected length"
            self.recorder.deviation(call, "finish reason", words)

    def _report_lost(self) -> None:
        """Nothing is lost silently: what is still live at the end is named."""
        for call in self._live_calls:
            self.recorder.call_lost(call, "interrupted")
        for run in self._live_programs:
            self.recorder.program_lost(run)
