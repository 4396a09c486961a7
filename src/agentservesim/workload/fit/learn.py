"""From programs to the description they could have been drawn from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import PrefixGroup, Program
from agentservesim.workload.fit.order import with_mean_prompts
from agentservesim.workload.fit.tally import OTHER, Groups, Size, Tally
from agentservesim.workload.synthetic.description import (
    Description,
    KeptShare,
    Kind,
    Prefix,
    Rewrite,
    SubAgents,
    Tool,
)
from agentservesim.workload.synthetic.table import Table

NEAR_BOUND = 0.8
"""Contexts compacted from this share of the longest prompt on were compacted for want of room."""
KINDS = 4
"""Kinds of programs, by their number of turns."""
BANDS = 3
SEEN_A_BAND = 3
"""Rewrites are told apart by the context they met: so many bands, each of so many rewrites or more."""
UNBOUNDED = 1 << 41
TOOLS_KEPT = 30
PREFIXES_KEPT = 8


class Learned(msgspec.Struct, frozen=True):
    """A description, and in words what of the trace is not in it."""

    description: Description
    notes: list[str]


def learn(programs: Iterable[Program], name: str) -> Learned:
    """Learn a generator from all programs, which are read once and not kept.

    Prefix groups get new names, program and turn ids are forgotten, tools keep their names. Raises InputError
    for no programs, and what their iterator raises.
    """
    tally = Tally()
    for program in programs:
        tally.add(program)
    if not tally.programs:
        raise InputError("the workload holds no programs to fit: expected at least one")
    prompts = sum(size.prompt_tokens for size in tally.programs) / len(tally.programs)
    description = _description(tally, name)
    if tally.parent_prompts:
        description = with_mean_prompts(description, prompts)
    return Learned(description, _notes(tally))


def _description(tally: Tally, name: str) -> Description:
    shared = _shared(tally.prefixes)
    return Description(
        name=name,
        programs=len(tally.programs),
        kinds=_kinds(tally.programs, shared),
        tools=_tools(tally),
        max_prompt_tokens=_bound(tally),
        prefixes=_prefixes(tally.prefixes, shared, name),
        kept_share=_kept(tally.kept),
        lost_tokens=Table.of(tally.lost, 0) if any(tally.lost) else None,
        rewrites=tuple(_rewrites(tally)),
        tools_at_once=Table.of(tally.at_once, 0) if max(tally.at_once, default=1) > 1 else None,
        side_share=Table.of(tally.side_shares) if tally.side_shares else None,
        pause_s=Table.of(tally.pause_s) if tally.pause_s else None,
        sub_agents=_sub_agents(tally),
    )


def _bound(tally: Tally) -> int:
    """A bound on prompts that the trace kept to by compacting, with room for the last addition; without one,
    room for unlucky draws."""
    compacted = max((prompt for prompt, _, _ in tally.compactions), default=0)
    return round(tally.longest * (1.25 if compacted >= NEAR_BOUND * tally.longest else 2))


def _kinds(programs: list[Size], shared: list[Groups]) -> tuple[Kind, ...]:
    """Up to KINDS kinds with as many programs each, from the shortest programs to the longest."""
    ordered = sorted(programs, key=lambda size: len(size.output_tokens))
    number = min(KINDS, len(ordered))
    edges = [len(ordered) * part // number for part in range(number + 1)]
    everywhere = [new for size in programs for new in size.new_tokens] or [1]
    kinds = []
    for low, high in pairwise(edges):
        part = ordered[low:high]
        kinds.append(
            Kind(
                turns=Table.of([size.turns for size in part]),
                task_tokens=Table.of([_task_tokens(size, shared) for size in part]),
                new_tokens=Table.of([new for size in part for new in size.new_tokens] or everywhere),
                output_tokens=Table.of([out for size in part for out in size.output_tokens]),
                share=len(part) / len(ordered),
                sub_agents=Table.of([size.sub_agents for size in part])
                if any(size.sub_agents for size in part)
                else None,
            )
        )
    return tuple(kinds)


def _task_tokens(size: Size, shared: list[Groups]) -> int:
    """What the first prompt adds to a prefix that the fit keeps."""
    return size.first_prompt - sum(group.tokens for group in _beginning(size.prefix, shared))


def _tools(tally: Tally) -> tuple[Tool, ...]:
    """The mix, by falling share; what is rarer than the TOOLS_KEPT most frequent is one tool together."""
    frequent = sorted((name for name in tally.gaps if name), key=lambda name: (-len(tally.gaps[name]), name))
    kept = {"", *frequent[:TOOLS_KEPT]}
    gaps: dict[str, list[float]] = defaultdict(list)
    pauses: Counter[str] = Counter()
    for name, seconds in tally.gaps.items():
        gaps[name if name in kept else OTHER] += seconds
        pauses[name if name in kept else OTHER] += tally.pauses[name]
    total = sum(map(len, gaps.values()))
    if not total:
        return (Tool("", 1.0, Table.of([0.0])),)
    return tuple(
        Tool(name, len(gaps[name]) / total, Table.of(gaps[name]), pauses[name] / len(gaps[name]))
        for name in sorted(gaps, key=lambda name: (-len(gaps[name]), name))
    )


def _kept(pairs: list[tuple[int, int]]) -> tuple[KeptShare, ...]:
    """By the length of the output, in three parts: long outputs are often reasoning, which is dropped."""
    if all(kept == output for output, kept in pairs):
        return ()
    written = sorted(pair for pair in pairs if pair[0])
    limits = sorted({written[int(len(written) * share)][0] for share in (0.5, 0.9)} | {written[-1][0]})
    rows, low = [], 0
    for limit in limits:
        part = [kept / output for output, kept in written if low < output <= limit]
        if part:
            rows.append(KeptShare(limit, Table.of(part)))
        low = limit
    return tuple(rows)


def _rewrites(tally: Tally) -> Iterator[Rewrite]:
    """Compactions, then other rewrites, each by the length of the context they met, the longest first."""
    for seen in (tally.compactions, tally.rewrites):
        ordered = sorted(seen)
        bands = min(BANDS, max(1, len(ordered) // SEEN_A_BAND)) if ordered else 0
        below = UNBOUNDED
        for band in reversed(range(bands)):
            part = ordered[len(ordered) * band // bands : len(ordered) * (band + 1) // bands]
            lowest = part[0][0]
            exposed = sum(lowest <= prompt < below for prompt in tally.parent_prompts)
            if lowest < below:
                yield Rewrite(
                    rate=min(1.0, len(part) / max(1, exposed)),
                    from_tokens=lowest,
                    below_tokens=below,
                    size=Table.of([size for _, size, _ in part]),
                    reuse=Table.of([reuse for _, _, reuse in part]),
                )
            below = lowest


def _shared(seen: Counter[Groups]) -> list[Groups]:
    """The beginnings of prefixes that save most where programs share them, the longest first; of a single
    program, its prefix."""
    if seen.total() == 1:
        return [groups for groups in seen if groups]
    users: Counter[Groups] = Counter()
    for groups, number in seen.items():
        for length in range(1, len(groups) + 1):
            users[groups[:length]] += number
    saved = {groups: number * groups[-1].tokens for groups, number in users.items() if number > 1}
    best = sorted(saved, key=lambda groups: (-saved[groups], len(groups)))[:PREFIXES_KEPT]
    return sorted(best, key=len, reverse=True)


def _beginning(groups: Groups, shared: list[Groups]) -> Groups:
    """What of a program's prefix the fit keeps."""
    return next((start for start in shared if groups[: len(start)] == start), ())


def _prefixes(seen: Counter[Groups], shared: list[Groups], name: str) -> tuple[Prefix, ...]:
    names: dict[str, str] = {}
    kept: Counter[Groups] = Counter()
    for groups, number in seen.items():
        kept[_beginning(groups, shared)] += number
    rows = []
    for groups, number in kept.most_common():
        if groups:
            for group in groups:
                names.setdefault(group.id, f"{name}/prefix-{len(names) + 1}")
            renamed = tuple(PrefixGroup(names[group.id], group.tokens) for group in groups)
            rows.append(Prefix(number / seen.total(), renamed))
    return tuple(rows)


def _sub_agents(tally: Tally) -> SubAgents | None:
    if not tally.agent_turns:
        return None
    branches = len(tally.agent_turns)
    return SubAgents(
        turns=Table.of(tally.agent_turns),
        task_tokens=Table.of(tally.agent_tasks or [0]),
        fresh_share=len(tally.agent_tasks) / branches,
        join_share=tally.agents_joined / branches,
    )


def _cut_short(seen: Counter[Groups]) -> int:
    """How many programs lose some of their prefix."""
    shared = _shared(seen)
    return sum(number for groups, number in seen.items() if groups != _beginning(groups, shared))


_LIMITS: tuple[tuple[Callable[[Tally], int], str], ...] = (
    (
        lambda t: t.untimed,
        "gaps after tools without a time: learned as 0 s; the transform draw_tool_times gives them times",
    ),
    (lambda t: t.delays, "turns that wait on their own (delay_s): their waits are not in the fit"),
    (lambda t: max(0, len(t.gaps) - TOOLS_KEPT), "rare tools: learned as one, named other"),
    (
        lambda t: _cut_short(t.prefixes),
        f"programs with more prefix than the {PREFIXES_KEPT} most shared: the rest is learned as not shared",
    ),
)


def _notes(tally: Tally) -> list[str]:
    return [f"{number} × {words}" for count, words in _LIMITS if (number := count(tally))]
