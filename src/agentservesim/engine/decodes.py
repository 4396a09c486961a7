"""The decodes that a running list begins with, as one body.

A step gives each of them one token, so what it does to all is counted once, on a clock they share, and the
scheduler looks only at those to whom something happens: who takes a block, who fills one, who ends. A
request's own counters are read against that clock (see Request).
"""

from __future__ import annotations

from agentservesim.engine.request import STANDING_CLOCK, Request, TokenClock


class Decodes(TokenClock):
    """Running requests that lack one token of being computed, and have their first output token.

    They are the first `size` of the running list, in its order: one joins behind those that are here.
    """

    __slots__ = ("_ahead", "_at_phase", "_block_size", "_ends", "_joined", "_sum", "size")

    def __init__(self, block_size: int, ahead: int = 0) -> None:
        """`ahead`: tokens of each member that are in flight when a step is scheduled."""
        super().__init__()
        self.size = 0
        self._ahead = ahead
        self._block_size = block_size
        self._joined = 0
        self._sum = 0
        # Members by their computed tokens modulo the block size when the clock stood at 0, and by the time
        # at which they have their last token; each list in running order.
        self._at_phase: list[list[Request]] = [[] for _ in range(block_size)]
        self._ends: dict[int, list[Request]] = {}

    @property
    def num_computed_tokens(self) -> int:
        """Computed tokens of all members together."""
        return self._sum + self.size * self.scheduled

    # --- members -----------------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Take in the request that follows the members in the running list."""
        request.follow(self)
        computed_at_0 = request.num_computed_tokens - self.scheduled
        self._at_phase[computed_at_0 % self._block_size].append(request)
        self._ends.setdefault(self._end(request), []).append(request)
        self._sum += computed_at_0
        self.size += 1
        self._joined += 1
        request.place = self._joined

    def leave(self, request: Request) -> None:
        """Let a member go; its counters are its own again."""
        end = self._end(request)
        ending = self._ends[end]
        ending.remove(request)
        if not ending:
            del self._ends[end]
        self._forget(request)

    def _forget(self, request: Request) -> None:
        computed_at_0 = request.num_computed_tokens - self.scheduled
        self._at_phase[computed_at_0 % self._block_size].remove(request)
        self._sum -= computed_at_0
        self.size -= 1
        request.follow(STANDING_CLOCK)

    def _end(self, request: Request) -> int:
        return request.num_tokens_at_end - self._ahead - request.num_tokens + self.delivered

    # --- steps -------------------------------------------------------------------------------------------

    def due(self) -> tuple[list[Request], list[Request]]:
        """Who takes a block with the next step, and who has filled one once it is scheduled, as far as its
        tokens are known; both in running order."""
        takes = self._at_phase[-self.scheduled % self._block_size]
        fills = self._at_phase[(self._ahead - 1 - self.scheduled) % self._block_size]
        return takes, fills

    def deliver(self) -> list[Request]:
        """The step has run: each member has one more token. Returns those that have all of theirs, or will
        by what is in flight, in running order; they have left."""
        self.delivered += 1
        ended = self._ends.pop(self.delivered, [])
        for request in ended:
            self._forget(request)
        return ended

    # --- looking ahead -----------------------------------------------------------------------------------

    def steps_to_first_end(self) -> int:
        """After how many steps the first member has all its tokens. There must be one."""
        return min(self._ends) - self.delivered

    def steps_within(self, num_blocks: int) -> int:
        """How many steps can be taken before the members have taken more than `num_blocks`."""
        size = self._block_size
        rounds, left = divmod(num_blocks, self.size)
        for offset in range(size):
            left -= len(self._at_phase[-(self.scheduled + offset) % size])
            if left < 0:
                return rounds * size + offset
        raise AssertionError("each member takes a block in as many steps as a block has tokens")

    def new_blocks(self, steps: int) -> int:
        """Blocks that the members take in their next `steps` steps."""
        size = self._block_size
        return sum(
            len(members) * ((in_block + steps - 1) // size - (in_block - 1) // size)
            for in_block, members in self._by_position()
        )

    def block_seconds(self, times: list[float], steps: int) -> float:
        """Integral over `steps` steps of the blocks that the members take meanwhile; step i starts at
        times[i]."""
        total = 0.0
        for in_block, members in self._by_position():
            taken = times[-in_block % self._block_size : steps : self._block_size]
            if taken:
                total += len(members) * (len(taken) * times[steps] - sum(taken))
        return total

    def _by_position(self) -> list[tuple[int, list[Request]]]:
        """Members by how many tokens of their present block are computed."""
        shift, size = self.scheduled, self._block_size
        return [((phase + shift) % size, members) for phase, members in enumerate(self._at_phase) if members]
