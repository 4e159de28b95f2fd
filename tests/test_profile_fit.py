"""Fits: constants, Lm and K of made-up rows are recovered; measured rows that were not fitted are predicted."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.catalog import find_gpu, find_model
from dsim.errors import InputError
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends, bent_s
from dsim.profile_file import parse_profile
from dsim.profile_fit import Fit
from profiles import splitwise
from profiles.export import Subject, profile_text
from profiles.fit import fit_latency, fit_rows, predict, timed
from profiles.knee import saturation_of
from profiles.rows import Metadata, Phase, Point, Row, Rows
from profiles.splitwise import GPUS, read_splitwise
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


def near(fit: Fit, true: float, *, times: float = 3.0) -> bool:
    """The truth lies within so many half-widths (or a thousandth) of the best."""
    half = max(fit.high - fit.best, fit.best - fit.low)
    return abs(fit.best - true) <= times * half + 1e-3 * max(true, fit.best)


positive = st.floats(0.5, 2.0)


@settings(max_examples=25, deadline=None)
@given(scales=st.tuples(*[positive] * 6), noise=st.sampled_from([0.0, 0.003, 0.01]), seed=st.integers(0, 999))
def test_constants_are_recovered_within_their_intervals(scales: tuple[float, ...], noise: float, seed: int) -> None:
    typical = (0.015, 1e-4, 8e-9, 0.02, 6e-7, 4e-5)
    true = [s * t for s, t in zip(scales, typical, strict=True)]
    names = ["prefill.constant_s", "prefill.per_token_s", "prefill.per_token_squared_s", "decode.constant_s"]
    names += ["decode.per_context_token_s", "decode.per_request_s"]
    latency, constants, _ = fit_latency(rows_of(affine(true[:3], true[3:]), noise=noise, seed=seed), 1)
    points = [Point("prefill", 1, n, t) for n, t in PREFILL_GRID]
    exact = predict(affine(true[:3], true[3:]), points)
    assert np.abs(predict(latency, points) / exact - 1).max() <= 0.002 + 3 * noise
    if not latency.prefill.bends and not latency.small.bends:
        for name, value in zip(names, true, strict=True):
            assert near(constants[name], value, times=3 if noise else 50), name


@settings(max_examples=25, deadline=None)
@given(knee=st.floats(150, 3000), floor_s=st.floats(0.01, 0.08), steep=st.floats(0.7, 1.5))
def test_lm_of_a_knee_is_recovered(knee: float, floor_s: float, steep: float) -> None:
    """Flat up to the knee, then proportional (or nearly) to tokens."""
    slope_s = steep * floor_s / knee
    tokens = np.geomspace(32, 16384, 40)
    step_s = floor_s + slope_s * np.maximum(tokens - knee, 0)
    found = saturation_of(np.ones_like(tokens), tokens, step_s)
    assert found is not None
    assert found.method == "knee"
    assert abs(found.tokens.best / knee - 1) <= 0.05


@settings(max_examples=15, deadline=None)
@given(knee=st.floats(200, 2000), seed=st.integers(0, 999))
def test_lm_of_a_noisy_knee_lies_in_its_interval(knee: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.geomspace(32, 16384, 40)
    step_s = np.maximum(0.03, 0.03 / knee * tokens) * np.exp(0.01 * rng.standard_normal(40))
    found = saturation_of(np.ones_like(tokens), tokens, step_s)
    assert found is not None
    assert found.tokens.low / 1.1 <= knee <= 1.1 * found.tokens.high
    assert abs(found.tokens.best / knee - 1) <= 0.1


def test_without_a_knee_lm_is_where_the_rate_is_near_its_best() -> None:
    tokens = np.geomspace(32, 8192, 20)
    found = saturation_of(np.ones_like(tokens), tokens, 0.0181 + 0.0001019 * tokens)
    assert found is not None
    assert found.method == "share"
    assert found.tokens.best == pytest.approx(4 * 0.0181 / 0.0001019, rel=0.01)


def test_a_bend_in_the_batch_is_recovered_and_continuous() -> None:
    true = affine((0.015, 1e-4, 8e-9), (0.02, 6e-7, 2e-5), decode_bends=((48, 2e-4),))
    latency, constants, errors = fit_latency(rows_of(true, noise=0.002), 1)
    assert errors["decode"] < 0.01
    (start, slope_s), *more = latency.small.bends
    assert not more
    assert start == pytest.approx(48, rel=0.15)
    assert slope_s == pytest.approx(2e-4, rel=0.1)
    assert near(constants[f"decode.bends.{start}.per_request_s"], 2e-4)
    times_s = [latency.decode_s(b, 512 * b) for b in range(1, 129)]
    assert all(0 < b - a < 2e-3 for a, b in itertools.pairwise(times_s))


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
        assert 1 < k.k.low <= k.k.best <= k.k.high
        assert k.comm_share == pytest.approx(0.1)


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


def test_a_profile_of_fitted_rows_is_read_back() -> None:
    model, gpu = find_model("13b"), find_gpu("a100-80g")
    true = affine((0.02, 1.3e-4, 8e-9), (0.02, 1.2e-6, 4e-5))
    rows = Rows("rows.csv", Metadata(dtype="fp16"), tuple(rows_of(true, noise=0.005)))
    fitted = fit_rows(rows, model=model, gpu=gpu)
    subject = Subject(model, gpu, "mine", "1", "made up", host_step_s=0.004)
    profile = parse_profile(
        profile_text(fitted, rows, b"rows", name="rows.csv", subject=subject).encode(), file="my.yaml"
    )
    assert profile.name == "opt-13b-a100-80g-mine"
    assert profile.fit is not None
    assert {e.phase for e in profile.fit.errors} == {"prefill", "decode"}
    assert profile.saturation_tokens == round(profile.fit.saturation_tokens[1].best)
    latency = profile.latency_at(1)
    assert latency.prefill_s([(512, 0)]) + 0.004 == pytest.approx(true.prefill_s([(512, 0)]), rel=0.02)
    assert latency.decode_line(8) is not None


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


# The paper


def test_the_papers_numbers_give_lm_of_a_13b_model_on_an_a100() -> None:
    """Source: arXiv 2401.09670v3, figure 3: tokens/s of one prompt, and where batches of 16 level off."""
    length = np.array([128.0, 256.0, 512.0, 1024.0])
    alone, level = np.array([5490.0, 6255.0, 5706.0, 4347.0]), np.array([9393.0, 8794.0, 7197.0, 5434.0])
    for batch in (8, 16, 64):
        requests = np.concatenate([np.ones(4), np.full(4, batch)])
        step_s = np.concatenate([length / alone, batch * length / level])
        found = saturation_of(requests, np.tile(length, 2), step_s)
        assert found is not None
        assert found.method == "share"
        assert 256 <= found.tokens.best <= 1024
        # Eight numbers read off a figure that no line fits within 10 %: a factor of two either way, and said so.
        assert found.tokens.low < 512 < found.tokens.high
        assert found.tokens.high > 2 * found.tokens.best


def test_the_released_coefficients_give_lm_of_a_13b_model_on_an_a100() -> None:
    """Source: LLMServe/DistServe, profiler-a100-80g.distserve.json, OPT-13B TP 1."""
    a_s, b_s, c_s = 18.10254647486372e-3, 0.1019122572698738e-3, 7.122264314252114e-9
    grid = [(1, 64), (1, 128), (1, 256), (1, 512), (1, 1024), (1, 2020), (2, 512), (4, 512), (8, 512), (16, 512)]
    requests, length = (np.array(column, dtype=np.float64) for column in zip(*grid, strict=True))
    found = saturation_of(requests, length, a_s + b_s * requests * length + c_s * requests * length**2)
    assert found is not None
    assert found.tokens.best == pytest.approx(711, abs=2)
    assert 256 <= found.tokens.low <= found.tokens.high <= 1024


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
    latency, _, _ = fit_latency(fitted, tp, model=find_model("llama-2-70b"), gpu=find_gpu(name))
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
    latency, _, _ = fit_latency(fitted, tp, model=model, gpu=find_gpu(name))
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
        for tp in (2, 4, 8):
            for tokens in (128, 700, 4096):
                chunk = [(tokens, 0)]
                assert made.latency_at(tp).prefill_s(chunk) == pytest.approx(
                    kept.latency_at(tp).prefill_s(chunk), rel=1e-3
                )


def test_an_unknown_profile_is_refused(cli: Cli) -> None:
    assert "did you mean" in cli.refused("profile", "show", "llama-2-70b-h100-sxm-vllm-2024")
    assert "does not exist" in cli.refused("profile", "show", "nothing.yaml")
