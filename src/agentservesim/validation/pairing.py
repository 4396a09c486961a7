"""Which simulated call is which real one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from agentservesim.errors import InputError, nearest
from agentservesim.programs.program import Program
from agentservesim.validation.records import RealCall, RealRun

Key = tuple[str, str]
"""(program id, turn id)"""

_NUMBER = re.compile(r"(\d+)$")


class Pair(NamedTuple):
    """A real call and the row of calls.parquet that simulates it."""

    key: Key
    real: RealCall
    simulated: dict[str, Any]


class Pairing(NamedTuple):
    """Pairs in the order of the workload, and what has no partner, by name."""

    pairs: list[Pair]
    real_alone: list[str]
    simulated_alone: list[str]

    @property
    def complete(self) -> bool:
        """Whether every call on either side has a partner."""
        return not (self.real_alone or self.simulated_alone)


class CallNames:
    """The calls of a workload by the names that real records use for them.

    A record is the call of its program_id and turn_id (the turn may be left out where the program has one);
    else of a one-turn program with its request_id; else, in a workload of one-turn programs, of the n-th
    program of the file, from 0, where request_id ends in the number n; without ids, of the program at the
    record's own position.
    """

    def __init__(self, programs: Iterable[Program]) -> None:
        self._turns = {p.program_id: [turn.turn_id for turn in p.turns] for p in programs}
        self._ids = list(self._turns)
        self._single = all(len(turns) == 1 for turns in self._turns.values())

    def __iter__(self) -> Iterator[Key]:
        """Every call, in the order of the workload."""
        return ((program, turn) for program, turns in self._turns.items() for turn in turns)

    def key_of(self, call: RealCall, position: int) -> Key | None:
        """The call that a record is about; None if the workload has none such.

        Raises InputError where the record could be any of several.
        """
        if call.program_id is not None:
            turns = self._turns.get(call.program_id, [])
            if call.turn_id is None and len(turns) > 1:
                raise InputError(
                    f"{call.place}: turn_id is missing: expected one of {', '.join(turns[:5])}, as program "
                    f"{call.program_id!r} has {len(turns)} turns"
                )
            wanted = call.turn_id if call.turn_id is not None else next(iter(turns), "")
            return (call.program_id, wanted) if wanted in turns else None
        if call.request_id is not None and len(self._turns.get(call.request_id, [])) == 1:
            return call.request_id, self._turns[call.request_id][0]
        if not self._single:
            raise InputError(
                f"{call.place}: program_id is missing: expected program_id and turn_id, as the workload has "
                "programs of several turns"
            )
        number = _NUMBER.search(call.request_id) if call.request_id is not None else None
        index = int(number[1]) if number else position if call.request_id is None else len(self._ids)
        if index >= len(self._ids):
            return None
        return self._ids[index], self._turns[self._ids[index]][0]

    def hint(self, call: RealCall) -> str:
        """' (did you mean X?)' for a record that no call of the workload fits."""
        return nearest(call.program_id or call.request_id or "", self._ids)


def pair(real: RealRun, simulated: Sequence[dict[str, Any]], names: CallNames) -> Pairing:
    """Match the records with the simulated calls that completed.

    Raises InputError where two records are of one call, or one could be of several.
    """
    rows = {(row["program_id"], row["turn_id"]): row for row in simulated if row["status"] == "completed"}
    found: dict[Key, RealCall] = {}
    alone = [f"{name}: not completed in the real run" for name in real.incomplete]
    for position, call in enumerate(real.calls):
        key = names.key_of(call, position)
        if key is None:
            alone.append(f"{_shown(call)}: not in the workload{names.hint(call)}")
        elif key in found:
            raise InputError(
                f"{call.place}: is of program {key[0]!r}, turn {key[1]!r}, as is {found[key].place}: "
                "expected one record a call"
            )
        else:
            found[key] = call
            if key not in rows:
                alone.append(f"{_shown(call)}: not completed in the simulation")
    pairs = [Pair(key, found[key], rows[key]) for key in names if key in found and key in rows]
    missing = [f"program {k[0]}, turn {k[1]}: not in the real run" for k in rows if k not in found]
    return Pairing(pairs, alone, missing)


def _shown(call: RealCall) -> str:
    parts = (call.program_id, call.turn_id) if call.program_id is not None else (call.request_id,)
    return f"{call.place}: {'/'.join(str(part) for part in parts if part is not None) or 'a call'}"
