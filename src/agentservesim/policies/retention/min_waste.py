from __future__ import annotations

from agentservesim.policies.interface import PCB, Decision, Evict, KVView, Protect


class MinWaste:
    """InferCept's rule: protect for the expected gap if that wastes no more KV than recomputing, else evict.

    Both wastes are token-seconds of KV memory. Keeping holds the context for the gap. Evicting has the
    context prefilled again: its own growing KV lies unfinished, and the running calls wait meanwhile.
    The expected gap is the tool's mean; without one, the program's own mean gap; without that too there
    is nothing to weigh and the KV is left to plain LRU. The waste saved is the entry's value.
    """

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Decision | None:
        gap_s = pcb.tool_mean_gap_s if pcb.tool_mean_gap_s is not None else pcb.gap_mean_s
        if gap_s is None:
            return None
        saved = recompute_waste(pcb.context_tokens, kv) - gap_s * pcb.context_tokens
        return Protect(now_s + gap_s, value=saved) if saved >= 0 else Evict()


def recompute_waste(context_tokens: int, kv: KVView) -> float:
    """Token-seconds wasted when an evicted context is prefilled again, a chunk a step.

    A step has room for `chunk` more tokens before its time starts to grow, so the context takes
    `full_chunks` whole chunks and `last` tokens.
    """
    a, c, knee = kv.prefill.slope_s_per_token, kv.prefill.base_s, kv.prefill.knee_tokens
    chunk = max(knee - kv.in_flight_tokens, 1)
    full_chunks = max(-(-context_tokens // chunk) - 1, 0)
    last = context_tokens - full_chunks * chunk
    own = (a * knee + c) * (1 + full_chunks) * (full_chunks / 2) * chunk
    others = a * chunk * full_chunks * kv.running_context_tokens + a * last * kv.running_context_tokens
    return own + others
