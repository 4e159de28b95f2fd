"""Figures: what is drawn equals the rows, with units and intervals; hand-computed cases; same bytes."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread

from dsim.errors import InputError
from dsim.yamlfile import parse_yaml
from experiments.plots import Kind, PlotSpec, draw, parse_plot, render, rendered
from experiments.plots.bars import parts_of
from experiments.plots.lines import crossing, ratio_of
from experiments.plots.pareto import on_front
from experiments.plots.staircase import Copy, band, copies, copies_of, stairs
from experiments.plots.style import STYLES, colour_of, hatch_of, marker_of

RATES = [0.5, 1.0, 1.5, 2.0]
SHARES = {"DistServe": [1.0, 0.98, 0.92, 0.7], "vLLM": [0.96, 0.9, 0.6, 0.2]}


def attainment() -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "system": system,
                "rate_per_gpu": rate,
                "attainment.both": share,
                "attainment.both.low": share - 0.03,
                "attainment.both.high": share + 0.02,
                "tpot_s.p90": 0.02 * rate,
            }
            for system, shares in SHARES.items()
            for rate, share in zip(RATES, shares, strict=True)
        ]
    )


def trials() -> pd.DataFrame:
    frame = pd.DataFrame({"placement": ["1xP:tp2pp1 + 1xD:tp1pp1", "1xC:tp1pp1"], "num_gpus": [3, 1]})
    frame["goodput_per_gpu_per_s.low"] = [1.9, 1.0]
    frame["goodput_per_gpu_per_s.best"] = [2.0, 1.25]
    frame["goodput_per_gpu_per_s.high"] = [2.2, 1.5]
    return frame


def spec(text: str, frame: pd.DataFrame) -> PlotSpec:
    return parse_plot(parse_yaml(text.encode(), file="sweep.yaml"), columns=list(frame.columns))


def figure(text: str, frame: pd.DataFrame, published: pd.DataFrame | None = None) -> Figure:
    return draw(spec(text, frame), frame, published=published)


def errorbars(axes: Axes) -> list[ErrorbarContainer]:
    return [container for container in axes.containers if isinstance(container, ErrorbarContainer)]


def points(container: ErrorbarContainer) -> np.ndarray[Any, Any]:
    return np.asarray(container.lines[0].get_xydata())


def spans(container: ErrorbarContainer, axis: int) -> np.ndarray[Any, Any]:
    """Return lower and upper ends of the interval bars."""
    bars = container.lines[2][axis]
    assert isinstance(bars, LineCollection)
    column = 0 if len(container.lines[2]) == 2 and axis == 0 else 1
    return np.array([[segment[0][column], segment[1][column]] for segment in bars.get_segments()])


def ends(axes: Axes) -> list[float]:
    """Return where the last part of each of two bars ends."""
    return [patch.get_window_extent().transformed(axes.transData.inverted()).x1 for patch in axes.patches[-2:]]


def texts(shown: Figure) -> list[str]:
    return [text.get_text() for legend in shown.legends for text in legend.get_texts()]


def test_attainment_curves_are_the_rows_in_per_cent_with_their_intervals() -> None:
    shown = figure("{kind: attainment-rate, series: system, title: OPT-13B}", attainment())
    (axes,) = shown.axes
    curves = errorbars(axes)
    assert len(curves) == 2
    for curve, shares in zip(curves, SHARES.values(), strict=True):
        np.testing.assert_allclose(points(curve), np.column_stack([RATES, 100 * np.array(shares)]))
        # Shares beyond 0 and 1 do not exist.
        expected = 100 * np.clip(np.column_stack([np.array(shares) - 0.03, np.array(shares) + 0.02]), 0, 1)
        np.testing.assert_allclose(spans(curve, 0), expected)
    assert axes.get_xlabel() == "arrival rate (requests/s per GPU)"
    assert axes.get_ylabel() == "requests within all limits (%)"
    assert shown.get_suptitle() == "OPT-13B"
    # 92 % at 1.5 and 70 % at 2: 90 % at 1.5 + 0.5 * 2 / 22; vLLM meets it up to a point of its own.
    assert texts(shown) == ["DistServe (≥ 90 % up to 1.55)", "vLLM (≥ 90 % up to 1.00)", "target 90 %"]


def test_where_chooses_rows_and_the_target_moves() -> None:
    shown = figure("{kind: attainment-rate, series: system, where: {system: vLLM}, target: 0.5}", attainment())
    assert len(errorbars(shown.axes[0])) == 1
    assert texts(shown) == ["vLLM (≥ 50 % up to 1.62)", "target 50 %"]


def test_several_columns_of_one_unit_share_axes_and_others_get_their_own() -> None:
    frame = attainment()
    frame["attainment.ttft"] = frame["attainment.both"]
    one = figure("{kind: line, x: rate_per_gpu, y: [attainment.both, attainment.ttft], series: system}", frame)
    two = figure("{kind: line, x: rate_per_gpu, y: [attainment.both, tpot_s.p90], series: system}", frame)
    assert [axes.get_ylabel() for axes in one.axes] == ["requests within limits (%)"]
    assert [axes.get_ylabel() for axes in two.axes] == ["requests within all limits (%)", "TPOT, p90 (ms)"]
    np.testing.assert_allclose(points(errorbars(two.axes[1])[0])[:, 1], [10, 20, 30, 40])
    assert texts(two) == ["DistServe", "vLLM"]


def test_published_points_are_hollow_beside_the_curves_of_their_series() -> None:
    published = pd.DataFrame(
        [
            {"system": "vLLM", "rate_per_gpu": 1.0, "attainment.both": 0.85, "tpot_s.p90": np.nan},
            {"system": "vLLM", "rate_per_gpu": 1.0, "attainment.both": np.nan, "tpot_s.p90": 0.03},
        ]
    )
    shown = figure("{kind: attainment-rate, series: system}", attainment(), published)
    (line,) = [line for line in shown.axes[0].get_lines() if line.get_label() == "_published"]
    assert np.asarray(line.get_xydata()).tolist() == [[1.0, 85.0]]
    assert line.get_markerfacecolor() == "none"
    assert line.get_markeredgecolor() == colour_of(1)
    assert "published (hollow)" in texts(shown)


def test_a_published_point_stands_where_the_row_of_its_factors_does() -> None:
    frame = pd.DataFrame({"batch": [1, 2], "tokens": [128, 256], "tokens_per_s": [1000.0, 1800.0]})
    published = pd.DataFrame([{"batch": 2, "tokens_per_s": 2000.0}])
    shown = figure("{kind: line, x: tokens, y: tokens_per_s}", frame, published)
    (line,) = [line for line in shown.axes[0].get_lines() if line.get_label() == "_published"]
    assert np.asarray(line.get_xydata()).tolist() == [[256.0, 2000.0]]


@pytest.mark.parametrize(
    ("x", "y", "falling", "expected"),
    [
        ([1, 2, 3], [100, 95, 85], True, 2.5),
        ([1, 2, 3], [80, 95, 85], True, None),  # below it from the start
        ([1, 2, 3], [100, 95, 91], True, None),
        ([1, 2, 3], [50, 80, 100], False, 2.5),
        ([1, 2, 3], [95, 80, 100], False, 2.5),  # the last time that it rises above it
        ([1, 2, 3], [50, 60, 70], False, None),
    ],
)
def test_where_a_curve_meets_the_target(x: list[float], y: list[float], falling: bool, expected: float | None) -> None:
    found = crossing(np.array(x, dtype=float), np.array(y, dtype=float), 90.0, falling=falling)
    assert found == (None if expected is None else pytest.approx(expected))


def test_bandwidth_is_in_gb_per_s_on_a_logarithmic_axis_with_plain_ticks() -> None:
    frame = pd.DataFrame(
        {"profile_set.handover.bandwidth_bytes_per_s": [1e9, 25e9], "goodput_per_gpu_per_s.best": [1.0, 2.0]}
    )
    shown = figure("{kind: bandwidth, y: goodput_per_gpu_per_s, marks: [{x: 5e+9, label: NIC}]}", frame)
    (axes,) = shown.axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "handover bandwidth (GB/s)"
    np.testing.assert_allclose(points(errorbars(axes)[0])[:, 0], [1.0, 25.0])
    assert texts(shown) == ["NIC"]
    shown.draw_without_rendering()
    assert {"1", "10"} <= {tick.get_text() for tick in axes.get_xticklabels()}


def test_lm_is_one_line_where_all_agree() -> None:
    frame = pd.DataFrame({"step.tp": [1, 2], "tokens": [8, 8], "tokens_per_s": [1.0, 2.0], "saturation_tokens": 512.0})
    text = "{kind: line, x: tokens, y: tokens_per_s, series: step.tp, mark: saturation_tokens}"
    assert texts(figure(text, frame)) == ["TP 1", "TP 2", "Lm 512"]
    frame["saturation_tokens"] = [512.0, 600.0]
    assert texts(figure(text, frame)) == ["TP 1", "TP 2", "TP 1 Lm 512", "TP 2 Lm 600"]


def test_ratios_stand_in_their_order() -> None:
    frame = pd.DataFrame(
        {
            "placement": ["2xP:tp1pp1 + 2xD:tp1pp1", "1xP:tp1pp1 + 3xD:tp1pp1", "3xP:tp1pp1 + 1xD:tp1pp1"],
            "goodput_per_gpu_per_s.best": [2.0, 1.0, 0.5],
        }
    )
    shown = figure("{kind: ratio}", frame)
    (axes,) = shown.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1:3", "2:2", "3:1"]
    assert points(errorbars(axes)[0])[:, 1].tolist() == [1.0, 2.0, 0.5]
    assert ratio_of("2xP:tp4pp1 + 3xD:tp1pp2") == (2, 3)
    frame.loc[0, "placement"] = "4xC:tp1pp1"
    with pytest.raises(InputError, match="'4xC:tp1pp1' has no prefill : decode ratio"):
        figure("{kind: ratio}", frame)


def test_goodput_bars_have_intervals_and_numbers() -> None:
    published = pd.DataFrame([{"placement": "1xC:tp1pp1", "goodput_per_gpu_per_s": 1.6}])
    shown = figure("{kind: goodput-bars}", trials(), published)
    (axes,) = shown.axes
    (bars,) = [container for container in axes.containers if isinstance(container, BarContainer)]
    assert [bar.get_width() for bar in bars.patches] == [2.0, 1.25]
    (intervals,) = errorbars(axes)
    np.testing.assert_allclose(spans(intervals, 0)[:, 0], [0, 1])  # one row each
    segments = [segment[:, 0].tolist() for segment in intervals.lines[2][0].get_segments()]
    np.testing.assert_allclose(segments, [[1.9, 2.2], [1.0, 1.5]])
    assert [text.get_text() for text in axes.texts] == ["2.00 [1.90, 2.20]", "1.25 [1.00, 1.50]"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == trials()["placement"].to_list()
    assert axes.get_xlabel() == "goodput (requests/s per GPU)"
    (line,) = [line for line in axes.get_lines() if line.get_label() == "_published"]
    assert np.asarray(line.get_xydata()).tolist() == [[1.6, 1.0]]


def test_the_parts_of_the_latency_add_up_to_it() -> None:
    frame = pd.DataFrame(
        {
            "placement": ["a", "b"],
            "ttft_parts_s.queue": [0.1, 0.2],
            "ttft_parts_s.prefill": [0.2, 0.3],
            "ttft_parts_s.transfer": [0.05, None],
            "ttft_parts_s.decode_admission": [0.01, None],
            "e2e_s.mean": [5.0, 6.0],
            "e2e_s.mean.low": [4.9, 5.8],
            "e2e_s.mean.high": [5.1, 6.2],
        }
    )
    parts = parts_of(spec("{kind: breakdown}", frame), frame)
    assert [part.label for part in parts] == [
        "queue",
        "prefill",
        "transfer and the wait for it",
        "decode admission",
        "decode",
    ]
    np.testing.assert_allclose(sum(part.size for part in parts), [5.0, 6.0])
    np.testing.assert_allclose(parts[-1].size, [4.64, 5.5])
    shown = figure("{kind: breakdown}", frame)
    before, whole = shown.axes
    assert before.get_xlabel() == "of it before decoding (s)"
    assert whole.get_xlabel() == "mean latency (s)"
    np.testing.assert_allclose(ends(whole), [5.0, 6.0])
    assert len(errorbars(whole)) == 1
    shares = figure("{kind: breakdown, share: true}", frame)
    assert shares.axes[1].get_xlabel() == "share of the mean latency (%)"
    np.testing.assert_allclose(ends(shares.axes[1]), [100, 100])


def test_shares_are_shown_as_such_without_the_interval_of_seconds() -> None:
    frame = pd.DataFrame(
        {
            "rate_per_gpu": [0.5],
            "parts_share.prefill": [0.03],
            "parts_share.decode": [0.97],
            "e2e_s.mean": [5.0],
            "e2e_s.mean.low": [4.0],
            "e2e_s.mean.high": [6.0],
        }
    )
    shown = figure("{kind: breakdown, x: rate_per_gpu, y: [parts_share.prefill, parts_share.decode]}", frame)
    before, whole = shown.axes
    assert (before.get_xlabel(), whole.get_xlabel()) == ("of it before decoding (%)", "share of the mean latency (%)")
    assert [text.get_text() for text in before.texts] == ["3.00 %"]
    assert [tick.get_text() for tick in before.get_yticklabels()] == ["0.5 requests/s per GPU"]
    np.testing.assert_allclose(ends(whole), [3, 100])
    assert errorbars(whole) == []


# Staircase


def test_copies_are_whole() -> None:
    assert [copies(rate, 4.0) for rate in (0.0, 0.1, 4.0, 4.0 + 1e-9, 8.1)] == [0, 1, 1, 2, 3]
    # 3 * 0.1 is above 0.3 by rounding alone.
    assert copies(3 * 0.1, 0.1) == 3
    copy = Copy("", num_gpus=3, goodput_per_s=6.0, low_per_s=5.0, high_per_s=7.0, price_usd_per_h=2.0)
    assert [copy.gpus(rate) for rate in (1, 6, 7, 12, 13)] == [3, 3, 6, 6, 9]
    rates, gpus = stairs(3, 6.0, 13.0)
    assert rates.tolist() == [0, 6, 6, 12, 12, 13]
    assert gpus.tolist() == [3, 3, 6, 6, 9, 9]
    edges, fewest, most = band(copy, 13.0)
    # Between 5 and 6 a copy of the lowest goodput is not enough, between 6 and 7 one of the highest still is.
    at = {
        (low, high): (few, many)
        for low, high, few, many in zip(edges[::2], edges[1::2], fewest[::2], most[::2], strict=True)
    }
    assert at == {
        (0, 5): (3, 3),
        (5, 7): (3, 6),
        (7, 10): (6, 6),
        (10, 13): (6, 9),
    }


def test_the_staircase_is_drawn_with_its_cost() -> None:
    frame = trials()
    text = "{kind: staircase, series: placement, price_usd_per_h: 2.5, max_rate_per_s: 13}"
    shown = figure(text, frame)
    axes = shown.axes[0]
    first = np.asarray(axes.get_lines()[0].get_xydata())
    # Goodput of one copy: 2.0 * 3 GPUs.
    np.testing.assert_allclose(first, [[0, 3], [6, 3], [6, 6], [12, 6], [12, 9], [13, 9]])
    assert len(axes.collections) == 2  # a band each
    assert axes.get_ylabel() == "GPUs"
    assert axes.get_xlabel() == "required rate (requests/s)"
    (cost,) = axes.child_axes
    assert cost.get_ylabel() == "cost (USD/h, at 2.5 USD/h a GPU)"
    shown.draw_without_rendering()
    np.testing.assert_allclose(np.array(cost.get_ylim()), 2.5 * np.array(axes.get_ylim()))
    assert texts(shown)[1] == "1xC:tp1pp1: 1 GPU a copy, 1.25 [1.00, 1.50] requests/s"


def test_different_prices_get_a_panel_of_costs() -> None:
    frame = trials()
    frame["cost_usd_per_h"] = [6.0, 3.0]
    shown = figure("{kind: staircase, series: placement, max_rate_per_s: 13}", frame)
    gpus, usd = shown.axes
    assert (gpus.get_ylabel(), usd.get_ylabel()) == ("GPUs", "cost (USD/h)")
    np.testing.assert_allclose(np.asarray(usd.get_lines()[0].get_ydata()), [6, 6, 12, 12, 18, 18])
    np.testing.assert_allclose(np.asarray(usd.get_lines()[1].get_ydata())[:4], [3, 3, 6, 6])


def test_a_copy_has_the_goodput_of_all_its_gpus() -> None:
    first, second = copies_of(spec("{kind: staircase, series: placement}", trials()), trials())
    # 2.0 [1.9, 2.2] per GPU of 3, 1.25 [1.0, 1.5] of 1.
    found = [(copy.num_gpus, copy.goodput_per_s, copy.low_per_s, copy.high_per_s) for copy in (first, second)]
    np.testing.assert_allclose(found, [(3, 6.0, 5.7, 6.6), (1, 1.25, 1.0, 1.5)])


@pytest.mark.parametrize("low", [0.0, -0.4, 1e-9])
def test_an_interval_down_to_nothing_leaves_the_gpus_open_upwards(low: float) -> None:
    copy = Copy("", num_gpus=3, goodput_per_s=6.0, low_per_s=max(low, 0.0), high_per_s=7.0)
    edges, fewest, most = band(copy, 13.0)
    assert edges.tolist() == [0, 7, 7, 13]
    assert fewest.tolist() == [3, 3, 6, 6]
    assert most.tolist() == [np.inf] * 4
    frame = trials()
    frame["goodput_per_gpu_per_s.low"] = [low, 1.0]
    shown = figure("{kind: staircase, series: placement, max_rate_per_s: 13}", frame)
    axes = shown.axes[0]
    bands = [np.asarray(drawn.get_paths()[0].vertices) for drawn in axes.collections]
    top = axes.get_ylim()[1]
    assert bands[0][:, 1].max() > top > bands[1][:, 1].max() == 13  # 13 copies of 1 request/s
    assert top < 20
    shown.draw_without_rendering()
    if low <= 0:
        assert texts(shown)[0] == "1xP:tp2pp1 + 1xD:tp1pp1: 3 GPUs a copy, 6.00 [0, 6.60] requests/s"


# Pareto


def test_the_front_is_what_none_beats() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 2.0, 1.0, np.nan]), np.array([9.0, 5.0, 5.0, 7.0, 9.0, 99.0])
    assert on_front(x, y).tolist() == [True, False, True, True, True, False]


def test_the_pareto_figure_shows_speed_and_throughput_per_gpu() -> None:
    frame = pd.DataFrame(
        {
            "system": ["a", "a", "b"],
            "tpot_s.mean": [0.02, 0.04, 0.05],
            "tpot_s.mean.low": [0.016, 0.04, 0.05],
            "tpot_s.mean.high": [0.025, 0.04, 0.05],
            "output_tokens_per_s": [400.0, 1000.0, 800.0],
            "num_gpus": [4, 4, 4],
            "rate": [1, 2, 3],
        }
    )
    shown = figure("{kind: pareto, series: system, labels: rate}", frame)
    (axes,) = shown.axes
    assert axes.get_xlabel() == "speed of one user, 1 / TPOT, mean (tokens/s)"
    assert axes.get_ylabel() == "output throughput (tokens/s per GPU)"
    front = next(line for line in axes.get_lines() if line.get_label() == "Pareto front")
    np.testing.assert_allclose(np.asarray(front.get_xydata()), [[25, 250], [50, 100]])
    bars = errorbars(axes)[0]
    # 1 / 0.025 and 1 / 0.016: the limits change places.
    np.testing.assert_allclose(bars.lines[2][0].get_segments()[0][:, 0], [40, 62.5])
    assert [text.get_text() for text in axes.texts] == ["1", "2"]
    assert texts(shown)[-2:] == ["1  a, rate 2", "2  a, rate 1"]


@pytest.mark.parametrize("low", [0.0, -0.01])
def test_a_tpot_down_to_nothing_leaves_the_speed_open_upwards(low: float) -> None:
    frame = pd.DataFrame(
        {
            "tpot_s.mean": [0.02, 0.04],
            "tpot_s.mean.low": [low, 0.038],
            "tpot_s.mean.high": [0.05, 0.042],
            "output_tokens_per_gpu_per_s": [100.0, 250.0],
        }
    )
    shown = figure("{kind: pareto, y: output_tokens_per_gpu_per_s}", frame)
    (axes,) = shown.axes
    first, second = errorbars(axes)[0].lines[2][0].get_segments()
    start, end = axes.get_xlim()
    assert start == 0
    assert 50 < end < 60
    assert first[0, 0] == pytest.approx(20)
    assert first[1, 0] > end  # to the edge, without a cap
    np.testing.assert_allclose(second[:, 0], [1 / 0.042, 1 / 0.038])
    shown.draw_without_rendering()


# Distributions and heat maps


def test_distributions_are_the_quantiles() -> None:
    frame = pd.DataFrame({"system": ["a", "b"], "quantiles.tpot_s": [np.linspace(0, 0.1, 101).tolist(), "null"]})
    frame.loc[1, "quantiles.tpot_s"] = str(np.linspace(0.1, 0.2, 101).tolist())  # JSON, as in a file
    published = pd.DataFrame([{"system": "b", "tpot_s.p90": 0.15}])
    shown = figure("{kind: cdf, y: quantiles.tpot_s, series: system}", frame, published)
    (axes,) = shown.axes
    lines = [line for line in axes.get_lines() if line.get_label() in {"a", "b"}]
    np.testing.assert_allclose(np.asarray(lines[0].get_xdata()), np.linspace(0, 100, 101))
    np.testing.assert_allclose(np.asarray(lines[1].get_xdata()), np.linspace(100, 200, 101))
    np.testing.assert_allclose(np.asarray(lines[0].get_ydata()), np.arange(101))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("TPOT (ms)", "requests (%)")
    (point,) = [line for line in axes.get_lines() if line.get_label() == "_published"]
    np.testing.assert_allclose(np.asarray(point.get_xydata()), [[150.0, 90.0]])


def test_distributions_far_apart_share_a_logarithmic_axis() -> None:
    """The axis begins at the first times, not at the one request that had next to none, and holds published points."""
    first = np.linspace(0.002, 0.01, 101)
    first[0] = 1e-9
    frame = pd.DataFrame({"system": ["a"], "quantiles.transfer_s": [first.tolist()]})
    published = pd.DataFrame([{"system": "a", "transfer_s.p99": 0.128}])
    shown = figure("{kind: cdf, y: quantiles.transfer_s, series: system, log: x}", frame, published)
    (axes,) = shown.axes
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    assert 1 < low < 2.08
    assert 128 < high < 200
    shown.draw_without_rendering()
    nothing = pd.DataFrame({"quantiles.queue_s": [[0.0] * 101]})
    figure("{kind: cdf, y: quantiles.queue_s, log: x}", nothing).draw_without_rendering()


def test_a_heat_map_prints_its_cells() -> None:
    frame = pd.DataFrame(
        {
            "slo.ttft": [0.4, 0.2, 0.4, 0.2],
            "slo.tpot": [0.1, 0.1, 0.05, 0.05],
            "goodput_per_gpu_per_s": [3.0, 2.0, 1.5, None],
            "placement": ["x", "y", "x", "y"],
        }
    )
    published = pd.DataFrame([{"slo.ttft": 0.4, "slo.tpot": 0.1, "goodput_per_gpu_per_s": 2.5}])
    shown = figure("{kind: heatmap, value: goodput_per_gpu_per_s, best: placement}", frame, published)
    axes, bar = shown.axes
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    # 0.2 before 0.4 along x, 50 ms before 100 ms along y; nothing where there is no number.
    assert cells == {(0.5, 1.5): "2.00 B", (1.5, 1.5): "3.00 A\n(2.50)", (1.5, 0.5): "1.50 A"}
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.2", "0.4"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["50", "100"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("TTFT limit (s)", "TPOT limit (ms)")
    assert bar.get_ylabel() == "goodput (requests/s per GPU)"
    assert texts(shown) == ["A  x", "B  y", "(in brackets)  published"]


# What rows may lack


@pytest.mark.parametrize(
    ("text", "frame", "message"),
    [
        ("{kind: attainment-rate, where: {system: DeepSpeed}}", attainment(), "has no rows to show; relax `where`"),
        (
            "{kind: attainment-rate}",
            attainment(),
            "has several rows at rate_per_gpu=0.5; tell them apart with `series`",
        ),
        ("{kind: line, x: system, y: tpot_s.p90}", attainment(), "'system' has texts where numbers are needed"),
        ("{kind: staircase}", trials(), "has several rows for one line"),
        ("{kind: goodput-bars, x: num_gpus}", trials().assign(num_gpus=3), "'3' has several rows for one bar"),
        ("{kind: cdf, y: num_gpus, series: placement}", trials(), "'num_gpus' must hold 101 quantiles"),
        (
            "{kind: heatmap, x: num_gpus, y: num_gpus, value: goodput_per_gpu_per_s}",
            trials().assign(num_gpus=3),
            "'num_gpus=3, num_gpus=3' has several rows for one cell",
        ),
        (
            "{kind: staircase, series: placement}",
            trials().assign(**{"goodput_per_gpu_per_s.best": 0.0}),
            "has no goodput to show",
        ),
    ],
)
def test_rows_that_cannot_be_drawn(text: str, frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(InputError) as error:
        figure(text, frame)
    assert message in str(error.value)
    assert str(error.value).startswith("plot ")


def test_units_do_not_stack() -> None:
    mixed = PlotSpec(kind=Kind.BREAKDOWN, file="mixed", x="placement", y=("num_gpus", "goodput_per_gpu_per_s"))
    with pytest.raises(InputError, match=r"plot mixed: stacks different units: .*; name columns of one unit"):
        draw(mixed, trials())


@pytest.mark.parametrize("values", [[1_000_001.0, 1_000_002.0], [0.1234561, 0.1234562]])
def test_numbers_that_differ_late_are_told_apart(values: list[float]) -> None:
    frame = pd.DataFrame({"kv_blocks": values, "rate_per_gpu": [1.0, 1.0], "attainment.both": [0.9, 0.8]})
    published = pd.DataFrame({"kv_blocks": [values[1]], "rate_per_gpu": [1.0], "attainment.both": [0.7]})
    shown = figure("{kind: attainment-rate, series: kv_blocks}", frame, published)
    curves = errorbars(shown.axes[0])
    assert [points(curve)[:, 1].tolist() for curve in curves] == [[90.0], [80.0]]
    assert len({text.split(" (")[0] for text in texts(shown)[:2]}) == 2
    (line,) = [line for line in shown.axes[0].get_lines() if line.get_label() == "_published"]
    assert line.get_markeredgecolor() == colour_of(1)
    bars = figure("{kind: goodput-bars, x: kv_blocks, y: attainment.both}", frame, published)
    names = [tick.get_text() for tick in bars.axes[0].get_yticklabels()]
    assert [float(name) for name in names] == values
    (line,) = [line for line in bars.axes[0].get_lines() if line.get_label() == "_published"]
    assert np.asarray(line.get_xydata()).tolist() == [[70.0, 1.0]]


def test_numbers_that_differ_by_rounding_alone_are_one() -> None:
    frame = pd.DataFrame({"scale": [0.1 + 0.2, 0.3], "rate_per_gpu": [1.0, 2.0], "attainment.both": [0.9, 0.8]})
    (curve,) = errorbars(figure("{kind: attainment-rate, series: scale}", frame).axes[0])
    assert points(curve)[:, 1].tolist() == [90.0, 80.0]


def test_numbers_that_are_missing_are_left_out() -> None:
    frame = attainment()
    frame["attainment.both"] = frame["attainment.both"].astype(object)
    frame.loc[1, "attainment.both"] = None
    shown = figure("{kind: attainment-rate, series: system}", frame)
    assert points(errorbars(shown.axes[0])[0])[:, 0].tolist() == [0.5, 1.5, 2.0]
    one = frame.assign(**{"attainment.both.low": None, "attainment.both.high": None})
    assert errorbars(figure("{kind: attainment-rate, series: system}", one).axes[0])[0].lines[2] == ()


# Looks and files


def test_series_are_told_apart_without_colour() -> None:
    looks = [(marker_of(i), hatch_of(i)) for i in range(len(STYLES))]
    assert len(set(looks)) == len({marker for marker, _ in looks}) == len({hatch for _, hatch in looks}) == len(STYLES)
    assert len({(colour_of(i), marker_of(i)) for i in range(len(STYLES) * len(STYLES))}) == len(STYLES) ** 2


def test_the_legend_lies_outside_of_the_axes() -> None:
    shown = figure("{kind: attainment-rate, series: system}", attainment())
    shown.draw_without_rendering()
    box = shown.legends[0].get_window_extent()
    assert not box.overlaps(shown.axes[0].get_window_extent())
    assert box.x0 >= 0
    assert box.x1 <= shown.bbox.x1


def test_texts_of_users_are_no_markup() -> None:
    frame = attainment().replace("vLLM", "a $x_1 <b>&")
    files = render(spec('{kind: attainment-rate, series: system, title: "50 $ & <i> $$"}', frame), frame)
    svg = files["attainment-rate.svg"].decode()
    assert "50 $ &amp; &lt;i> $$" in svg.replace("&gt;", ">")
    assert "a $x_1 &lt;b>&amp;" in svg.replace("&gt;", ">")


BAD = "$\\\\frac$ <b>&"  # in YAML


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        (f'{{kind: attainment-rate, series: system, xlabel: "{BAD}", ylabel: "{BAD}"}}', attainment()),
        (f'{{kind: attainment-rate, series: system, marks: [{{x: 1, label: "{BAD}"}}]}}', attainment()),
        (f'{{kind: goodput-bars, xlabel: "{BAD}", ylabel: "{BAD}"}}', trials()),
        (f'{{kind: staircase, series: placement, xlabel: "{BAD}", ylabel: "{BAD}"}}', trials()),
        (f'{{kind: heatmap, x: rate_per_gpu, y: system, value: attainment.both, xlabel: "{BAD}"}}', attainment()),
        (
            "{kind: heatmap, x: rate_per_gpu, y: system, value: attainment.both, best: system}",
            attainment().replace("vLLM", "$\\frac$ <b>&"),
        ),
        ("{kind: goodput-bars}", trials().assign(placement=["$\\frac$ <b>&", "b"])),
    ],
)
def test_labels_with_dollars_are_no_formulas(text: str, frame: pd.DataFrame) -> None:
    svg = rendered(figure(text, frame), "svg").decode()
    assert "$\\frac$ &lt;b>&amp;" in svg.replace("&gt;", ">")


def test_files_are_svg_with_texts_and_png() -> None:
    frame = attainment()
    files = render(spec("{kind: attainment-rate, series: system, file: fig8}", frame), frame)
    assert list(files) == ["fig8.svg", "fig8.png"]
    svg = files["fig8.svg"].decode()
    assert ">arrival rate (requests/s per GPU)</text>" in svg
    assert "<dc:date>" not in svg
    assert imread(io.BytesIO(files["fig8.png"])).shape[1] == 1050


_FRESH = """
import hashlib
from tests.test_plots import attainment, spec
from experiments.plots import render
files = render(spec("{kind: attainment-rate, series: system}", attainment()), attainment())
print(*[hashlib.sha256(content).hexdigest() for content in files.values()])
"""


def test_same_rows_same_bytes_also_in_a_fresh_process() -> None:
    frame = attainment()
    files = render(spec("{kind: attainment-rate, series: system}", frame), frame)
    here = [hashlib.sha256(content).hexdigest() for content in files.values()]
    fresh = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True)
    assert fresh.stdout.split() == here
    again = figure("{kind: attainment-rate, series: system}", frame)
    assert hashlib.sha256(rendered(again, "svg")).hexdigest() == here[0]
