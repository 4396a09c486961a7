#!/usr/bin/env bash
# Installs the pinned real vLLM (CPU) with this project and its test tools into a virtual environment.
# usage: scripts/install_vllm.sh VENV        Creates VENV where it is missing; does nothing where all is in place.
# PYTHON names the interpreter that creates VENV; the pins are for Python 3.11.
set -euo pipefail

venv=${1:?usage: scripts/install_vllm.sh VENV}
root=$(cd "$(dirname "$0")/.." && pwd)
pins=$root/requirements/vllm.txt

in_place() {
    "$venv/bin/python" - "$pins" "$root" <<'PY'
import json
import sys
from importlib import metadata
from pathlib import Path

pins, root = Path(sys.argv[1]), Path(sys.argv[2])
wanted = dict(line.split("==") for line in pins.read_text().split() if "==" in line)
for name, version in wanted.items():
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        sys.exit(f"{name} {version} is missing")
    if found != version and found.partition("+")[0] != version:  # torch may carry a local +cpu
        sys.exit(f"{name} is {found}, not {version}")
for name in ("agentservesim", "pytest", "hypothesis"):
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        sys.exit(f"{name} is missing")
    if name == "agentservesim":
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("url") != root.as_uri():
            sys.exit("agentservesim is not this checkout")
PY
}

if [ ! -x "$venv/bin/python" ]; then
    python=${PYTHON:-$(command -v python3.11 || command -v python3)}
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "install_vllm: Python 3.11 is needed")'
    "$python" -m venv "$venv"
fi
if reason=$(in_place 2>&1); then
    echo "install_vllm: $venv is up to date"
    exit 0
fi
echo "install_vllm: installing into $venv ($reason)"
"$venv/bin/python" -m pip install --quiet --no-deps --requirement "$pins"
"$venv/bin/python" -m pip install --quiet --constraint "$pins" --editable "$root" pytest hypothesis
if ! reason=$(in_place 2>&1); then
    echo "install_vllm: $venv is still not as pinned: $reason" >&2
    exit 1
fi
echo "install_vllm: done"
