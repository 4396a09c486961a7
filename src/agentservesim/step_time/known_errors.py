"""How far each back end was from real engines wherever that was measured: docs/fidelity.md as a table.

`run` and `compare` print the entry that fits, and say so where none does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agentservesim.config import RunConfig
from agentservesim.step_time.hardware import gpu
from agentservesim.step_time.models import Model, model


class KnownError(NamedTuple):
    """A measured error of mean call latency, which is mean JCT where tools take no time.

    backend     the name in the config
    gpu         the GPU it was measured on
    experts     whether the models were mixtures of experts
    typical     median |error| of the runs, as a share; of a single run, the error, but no
                less than 2 %, for one run cannot promise more
    high        90th percentile over 20 runs and more, else the largest; of a single run, the largest of its
                mean TTFT, TPOT and latency
    runs        how many
    what        what was compared, with the section of docs/fidelity.md that says how
    """

    backend: str
    gpu: str
    experts: bool
    typical: float
    high: float
    runs: int
    what: str


_SHAREGPT = "Llama-3.1-8B on 300 ShareGPT requests, vLLM 0.19"
_SILICON = "aiconfigurator's closed loops"

KNOWN: tuple[KnownError, ...] = (
    KnownError("tables", "rtx_pro_6000_server", False, 0.02, 0.02, 1, _SHAREGPT),
    KnownError("tables", "rtx_4090", False, 0.02, 0.015, 1, _SHAREGPT),
    KnownError("measured", "rtx_pro_6000_server", False, 0.128, 0.224, 1, _SHAREGPT),
    KnownError("roofline", "rtx_4090", False, 0.068, 0.078, 1, _SHAREGPT),
    KnownError("measured", "h100_sxm", False, 0.019, 0.054, 10, "Llama-2-7B and CodeLlama-34B, bf16"),
    KnownError("measured", "h200_sxm", False, 0.044, 0.115, 25, f"Llama-3.1-70B in fp8, {_SILICON}"),
    KnownError(
        "measured", "b200_sxm", False, 0.073, 0.231, 57, f"Llama-3.1-70B in fp8 and nvfp4, {_SILICON}"
    ),
    KnownError(
        "measured", "h200_sxm", True, 0.333, 1.267, 51, f"MiniMax-M2.5 and Qwen3-235B in fp8, {_SILICON}"
    ),
    KnownError("measured", "b200_sxm", True, 0.131, 0.237, 109, f"MiniMax-M2.5 in fp8 and nvfp4, {_SILICON}"),
    KnownError("measured", "b300_sxm", True, 0.149, 0.225, 19, f"MiniMax-M2.5 in nvfp4, {_SILICON}"),
)
"""One entry a back end, GPU and kind of model."""

RATIO_ERRORS = {"measured": 0.04, "roofline": 0.04, "tables": 0.04}
"""By back end: how far the ratio of two policies' mean JCT moves when step times are wrong as KNOWN says,
away from the load at which a queue begins to grow. docs/fidelity.md, "Differences between policies"."""


class ExpectedError(NamedTuple):
    """What is known about the error of a config's results.

    jct_mean      typical |error| of mean JCT, as a share; None: nothing was measured that is like it
    ratio         |error| of the ratio of two policies' mean JCT; None: not known
    words         both, in a line
    """

    jct_mean: float | None
    ratio: float | None
    words: str

    def as_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return self._asdict()


def expected_error(config: RunConfig, backend: str) -> ExpectedError:
    """The known error of `backend`, the one that ran, for the config's GPU and kind of model."""
    chip, spec = gpu(config.cluster.gpu).name, model(config.cluster.model)
    ratio = RATIO_ERRORS.get(backend)
    if backend == "linear":
        return ExpectedError(None, ratio, "the error of given coefficients is whatever theirs is")
    found = next(
        (k for k in KNOWN if k.backend == backend and k.gpu == chip and k.experts == _moe(spec)), None
    )
    if found is None:
        return ExpectedError(
            None,
            ratio,
            f"not known: no real run of such a model on {chip} was compared with the {backend} back end "
            "(docs/fidelity.md says which were)",
        )
    most = (
        f"in nine of ten at most {_percent(found.high)}"
        if found.runs >= 20
        else f"at most {_percent(found.high)}"
    )
    of = (
        f"{found.runs} runs, {most}"
        if found.runs > 1
        else f"one run, the worst of TTFT, TPOT and latency {_percent(found.high)}"
    )
    return ExpectedError(
        found.typical,
        ratio,
        f"mean JCT ±{_percent(found.typical)} ({backend} back end on {chip}: {found.what}; {of})",
    )


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"


def _moe(spec: Model) -> bool:
    return spec.experts > 0
