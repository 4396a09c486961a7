"""One call to the server: the request, its attempts, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from agentservesim.errors import InputError
from agentservesim.live.http import in_words
from agentservesim.live.identity import INSTANCE_HEADER, Identity
from agentservesim.live.replay.stream import Answer, StreamBroken, StreamRejected, read_stream

BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 5.0


class CallRejected(Exception):
    """The server will never serve this request; the message is its own."""


class CallFailed(Exception):
    """Every attempt failed, or time ran out."""


class _Retryable(Exception):
    """The attempt failed in a way that may pass. `kind` is what to count it as."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Attempts:
    """What a call went through, known even where it fails.

    retries           why each attempt but the last failed: (kind, words)
    dropped_tokens    output that came in attempts that failed
    instance          which server answered, where a router says it
    """

    retries: list[tuple[str, str]] = field(default_factory=list)
    dropped_tokens: int = 0
    instance: int = 0


@dataclass(frozen=True)
class ServedModel:
    """A model of /v1/models; max_model_len is None where the server does not tell."""

    name: str
    max_model_len: int | None


class CompletionClient:
    """Asks for completions of given token counts.

    retries      attempts after the first, for each call
    identity     whether requests carry program ids, in the field vllm_xargs
    returns_ids  whether the server takes the field return_token_ids
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, retries: int, timeout_s: float | None, identity: bool
    ) -> None:
        self._session = session
        self._url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise InputError(f"--url {url}: expected http://host:port")
        self._retries = retries
        self._timeout_s = timeout_s
        self._identity = identity
        self.returns_ids = True
        self.model = ""

    async def choose_model(self, wanted: str | None) -> ServedModel:
        """Find the model to ask for. Raises InputError if the server is not there or serves another."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                body = await response.read()
                cards = msgspec.json.decode(body)["data"] if response.status == HTTPStatus.OK else None
        except (OSError, aiohttp.ClientError) as error:
            raise InputError(f"--url {self._url}: no server there: {in_words(error)}") from None
        except (msgspec.MsgspecError, KeyError, TypeError):
            cards = None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            if wanted is not None:
                return self._chosen(ServedModel(wanted, None))
            raise InputError(
                f"--url {self._url}: /v1/models answers {response.status} {_excerpt(body)}, expected a list "
                "of models; is this an OpenAI-compatible server? Its model can also be given by --model"
            )
        models = [ServedModel(str(card["id"]), _length(card.get("max_model_len"))) for card in cards]
        chosen = [model for model in models if wanted in (None, model.name)]
        if len(chosen) != 1:
            names = ", ".join(model.name for model in models) or "none"
            what = f"--model {wanted}: not served" if wanted else "--model is needed"
            raise InputError(f"{what}: {self._url} serves {names}")
        return self._chosen(chosen[0])

    async def complete(
        self,
        prompt: list[int],
        output_tokens: int,
        identity: Identity,
        attempts: Attempts,
        now_s: Callable[[], float],
    ) -> Answer:
        """The completion, after as many attempts as it takes. `attempts` tells what it went through.

        Raises CallRejected for what no attempt can mend, and CallFailed when attempts or time are used up.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._attempt(prompt, output_tokens, identity, attempts, now_s)
                    except _Retryable as error:
                        if len(attempts.retries) >= self._retries:
                            tried = f"after {self._retries + 1} attempts" if self._retries else "at once"
                            raise CallFailed(f"{error}, given up {tried}") from None
                        attempts.retries.append((error.kind, str(error)))
                        await asyncio.sleep(_backoff_s(len(attempts.retries)))
        except TimeoutError:
            raise CallFailed(f"not complete after {self._timeout_s:g} s (--timeout)") from None

    async def _attempt(
        self,
        prompt: list[int],
        output_tokens: int,
        identity: Identity,
        attempts: Attempts,
        now_s: Callable[[], float],
    ) -> Answer:
        answer = Answer()
        returns_ids = self.returns_ids
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                data=msgspec.json.encode(self._body(prompt, output_tokens, identity)),
                headers={"Content-Type": "application/json"},
            ) as response:
                instance = response.headers.get(INSTANCE_HEADER, "")
                attempts.instance = int(instance) if instance.isdecimal() else 0
                if response.status == HTTPStatus.OK:
                    if response.content_type != "text/event-stream":
                        raise CallRejected(f"answers {response.content_type}, expected a text/event-stream")
                    await read_stream(response.content.iter_any(), answer, now_s)
                    return answer
                message = _excerpt(await response.read())
                status = response.status
        except StreamRejected as error:
            raise CallRejected(str(error)) from None
        except StreamBroken as error:
            raise _Retryable("stream broken", str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            kind = "stream broken" if answer.chunks else "connection"
            raise _Retryable(kind, f"{kind}: {in_words(error)}") from None
        finally:
            if not answer.finished:
                attempts.dropped_tokens += answer.received_tokens()
        if "return_token_ids" in message and returns_ids and status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self.returns_ids = False
            return await self._attempt(prompt, output_tokens, identity, attempts, now_s)
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _Retryable(f"status {status}", f"status {status}: {message}")
        hint = " (--no-identity leaves vllm_xargs out)" if "vllm_xargs" in message else ""
        raise CallRejected(f"status {status}: {message}{hint}")

    def _body(self, prompt: list[int], output_tokens: int, identity: Identity) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.returns_ids:
            body["return_token_ids"] = True
        if self._identity:
            body["vllm_xargs"] = identity
        return body

    def _chosen(self, model: ServedModel) -> ServedModel:
        self.model = model.name
        return model


def _backoff_s(attempt: int) -> float:
    return float(min(BACKOFF_FIRST_S * 2 ** (attempt - 1), BACKOFF_LAST_S))


def _excerpt(body: bytes) -> str:
    """A server's message, out of its JSON where it has the usual form."""
    try:
        decoded = msgspec.json.decode(body)
        message = decoded["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return " ".join(str(message)[:500].split()) or "(empty)"


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
