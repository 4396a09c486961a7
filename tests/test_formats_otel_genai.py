"""OpenTelemetry GenAI spans: who waits for whom, tokens with and without usage, both spellings."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentservesim.errors import InputError
from agentservesim.programs.program import Program, ToolCall
from agentservesim.workload.formats import otel_genai, read_programs
from agentservesim.workload.report import ReadingReport

SAMPLES = {  # programs, calls, prompt tokens, output tokens, reuse
    "code_review_workflow": (1, 15, 5_591, 4_548, 0),
    "customer_support_escalation": (1, 9, 1_065, 528, 380),
    "fan_in_dependencies": (1, 4, 217, 241, 52),
    "multi_agent_research": (1, 12, 1_565, 1_356, 0),
    "parallel_requests": (1, 5, 441, 203, 327),
    "prefix_sharing_example": (4, 7, 1_065, 280, 730),
    "simple_chain": (1, 3, 187, 133, 160),
    "simple_chain_alt": (1, 3, 187, 133, 160),
    "software_architecture_review": (1, 15, 3_339, 1_764, 1_501),
}


def read(path: Path, report: ReadingReport | None = None, lenient: bool = False) -> list[Program]:
    return list(read_programs(path, report or ReadingReport(), lenient=lenient))


def tokens(text: str) -> int:
    return -(-len(text.encode()) // 4)


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def plain(span: dict[str, Any]) -> tuple[list[str], str, int, int]:
    """Messages, answer, prompt tokens and output tokens of a span, in a few lines."""
    a = span["attributes"]
    asked = [message["content"] for message in json.loads(a["gen_ai.input.messages"])]
    if "gen_ai.output.text" in a:
        said = a["gen_ai.output.text"]
        return asked, said, sum(map(tokens, asked)), tokens(said)
    said = json.loads(a["gen_ai.output.messages"])[0]["content"]
    return asked, said, a["gen_ai.usage.prompt_tokens"], a["gen_ai.usage.completion_tokens"]


@pytest.mark.data
@pytest.mark.parametrize("name", SAMPLES)
def test_totals_and_recorded_starts(name: str, data_dir: Path) -> None:
    path = data_dir / f"traces/otel_genai/{name}.json"
    spans = json.loads(path.read_text())["spans"]
    programs = read(path)
    turns = [turn for program in programs for turn in program.turns]
    assert {program.program_id for program in programs} == {span["trace_id"] for span in spans}
    assert (
        len(programs),
        len(turns),
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.output_tokens for turn in turns),
        sum(turn.reuse_tokens for turn in turns),
    ) == SAMPLES[name]
    assert len(spans) == len(turns)
    of_span = {(span["trace_id"], span["span_id"]): span for span in spans}
    origin = min(seconds(span["start_time"]) for span in spans)
    for program in programs:
        ends: list[float] = []
        for turn in program.turns:
            span = of_span[program.program_id, turn.turn_id]
            asked, _, prompt, output = plain(span)
            assert (turn.prompt_tokens, turn.output_tokens) == (prompt, output)
            start = max(
                (ends[parent] + program.turns[parent].wait_s() for parent in turn.parents), default=0.0
            )
            start += turn.delay_s
            assert start + (program.arrival_s or 0.0) == pytest.approx(seconds(span["start_time"]) - origin)
            ends.append(start + seconds(span["end_time"]) - seconds(span["start_time"]))
            if turn.parents:
                before = program.turns[turn.parents[0]]
                had, said, _, _ = plain(of_span[program.program_id, before.turn_id])
                if asked[: len(had) + 1] == [*had, said]:
                    assert turn.reuse_tokens == before.prompt_tokens + before.output_tokens


def shape(path: Path) -> dict[str, list[str]]:
    (program,) = read(path)
    names = [turn.turn_id[:8] for turn in program.turns]
    return {name: [names[p] for p in turn.parents] for name, turn in zip(names, program.turns, strict=True)}


@pytest.mark.data
def test_forks_and_joins_of_the_samples(data_dir: Path) -> None:
    folder = data_dir / "traces/otel_genai"
    assert shape(folder / "fan_in_dependencies.json") == {
        "span_001": [],
        "span_002": ["span_001"],
        "span_003": ["span_001"],
        "span_004": ["span_001", "span_002", "span_003"],
    }
    assert shape(folder / "parallel_requests.json")["span_004"] == ["span_002", "span_003"]
    research = shape(folder / "multi_agent_research.json")
    assert research["span_005"] == ["span_002", "span_003", "span_004"]
    assert research["span_006"] == ["span_005"] and research["span_009"] == ["span_006"]
    assert shape(folder / "simple_chain.json") == {
        "capital_": [],
        "landmark": ["capital_"],
        "eiffel_t": ["landmark"],
    }


def span(name: str, start: float, end: float, operation: str = "chat", **more: Any) -> dict[str, Any]:
    """A flat span; keywords with __ are attributes: usage__input_tokens."""
    given = {f"gen_ai.{key.replace('__', '.')}": value for key, value in more.items() if key != "parent"}
    if operation == "chat" and not any("usage" in key for key in given):
        given |= {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 10}
    return {
        "trace_id": "t",
        "span_id": name,
        "parent_span_id": more.get("parent"),
        "name": f"{operation} x",
        "start_time": f"2026-01-01T00:00:{start:09.6f}Z",
        "end_time": f"2026-01-01T00:00:{end:09.6f}Z",
        "attributes": {"gen_ai.operation.name": operation, **given},
    }


def write(path: Path, *spans: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"spans": spans}, indent=1))
    return path


def parents(program: Program) -> dict[str, tuple[str, ...]]:
    names = [turn.turn_id for turn in program.turns]
    return {turn.turn_id: tuple(names[parent] for parent in turn.parents) for turn in program.turns}


def test_a_sub_agent_forks_and_what_follows_waits_for_it(tmp_path: Path) -> None:
    spans = [
        span("m1", 0, 1),
        span("agent", 2, 9, "invoke_agent"),
        span("s1", 2, 4, parent="agent"),
        span("s2", 5, 9, parent="agent"),
        span("m2", 1.5, 3),  # the parent goes on beside it
        span("m3", 6, 7),
        span("m4", 10, 11),
    ]
    (program,) = read(write(tmp_path / "o.json", *spans))
    found = parents(program)
    assert found["s1"] == ("m1",) and found["s2"] == ("s1",)
    assert found["m2"] == ("m1",) and found["m3"] == ("m2",)  # not s1: its agent runs on
    assert set(found["m4"]) == {"s2", "m3"}


def test_tools_are_named_timed_and_side_by_side(tmp_path: Path) -> None:
    spans = [
        span("early", 0, 0.5, "execute_tool", tool__name="early"),
        span("c1", 1, 2),
        span("a", 2, 5, "execute_tool", tool__name="grep"),
        span("b", 2, 3, "execute_tool", tool__name="read"),
        span("c2", 5.5, 6),
        span("embed", 7, 8, "embeddings"),
    ]
    report = ReadingReport()
    (program,) = read(write(tmp_path / "o.json", *spans), report)
    assert program.turns[0].tools == (ToolCall("grep", 3.0), ToolCall("read", 1.0))
    assert program.turns[0].gap_s == pytest.approx(3.5)
    assert report.dropped == {otel_genai.LOOSE_TOOL: 1, otel_genai.OTHER: 1}


def test_old_and_new_names_and_calls_without_numbers(tmp_path: Path) -> None:
    spans = [
        span("old", 0, 1, usage__prompt_tokens=7, usage__completion_tokens=2),
        span("numbered", 2, 3, prompt__0__role="user", prompt__0__content="x" * 40, usage__x=0),
        span("nothing", 4, 5, usage__x=0),
        span(
            "cached", 6, 7, usage__input_tokens=3, usage__output_tokens=1, usage__cache_read__input_tokens=90
        ),
    ]
    report = ReadingReport()
    (program,) = read(write(tmp_path / "o.json", *spans), report)
    assert [turn.prompt_tokens for turn in program.turns] == [7, 10, 93]
    assert report.dropped == {otel_genai.NO_TOKENS: 1}
    assert report.estimated == {otel_genai.ESTIMATED: 1}
    assert report.inferred == {otel_genai.CACHE_ADDED: 1, otel_genai.REUSE_INFERRED: 2}


def test_a_trace_without_calls_is_counted(tmp_path: Path) -> None:
    report = ReadingReport()
    lonely = {**span("tool", 0, 1, "execute_tool"), "trace_id": "u"}
    (program,) = read(write(tmp_path / "o.json", lonely, span("a", 5, 6)), report)
    assert (program.program_id, program.arrival_s) == ("t", 0.0)
    assert report.dropped == {otel_genai.ONE_TRACE: 1}


def otlp(flat: dict[str, Any]) -> dict[str, Any]:
    """The same span as OTLP-JSON writes it."""

    def value(given: Any) -> dict[str, Any]:
        return {"intValue": str(given)} if isinstance(given, int) else {"stringValue": given}

    return {
        "traceId": flat["trace_id"],
        "spanId": flat["span_id"],
        "parentSpanId": flat["parent_span_id"] or "",
        "name": flat["name"],
        "startTimeUnixNano": str(int(seconds(flat["start_time"])) * 10**9),
        "endTimeUnixNano": str(int(seconds(flat["end_time"])) * 10**9),
        "attributes": [{"key": key, "value": value(given)} for key, given in flat["attributes"].items()],
    }


def test_otlp_flat_lists_and_lines_are_the_same(tmp_path: Path) -> None:
    spans = [span("a", 0, 1), span("b", 2, 4), span("c", 3, 5), span("d", 6, 7)]
    expected = read(write(tmp_path / "flat.json", *spans))
    wrapped = {"resourceSpans": [{"scopeSpans": [{"spans": [otlp(each) for each in spans]}]}]}
    (tmp_path / "otlp.json").write_text(json.dumps(wrapped, indent=2))
    batches = [{"resourceSpans": [{"scopeSpans": [{"spans": [otlp(each)]}]}]} for each in reversed(spans)]
    (tmp_path / "otlp.jsonl").write_text("".join(json.dumps(batch) + "\n" for batch in batches))
    (tmp_path / "list.json").write_text(json.dumps(spans))
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in spans))
    for name in ("otlp.json", "otlp.jsonl", "list.json", "lines.jsonl"):
        assert read(tmp_path / name) == expected, name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start_time": None}, r"spans\[1\].start_time is missing: expected a time"),
        ({"start_time": "soon"}, r"spans\[1\].start_time is 'soon': expected a time"),
        ({"end_time": -4.0}, r"spans\[1\].end_time is -4.0: expected seconds since 1970"),
        ({"startTimeUnixNano": "x"}, r"spans\[1\].start_timeUnixNano is 'x': expected nanoseconds"),
        ({"trace_id": None}, r"spans\[1\].trace_id is missing"),
        ({"attributes": 3}, r"spans\[1\].attributes is 3: expected an object or a list"),
        ({"attributes": [7]}, r"spans\[1\].attributes\[0\] is 7: expected a key and a value"),
        (
            {"attributes": {"gen_ai.usage.input_tokens": "many"}},
            r"spans\[1\].attributes\['gen_ai.usage.input_tokens'\] is 'many': expected a whole number",
        ),
    ],
)
def test_a_wrong_span_is_named_or_counted(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "o.json", span("a", 0, 1), {**span("b", 2, 3), **change})
    with pytest.raises(InputError, match=f"o.json:1: {says}"):
        read(path)
    report = ReadingReport()
    (program,) = read(path, report, lenient=True)
    assert len(program.turns) == 1 and report.dropped == {"malformed spans": 1}


TIMES = st.tuples(st.integers(0, 40), st.integers(0, 15), st.sampled_from(("", "agent", "tool")))


@given(st.lists(TIMES, min_size=1, max_size=14))
def test_any_tree_replays_its_starts(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int, str]]
) -> None:
    """With the recorded durations every call starts when it was recorded to; a program is never lost."""
    owners = [
        span("agent", 5, 30, "invoke_agent"),
        span("tool", 10, 25, "execute_tool", parent="agent"),
    ]
    calls = [
        span(f"c{number}", start, start + length, parent=parent)
        for number, (start, length, parent) in enumerate(times)
    ]
    path = write(tmp_path_factory.mktemp("o") / "o.json", *owners, *calls)
    (program,) = read(path)
    assert len(program.turns) == len(calls)
    origin = min(start for start, _, _ in times)
    ends: list[float] = []
    for turn in program.turns:
        start_s, length_s, _ = times[int(turn.turn_id[1:])]
        ready = max((ends[parent] + program.turns[parent].wait_s() for parent in turn.parents), default=0.0)
        assert ready + turn.delay_s == pytest.approx(start_s - origin)
        ends.append(ready + turn.delay_s + length_s)
