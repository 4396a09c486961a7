"""The router: the simulator's routing policies before real servers, and nothing changed on the way."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from agentservesim import parse_config
from agentservesim.errors import InputError
from agentservesim.live.identity import Identity
from agentservesim.live.replay import ReplayOptions, replay
from agentservesim.live.router import Router, RouterOptions
from agentservesim.live.router.body import AnswerTail, CallFacts
from agentservesim.live.router.placement import Placement
from agentservesim.live.router.servers import Server, read_metrics
from agentservesim.policies import registry
from fake_server import FakeServer
from helpers import chain, config_dict, rows, write_config, write_native
from in_process import cli  # noqa: F401


class RouterThread:
    """A router in a thread of its own."""

    def __init__(self, servers, routing="session-affinity", **options):
        urls = tuple(server if isinstance(server, str) else server.url for server in servers)
        policy = registry.build("routing", routing) if isinstance(routing, str) else routing
        self._router = Router(RouterOptions(urls, str(routing), port=0, **options), policy)

    def __enter__(self):
        ready = threading.Event()

        async def serve():
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await self._router.start()
            ready.set()
            await self._stop.wait()
            await self._router.stop()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        self.url = self._router.url
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def stats(self):
        return json.loads(urllib.request.urlopen(self.url + "/router/stats").read())


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer()) for _ in range(3)]


def call(router, program_id=None, path="/v1/completions", tokens=2, **xargs):
    """One streamed call: (status, headers, body)."""
    body = {"model": "fake", "prompt": [5] * 20, "max_tokens": tokens, "stream": True}
    if program_id is not None:
        body["vllm_xargs"] = {"program_id": program_id, **xargs}
    return post(router.url, path, json.dumps(body))


def post(url, path, body, method="POST"):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", "X-Mine": "kept"})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()
    finally:
        connection.close()


def placed(answer):
    return int(answer[1]["X-AgentServeSim-Instance"])


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- passing on -------------------------------------------------------------------------------------------


def test_what_is_passed_on_is_not_changed(servers):
    with RouterThread(servers[:1]) as router:
        status, headers, body = call(router, "p", turn_id="t0")
        sent = servers[0].seen[-1].body
        servers[0].kill()
        servers[0].start()  # nothing is cached, as before
        direct = post(servers[0].url, "/v1/completions", json.dumps(sent))
        assert (status, body) == (direct[0], direct[2])
        assert headers["Content-Type"] == "text/event-stream"
        seen = servers[0].completions()
        assert seen[0].body["vllm_xargs"] == {"program_id": "p", "turn_id": "t0"}
        assert seen[0].headers["X-Mine"] == "kept"
        assert json.loads(post(router.url, "/v1/models", None, "GET")[2])["data"][0]["id"] == "fake"
        assert post(router.url, "/metrics", None, "GET")[2].startswith("# HELP vllm:")


def test_chunks_are_passed_on_as_they_come(servers):
    servers[0].hold_after = 1
    with RouterThread(servers[:1]) as router:
        connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=30)
        body = {"prompt": [5], "max_tokens": 4, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.readline().startswith(b"data:")
        assert servers[0].open_calls == 1  # the first chunk is here and the server still generates
        connection.close()


def test_errors_pass_and_are_no_completions(servers):
    servers[0].faults = deque(["503", "429"])
    with RouterThread(servers[:1]) as router:
        assert [call(router, "p")[0] for _ in range(3)] == [503, 429, 200]
        assert post(router.url, "/v1/nothing", "{}")[0] == 404
        assert post(router.url, "/v1/completions", "{not json")[0] == 500  # the fake server's own answer
        stats = router.stats()
    assert (stats["answers_with_error_status"], stats["calls_completed"]) == (3, 1)


def test_a_client_that_goes_away_is_passed_on_as_an_abort(servers):
    servers[0].token_s = 0.05
    with RouterThread(servers[:1]) as router:
        for tokens_first in (True, False):
            servers[0].first_s = 0.01 if tokens_first else 30.0
            connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=30)
            body = {"prompt": [5], "max_tokens": 1000, "stream": True, "vllm_xargs": {"program_id": "p"}}
            connection.request("POST", "/v1/completions", json.dumps(body))
            if tokens_first:
                connection.getresponse().readline()
            else:
                wait_until(lambda: servers[0].open_calls == 1)
            connection.sock.close()
            connection.close()
            wait_until(lambda: servers[0].open_calls == 0)
        assert [seen.disconnected for seen in servers[0].completions()] == [True, True]
        wait_until(lambda: router.stats()["client_disconnects"] == 2)
        assert router.stats()["servers"][0]["in_flight"] == 0


def test_a_server_that_dies_in_an_answer_is_not_taken_for_its_end(servers):
    servers[0].faults = deque(["drop:2", "drop"])
    with RouterThread(servers[:1]) as router:
        with pytest.raises(http.client.IncompleteRead):
            call(router, "p", tokens=8)
        status, _, body = call(router, "p")
        assert status == 502 and "broke off" in json.loads(body)["error"]["message"]
        assert router.stats()["server_broke_off"] == 2 and router.stats()["calls_completed"] == 0


# --- routing ----------------------------------------------------------------------------------------------


def test_programs_stay_where_they_ran_and_others_go_to_the_least_loaded(servers):
    with RouterThread(servers) as router:
        servers[0].hold_after = servers[1].hold_after = 1
        with ThreadPoolExecutor(3) as pool:
            long = pool.submit(call, router, "long")
            wait_until(lambda: servers[0].held == 1)
            other = pool.submit(call, router, "other")
            wait_until(lambda: servers[1].held == 1)
            homes = [placed(call(router, "p")) for _ in range(3)]
            assert homes == [2, 2, 2]  # two servers are busy
            assert placed(call(router)) == 2
            servers[0].hold_after = servers[1].hold_after = None
            assert [placed(one.result()) for one in (long, other)] == [0, 1]
        assert placed(call(router)) == 0  # now all are idle: the lowest index
        assert [placed(call(router, "p")) for _ in range(3)] == [2, 2, 2]
        assert placed(call(router, "p", path="/v1/chat/completions")) == 2
        stats = router.stats()
    assert (stats["programs"], stats["calls_without_identity"], stats["calls"]) == (3, 2, 11)
    assert [server["calls"] for server in stats["servers"]] == [2, 1, 8]


def test_the_simulators_policies_and_a_file_of_ones_own(servers, tmp_path):
    with RouterThread(servers, "round-robin") as router:
        assert [placed(call(router, "p")) for _ in range(4)] == [0, 1, 2, 0]
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def route(self, pcb, now_s, instances):\n"
        "        self.seen = [*getattr(self, 'seen', []), (pcb, now_s, instances)]\n"
        "        return 1 + pcb.turn_index % 2\n"
    )
    policy = registry.build("routing", f"{tmp_path}/mine.py:Mine")
    with RouterThread(servers, policy, max_num_seqs=7) as router:
        assert [placed(call(router, "p", tool_name="grep", tokens=3)) for _ in range(3)] == [1, 2, 1]
    first, second, third = (pcb for pcb, _, _ in policy.seen)
    assert (first.turn_index, first.context_tokens, first.instance, first.tool_name) == (0, 0, None, None)
    assert (second.turn_index, second.turns_completed, second.context_tokens) == (1, 1, 23)
    assert (second.instance, second.tool_name, second.in_gap, second.prompt_tokens) == (1, "grep", False, 20)
    assert third.gap_count == 2 and 0 < third.tool_mean_gap_s < 5 and third.attained_service_s > 0
    assert first.arrival_s == third.arrival_s and policy.seen[0][1] < policy.seen[1][1]
    assert [view.index for view in policy.seen[0][2]] == [0, 1, 2]
    assert policy.seen[0][2][0].max_num_seqs == 7


def test_a_policy_that_fails_is_counted_and_the_call_goes_on(servers):
    answers = deque([3, "1", None, True])

    class Wrong:
        def route(self, pcb, now_s, instances):
            if answers:
                return answers.popleft()
            raise ValueError("no idea")

    with RouterThread(servers, Wrong()) as router:
        assert [placed(call(router, f"p{n}")) for n in range(5)] == [0] * 5
        assert router.stats()["policy_failures"] == 5
        assert router.stats()["calls_completed"] == 5


def test_a_server_that_refuses_connections_is_left_out_and_tried_again(servers):
    dead, alive = servers[0], servers[1]
    with RouterThread(servers[:2]) as router:
        assert placed(call(router, "p")) == 0
        dead.kill()
        assert placed(call(router, "p")) == 1  # nothing was sent yet: another takes it
        wait_until(lambda: not router.stats()["servers"][0]["up"])
        assert placed(call(router, "p")) == 1
        assert placed(call(router, "q")) == 1
        stats = router.stats()
        assert stats["rerouted_connection_refused"] == stats["servers"][0]["connections_refused"] <= 1
        assert stats["no_server"] == 0 and stats["calls_completed"] == 4
        alive.kill()
        status, _, body = call(router, "p")
        assert status == 503 and dead.url in json.loads(body)["error"]["message"]
        assert router.stats()["no_server"] == 1
        dead.start()
        wait_until(lambda: router.stats()["servers"][0]["up"])
        assert placed(call(router, "p")) == 0


def test_a_choice_that_is_down_is_counted(servers):
    with RouterThread(servers[:2], "round-robin") as router:
        servers[0].kill()
        wait_until(lambda: not router.stats()["servers"][0]["up"])
        assert [placed(call(router, "p")) for _ in range(4)] == [1] * 4
        assert router.stats()["rerouted_server_down"] == 2


def test_what_servers_say_of_themselves(servers):
    servers[0].waiting, servers[0].running = 3, 5
    with RouterThread(servers[:1]) as router:
        wait_until(lambda: router.stats()["servers"][0]["waiting"] == 3)
        (server,) = router.stats()["servers"]
    assert (server["running"], server["kv_usage"], server["kv_cache_tokens"]) == (5, 0.25, 99 * 16)


def test_views_count_what_is_in_flight_and_divide_it_by_the_servers_word():
    server = Server(0, "http://x")
    assert (server.view(8).in_flight, server.view(8).capacity_tokens) == (0, 1)
    server.in_flight = 4
    server.metrics = read_metrics(
        'vllm:num_requests_running{engine="0"} 9.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_requests_waiting_by_reason{reason="x"} 7\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
        'vllm:cache_config_info{block_size="32",cache_dtype="a\\"b",engine="0",num_gpu_blocks="11"} 1.0\n'
    )
    view = server.view(8)
    assert (view.running_calls, view.waiting_calls, view.in_flight) == (1, 3, 4)
    assert (view.capacity_tokens, view.used_tokens) == (320, 120)
    server.mark(up=False)
    assert server.view(8).in_flight > 10**6
    assert read_metrics("up 1\n") is None


@pytest.mark.parametrize(
    ("answer", "context_tokens"),
    [
        (
            b'data: {"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
            9,
        ),
        (b'{"usage": {"input_tokens": 7, "output_tokens": 5}}', 12),
        (b'{"usage": {"prompt_tokens": 7, "completion_tokens": 1}}', 8),
        (b"data: [DONE]", None),
    ],
)
def test_usage_is_read_off_the_end_of_an_answer(answer, context_tokens):
    tail = AnswerTail()
    for start in range(0, len(answer), 5):
        tail.add(b" " * 3000 if start == 0 else b"")
        tail.add(answer[start : start + 5])
    assert tail.context_tokens() == context_tokens
    assert tail.queue_s() == 0
    tail.add(b'"metrics":{"queue_time_ms":2.5e1}')
    assert tail.queue_s() == 0.025


def test_time_in_a_servers_queue_is_no_service():
    policy = registry.build("routing", "session-affinity")
    seen = []
    policy.route = lambda pcb, now_s, instances: seen.append(pcb) or 0
    placement = Placement(policy, [Server(0, "http://x")], 8)
    tail = AnswerTail()
    tail.add(b'"queue_time_ms":3000')
    for now_s in (0.0, 20.0):
        one = placement.arrive(CallFacts(Identity("p"), 10), now_s)
        placement.place(one, [], now_s)
        placement.completed(one, tail, now_s + 10)
        placement.left(one, now_s + 10)
    assert [pcb.attained_service_s for pcb in seen] == [0, 7]
    assert (seen[1].context_tokens, seen[1].gap_mean_s) == (10, 10)


# --- memory -----------------------------------------------------------------------------------------------


def test_programs_are_dropped_after_their_last_call_and_when_idle():
    placement = Placement(registry.build("routing", "session-affinity"), [Server(0, "http://x")], 8, 3600.0)

    def arrive(program_id, now_s, last_call=0):
        facts = CallFacts(Identity(program_id, last_call=last_call), 10)
        one = placement.arrive(facts, now_s)
        placement.place(one, [], now_s)
        return one

    class Tail:
        context_tokens = staticmethod(lambda: 12)
        queue_s = staticmethod(lambda: 0.0)

    last = arrive("a", 0.0, last_call=1)
    assert len(placement) == 1
    placement.completed(last, Tail(), 1.0)
    placement.left(last, 1.0)
    assert len(placement) == 0
    long, short = arrive("long", 0.0), arrive("short", 0.0)
    placement.left(short, 5.0)
    assert len(placement) == 2
    placement.left(arrive("new", 3604.0), 3604.0)
    assert len(placement) == 3
    placement.left(arrive("new", 3605.0), 3605.0)
    assert len(placement) == 2  # short was idle for an hour; long still runs
    placement.left(long, 7000.0)
    placement.left(arrive("new", 10000.0), 10000.0)
    assert len(placement) == 2  # new was idle for more than an hour and began anew
    placement.left(arrive("new", 10600.0), 10600.0)
    assert len(placement) == 1
    assert placement.counts["programs_forgotten_idle"] == 3  # at last, long after its end


def test_identity_that_is_none(servers):
    with RouterThread(servers[:1]) as router:
        for xargs in ({"program_id": ["p"]}, {"other": 1}, None):
            body = {"prompt": "text", "max_tokens": 1, "vllm_xargs": xargs}
            assert post(router.url, "/v1/completions", json.dumps(body))[0] == 200
        stats = router.stats()
    assert (stats["calls_without_identity"], stats["identity_malformed"], stats["programs"]) == (3, 1, 0)


# --- the command, and all of it together ------------------------------------------------------------------


def test_wrong_policies_are_refused_in_the_words_of_run(tmp_path, cli):  # noqa: F811
    source = write_native(tmp_path / "w.jsonl", [chain("a", 1)])
    config = write_config(tmp_path / "c.yaml", config_dict(source))
    (tmp_path / "bad.py").write_text("class Bad:\n    def route(self, pcb):\n        return 0\n")
    specs = (
        "sesion-affinity",
        "session-affinity:limit=0",
        "lru",
        "plas",
        f"{tmp_path}/bad.py:Bad",
        "nope.py:X",
    )
    for spec in specs:
        simulated = cli("run", config, "--routing", spec)
        routed = cli("live", "router", "--server", "http://127.0.0.1:1", "--routing", spec)
        assert (routed.returncode, routed.stderr) == (simulated.returncode, simulated.stderr)
        assert routed.returncode == 2


def test_wrong_addresses_are_refused(servers, cli):  # noqa: F811
    wrong = cli("live", "router", "--server", "localhost:8000")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: --server localhost:8000: expected http://host:port\n",
    )
    twice = cli("live", "router", "--server", "http://a:1", "--server", "http://a:1/v1/")
    assert twice.returncode == 2 and "given 2 times" in twice.stderr
    taken = servers[0].port
    with pytest.raises(InputError, match=f"--port {taken}: cannot listen there"):
        asyncio.run(Router(RouterOptions(("http://a:1",), "x", port=taken), Anywhere()).start())


class Anywhere:
    def route(self, pcb, now_s, instances):
        return 0


def test_the_command_serves_until_it_is_told_to_stop_and_lets_calls_end(servers):
    servers[0].hold_after = 3
    command = [sys.executable, "-m", "agentservesim", "live", "router", "--port", "0"]
    process = subprocess.Popen([*command, "--server", servers[0].url], stderr=subprocess.PIPE, text=True)
    said = process.stderr.readline()
    url = re.search(r"http://\S+", said).group()
    assert said.startswith("routing to 1 server by session-affinity on http://127.0.0.1:")

    class There:
        pass

    There.url = url
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call, There, "p", tokens=10)
        wait_until(lambda: servers[0].held == 1)
        os.kill(process.pid, signal.SIGTERM)
        assert process.stderr.readline().startswith("stopping")
        servers[0].hold_after = None
        status, _, body = running.result()
    assert status == 200 and body.rstrip().endswith("[DONE]")
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopped after 1 calls, 1 completed" in rest
    assert "Traceback" not in rest


def test_replay_through_the_router_keeps_programs_together_and_says_where_they_ran(servers, tmp_path):
    source = write_native(tmp_path / "w.jsonl", [chain(f"p{n}", 4, gap_s=0.01) for n in range(6)])
    config = parse_config(config_dict(source))
    with RouterThread(servers) as router:
        result = replay(config, router.url, ReplayOptions(vocab_size=1000))
        wait_until(lambda: router.stats()["programs_live"] == 0)
        stats = router.stats()
    assert result.complete and not result.summary["deviations"] and result.summary["retries"] == 0
    homes = {}
    for row in rows(result):
        homes.setdefault(row["program_id"], set()).add(row["instance"])
    assert all(len(instances) == 1 for instances in homes.values())
    assert set().union(*homes.values()) == {0, 1, 2}
    assert stats["programs_ended"] == 6 and stats["calls_completed"] == 24
