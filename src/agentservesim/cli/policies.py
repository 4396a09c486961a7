"""`agentservesim policies`: what there is to choose from."""

from __future__ import annotations

import json
import sys

from agentservesim.cli.tables import console
from agentservesim.policies import registry


def policies_command(json_output: bool) -> None:
    """List the policies of every axis."""
    if json_output:
        listing = {
            axis: [
                {
                    "name": info.name,
                    "rule": info.summary,
                    "parameters": [list(map(str, parameter)) for parameter in info.parameters],
                    "source": info.source,
                }
                for info in registry.available(axis)
            ]
            for axis in registry.AXES
        }
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
        return
    from rich.table import Table

    screen = console()
    for axis in registry.AXES:
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            title=axis,
            title_justify="left",
            title_style="bold",
        )
        table.add_column("name", no_wrap=True, style="cyan", min_width=18)
        table.add_column("rule", max_width=70)
        table.add_column("parameters", max_width=40)
        for info in registry.available(axis):
            parameters = ", ".join(f"{name}={default}" for name, _, default in info.parameters)
            table.add_row(info.name, info.summary, parameters)
        screen.print(table)
        screen.print()
    screen.print(
        "Parameters: ttl:tau_s=5,until=admission. Your own: ./mine.py:Mine (see docs/policies.md).",
        style="dim",
    )
