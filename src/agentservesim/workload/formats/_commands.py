"""The name of the tool that a shell command runs."""

from __future__ import annotations

import re

UNNAMED = "command"
"""What a command without a name is called: an empty line, a comment, an unreadable word."""

_LONGEST = 40
_SEGMENT = re.compile(r"&&|\|\||[;|\n]")
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_DURATION = re.compile(r"\d+(?:\.\d+)?[smhd]?")
_SETTING_UP = frozenset({"cd", "export", "set", "source", ".", "pushd", "popd"})
_IN_FRONT = frozenset({"env", "sudo", "time", "nohup", "command", "exec", "timeout", "nice"})
_FLAGS_WITH_VALUE = {"sudo": ("-u", "-g"), "nice": ("-n",), "timeout": ("-k", "-s"), "env": ("-u", "-C")}


def command_name(text: str) -> str:
    """The first word of a shell command, past cd, export, env, sudo, time, assignments and comments.

    Without its folder: /usr/bin/python gives python. A command that only changes folder is named cd.
    """
    fallback = UNNAMED
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for segment in _SEGMENT.split(line):
            name = _first_word(_WORD.findall(segment))
            if name is not None and name not in _SETTING_UP:
                return name
            if name is not None and fallback == UNNAMED:
                fallback = name
    return fallback


def _first_word(words: list[str]) -> str | None:
    """The word that names what a simple command runs; None when there is none."""
    before = ""
    skip_value = False
    for word in words:
        bare = word.strip("\"'(){}&!")
        if skip_value or not bare or _ASSIGNMENT.match(bare):
            skip_value = False
        elif bare in _IN_FRONT:
            before = bare
        elif before and bare.startswith("-"):
            skip_value = bare in _FLAGS_WITH_VALUE.get(before, ())
        elif not (before == "timeout" and _DURATION.fullmatch(bare)):
            name = bare.rsplit("/", 1)[-1] or bare
            return name if len(name) <= _LONGEST else UNNAMED
    return None
