from __future__ import annotations

from agentservesim.policies.interface import PCB, KVView, Protect


class EvolvedGapEma:
    """Found by the paper's search: protect for a learnt gap of the tool, longer for long contexts.

    The estimate of a tool is the exponential mean of the gaps observed after it, over all programs: the
    first observation, then ema_old * estimate + (1 - ema_old) * observed. Calls without a tool share one
    estimate. An unseen tool takes the program's own mean gap, else unseen_gap_s. The estimate is scaled by
    max(0.5, context_tokens / scale_context_tokens) and, "less under KV pressure" read as in pressure-ttl,
    by 1 - 0.5 clip((u - soft) / (hard - soft), 0, 1).

    ema_old                weight of the old estimate, in [0, 1)
    scale_context_tokens   the context, in tokens, that is protected for just the estimate
    unseen_gap_s           seconds assumed where nothing is known
    soft, hard             KV utilisation, in [0, 1], where the shortening starts and where it is complete
    """

    def __init__(
        self,
        ema_old: float = 0.8,
        scale_context_tokens: int = 20_000,
        unseen_gap_s: float = 2.0,
        soft: float = 0.7,
        hard: float = 0.9,
    ) -> None:
        if not 0 <= ema_old < 1:
            raise ValueError(f"ema_old must be at least 0 and below 1, not {ema_old}")
        if not scale_context_tokens > 0:
            raise ValueError(f"scale_context_tokens must be above 0 tokens, not {scale_context_tokens}")
        if not unseen_gap_s > 0:
            raise ValueError(f"unseen_gap_s must be above 0 seconds, not {unseen_gap_s}")
        if not 0 <= soft < hard <= 1:
            raise ValueError(f"soft and hard must satisfy 0 <= soft < hard <= 1, not {soft} and {hard}")
        self.ema_old = ema_old
        self.scale_context_tokens = scale_context_tokens
        self.unseen_gap_s = unseen_gap_s
        self.soft = soft
        self.hard = hard
        self._estimate_s: dict[str | None, float] = {}

    def on_call_complete(self, pcb: PCB, now_s: float, kv: KVView) -> Protect:
        gap_s = self._estimate_s.get(pcb.tool_name)
        if gap_s is None:
            gap_s = pcb.gap_mean_s if pcb.gap_mean_s is not None else self.unseen_gap_s
        scale = max(0.5, pcb.context_tokens / self.scale_context_tokens)
        pressure = min(max((kv.utilization - self.soft) / (self.hard - self.soft), 0.0), 1.0)
        return Protect(now_s + gap_s * scale * (1 - 0.5 * pressure))

    def on_call_arrival(self, pcb: PCB, now_s: float, kv: KVView) -> None:
        """Learn the gap that ends; what is protected stays so."""
        if pcb.gap_started_s is None:
            return
        observed_s = now_s - pcb.gap_started_s
        old_s = self._estimate_s.get(pcb.tool_name, observed_s)
        self._estimate_s[pcb.tool_name] = self.ema_old * old_s + (1 - self.ema_old) * observed_s
