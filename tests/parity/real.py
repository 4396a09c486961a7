"""Serves a load with vLLM's own Scheduler, without a model, and records what it does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
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


class OrderedScheduler(Scheduler):
    """vLLM's scheduler; its output names the preempted as a set, and the order matters here."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.preempted: list[str] = []

    def _preempt_request(self, request, *args, **kwargs):
        self.preempted.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)


def make_scheduler(engine: Engine) -> OrderedScheduler:
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
        ),
    )
    cache.num_gpu_blocks = engine.num_blocks
    layer = FullAttentionSpec(block_size=engine.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = OrderedScheduler(
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
    got = config.scheduler_config
    assert (cache.block_size, cache.enable_prefix_caching) == (
        engine.block_size,
        engine.enable_prefix_caching,
    )
    assert scheduler.max_model_len == engine.max_model_len
    assert got.max_num_seqs == engine.max_num_seqs
    assert got.max_num_batched_tokens == scheduler.max_num_scheduled_tokens == engine.max_num_batched_tokens
    assert got.long_prefill_token_threshold == engine.long_prefill_token_threshold
    assert not got.long_prefill_token_threshold_adaptive
    return scheduler


def run(load: Load, seed: int = -1, max_steps: int = 100_000) -> Trial:
    """Serve `load` to its end with vLLM."""
    engine = load.engine
    scheduler = make_scheduler(engine)
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
    steps: list[Step] = []
    now = empty = 0
    while due or scheduler.get_num_unfinished_requests():
        assert len(steps) < max_steps, "the load does not end"
        if not scheduler.get_num_unfinished_requests():
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

        running = {request.request_id for request in scheduler.running}
        output = scheduler.schedule()
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        batch = output.num_scheduled_tokens
        # A step may be empty: the first running request can be the one that makes way for itself.
        empty = 0 if batch else empty + 1
        assert empty < 5, "nothing is scheduled though requests wait"
        assert set(scheduler.preempted) == set(output.preempted_req_ids or ())
        admitted = {
            request: scheduler.requests[request].num_computed_tokens - tokens
            for request, tokens in batch.items()
            if request not in running
        }
        scheduler.update_from_output(
            output, _sample(output, scheduler, [load.calls[i].output for i in submitted])
        )
        finished = [request for request in batch if request not in scheduler.requests]
        steps.append(
            Step(
                submitted=len(submitted),
                batch=tuple((number_of(request), tokens) for request, tokens in batch.items()),
                preempted=tuple(number_of(request) for request in scheduler.preempted),
                hits=tuple((number_of(request), hit) for request, hit in admitted.items()),
                free_blocks=free_blocks,
                finished=tuple(number_of(request) for request in finished),
            )
        )
        scheduler.preempted.clear()
        now += 1
        for request in finished:
            for i in following.pop(submitted[number_of(request)], ()):
                due[i] = now - 1 + load.calls[i].gap
    return Trial(seed, engine, tuple(submissions), tuple(steps))


def _sample(output: SchedulerOutput, scheduler: Scheduler, texts: list[int]) -> ModelRunnerOutput:
    """A token for each request whose whole sequence is computed by this step, as a model would give."""
    requests = list(output.num_scheduled_tokens)
    sampled = []
    for name in requests:
        request = scheduler.requests[name]
        at = request.num_output_tokens
        text = texts[number_of(name)]
        sampled.append([] if request.is_prefill_chunk else tokens_of(((text, at, at + 1),)))
    return ModelRunnerOutput(
        req_ids=requests,
        req_id_to_index={name: at for at, name in enumerate(requests)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
