"""Bars: goodput by placement, and where latency goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import (
    Floats,
    different_texts,
    is_missing,
    key_of,
    keys_of,
    of_series,
    problem,
    published_of,
    rows_of,
    series_of,
    texts_of,
    values_of,
)
from experiments.plots.labels import quantity, short
from experiments.plots.spec import TTFT_PARTS, PlotSpec
from experiments.plots.style import (
    NEUTRAL,
    Legended,
    colour_of,
    finish,
    hatch_of,
    hollow,
    interval_text,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of one bar, and of everything above and below them.
_BAR, _REST = 0.3, 0.75
#: Share of the axis that bars take; the rest is for the numbers beside them.
_BARS_SHARE, _ZOOMED_SHARE = 0.7, 0.58
#: End-to-end latency less the other parts.
_DECODE = "decode"
_E2E = "e2e_s.mean"
_DECODE_SHARE = "parts_share.decode"
#: Difference of the latency and the sum of its parts that is taken for none.
_NEARLY = 0.02
#: Parts before decoding that are less than this share of the whole are shown again, larger.
_SMALL = 0.35


def goodput_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of the goodput of each placement (or other value of x) as bars with intervals and numbers."""
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=(spec.x,))
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
        _intervals(
            axes, Part("", value.best[known], None if value.errors is None else value.errors[:, known]), rows[known]
        )
        for row, best, low, high in zip(rows, value.best, value.low, value.high, strict=True):
            _write(axes, row, high, interval_text(best, low, high))
        handles += _published(
            axes, spec, of_series(spec, points, series), rows=categories, offset=offset, number=series.number
        )
    _finish(axes, spec, list(names.values()), label=spec.xlabel or shown.axis)
    finish(figure, spec.title, handles)
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
    # Of another colour than the bars, on which they may lie.
    return hollow(axes, [value for _, value in found], [row for row, _ in found], number=number, colour="black")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of the stack.

    Args:
        label: in the legend.
        size: of each bar, in the unit of the axis; 0 where it does not have the part.
        errors: from the size to its limits, below and above, shape (2, n); None where no interval is known.
    """

    label: str
    size: Floats
    errors: Floats | None = None


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
    parts = []
    for column in spec.y:
        values = values_of(frame, column, spec=spec) * quantity(column).factor
        nothing = np.zeros((2, len(frame))) if np.isnan(values.best).all() else None
        parts.append(Part(short(column), np.nan_to_num(values.best), values.errors if nothing is None else nothing))
    if _E2E in frame.columns and _before_decoding(spec):
        before, latency = joined(parts), values_of(frame, _E2E, spec=spec)
        rest = np.clip(np.nan_to_num(latency.best - before.size), 0, None)
        known = None if latency.errors is None or before.errors is None else latency.errors + before.errors[::-1]
        parts.append(Part(_DECODE, rest, known))
    return parts


def joined(parts: Sequence[Part]) -> Part:
    """Return parts as one. Its interval is theirs together, which that of a sum never exceeds."""
    known = [part.errors for part in parts if part.errors is not None]
    errors = np.sum(known, axis=0) if known and len(known) == len(parts) else None
    return Part("", np.sum([part.size for part in parts], axis=0), errors)


def share_of(first: Part, rest: Part) -> Part:
    """Return the first of two parts as a share of both, per cent.

    Its interval is that of both together, to the first order: too much of the first and too little of the rest both
    add to the share. That of a share which was measured is narrower.
    """
    whole = np.where(first.size + rest.size > 0, first.size + rest.size, np.nan)
    size = np.nan_to_num(100 * first.size / whole)
    if first.errors is None or rest.errors is None:
        return Part(first.label, size)
    errors = 100 * (rest.size * first.errors + first.size * rest.errors[::-1]) / whole**2
    return Part(first.label, size, np.nan_to_num(errors))


def whole_of(spec: PlotSpec, frame: pd.DataFrame, parts: Sequence[Part]) -> Part:
    """Return all parts as one, with the interval of the mean end-to-end latency where they (nearly) add up to it.

    Requests that lack a part are not in its mean, so that the sum of the means is a little more.
    """
    whole = joined(parts)
    if quantity(spec.y[0]).unit == "s" and _E2E in frame.columns:
        latency = values_of(frame, _E2E, spec=spec)
        if latency.errors is not None and np.allclose(whole.size, latency.best, rtol=_NEARLY):
            return Part("", whole.size, latency.errors)
    return whole


def breakdown_figure(spec: PlotSpec, summary: pd.DataFrame) -> Figure:
    """Return a figure of stacked parts, one bar for each row, in seconds or as shares of the whole.

    Where decoding dwarfs the other parts, a panel of its own shows these. The end of a bar has its interval; among
    shares, which always end at 100 %, the end of what comes before decoding.
    """
    frame = rows_of(spec, summary)
    names = _row_names(spec, frame)
    _once_each(spec, names)
    parts, unit = parts_of(spec, frame), quantity(spec.y[0]).unit
    whole, decodes = whole_of(spec, frame, parts), len(parts) > 1 and parts[-1].label == _DECODE
    before = joined(parts[:-1]) if decodes else whole
    amounts = _amounts(whole, unit)
    if spec.share:
        before = share_of(before, parts[-1]) if decodes else before
        if decodes and _DECODE_SHARE in frame.columns:
            decoding = values_of(frame, _DECODE_SHARE, spec=spec) * 100
            before = replace(before, errors=before.errors if decoding.errors is None else decoding.errors[::-1])
        parts = [Part(part.label, 100 * part.size / np.where(whole.size > 0, whole.size, np.inf)) for part in parts]
        unit = "%"
    if unit == "%":
        whole = Part("", joined(parts).size)
    zoomed = decodes and before.size.max() < _SMALL * whole.size.max()
    figure = new_figure(width=10.4 if zoomed else 7.0, height=_REST + _BAR * len(names) * 1.3)
    grid = figure.subplots(1, 2 if zoomed else 1, sharey=True, squeeze=False)[0]
    what = "mean latency" if decodes else "mean time before decoding" if _before_decoding(spec) else "mean time"
    label = f"share of the {what} (%)" if unit == "%" else f"{what} ({unit})"
    handles = _stack(grid[-1], parts)
    _ends(grid[-1], whole, amounts)
    if unit == "%" and decodes and not zoomed:
        _intervals(grid[-1], before)
    _finish(grid[-1], spec, names, label=label if zoomed else spec.xlabel or label)
    if zoomed:
        _stack(grid[0], parts[:-1])
        _ends(grid[0], before, _amounts(before, unit))
        _finish(grid[0], spec, names, label=f"of it before decoding ({unit})")
        grid[1].tick_params(labelleft=False)
        for axes in grid:
            axes.set_xlim(right=axes.get_xlim()[1] * _BARS_SHARE / _ZOOMED_SHARE)
    if unit == "%":
        grid[-1].set_xticks(range(0, 101, 20))
    finish(figure, spec.title, handles)
    return figure


def _before_decoding(spec: PlotSpec) -> bool:
    return set(spec.y) <= set(TTFT_PARTS)


def _stack(axes: Axes, parts: Sequence[Part]) -> list[Legended]:
    """Draw the parts of all rows, one after the other."""
    left = np.zeros(len(parts[0].size))
    handles: list[Legended] = []
    for number, part in enumerate(parts):
        if not part.size.any():
            continue
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
        values = [None if is_missing(value) else float(value) * shown.factor for value in frame[spec.x]]
        texts = zip(values, different_texts(values), strict=True)
        names = [text if value is None else f"{text} {shown.unit}" for value, text in texts]
    every = series_of(spec, frame) if spec.series != spec.x else []
    label = {row: series.label for series in every for row in series.frame.index if series.label}
    return [f"{label[row]}, {name}" if row in label else name for row, name in zip(frame.index, names, strict=True)]


def _once_each(spec: PlotSpec, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            hint = "tell them apart with `series`, or choose one with `where`"
            raise problem(spec, "has several rows for one bar", value=name, hint=hint)


def _intervals(axes: Axes, part: Part, rows: Floats | None = None) -> None:
    if part.errors is not None:
        rows = np.arange(len(part.size), dtype=np.float64) if rows is None else rows
        axes.errorbar(
            part.size, rows, xerr=part.errors, linestyle="none", color="black", linewidth=1.2, capsize=3, zorder=4
        )


def _ends(axes: Axes, part: Part, amounts: Sequence[str]) -> None:
    """Draw the interval at the end of each bar and write beside it what it is."""
    _intervals(axes, part)
    ends = part.size if part.errors is None else part.size + part.errors[1]
    for row, (end, amount) in enumerate(zip(ends, amounts, strict=True)):
        _write(axes, row, end, amount)


def _write(axes: Axes, row: float, end: float, text: str) -> None:
    place, shown = (end, text) if end == end else (0.0, "none")
    axes.annotate(shown, (place, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize="small")


def _amounts(part: Part, unit: str) -> list[str]:
    """Return sizes with their intervals, seconds below one in milliseconds."""
    errors = np.zeros((2, len(part.size))) if part.errors is None else part.errors
    texts = []
    for size, below, above in zip(part.size, *errors, strict=True):
        factor, name = (1e3, "ms") if unit == "s" and size < 1 else (1.0, unit)
        texts.append(f"{interval_text(*(factor * value for value in (size, size - below, size + above)))} {name}")
    return texts


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
