"""Serves the submissions of a recording with the engine of AgentServeSim, and records what it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from agentservesim.engine.async_scheduler import AsyncScheduler
from agentservesim.engine.content import Content, Line, Span
from agentservesim.engine.request import Request
from agentservesim.engine.scheduler import Scheduler, SchedulerOutput

from .loads import Engine, length_of, tokens_of
from .recording import Step, Submission, Trial, number_of, request_id


class _Node:
    """The chain of full blocks from the start of a sequence to here; `spans` name the tokens of the last."""

    __slots__ = ("children", "spans")

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self.children: dict[tuple[int, ...], _Node] = {}


class Interner:
    """Turns token lists into Content: two sequences share a block's key exactly where all their tokens up
    to the end of that block are equal.

    Sequences form a tree of full blocks. The first child of a block continues its parent's line. A later
    child opens a line of its own at the first token in which it differs from the child it is most like.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._root = _Node(())
        self._lines = 0

    def content(self, tokens: list[int]) -> Content:
        size = self._block_size
        node = self._root
        spans: list[Span] = []
        full = len(tokens) // size * size
        for start in range(0, full, size):
            block = tuple(tokens[start : start + size])
            child = node.children.get(block)
            if child is None:
                child = node.children[block] = _Node(self._name(node, block, start))
            spans.extend(child.spans)
            node = child
        if full < len(tokens):
            spans.append(Span(self._line(), full, len(tokens)))
        return Content(_joined(spans))

    def _name(self, parent: _Node, block: tuple[int, ...], start: int) -> tuple[Span, ...]:
        end = start + self._block_size
        if not parent.children:
            line = parent.spans[-1].line if parent.spans else self._line()
            return (Span(line, start, end),)
        like, sibling = max(
            ((_common(block, other), child) for other, child in parent.children.items()),
            key=lambda found: found[0],
        )
        fork = start + like
        shared = [Span(s.line, s.start, min(s.end, fork)) for s in sibling.spans if s.start < fork]
        return (*shared, Span(self._line(), fork, end))

    def _line(self) -> Line:
        self._lines += 1
        return Line(str(self._lines))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of leading tokens in which two blocks agree."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].line is span.line:
            joined[-1] = Span(span.line, joined[-1].start, span.end)
        else:
            joined.append(span)
    return tuple(joined)


def requests_of(trial: Trial) -> list[Request]:
    """A fresh Request for each submission of a trial."""
    interner = Interner(trial.engine.block_size)
    return [make_request(number, made, interner) for number, made in enumerate(trial.submissions)]


def make_request(number: int, made: Submission, interner: Interner) -> Request:
    return Request(
        request_id=request_id(number),
        content=interner.content(tokens_of((*made.prompt, (made.output, 0, made.max_tokens)))),
        prompt_tokens=length_of(made.prompt),
        max_tokens=made.max_tokens,
        arrival_s=made.arrival_s,
        priority=made.priority,
    )


def make_scheduler(engine: Engine) -> Scheduler:
    options = msgspec.structs.asdict(engine)
    return AsyncScheduler(**options) if options.pop("async_scheduling") else Scheduler(**options)


def run(trial: Trial) -> Iterator[Step]:
    """The engine's own steps, one for each step of `trial`, given the trial's submissions.

    Steps wait in a queue, of one or, under asynchronous scheduling, two: the oldest is updated when the
    queue is full, or when there is nobody left to schedule.
    """
    requests = requests_of(trial)
    scheduler = make_scheduler(trial.engine)
    queue_size = 2 if trial.engine.async_scheduling else 1
    queue: deque[SchedulerOutput] = deque()
    submitted = 0
    for at, recorded in enumerate(trial.steps):
        for request in requests[submitted : recorded.submitted]:
            scheduler.add_request(request)
        submitted = recorded.submitted
        output = scheduler.schedule(at * 0.01)
        queue.append(output)
        free_blocks = scheduler.block_pool.num_free_blocks
        batch = _numbered(output.num_scheduled_tokens.items())
        hits = _numbered((request, request.num_hit_tokens) for request in output.admitted)
        finished: list[Request] = []
        if len(queue) == queue_size or not (batch or scheduler.running or scheduler.waiting):
            finished = scheduler.update_from_output(queue.popleft())
        yield Step(
            submitted=submitted,
            batch=batch,
            preempted=tuple(number_of(request.request_id) for request in output.preempted),
            hits=hits,
            free_blocks=free_blocks,
            finished=tuple(number_of(request.request_id) for request in finished),
        )


def _numbered(pairs) -> tuple[tuple[int, int], ...]:
    return tuple((number_of(request.request_id), count) for request, count in pairs)
