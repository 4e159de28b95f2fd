"""Latency targets as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.slo import Slo, parse_slo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=0.4,tpot=0.1", Slo(0.4, 0.1)),
        ("ttft=0.4 tpot=0.1", Slo(0.4, 0.1)),
        (" ttft = 0.4 , tpot = 0.1 ", Slo(0.4, 0.1)),
        ("TPOT=.1,TTFT=4e-1", Slo(0.4, 0.1)),
        ("ttft=400ms,tpot=100ms", Slo(0.4, 0.1)),
        ("ttft=0.4s,tpot=0.1s", Slo(0.4, 0.1)),
        ("ttft:400,tpot:100", Slo(0.4, 0.1)),
        ("ttft:400 tpot:100 e2el:3000", Slo(0.4, 0.1, 3.0)),
        ("ttft:400ms,tpot:0.1s", Slo(0.4, 0.1)),
        ("ttft=0.4,tpot:100", Slo(0.4, 0.1)),
        ("ttft=300ms", Slo(0.3)),
        ("tpot=0.1", Slo(tpot_s=0.1)),
        ("e2e=30", Slo(e2e_s=30.0)),
        ("ttft=400s", Slo(400.0)),
        ("ttft=0.4ms", Slo(0.0004)),
        ("e2e=900", Slo(e2e_s=900.0)),
    ],
)
def test_every_form_reads_as_the_same_seconds(text: str, expected: Slo) -> None:
    assert parse_slo(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has an empty limit"),
        (",", "has an empty limit"),
        ("ttft=0.4,", "has an empty limit"),
        ("ttft=0.4,,tpot=0.1", "has an empty limit"),
        ("ttft", "'ttft' is no limit; write ttft=0.4,tpot=0.1"),
        ("0.4,0.1", "'0.4' is no limit"),
        ("ttft<0.4", "'ttft<0.4' is no limit"),
        ("tftt=0.4", "'tftt' is not a known key; did you mean 'ttft'?"),
        ("=0.4", "'' is not a known key; expected one of ttft, tpot, e2e"),
        ("e2el=3", "'e2el' is not a known key; did you mean 'e2e'?"),
        ("ttft=0.4,ttft=0.5", "ttft is given twice; keep one of the two"),
        ("ttft=0.4,TTFT:400", "ttft is given twice"),
        ("ttft=", "ttft='' is not a number"),
        ("ttft=fast", "ttft='fast' is not a number"),
        ("ttft=0.4.1", "is not a number"),
        ("ttft=1=2", "has an unknown unit '=2'"),
        ("ttft=nan", "ttft='nan' must be a finite number"),
        ("ttft=inf", "ttft='inf' must be a finite number"),
        ("ttft=-Infinity", "must be a finite number"),
        ("ttft=1e999", "ttft='1e999' must be a finite number"),
        ("ttft=0", "ttft='0' must be > 0"),
        ("ttft=-0.4", "ttft='-0.4' must be > 0"),
        ("ttft=0.4m", "ttft='0.4m' has an unknown unit 'm'; use s or ms"),
        ("ttft=0,4", "ttft='0' must be > 0"),
        ("ttft=400", "reads as 400 s, longer than any sensible target; write ttft=400ms for milliseconds or ttft=400s"),
        ("tpot=100", "reads as 100 s, longer than any sensible target; write tpot=100ms for milliseconds or tpot=100s"),
        ("tpot=50,ttft=0.4", "write tpot=50ms"),
        ("e2e=30000", "write e2e=30000ms"),
        (
            "ttft:0.4",
            "reads as 0.4 ms, shorter than any sensible target; write ttft=0.4ms for milliseconds or ttft=0.4s",
        ),
        ("tpot:0.05", "write tpot=0.05ms for milliseconds or tpot=0.05s for seconds"),
        ("ttft=0.0004", "shorter than any sensible target"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_slo(text)
    message = str(caught.value)
    assert message.startswith("--slo: ")
    assert words in message
    assert "\n" not in message


def test_errors_name_the_given_place() -> None:
    with pytest.raises(InputError, match=r"^run\.yaml:3: 'tftt'"):
        parse_slo("tftt=1", where="run.yaml:3")


@pytest.mark.parametrize("limit_s", [0.0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_s"])
def test_an_slo_cannot_hold_a_limit_that_nothing_meets(name: str, limit_s: float) -> None:
    with pytest.raises(InputError, match=f"slo: {name}=.* must be > 0"):
        Slo(**{name: limit_s})


def test_no_limit_is_infinite() -> None:
    assert Slo() == Slo(math.inf, math.inf, math.inf)
    assert str(Slo()) == ""


@given(ttft_s=st.floats(1e-3, 59.9), tpot_s=st.floats(1e-4, 4.9), e2e_s=st.floats(1e-3, 3599.0))
def test_what_is_printed_reads_back_as_the_same_slo(ttft_s: float, tpot_s: float, e2e_s: float) -> None:
    slo = Slo(ttft_s, tpot_s, e2e_s)
    assert parse_slo(str(slo)) == slo


@given(st.text(alphabet="tfpoe2=:,. 0123456789-smnaif\n\x00é", max_size=40))
def test_any_text_is_an_slo_or_one_line_of_refusal(text: str) -> None:
    try:
        slo = parse_slo(text)
    except InputError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    else:
        assert min(slo.ttft_s, slo.tpot_s, slo.e2e_s) > 0
