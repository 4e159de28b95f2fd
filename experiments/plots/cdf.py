"""Distributions of latencies over requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import Floats, Series, Values, of_series, problem, published_of, rows_of, series_of
from experiments.plots.labels import quantity
from experiments.plots.lines import log_ends
from experiments.plots.spec import PlotSpec
from experiments.plots.style import (
    LINES,
    NEUTRAL,
    Legended,
    colour_of,
    finish,
    hollow,
    marker_of,
    new_figure,
    plain_ticks,
    tidy,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: 0, 1, ... 100 %.
_QUANTILES = 101
#: The axis ends at so many times the value at 99 % at most, and so far beside the data.
_TAIL, _BESIDE = 2.0, 1.04


#: Where a band comes from unless something else is said.
_OVER_REPLICATIONS = "95 % interval over replications"


def cdf_figure(
    spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None, *, band: str = _OVER_REPLICATIONS
) -> Figure:
    """Return a figure of shares of requests against latency, a panel for each column of 101 quantiles.

    A band is the interval of each quantile, from the lists in `<column>.low` and `<column>.high`; there is none without
    them. Published percentiles (`ttft_s.p90`) are points of `quantiles.ttft_s`.

    Args:
        band: what the legend says of it.
    """
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=())
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
        if spec.log_x and (ends := _log_ends(axes)):
            axes.set_xscale("log")
            axes.set_xlim(ends)
        else:
            axes.set_xlim(0, _end(axes))
        plain_ticks(axes, y=False)
        axes.set_ylim(-2, 102)
    if not handles:
        raise problem(spec, "has no quantiles to show", hint="none of the rows has a request with that time")
    if any(axes.collections for axes in grid):
        handles.append(_band_handle(band))
    grid[0].set_ylabel(spec.ylabel or "requests (%)")
    finish(figure, spec.title, handles)
    return figure


def _end(axes: Axes) -> float | None:
    """Return where the axis ends: of a long tail, and of its band, the last hundredth does not stretch it."""
    lines = [np.asarray(line.get_xdata(), dtype=np.float64) for line in axes.get_lines()]
    last = [(x.max(), x[-2] if len(x) == _QUANTILES else x.max()) for x in lines if len(x)]
    if not last:
        return None
    end = min(max(x for x, _ in last), _TAIL * max(x for _, x in last))
    return float(_BESIDE * end) if end > 0 else None


def _log_ends(axes: Axes) -> tuple[float, float] | None:
    """Return the ends of a logarithmic axis: the first hundredth does not stretch it. None where no time is above 0."""
    lines = [np.asarray(line.get_xdata(), dtype=np.float64) for line in axes.get_lines()]
    shown = [x[1:] if len(x) == _QUANTILES and x[0] < x[1] / _TAIL else x for x in lines]
    return log_ends([Values(x, x, x, has_interval=False) for x in shown])


def quantiles(spec: PlotSpec, series: Series, column: str) -> Values | None:
    """Return the quantiles of a series at 0, 1, ... 100 %, in the unit of the axis; None where no request has any.

    Raises:
        InputError: the series has several rows, or something else than quantiles.
    """
    if column not in series.frame.columns:
        raise problem(spec, "is no column of the rows", value=column, hint="add it to base.quantiles of the sweep")
    if len(series.frame) > 1:
        hint = "tell them apart with `series`, or choose one with `where`"
        raise problem(spec, "has several rows for one line", value=series.label or None, hint=hint)
    row = series.frame.iloc[0]
    best = _listed(row[column])
    if best is None:
        return None
    limits = [_listed(row[f"{column}.{end}"]) if f"{column}.{end}" in row.index else None for end in ("low", "high")]
    low, high = (best if limit is None else limit for limit in limits)
    if {len(best), len(low), len(high)} != {_QUANTILES}:
        raise problem(spec, f"must hold {_QUANTILES} quantiles", value=column, hint="name a column quantiles.<name>")
    return Values(best, low, high, has_interval=all(limit is not None for limit in limits)) * quantity(column).factor


def _listed(value: object) -> Floats | None:
    """Return a list, also from JSON, as an array; an empty one for anything else, None where there is nothing."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return np.empty(0)
    if value is None or (isinstance(value, float) and value != value):
        return None
    if not isinstance(value, list | tuple | np.ndarray):
        return np.empty(0)
    return np.array([np.nan if item is None else item for item in value], dtype=np.float64)


def _curve(axes: Axes, spec: PlotSpec, series: Series, column: str) -> list[Legended]:
    values = quantiles(spec, series, column)
    if values is None:
        return []
    shares, colour = np.arange(_QUANTILES), colour_of(series.number)
    if values.has_interval:
        axes.fill_betweenx(shares, values.low, values.high, color=colour, alpha=0.2, linewidth=0)
    return list(
        axes.plot(
            values.best,
            shares,
            color=colour,
            linestyle=LINES[series.number % len(LINES)],
            linewidth=1.6,
            marker=marker_of(series.number),
            markevery=(10 + 3 * (series.number % 4), 20),
            markersize=5,
            label=series.label or "_all",
        )
    )


def _band_handle(label: str) -> Legended:
    from matplotlib.patches import Patch

    return Patch(facecolor=NEUTRAL, alpha=0.2, linewidth=0, label=label)


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
    return hollow(axes, [value for value, _ in found], [share for _, share in found], number=series.number)
