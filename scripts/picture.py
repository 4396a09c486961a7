"""Draws docs/compare.svg: what `make demo` shows.

python scripts/picture.py
"""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from agentservesim.cli import compare

POLICIES = {
    "retention": "lru,pressure-ttl,tool-ttl",
    "scheduling": "fcfs,plas,continuum",
    "admission": None,
    "routing": None,
}
COMMAND = "agentservesim compare examples/rtx-pro-6000-70b-tp2 --retention lru,… --scheduling fcfs,…"


def main() -> None:
    screen = Console(record=True, width=128, file=StringIO(), highlight=False)
    compare.console = lambda: screen  # type: ignore[assignment]
    compare.compare_command("examples/rtx-pro-6000-70b-tp2", [], POLICIES, False)
    svg = screen.export_svg(title=COMMAND)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a picture that fetches no fonts
    (Path(__file__).parents[1] / "docs/compare.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
