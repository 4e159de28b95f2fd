"""Quantities with units."""

from __future__ import annotations

import pytest

from dsim.errors import InputError
from dsim.units import parse_bytes_per_s, parse_duration_s, parse_rate_per_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2.0), ("300ms", 0.3), ("5 min", 300.0), ("1h", 3600.0), ("20us", 20e-6), ("1e-3", 0.001), ("-2s", -2.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text, "--d") == seconds


@pytest.mark.parametrize(("text", "rate"), [("6", 6.0), ("6/s", 6.0), ("6rps", 6.0), ("90/min", 1.5), ("3600/h", 1.0)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate_per_s(text, "--rate") == rate


@pytest.mark.parametrize(
    ("text", "rate"), [("1e9", 1e9), ("300GB/s", 300e9), ("1GiB/s", 2.0**30), ("400Gbit/s", 50e9), ("5B/s", 5.0)]
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_bytes_per_s(text, "--bandwidth") == rate


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e999", "1 2", "--1", "1.2.3", "0x10", "1km"])
def test_malformed_quantities(text: str) -> None:
    for parse in (parse_duration_s, parse_rate_per_s, parse_bytes_per_s):
        with pytest.raises(InputError, match=r"^--x: "):
            parse(text, "--x")


def test_an_unknown_unit_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"has an unknown unit .mss.; did you mean .ms.\?"):
        parse_duration_s("400mss", "--d")
