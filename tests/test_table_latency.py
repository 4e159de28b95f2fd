"""The table model: exact at every point, linear between, no further than its range; and its form in profile files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.latency import LatencyModel, ValidRange
from dsim.options import Options
from dsim.pools import Placement
from dsim.profile_file import load_profile, parse_profile
from dsim.simulate import simulate
from dsim.slo import parse_slo
from dsim.table_latency import DecodeRow, PrefillTable, TableLatency, interpolated_s
from dsim.workload import Workload
from dsim.workload.parse import parse_arrivals, parse_workload

PREFILL = PrefillTable(
    tokens=(64, 256, 1024), step_s=((0.010, 0.014, 0.050), (0.011, 0.016, 0.055)), cached_tokens=(0, 512)
)
DECODE = (
    DecodeRow(1, (16, 1024, 2048), (0.0101, 0.011, 0.0125)),
    DecodeRow(8, (16, 1024, 2048), (0.0105, 0.013, 0.0155)),
    DecodeRow(64, (16, 512), (0.014, 0.022)),
)
TABLE = TableLatency(PREFILL, DECODE, TableLatency.range_of(PREFILL, DECODE))
PROFILE = """\
dsim_profile: 1
model: opt-13b
gpu: a100-80g
engine: {name: mine, version: "1"}
source: made up
valid_range: {chunk_tokens: 1024, prefill_tokens: 1024, decode_requests: 64}
latency:
  1:
    table:
      prefill: {tokens: [1, 64, 1024], step_s: [0.02, 0.03, 0.25]}
      decode:
        - {requests: 1, request_context_tokens: [1, 1024], step_s: [0.014, 0.0155]}
        - {requests: 64, request_context_tokens: [1, 512], step_s: [0.016, 0.035]}
kv: {capacity_tokens: {tp1pp1: 40000}}
"""


def test_every_point_comes_out_to_the_last_digit() -> None:
    assert isinstance(TABLE, LatencyModel)
    for cached, row in zip(PREFILL.cached_tokens, PREFILL.step_s, strict=True):
        for tokens, step_s in zip(PREFILL.tokens, row, strict=True):
            assert TABLE.prefill_s([(tokens, cached)]) == step_s
    for entry in DECODE:
        for context, step_s in zip(entry.request_context_tokens, entry.step_s, strict=True):
            assert TABLE.decode_s(entry.requests, entry.requests * context) == step_s


def test_linear_between_points_and_held_below_them() -> None:
    assert TABLE.prefill_s([(160, 0)]) == pytest.approx(0.012)
    assert TABLE.prefill_s([(160, 256)]) == pytest.approx((0.012 + 0.0135) / 2)
    assert TABLE.prefill_s([(1, 0)]) == 0.010
    assert TABLE.decode_s(1, 1536) == pytest.approx(0.01175)
    # Between batch sizes at the same mean context.
    assert TABLE.decode_s(4, 4 * 1024) == pytest.approx(0.011 + 3 / 7 * 0.002)
    assert TABLE.decode_s(1, 3) == 0.0101
    assert TABLE.decode_line(8) is None


def test_beyond_the_table_the_last_points_are_continued() -> None:
    assert interpolated_s((2, 4), (1.0, 3.0), 10) == 9.0
    assert TABLE.decode_s(1, 3072) == pytest.approx(0.014)
    assert TABLE.decode_s(120, 120 * 16) == pytest.approx(0.0105 + 2 * 0.0035)
    assert TABLE.prefill_s([(1792, 0)]) == pytest.approx(0.086)


def test_the_range_is_that_of_the_points() -> None:
    # The row of 64 ends where memory did: no step has more context than it.
    assert TABLE.valid_range == ValidRange(1536, 1024, 64, 64 * 512)
    assert TableLatency.range_of(PREFILL, DECODE[:2]).context_tokens == 8 * 2048


@given(st.integers(1, 64), st.integers(1, 2048), st.integers(1, 40))
def test_a_run_is_its_steps(requests: int, context: int, steps: int) -> None:
    run = TABLE.decode_run_s(requests, requests * context, steps)
    assert run.shape == (steps,)
    single = [TABLE.decode_s(requests, requests * (context + i)) for i in range(steps)]
    assert run == pytest.approx(single, rel=1e-12)
    assert np.all(np.diff(run) >= -1e-15)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 400)), min_size=1, max_size=4), st.integers(0, 30))
def test_more_work_never_takes_less(chunks: list[tuple[int, int]], requests: int) -> None:
    alone_s = TABLE.prefill_s(chunks)
    assert TABLE.prefill_s([*chunks, (64, 0)]) >= alone_s - 1e-12
    assert TABLE.prefill_s([(t + 1, s) for t, s in chunks]) >= alone_s - 1e-12
    mixed_s = TABLE.mixed_s(chunks, requests, requests * 500)
    assert mixed_s >= alone_s
    if requests:
        assert mixed_s >= TABLE.decode_s(requests, requests * 500)


def test_cached_tokens_without_rows_of_their_own() -> None:
    squares = PrefillTable(tokens=tuple(range(1, 201)), step_s=(tuple(0.01 + 1e-5 * n * n for n in range(1, 201)),))
    # Attention over 100 + 50 tokens less that over 100.
    assert squares.prompt_s(50, 100) == pytest.approx(0.01001 + 1e-5 * (150**2 - 100**2))
    assert squares.prompt_s(50, 0) == squares.step_s[0][49]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefillTable((4, 2), ((1.0, 2.0),)), "prefill table: tokens=2 must be above 4"),
        (lambda: PrefillTable((), ((),)), "prefill table: tokens must not be empty"),
        (lambda: PrefillTable((1, 2), ((1.0,),)), "prefill table: step_s has 1, must have one time for each of tokens"),
        (lambda: PrefillTable((1,), ((1.0,),), (5,)), "prefill table: cached_tokens=5 must begin with 0"),
        (lambda: DecodeRow(2, (1, 2), (0.0, 1.0)), "decode table, 2 requests: step_s=0.0 must be finite and > 0"),
        (lambda: TableLatency(PREFILL, (), ValidRange()), "decode table: requests must not be empty"),
        (
            lambda: TableLatency(PREFILL, (DECODE[1], DECODE[0]), ValidRange()),
            "decode table: requests=1 must be above 8",
        ),
    ],
)
def test_what_is_no_table(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_profile_files(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE, encoding="utf-8")
    profile = load_profile(path)
    latency = profile.latency_at(1)
    assert isinstance(latency, TableLatency)
    assert latency.prefill_s([(64, 0)]) == 0.03
    assert latency.valid_range == ValidRange(1024, 1024, 64, 64 * 512)
    cached = PROFILE.replace(
        "step_s: [0.02, 0.03, 0.25]", "cached_tokens: [0, 500], step_s: [[0.02, 0.03, 0.25], [0.021, 0.04, 0.3]]"
    )
    assert parse_profile(cached.encode(), file="p").latency_at(1).prefill_s([(64, 500)]) == 0.04


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1, 64, 1024]", "[1, 64, 64]", "p:10: latency.1.table.prefill.tokens=64 must be above 64"),
        ("[0.02, 0.03, 0.25]", "[0.02, 0.03]", "p:10: latency.1.table.prefill.step_s has 2, must have one time for"),
        ("[0.02, 0.03, 0.25]", "[0.02, 30, 0.25]", "p:10: latency.1.table.prefill.step_s[1]=30 must be <= 10"),
        (
            "[0.02, 0.03, 0.25]",
            "[0.03, 0.02, 0.25]",
            "p:8: latency.1 breaks the contract of latency models: prefill falls",
        ),
        ("[1, 512]", "[512, 1]", "p:13: latency.1.table.decode[1].request_context_tokens=1 must be above 512"),
        ("requests: 64, r", "requests: 1, r", "p:11: latency.1.table.decode.requests=1 must be above 1"),
        ("    table:", "    table:\n      colour: red", "p:10: 'colour' is not a known key in latency.1.table"),
        (
            "decode_requests: 64}",
            "decode_requests: 65}",
            "p:9: latency.1.table must reach valid_range.decode_requests=65, and ends at 64; lower valid_range, or",
        ),
    ],
)
def test_mistakes_are_named_with_their_line(old: str, new: str, message: str) -> None:
    assert old in PROFILE
    with pytest.raises(InputError) as caught:
        parse_profile(PROFILE.replace(old, new).encode(), file="p")
    assert str(caught.value).startswith(message)


def test_extrapolation_must_be_said() -> None:
    further = PROFILE.replace("decode_requests: 64}", "decode_requests: 128}").replace(
        "    table:", "    table:\n      extrapolate: true"
    )
    valid = parse_profile(further.encode(), file="p").latency_at(1).valid_range
    assert (valid.decode_requests, valid.context_tokens) == (128, math.inf)


def test_a_simulation_with_a_table_keeps_the_laws(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE, encoding="utf-8")
    profile = load_profile(path)
    workload = Workload(parse_arrivals("poisson"), parse_workload("fixed:200,40"))
    trace = workload.trace(num_requests=300, seed=1, context_tokens=1024, rate_per_s=6.0)
    result = simulate(Placement.parse("1xC:tp1pp1"), trace, profiles=profile, options=Options(check=True))
    assert result.attainment(parse_slo("ttft=1,tpot=0.1")).both > 0.5
