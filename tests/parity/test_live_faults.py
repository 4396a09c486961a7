"""Whatever a policy or a client does: vLLM goes on, nothing is lost silently, the pool is whole at the end.

Needs vllm: `make test-vllm`.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path

import pytest

from agentservesim.errors import AgentServeSimError, InputError
from agentservesim.policies import registry

from .compare import first_difference as first_difference_of_trials
from .live_compare import first_difference
from .live_loads import make_live_engine, make_programs, options_of
from .loads import make_load

pytestmark = pytest.mark.vllm

POLICIES = Path(__file__).with_name("live_policies.py")
PLAIN = {"retention": "lru", "scheduling": f"{POLICIES}:Indifferent", "admission": "none"}
PROTECTING = {"retention": "ttl:tau_s=5,until=admission", "scheduling": "plas"}


def live_scheduler(tmp_path, chosen, seed=0, **engine_options):
    import msgspec

    from .live_engine import make_live_scheduler

    engine = make_live_engine(random.Random(seed), async_scheduling=seed % 2 == 1)
    engine = msgspec.structs.replace(engine, **engine_options)
    log = tmp_path / f"decisions-{seed}.jsonl"
    return engine, make_live_scheduler(engine, chosen, log), log


@pytest.mark.parametrize("name", ["Raises", "Nonsense", "Sleeps"])
@pytest.mark.parametrize("seed", [0, 1], ids=["sync", "async"])
def test_a_failing_policy_leaves_plain_vllm_behind(tmp_path, name, seed):
    from .live_engine import made_up_tokens, run_live
    from .live_simulated import run_simulated

    failing = f"{POLICIES}:{name}"
    chosen = {"retention": failing, "scheduling": failing, "admission": failing, "policy_timeout_s": 0.05}
    engine, scheduler, log = live_scheduler(tmp_path, chosen, seed)
    rng = random.Random(seed)
    arrivals = make_programs(rng, engine, 25)
    live = run_live(arrivals, scheduler, made_up_tokens(scheduler, rng), log, engine.async_scheduling)
    simulated = run_simulated(arrivals, live.seconds, PLAIN, options_of(engine), engine.async_scheduling)
    assert first_difference(live, simulated) is None
    assert live.counts["policy_errors"] >= 3
    assert live.counts["blocks_missing"] == live.counts["calls_live"] == live.counts["programs_live"] == 0


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_requests_without_a_program_are_served_as_by_plain_vllm(tmp_path, async_scheduling):
    from agentservesim.live.vllm_plugin import LiveAsyncScheduler, LiveScheduler

    from . import real

    class RecordedLive(real.Recorded, LiveScheduler):
        pass

    class RecordedLiveAsync(real.Recorded, LiveAsyncScheduler):
        pass

    kind = RecordedLiveAsync if async_scheduling else RecordedLive
    settings = {"retention": "ttl:tau_s=9", "admission": "program-cap:f=0.1"}
    for seed in range(4):
        load = make_load(seed, async_scheduling=async_scheduling)
        plain = real.run(load, seed)
        live = real.run(
            load, seed, make=lambda engine: real.make_scheduler(engine, kind, {"agentservesim": settings})
        )
        assert first_difference_of_trials(plain, live.steps) is None


def request_of(scheduler, name, tokens, output, identity):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from .real import HASH

    init_none_hash(get_hash_fn_by_name(HASH))
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, extra_args=identity),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=get_request_block_hasher(scheduler.block_size, get_hash_fn_by_name(HASH)),
    )


def step(scheduler, rng):
    from .live_engine import made_up_tokens

    output = scheduler.schedule()
    _, answer = made_up_tokens(scheduler, rng)(output)
    scheduler.update_from_output(output, answer)


@pytest.mark.parametrize("seed", range(8))
def test_clients_that_disconnect_leave_no_block_behind(tmp_path, seed):
    from vllm.v1.request import RequestStatus

    from .live_engine import blocks_missing

    _, scheduler, _ = live_scheduler(
        tmp_path,
        {**PROTECTING, "admission": "program-cap:f=0.5"},
        2 * seed,
        max_model_len=4096,
        enable_prefix_caching=True,
    )
    rng = random.Random(seed)
    alive, aborted, number = set(), 0, 0
    contexts = {}
    for at in range(400):
        if at < 300 and rng.random() < 0.3:
            program = f"p{rng.randrange(12)}"
            tokens = contexts.setdefault(program, []) + [
                rng.randrange(4, 2000) for _ in range(rng.randrange(1, 80))
            ]
            if len(tokens) > (scheduler.kv_cache_config.num_blocks - 2) * scheduler.block_size - 40:
                tokens = tokens[:20]
            contexts[program] = tokens
            name = f"r{number}"
            number += 1
            scheduler.add_request(
                request_of(scheduler, name, tokens, rng.randrange(1, 40), {"program_id": program})
            )
            alive.add(name)
        if rng.random() < 0.15 and alive:
            name = rng.choice(sorted(alive))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            alive.discard(name)
            aborted += 1
        step(scheduler, rng)
    for name in alive:
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    counts = scheduler.counts()
    assert counts["calls_live"] == counts["calls_held"] == 0
    assert 0 < counts["calls_aborted"] <= aborted + len(alive)
    assert not scheduler.requests
    assert blocks_missing(scheduler) == 0


def test_a_call_that_waits_for_its_aborted_parent_entry_gives_it_back(tmp_path):
    """Protected until the next call is admitted; that call's client goes before it is."""
    from vllm.v1.request import RequestStatus

    _, scheduler, log = live_scheduler(tmp_path, PROTECTING, enable_prefix_caching=True, max_model_len=4096)
    rng = random.Random(0)
    block = scheduler.block_size
    tokens = list(range(4, 4 + 3 * block))
    scheduler.add_request(request_of(scheduler, "a", tokens, 1, {"program_id": "p", "turn_id": "0"}))
    while scheduler.requests:
        step(scheduler, rng)
    assert scheduler.counts()["parked_blocks"] == 3
    scheduler.add_request(request_of(scheduler, "b", [*tokens, 9, 9], 1, {"program_id": "p", "turn_id": "1"}))
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert scheduler.counts()["parked_blocks"] == 0
    scheduler.shutdown()
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events == ["protect", "release"]


def test_a_wrong_identity_is_counted_and_served_as_plain(tmp_path):
    _, scheduler, _ = live_scheduler(tmp_path, PROTECTING)
    rng = random.Random(0)
    for number, identity in enumerate(
        ({"program_id": ""}, {"program_id": [1]}, {"program_id": "p", "last_call": "yes"}, {"other": 1})
    ):
        scheduler.add_request(request_of(scheduler, f"r{number}", [5] * 9, 3, identity))
    while scheduler.requests:
        step(scheduler, rng)
    assert scheduler.counts()["bad_identities"] == 3
    assert scheduler.counts()["programs_live"] == 0


def test_programs_without_a_call_for_long_are_forgotten(tmp_path):
    chosen = {"retention": "ttl:tau_s=1e9,until=admission", "program_idle_s": 100}
    _, scheduler, _ = live_scheduler(tmp_path, chosen, enable_prefix_caching=True, max_model_len=4096)
    rng = random.Random(0)
    now = [0.0]
    scheduler.now = lambda: now[0]
    for number in range(3):
        tokens = [rng.randrange(4, 2000) for _ in range(2 * scheduler.block_size)]
        scheduler.add_request(request_of(scheduler, f"r{number}", tokens, 2, {"program_id": f"p{number}"}))
        while scheduler.requests:
            step(scheduler, rng)
        now[0] += 60
    assert scheduler.counts()["programs_live"] == 2
    assert scheduler.counts()["parked_blocks"] == 4


@pytest.mark.parametrize(
    ("axis", "spec"),
    [
        ("retention", "tll"),
        ("retention", "ttl:tau=3"),
        ("retention", "ttl:tau_s=-1"),
        ("scheduling", "./nowhere.py:Mine"),
        ("scheduling", f"{POLICIES}:Hoarder"),
        ("admission", f"{POLICIES}:Missing"),
        ("admission", {"program-cap": {"f": 7}}),
    ],
)
def test_the_engine_refuses_a_policy_in_the_simulators_words(tmp_path, axis, spec):
    with pytest.raises(AgentServeSimError) as simulator:
        registry.build(axis, spec)
    with pytest.raises(AgentServeSimError) as engine:
        live_scheduler(tmp_path, {axis: spec})
    assert str(engine.value) == str(simulator.value)


def test_another_version_of_vllm_is_refused_before_anything_of_it_is_used(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    monkeypatch.delitem(sys.modules, "agentservesim.live.vllm_plugin", raising=False)
    monkeypatch.delitem(sys.modules, "agentservesim.live.vllm_pool", raising=False)
    with pytest.raises(InputError, match=r"vllm 0\.31\.0: .* 0\.32\.0"):
        importlib.import_module("agentservesim.live.vllm_plugin")
    assert "agentservesim.live.vllm_pool" not in sys.modules


def test_a_kv_cache_of_another_kind_is_refused(tmp_path, monkeypatch):
    from . import real

    class SlidingWindow(real.FullAttentionSpec):
        pass

    monkeypatch.setattr("agentservesim.live.vllm_plugin.FullAttentionSpec", SlidingWindow)
    with pytest.raises(InputError, match="supports one group of full attention"):
        live_scheduler(tmp_path, {})
