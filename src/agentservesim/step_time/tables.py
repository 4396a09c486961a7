"""Step time from a folder of measured operators, as LLMServingSim's profiler writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agentservesim.errors import InputError
from agentservesim.step_time.all_reduce import all_reduce
from agentservesim.step_time.decode_line import LinedStepTime, SecondsLine
from agentservesim.step_time.energy import power_model
from agentservesim.step_time.hardware import Gpu
from agentservesim.step_time.interface import Spread
from agentservesim.step_time.interpolation import Curve, Grid, add, segment
from agentservesim.step_time.models import Model
from agentservesim.step_time.roofline import IDEAL, Roofline
from agentservesim.step_time.skew import Skew
from agentservesim.step_time.table_files import facts, rows, tp_folder

_ONCE = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)
_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class _Piece(NamedTuple):
    """Microseconds of decode attention in a layer, base + slope * context, where low <= context < high."""

    base: float
    slope: float
    low: float
    high: float


class TablesStepTime(LinedStepTime):
    """A step put together from tables, microseconds for one layer on one GPU.

    seconds = layers * (attention + operators of a layer at T tokens + experts + 2 all-reduces)
            + operators once a step at T tokens + operators a sequence at S sequences

    dense.csv         layer, tokens: every name counts once a layer; layernorm twice; embedding and
                      final_layernorm once a step
    per_sequence.csv  layer, sequences: once a step, for the sequences of the batch
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode (mean): one kernel serves all of a batch
    moe.csv           tokens, activated_experts: routed experts, once a layer; only for mixtures of experts
    skew_fit.csv      what unequal decode contexts add (skew.py); without the file,
                      or where meta.yaml says `skew_fit: {enabled: false}`, nothing

    Linear between measured points and beyond the last. Several prefill chunks count as one with all
    their tokens, over as much of a cached prefix as gives the same pairs of query and key. All-reduces are
    not in the tables: all_reduce.py has them.
    """

    backend = "tables"
    notice: str | None = None

    def __init__(self, path: Path, gpu: Gpu, model: Model, tp: int, max_num_batched_tokens: int) -> None:
        """Raises InputError for a folder, file, column, row or number that is missing or wrong."""
        super().__init__(power_model(gpu, tp), max_num_batched_tokens)
        folder = tp_folder(path, tp)
        self._layers = model.layers
        self._ideal = Roofline(gpu, model, tp, IDEAL)
        self._dense = _operators(folder / "dense.csv", "tokens", model.layers)
        self._sequences = _operators(folder / "per_sequence.csv", "sequences", None)
        self._grid = _attention(folder / "attention.csv")
        self._decode_grid = _decode_only(folder / "attention.csv", self._grid)
        self._experts = _experts(folder, model)
        self._reached = model.experts, model.experts_per_token
        self._skew = _skew(folder)
        self.uses_spread = self._skew is not None
        self._reduce = all_reduce(gpu, tp) if tp > 1 else None
        self._reduce_bytes = model.hidden * model.dtype_bytes
        self._shared: dict[int, float] = {}
        self.source = _source(folder, model, gpu, tp, self._skew is not None)
        if self._reduce is not None:
            self.source += f"; all-reduce: {self._reduce.source}"

    def _seconds_line(self, decodes: int, decode_context_tokens: int, spread: Spread | None) -> SecondsLine:
        tokens = decode_context_tokens
        mean = self._decode_piece(decodes, tokens / decodes)
        base, slope = mean.base, mean.slope
        start, end = decodes * mean.low, decodes * mean.high
        if self._skew is not None and spread is not None and spread[0] < spread[1]:
            shortest, longest = spread
            above = decodes * longest - tokens
            rate = (tokens - decodes * shortest) / (decodes * (longest - shortest))
            alpha = self._skew.alpha(0, decodes, rate, longest, 0)
            top = self._decode_piece(decodes, longest)
            base += alpha * (top.base + top.slope * (above / decodes) - mean.base)
            slope += alpha * (top.slope - mean.slope)
            start = max(start, decodes * top.low - above)
            end = min(end, decodes * top.high - above)
            for edge in self._skew.context_edges:
                if longest <= edge:
                    end = min(end, decodes * edge - above + 1)
                    break
                start = max(start, decodes * edge - above + 1)
        base = (self._shared_us(decodes) + self._sequences(decodes) + self._layers * base) * 1e-6
        in_grid = decodes <= self._most_tokens and mean.high <= self._longest_context(decodes)
        return SecondsLine(base, self._layers * slope / decodes * 1e-6, start, end, in_grid)

    def _roofline_line(self, decodes: int) -> tuple[float, float]:
        return self._ideal.decode_line(decodes)

    def _mixed(
        self,
        prefills: Sequence[tuple[int, int]],
        decodes: int,
        decode_context_tokens: int,
        spread: Spread | None,
    ) -> tuple[float, float, bool]:
        chunk, cached, saved = self._one_chunk(prefills)
        mean = decode_context_tokens / decodes if decodes else 0.0
        attention = self._grid(chunk, cached, decodes, mean)
        if self._skew is not None and spread is not None and spread[0] < spread[1]:
            shortest, longest = spread
            rate = (decode_context_tokens - decodes * shortest) / (decodes * (longest - shortest))
            alpha = self._skew.alpha(chunk, decodes, rate, longest, cached)
            attention += alpha * (self._grid(chunk, cached, decodes, longest) - attention)
        tokens, sequences = decodes + chunk, decodes + len(prefills)
        seconds = (
            self._shared_us(tokens) + self._sequences(sequences) + self._layers * max(attention - saved, 0.0)
        ) * 1e-6
        in_grid = (
            tokens <= self._most_tokens
            and sequences <= self._sequences.xs[-1]
            and self._grid.covers(chunk, cached, decodes, mean)
        )
        return seconds, self._ideal.seconds(prefills, decodes, decode_context_tokens), in_grid

    def _one_chunk(self, prefills: Sequence[tuple[int, int]]) -> tuple[int, float, float]:
        """Tokens and cached prefix of the one chunk that stands for all, and the microseconds by which it
        takes too long: chunks that begin prompts have fewer pairs than one chunk with all their tokens."""
        if len(prefills) == 1:
            return (*prefills[0], 0.0)
        chunk = sum(new for new, _ in prefills)
        pairs = sum(new * done + new * new / 2 for new, done in prefills)
        cached = pairs / chunk - chunk / 2
        if cached >= 0:
            return chunk, cached, 0.0
        alike = 2 * pairs / chunk  # so long is each of chunk / alike equal chunks with as many pairs
        whole = self._grid(chunk, 0, 0, 0)
        parts = chunk / alike * self._grid(alike, 0, 0, 0)
        return chunk, 0.0, max(whole - parts, 0.0)

    def _shared_us(self, tokens: int) -> float:
        """All that depends on the number of tokens alone: products, norms, experts, all-reduces."""
        cached = self._shared.get(tokens)
        if cached is not None:
            return cached
        total = self._dense(tokens)
        if self._experts is not None:
            experts, visited = self._reached
            reached = experts * (1 - (1 - visited / experts) ** tokens)
            total += self._layers * self._experts(tokens, reached)
        if self._reduce is not None:
            total += 2 * self._layers * self._reduce.seconds(tokens * self._reduce_bytes) * 1e6
        self._shared[tokens] = total
        return total

    @property
    def _most_tokens(self) -> float:
        return self._dense.xs[-1]

    def _longest_context(self, decodes: int) -> float:
        """Longest mean context that lies inside the tables for a batch that only decodes; 0: none does."""
        if not self._decode_grid.xs[0] <= decodes <= self._decode_grid.xs[-1]:
            return 0.0
        return min(part.xs[-1] for part in self._decode_grid.around(decodes))

    def _decode_piece(self, decodes: int, context: float) -> _Piece:
        """The straight piece of decode attention that `context` lies on."""
        sizes, curves = self._decode_grid.xs, self._decode_grid.below
        at = segment(sizes, decodes)
        low = _piece(curves[at], context)
        if sizes[at] == decodes or len(sizes) == 1:
            return low
        high = _piece(curves[at + 1], context)
        weight = (decodes - sizes[at]) / (sizes[at + 1] - sizes[at])
        return _Piece(
            low.base + (high.base - low.base) * weight,
            low.slope + (high.slope - low.slope) * weight,
            max(low.low, high.low),
            min(low.high, high.high),
        )


def _piece(curve: Curve | Grid, context: float) -> _Piece:
    assert isinstance(curve, Curve)
    return _Piece(*curve.piece(context))


def _operators(file: Path, key: str, layers: int | None) -> Curve:
    """Microseconds of a whole step against `key`: every operator's curve, as often as a step runs it.
    `layers` None: once."""
    points: dict[str, dict[float, list[float]]] = {}
    for row in rows(file, ("layer",), (key, "time_us")):
        points.setdefault(row["layer"], {}).setdefault(row[key], []).append(row["time_us"])
    curves = []
    for name, measured in points.items():
        times = 1 if layers is None or name in _ONCE else layers * (2 if name in _TWICE_A_LAYER else 1)
        curves.append(Curve((x, times * _mean(repeats)) for x, repeats in measured.items()))
    return add(curves)


def _attention(file: Path) -> Grid:
    points: dict[tuple[float, ...], list[float]] = {}
    kernels = set()
    for row in rows(file, (), (*_AXES, "time_us")):
        kernels.add(row.get("layer"))
        if float(row.get("decode_q_len") or 1) == 1:  # more belong to speculative decoding
            points.setdefault(tuple(row[axis] for axis in _AXES), []).append(row["time_us"])
    if len(kernels) > 1:
        names = ", ".join(map(str, sorted(map(str, kernels))))
        raise InputError(f"{file}: column 'layer' has {names}: only one kind of attention is modelled")
    return Grid({point: _mean(repeats) for point, repeats in points.items()})


def _decode_only(file: Path, grid: Grid) -> Grid:
    """The part of the attention grid without a prefill chunk."""
    if grid.xs[0] != 0 or len(grid.xs) == 1:
        raise InputError(
            f"{file}: column 'prefill_chunk' is never {'0' if grid.xs[0] else 'above 0'}: "
            "expected steps with a chunk and steps that only decode"
        )
    part = grid.below[0]
    assert isinstance(part, Grid)
    part = part.below[0]
    assert isinstance(part, Grid)
    return part


def _experts(folder: Path, model: Model) -> Grid | None:
    file = folder / "moe.csv"
    if not model.experts:
        if file.is_file():
            raise InputError(f"{file}: cluster.model {model.name} has no experts; expected no moe.csv")
        return None
    points: dict[tuple[float, ...], list[float]] = {}
    for row in rows(file, (), ("tokens", "activated_experts", "time_us")):
        if float(row.get("ep") or 1) == 1:  # more: experts spread over GPUs instead of split
            points.setdefault((row["tokens"], row["activated_experts"]), []).append(row["time_us"])
    if not points:
        raise InputError(f"{file}: column 'ep' is never 1: only experts split over all GPUs are modelled")
    return Grid({point: _mean(repeats) for point, repeats in points.items()})


def _skew(folder: Path) -> Skew | None:
    """The skew table, unless there is none or meta.yaml says not to use it."""
    file = folder / "skew_fit.csv"
    fit = facts(folder.parent / "meta.yaml").get("skew_fit")
    enabled = not isinstance(fit, dict) or fit.get("enabled", True)
    return Skew(file) if enabled and file.is_file() else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _source(folder: Path, model: Model, gpu: Gpu, tp: int, skew: bool) -> str:
    """What the tables say of themselves."""
    meta = facts(folder.parent / "meta.yaml")
    measured = f"{meta.get('model', model.name)} on {meta.get('gpu', gpu.name)}"
    version = f", vLLM {meta['vllm_version']}" if "vllm_version" in meta else ""
    return f"tables {folder}: {measured}{version}, tp {tp}{'' if skew else ', without a skew table'}"
