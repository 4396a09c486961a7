"""Serves a load with vLLM's own schedulers and engine loop, without a model, and records what they do."""

from __future__ import annotations

import json
import os
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import msgspec
import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from .loads import Engine, Load, tokens_of
from .recording import Step, Submission, Trial, number_of, request_id

VERSION = vllm.__version__
HASH = "sha256"

# The smallest model vLLM's configuration accepts. It is never loaded: no weights and no tokenizer exist.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}


class Recorded:
    """Writes down what a scheduler of vLLM does, one Step for each schedule().

    Its output names the preempted as a set, and the order matters here. What finishes before the next
    schedule() belongs to the Step of the last one.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps: list[Step] = []
        self.submitted = 0
        self.preempted: list[int] = []
        self.finished: list[int] = []

    def add_request(self, request):
        self.submitted += 1
        super().add_request(request)

    def schedule(self, *args, **kwargs):
        running = {request.request_id for request in self.running}
        self.preempted = []
        output = super().schedule(*args, **kwargs)
        assert set(self.preempted) == {number_of(request) for request in output.preempted_req_ids or ()}
        batch = output.num_scheduled_tokens
        self.steps.append(
            Step(
                submitted=self.submitted,
                batch=tuple((number_of(request), tokens) for request, tokens in batch.items()),
                preempted=tuple(self.preempted),
                hits=tuple(
                    (number_of(request), self.requests[request].num_computed_tokens - tokens)
                    for request, tokens in batch.items()
                    if request not in running
                ),
                free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
                finished=(),
            )
        )
        return output

    def update_from_output(self, *args, **kwargs):
        self.finished = []
        outputs = super().update_from_output(*args, **kwargs)
        last = self.steps[-1]
        self.steps[-1] = msgspec.structs.replace(last, finished=(*last.finished, *self.finished))
        return outputs

    def _preempt_request(self, request, *args, **kwargs):
        self.preempted.append(number_of(request.request_id))
        return super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request, *args, **kwargs):
        self.finished.append(number_of(request.request_id))
        return super()._free_request(request, *args, **kwargs)


class RecordedScheduler(Recorded, Scheduler):
    """vLLM's scheduler."""


class RecordedAsyncScheduler(Recorded, AsyncScheduler):
    """vLLM's scheduler for asynchronous scheduling."""


class Executor:
    """Stands for the model: gives the tokens that are known in advance, when vLLM asks for them."""

    def __init__(self, scheduler: Recorded) -> None:
        self.texts: list[int] = []  # of each request, what it is going to say
        self._scheduler = scheduler
        self._tokens: ModelRunnerOutput | None = None

    def execute_model(self, output: SchedulerOutput, non_block: bool) -> Future:
        self._tokens = self._sample(output)
        return _done(None if output.num_scheduled_tokens else self._tokens)

    def sample_tokens(self, grammar: None, non_block: bool = False) -> Future | ModelRunnerOutput | None:
        tokens, self._tokens = self._tokens, None
        return _done(tokens) if non_block else tokens

    def _sample(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each request whose whole sequence is computed by this step."""
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self._scheduler.requests[name]
            at = request.num_computed_tokens - request.num_prompt_tokens
            text = self.texts[number_of(name)]
            sampled.append([] if request.is_prefill_chunk else tokens_of(((text, at, at + 1),)))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def _done(result: ModelRunnerOutput | None) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


class Core(EngineCore):
    """vLLM's engine loop: its `step` and `step_with_batch_queue` run as they are; nothing else is used."""

    def __init__(self, scheduler: Recorded) -> None:
        self.scheduler = scheduler
        self.model_executor = Executor(scheduler)
        self.vllm_config = scheduler.vllm_config
        self.batch_queue_size = self.vllm_config.max_concurrent_batches
        self.batch_queue = deque(maxlen=self.batch_queue_size) if self.batch_queue_size > 1 else None
        self.step_fn = self.step if self.batch_queue is None else self.step_with_batch_queue
        self.aborts_queue = queue.Queue()
        self.is_mm_encoder_only = self.is_pooling_model = self.log_stats = False
        self._weight_version = None

    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.batch_queue)


def make_config(engine: Engine, additional_config: dict[str, object] | None = None) -> VllmConfig:
    """vLLM's configuration for an engine without a model."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=engine.max_model_len
        )
    cache = CacheConfig(
        block_size=engine.block_size,
        enable_prefix_caching=engine.enable_prefix_caching,
        prefix_caching_hash_algo=HASH,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        additional_config=additional_config or {},
        scheduler_config=SchedulerConfig(
            max_model_len=engine.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            policy=engine.policy,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
            watermark=engine.watermark,
            scheduler_reserve_full_isl=engine.scheduler_reserve_full_isl,
            async_scheduling=engine.async_scheduling,
        ),
    )
    cache.num_gpu_blocks = engine.num_blocks
    config.scheduler_config.async_scheduling = engine.async_scheduling  # vLLM turns it off on a CPU
    return config


def make_scheduler(
    engine: Engine, scheduler_class: type[Scheduler], additional_config: dict[str, object] | None = None
) -> Scheduler:
    """A scheduler of vLLM, or of a class derived from one, for an engine without a model."""
    config = make_config(engine, additional_config)
    layer = FullAttentionSpec(block_size=engine.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=engine.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=engine.block_size,
    )
    # vLLM may adjust what it is given; a load must run under exactly its own parameters.
    got, cache = config.scheduler_config, config.cache_config
    assert (cache.block_size, cache.enable_prefix_caching) == (
        engine.block_size,
        engine.enable_prefix_caching,
    )
    assert scheduler.max_model_len == engine.max_model_len
    assert got.max_num_seqs == engine.max_num_seqs
    assert got.max_num_batched_tokens == scheduler.max_num_scheduled_tokens == engine.max_num_batched_tokens
    assert got.long_prefill_token_threshold == engine.long_prefill_token_threshold
    assert not got.long_prefill_token_threshold_adaptive
    assert issubclass(scheduler_class, got.get_scheduler_cls())
    assert config.max_concurrent_batches == (2 if engine.async_scheduling else 1)
    return scheduler


def make_recorded(engine: Engine) -> Recorded:
    """vLLM's scheduler, recorded."""
    return make_scheduler(engine, RecordedAsyncScheduler if engine.async_scheduling else RecordedScheduler)


def run(
    load: Load, seed: int = -1, max_steps: int = 100_000, make: Callable[[Engine], Recorded] | None = None
) -> Trial:
    """Serve `load` to its end with vLLM, or with the scheduler that `make` gives."""
    engine = load.engine
    scheduler = (make or make_recorded)(engine)
    core = Core(scheduler)
    hash_function = get_hash_fn_by_name(HASH)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(engine.block_size, hash_function)

    due: dict[int, int] = {i: call.gap for i, call in enumerate(load.calls) if call.after is None}
    following: dict[int, list[int]] = {}
    for i, call in enumerate(load.calls):
        if call.after is not None:
            following.setdefault(call.after, []).append(i)
    submitted: list[int] = []  # request number -> call
    submissions: list[Submission] = []
    steps = scheduler.steps
    now = 0
    while due or core.busy():
        assert len(steps) < max_steps, "the load does not end"
        # A step may be empty: nobody is left, every last token is in flight, or the first running request
        # makes way for itself.
        assert len(steps) < 5 or any(step.batch for step in steps[-5:]), "nothing is scheduled"
        if not core.busy():
            now = max(now, min(due.values()))  # idle until the next submission
        for i in sorted(i for i, at in due.items() if at <= now):
            del due[i]
            call = load.calls[i]
            arrival_s = now * 0.01 + (0 if load.same_arrival else len(submitted) * 1e-6)
            scheduler.add_request(
                Request(
                    request_id=request_id(len(submitted)),
                    prompt_token_ids=tokens_of(call.prompt),
                    sampling_params=SamplingParams(max_tokens=call.max_tokens, ignore_eos=True),
                    pooling_params=None,
                    arrival_time=arrival_s,
                    priority=call.priority,
                    block_hasher=hasher if engine.enable_prefix_caching else None,
                )
            )
            submissions.append(
                Submission(call.prompt, call.output, call.max_tokens, call.priority, arrival_s)
            )
            submitted.append(i)
            core.model_executor.texts.append(call.output)

        scheduled = len(steps)
        scheduler.finished = []
        core.step_fn()
        now += len(steps) - scheduled
        for request in scheduler.finished:
            for i in following.pop(submitted[request], ()):
                due[i] = now - 1 + load.calls[i].gap
    return Trial(seed, engine, tuple(submissions), tuple(steps))
