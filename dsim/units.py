"""Numbers with units as people write them on a command line, turned into the base units used inside."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from dsim.errors import InputError, nearest

_NUMBER = r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf(?:inity)?)"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([^\s\d.]\S*)?", re.IGNORECASE)

_SECONDS = {"us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_PER_SECOND = {"/s": 1.0, "rps": 1.0, "/min": 1 / 60, "/h": 1 / 3600}
_BYTES = {
    "B": 1.0,
    **{f"{prefix}B": 1000.0**n for n, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{f"{prefix}iB": 1024.0**n for n, prefix in enumerate(("K", "M", "G", "T"), 1)},
}
_BYTES_PER_S = {
    **{f"{unit}/s": size for unit, size in _BYTES.items()},
    **{f"{prefix}bit/s": 1000.0**n / 8 for n, prefix in enumerate(("k", "M", "G", "T"), 1)},
}


def split_quantity(
    text: str, where: str, *, name: str | None = None, hint: str | None = None
) -> tuple[float, str | None]:
    """Return the finite number and the unit (None where there is none) that `text` consists of.

    >>> split_quantity("400 ms", "--slo"), split_quantity("1e3", "--slo")
    ((400.0, 'ms'), (1000.0, None))

    Raises:
        InputError: it is not a number with at most one unit, or not finite.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise InputError(where, "is not a number", name=name, value=text, hint=hint)
    number = float(match[1])
    if not math.isfinite(number):
        raise InputError(where, "must be a finite number", name=name, value=text, hint=hint)
    return number, match[2]


def parse_duration_s(text: str, where: str, *, name: str | None = None) -> float:
    """Return the seconds that `text` says; a bare number is seconds.

    >>> (
    ...     parse_duration_s("400ms", "--timeout"),
    ...     parse_duration_s("2", "--timeout"),
    ...     parse_duration_s("1.5min", "--timeout"),
    ... )
    (0.4, 2.0, 90.0)
    """
    return _scaled(text, where, name=name, units=_SECONDS, hint="as in 0.4 (seconds), 400ms or 2min")


def parse_rate_per_s(text: str, where: str, *, name: str | None = None) -> float:
    """Return the events per second that `text` says; a bare number is per second.

    >>> parse_rate_per_s("90/min", "--rate")
    1.5
    """
    return _scaled(text, where, name=name, units=_PER_SECOND, hint="as in 6 (per second) or 90/min")


def parse_bytes_per_s(text: str, where: str, *, name: str | None = None) -> float:
    """Return the bytes per second that `text` says; a bare number is bytes per second.

    >>> parse_bytes_per_s("25GB/s", "--bandwidth") == parse_bytes_per_s("200Gbit/s", "--bandwidth") == 25e9
    True
    """
    return _scaled(text, where, name=name, units=_BYTES_PER_S, hint="as in 25GB/s or 200Gbit/s")


def parse_share(text: str, where: str, *, name: str | None = None) -> float:
    """Return a share between 0 and 1, both excluded, written as such or in per cent.

    >>> parse_share("90%", "--attainment")
    0.9
    """
    hint = "as in 0.9 or 90%"
    value, unit = split_quantity(text, where, name=name, hint=hint)
    if unit not in (None, "%"):
        raise InputError(where, f"has an unknown unit {unit!r}", name=name, value=text, hint=hint)
    value = value / 100 if unit == "%" else value
    if not 0 < value < 1:
        raise InputError(where, "must be above 0 and below 1", name=name, value=text, hint=hint)
    return value


def _scaled(text: str, where: str, *, name: str | None, units: Mapping[str, float], hint: str) -> float:
    number, unit = split_quantity(text, where, name=name, hint=hint)
    if unit is None:
        return number
    if unit not in units:
        raise InputError(where, f"has an unknown unit {unit!r}", name=name, value=text, hint=nearest(unit, units))
    scale = units[unit]
    # 400 * 1e-3 is 0.4 but 300 * 1e-3 is not 0.3: dividing rounds once, correctly.
    return number / round(1 / scale) if scale < 1 else number * scale


def format_number(value: float) -> str:
    """Return the shortest text that reads back as the same number, without a trailing `.0`.

    >>> format_number(0.4), format_number(60.0), format_number(1e-5)
    ('0.4', '60', '1e-05')
    """
    text = repr(float(value))
    return text.removesuffix(".0")
