"""Bars: goodput by placement, and where latency goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import (
    Floats,
    Values,
    different_texts,
    key_of,
    keys_of,
    of_series,
    problem,
    published_of,
    rows_of,
    series_columns,
    series_of,
    texts_of,
    values_of,
)
from experiments.plots.labels import quantity, short
from experiments.plots.spec import TTFT_PARTS, PlotSpec
from experiments.plots.style import (
    NEUTRAL,
    Legended,
    add_legend,
    colour_of,
    digits,
    hatch_of,
    interval_text,
    marker_of,
    new_figure,
    once,
    published_handle,
    set_title,
    tidy,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of one bar, and of everything above and below them.
_BAR, _REST = 0.3, 0.75
#: Share of the axis that bars take; the rest is for the numbers beside them.
_BARS_SHARE = 0.7
#: End-to-end latency less the other parts.
_DECODE = "decode"
_E2E = "e2e_s.mean"
#: Parts before decoding that are less than this share of the whole are shown again, larger.
_SMALL = 0.35


def goodput_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of the goodput of each placement (or other value of x) as bars with intervals and numbers."""
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=(spec.x, *series_columns(spec)))
    assert spec.x is not None
    names = dict(zip(keys_of(frame, spec.x, spec=spec), texts_of(frame, spec.x, spec=spec), strict=True))
    categories = list(names)
    every = series_of(spec, frame)
    figure = new_figure(height=_REST + _BAR * len(categories) * (len(every) + 0.3))
    axes = figure.subplots()
    shown = quantity(spec.y[0])
    thick = 0.8 / len(every)
    handles: list[Legended] = []
    for series in every:
        value = values_of(series.frame, spec.y[0], spec=spec) * shown.factor
        keys = keys_of(series.frame, spec.x, spec=spec)
        _once_each(spec, keys)
        known = ~np.isnan(value.best)
        offset = (series.number - (len(every) - 1) / 2) * thick
        rows = np.array([categories.index(key) for key in keys]) + offset
        bars = axes.barh(
            rows[known],
            value.best[known],
            height=thick * 0.9,
            color=colour_of(series.number),
            hatch=hatch_of(series.number),
            edgecolor="white",
            linewidth=0,
            label=series.label,
        )
        handles.append(bars)
        _intervals(axes, rows[known], value.take(np.flatnonzero(known)))
        for row, best, low, high in zip(rows, value.best, value.low, value.high, strict=True):
            _write(axes, row, high, interval_text(best, low, high))
        handles += _published(
            axes, spec, of_series(spec, points, series), rows=categories, offset=offset, number=series.number
        )
    _finish(axes, spec, list(names.values()), label=spec.xlabel or shown.axis)
    set_title(figure, spec.title)
    add_legend(figure, once(handles))
    return figure


def _published(
    axes: Axes, spec: PlotSpec, own: pd.DataFrame | None, *, rows: Sequence[str], offset: float, number: int
) -> list[Legended]:
    if own is None or spec.x not in own.columns or spec.y[0] not in own.columns:
        return []
    factor = quantity(spec.y[0]).factor
    found = [
        (rows.index(key_of(at)) + offset, value * factor)
        for at, value in zip(own[spec.x], own[spec.y[0]].to_numpy(dtype=np.float64), strict=True)
        if key_of(at) in rows and value == value
    ]
    if not found:
        return []
    axes.plot(
        [value for _, value in found],
        [row for row, _ in found],
        linestyle="none",
        marker=marker_of(number),
        markersize=9,
        markerfacecolor="none",
        markeredgecolor="black",
        markeredgewidth=1.6,
        label="_published",
        zorder=5,
    )
    return [published_handle(marker_of(number))]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of the stack.

    Args:
        label: in the legend.
        size: of each bar, in the unit of the axis; 0 where it does not have the part.
    """

    label: str
    size: Floats


def parts_of(spec: PlotSpec, frame: pd.DataFrame) -> list[Part]:
    """Return the parts of each row's latency, in seconds, or per cent where the columns are shares.

    The decode part is what is left of the mean end-to-end latency, where rows have it and the parts are those
    of TTFT. Requests without a part (of one token, say) are not in its mean; the parts add up all the same.

    Raises:
        InputError: the columns have different units.
    """
    units = {quantity(column).unit for column in spec.y}
    if len(units) > 1:
        raise problem(spec, f"stacks different units: {', '.join(sorted(units))}", hint="name columns of one unit")
    parts = [
        Part(short(column), np.nan_to_num(values_of(frame, column, spec=spec).best) * quantity(column).factor)
        for column in spec.y
    ]
    if _E2E in frame.columns and _before_decoding(spec):
        rest = values_of(frame, _E2E, spec=spec).best - _total(parts)
        parts.append(Part(_DECODE, np.clip(np.nan_to_num(rest), 0, None)))
    return parts


def breakdown_figure(spec: PlotSpec, summary: pd.DataFrame) -> Figure:
    """Return a figure of stacked parts, one bar for each row, in seconds or as shares of the whole.

    Where decoding dwarfs the other parts, a panel of its own shows these. The interval of the whole is that of the
    mean end-to-end latency, where the parts add up to it.
    """
    frame = rows_of(spec, summary)
    names = _row_names(spec, frame)
    _once_each(spec, names)
    parts = parts_of(spec, frame)
    latency = values_of(frame, _E2E, spec=spec) if _E2E in frame.columns else None
    seconds = _total(parts)
    if spec.share:
        scale = 100 / np.where(seconds > 0, seconds, np.nan)
        parts = [Part(part.label, np.nan_to_num(part.size * scale)) for part in parts]
    total, unit = _total(parts), "%" if spec.share else quantity(spec.y[0]).unit
    whole = parts[-1].label == _DECODE
    before = total - parts[-1].size if whole else total
    zoomed = whole and before.max() < _SMALL * total.max()
    figure = new_figure(width=9.6 if zoomed else 7.0, height=_REST + _BAR * len(names) * 1.3)
    grid = figure.subplots(1, 2 if zoomed else 1, sharey=True, squeeze=False)[0]
    handles = _stack(grid[-1], parts)
    ends = total
    if latency is not None and unit == "s" and np.allclose(total, latency.best, rtol=1e-6):
        _intervals(grid[-1], np.arange(len(names), dtype=np.float64), latency)
        ends = np.fmax(total, latency.high)
    for row, end in enumerate(ends):
        _write(grid[-1], row, end, _amount(seconds[row], quantity(spec.y[0]).unit))
    what = "mean latency" if whole else "mean time before decoding" if _before_decoding(spec) else "mean time"
    label = f"share of the {what} (%)" if unit == "%" else f"{what} ({unit})"
    _finish(grid[-1], spec, names, label=label if zoomed else spec.xlabel or label)
    if unit == "%":
        grid[-1].set_xlim(0, 125)
        grid[-1].set_xticks(range(0, 101, 20))
    if zoomed:
        _stack(grid[0], parts[:-1])
        for row, end in enumerate(before):
            _write(grid[0], row, end, _amount(end, unit))
        _finish(grid[0], spec, names, label=f"of it before decoding ({unit})")
        grid[1].tick_params(labelleft=False)
    set_title(figure, spec.title)
    add_legend(figure, handles)
    return figure


def _total(parts: Sequence[Part]) -> Floats:
    total: Floats = np.sum([part.size for part in parts], axis=0)
    return total


def _before_decoding(spec: PlotSpec) -> bool:
    return set(spec.y) <= set(TTFT_PARTS)


def _stack(axes: Axes, parts: Sequence[Part]) -> list[Legended]:
    """Draw the parts of all rows, one after the other."""
    left = np.zeros(len(parts[0].size))
    handles: list[Legended] = []
    for number, part in enumerate(parts):
        bars = axes.barh(
            np.arange(len(left)),
            part.size,
            left=left,
            height=0.72,
            color=colour_of(number),
            hatch=hatch_of(number),
            edgecolor="white",
            linewidth=0.5,
            label=part.label,
        )
        handles.append(bars)
        left = left + part.size
    return handles


def _row_names(spec: PlotSpec, frame: pd.DataFrame) -> list[str]:
    """Return what each bar is called: its series and x, with its unit where x is a number."""
    assert spec.x is not None
    shown = quantity(spec.x)
    names = texts_of(frame, spec.x, spec=spec)
    if shown.unit:
        values = [float(value) * shown.factor for value in frame[spec.x]]
        names = [f"{text} {shown.unit}" for text in different_texts(values)]
    every = series_of(spec, frame) if spec.series != spec.x else []
    label = {row: series.label for series in every for row in series.frame.index if series.label}
    return [f"{label[row]}, {name}" if row in label else name for row, name in zip(frame.index, names, strict=True)]


def _once_each(spec: PlotSpec, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            hint = "tell them apart with `series`, or choose one with `where`"
            raise problem(spec, "has several rows for one bar", value=name, hint=hint)


def _intervals(axes: Axes, rows: Floats, value: Values) -> None:
    if value.errors is not None:
        axes.errorbar(
            value.best, rows, xerr=value.errors, linestyle="none", color="black", linewidth=1.2, capsize=3, zorder=4
        )


def _write(axes: Axes, row: float, end: float, text: str) -> None:
    if end == end:
        axes.annotate(text, (end, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize="small")
    else:
        axes.annotate("none", (0, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize="small")


def _amount(size: float, unit: str) -> str:
    if unit != "s":
        return f"{digits(size)} {unit}"
    return f"{digits(size * 1e3)} ms" if size < 1 else f"{digits(size)} s"


def _finish(axes: Axes, spec: PlotSpec, names: Sequence[str], *, label: str) -> None:
    tidy(axes)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), list(names), fontsize="small", parse_math=False)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlabel(label)
    if spec.ylabel:
        axes.set_ylabel(spec.ylabel)
    axes.axvline(0, color=NEUTRAL, linewidth=0.8)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1e-12) / _BARS_SHARE)
