"""A real vLLM server on this machine's CPU, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import agentservesim
from agentservesim.config import EngineConfig, RunConfig
from agentservesim.errors import AgentServeSimError, InputError
from agentservesim.step_time.kv_pool import kv_pool_tokens

PLUG_IN = "agentservesim.live.vllm_plugin.LiveScheduler"
CPU_BLOCK = 32
"""vLLM's CPU attention needs a block size that is a multiple of it."""
LOG_LINES_SHOWN = 25
STREAM_INTERVAL = 10_000
"""Tokens between the first and the last come in chunks of so many: on a machine with few cores, streaming
each one would take the engine's time."""
_CAUSE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
START_S = 180.0
STOP_S = 10.0
LOOK_S = 0.25

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the model run in the engine's own process
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
}
"""One thread computes: a tiny model gains nothing from a second, and step times are steadier. With the model
in a process of its own, the engine's spins while it waits, and takes a second core from the API server."""


class ServerError(AgentServeSimError):
    """The vLLM server did not start, died, or answered an error; the message has the end of its log."""

    exit_code = 3


def vllm_python(given: str | None) -> str:
    """The Python that has vLLM: the one named, else the running one.

    Raises InputError, with how to get one, where there is none.
    """
    how = "scripts/install_vllm.sh VENV makes one: --vllm-python VENV/bin/python"
    if given is None:
        if importlib.util.find_spec("vllm") is None:
            raise InputError(f"this Python has no vLLM; {how}")
        return sys.executable
    try:
        found = subprocess.run(
            [given, "-c", "import vllm.version"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise InputError(f"--vllm-python {given}: cannot be run: {error}; {how}") from None
    if found.returncode:
        said = found.stderr.strip().splitlines()[-1:] or ["it fails"]
        raise InputError(f"--vllm-python {given}: has no vLLM ({said[0]}); {how}")
    return given


def check_cpu(config: RunConfig) -> None:
    """Raises InputError for an engine or cluster that vLLM on one CPU cannot be."""
    engine, cluster = config.engine, config.cluster
    if engine.block_size % CPU_BLOCK:
        raise InputError(
            f"engine.block_size is {engine.block_size}: expected a multiple of {CPU_BLOCK}, for vLLM on a CPU"
        )
    if engine.async_scheduling:
        raise InputError("engine.async_scheduling is true: expected false, for vLLM on a CPU is synchronous")
    for name, value in (("instances", cluster.instances), ("tp", cluster.tp)):
        if value != 1:
            raise InputError(f"cluster.{name} is {value}: expected 1, for one vLLM on a CPU")
    if cluster.kv_cache_tokens is None:
        raise InputError("cluster.kv_cache_tokens is missing: expected the KV pool that the real engine gets")
    if engine.max_model_len is None:
        raise InputError("engine.max_model_len is missing: expected the longest sequence, prompt and output")
    pool = kv_pool_tokens(cluster, engine).usable_blocks * engine.block_size
    if engine.max_model_len > pool:
        raise InputError(
            f"engine.max_model_len is {engine.max_model_len}: expected at most {pool}, the tokens that "
            f"cluster.kv_cache_tokens {cluster.kv_cache_tokens} leaves for a sequence, or vLLM does not start"
        )


def engine_options(config: RunConfig) -> list[str]:
    """A config's engine and pool as vLLM's command-line options."""
    engine = config.engine
    return [
        "--block-size", str(engine.block_size),
        "--num-gpu-blocks-override", str(kv_pool_tokens(config.cluster, engine).num_blocks),
        "--max-num-seqs", str(engine.max_num_seqs),
        "--max-num-batched-tokens", str(engine.max_num_batched_tokens),
        "--max-model-len", str(engine.max_model_len),
        "--long-prefill-token-threshold", str(engine.long_prefill_token_threshold),
        "--watermark", str(engine.watermark),
        *_switches(engine),
    ]  # fmt: skip


def _switches(engine: EngineConfig) -> list[str]:
    return [
        f"--{'' if on else 'no-'}{name}"
        for name, on in (
            ("enable-prefix-caching", engine.enable_prefix_caching),
            ("scheduler-reserve-full-isl", engine.scheduler_reserve_full_isl),
        )
    ]


class VllmServer:
    """Starts vLLM's OpenAI server in a process of its own, and ends it, with all its children, at the end.

    url     where it listens, once the block is entered
    log     the file that holds all it says
    """

    def __init__(
        self,
        python: str,
        model: Path,
        config: RunConfig,
        live: Mapping[str, Any],
        log: Path,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """
        python    a Python that has vLLM (vllm_python)
        model     the model's folder
        live      settings of the plug-in: policies and files (docs/live.md)
        on_wait   told now and then how many seconds the start has taken
        """
        check_cpu(config)
        self.log = log
        self.url = ""
        self._on_wait = on_wait
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--dtype", "bfloat16", "--enforce-eager",
            "--host", "127.0.0.1",
            *engine_options(config),
            "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
            "--stream-interval", str(STREAM_INTERVAL), "--distributed-executor-backend", "uni",
            "--scheduler-cls", PLUG_IN, "--additional-config", json.dumps({"agentservesim": dict(live)}),
        ]  # fmt: skip

    def __enter__(self) -> VllmServer:
        port = _free_port()
        source = str(Path(agentservesim.__file__).parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C is for us, and what it started is one group to end
            )
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: asked first, so that its logs are whole, then killed with all it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            _kill_group(process.pid)
            process.wait()

    def check_alive(self) -> None:
        """Raises ServerError if the server has died."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerError(f"vLLM ended with exit code {self._process.returncode}; {self._end_of_log()}")

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, as a fresh server has none. Raises ServerError where vLLM refuses."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except (urllib.error.URLError, OSError) as error:
            self.check_alive()
            raise ServerError(f"POST /reset_prefix_cache: {error}; {self._end_of_log()}") from None

    def _wait_until_healthy(self) -> None:
        started_s = time.monotonic()
        while True:
            self.check_alive()
            waited_s = time.monotonic() - started_s
            if waited_s > START_S:
                raise ServerError(f"vLLM did not start within {START_S:.0f} s; {self._end_of_log()}")
            if self._on_wait is not None:
                self._on_wait(waited_s)
            if _healthy(self.url):
                return
            time.sleep(LOOK_S)

    def _end_of_log(self) -> str:
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        # vLLM's processes tell of each other's ends; the first error is the cause.
        causes = [line for line in lines if _CAUSE.search(line) and "WARNING" not in line]
        shown = [*causes[:1], *lines[-LOG_LINES_SHOWN:]]
        where = f"the first error and the end of {self.log}" if causes else f"the end of {self.log}"
        return f"{where}:\n" + "\n".join(f"  {line}" for line in shown)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
