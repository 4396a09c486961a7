"""Which server a call goes to: Program Control Blocks, the routing policy, and the way out where it fails."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from agentservesim.errors import PolicyError
from agentservesim.live.identity import Identity
from agentservesim.live.router.body import AnswerTail, CallFacts
from agentservesim.live.router.servers import LOG, Server
from agentservesim.planes.guard import ask, reject, whole_number
from agentservesim.policies.interface import RoutingPolicy
from agentservesim.programs.pcb import Gap, ProgramControlBlock, ProgramTable

IDLE_S = 3600.0
"""A program unseen for so long is forgotten."""
FAILURES_LOGGED = 20
COUNTS = (
    "programs",
    "programs_ended",
    "programs_forgotten_idle",
    "calls",
    "calls_completed",
    "calls_without_identity",
    "identity_malformed",
    "answers_with_error_status",
    "policy_failures",
    "rerouted_server_down",
    "rerouted_connection_refused",
    "no_server",
    "server_broke_off",
    "client_disconnects",
)
"""What /router/stats counts, from zero."""


class _Program:
    """A live program: its PCB, its calls in flight, when it was last heard of, and whether its last call has
    arrived."""

    __slots__ = ("ending", "in_flight", "pcb", "seen_s")

    def __init__(self, pcb: ProgramControlBlock, now_s: float) -> None:
        self.pcb = pcb
        self.in_flight = 0
        self.seen_s = now_s
        self.ending = False


class RoutedCall:
    """A call under way. `program` is None for one without identity."""

    __slots__ = ("arrived_s", "gap", "identity", "ordinal", "program", "prompt_tokens", "server")

    def __init__(self, facts: CallFacts, program: _Program | None, now_s: float) -> None:
        self.identity: Identity | None = facts.identity
        self.prompt_tokens = facts.prompt_tokens
        self.program = program
        self.arrived_s = now_s
        self.gap: Gap | None = None
        self.ordinal = 0
        self.server: Server | None = None


class Placement:
    """Asks the routing policy about each call of a program, as the simulator's dispatch plane does.

    A call without identity, or one for which the policy raises or answers nonsense, goes to the least loaded
    server. `counts` says how many of each.
    """

    def __init__(
        self, policy: RoutingPolicy, servers: Sequence[Server], max_num_seqs: int, idle_s: float = IDLE_S
    ) -> None:
        self._route = policy.route
        self._servers = servers
        self._max_num_seqs = max_num_seqs
        self._idle_s = idle_s
        self._table = ProgramTable()
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))

    def __len__(self) -> int:
        """Programs whose control blocks are kept."""
        return len(self._programs)

    def arrive(self, facts: CallFacts, now_s: float) -> RoutedCall:
        """A call has arrived: the gap before it, if any, is over."""
        self._forget_idle(now_s)
        self.counts["calls"] += 1
        self.counts["identity_malformed"] += facts.malformed
        if facts.identity is None:
            self.counts["calls_without_identity"] += 1
            return RoutedCall(facts, None, now_s)
        program = self._program(facts.identity.program_id, now_s)
        call = RoutedCall(facts, program, now_s)
        pcb = program.pcb
        call.gap, call.ordinal = pcb.last_gap, pcb.calls_submitted
        pcb.calls_submitted += 1
        program.in_flight += 1
        program.ending = program.ending or bool(facts.identity.last_call)
        if call.gap is not None:
            self._table.close_gap(pcb, call.gap, now_s)
        return call

    def place(self, call: RoutedCall | None, tried: Sequence[Server], now_s: float) -> Server | None:
        """Where a call goes next, after `tried` refused; None for a request that is no call and no program's.
        None is answered when all have refused."""
        if call is not None and call.program is not None and not tried:
            server = self._chosen(call, call.program.pcb, now_s)
        else:
            server = self._least_loaded(tried)
        if call is not None and server is not None:
            call.server = server
            if call.program is not None:
                call.program.pcb.instance = server.index
        return server

    def completed(self, call: RoutedCall, answer: AnswerTail, now_s: float) -> None:
        """The whole answer has been passed on."""
        self.counts["calls_completed"] += 1
        if call.program is None or call.identity is None:
            return
        known = answer.context_tokens()
        self._table.call_completed(
            call.program.pcb,
            now_s,
            service_s=max(now_s - call.arrived_s - answer.queue_s(), 0.0),
            context_tokens=call.prompt_tokens if known is None else known,
            tool_name=call.identity.tool_name,
        )

    def left(self, call: RoutedCall, now_s: float) -> None:
        """The call has ended, in whatever way."""
        if call.program is None or call.identity is None:
            return
        call.program.in_flight -= 1
        call.program.seen_s = now_s
        if self._programs.get(call.identity.program_id) is not call.program:
            return
        self._programs.move_to_end(call.identity.program_id)
        if call.program.ending and not call.program.in_flight:
            self.counts["programs_ended"] += 1
            self._drop(call.identity.program_id, call.program)

    # --- programs ----------------------------------------------------------------------------------------

    def _program(self, program_id: str, now_s: float) -> _Program:
        program = self._programs.get(program_id)
        if program is None:
            self.counts["programs"] += 1
            program = _Program(self._table.open(program_id, now_s), now_s)
            self._programs[program_id] = program
        program.seen_s = now_s
        self._programs.move_to_end(program_id)
        return program

    def _forget_idle(self, now_s: float) -> None:
        while self._programs:
            program_id, program = next(iter(self._programs.items()))
            if now_s - program.seen_s < self._idle_s:
                return
            if program.in_flight:
                program.seen_s = now_s
                self._programs.move_to_end(program_id)
            else:
                self.counts["programs_forgotten_idle"] += 1
                self._drop(program_id, program)

    def _drop(self, program_id: str, program: _Program) -> None:
        if self._programs.get(program_id) is program:
            del self._programs[program_id]
            self._table.close(program.pcb)

    # --- servers -----------------------------------------------------------------------------------------

    def _chosen(self, call: RoutedCall, pcb: ProgramControlBlock, now_s: float) -> Server | None:
        view = self._table.view(
            pcb,
            turn_index=call.ordinal,
            prompt_tokens=call.prompt_tokens,
            gap=call.gap,
            kv_resident_tokens=0,
            kv_deadline_s=None,
        )
        views = tuple(server.view(self._max_num_seqs) for server in self._servers)
        about = f"program {pcb.program_id}"
        try:
            answer = ask(self._route, now_s, about, view, now_s, views)
            index = whole_number(answer)
            if index is None or not 0 <= index < len(self._servers):
                expected = f"an instance from 0 to {len(self._servers) - 1}"
                raise reject(self._route, answer, expected, now_s, about)
        except PolicyError as error:
            self._log_failure(error)
            return self._least_loaded(())
        if not self._servers[index].up:
            self.counts["rerouted_server_down"] += 1
            return self._least_loaded(())
        return self._servers[index]

    def _least_loaded(self, tried: Sequence[Server]) -> Server | None:
        """The server with the fewest calls in flight; one that is down only where no other is left."""
        left = [server for server in self._servers if server not in tried]
        return min(left, key=lambda server: (not server.up, server.in_flight, server.index), default=None)

    def _log_failure(self, error: PolicyError) -> None:
        self.counts["policy_failures"] += 1
        if self.counts["policy_failures"] <= FAILURES_LOGGED:
            LOG.warning("%s; the call goes to the least loaded server", error)
        if self.counts["policy_failures"] == FAILURES_LOGGED:
            LOG.warning("further failures of the policy are counted in /router/stats and not logged")
