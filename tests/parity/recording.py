"""What an engine did on a load, step by step, in a form that both engines produce and a file holds."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .loads import Engine, Span

FORMAT = 2


class Submission(msgspec.Struct, array_like=True, frozen=True):
    """One request as it was submitted. Requests are numbered in the order of their submission."""

    prompt: tuple[Span, ...]
    output: int
    max_tokens: int
    priority: int
    arrival_s: float


class Step(msgspec.Struct, array_like=True, frozen=True):
    """One schedule(): what was submitted before it, what it decided, what finished before the next one.

    Synchronous scheduling runs and updates each step before it schedules the next. Asynchronous scheduling
    schedules the next one first, so what finishes after a step was, as a rule, in the step before.
    """

    submitted: int  # the number of requests submitted in all, up to this step
    batch: tuple[tuple[int, int], ...]  # (request, tokens) in batch order
    preempted: tuple[int, ...]  # in order
    hits: tuple[tuple[int, int], ...]  # (request, hit tokens) of each admitted in this step, in order
    free_blocks: int  # after schedule()
    finished: tuple[int, ...]  # in the order in which they were freed


class Trial(msgspec.Struct, frozen=True):
    """A whole load, as one engine served it."""

    seed: int
    engine: Engine
    submissions: tuple[Submission, ...]
    steps: tuple[Step, ...]

    def preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.steps)

    def hit_tokens(self) -> int:
        return sum(hit for step in self.steps for _, hit in step.hits)


class Header(msgspec.Struct, frozen=True):
    vllm: str
    format: int
    first_seed: int


def request_id(number: int) -> str:
    """The id of a request: as strings, ids sort in the order of submission."""
    return f"r{number:05d}"


def number_of(request_id: str) -> int:
    return int(request_id[1:])


def write(path: Path, header: Header, trials: list[Trial]) -> None:
    encode = msgspec.json.encode
    lines = b"\n".join([encode(header), *(encode(trial) for trial in trials)]) + b"\n"
    path.write_bytes(gzip.compress(lines, mtime=0))


def read(path: Path) -> tuple[Header, Iterator[Trial]]:
    lines = gzip.decompress(path.read_bytes()).splitlines()
    header = msgspec.json.decode(lines[0], type=Header)
    if header.format != FORMAT:
        raise ValueError(f"{path.name}: format {header.format}, expected {FORMAT}")
    decoder = msgspec.json.Decoder(Trial)
    return header, (decoder.decode(line) for line in lines[1:])
