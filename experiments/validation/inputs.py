"""What a replay needs to know of the benchmark client and the engine, and what is tried where nobody says."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dsim.errors import InputError, nearest
from dsim.pools import Policy
from dsim.units import format_number, parse_duration_s, parse_rate_per_s, split_quantity
from experiments.validation.measured import Value


class Loop(enum.Enum):
    """When a benchmark client sends its requests."""

    #: At the instants that were measured.
    REPLAY = "replay"
    #: At a rate, whatever becomes of them.
    OPEN = "open"
    #: All of them at once.
    BURST = "burst"
    #: A number of users, each of whom sends the next request when the last one is done.
    CLOSED = "closed"


class Origin(enum.Enum):
    """Who says what the value of an input is."""

    GIVEN = "given"
    FILE = "file"
    PROFILE = "profile"
    DEFAULT = "default"
    #: Nobody: several plausible values are tried.
    UNKNOWN = "unknown"


ORIGINS: Final = {
    Origin.GIVEN: "given",
    Origin.FILE: "from the file",
    Origin.PROFILE: "from the profile",
    Origin.DEFAULT: "by default",
    Origin.UNKNOWN: "not known, all tried",
}


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a replay with its value, or with the values tried.

    Args:
        note: what the value means here, in words.
    """

    name: str
    values: tuple[Value, ...]
    origin: Origin
    note: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there is one value."""
        return len(self.values) == 1

    def __str__(self) -> str:
        values = " | ".join(map(shown, self.values))
        origin = ORIGINS[self.origin]
        return f"{self.name}={values} ({origin}{'; ' if self.note else ''}{self.note})"


#: Every input, in the order in which they are printed, with what it means.
NAMES: Final[Mapping[str, str]] = {
    "loop": "when requests are sent: replay (the measured instants), open, burst (all at once) or closed",
    "rate_per_s": "open: mean arrivals per second",
    "burstiness": "open: shape of the gamma-distributed gaps, as in vllm bench; 1 is Poisson, inf equal gaps",
    "fixed_span": "open: gaps are scaled so that the last of n requests is sent at n / rate, as in vllm bench",
    "users": "closed: requests in flight",
    "turnaround_s": "closed: the client's time between a last token and the next request",
    "stagger_s": "closed: time between the users' first requests",
    "first_wave_counted": "closed: whether the first request of each user counts",
    "num_requests": "requests sent in all",
    "workload": "lengths as after --workload, instead of the next four",
    "prompt_tokens": "nominal or mean prompt",
    "output_tokens": "nominal or mean output",
    "lengths_are": "nominal: what the client was asked for; mean: of what it sent",
    "length_range": "exact, or LOW-HIGH: uniform between these multiples of the nominal lengths",
    "seed": "of what is drawn: arrivals, lengths, routing",
    "policy": "scheduling of colocated instances",
    "token_budget": "tokens per step of chunked",
    "max_seqs": "most requests of one step",
    "kv_blocks": "KV blocks of an instance; profile: its own number, or PERCENT% of it",
    "kv_dtype": "what KV is stored in: as the profile says",
    "handover": "how KV gets from the prefill to the decode side: as the profile says",
}
_WHOLE: Final = ("users", "num_requests", "prompt_tokens", "output_tokens", "seed", "token_budget", "max_seqs")
_MOST: Final = {"seed": 2**32 - 1, "users": 1_000_000, "num_requests": 1_000_000}
_RANGE: Final = re.compile(r"([0-9]*\.?[0-9]+)-([0-9]*\.?[0-9]+)")
#: Inputs that are part of a profile, and what else than another profile changes them.
_OF_THE_PROFILE: Final = {"kv_dtype": "--kv-dtype", "handover": "--handover"}


def parse_assumption(text: str, option: str = "--assume") -> tuple[str, tuple[Value, ...]]:
    """Return an input's name and its value, or the values to try.

    >>> parse_assumption("token_budget=2048,8192"), parse_assumption("turnaround_s=5ms")
    (('token_budget', (2048, 8192)), ('turnaround_s', (0.005,)))

    Raises:
        InputError: it is none.
    """
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise InputError(option, "is no assumption", value=text, hint="write KEY=VALUE, as in token_budget=8192")
    if name not in NAMES:
        raise InputError(option, "is not a known input", value=name, hint=nearest(name, NAMES))
    # A workload has commas of its own.
    parts = [values] if name == "workload" else values.split(",")
    return name, tuple(dict.fromkeys(parse_value(name, part.strip(), option) for part in parts))


def parse_value(name: str, text: str, where: str) -> Value:
    """Return the value of an input.

    Raises:
        InputError: it has no such value.
    """
    if name in _OF_THE_PROFILE:
        raise InputError(where, "is what the profile says", name=name, value=text, hint=f"give {_OF_THE_PROFILE[name]}")
    if not text:
        raise InputError(where, "is empty", name=name, hint=NAMES[name])
    if name in _WHOLE:
        return _whole(name, text, where)
    if name == "rate_per_s":
        return _positive(name, text, parse_rate_per_s(text, where, name=name), where)
    if name in {"turnaround_s", "stagger_s"}:
        seconds = parse_duration_s(text, where, name=name)
        if seconds < 0:
            raise InputError(where, "must be >= 0", name=name, value=text)
        return seconds
    if name == "burstiness":
        return math.inf if text == "inf" else _positive(name, text, _number(name, text, where), where)
    if name in {"fixed_span", "first_wave_counted"}:
        return _choice(name, text, {"true": True, "yes": True, "false": False, "no": False}, where)
    if name == "loop":
        return _choice(name, text, {loop.value: loop.value for loop in Loop}, where)
    if name == "policy":
        return _choice(name, text, {policy.value: policy.value for policy in Policy}, where)
    if name == "lengths_are":
        return _choice(name, text, {"nominal": "nominal", "mean": "mean"}, where)
    if name == "length_range":
        return text if text == "exact" else "{:g}-{:g}".format(*range_of(text, where))
    if name == "kv_blocks":
        if text == "profile":
            return "100%"
        if text.endswith("%"):
            share = _positive(name, text, _number(name, text[:-1], where), where)
            return f"{share:g}%"
        return _whole(name, text, where)
    return text


def range_of(text: str, where: str = "length_range") -> tuple[float, float]:
    """Return the shortest and the longest length as multiples of the nominal one.

    >>> range_of("exact"), range_of("0.8-1")
    ((1.0, 1.0), (0.8, 1.0))
    """
    if text == "exact":
        return 1.0, 1.0
    match = _RANGE.fullmatch(text)
    if match is None or not 0 <= float(match[1]) <= float(match[2]) <= 10 or float(match[2]) == 0:
        raise InputError(
            where, "is no range", name="length_range", value=text, hint="write exact, or LOW-HIGH as 0.8-1"
        )
    return float(match[1]), float(match[2])


def shown(value: Value) -> str:
    """Return the value as it is written after `--assume`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return format_number(value) if isinstance(value, float) else str(value)


def _whole(name: str, text: str, where: str) -> int:
    least, most = 0 if name == "seed" else 1, _MOST.get(name, 1_000_000_000)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InputError(where, "must be a whole number", name=name, value=text)
    if not least <= int(text) <= most:
        raise InputError(where, f"must be between {least} and {most}", name=name, value=text)
    return int(text)


def _number(name: str, text: str, where: str) -> float:
    number, unit = split_quantity(text, where, name=name)
    if unit is not None:
        raise InputError(where, "must be a number without a unit", name=name, value=text)
    return number


def _positive(name: str, text: str, number: float, where: str) -> float:
    if not 1e-9 <= number <= 1e9:
        raise InputError(where, "must be between 1e-9 and 1e9", name=name, value=text)
    return number


def _choice(name: str, text: str, known: Mapping[str, Value], where: str) -> Value:
    if text.lower() not in known:
        raise InputError(where, "is not a known value", name=name, value=text, hint=nearest(text, known))
    return known[text.lower()]
