"""Times for tools of traces that did not record any."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.report import ReadingReport
from agentservesim.workload.synthetic.distributions import LogNormal, Marginal
from agentservesim.workload.synthetic.swebench_like import SWEBENCH_LIKE
from agentservesim.workload.transforms.spec import Seed

OTHER = "other"
_SAME_AS = {"find": "grep", "rg": "grep", "head": "cat", "tail": "cat", "python3": "python", "pip3": "pip"}

DRAWN = "tool times: drawn by command"
DRAWN_OTHER = "tool times: drawn as for other commands, as the table has no row for this one"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that half, and 99 of 100, of a command's runs stay below."""

    p50: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    p99: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


def draw_tool_times(
    stream: Iterator[Program],
    report: ReadingReport,
    *,
    seed: Seed = 0,
    table: dict[str, Row] | None = None,
) -> Iterator[Program]:
    """Give times to the tools of turns that have tools, all of 0 s, and no recorded gap.

    table   quantiles by command, log-normal between; the row `other` is for commands without one. By default
            the commands of examples/swebench-like, and for others the same as for grep and cat

    Raises InputError for a row whose p99 is below its p50.
    """
    times = _bundled()
    if table is not None:
        times = {name: _law(name, row) for name, row in table.items()}
    for program in stream:
        rng = random.Random(f"tool-times/{seed}/{program.program_id}")
        turns = tuple(_timed(turn, times, rng, report) for turn in program.turns)
        yield msgspec.structs.replace(program, turns=turns)


def _timed(turn: Turn, times: dict[str, Marginal], rng: random.Random, report: ReadingReport) -> Turn:
    if turn.gap_s is not None or not turn.tools or any(tool.duration_s for tool in turn.tools):
        return turn
    tools = []
    for tool in turn.tools:
        law = times.get(tool.name)
        share = rng.random()
        if law is None:
            law = times.get(OTHER)
            if law is None:
                tools.append(tool)
                continue
            report.estimated[DRAWN_OTHER] += 1
        else:
            report.estimated[DRAWN] += 1
        tools.append(ToolCall(tool.name, round(law.quantile(share), 4)))
    return msgspec.structs.replace(turn, tools=tuple(tools))


def _bundled() -> dict[str, Marginal]:
    times: dict[str, Marginal] = {tool.name: tool.duration_s for tool in SWEBENCH_LIKE.tools}
    times.update({name: times[like] for name, like in _SAME_AS.items()})
    times[OTHER] = times["grep"]
    return times


def _law(name: str, row: Row) -> LogNormal:
    if row.p99 < row.p50:
        raise InputError(
            f"transform draw_tool_times: table.{name}.p99 is {row.p99}: expected at least its p50, {row.p50}"
        )
    return LogNormal.from_p99(row.p50, row.p99)
