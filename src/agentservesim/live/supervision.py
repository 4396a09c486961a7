"""A policy in a server is asked under supervision: whatever it does, the server goes on as plain vLLM would.

In the simulator a policy that fails ends the run, because a result would be worth nothing. A server must go
on: the failure is logged and counted, and the call in question is treated as if there were no policy.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from agentservesim.errors import PolicyError

HOOKS = ("on_call_complete", "on_call_arrival", "priority", "victim", "admit")
LOGGED_IN_FULL = 10

Answer = TypeVar("Answer")


class Supervisor:
    """Counts what goes wrong, and says it: each of the first failures, then every hundredth.

    counts   what happened how often, by name
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._warn = warn

    def attempt(self, method: Callable[..., Answer], otherwise: Answer, *arguments: Any) -> Answer:
        """What a plane makes of a policy's answer, or `otherwise` if the policy fails."""
        try:
            return method(*arguments)
        except PolicyError as error:
            self.report("policy_errors", f"{error}; this call is treated as plain vLLM treats it")
            return otherwise

    def report(self, what: str, message: str) -> None:
        """Count an incident and, if there have not been too many, log it."""
        self.counts[what] += 1
        count = self.counts[what]
        if count <= LOGGED_IN_FULL or count % 100 == 0:
            self._warn(f"{message} ({what}: {count})")


class Supervised:
    """A policy whose hooks answer in time or raise TimeoutError. It has the hooks that the policy has.

    The policy answers in a thread of its own. Once it has not answered in time the thread is lost to it,
    and it is not asked again.
    """

    def __init__(self, policy: Any, timeout_s: float) -> None:
        self.dynamic = bool(getattr(policy, "dynamic", False))
        worker = _Worker(type(policy).__name__, timeout_s)
        for hook in HOOKS:
            if hasattr(policy, hook):
                setattr(self, hook, _TimedHook(getattr(policy, hook), worker))


def supervised(policy: Any, timeout_s: float) -> Any:
    """The policy, under supervision unless it is one of our own."""
    if type(policy).__module__.startswith("agentservesim.policies."):
        return policy
    return Supervised(policy, timeout_s)


class _TimedHook:
    """One hook of a policy; to whoever writes an error message it looks like the policy's own method."""

    def __init__(self, method: Callable[..., Any], worker: _Worker) -> None:
        self._method = method
        self._worker = worker
        self.__self__ = getattr(method, "__self__", None)
        self.__name__ = getattr(method, "__name__", type(method).__name__)

    def __call__(self, *arguments: Any) -> Any:
        return self._worker.ask(self._method, arguments)


class _Worker:
    """The thread in which one policy answers."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._questions: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Reply]] = SimpleQueue()
        self._lost = False
        threading.Thread(target=self._run, name=f"policy {name}", daemon=True).start()

    def ask(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self._lost:
            raise TimeoutError(f"{self._name} is not asked any more: it did not answer in time before")
        reply = _Reply()
        self._questions.put((method, arguments, reply))
        if not reply.done.wait(self._timeout_s):
            self._lost = True
            raise TimeoutError(f"{self._name} did not answer within {self._timeout_s:g} s")
        if reply.error is not None:
            raise reply.error
        return reply.answer

    def _run(self) -> None:
        while True:
            method, arguments, reply = self._questions.get()
            try:
                reply.answer = method(*arguments)
            except BaseException as error:  # SystemExit too: it must not end this thread unheard
                reply.error = error
            reply.done.set()


class _Reply:
    __slots__ = ("answer", "done", "error")

    def __init__(self) -> None:
        self.answer: Any = None
        self.done = threading.Event()
        self.error: BaseException | None = None
