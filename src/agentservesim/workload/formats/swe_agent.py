"""SWE-agent trajectories (.traj): one JSON document a run.

The file has what was said, seldom how many tokens: only `info.model_stats` gives totals of a run. Tokens of
each call are estimated from its text and scaled so that the totals hold. A call's prompt is `query` where a
step has it, else the history up to the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall, Turn
from agentservesim.workload.formats._commands import command_name
from agentservesim.workload.formats._decode import Seconds, Tokens
from agentservesim.workload.formats._growth import kept_output
from agentservesim.workload.formats._messages import (
    Message,
    message,
    message_of,
    shared_messages,
    tokens_of,
)
from agentservesim.workload.formats._source import Head, Source
from agentservesim.workload.formats._text_tokens import scale_to_total
from agentservesim.workload.report import ReadingReport

NAME = "swe-agent"
LOOKS_LIKE = '{"trajectory": [{"action": …, "observation": …}], "history": […], "info": …} (.traj)'
SCALED = "tokens of a call: estimated from its text, scaled so that the totals of the run hold"
ESTIMATED = "tokens of a call: estimated from its text at 4 bytes a token, as the run has no totals"
NO_TOOL_TIME = "tool times not recorded: 0 s"
NO_ANSWER = "steps without an answer of the model"
NOT_LISTED = "model calls that are not in the trajectory: their tokens are with the others"


class _Step(msgspec.Struct):
    action: str | None = None
    observation: Any = None
    response: str | None = None
    thought: str | None = None
    execution_time: Seconds | None = None
    query: list[Any] | None = None


class _Said(msgspec.Struct):
    role: str
    content: Any = None
    action: str | None = None
    tool_calls: Any = None
    is_demo: bool | None = None


class _Stats(msgspec.Struct):
    tokens_sent: Tokens | None = None
    tokens_received: Tokens | None = None
    api_calls: Tokens | None = None


class _Info(msgspec.Struct):
    model_stats: _Stats | None = None


class _Trajectory(msgspec.Struct):
    trajectory: list[_Step] = []
    history: list[_Said] = []
    info: _Info | None = None


_DECODER = msgspec.json.Decoder(_Trajectory)


class _Call(NamedTuple):
    """A model call: its prompt and answer as messages, and the command that followed."""

    prompt: Sequence[Message]
    answer: Message
    action: str | None
    execution_s: float | None


def recognises(head: Head) -> bool:
    """Whether a file is in this format."""
    parts = head.keys & {"trajectory", "history"}
    return bool(parts) and '"action"' in head.text


def read(source: Source, report: ReadingReport) -> Iterator[Program]:
    """The one program of a file.

    Raises InputError naming file, line, field, value and expectation.
    """
    place, run = source.document(_DECODER)
    calls = _calls(run, report)
    if not calls:
        raise InputError(f"{place}: trajectory and history hold no answer of a model: expected at least one")
    stats = (run.info or _Info()).model_stats or _Stats()
    yield Program(source.stem, _turns(calls, stats, report))


# --- calls -----------------------------------------------------------------------------------------------


def _calls(run: _Trajectory, report: ReadingReport) -> list[_Call]:
    steps = [step for step in run.trajectory if step.response or step.thought]
    if len(steps) < len(run.trajectory):
        report.dropped[NO_ANSWER] += len(run.trajectory) - len(steps)
    answers = [index for index, said in enumerate(run.history) if _is_answer(said)]
    if steps and (len(answers) != len(steps) or all(step.query for step in steps)):
        return _from_steps(steps, run.history[: answers[0] if answers else None])
    history = [message(said.role, said.content, said.tool_calls) for said in run.history]
    return [
        _Call(
            history[:index],
            history[index],
            (steps[number].action if steps else None) or run.history[index].action,
            steps[number].execution_time if steps else None,
        )
        for number, index in enumerate(answers)
    ]


def _is_answer(said: _Said) -> bool:
    return said.role == "assistant" and not said.is_demo


def _from_steps(steps: Sequence[_Step], before: Sequence[_Said]) -> list[_Call]:
    """Calls of steps whose history is missing or does not fit: what was said adds up."""
    said = [message(item.role, item.content, item.tool_calls) for item in before]
    calls = []
    for step in steps:
        answer = message("assistant", step.response or step.thought)
        prompt = [message_of(item) for item in step.query] if step.query else list(said)
        calls.append(_Call(prompt, answer, step.action, step.execution_time))
        said += [answer, message("user", step.observation)]
    return calls


# --- turns -----------------------------------------------------------------------------------------------


def _turns(calls: Sequence[_Call], stats: _Stats, report: ReadingReport) -> tuple[Turn, ...]:
    prompts, outputs = _tokens(calls, stats, report)
    turns: list[Turn] = []
    for index, call in enumerate(calls):
        growth = prompts[index + 1] - prompts[index] if index + 1 < len(calls) else None
        if call.action and call.execution_s is None:
            report.inferred[NO_TOOL_TIME] += 1
        tool = (ToolCall(command_name(call.action), call.execution_s or 0.0),) if call.action else ()
        turns.append(
            Turn(
                turn_id=f"t{index}",
                prompt_tokens=prompts[index],
                output_tokens=outputs[index],
                reuse_tokens=_reuse(calls[index - 1], call, turns[-1], prompts[index]) if index else 0,
                kept_output_tokens=kept_output(outputs[index], None, growth, report),
                parents=(index - 1,) if index else (),
                tools=tool,
                gap_s=call.execution_s,
            )
        )
    return tuple(turns)


def _tokens(calls: Sequence[_Call], stats: _Stats, report: ReadingReport) -> tuple[list[int], list[int]]:
    """Prompt and output tokens of every call."""
    prompts = [max(1, tokens_of(call.prompt)) for call in calls]
    outputs = [call.answer.tokens for call in calls]
    scaled = False
    if (stats.tokens_sent or 0) >= len(calls):
        prompts, scaled = [max(1, share) for share in scale_to_total(prompts, stats.tokens_sent or 0)], True
    if stats.tokens_received:
        outputs, scaled = scale_to_total(outputs, stats.tokens_received), True
    if scaled and (stats.api_calls or 0) > len(calls):
        report.inferred[NOT_LISTED] += (stats.api_calls or 0) - len(calls)
    report.estimated[SCALED if scaled else ESTIMATED] += len(calls)
    return prompts, outputs


def _reuse(before: _Call, call: _Call, turn: Turn, prompt: int) -> int:
    """What a prompt repeats of the call before: all of it, or the messages up to the first that differs."""
    limit = min(turn.prompt_tokens + turn.kept_output_tokens, prompt)
    same = shared_messages((*before.prompt, before.answer), call.prompt)
    if same > len(before.prompt):
        return limit
    whole = max(1, tokens_of(before.prompt))
    return min(limit, turn.prompt_tokens * tokens_of(before.prompt[:same]) // whole)
