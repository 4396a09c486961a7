"""Finding a config and its workload by the name a user gives."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from agentservesim.config import RunConfig, load_config
from agentservesim.errors import InputError, nearest
from agentservesim.workload import BUNDLED

PREFIX = "examples/"


def bundled_configs() -> list[str]:
    """Names of the configs that come with the package."""
    folder = resources.files("agentservesim") / "examples"
    return sorted(
        PREFIX + entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def open_config(name: str, overrides: list[str], policies: dict[str, str | None]) -> RunConfig:
    """The config of that name, with --set and policy options applied.

    A relative workload path counts from the config's folder first, then from the working directory.
    """
    path = _find(name)
    chosen = {axis: spec for axis, spec in policies.items() if spec is not None}
    config = load_config(path, overrides)
    data: dict[str, Any] = {"policies": config.policies.model_copy(update=chosen)}
    source = config.workload.source
    if source not in BUNDLED and not Path(source).is_absolute() and (path.parent / source).exists():
        data["workload"] = config.workload.model_copy(update={"source": str(path.parent / source)})
    return config.model_copy(update=data)


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    bundled = bundled_configs()
    if name.removesuffix(".yaml") in bundled:
        return Path(str(resources.files("agentservesim") / (name.removesuffix(".yaml") + ".yaml")))
    what = "is a folder" if path.is_dir() else "no such file"
    raise InputError(
        f"config {name!r}: {what}{nearest(name, bundled)}; "
        f"expected a YAML file or one of {', '.join(bundled)}"
    )
