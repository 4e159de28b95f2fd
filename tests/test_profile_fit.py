"""Fits: constants, Lm and K of made-up rows are recovered; measured rows that were not fitted are predicted."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from dsim.affine import bent_s
from dsim.catalog import find_gpu, find_model
from dsim.contract import decode_bound_s, find_violations, prefill_bound_s
from dsim.errors import InputError
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends
from dsim.options import Options, PrefillBatching
from dsim.pools import Parallelism, Role
from dsim.profile_file import load_profile, parse_profile
from dsim.profile_fit import Fit
from profiles import splitwise
from profiles.appendix_a import fit_appendix_a
from profiles.entries import model_entry
from profiles.export import Subject, profile_text
from profiles.fit import fit_rows
from profiles.forms import fit_latency
from profiles.rows import Metadata, Phase, Point, Row, Rows, bound_s, parse_rows, rows_text
from profiles.shapes import Shape, read_config
from profiles.splitwise import GPUS, read_splitwise
from profiles.timed import predict, timed, valid_range_of
from tests.cli import Cli

TRUTH = Path(__file__).parents[2] / "shared" / "data" / "truth"
needs_truth = pytest.mark.skipif(not TRUTH.is_dir(), reason="needs the measurements beside the repository")
PREFILL_GRID = [(n, t) for n in (1, 2, 4, 8) for t in (64, 128, 256, 512, 1024, 2048, 4096)]
DECODE_GRID = [(b, c) for b in (1, 2, 4, 8, 16, 32, 64, 128) for c in (128, 512, 2048)]


def rows_of(latency: AffineLatency, *, tp: int = 1, noise: float = 0.0, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    points = [Point("prefill", tp, n, t) for n, t in PREFILL_GRID]
    points += [Point("decode", tp, b, context_tokens=c) for b, c in DECODE_GRID]
    times_s = predict(latency, points)
    return [
        Row(p, float(s * math.exp(noise * rng.standard_normal())), repeat)
        for repeat in range(3)
        for p, s in zip(points, times_s, strict=True)
    ]


def affine(prefill: Sequence[float], decode: Sequence[float], *, decode_bends: Bends = ()) -> AffineLatency:
    p = AffinePrefill(prefill[0], prefill[1], prefill[2])
    d = AffineDecode(decode[0], decode[1], decode[2], bends=decode_bends)
    return AffineLatency(p, d, d, 1)


TYPICAL = {
    "prefill.constant_s": 0.015,
    "prefill.per_token_s": 1e-4,
    "prefill.per_token_squared_s": 8e-9,
    "decode.constant_s": 0.02,
    "decode.per_context_token_s": 6e-7,
    "decode.per_request_s": 4e-5,
}
SEEDS = 60


def fits_of_made_up_rows(*, noise: float, bend: bool) -> Iterator[tuple[dict[str, float], dict[str, Fit]]]:
    """Yield true constants and fitted ones of rows with known noise."""
    rng = np.random.default_rng(1)
    for seed in range(SEEDS):
        true = {name: float(value * rng.uniform(0.5, 2)) for name, value in TYPICAL.items()}
        values = list(true.values())
        bends: Bends = ()
        if bend:
            values[5] = true["decode.per_request_s"] = true["decode.per_request_s"] / 2
            true["bend"] = 10 * values[5]
            bends = ((48, true["bend"]),)
        found = fit_latency(rows_of(affine(values[:3], values[3:], decode_bends=bends), noise=noise, seed=seed), 1)
        constants = found.constants()
        for name, fit in list(constants.items()):
            if name.startswith("decode.bends") and len(found.latency.small.bends) == 1:
                constants["bend"] = fit
        yield true, constants


@pytest.mark.parametrize(("noise", "bend"), [(0.01, False), (0.005, True), (0.03, True)])
def test_intervals_hold_the_truth_as_often_as_they_say_and_are_no_wider_than_that_needs(
    noise: float, bend: bool
) -> None:
    """95 % intervals: 53 of 60 and more are what they hold 99.8 times of 100 (binomial)."""
    fits = list(fits_of_made_up_rows(noise=noise, bend=bend))
    for name in [*TYPICAL, *(["bend"] if bend else [])]:
        known = [(true[name], constants[name]) for true, constants in fits if name in constants]
        assert len(known) >= 54
        held = [fit.low <= value <= fit.high for value, fit in known]
        assert np.mean(held) >= 0.88, name
        off = [fit.best / value - 1 for value, fit in known]
        half = [(fit.high - fit.low) / 2 / value for value, fit in known]
        # Normal errors have half-widths of two standard deviations; quartiles, as a wrong bend is far off.
        spread = (np.quantile(off, 0.75) - np.quantile(off, 0.25)) / 1.349
        assert np.median(half) <= 3.5 * spread, name


@settings(max_examples=25, deadline=None)
@given(
    scales=st.tuples(*[st.floats(0.5, 2.0)] * 6), noise=st.sampled_from([0.0, 0.003, 0.01]), seed=st.integers(0, 999)
)
def test_step_times_are_recovered(scales: tuple[float, ...], noise: float, seed: int) -> None:
    true = [s * t for s, t in zip(scales, TYPICAL.values(), strict=True)]
    found = fit_latency(rows_of(affine(true[:3], true[3:]), noise=noise, seed=seed), 1)
    points = [Point("prefill", 1, n, t) for n, t in PREFILL_GRID]
    exact = predict(affine(true[:3], true[3:]), points)
    assert np.abs(predict(found.latency, points) / exact - 1).max() <= 0.002 + 3 * noise
    if not noise:
        constants = found.constants()
        for name, value in zip(TYPICAL, true, strict=True):
            assert constants[name].best == pytest.approx(value, rel=0.02), name


def test_without_noise_constants_are_exact() -> None:
    constants = fit_latency(rows_of(affine((0.015, 1e-4, 8e-9), (0.02, 6e-7, 4e-5))), 1).constants()
    for name, value in TYPICAL.items():
        fit = constants[name]
        assert fit.best == pytest.approx(value, rel=1e-3)
        assert fit.low <= fit.best <= fit.high <= 1.01 * fit.best


def test_a_bend_in_the_batch_is_recovered_and_continuous() -> None:
    true = affine((0.015, 1e-4, 8e-9), (0.02, 6e-7, 2e-5), decode_bends=((48, 2e-4),))
    latency = fit_latency(rows_of(true, noise=0.002), 1).latency
    (start, slope_s), *more = latency.small.bends
    assert not more
    assert start == pytest.approx(48, rel=0.15)
    assert slope_s == pytest.approx(2e-4, rel=0.1)
    times_s = [latency.decode_s(b, 512 * b) for b in range(1, 129)]
    assert all(0 < b - a < 2e-3 for a, b in itertools.pairwise(times_s))


def test_intervals_count_that_the_place_of_a_bend_is_fitted_too() -> None:
    """Half-widths are those of least squares with the bend as one constant more, linear for so little noise."""
    true = affine((0.015, 1e-4, 8e-9), (0.02, 6e-7, 2e-5), decode_bends=((48, 2e-4),))
    rows = rows_of(true, noise=0.002)
    found = fit_latency(rows, 1)
    points = timed(rows, Phase.DECODE, 1)
    batch, context = points.column("requests"), points.column("context_tokens")
    columns = [np.ones_like(batch), batch * context, np.minimum(batch, 48), np.maximum(batch - 48, 0)]
    with_bend = np.stack([*columns, np.where(batch > 48, -1.8e-4, 0)], 1) / points.step_s[:, None]
    residuals = found.decode.solved.residuals
    freedom = len(batch) - 5
    sigma = math.sqrt(float(residuals @ residuals) / freedom)
    quantile = float(student.ppf(0.975, freedom))
    half = quantile * sigma * np.sqrt(np.diag(np.linalg.inv(with_bend.T @ with_bend)))
    constants = found.constants()
    for i, name in enumerate(["constant_s", "per_context_token_s", "per_request_s"]):
        fit = constants[f"decode.{name}"]
        assert (fit.high - fit.low) / 2 == pytest.approx(half[i], rel=0.08), name


PREFILLS = [Row(Point("prefill", 1, n, t), 0.025 + 1.4e-4 * n * t) for n in (1, 2) for t in (64, 256, 1024, 4096)]


def decodes(step_s: Callable[[int, int], float], contexts: Sequence[int] = (128, 512, 2048)) -> list[Row]:
    return [Row(Point("decode", 1, b, context_tokens=c), step_s(b, c)) for b in (1, 2, 4, 8, 16) for c in contexts]


def numbered(rows: Sequence[Row]) -> Rows:
    """The rows as those of a file, the first on line 2."""
    return Rows("rows.csv", Metadata(), tuple(Row(r.point, r.step_s, r.repeat, line=i + 2) for i, r in enumerate(rows)))


def test_what_points_cannot_tell_apart_has_intervals_as_wide_as_that_leaves_open() -> None:
    """Contexts of 510 to 514 tokens: a request costs 4e-5 s, or its context does, or both half."""
    rng = np.random.default_rng(0)
    rows = decodes(lambda b, c: (0.02 + 4e-5 * b) * (1 + 1e-3 * rng.standard_normal()), contexts=(510, 512, 514))
    constants = fit_latency(PREFILLS + rows, 1).constants()
    request, context = constants["decode.per_request_s"], constants["decode.per_context_token_s"]
    assert request.low <= 1e-6
    assert 3e-5 <= request.high <= 6e-5
    assert context.low <= 1e-9
    assert 3e-5 / 512 <= context.high <= 6e-5 / 512


def test_one_context_is_refused_by_line() -> None:
    """With equal contexts nothing tells what a longer one costs."""
    rows = numbered(PREFILLS + decodes(lambda b, _: 0.02 + 4e-5 * b, contexts=(512,)))
    with pytest.raises(InputError) as caught:
        fit_rows(rows)
    assert str(caught.value) == (
        "rows.csv:10: decode points of tp 1 cannot tell what a request costs from what its context costs "
        "(lines 10 to 14); time a second context (all have 512 tokens a request)"
    )


def test_too_few_points_to_hold_any_out_are_no_error() -> None:
    """Every second of these decode points leaves one context."""
    rows = [Row(Point("decode", 1, b, context_tokens=c), 0.02 + 1e-4 * b + 1e-6 * b * c)
            for c, b in [(512, 1), (512, 2), (512, 4), (512, 8), (512, 16), (1024, 1)]]  # fmt: skip
    fitted = fit_rows(Rows("rows.csv", Metadata(), tuple(PREFILLS + rows))).by_tp[1]
    assert [e.phase for e in fitted.errors if e.region.startswith("held out")] == ["prefill"]


# K, appendix A, errors


def test_k_is_the_ratio_and_carries_the_share_of_the_all_reduce() -> None:
    one = affine((0.016, 1.2e-4, 8e-9), (0.02, 6e-7, 4e-5))
    two = affine((0.010, 0.7e-4, 4e-9), (0.012, 3e-7, 3e-5))
    rows = rows_of(one) + [Row(r.point, r.step_s, r.repeat, 0.1 * r.step_s) for r in rows_of(two, tp=2)]
    fitted = fit_rows(Rows("rows.csv", Metadata(), tuple(rows)))
    found = {(k.phase, k.tokens): k for k in fitted.speed_up}
    for tokens in (64, 512, 4096):
        true = one.prefill_s([(tokens, 0)]) / two.prefill_s([(tokens, 0)])
        k = found["prefill", tokens]
        assert k.k.best == pytest.approx(true, rel=0.01)
        assert k.comm_share == pytest.approx(0.1)
        assert k.context_tokens is None
    # A batch's K depends on its context: it is that of 512 tokens, and says so.
    for batch in (1, 128):
        k = found["decode", batch]
        assert k.context_tokens == 512
        assert k.k.best == pytest.approx(one.decode_s(batch, 512 * batch) / two.decode_s(batch, 512 * batch), rel=0.01)
    assert len(found) == len(fitted.speed_up)


def test_k_lies_in_its_interval() -> None:
    one = affine((0.016, 1.2e-4, 8e-9), (0.02, 6e-7, 4e-5))
    two = affine((0.010, 0.7e-4, 4e-9), (0.012, 3e-7, 3e-5))
    held, widths = [], []
    for seed in range(8):
        rows = rows_of(one, noise=0.02, seed=seed) + rows_of(two, tp=2, noise=0.02, seed=100 + seed)
        fitted = fit_rows(Rows("rows.csv", Metadata(), tuple(rows)))
        errors = {(e.tp, e.phase): e.mean for fit in fitted.by_tp.values() for e in fit.errors if e.region == "all"}
        for k in fitted.speed_up:
            size = [(k.tokens, 0)]
            true = one.prefill_s(size) / two.prefill_s(size)
            if k.phase == "decode":
                true = one.decode_s(k.tokens, 512 * k.tokens) / two.decode_s(k.tokens, 512 * k.tokens)
            if k.phase == "decode" or k.tokens <= 4096:  # one prompt
                held.append(k.k.low <= true <= k.k.high)
            widths.append(k.k.high / k.k.best - 1)
            wide = 2 * math.hypot(errors[1, k.phase], errors[2, k.phase])
            assert k.k.high == pytest.approx(k.k.best * (1 + wide))
            assert k.k.low == pytest.approx(k.k.best / (1 + wide))
    assert np.mean(held) >= 0.88
    assert 0.01 <= np.median(widths) <= 0.1


def test_appendix_a_is_recovered() -> None:
    """Worked out from the paper's formulas for OPT-13B at TP 2: h = 5120, m = 20480, so 4h^2 + 2hm = 314572800."""
    c1, c2, c3, c4, c5 = 4e-13, 3e-12, 0.012, 9e-11, 7e-11
    rows = []
    for n, t in PREFILL_GRID:
        step_s = c1 * n * t * 314572800 / 2 + c2 * 3 * 5120 / 2 * n * t * t / 16 + c3
        rows.append(Row(Point("prefill", 2, n, t), step_s))
    for b, c in DECODE_GRID:
        rows.append(Row(Point("decode", 2, b, context_tokens=c), c4 * 314572800 / 2 + c5 * 3 * 5120 / 2 * b * c))
    found = fit_appendix_a(rows, 2, find_model("13b"))
    assert found is not None
    assert found.constants == pytest.approx((c1, c2, c3, c4, c5), rel=1e-6)
    assert found.prefill_error < 1e-6
    assert found.decode_error < 1e-6
    slow = [Row(r.point, 2 * r.step_s if r.point.context_tokens == 2048 else r.step_s) for r in rows]
    off = fit_appendix_a(slow, 2, find_model("13b"))
    assert off is not None
    assert off.prefill_error < 1e-6 < off.decode_error


def test_errors_held_out_are_those_of_a_fit_to_the_other_points() -> None:
    true = affine((0.015, 1e-4, 8e-9), (0.02, 6e-7, 2e-5), decode_bends=((48, 2e-4),))
    rows = rows_of(true, noise=0.02)
    fitted = fit_rows(Rows("rows.csv", Metadata(), tuple(rows))).by_tp[1]
    for phase in (Phase.PREFILL, Phase.DECODE):
        points = timed(rows, phase, 1)
        test = points.points[1::2]
        half = fit_latency([row for row in rows if row.point not in test], 1).latency
        medians = np.array([np.median([row.step_s for row in rows if row.point == point]) for point in test])
        off = np.abs(predict(half, test) / medians - 1)
        (error,) = [e for e in fitted.errors if e.phase == phase.value and e.region.startswith("held out")]
        assert error.points == len(test)
        assert error.mean == pytest.approx(off.mean(), rel=1e-12)
        assert error.worst == pytest.approx(off.max(), rel=1e-12)
        (own,) = [e for e in fitted.errors if e.phase == phase.value and e.region == "all"]
        assert own.mean < error.mean


def test_cached_context_and_mixed_steps_are_predicted() -> None:
    true = affine((0.015, 1e-4, 8e-9), (0.02, 6e-7, 4e-5))
    points = [Point("prefill", 1, n, t, s) for n in (1, 4) for t in (256, 1024) for s in (1024, 4096)]
    points += [Point("mixed", 1, 1, 512, 0, 1024, b) for b in (4, 32)]
    rows = rows_of(true) + [Row(p, float(s)) for p, s in zip(points, predict(true, points), strict=True)]
    fitted = fit_rows(Rows("rows.csv", Metadata(), tuple(rows))).by_tp[1]
    assert all(error.mean < 0.01 for error in fitted.errors if error.region == "all")
    assert {error.phase for error in fitted.errors} == {"prefill", "decode", "mixed"}


def test_too_few_points_are_refused() -> None:
    rows = [Row(Point("prefill", 1, 1, t), 1e-4 * t + 0.01) for t in (64, 128, 256, 512)]
    rows += [Row(Point("decode", 1, b, context_tokens=512), 0.01) for b in (1, 2)]
    with pytest.raises(InputError, match=r"rows\.csv: has 2 decode points for tp 1, a fit needs 3 or more"):
        fit_rows(Rows("rows.csv", Metadata(), tuple(rows)))


def test_rows_below_the_datasheet_are_refused_by_line() -> None:
    """A 13B model reads 26 GB of weights a step: 12.6 ms on an A100."""
    model, gpu = find_model("13b"), find_gpu("a100-80g")
    rows = rows_of(affine((0.02, 1.3e-4, 8e-9), (0.005, 1.2e-6, 4e-5)))
    rows = [Row(r.point, r.step_s, r.repeat, line=i + 2) for i, r in enumerate(rows)]
    with pytest.raises(InputError) as caught:
        fit_rows(Rows("rows.csv", Metadata(), tuple(rows)), model=model, gpu=gpu)
    assert "tp 1 decode of" in str(caught.value)
    assert "datasheet allows opt-13b" in str(caught.value)
    assert caught.value.where.startswith("rows.csv:")


# What is refused

OPT, A100 = find_model("13b"), find_gpu("a100-80g")


def refused(rows: Sequence[Row], *, host_step_s: float = 0.0) -> str:
    """Return the error of a fit that is refused; line 2 is the first row's."""
    with pytest.raises(InputError) as caught:
        fit_rows(numbered(rows), model=OPT, gpu=A100, host_step_s=host_step_s)
    return str(caught.value)


def test_steps_that_depend_on_nothing_are_refused_with_their_lines() -> None:
    text = refused(PREFILLS + decodes(lambda b, c: 0.032 + 1e-4 * b))
    assert "decode takes the same for 1 and for 2048 context tokens (lines 10, 11," in text
    text = refused(PREFILLS + decodes(lambda b, c: 0.032))
    assert text.startswith(
        "rows.csv:10: the fit of tp 1 breaks the contract of latency models: decode takes the same for"
    )
    assert "(lines 10, 11, 12, 13, 14, 15, 16, 17, ...)" in text
    flat = [Row(row.point, 0.8) for row in PREFILLS]
    text = refused(flat + decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c))
    assert text.startswith(
        "rows.csv:2: the fit of tp 1 breaks the contract of latency models: prefill takes the same for"
    )


def test_steps_that_fall_are_refused_with_their_lines() -> None:
    """The fit, which never falls, would be a constant 9 % off."""
    rows = decodes(lambda b, c: 0.03 - 0.001 * min(b, 8) + 1e-9 * c, (128, 256, 512))
    text = refused(PREFILLS + rows)
    assert text.startswith(
        "rows.csv:19: tp 1 decode of 8 x 128 context tokens takes 22 ms, 24% less than tp 1 decode of 1 x"
    )
    assert "(lines 10, 19)" in text
    rows = [Row(r.point, 0.05 - 0.01 * math.log2(r.point.prompt_tokens / 64)) for r in PREFILLS]
    rows = [Row(r.point, max(r.step_s, 0.02)) for r in rows]
    assert "tp 1 prefill of" in refused(rows + decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c))


def test_one_bad_point_and_noise_are_no_falls() -> None:
    rows = decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c)
    off = [
        Row(r.point, 2 * r.step_s if (r.point.requests, r.point.context_tokens) == (2, 512) else r.step_s) for r in rows
    ]
    fitted = fit_rows(numbered(PREFILLS + off), model=OPT, gpu=A100).by_tp[1]
    assert fitted.latency.decode_s(1, 512) == pytest.approx(0.02 + 4e-5 + 1e-6 * 512, rel=0.03)
    rng = np.random.default_rng(0)
    noisy = [Row(r.point, r.step_s * math.exp(0.1 * rng.standard_normal()), k) for r in rows for k in range(3)]
    assert fit_rows(numbered(PREFILLS + noisy), model=OPT, gpu=A100).by_tp[1].latency.decode_s(1, 512) > 0.01
    # The same steps once each, said to be exact: they fall.
    exact = [Row(r.point, r.step_s * (0.7 if r.point.requests in (4, 8, 16) else 1)) for r in rows]
    assert "less than tp 1 decode of" in refused(PREFILLS + exact)


def test_a_fit_below_the_datasheet_is_refused_with_the_rows_next_to_it() -> None:
    """No line fits a roofline: with three points on it, the fit is below it."""
    rows = []
    for tokens in (64, 256, 2048):
        bound_s = prefill_bound_s([(tokens, 0)], model=OPT, gpu=A100, tp=1)
        rows.append(Row(Point("prefill", 1, 1, tokens), 1.001 * bound_s))
    text = refused(rows + decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c))
    assert text.startswith("rows.csv:")
    assert "the fit of tp 1 breaks the contract of latency models: prefill of" in text
    assert "datasheet allows (lines 2, 3, 4)" in text


def test_where_rows_leave_it_open_the_constant_is_the_time_to_read_the_weights() -> None:
    """Prompts of 4096 tokens and more say nothing of small steps; an A100 reads OPT-13B's layers in 12.3 ms."""
    rows = [Row(Point("prefill", 1, 1, t), 1.3e-4 * t) for t in (4096, 8192, 12288, 16384)]
    found = fit_latency(rows + decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c), 1, model=OPT, gpu=A100)
    least_s = prefill_bound_s([(1, 0)], model=OPT, gpu=A100, tp=1)
    assert least_s == pytest.approx(40 * 12 * 5120**2 * 2 / 2.039e12)
    assert found.latency.prefill.constant_s >= least_s
    assert found.constants()["prefill.constant_s"].low >= least_s
    assert not find_violations(found.latency, model=OPT, gpu=A100, tp=1)
    free = fit_latency(rows + decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c), 1)
    assert free.latency.prefill_s([(1, 0)]) < least_s


def test_a_context_token_whose_cost_drowns_in_noise_costs_the_reading_of_its_kv() -> None:
    rng = np.random.default_rng(3)
    least_s = OPT.kv_bytes_per_token / A100.hbm_bytes_per_s
    rows = decodes(lambda b, c: (0.05 + 1e-4 * b - 5e-7 * c) * math.exp(0.03 * rng.standard_normal()), (16, 32, 64))
    assert fit_latency(PREFILLS + rows, 1).latency.small.per_context_token_s == 0
    found = fit_latency(PREFILLS + rows, 1, model=OPT, gpu=A100)
    assert found.latency.small.per_context_token_s == pytest.approx(least_s)
    assert found.constants()["decode.per_context_token_s"].low == pytest.approx(least_s)


def test_a_context_token_costs_no_less_than_the_reading_of_its_kv_where_that_shows() -> None:
    """Steps just above the datasheet, some by more: no reason to refuse a fit below it where contexts are long."""
    grid = [(b, c) for b in (1, 4, 16, 64) for c in (512, 1024, 2048)]
    bounds = [decode_bound_s(b, b * c, model=OPT, gpu=A100, tp=1) for b, c in grid]
    below = 0
    for seed in range(10):
        noise = np.random.default_rng(seed).exponential(0.03, len(grid))
        rows = [
            Row(Point("decode", 1, b, context_tokens=c), bound_s * (1.001 + up))
            for (b, c), bound_s, up in zip(grid, bounds, noise, strict=True)
        ]
        free = fit_latency(PREFILLS + rows, 1).latency
        below += any(v.phase == "decode" for v in find_violations(free, model=OPT, gpu=A100, tp=1))
        found = fit_latency(PREFILLS + rows, 1, model=OPT, gpu=A100).latency
        assert not any(v.phase == "decode" for v in find_violations(found, model=OPT, gpu=A100, tp=1))
    assert below >= 1


# Host work


def test_host_work_is_taken_out_of_constants_and_of_their_intervals() -> None:
    rows = numbered(rows_of(affine((0.02, 1.3e-4, 8e-9), (0.022, 1.2e-6, 4e-5)), noise=0.003))
    whole = fit_rows(rows, model=OPT, gpu=A100).by_tp[1]
    apart = fit_rows(rows, model=OPT, gpu=A100, host_step_s=0.004)
    kernels = apart.by_tp[1]
    assert kernels.latency.prefill.constant_s == pytest.approx(whole.latency.prefill.constant_s - 0.004)
    assert kernels.latency.decode_s(8, 800) == pytest.approx(whole.latency.decode_s(8, 800) - 0.004)
    for name, fit in whole.constants.items():
        moved = kernels.constants[name]
        by = 0.004 if name.endswith(".constant_s") else 0.0
        assert (moved.low, moved.best, moved.high) == pytest.approx((fit.low - by, fit.best - by, fit.high - by))
    assert kernels.errors == whole.errors
    subject = Subject(OPT, A100, "mine", "1", "made up")
    text = profile_text(apart, rows, b"rows", name="rows.csv", subject=subject)
    profile = parse_profile(text.encode(), file="my.yaml")
    host_s = profile.host_of(Role.DECODE, 1).launch_s(8, 800)
    assert profile.latency_at(1).decode_s(8, 800) + host_s == pytest.approx(whole.latency.decode_s(8, 800), rel=1e-6)


def test_more_host_work_than_a_step_has_is_refused() -> None:
    rows = rows_of(affine((0.02, 1.3e-4, 8e-9), (0.0123 + 0.02, 1.2e-6, 4e-5)))
    with pytest.raises(InputError, match=r"^--host-step: '21\.5ms' must be <= 20 ms, the constant of prefill steps"):
        fit_rows(numbered(rows), host_step_s=0.0215)
    # Kernels alone would be faster than the datasheet allows: 12.6 ms for a step of decode.
    assert "less 25 ms of host work is below the" in refused(rows[28:], host_step_s=0.025)


# Profiles


def moe_rows(shape: Shape) -> Rows:
    """Rows of a mixture as `dsim profile run` writes them, at twice the datasheet's least."""
    gpu = find_gpu("h200")
    points = [Point("prefill", 1, 1, t) for t in (16, 64, 256, 1024, 4096)]
    points += [Point("decode", 1, b, context_tokens=c) for b in (1, 4, 16, 32) for c in (128, 1024)]
    rows = [Row(p, 2 * bound_s(p, model=shape.model, gpu=gpu)) for p in points]
    head = {"model": model_entry(shape.model), "gpu": "h200"}
    return parse_rows(rows_text(rows, head).encode(), file="rows.csv")


def test_a_mixture_of_experts_leaves_the_room_for_kv_that_all_its_experts_leave(tmp_path: Path) -> None:
    """Mixtral-8x7B has 46.7e9 parameters, 93.4 GB, and 131072 bytes of KV a token (32 layers, 8 heads of 128)."""
    config = {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
              "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_config(tmp_path / "config.json")
    rows = moe_rows(shape)
    assert rows.metadata.model == replace(shape.model, aliases=())
    gpu = find_gpu("h200")
    fitted = fit_rows(rows, model=shape.model, gpu=gpu)
    subject = Subject(shape.model, gpu, "kernels", "1", "made up")
    text = profile_text(fitted, rows, b"rows", name="rows.csv", subject=subject)
    profile = parse_profile(text.encode(), file="my.yaml")
    for pp in (1, 2, 4):
        tokens = (pp * 0.9 * gpu.memory_bytes - 46.703e9 * 2) / 131072
        assert profile.kv_tokens(Parallelism(1, pp)) == pytest.approx(tokens, rel=1e-3)
    small = replace(gpu, name="small", memory_bytes=int(80e9))
    text = profile_text(fitted, rows, b"rows", name="rows.csv", subject=replace(subject, gpu=small))
    profile = parse_profile(text.encode(), file="my.yaml")
    assert profile.kv_tokens(Parallelism(1, 1)) <= 0
    assert profile.kv_tokens(Parallelism(1, 2)) > 0
    tiny = replace(gpu, name="tiny", memory_bytes=int(2e9))
    with pytest.raises(InputError, match=r"kv: leaves no room: .* has 93\.4 GB of weights"):
        profile_text(fitted, rows, b"rows", name="rows.csv", subject=replace(subject, gpu=tiny))


def test_a_mixture_whose_experts_nobody_counted_is_refused(cli: Cli, tmp_path: Path) -> None:
    rows = rows_of(affine((0.02, 1.3e-4, 8e-9), (0.02, 1.2e-6, 4e-5)))
    path = tmp_path / "rows.csv"
    settings: dict[str, object] = {"experts": "even random routing, batched matrix products"}
    path.write_text(rows_text(rows, {"model": "opt-13b", "gpu": "a100-80g", "settings": settings}))
    text = cli.refused("profile", "fit", str(path), "--dry-run")
    assert text.startswith(f"{path}: times a mixture of experts, and its head does not say of how many")
    experts = {"experts": 8, "per_token": 2, "ffn_size": 10240}
    path.write_text(rows_text(rows, {"model": "opt-13b", "gpu": "a100-80g", "experts": experts, "settings": settings}))
    output = tmp_path / "my.yaml"
    assert cli("profile", "fit", str(path), "-o", str(output)).code == 0
    # Six idle experts of 2 x 5120 x 10240 weights and a router of 8 x 5120 in each of 40 layers; no biases.
    profile = load_profile(output)
    whole = OPT.weight_bytes + 2 * 40 * 5120 * (6 * 2 * 10240 + 8) - 2 * 40 * 20480
    for pp in (1, 2):
        room = pp * 0.9 * A100.memory_bytes - whole
        assert profile.kv_tokens(Parallelism(1, pp)) == pytest.approx(room / OPT.kv_bytes_per_token, abs=1)
    assert "--model: 'opt-66b' contradicts the head" in cli.refused(
        "profile", "fit", str(path), "-m", "66b", "--dry-run"
    )


def test_the_valid_range_is_that_of_steps_that_were_timed() -> None:
    """A context that decodes is no cached prompt."""
    rows = PREFILLS + decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c, (128, 8192))
    valid = valid_range_of(rows)
    assert (valid.chunk_tokens, valid.prefill_tokens) == (4096, 8192)
    assert (valid.decode_requests, valid.context_tokens) == (16, 16 * 8192)
    cached = [*rows, Row(Point("prefill", 1, 1, 512, 7000), 0.2)]
    assert valid_range_of(cached).chunk_tokens == 7512


def test_lm_is_kept_by_degree_and_only_where_it_is_reached() -> None:
    knees = {1: 300, 2: 600}
    rows = []
    for tp, knee in knees.items():
        tokens = [32, 64, 128, 200, 300, 450, 600, 900, 1200, 2400, 4800, 9600]
        rows += [Row(Point("prefill", tp, 1, t), 0.03 * max(1, t / knee)) for t in tokens]
        rows += [Row(replace(r.point, tp=tp), r.step_s) for r in decodes(lambda b, c: 0.02 + 4e-5 * b + 1e-6 * b * c)]
    read = numbered(rows)
    profile = parse_profile(text_of(read).encode(), file="my.yaml")
    assert profile.saturation_tokens_at == {1: pytest.approx(300, rel=0.02), 2: pytest.approx(600, rel=0.02)}
    limits = Options(prefill_token_limit=profile.prefill_token_limit(PrefillBatching.LM))
    assert limits.prefill_token_limit_at(2) == profile.saturation_tokens_at[2]
    assert Options(prefill_token_limit=profile.prefill_token_limit(PrefillBatching.ENGINE)).prefill_token_limit is None
    short = [r for r in rows if r.point.tp == 1 and r.point.prompt_tokens <= 300]
    profile = parse_profile(text_of(numbered(short)).encode(), file="my.yaml")
    assert profile.saturation_tokens is None
    assert profile.fit is not None
    assert profile.fit.saturation_methods == {1: "not-reached"}
    with pytest.raises(InputError, match="needs Lm"):
        profile.prefill_token_limit(PrefillBatching.LM)


def text_of(rows: Rows) -> str:
    fitted = fit_rows(rows)
    return profile_text(fitted, rows, b"rows", name="rows.csv", subject=Subject(OPT, A100, "mine", "1", "made up"))


def test_a_profile_of_fitted_rows_is_read_back() -> None:
    model, gpu = find_model("13b"), find_gpu("a100-80g")
    true = affine((0.02, 1.3e-4, 8e-9), (0.02, 1.2e-6, 4e-5))
    rows = Rows("rows.csv", Metadata(dtype="fp16"), tuple(rows_of(true, noise=0.005)))
    fitted = fit_rows(rows, model=model, gpu=gpu)
    subject = Subject(model, gpu, "mine", "1", "made up")
    profile = parse_profile(
        profile_text(fitted, rows, b"rows", name="rows.csv", subject=subject).encode(), file="my.yaml"
    )
    assert profile.name == "opt-13b-a100-80g-mine"
    assert profile.fit is not None
    assert {e.phase for e in profile.fit.errors} == {"prefill", "decode"}
    assert profile.saturation_tokens_at == {1: round(profile.fit.saturation_tokens[1].best)}
    assert profile.saturation_tokens == profile.saturation_tokens_at[1]
    latency, found = profile.latency_at(1), fitted.by_tp[1]
    assert latency.prefill_s([(512, 0)]) == pytest.approx(true.prefill_s([(512, 0)]), rel=0.02)
    assert latency.decode_s(8, 8 * 512) == pytest.approx(true.decode_s(8, 8 * 512), rel=0.02)
    for name, fit in found.constants.items():
        kept = profile.fit.constants[1][name]
        assert (kept.low, kept.best, kept.high) == pytest.approx((fit.low, fit.best, fit.high), rel=1e-5)
    assert profile.fit.errors[0].mean == pytest.approx(found.errors[0].mean, rel=1e-2)


@given(
    slope=st.floats(0, 2),
    bends=st.lists(st.tuples(st.integers(1, 50), st.floats(0, 2)), max_size=4, unique_by=lambda bend: bend[0]),
    amount=st.integers(0, 100),
)
def test_bent_lines_are_sums_of_their_slopes(slope: float, bends: list[tuple[int, float]], amount: int) -> None:
    bends.sort()
    slopes = [next((s for start, s in reversed(bends) if unit >= start), slope) for unit in range(amount)]
    assert bent_s(amount, slope, tuple(bends)) == pytest.approx(math.fsum(slopes))
    prefill = AffinePrefill(0.0, slope, 0.0, bends=tuple(bends))
    assert prefill.least_per_token_s * amount <= prefill.tokens_s(amount) + 1e-9


# Measurements that were not fitted


def mean_error(latency: AffineLatency, rows: Sequence[Row]) -> float:
    measured = np.array([row.step_s for row in rows])
    return float(np.abs(predict(latency, [row.point for row in rows]) / measured - 1).mean())


@needs_truth
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize(("gpu", "name"), [("a100-80gb", "a100-80g"), ("h100-80gb", "h100-sxm")])
def test_splitwise_rows_that_were_not_fitted(gpu: str, name: str, tp: int) -> None:
    """Fitted: odd repeats of even grid points, in order of length, then batch. Tested: every other row."""
    rows = [
        r for r in read_splitwise(TRUTH / "splitwise_iteration.csv", model="llama2-70b", gpu=gpu) if r.point.tp == tp
    ]
    even = {p for phase in (Phase.PREFILL, Phase.DECODE) for p in timed(rows, phase, tp).points[::2]}
    fitted = [r for r in rows if r.point in even and r.repeat % 2 == 1]
    rest = [r for r in rows if r not in fitted]
    latency = fit_latency(fitted, tp, model=find_model("llama-2-70b"), gpu=find_gpu(name)).latency
    assert mean_error(latency, [r for r in rest if r.point.phase == "prefill"]) <= 0.06
    assert mean_error(latency, [r for r in rest if r.point.phase == "decode"]) <= 0.04


TRTLLM = [("13B", "A100", 1), ("13B", "H100", 1), *itertools.product(["70B"], ["A100", "H100"], [2, 4, 8])]


@needs_truth
@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize(("size", "gpu", "tp"), TRTLLM)
def test_tensorrt_llm_rows_of_batches_that_were_not_fitted(size: str, gpu: str, tp: int, parity: int) -> None:
    rows: list[Row] = []
    with (TRUTH / "trtllm090_static_batch.csv").open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.DictReader(file)):
            if size not in line["model"] or not line["gpu"].startswith(gpu) or int(line["tp"]) != tp:
                continue
            batch, prompt, output = (int(line[name]) for name in ("batch_size", "isl", "osl"))
            rows.append(Row(Point("prefill", tp, batch, prompt), float(line["first_token_latency_ms"]) / 1e3, number))
            decode = Point("decode", tp, batch, context_tokens=prompt + output / 2)
            rows.append(Row(decode, float(line["token_to_token_latency_ms"]) / 1e3, number))
    sizes = sorted({row.point.requests for row in rows})
    fitted = [row for row in rows if sizes.index(row.point.requests) % 2 == parity]
    rest = [row for row in rows if row not in fitted]
    model, name = find_model(f"llama-2-{size.lower()}"), {"A100": "a100-80g", "H100": "h100-sxm"}[gpu]
    latency = fit_latency(fitted, tp, model=model, gpu=find_gpu(name)).latency
    assert mean_error(latency, [r for r in rest if r.point.phase == "prefill"]) <= 0.10
    assert mean_error(latency, [r for r in rest if r.point.phase == "decode"]) <= 0.06


# The command line


def splitwise_rows(folder: Path, gpu: str) -> Path:
    """Write the published rows of one GPU, which are not shipped, and return where."""
    path = folder / f"llama-2-70b-{GPUS[gpu]}-vllm-2023.csv"
    splitwise.main([str(TRUTH / "splitwise_iteration.csv"), "--gpu", gpu, "--output", str(path)])
    return path


@needs_truth
def test_fit_show_compare_and_simulate(cli: Cli, tmp_path: Path) -> None:
    shipped = splitwise_rows(tmp_path, "h100-80gb")
    output = tmp_path / "my.yaml"
    run = cli("profile", "fit", str(shipped), "--engine", "mine", "-o", str(output))
    assert run.code == 0, run.err
    assert "Lm at TP 2" in run.out
    assert output.exists()
    assert "is there already" in cli.refused("profile", "fit", str(shipped), "-o", str(output))
    nowhere = tmp_path / "nosuch" / "x.yaml"
    text = cli.refused("profile", "fit", str(shipped), "-o", str(nowhere))
    assert text.startswith(f"--output: '{nowhere}' cannot be written: ")
    assert ".part" not in text
    assert cli("profile", "show", str(output), "--format", "json").code == 0
    assert cli("profile", "show", str(output), "--plot", str(tmp_path / "plots")).code == 0
    assert (tmp_path / "plots" / "residuals.png").exists()
    run = cli("profile", "compare", str(output), "llama-2-70b-a100-80g-vllm-2023", "--format", "csv")
    assert run.out.startswith("tp,phase,size,a_s,b_s,b_over_a\n")
    run = cli("simulate", "--profile", str(output), "-p", "1xP:tp4pp1 + 1xD:tp4pp1", "--rate", "1", "-n", "50", "-q")
    assert run.code == 0, run.err


def test_plots_are_pictures(cli: Cli, tmp_path: Path) -> None:
    assert cli("profile", "show", "llama-2-70b-h100-sxm-vllm-2023", "--plot", str(tmp_path / "plots")).code == 0
    # Residuals need the rows beside the profile.
    names = ["decode_throughput.png", "prefill_throughput.png", "tp_speed_up.png"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


@needs_truth
def test_the_shipped_profiles_are_what_the_fit_makes_of_their_rows(cli: Cli, tmp_path: Path) -> None:
    data = Path(__file__).parents[1] / "profiles" / "data"
    for gpu, ours in GPUS.items():
        name = f"llama-2-70b-{ours}-vllm-2023"
        rows = splitwise_rows(tmp_path, gpu)
        assert cli("profile", "fit", str(rows), "-o", str(tmp_path / f"{name}.yaml")).code == 0
        made, kept = (parse_profile((where / f"{name}.yaml").read_bytes(), file=name) for where in (tmp_path, data))
        assert made.fit is not None
        assert kept.fit is not None
        assert made.saturation_tokens_at == kept.saturation_tokens_at
        for tp in (2, 4, 8):
            mine, theirs = made.latency_at(tp), kept.latency_at(tp)
            for tokens in (128, 700, 4096):
                assert mine.prefill_s([(tokens, 0)]) == pytest.approx(theirs.prefill_s([(tokens, 0)]), rel=1e-3)
            for batch in (1, 7, 32):
                assert mine.decode_s(batch, 600 * batch) == pytest.approx(theirs.decode_s(batch, 600 * batch), rel=1e-3)
            assert numbers(made.fit.saturation_tokens[tp]) == pytest.approx(
                numbers(kept.fit.saturation_tokens[tp]), rel=0.01
            )
            for key, fit in made.fit.constants[tp].items():
                assert numbers(fit) == pytest.approx(numbers(kept.fit.constants[tp][key]), rel=0.01, abs=1e-9)
        assert [k.k.best for k in made.fit.speed_up] == pytest.approx([k.k.best for k in kept.fit.speed_up], rel=1e-3)
        assert [k.k.high for k in made.fit.speed_up] == pytest.approx([k.k.high for k in kept.fit.speed_up], rel=1e-3)
        assert [e.mean for e in made.fit.errors] == pytest.approx([e.mean for e in kept.fit.errors], rel=0.02)
        for new, old in zip(made.fit.appendix_a, kept.fit.appendix_a, strict=True):
            assert new.constants == pytest.approx(old.constants, rel=1e-3)


def numbers(fit: Fit) -> tuple[float, float, float]:
    return fit.low, fit.best, fit.high


def test_an_unknown_profile_is_refused(cli: Cli) -> None:
    assert "did you mean" in cli.refused("profile", "show", "llama-2-70b-h100-sxm-vllm-2024")
    assert "does not exist" in cli.refused("profile", "show", "nothing.yaml")
