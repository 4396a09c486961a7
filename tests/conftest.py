"""Fixtures every test may use."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time: a change turns red for what it does, not for what was drawn.
settings.register_profile("agentservesim", derandomize=True, deadline=None)
settings.load_profile("agentservesim")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real traces and measurements: AGENTSERVESIM_DATA. Skipped without it, but not in CI."""
    name = os.environ.get("AGENTSERVESIM_DATA")
    if name and Path(name).is_dir():
        return Path(name)
    problem = f"AGENTSERVESIM_DATA is {name!r}, expected the folder of shared traces and measurements"
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)
