"""One call as the engine sees it."""

from __future__ import annotations

from agentservesim.engine.block_table import BlockTable
from agentservesim.engine.content import Content


class Request:
    """A call inside one engine. Counters carry vLLM's names.

    request_id            orders requests of equal priority and arrival, as vLLM does
    content               identity of the prompt and of every token to come
    max_tokens            tokens to generate
    num_tokens_at_end     prompt and output of the finished request; a scheduler clips it to max_model_len
    claims                keys of parked KV entries that this request takes over when it is admitted
    owner                 whatever the submitter wants to find again; the engine never looks at it
    num_hit_tokens        prefix hit of the latest admission; first_hit_tokens that of the first
    num_output_placeholders, num_in_flight_tokens, num_stale_tokens
                          used by asynchronous scheduling alone; see AsyncScheduler
    scheduled_s           when it was first scheduled; first_token_s, completed_s: ends of steps
    """

    __slots__ = (
        "arrival_s",
        "claims",
        "completed_s",
        "content",
        "first_hit_tokens",
        "first_token_s",
        "max_tokens",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "num_tokens",
        "num_tokens_at_end",
        "owner",
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
        self.num_tokens = prompt_tokens
        self.num_tokens_at_end = prompt_tokens + max_tokens
        self.num_computed_tokens = 0
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
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def queue_key(self) -> tuple[int, float, int | str]:
        """Order under the priority policy: lowest first."""
        return (self.priority, self.arrival_s, self.request_id)
