"""vLLM's engine in this process with a real model, for one run after another.

The model is a tiny Llama with random weights; it computes for real, and its steps take what they take.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from agentservesim.live.tiny_model import Sizes, make_model
from agentservesim.live.vllm_plugin import LiveScheduler

SIZES = Sizes(hidden_size=64, layers=1, heads=2, kv_heads=1, intermediate_size=128, vocab_size=2048)
OPTIONS: dict[str, Any] = {
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
}
NUM_BLOCKS = 80


class ModelEngine:
    """An engine core of vLLM; `scheduler(settings)` gives it a fresh scheduler of the plug-in."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # a model this small only loses by sharing its work
        make_model(folder, SIZES)
        config = EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            num_gpu_blocks_override=NUM_BLOCKS,
            enforce_eager=True,
            disable_log_stats=True,
            **OPTIONS,
        ).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler: Any = self._core.scheduler

    def scheduler(self, settings: dict[str, Any]) -> LiveScheduler:
        self._flush()
        config = self._core.vllm_config
        config.additional_config = {"agentservesim": settings}
        config.scheduler_config.policy = "fcfs"
        self._scheduler = LiveScheduler(
            vllm_config=config,
            kv_cache_config=self._core.scheduler.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=OPTIONS["block_size"],
        )
        return self._scheduler

    def execute(self, output: Any) -> tuple[float, ModelRunnerOutput]:
        """Run a step of the model: (seconds, its output)."""
        started = time.perf_counter()
        executor = self._core.model_executor
        answer = executor.execute_model(output, non_block=True).result()
        if answer is None:
            answer = executor.sample_tokens(None)
        return time.perf_counter() - started, answer

    def _flush(self) -> None:
        """The model runner hears of the last finished requests with the next step; here there is none."""
        self.execute(self._scheduler.schedule())
