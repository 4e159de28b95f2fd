"""What the instances of one run did when, from the files of `dsim simulate -o DIR --step-log`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from experiments.plots.data import Floats

SUMMARY, REQUESTS, STEPS, KV, EVERY = "summary.json", "requests.csv", "steps.csv", "kv.csv", "all_requests.csv"

#: Letter of the placement notation to the role's name.
ROLES: Mapping[str, str] = {"P": "prefill", "D": "decode", "C": "colocated"}

_TIMES = (
    "arrival_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "decode_start_s",
    "last_token_s",
)
_WHOLE = ("prefill_instance", "decode_instance", "output_tokens")


@dataclass(frozen=True, slots=True, order=True)
class Instance:
    """An instance, by the letter of its role and its index."""

    role: str
    index: int

    @property
    def label(self) -> str:
        """As in `P0`."""
        return f"{self.role}{self.index}"


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One launched batch (docs/semantics.md): its instance, micro-batch or loop, span, and request numbers."""

    instance: Instance
    part: int
    launch_s: float
    end_s: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """A number that changes at instants: `value[i]` from `at_s[i]` on, 0 before the first.

    Args:
        at_s: rising; several changes of one instant are one.
    """

    at_s: Floats
    value: Floats

    def at(self, instant_s: float) -> float:
        """Return the value from an instant on.

        >>> Level(np.array([1.0, 2.0]), np.array([3.0, 0.0])).at(1.5)
        3.0
        """
        place = int(np.searchsorted(self.at_s, instant_s, side="right")) - 1
        return float(self.value[place]) if place >= 0 else 0.0

    def window(self, start_s: float, end_s: float) -> tuple[Floats, Floats]:
        """Return corners of the steps in a window, for a line that keeps each value until the next."""
        inside = (self.at_s > start_s) & (self.at_s < end_s)
        at_s = np.concatenate([[start_s], self.at_s[inside], [end_s]])
        value = np.concatenate([[self.at(start_s)], self.value[inside]])
        return at_s, np.append(value, value[-1])


@dataclass(frozen=True, slots=True, eq=False)
class RunLog:
    """One run.

    Args:
        requests: columns of every request that arrived, by number.
        kv: instants and blocks of every change on an instance, by engine loop, in order.
    """

    summary: Mapping[str, Any]
    requests: Mapping[str, NDArray[Any]]
    steps: tuple[LoggedStep, ...]
    kv: Mapping[tuple[Instance, int], tuple[Floats, Floats]]

    @property
    def end_s(self) -> float:
        """End of the last step."""
        return max((step.end_s for step in self.steps), default=0.0)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Those that launched anything, prefill first, then decode, then colocated."""
        found = {step.instance for step in self.steps}
        return tuple(sorted(found, key=lambda instance: ("PDC".index(instance.role), instance.index)))

    def transfers(self, index: int) -> Iterator[tuple[float, float]]:
        """Yield start and end of every KV transfer to a decode instance; one that the run cut off ends never."""
        columns = self.requests
        here = (columns["decode_instance"] == index) & ~np.isnan(columns["transfer_start_s"])
        for start_s, end_s in zip(columns["transfer_start_s"][here], columns["transfer_end_s"][here], strict=True):
            yield float(start_s), float("inf") if np.isnan(end_s) else float(end_s)

    def waiting(self, instance: Instance) -> Level:
        """Return how many requests wait on an instance for a step of theirs.

        Prefill: from `arrival_s` (`request_s` of the front end included) to `prefill_start_s`, of those routed there;
        rejected ones are not. Exact.

        Decode: from the end of the prefill to the first launch with the request (hop, transfer and the wait for it
        included), and, where it was preempted, from the end of its last step to the next launch with it. Colocated: as
        prefill, and likewise where it was preempted, or was left out of a step that decodes. A preemption
        shows in the log as a launch of the request's micro-batch or loop that decodes without it, or as its return to
        another micro-batch; what it says is exact from that launch on.
        """
        columns = self.requests
        again = np.array(list(self._left_out(instance)), dtype=np.float64).reshape(-1, 2)
        if instance.role == "D":
            here = (columns["decode_instance"] == instance.index) & ~np.isnan(columns["prefill_end_s"])
            start_s, end_s = columns["prefill_end_s"][here], self._first_launch_s(instance)[here]
        else:
            here = columns["prefill_instance"] == instance.index
            start_s, end_s = columns["arrival_s"][here], columns["prefill_start_s"][here]
        return _level(np.concatenate([start_s, again[:, 0]]), np.concatenate([end_s, again[:, 1]]))

    def kv_blocks(self, instance: Instance) -> Level:
        """Return the KV blocks taken on an instance, those of its engine loops together: exactly what was logged.

        Blocks are of 16 tokens (the profile's `block_tokens`) and are taken whole: for a prompt from its launch to the
        end of its transfer on the prefill side, and on the decode side from the posting of the transfer on; for a
        decode step, whose context is one token more than what is stored between steps, at its launch.
        """
        parts = [values for (owner, _), values in sorted(self.kv.items()) if owner == instance]
        if not parts:
            return Level(np.empty(0), np.empty(0))
        at_s = np.concatenate([part[0] for part in parts])
        change = np.concatenate([np.diff(part[1], prepend=0.0) for part in parts])
        return _sum(at_s, change)

    def _first_launch_s(self, instance: Instance) -> Floats:
        """Return by request when its first step of any sort on a decode instance was launched; NaN: never."""
        first = np.full(len(self.requests["arrival_s"]), np.nan)
        for step in self.steps:
            if step.instance == instance:
                for request in (*step.prefill, *step.decode):
                    if np.isnan(first[request]):
                        first[request] = step.launch_s
        # Whoever has its only token from the transfer never decodes.
        done_s = np.where(np.isnan(first), self.requests["last_token_s"], first)
        return np.asarray(done_s, dtype=np.float64)

    def _left_out(self, instance: Instance) -> Iterator[tuple[float, float]]:
        """Yield the spans in which a request that had a step here waited for another one, perhaps for ever."""
        own = [step for step in self.steps if step.instance == instance]
        last: dict[int, LoggedStep] = {}
        waits: dict[int, float] = {}
        members: dict[int, set[int]] = {}
        finished_s = self.requests["last_token_s"]
        for step in own:
            here = {*step.prefill, *step.decode}
            for request in here:
                if request in waits:
                    yield waits.pop(request), step.launch_s
                previous = last.get(request)
                if previous is not None and previous.part != step.part:
                    # It changed its micro-batch, as only preempted ones do, before the old one was launched again.
                    if request in members[previous.part]:
                        yield previous.end_s, step.launch_s
                    members[previous.part].discard(request)
                last[request] = step
            batch = members.setdefault(step.part, set())
            if step.decode:
                for request in batch - here:
                    if not finished_s[request] <= step.launch_s:
                        waits[request] = last[request].end_s
                    batch.discard(request)
            batch |= here
        yield from ((start_s, float("inf")) for start_s in waits.values())


def read_run(folder: Path) -> RunLog:
    """Return the run whose files are in a folder.

    Raises:
        InputError: a file is missing or is not what `dsim simulate` writes.
    """
    log = RunLog(
        summary=read_summary(folder),
        requests=_read_requests(folder),
        steps=tuple(_read_steps(folder)),
        kv=_read_kv(folder),
    )
    if not isinstance(log.summary.get("kv_blocks"), dict):
        raise _broken(folder, SUMMARY, "has no kv_blocks")
    if not log.steps:
        raise InputError(str(folder / STEPS), "has no steps to draw", hint="simulate some requests")
    last = max(max((*step.prefill, *step.decode), default=0) for step in log.steps)
    if last >= len(log.requests["arrival_s"]):
        raise _broken(folder, STEPS, f"names request {last}, of which {EVERY} knows nothing")
    return log


def read_summary(folder: Path) -> Mapping[str, Any]:
    """Return `summary.json`.

    Raises:
        InputError: it is missing or is no object of JSON.
    """
    try:
        found = json.loads(_text(folder, SUMMARY))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _broken(folder, SUMMARY, "is no JSON object")
    return found


def read_columns(folder: Path, name: str, columns: Sequence[str]) -> dict[str, Floats]:
    """Return columns of numbers of a CSV file; empty cells are NaN.

    Raises:
        InputError: the file or a column is missing, or a cell is no number.
    """
    rows = _rows(folder, name, columns)
    return {column: np.array([_number(folder, name, row, column) for row in rows]) for column in columns}


def _read_requests(folder: Path) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {**read_columns(folder, EVERY, (*_TIMES, *_WHOLE))}
    for column in _WHOLE:
        found[column] = found[column].astype(np.int64)
    return found


def _read_steps(folder: Path) -> Iterator[LoggedStep]:
    columns = ("role", "instance", "part", "launch_s", "end_s", "prefill", "decode")
    for row in _rows(folder, STEPS, columns):
        yield LoggedStep(
            instance=_instance(folder, STEPS, row),
            part=int(_number(folder, STEPS, row, "part")),
            launch_s=_number(folder, STEPS, row, "launch_s"),
            end_s=_number(folder, STEPS, row, "end_s"),
            prefill=_numbers(folder, row, "prefill"),
            decode=_numbers(folder, row, "decode"),
        )


def _read_kv(folder: Path) -> dict[tuple[Instance, int], tuple[Floats, Floats]]:
    found: dict[tuple[Instance, int], list[tuple[float, float]]] = {}
    for row in _rows(folder, KV, ("role", "instance", "part", "at_s", "blocks")):
        owner = (_instance(folder, KV, row), int(_number(folder, KV, row, "part")))
        found.setdefault(owner, []).append((_number(folder, KV, row, "at_s"), _number(folder, KV, row, "blocks")))
    return {
        owner: (np.array([at for at, _ in pairs]), np.array([n for _, n in pairs])) for owner, pairs in found.items()
    }


def _rows(folder: Path, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    reader = csv.DictReader(_text(folder, name).splitlines())
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise _broken(folder, name, f"has no column {missing[0]}")
    rows = list(reader)
    for row in rows:
        if any(row[column] is None for column in columns):
            raise _broken(folder, name, "has a row with too few cells")
    return rows


def _text(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file():
        logged = name in {STEPS, KV, EVERY}
        hint = f"run dsim simulate again with -o{' and --step-log' if logged else ''}"
        raise InputError(str(folder), f"has no {name}", hint=hint)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _broken(folder, name, "is not UTF-8 text") from None


def _instance(folder: Path, name: str, row: Mapping[str, str]) -> Instance:
    if row["role"] not in ROLES:
        raise _broken(folder, name, f"has the role {row['role']!r}")
    return Instance(row["role"], int(_number(folder, name, row, "instance")))


def _number(folder: Path, name: str, row: Mapping[str, str], column: str) -> float:
    try:
        return float(row[column] or "nan")
    except ValueError:
        raise _broken(folder, name, f"has {column}={row[column]!r}, which is no number") from None


def _numbers(folder: Path, row: Mapping[str, str], column: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, row[column].split()))
    except ValueError:
        raise _broken(folder, STEPS, f"has {column}={row[column]!r}, which are no request numbers") from None


def _broken(folder: Path, name: str, rule: str) -> InputError:
    return InputError(str(folder / name), rule, hint="run dsim simulate again; the file is not as it wrote it")


def _level(start_s: Floats, end_s: Floats) -> Level:
    """Return how many spans are open; those without an end stay so."""
    start_s = start_s[~np.isnan(start_s)]
    end_s = end_s[np.isfinite(end_s)]
    at_s = np.concatenate([start_s, end_s])
    return _sum(at_s, np.concatenate([np.ones(len(start_s)), -np.ones(len(end_s))]))


def _sum(at_s: Floats, change: Floats) -> Level:
    """Return the running sum of changes, those of one instant together."""
    instants, place = np.unique(at_s, return_inverse=True)
    return Level(instants, np.cumsum(np.bincount(place, weights=change, minlength=len(instants))))
