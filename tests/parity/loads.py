"""Seeded random loads for the comparison with vLLM: an engine's parameters and calls to serve."""

from __future__ import annotations

import random

import msgspec

Span = tuple[int, int, int]  # tokens start..end of an endless text: (text, start, end)


def tokens_of(spans: tuple[Span, ...]) -> list[int]:
    """The token ids of a run of spans. No two places of any two texts carry the same token."""
    return [text * 1_000_000 + at for text, start, end in spans for at in range(start, end)]


def length_of(spans: tuple[Span, ...]) -> int:
    return sum(end - start for _, start, end in spans)


def first(spans: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    """The first `length` tokens of `spans`."""
    kept: list[Span] = []
    for text, start, end in spans:
        end = min(end, start + length)
        if end > start:
            kept.append((text, start, end))
            length -= end - start
    return tuple(kept)


class Engine(msgspec.Struct, frozen=True):
    """The parameters of one engine, named as vLLM names them."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str
    long_prefill_token_threshold: int
    watermark: float
    scheduler_reserve_full_isl: bool
    enable_prefix_caching: bool
    async_scheduling: bool

    def capacity(self) -> int:
        """The longest sequence the pool holds; block 0 is vLLM's null block."""
        return (self.num_blocks - 1) * self.block_size


class Call(msgspec.Struct, frozen=True):
    """One request. Its k-th output token is token k of the text `output`, whatever the engine does.

    It is submitted `gap` steps after call `after` finished, or at step `gap` where `after` is None.
    """

    prompt: tuple[Span, ...]
    output: int
    max_tokens: int
    priority: int
    after: int | None
    gap: int

    def content(self) -> list[int]:
        """The tokens of the whole sequence: the prompt and every output token that may come."""
        return tokens_of((*self.prompt, (self.output, 0, self.max_tokens)))


class Load(msgspec.Struct, frozen=True):
    engine: Engine
    calls: tuple[Call, ...]
    same_arrival: bool  # calls submitted before one step carry one arrival time, and not each its own


def make_engine(rng: random.Random, async_scheduling: bool) -> Engine:
    block_size = rng.choice([16, 16, 32])
    num_blocks = rng.choice([40, 60, 60, 120, 120, 240, 800])
    capacity = (num_blocks - 1) * block_size
    max_num_seqs = rng.choice([2, 4, 8, 8, 16, 32, 64])
    max_model_len = rng.choice([min(1024, capacity), min(4096, capacity), 2 * capacity])
    return Engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([48, 64, 128, 256, 256, 512, 1024, 2048])),
        max_model_len=max_model_len,
        policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=min(rng.choice([0, 0, 0, 24, 48, 128]), max_model_len),
        watermark=rng.choice([0.0, 0.0, 0.01, 0.05]),
        scheduler_reserve_full_isl=rng.random() < 0.75,
        enable_prefix_caching=rng.random() < 0.9,
        async_scheduling=async_scheduling,
    )


def make_load(seed: int, calls: int = 70, async_scheduling: bool = False) -> Load:
    """The load of a seed. Every request of it is one that vLLM can serve to its end."""
    rng = random.Random(seed)
    engine = make_engine(rng, async_scheduling)
    longest = min(engine.max_model_len, engine.capacity())
    texts = iter(range(1, 10_000))
    # Sizes follow the pool, so that a handful of running requests fill it.
    typical = min(max(48, engine.capacity() // rng.choice([4, 6, 10, 16])), 900)
    long_output = rng.choice([40, 120, 200])
    prefixes: list[tuple[Span, ...]] = []
    for _ in range(4):
        stem = rng.choice(prefixes) if prefixes and rng.random() < 0.4 else ()
        prefixes.append((*stem, (next(texts), 0, rng.randrange(8, typical + 8))))

    made: list[Call] = []
    followed: set[int] = set()
    now = 0
    burst = 0
    for _ in range(calls):
        if burst > 0:
            burst -= 1
        else:
            pause = rng.random()
            now += rng.randrange(1, 12) if pause < 0.75 else rng.randrange(40, 160) if pause < 0.8 else 0
            burst = rng.randrange(2, 12) if rng.random() < 0.15 else 0
        after, gap, output = None, now, next(texts)
        kind = rng.random()
        open_calls = [i for i in range(len(made)) if i not in followed]
        if kind < 0.35 and open_calls:
            # The next turn of a conversation; now and then a second branch of the same one.
            after = rng.choice(open_calls[-12:])
            if rng.random() < 0.85:
                followed.add(after)
            earlier = made[after]
            said = min(earlier.max_tokens, engine.max_model_len - length_of(earlier.prompt))
            fresh = (next(texts), 0, rng.randrange(1, 120))
            prompt = (*earlier.prompt, (earlier.output, 0, said), fresh)
            gap = rng.choice([1, 1, 2, 5, 20, 60])
        elif kind < 0.55 and made:
            earlier = rng.choice(made[-6:])
            prompt = earlier.prompt
            if rng.random() < 0.5:
                output = earlier.output  # the same answer once more
        elif kind < 0.6:
            prompt = ((next(texts), 0, rng.randrange(1, 20)),)
        else:
            prompt = (*rng.choice(prefixes), (next(texts), 0, rng.randrange(1, typical + 1)))

        size = length_of(prompt)
        shape = rng.random()
        if shape < 0.35:
            size = max(engine.block_size, size // engine.block_size * engine.block_size)
        elif shape < 0.39:
            prompt = (*prompt, (next(texts), 0, longest))
            size = longest - rng.randrange(1, 1 + min(64, longest // 2))
        prompt = first(prompt, min(size, longest - 1))
        room = longest - length_of(prompt)
        size = rng.random()
        max_tokens = (
            1 if size < 0.08 else rng.randrange(1, 12) if size < 0.2 else rng.randrange(1, long_output)
        )
        if max_tokens > room and (engine.max_model_len > engine.capacity() or rng.random() < 0.5):
            max_tokens = room  # or left too long: max_model_len then ends it
        made.append(Call(prompt, output, max_tokens, rng.choice([0, 0, 1, 2]), after, gap))
    return Load(engine, tuple(made), same_arrival=rng.random() < 0.25)
