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
    models      a sentence's end: what was measured, "Llama-2-7B and CodeLlama-34B"
    experts     whether those are mixtures of experts
    typical     median |error| of the runs, as a share
    worst       the largest of them
    runs        how many
    how         what was compared, with the section of docs/fidelity.md
    """

    backend: str
    gpu: str
    models: str
    experts: bool
    typical: float
    worst: float
    runs: int
    how: str


KNOWN: tuple[KnownError, ...] = ()

RATIO_ERRORS: dict[str, float] = {}
"""By back end: how far the ratio of two policies' mean JCT moves when the step times are wrong by what KNOWN
says. docs/fidelity.md, "Differences between policies"."""


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
    return ExpectedError(
        found.typical,
        ratio,
        f"mean JCT ±{found.typical * 100:.2g} % ({backend} back end on {chip}: {found.how}, {found.models}; "
        f"at most {found.worst * 100:.2g} % over {found.runs} runs)",
    )


def _moe(spec: Model) -> bool:
    return spec.experts > 0
