"""Where each key of a config was written, so that an error can say it."""

from __future__ import annotations

import re
from typing import TypeVar

from agentservesim.errors import AgentServeSimError

KeyPath = tuple[str, ...]
Error = TypeVar("Error", bound=AgentServeSimError)

_FIELD = re.compile(r"(?:workload|cluster|engine|policies|step_time|output_reuse)(?:\.\w+)*")


class Origin:
    """The lines of a config file, and the command-line options that replaced some of its keys.

    where   the file, or what else the config is called in errors
    lines   1-based line of each key, by path
    given   the option that set a key, by path
    """

    def __init__(
        self,
        where: str = "config",
        lines: dict[KeyPath, int] | None = None,
        given: dict[KeyPath, str] | None = None,
    ) -> None:
        self.where = where
        self.lines = lines or {}
        self.given = given or {}

    def at(self, path: KeyPath) -> str:
        """'file:line' or the option of the key, or of the nearest section around it."""
        ways = [path[:length] for length in range(len(path), 0, -1)]
        for way in ways:
            if way in self.given:
                return self.given[way]
        for key, option in self.given.items():
            if key[: len(path)] == path and path not in self.lines:
                return option  # the option made up the section that is wrong
        for way in ways:
            if way in self.lines:
                return f"{self.where}:{self.lines[way]}"
        return self.where

    def with_options(self, options: dict[KeyPath, str]) -> Origin:
        """The same after further options."""
        return Origin(self.where, self.lines, {**self.given, **options})

    def locate(self, error: Error, path: KeyPath | None = None) -> Error:
        """The error with its place in front: of `path`, or of the key its message begins with."""
        message = str(error)
        field = _FIELD.match(message)
        if path is None and field is None:
            return error
        at = self.at(path or tuple(field.group().split(".") if field else ()))
        return error if at == "config" or message.startswith(at) else type(error)(f"{at}: {message}")
