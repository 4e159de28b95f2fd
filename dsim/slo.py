"""Service-level objectives: the latency limits a request must meet."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dsim.errors import InputError, nearest
from dsim.units import format_number, split_quantity

_EXAMPLE = "ttft=0.4,tpot=0.1"
#: A bare number outside these seconds is more likely a slip of unit than a target; with a unit it is taken at its word.
_PLAUSIBLE_S = {"ttft": (1e-3, 60.0), "tpot": (1e-4, 5.0), "e2e": (1e-3, 3600.0)}
_VLLM_KEYS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}
_UNIT_S = {"s": 1.0, "ms": 1e3}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on TTFT, TPOT and E2E, seconds, all inclusive; `math.inf` where there is none.

    >>> print(Slo(ttft_s=0.4, tpot_s=0.1))
    ttft=0.4,tpot=0.1
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    def __post_init__(self) -> None:
        for name, limit_s in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("e2e_s", self.e2e_s)):
            if not limit_s > 0:
                raise InputError("slo", "must be > 0", name=name, value=limit_s, hint="give seconds")

    def __str__(self) -> str:
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return ",".join(f"{key}={format_number(limit)}" for key, limit in limits.items() if math.isfinite(limit))


def parse_slo(text: str, where: str = "--slo") -> Slo:
    """Return the limits that `text` says.

    `key=value` pairs, separated by commas or spaces, with the keys ttft, tpot and e2e. A bare value is seconds, or
    milliseconds in vLLM's form `key:value`; `ms` and `s` say it in either form.

    >>> parse_slo("ttft=0.4,tpot=100ms") == parse_slo("ttft:400 tpot:100") == Slo(ttft_s=0.4, tpot_s=0.1)
    True

    Raises:
        InputError: no pair, an unknown or repeated key, no positive finite number, or one that is implausible without
            a unit.
    """
    limits_s: dict[str, float] = {}
    for pair in re.sub(r"\s*([=:])\s*", r"\1", text).split(","):
        for item in pair.split() or [""]:
            key, limit_s = _parse_limit(item, where)
            if key in limits_s:
                raise InputError(where, "is given twice", name=key, hint="keep one of the two")
            limits_s[key] = limit_s
    return Slo(**{f"{key}_s": limit_s for key, limit_s in limits_s.items()})


def _parse_limit(item: str, where: str) -> tuple[str, float]:
    if not item:
        raise InputError(where, "has an empty limit", hint=f"write {_EXAMPLE}")
    separator = min((s for s in "=:" if s in item), key=item.index, default=None)
    if separator is None:
        raise InputError(where, "is no limit", value=item, hint=f"write {_EXAMPLE}")
    key, _, value = item.partition(separator)
    key = key.strip().lower()
    key = _VLLM_KEYS.get(key, key) if separator == ":" else key
    if key not in _PLAUSIBLE_S:
        raise InputError(where, "is not a known key", value=key, hint=nearest(key, _PLAUSIBLE_S))
    number, unit = split_quantity(value, where, name=key, hint=f"write {_EXAMPLE}")
    if number <= 0:
        raise InputError(where, "must be > 0", name=key, value=value, hint=f"write {_EXAMPLE}")
    if unit is not None:
        if unit not in _UNIT_S:
            raise InputError(where, f"has an unknown unit {unit!r}", name=key, value=value, hint="use s or ms")
        return key, number / _UNIT_S[unit]
    limit_s = number if separator == "=" else number / 1e3
    shortest_s, longest_s = _PLAUSIBLE_S[key]
    if not shortest_s <= limit_s < longest_s:
        bare = format_number(number)
        taken = f"{bare} s" if separator == "=" else f"{bare} ms"
        raise InputError(
            where,
            f"reads as {taken}, {'longer' if limit_s >= longest_s else 'shorter'} than any sensible target",
            name=key,
            value=value,
            hint=f"write {key}={bare}ms for milliseconds or {key}={bare}s for seconds",
        )
    return key, limit_s
