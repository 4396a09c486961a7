"""The option `semantics`: what vllm-0.33 does otherwise, by hand. No such release is driven."""

from __future__ import annotations

import pytest

from agentservesim.engine.async_scheduler import AsyncScheduler
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler

from .recording import Submission
from .simulated import Interner, make_request


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize(
    ("policy", "semantics", "victim", "batch"),
    [
        ("priority", "vllm-0.32", "early", {}),
        ("priority", "vllm-0.33", "early", {"late": 1}),
        ("fcfs", "vllm-0.32", "late", {"early": 1}),
        ("fcfs", "vllm-0.33", "late", {"early": 1}),
    ],
)
def test_a_request_that_preempts_itself(scheduler_class, policy, semantics, victim, batch):
    """Five blocks are in use, and the request admitted first, which is the less urgent, needs a sixth."""
    scheduler = scheduler_class(num_blocks=6, block_size=16, policy=policy, semantics=semantics)
    interner = Interner(16)
    early = make_request(
        0, Submission(((1, 0, 47),), output=2, max_tokens=9, priority=1, arrival_s=0), interner
    )
    late = make_request(
        1, Submission(((3, 0, 17),), output=4, max_tokens=9, priority=0, arrival_s=1), interner
    )
    names = {early: "early", late: "late"}

    assert _step(scheduler, early) == {early: 47}
    assert _step(scheduler, late) == {early: 1, late: 17}
    assert scheduler.block_pool.num_free_blocks == 0
    output = scheduler.schedule()
    assert [names[request] for request in output.preempted] == [victim]
    assert {names[request]: tokens for request, tokens in output.num_scheduled_tokens.items()} == batch


def _step(scheduler: Scheduler, arriving: Request) -> dict[Request, int]:
    scheduler.add_request(arriving)
    output = scheduler.schedule()
    scheduler.update_from_output(output)
    return output.num_scheduled_tokens
