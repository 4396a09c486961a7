"""What `live validate` starts in place of a Python that has vLLM: as far as it is asked, it behaves as one.

It makes the tiny model's mark instead of a model. As a server it steps one batch of everything it was asked
for, one token a step, and writes the logs that the plug-in would.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web

from agentservesim.live.recorder import StepRecorder
from agentservesim.live.tiny_model import MARK

STEP_S = 0.002
PREFILL_TOKEN_S = 0.00001


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "-c":
        return
    if words[1] == "agentservesim.live.tiny_model":
        folder, *options = words[2:]
        sizes = {
            name.removeprefix("--").replace("-", "_"): int(value)
            for name, value in zip(options[::2], options[1::2], strict=True)
        }
        Path(folder).mkdir()
        (Path(folder) / MARK).write_text(json.dumps(sizes))
        return
    print("fake vLLM:", " ".join(words), flush=True)
    if "FAKE_VLLM_DIES" in os.environ:
        print("ValueError: no memory\n" + 30 * "and so on\n", flush=True)
        sys.exit("fake vLLM: out of memory, as it were")
    if "FAKE_VLLM_CHILD" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["FAKE_VLLM_CHILD"]).write_text(str(child.pid))
    settings = json.loads(words[words.index("--additional-config") + 1])["agentservesim"]
    engine = Engine(StepRecorder(settings["step_log"]) if "step_log" in settings else None)
    if "decision_log" in settings:
        Path(settings["decision_log"]).write_text("")
    web.run_app(engine.app(), host="127.0.0.1", port=int(words[words.index("--port") + 1]), print=None)


class Engine:
    def __init__(self, recorder: StepRecorder | None) -> None:
        self.recorder = recorder
        self.resets = 0
        self.requests: list[dict] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self.ok)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/reset_prefix_cache", self.reset)

        async def steps(_app):
            task = asyncio.get_running_loop().create_task(self.run())
            yield
            task.cancel()

        app.cleanup_ctx.append(steps)
        return app

    async def ok(self, _request):
        return web.Response(text=str(self.resets))

    async def models(self, _request):
        return web.json_response({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def reset(self, _request):
        self.resets += 1
        return web.Response()

    async def complete(self, request):
        body = await request.json()
        mine = {"prompt": len(body["prompt"]), "left": body["max_tokens"], "context": 0}
        mine["tokens"] = asyncio.Queue()
        self.requests.append(mine)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for index in range(body["max_tokens"]):
                token = await mine["tokens"].get()
                reason = "length" if index == body["max_tokens"] - 1 else None
                await send(response, choices=[{"token_ids": [token], "finish_reason": reason}])
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            await send(response, choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 0}})
            await response.write(b"data: [DONE]\n\n")
        finally:
            mine["left"] = 0
        return response

    async def run(self) -> None:
        """Step after step; the next as soon as there is work."""
        started_s, step = time.monotonic(), 0
        while True:
            batch = self.requests = [request for request in self.requests if request["left"]]
            if not batch:
                await asyncio.sleep(0.0005)
                continue
            prefills = [(r["prompt"], 0) for r in batch if not r["context"]]
            contexts = [r["context"] + 1 for r in batch if r["context"]]
            if self.recorder:
                now_s = time.monotonic() - started_s
                self.recorder.scheduled(step, prefills, contexts, [], len(batch), 0, 99, 0, now_s)
            await asyncio.sleep(STEP_S + PREFILL_TOKEN_S * sum(new for new, _ in prefills))
            for request in batch:
                request["context"] = request["context"] + 1 if request["context"] else request["prompt"]
                request["left"] = max(0, request["left"] - 1)
                request["tokens"].put_nowait(4 + (request["context"] + step) % 100)
            left = [request for request in self.requests if request["left"]]
            if self.recorder:
                self.recorder.updated(step, len(left), time.monotonic() - started_s)
            step += 1


async def send(response, **event) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


if __name__ == "__main__":
    main()
