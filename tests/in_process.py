"""The command line in this process: a fraction of what a process of its own takes."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from agentservesim.cli.main import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the command line. An error that is not meant for the user fails the test."""

    def run(*arguments) -> Done:
        monkeypatch.setattr(sys, "argv", ["agentservesim", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return run
