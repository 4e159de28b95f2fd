"""Lm: knees, sharp and rounded, are recovered; what the timed tokens do not reach is not claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from profiles.knee import Saturation, saturation_of, share_tokens

TOKENS = np.geomspace(16, 16384, 30)


def lm_of(tokens: NDArray[np.float64], step_s: NDArray[np.float64]) -> Saturation:
    found = saturation_of(np.ones_like(tokens), tokens, step_s)
    assert found is not None
    return found


@settings(max_examples=25, deadline=None)
@given(knee=st.floats(150, 3000), floor_s=st.floats(0.01, 0.08), steep=st.floats(0.7, 1.5))
def test_lm_of_a_knee_is_recovered(knee: float, floor_s: float, steep: float) -> None:
    """Flat up to the knee, then proportional (or nearly) to tokens."""
    slope_s = steep * floor_s / knee
    tokens = np.geomspace(32, 16384, 40)
    found = lm_of(tokens, floor_s + slope_s * np.maximum(tokens - knee, 0))
    assert found.method == "knee"
    assert abs(found.tokens.best / knee - 1) <= 0.05


@pytest.mark.parametrize("sharpness", [2, 4, math.inf])
def test_intervals_of_knees_hold_the_truth_as_often_as_they_say(sharpness: float) -> None:
    """Rooflines a (1 + (t / 500)^p)^(1/p) with 1 % of noise: sharp where p is infinite, round over decades at p = 2."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(50):
        roof = np.maximum(1, TOKENS / 500) if math.isinf(sharpness) else (
            1 + (TOKENS / 500) ** sharpness) ** (1 / sharpness)  # fmt: skip
        found.append(lm_of(TOKENS, 0.03 * roof * np.exp(0.01 * rng.standard_normal(len(TOKENS)))))
    assert {lm.method for lm in found} == {"knee"}
    best = np.array([lm.tokens.best for lm in found])
    assert abs(np.median(best) / 500 - 1) <= 0.05
    assert np.mean([lm.tokens.low <= 500 <= lm.tokens.high for lm in found]) >= 0.88
    # No wider than the positions really scatter: two standard deviations, more where the knee may be rounded or not.
    half = np.median([math.log(lm.tokens.high / lm.tokens.low) / 2 for lm in found])
    step = math.log(TOKENS[-2] / TOKENS[0]) / (400 if math.isinf(sharpness) else 120)
    assert half <= 4.5 * float(np.std(np.log(best))) + 2 * step


def test_a_straight_line_has_no_knee() -> None:
    rng = np.random.default_rng(0)
    noise = np.exp(0.02 * rng.standard_normal((30, len(TOKENS))))
    methods = [lm_of(TOKENS, (0.0181 + 0.0001019 * TOKENS) * factor).method for factor in noise]
    assert methods.count("share") >= 29


def test_without_a_knee_lm_is_where_the_rate_is_near_its_best() -> None:
    tokens = np.geomspace(32, 8192, 20)
    found = lm_of(tokens, 0.0181 + 0.0001019 * tokens)
    assert found.method == "share"
    assert found.tokens.best == pytest.approx(4 * 0.0181 / 0.0001019, rel=0.01)
    # 75 and 85 % of the best rate.
    assert found.tokens.low == pytest.approx(3 * 0.0181 / 0.0001019, rel=0.01)
    assert found.tokens.high == pytest.approx(0.85 / 0.15 * 0.0181 / 0.0001019, rel=0.01)


@pytest.mark.parametrize("per_token_s", [0.0, 1e-6, 1e-5, 1e-4])
def test_lm_beyond_the_timed_tokens_is_not_reached(per_token_s: float) -> None:
    """Steps of up to 512 tokens cannot show 80 % of a rate that 724 tokens (or 72400, or none) reach."""
    tokens = np.array([16.0, 32, 64, 128, 256, 512])
    found = lm_of(tokens, 0.0181 + per_token_s * tokens)
    assert found.method == "not-reached"
    assert found.tokens.low <= 512
    assert math.isinf(found.tokens.best)
    assert math.isinf(found.tokens.high)


def test_the_end_of_an_interval_that_the_tokens_do_not_reach_is_open() -> None:
    """80 % of the best rate at 711 tokens, 85 % at 1006."""
    tokens = np.geomspace(32, 900, 20)
    found = lm_of(tokens, 0.0181 + 0.0001019 * tokens)
    assert found.tokens.best == pytest.approx(711, abs=2)
    assert math.isinf(found.tokens.high)
    # Nothing before the knee: it may lie at any smaller number.
    tokens = np.geomspace(80, 6000, 9)
    noise = np.exp(0.03 * np.random.default_rng(0).standard_normal(9))
    knee = lm_of(tokens, np.maximum(0.03, 0.03 / 100 * tokens) * noise)
    assert knee.method == "knee"
    assert knee.tokens.low == 0
    assert 100 <= knee.tokens.high < 300


@given(
    constant_s=st.floats(1e-4, 0.1),
    slope_s=st.floats(0, 1e-3),
    bends=st.lists(st.tuples(st.integers(2, 4000), st.floats(1e-7, 1e-3)), max_size=4, unique_by=lambda bend: bend[0]),
    share=st.floats(0.5, 0.95),
)
def test_the_share_is_that_of_a_search_through_all_tokens(
    constant_s: float, slope_s: float, bends: list[tuple[int, float]], share: float
) -> None:
    bends = sorted(bends) or [(1, 1e-5)]
    grid = np.geomspace(0.01, 1e9, 20000)
    starts, slopes = [0.0, *(start for start, _ in bends)], [slope_s, *(slope for _, slope in bends)]
    step_s = np.full_like(grid, constant_s)
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else math.inf
        step_s += slopes[i] * np.clip(grid - start, 0, end - start)
    rate = grid / step_s
    corners = np.interp([start for start, _ in bends], grid, step_s)
    peak = max(rate.max(), 1 / slopes[-1], *(np.array([start for start, _ in bends]) / corners))
    first = grid[np.argmax(rate >= share * peak)] if np.any(rate >= share * peak) else math.inf
    found = share_tokens(constant_s, slope_s, share, tuple(bends))
    assert found == pytest.approx(first, rel=0.02)


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
