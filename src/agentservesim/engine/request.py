"""One call as the engine sees it."""

from __future__ import annotations

from agentservesim.engine.block_table import BlockTable
from agentservesim.engine.content import Content


class TokenClock:
    """Steps that requests have taken together, a token each: scheduled, and delivered."""

    __slots__ = ("delivered", "scheduled")

    def __init__(self) -> None:
        self.scheduled = 0
        self.delivered = 0


STANDING_CLOCK = TokenClock()
"""The clock of requests that are counted one by one; it never moves."""


class Request:
    """A call inside one engine. Counters carry vLLM's names. `num_tokens` and `num_computed_tokens` are kept
    against a clock that requests may share, so that a step of many decodes is counted once; see Decodes.

    request_id            orders requests of equal priority and arrival, as vLLM does
    content               identity of the prompt and of every token to come
    max_tokens            tokens to generate
    num_tokens_at_end     prompt and output of the finished request; a scheduler clips it to max_model_len
    claims                keys of parked KV entries that this request takes over when it is admitted
    place                 order among Decodes; kept by them
    owner                 whatever the submitter wants to find again; the engine never looks at it
    num_hit_tokens        prefix hit of the latest admission; first_hit_tokens that of the first
    num_output_placeholders, num_in_flight_tokens, num_stale_tokens
                          used by asynchronous scheduling alone; see AsyncScheduler
    scheduled_s           when it was first scheduled; first_token_s, completed_s: ends of steps
    """

    __slots__ = (
        "_clock",
        "_num_computed_tokens",
        "_num_tokens",
        "arrival_s",
        "claims",
        "completed_s",
        "content",
        "first_hit_tokens",
        "first_token_s",
        "max_tokens",
        "num_hit_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "num_tokens_at_end",
        "owner",
        "place",
        "priority",
        "request_id",
        "scheduled_s",
        "table",
    )

    def __init__(
        self,
        request_id: int | str,
        content: Content,
        prompt_tokens: int,
        max_tokens: int,
        arrival_s: float,
        priority: int = 0,
        claims: tuple[object, ...] = (),
        owner: object = None,
    ) -> None:
        self.request_id = request_id
        self.content = content
        self.num_prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.arrival_s = arrival_s
        self.priority = priority
        self.claims = claims
        self.owner = owner
        self._clock = STANDING_CLOCK
        self._num_tokens = prompt_tokens
        self._num_computed_tokens = 0
        self.place = 0
        self.num_tokens_at_end = prompt_tokens + max_tokens
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_tokens = 0
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.first_hit_tokens: int | None = None
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.completed_s: float | None = None
        self.table = BlockTable()

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, computed={self.num_computed_tokens}/{self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt, and those generated."""
        return self._num_tokens + self._clock.delivered

    @num_tokens.setter
    def num_tokens(self, count: int) -> None:
        self._num_tokens = count - self._clock.delivered

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be by the step that is scheduled."""
        return self._num_computed_tokens + self._clock.scheduled

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self._num_computed_tokens = count - self._clock.scheduled

    @property
    def decodes_alone(self) -> bool:
        """Whether it is counted by itself, and not on a clock that it shares."""
        return self._clock is STANDING_CLOCK

    def follow(self, clock: TokenClock) -> None:
        """Count on against another clock, from the present numbers."""
        self._num_tokens += self._clock.delivered - clock.delivered
        self._num_computed_tokens += self._clock.scheduled - clock.scheduled
        self._clock = clock

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def queue_key(self) -> tuple[int, float, int | str]:
        """Order under the priority policy: lowest first."""
        return (self.priority, self.arrival_s, self.request_id)
