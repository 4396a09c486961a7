"""Draw programs from a description. Program k depends on (description, seed, k) alone."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, count

import msgspec

from agentservesim.programs.program import PrefixGroup, Program, ToolCall, Turn
from agentservesim.workload.synthetic.description import Description, Kind, SubAgents
from agentservesim.workload.synthetic.distributions import Marginal

# A program's turns decide most of its tokens, and rare slow tools most of its waiting: independent draws
# would leave 50 programs far off their means. These two are drawn instead by an irrational step from a seeded
# start, which covers [0, 1) evenly over every stretch of programs, and still needs only (seed, index).
_TURNS_STEP = (math.sqrt(5) - 1) / 2
_TOOL_STEP = math.sqrt(2) - 1


def generate(description: Description, seed: int) -> Iterator[Program]:
    """Endless programs, one at a time: the first n are the same however many are taken."""
    return (draw_program(description, seed, index) for index in count())


def draw_program(description: Description, seed: int, index: int) -> Program:
    """Program `index` of the workload with this seed."""
    kind, wanted = _kind_and_length(description, seed, index)
    draw = _Draw(description, kind, seed, index)
    main = draw.line(wanted, draw.first_prompt(kind.task_tokens.quantile(draw.rng.random())))
    if description.sub_agents is not None and kind.sub_agents is not None:
        draw.fork(description.sub_agents, kind.sub_agents, main)
    return Program(f"{description.name}-{index:05d}", tuple(draw.turns), prefix=draw.prefix)


class _Draw:
    """A program being drawn.

    `rng` makes the choices that every description needs, `more` those that only some do: an addition to the
    second kind leaves the workloads without it as they were.
    """

    def __init__(self, description: Description, kind: Kind, seed: int, index: int) -> None:
        self.description = description
        self.kind = kind
        self.seed = seed
        self.index = index
        self.rng = random.Random(f"{description.name}/{seed}/{index}")
        self.more = random.Random(f"{description.name}/{seed}/{index}/more")
        self.turns: list[Turn] = []
        self.prefix = description.prefix + self._own_prefix()
        self.prefix_tokens = sum(group.tokens for group in self.prefix)

    def _own_prefix(self) -> tuple[PrefixGroup, ...]:
        if not self.description.prefixes:
            return ()
        left = self.more.random()
        for prefix in self.description.prefixes:
            left -= prefix.share
            if left < 0:
                return prefix.groups
        return ()

    def first_prompt(self, task_tokens: float) -> int:
        """The tokens of a prompt that begins with nothing but the shared prefix."""
        return max(1, self.prefix_tokens + max(0, round(task_tokens)))

    def line(self, wanted: int, prompt: int, reuse: int = 0, parents: tuple[int, ...] = ()) -> list[int]:
        """Append turns one after another, the first after `parents`; their indices."""
        written: list[int] = []
        new_shares = self._new_shares(wanted)
        while len(written) < wanted:
            if prompt > self.description.max_prompt_tokens and written:
                if not self.description.rewrites:
                    break
                prompt, reuse = self._rewritten(self.turns[written[-1]], 0)
            parents = (written[-1],) if written else parents
            written.append(len(self.turns))
            self.turns.append(self._turn(prompt, reuse, parents))
            prompt, reuse = self._next(self.turns[-1], next(new_shares))
        # the last answers instead of calling a tool
        end = written[-1]
        self.turns[end] = msgspec.structs.replace(self.turns[end], tools=(), gap_s=None, pause_s=0.0)
        return written

    def fork(self, agents: SubAgents, number: Marginal, main: Sequence[int]) -> None:
        """Append sub-agents' lines beside the main one."""
        for _ in range(round(number.quantile(self.more.random()))):
            at = self.more.randrange(len(main))
            wanted = max(1, round(agents.turns.quantile(self.more.random())))
            start = self.first_prompt(agents.task_tokens.quantile(self.more.random()))
            reuse = 0
            if self.more.random() >= agents.fresh_share:
                start, reuse = self._next(self.turns[main[at]], self.more.random())
            branch = self.line(wanted, start, reuse, (main[at],))
            if self.more.random() < agents.join_share and at + 1 < len(main):
                after = self.turns[main[at + 1]]
                self.turns[main[at + 1]] = msgspec.structs.replace(
                    after, parents=(*after.parents, branch[-1])
                )

    def _turn(self, prompt: int, reuse: int, parents: tuple[int, ...]) -> Turn:
        output = max(1, round(self.kind.output_tokens.quantile(self.rng.random())))
        tools, gap_s, pause_s = self._gap(len(self.turns))
        return Turn(
            turn_id=f"t{len(self.turns)}",
            prompt_tokens=prompt,
            output_tokens=output,
            reuse_tokens=reuse,
            kept_output_tokens=self._kept(output),
            parents=parents,
            tools=tools,
            gap_s=gap_s,
            pause_s=pause_s,
        )

    def _kept(self, output: int) -> int:
        rows = self.description.kept_share
        if not rows:
            return output
        row = next((row for row in rows if output <= row.up_to_tokens), rows[-1])
        return min(output, max(0, round(output * row.share.quantile(self.more.random()))))

    def _gap(self, position: int) -> tuple[tuple[ToolCall, ...], float | None, float]:
        """The tools after the turn at `position`, or a gap without any, and a person's pause."""
        described = self.description
        edges = list(accumulate(tool.share for tool in described.tools))
        # the choice is spread evenly over programs, not positions
        share = (_start(described.name, self.seed, f"tool/{position}") + self.index * _TOOL_STEP) % 1.0
        tool = described.tools[_slot(edges, share)]
        seconds = max(0.0, round(tool.duration_s.quantile(self.rng.random()), 4))
        pause_s = 0.0
        if tool.pause_share and described.pause_s and self.more.random() < tool.pause_share:
            pause_s = max(0.0, round(described.pause_s.quantile(self.more.random()), 4))
        if not tool.name:
            return (), seconds, pause_s
        calls = [ToolCall(tool.name, seconds)]
        if described.tools_at_once is not None:
            for _ in range(round(described.tools_at_once.quantile(self.more.random())) - 1):
                beside = described.tools[_slot(edges, self.more.random())]
                part = described.side_share.quantile(self.more.random()) if described.side_share else 1.0
                calls.append(ToolCall(beside.name or tool.name, round(seconds * min(1.0, max(0.0, part)), 4)))
        return tuple(calls), None, pause_s

    def _new_shares(self, wanted: int) -> Iterator[float]:
        """Where, from 0 to 1 of all, the new tokens after each turn of a line lie."""
        order = self.description.order
        if not order:
            return iter(self.rng.random, None)
        shares = [self.more.random() for _ in range(wanted)]
        chance, sign = 1 - abs(order), math.copysign(1.0, -order)
        shares.sort(key=lambda share: chance * self.more.random() + abs(order) * sign * share)
        return iter(shares)

    def _next(self, turn: Turn, new_share: float) -> tuple[int, int]:
        """The prompt after a turn, and how much of it repeats that turn's prompt and kept output."""
        context = turn.prompt_tokens + turn.kept_output_tokens
        new = max(0, round(self.kind.new_tokens.quantile(new_share)))
        for number, rewrite in enumerate(self.description.rewrites):
            exposed = rewrite.from_tokens <= turn.prompt_tokens < rewrite.below_tokens
            if exposed and self.more.random() < rewrite.rate:
                return self._rewritten(turn, number)
        lost = 0
        if self.description.lost_tokens is not None:
            lost = max(0, round(self.description.lost_tokens.quantile(self.more.random())))
        reuse = max(context - lost, min(self.prefix_tokens, context))
        return max(1, reuse + new), reuse

    def _rewritten(self, turn: Turn, number: int) -> tuple[int, int]:
        """The prompt that takes the place of a turn's context, and what it repeats."""
        rewrite = self.description.rewrites[number]
        size = rewrite.size.quantile(self.more.random())
        reuse_share = rewrite.reuse.quantile(self.more.random())
        limit = max(turn.prompt_tokens, self.description.max_prompt_tokens)
        prompt = max(1, self.prefix_tokens, min(limit, round(turn.prompt_tokens * size)))
        context = turn.prompt_tokens + turn.kept_output_tokens
        return prompt, min(context, prompt, max(0, round(prompt * reuse_share)))


def _kind_and_length(description: Description, seed: int, index: int) -> tuple[Kind, int]:
    """Which kind of program comes `index`-th, and how many turns its main line has."""
    share = (_start(description.name, seed, "turns") + index * _TURNS_STEP) % 1.0
    edges = list(accumulate(kind.share for kind in description.kinds))
    chosen = _slot(edges, share)
    below = edges[chosen - 1] if chosen else 0.0
    inside = (share * edges[-1] - below) / description.kinds[chosen].share
    kind = description.kinds[chosen]
    return kind, max(1, round(kind.turns.quantile(inside)))


def _slot(edges: Sequence[float], share: float) -> int:
    """Which stretch of the running sums `edges` lies at `share` (0 to 1) of their whole."""
    return min(bisect_right(edges, share * edges[-1]), len(edges) - 1)


@lru_cache(maxsize=4096)
def _start(name: str, seed: int, stream: str) -> float:
    """Where, from 0 to 1, the evenly spread draws of a stream begin."""
    return random.Random(f"{name}/{seed}/{stream}").random()
