"""Token ids for real servers: equal exactly where the simulator says that tokens are."""

from __future__ import annotations

import heapq
import random
import tempfile
from itertools import chain as joined
from itertools import combinations_with_replacement, count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentservesim import load_programs
from agentservesim.errors import InputError
from agentservesim.live.tokens import TokenBook
from agentservesim.programs.orchestrator import Orchestrator
from agentservesim.programs.pcb import ProgramTable
from agentservesim.programs.program import PrefixGroup, Program, Turn
from helpers import chain, program, turn, workloads, write_native

VOCABULARY = 2**31
"""Ids this wide are equal by chance once in a few thousand runs of these tests."""


def read(programs):
    with tempfile.TemporaryDirectory() as folder:
        return list(load_programs(write_native(Path(folder) / "w.jsonl", programs)).programs)


def drive(programs, book, told, deployment=True, order_seed=0):
    """Run programs with calls that complete in a random order: [(call, prompt ids, output ids)]. Outputs are
    told to the book where `told` says so."""
    rng, answers = random.Random(order_seed), random.Random(99)
    heap, ticket = [], count()

    def release_at(time_s, run, index):
        heapq.heappush(heap, (time_s, next(ticket), run, index))

    orchestrator = Orchestrator(ProgramTable(), deployment, release_at)
    for one in programs:
        orchestrator.start(one, rng.random())
    calls = []
    while heap:
        now_s, _, run, index = heapq.heappop(heap)
        if isinstance(index, tuple):
            call, output = index
            book.completed(call, output)
            orchestrator.complete(call, now_s)
            if run.completed_s is not None:
                book.forget(run)
            continue
        call = orchestrator.release(run, index, now_s)
        prompt = book.prompt(call)
        assert book.prompt(call) == prompt  # a retry sends the same
        output = [answers.randrange(VOCABULARY) for _ in range(call.turn.output_tokens)] if told else None
        calls.append((call, prompt, output))
        heapq.heappush(heap, (now_s + rng.random(), next(ticket), run, (call, output)))
    return calls


def lines(call, end):
    """The line of each position of a call's sequence."""
    spans = call.content.spans
    return list(joined.from_iterable([line] * (stop - start) for line, start, stop in spans))[:end]


@settings(max_examples=150)
@given(workloads(max_prompt=120), st.booleans(), st.booleans())
def test_ids_are_equal_exactly_where_the_simulator_says_that_tokens_are(programs, deployment, told):
    calls = drive(read(programs), TokenBook(7, VOCABULARY), told, deployment)
    sequences = []
    for call, prompt, output in calls:
        assert len(prompt) == call.turn.prompt_tokens
        ids = prompt + (output or [])
        sequences.append((lines(call, len(ids)), ids))
    for (lines_a, ids_a), (lines_b, ids_b) in combinations_with_replacement(sequences, 2):
        expected = [a is b for a, b in zip(lines_a, lines_b, strict=False)]
        assert [a == b for a, b in zip(ids_a, ids_b, strict=False)] == expected


def test_ids_depend_on_the_seed_and_not_on_the_order_of_programs():
    programs = [chain(f"p{n}", 4, prefix=[{"id": "sys", "tokens": 40}]) for n in range(5)]

    def prompts(seed, order_seed):
        calls = drive(read(programs), TokenBook(seed, 5000), False, order_seed=order_seed)
        return {call.key: prompt for call, prompt, _ in calls}

    assert prompts(1, 0) == prompts(1, 1)
    assert prompts(1, 0) != prompts(2, 0)


def test_ids_stay_in_the_vocabulary_and_below_it_lie_none():
    prompts = [prompt for _, prompt, _ in drive(read([chain("p", 6, new=400)]), TokenBook(0, 20), False)]
    assert set(joined.from_iterable(prompts)) == set(range(4, 20))


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(InputError, match="expected at least 6"):
        TokenBook(0, 5)


def test_outputs_that_nobody_told_are_counted_once_and_only_where_they_are_repeated():
    repeated = chain("p", 4, output=8)  # three outputs of eight return, the last one does not
    dropped = chain("q", 4, output=8, kept_output_tokens=0)
    told, untold = TokenBook(0, 5000), TokenBook(0, 5000)
    drive(read([repeated, dropped]), told, True)
    drive(read([repeated, dropped]), untold, False)
    assert (told.made_up_tokens, untold.made_up_tokens) == (0, 24)


def test_a_short_output_is_filled_up_and_counted():
    book = TokenBook(0, 5000)
    released = []
    orchestrator = Orchestrator(ProgramTable(), True, lambda *release: released.append(release))
    run = orchestrator.start(read([program("p", [turn(16, 8), turn(32, 4, reuse_tokens=24)])])[0], 0.0)
    call = orchestrator.release(run, 0, 0.0)
    prompt = book.prompt(call)
    book.completed(call, [1, 2, 3])
    orchestrator.complete(call, 1.0)
    after = book.prompt(orchestrator.release(run, 1, 1.0))
    assert after[:19] == [*prompt, 1, 2, 3] and len(after) == 32
    assert book.made_up_tokens == 5


def test_what_is_kept_does_not_grow_with_the_programs_that_have_ended():
    book = TokenBook(0, 5000)
    drive(read([chain(f"p{n}", 3) for n in range(20)]), book, True)
    assert len(book) == 0


def test_an_output_where_a_cut_prefix_would_go_on_is_not_that_prefix():
    groups = (PrefixGroup("sys", 40), PrefixGroup("tools", 24))
    cut = Program("cut", (Turn("a", 20, 60, 0, 60), Turn("b", 80, 1, 80, parents=(0,))), prefix=groups)
    whole = Program("whole", (Turn("a", 80, 1),), prefix=groups)
    calls = drive([cut, whole], TokenBook(0, VOCABULARY), False)
    prompts = {call.key: prompt for call, prompt, _ in calls}
    same = [a == b for a, b in zip(prompts["cut", "b"], prompts["whole", "a"], strict=True)]
    assert same == [True] * 20 + [False] * 60
