"""Distributions of latencies over requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import Floats, Series, of_series, problem, published_of, rows_of, series_columns, series_of
from experiments.plots.labels import quantity
from experiments.plots.spec import PlotSpec
from experiments.plots.style import (
    LINES,
    Legended,
    add_legend,
    colour_of,
    marker_of,
    new_figure,
    once,
    plain_ticks,
    published_handle,
    set_title,
    tidy,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: 0, 1, ... 100 %.
_QUANTILES = 101


def cdf_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of shares of requests against latency, a panel for each column of 101 quantiles.

    Published percentiles (`ttft_s.p90`) are points of `quantiles.ttft_s`.
    """
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=series_columns(spec))
    several = len(spec.y)
    figure = new_figure(width=7.0 if several < 3 else 9.6, height=3.4)
    grid = figure.subplots(1, several, sharey=True, squeeze=False)[0]
    handles: list[Legended] = []
    for axes, column in zip(grid, spec.y, strict=True):
        tidy(axes)
        every = series_of(spec, frame)
        for series in every:
            handles += _curve(axes, spec, series, column)
        for series in every:
            handles += _published(axes, series, column, of_series(spec, points, series))
        axes.set_xlabel(quantity(column).axis if several > 1 else spec.xlabel or quantity(column).axis)
        if spec.log_x:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        plain_ticks(axes, y=False)
        axes.set_ylim(-2, 102)
    grid[0].set_ylabel(spec.ylabel or "requests (%)")
    set_title(figure, spec.title)
    add_legend(figure, once(handles))
    return figure


def quantiles(spec: PlotSpec, series: Series, column: str) -> Floats:
    """Return the quantiles of a series at 0, 1, ... 100 %, in the unit of the axis.

    Raises:
        InputError: the series has several rows, or no quantiles.
    """
    if column not in series.frame.columns:
        raise problem(spec, "is no column of the rows", value=column, hint="add it to base.quantiles of the sweep")
    if len(series.frame) > 1:
        hint = "tell them apart with `series`, or choose one with `where`"
        raise problem(spec, "has several rows for one line", value=series.label or None, hint=hint)
    values = _listed(series.frame[column].iloc[0])
    if values is None or len(values) != _QUANTILES:
        raise problem(spec, f"must hold {_QUANTILES} quantiles", value=column, hint="name a column quantiles.<name>")
    return (
        np.array([np.nan if value is None else value for value in values], dtype=np.float64) * quantity(column).factor
    )


def _listed(value: object) -> Sequence[float | None] | None:
    """Return a list, also from JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _curve(axes: Axes, spec: PlotSpec, series: Series, column: str) -> list[Legended]:
    values = quantiles(spec, series, column)
    shares = np.arange(_QUANTILES)
    return list(
        axes.plot(
            values,
            shares,
            color=colour_of(series.number),
            linestyle=LINES[series.number % len(LINES)],
            linewidth=1.6,
            marker=marker_of(series.number),
            markevery=(10 + 3 * (series.number % 4), 20),
            markersize=5,
            label=series.label or "_all",
        )
    )


def _published(axes: Axes, series: Series, column: str, own: pd.DataFrame | None) -> list[Legended]:
    """Draw the percentiles that are published for a series."""
    name = column.removeprefix("quantiles.")
    if own is None:
        return []
    found = [
        (float(value) * quantity(column).factor, float(label.removeprefix(f"{name}.p")))
        for label in own.columns
        if label.startswith(f"{name}.p") and label.removeprefix(f"{name}.p").isdecimal()
        for value in own[label]
        if value == value
    ]
    if not found:
        return []
    axes.plot(
        [value for value, _ in found], [share for _, share in found], linestyle="none",
        marker=marker_of(series.number), markersize=9, markerfacecolor="none",
        markeredgecolor=colour_of(series.number), markeredgewidth=1.4, label="_published", zorder=4,
    )  # fmt: skip
    return [published_handle(marker_of(series.number))]
