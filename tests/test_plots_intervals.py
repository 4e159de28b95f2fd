"""Intervals in figures: at the ends of stacked bars, around distributions, in cells, on logarithmic axes."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import FillBetweenPolyCollection, LineCollection

from dsim.errors import InputError
from experiments.plots.bars import Part, joined, share_of
from experiments.plots.data import Values
from experiments.plots.lines import log_ends
from experiments.spans import quantile_limits, quantiles_of, span_s
from tests.test_plots import errorbars, figure, points, texts

LEVELS = np.linspace(0, 1, 101)


def parts(*, decode_s: float = 4.0) -> pd.DataFrame:
    """Return two placements whose parts have intervals of +- 10 % and do not add up to the latency."""
    frame = pd.DataFrame({"placement": ["a", "b"], "e2e_s.mean": [9.0, 9.0]})
    frame["e2e_s.mean.low"], frame["e2e_s.mean.high"] = 8.0, 10.0
    for name, values in {"prefill_queue": [0.1, 0.2], "prefill": [0.3, 0.4], "decode": [decode_s, decode_s]}.items():
        column = f"parts_s.{name}"
        frame[column] = values
        frame[f"{column}.low"], frame[f"{column}.high"] = 0.9 * frame[column], 1.1 * frame[column]
    return frame


def ends(axes: Axes) -> list[list[float]]:
    """Return the intervals along the bars of the only error bars of a panel."""
    (bars,) = errorbars(axes)
    lines = bars.lines[2][0]
    assert isinstance(lines, LineCollection)
    return [[float(x) for x in segment[:, 0]] for segment in lines.get_segments()]


def test_a_stack_ends_with_the_intervals_of_its_parts_together() -> None:
    shown = figure("{kind: breakdown}", parts())
    before, whole = shown.axes
    np.testing.assert_allclose(ends(before), [[0.36, 0.44], [0.54, 0.66]])
    np.testing.assert_allclose(ends(whole), [[3.96, 4.84], [4.14, 5.06]])
    assert [text.get_text() for text in before.texts] == ["400 [360, 440] ms", "600 [540, 660] ms"]
    assert whole.texts[0].get_text() == "4.40 [3.96, 4.84] s"
    # Where the parts add up to the latency its own interval holds, which is narrower than theirs together.
    exact = parts()
    exact["e2e_s.mean"] = [4.4, 4.6]
    exact["e2e_s.mean.low"], exact["e2e_s.mean.high"] = [4.3, 4.5], [4.5, 4.7]
    np.testing.assert_allclose(ends(figure("{kind: breakdown}", exact).axes[1]), [[4.3, 4.5], [4.5, 4.7]])
    # Requests of one token lack the decode part, whose mean is then a little more than its share of the latency.
    exact["e2e_s.mean"] = [4.38, 4.58]
    exact["e2e_s.mean.low"], exact["e2e_s.mean.high"] = [4.28, 4.48], [4.48, 4.68]
    np.testing.assert_allclose(ends(figure("{kind: breakdown}", exact).axes[1]), [[4.3, 4.5], [4.5, 4.7]])


def test_the_interval_of_a_sum_is_never_wider_than_that_of_its_parts_together() -> None:
    rng = np.random.default_rng(1)
    for shared in (0.0, 0.5, 1.0):
        common = rng.normal(size=(2000, 1))
        values = shared * common + (1 - shared) * rng.normal(size=(2000, 3))
        one = [Part("", v.mean(keepdims=True), np.full((2, 1), v.std())) for v in values.T]
        together = joined(one).errors
        assert together is not None
        assert values.sum(axis=1).std() <= together[0, 0] * (1 + 1e-9)


def test_shares_have_the_interval_of_what_comes_before_decoding() -> None:
    before, whole = figure("{kind: breakdown, share: true}", parts()).axes
    # 0.4 of 4.4: (4 * 0.04 + 0.4 * 0.4) / 4.4^2.
    share, off = 100 * 0.4 / 4.4, 100 * (4.0 * 0.04 + 0.4 * 0.4) / 4.4**2
    np.testing.assert_allclose(ends(before)[0], [share - off, share + off])
    assert errorbars(whole) == []
    assert whole.texts[0].get_text() == "4.40 [3.96, 4.84] s"  # what the shares are of
    measured = parts()
    measured["parts_share.decode"], measured["parts_share.decode.low"] = 0.91, 0.905
    measured["parts_share.decode.high"] = 0.93
    before, _ = figure("{kind: breakdown, share: true}", measured).axes
    np.testing.assert_allclose(ends(before)[0], [share - 2, share + 0.5])
    (one,) = figure("{kind: breakdown, share: true}", parts(decode_s=0.5)).axes
    assert ends(one)[0][0] < 100 * 0.4 / 0.9 < ends(one)[0][1]


def test_a_share_is_off_by_no_more_than_both_parts_at_their_limits() -> None:
    first, rest = (
        Part("", np.array([2.0]), np.array([[0.02], [0.01]])),
        Part("", np.array([6.0]), np.full((2, 1), 0.03)),
    )
    errors = share_of(first, rest).errors
    assert errors is not None
    assert errors[0, 0] == pytest.approx(25 - 100 * 1.98 / (1.98 + 6.03), rel=0.01)
    assert errors[1, 0] == pytest.approx(100 * 2.01 / (2.01 + 5.97) - 25, rel=0.01)


def test_parts_that_no_bar_has_are_not_in_the_legend_and_do_not_hide_the_interval() -> None:
    frame = parts()
    for end in ("", ".low", ".high"):
        frame[f"parts_s.transfer{end}"] = None
    shown = figure("{kind: breakdown}", frame)
    assert texts(shown) == ["prefill queue", "prefill", "decode"]
    assert len(ends(shown.axes[1])) == 2


# Distributions


def quantiles(middle_s: float) -> dict[str, list[float]]:
    best = np.linspace(0, 2 * middle_s, 101)
    return {"": best.tolist(), ".low": (0.8 * best).tolist(), ".high": (1.5 * best).tolist()}


def test_a_distribution_has_the_band_of_its_quantiles() -> None:
    frame = pd.DataFrame([{f"quantiles.tpot_s{end}": values for end, values in quantiles(0.05).items()}])
    shown = figure("{kind: cdf, y: quantiles.tpot_s}", frame)
    (band,) = [drawn for drawn in shown.axes[0].collections if isinstance(drawn, FillBetweenPolyCollection)]
    corners = np.asarray(band.get_paths()[0].vertices)
    at = corners[np.isclose(corners[:, 1], 50)][:, 0]
    np.testing.assert_allclose([at.min(), at.max()], [40, 75])
    assert texts(shown) == ["95 % interval over replications"]
    without = figure("{kind: cdf, y: quantiles.tpot_s}", frame[["quantiles.tpot_s"]])
    assert (list(without.axes[0].collections), texts(without)) == ([], [])


def test_the_last_hundredth_does_not_stretch_the_axis() -> None:
    best = np.append(np.linspace(0.01, 0.1, 100), 9.0)
    row = {"quantiles.ttft_s": best.tolist(), "quantiles.ttft_s.low": best.tolist(), "ttft_s.p50": 0.05}
    frame = pd.DataFrame([{**row, "quantiles.ttft_s.high": (2 * best).tolist()}])
    assert figure("{kind: cdf}", frame).axes[0].get_xlim() == pytest.approx((0, 1.04 * 0.2))
    published = pd.DataFrame([{"ttft_s.p99": 0.3}])
    assert figure("{kind: cdf}", frame, published).axes[0].get_xlim()[1] == pytest.approx(1.04 * 0.6)
    short = frame.assign(**{"quantiles.ttft_s": [np.linspace(0, 0.1, 101).tolist()]})
    assert figure("{kind: cdf}", short).axes[0].get_xlim()[1] == pytest.approx(1.04 * 0.1)


def test_a_series_without_quantiles_is_not_in_the_legend() -> None:
    rows = [{"system": "a", "quantiles.tpot_s": quantiles(0.05)[""]}, {"system": "b", "quantiles.tpot_s": None}]
    shown = figure("{kind: cdf, y: quantiles.tpot_s, series: system}", pd.DataFrame(rows))
    assert texts(shown) == ["a"]
    with pytest.raises(InputError, match="has no quantiles to show"):
        figure("{kind: cdf, y: quantiles.tpot_s, where: {system: b}}", pd.DataFrame(rows))


def test_limits_of_one_run_hold_where_requests_depend_on_each_other() -> None:
    """Nineteen in twenty, about, cover the true quantile; limits for independent requests miss it far more often."""
    rng, runs, n, memory = np.random.default_rng(7), 150, 4000, 0.9
    values = np.zeros((runs, n))
    values[:, 0] = rng.normal(size=runs)
    for i in range(1, n):
        values[:, i] = memory * values[:, i - 1] + math.sqrt(1 - memory**2) * rng.normal(size=runs)
    limits = [quantile_limits(run, confidence=0.95) for run in values]
    for level, truth in ((50, 0.0), (90, 1.2815515655)):
        held = np.mean([found["low"][level] <= truth <= found["high"][level] for found in limits if found is not None])
        assert 0.88 <= held <= 0.99
        off = 1.96 * math.sqrt(level / 100 * (1 - level / 100) / n)
        pair = np.quantile(values, [level / 100 - off, level / 100 + off], axis=1)
        assert np.mean((pair[0] <= truth) & (truth <= pair[1])) < 0.7


def test_a_short_run_has_no_limits_and_limits_enclose_the_quantiles() -> None:
    assert quantile_limits(np.arange(199.0), confidence=0.95) is None
    values = np.random.default_rng(3).exponential(size=1000)
    values[::7] = np.nan
    best, limits = quantiles_of(values), quantile_limits(values, confidence=0.95)
    assert best is not None
    assert limits is not None
    np.testing.assert_allclose(best, np.nanquantile(values, LEVELS))
    assert np.all(np.array(limits["low"]) <= best)
    assert np.all(best <= np.array(limits["high"]))
    assert quantiles_of(np.array([np.nan])) is None


def test_a_span_runs_between_its_instants() -> None:
    columns = {"transfer_start_s": np.array([1.0, np.nan]), "transfer_end_s": np.array([1.5, np.nan])}
    np.testing.assert_array_equal(span_s("transfer_s", columns.__getitem__), [0.5, np.nan])


# Heat maps


@pytest.mark.parametrize("name", ["goodput_per_gpu_per_s", "goodput_per_gpu_per_s.best"])
def test_a_cell_has_its_interval_below_the_value(name: str) -> None:
    frame = pd.DataFrame({"slo.ttft": [0.2, 0.4], "slo.tpot": [0.1, 0.1], "system": ["x", "y"]})
    for end, values in {"low": [1.9, np.nan], "best": [2.0, 3.0], "high": [2.25, np.nan]}.items():
        frame[f"goodput_per_gpu_per_s.{end}"] = values
    shown = figure(f"{{kind: heatmap, value: {name}, best: system}}", frame)
    assert [text.get_text() for text in shown.axes[0].texts] == ["2.00 A\n1.90 – 2.25", "3.00 B"]
    assert texts(shown) == ["A  x", "B  y", "below a value  95 % interval"]
    shown.draw_without_rendering()
    cell = shown.axes[0].transData.transform([[0, 0], [1, 1]])
    box = shown.axes[0].texts[0].get_window_extent()
    assert box.width < cell[1, 0] - cell[0, 0]
    assert box.height < cell[1, 1] - cell[0, 1]


# Lines


def rates() -> pd.DataFrame:
    rows = [
        {"system": system, "rate": rate, "ttft_s.mean": None if system == "b" else 0.1 * rate}
        for system in ("a", "b", "c")
        for rate in (1.0, 2.0)
    ]
    frame = pd.DataFrame(rows)
    frame["ttft_s.mean.low"] = [1e-9, 0.15, None, None, 0.09, 0.19]
    frame["ttft_s.mean.high"] = [0.2, 0.25, None, None, 0.11, 0.21]
    return frame


def test_series_without_a_point_are_not_in_the_legend() -> None:
    assert texts(figure("{kind: line, x: rate, y: ttft_s.mean, series: system}", rates())) == ["a", "c"]
    published = pd.DataFrame([{"system": "b", "rate": 1.0, "ttft_s.mean": 0.3}])
    shown = figure("{kind: line, x: rate, y: ttft_s.mean, series: system}", rates(), published)
    assert texts(shown) == ["a", "c", "b, published alone"]


def test_an_interval_down_to_nothing_does_not_stretch_a_logarithmic_axis() -> None:
    published = pd.DataFrame([{"system": "a", "rate": 1.0, "ttft_s.mean": 2.0}])
    for known, most in ((None, 0.3), (published, 3.0)):
        shown = figure("{kind: line, x: rate, y: ttft_s.mean, series: system, log: y}", rates(), known)
        low, high = shown.axes[0].get_ylim()
        assert 0.02 < low < 0.1
        assert max(0.25, most / 1.5) < high < 1.3 * most
    nothing = Values(np.array([0.0]), np.array([0.0]), np.array([0.0]), has_interval=False)
    assert log_ends([]) is None
    assert log_ends([nothing]) is None
    one = Values(np.array([0.5]), np.array([-1.0]), np.array([np.inf]), has_interval=True)
    ends = log_ends([one])
    assert ends is not None
    np.testing.assert_allclose(np.log(ends[0] * ends[1]), np.log(0.25))


def test_intervals_of_several_lines_stand_beside_each_other() -> None:
    shown = figure("{kind: line, x: rate, y: ttft_s.mean, series: system}", rates())
    shown.draw_without_rendering()
    first, second = errorbars(shown.axes[0])
    assert points(first)[:, 0].tolist() == points(second)[:, 0].tolist() == [1.0, 2.0]
    places = [bars.lines[0].get_transform().transform((1.0, 0.1))[0] for bars in (first, second)]
    apart = 72 * (places[1] - places[0]) / shown.dpi
    assert apart == pytest.approx(3)
    # Lines that have no place in common stand where they are.
    alone = rates().assign(rate=[1.0, 2.0, 1.0, 2.0, 3.0, 4.0])
    for bars in errorbars(figure("{kind: line, x: rate, y: ttft_s.mean, series: system}", alone).axes[0]):
        axes = bars.lines[0].axes
        assert axes is not None
        assert bars.lines[0].get_transform() == axes.transData


def test_a_legend_is_as_wide_as_there_is_room() -> None:
    frame = pd.concat([rates().assign(system=f"placement number {i}, of some length") for i in range(9)])
    shown = figure("{kind: line, x: rate, y: ttft_s.mean, series: system}", frame.drop_duplicates(["system", "rate"]))
    shown.draw_without_rendering()
    box = shown.legends[0].get_window_extent()
    assert 0.5 * shown.bbox.width < box.width <= shown.bbox.width
    assert len(texts(shown)) == 9
