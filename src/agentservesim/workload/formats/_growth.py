"""What a prompt repeats of the one before it, where only counts are known."""

from __future__ import annotations

from agentservesim.workload.report import ReadingReport

REWRITE = 0.6
"""A prompt below this share of the one before is a rewritten context; smaller losses are count drift."""

REUSE_INFERRED = "reuse: the whole prompt and kept output before, as the context grows"
REWRITTEN = "reuse after a rewritten context: what the provider's cache then hit, a lower bound"
KEPT_INFERRED = "kept output: the next prompt grew by less than the output"
REASONING_CLAMPED = "reasoning tokens, down to the output tokens"


def kept_output(output: int, reasoning: int | None, growth: int | None, report: ReadingReport) -> int:
    """The output tokens that return into the context, reasoning left out.

    `growth` is how much longer the next prompt is; it bounds what returned where reasoning is not known.
    """
    if reasoning is not None:
        if reasoning > output:
            report.clamped[REASONING_CLAMPED] += 1
        return max(0, output - reasoning)
    if growth is not None and 0 < growth < output:
        report.inferred[KEPT_INFERRED] += 1
        return growth
    return output


def reused(before: int, kept: int, prompt: int, cached: int | None, report: ReadingReport) -> int:
    """The leading tokens of `prompt` that repeat the prompt `before` and its kept output.

    `cached` is what the provider's cache hit: no more than a lower bound, and only asked after a rewrite.
    """
    limit = min(before + kept, prompt)
    if prompt < REWRITE * before:
        report.inferred[REWRITTEN] += 1
        return min(limit, cached or 0)
    report.inferred[REUSE_INFERRED] += 1
    return limit
