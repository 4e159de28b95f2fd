"""Figures of rows with gaps, which only results can have: what is missing is left out, or one line says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dsim.errors import InputError
from dsim.yamlfile import parse_yaml
from experiments.plots import PlotSpec, draw, parse_plot
from experiments.sweepfile import read_sweep

RATIOS = ["1xP:tp1pp1 + 1xD:tp1pp1", "2xP:tp1pp1 + 1xD:tp1pp1"]


def spec_of(text: str, columns: Iterable[str]) -> PlotSpec:
    return parse_plot(parse_yaml(text.encode(), file="sweep.yaml"), columns=list(columns))


def figure(text: str, frame: pd.DataFrame) -> Figure:
    return draw(spec_of(text, frame.columns), frame)


def limits() -> pd.DataFrame:
    """Return four rows of attainment under two limits, some of them none."""
    return pd.DataFrame(
        {
            "slo.ttft": [None, 0.2, None, 0.2],
            "slo.tpot": [0.1, 0.1, None, None],
            "policy": ["orca", "chunked", None, None],
            "attainment.both": [0.9, 0.8, 0.7, 0.6],
        }
    )


@pytest.mark.parametrize("best", ["", ", best: policy"])
def test_a_row_without_a_place_in_a_heat_map_is_left_out(best: str) -> None:
    shown = figure(f"{{kind: heatmap, value: attainment.both{best}}}", limits())
    axes = shown.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.2"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["100"]
    assert [text.get_text().split()[0] for text in axes.texts] == ["80.0"]
    meanings = [text.get_text() for legend in shown.legends for text in legend.get_texts()]
    assert meanings == (["A  chunked"] if best else [])


def test_a_heat_map_without_any_place_says_so() -> None:
    with pytest.raises(InputError, match=r"^plot heatmap: has no rows with both slo\.ttft and slo\.tpot; relax"):
        figure("{kind: heatmap, value: attainment.both}", limits().iloc[[0, 2, 3]])


def test_decoding_alone_has_bars() -> None:
    frame = pd.DataFrame({"placement": ["1xD:tp1pp1", "2xD:tp1pp1"], "parts_s.decode": [2.0, 1.0]})
    for share in ("", ", share: true"):
        axes = figure(f"{{kind: breakdown, y: parts_s.decode{share}}}", frame).axes
        assert len(axes) == 1
        widths = [bar.get_width() for bar in axes[0].patches if isinstance(bar, Rectangle)]
        assert widths == ([100.0, 100.0] if share else [2.0, 1.0])


@pytest.mark.parametrize(
    ("values", "names"), [([None, 0.2], ["none", "0.2 s"]), ([None, None], ["a, none", "b, none"])]
)
def test_a_bar_of_no_limit_is_called_so(values: list[float | None], names: list[str]) -> None:
    frame = pd.DataFrame({"slo.ttft": values, "system": ["a", "b"], "parts_s.prefill": [2.0, 1.0]})
    series = ", series: system" if values[1] is None else ""
    axes = figure(f"{{kind: breakdown, x: slo.ttft, y: parts_s.prefill{series}}}", frame).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == names


def test_a_choice_by_what_no_row_has_shows_none() -> None:
    frame = pd.DataFrame({"placement": ["1xC:tp1pp1"], "goodput_per_gpu_per_s": [1.0]})
    spec = spec_of("{kind: goodput-bars, where: {limiting_role: prefill}}", [*frame.columns, "limiting_role"])
    with pytest.raises(InputError, match=r"^plot goodput-bars: has no rows to show; relax `where`$"):
        draw(spec, frame)


def test_a_search_without_an_answer_has_no_ratio() -> None:
    frame = pd.DataFrame({"placement": [None, *RATIOS], "goodput_per_gpu_per_s": [None, 1.0, 2.0]})
    axes = figure("{kind: ratio}", frame).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1:1", "2:1"]
    with pytest.raises(InputError, match=r"^plot ratio: has no placement, whose ratio is shown; none"):
        figure("{kind: ratio}", frame.iloc[:1])


def test_placements_that_replications_differ_in_have_no_ratio() -> None:
    frame = pd.DataFrame({"placement": ["; ".join(RATIOS)], "goodput_per_gpu_per_s": [1.0]})
    with pytest.raises(InputError, match=r"^plot ratio: .*; .* has no prefill : decode ratio; show placements"):
        figure("{kind: ratio}", frame)


PLOTS = (
    "{kind: attainment-rate, series: policy}",
    "{kind: attainment-scale, series: policy}",
    "{kind: goodput-bars, series: policy}",
    "{kind: staircase, series: policy}",
    "{kind: pareto, series: policy, labels: placement}",
    "{kind: breakdown, series: policy}",
    "{kind: breakdown, share: true}",
    "{kind: breakdown, x: rate_per_gpu, y: [ttft_parts_s.queue, ttft_parts_s.prefill]}",
    "{kind: cdf, series: policy}",
    "{kind: ratio, series: policy}",
    "{kind: heatmap, x: rate_per_gpu, y: slo_scale, value: e2e_s.mean, best: policy}",
    "{kind: line, x: rate_per_gpu, y: e2e_s.mean, log: xy, mark: saturation_tokens, series: policy}",
)
ROW = {
    "rate_per_gpu": 1.0,
    "slo_scale": 0.5,
    "placement": RATIOS[0],
    "policy": "orca",
    "num_gpus": 2,
    "attainment.both": 0.9,
    "goodput_per_gpu_per_s.low": 0.5,
    "goodput_per_gpu_per_s.best": 1.0,
    "goodput_per_gpu_per_s.high": 1.5,
    "cost_usd_per_h": 2.6,
    "tpot_s.mean": 0.02,
    "output_tokens_per_s": 100.0,
    "e2e_s.mean": 3.0,
    "parts_s.prefill": 0.1,
    "parts_s.decode": 2.9,
    "ttft_parts_s.queue": 0.1,
    "ttft_parts_s.prefill": 0.1,
    "saturation_tokens": 512.0,
    "quantiles.ttft_s": [0.1 * i for i in range(101)],
}


@pytest.mark.parametrize("text", PLOTS)
def test_a_gap_is_left_out_or_one_line(text: str) -> None:
    """Whichever column has no value in one row or in both: no other exception than that of an input."""
    other = {**ROW, "rate_per_gpu": 2.0, "slo_scale": 1.0, "policy": "chunked", "placement": RATIOS[1]}
    asked = spec_of(text, ROW)
    shown = {asked.x, *asked.y, asked.series, asked.value, asked.best, asked.labels, asked.mark, "num_gpus"}
    for name, rows in itertools.product(shown & {*ROW}, ((0,), (0, 1))):
        records = [{**row, name: None} if i in rows else row for i, row in enumerate((ROW, other))]
        said = ""
        try:
            draw(asked, pd.DataFrame(records))
        except InputError as error:
            said = str(error)
        assert said.startswith(f"plot {asked.file}: " if said else "")
        assert "\n" not in said


@pytest.mark.parametrize("wanted", ["null", "0.2"])
def test_where_chooses_rows_without_a_value(wanted: str) -> None:
    shown = figure(f"{{kind: goodput-bars, x: slo.tpot, y: attainment.both, where: {{slo.ttft: {wanted}}}}}", limits())
    assert [tick.get_text() for tick in shown.axes[0].get_yticklabels()] == ["0.1", "none"]


def test_rows_without_a_place_do_not_share_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "fig.yaml"
    path.write_text(
        """dsim_sweep: 1
about: Two systems without a policy, and one with one.
base: {model: opt-13b, rate: 1, requests: 10, warmup: 0, slo: {tpot: 0.1}}
factors:
  placement: {choices: ["1xP:tp1pp1 + 1xD:tp1pp1", "1xP:tp1pp1 + 2xD:tp1pp1", "1xC:tp1pp1"]}
  slo.ttft: {choices: [0.2, 0.4]}
plots:
- {kind: heatmap, x: slo.ttft, y: policy, value: attainment.both, where: {gpu: a100-80g}}
"""
    )
    assert len(read_sweep(path).outline.plots) == 1
