# Everything a newcomer needs: `make demo`, `make test`. Each target sets up what it uses.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm

.PHONY: demo test test-slow test-vllm bench lint clean help

help:            ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

demo: $(VENV)/ready  ## compare policies on a bundled workload
	@$(BIN)/agentservesim compare examples/rtx-pro-6000-70b-tp2 \
	    --retention lru,pressure-ttl,tool-ttl --scheduling fcfs,plas,continuum

test: $(VENV)/ready  ## the tests
	$(BIN)/python -m pytest -m "not slow and not vllm"

test-slow: $(VENV)/ready  ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not vllm"

test-vllm:       ## compare every step with the real scheduler of vLLM (downloads about 3 GB once)
	bash scripts/install_vllm.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pytest -m vllm -s tests/parity

bench: $(VENV)/ready  ## calls a second, memory: one JSON line a cell
	$(BIN)/python benchmarks/cells.py

lint: $(VENV)/ready  ## style and types
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/ruff format --check src tests scripts benchmarks
	$(BIN)/mypy src

$(VENV)/ready: pyproject.toml requirements/lock.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "AgentServeSim needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements/lock.txt -e '.[test]'
	@touch $@

clean:           ## remove what the targets have set up
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
