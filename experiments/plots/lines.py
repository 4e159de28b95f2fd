"""Lines with intervals: attainment, sweeps of one factor, prefill : decode ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from dsim.errors import InputError
from experiments.plots.data import (
    Floats,
    Series,
    Values,
    column_of,
    is_missing,
    of_series,
    problem,
    published_of,
    rows_of,
    series_of,
    texts_of,
    values_of,
)
from experiments.plots.labels import Quantity, quantity, short
from experiments.plots.spec import Kind, PlotSpec
from experiments.plots.style import (
    HOLLOW,
    LINES,
    NEUTRAL,
    STYLES,
    Legended,
    colour_of,
    digits,
    finish,
    hollow,
    interval_text,
    marker_of,
    new_figure,
    plain_ticks,
    tidy,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure

#: Points between lines that are moved aside: of two, and of all together at most.
_ASIDE, _ASIDE_IN_ALL = 3.0, 9.0
#: Factor that intervals go beyond the values on a logarithmic axis at most; share of the axis beside them.
_BEYOND, _MARGIN = 3.0, 0.05
_ATTAINMENT = (Kind.ATTAINMENT_RATE, Kind.ATTAINMENT_SCALE)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Columns of one unit, which share axes."""

    unit: str
    columns: tuple[str, ...]


def lines_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of each column of `y` against `x`, a line for each series, with interval bars."""
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=(spec.x,))
    axis = _ratio_axis(spec, frame) if spec.kind is Kind.RATIO else _number_axis(spec)
    panels = _panels(spec)
    figure = new_figure(height=3.6 if len(panels) == 1 else 1.0 + 2.3 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    handles: list[Legended] = []
    for axes, panel in zip(grid, panels, strict=True):
        handles += _draw_panel(axes, spec, panel, frame=frame, published=points, axis=axis)
    grid[-1].set_xlabel(spec.xlabel or axis.quantity.axis)
    axis.finish(grid[-1])
    finish(figure, spec.title, handles)
    return figure


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where rows stand along the axis.

    Args:
        places: of each category, where the column has no numbers.
        ticks: position to label, for categories.
    """

    column: str
    quantity: Quantity
    places: Mapping[str, float] | None = None
    ticks: Sequence[tuple[float, str]] = ()

    def of(self, frame: pd.DataFrame, spec: PlotSpec) -> Floats:
        """Return the position of each row."""
        if self.places is None:
            return values_of(frame, self.column, spec=spec).best * self.quantity.factor
        return np.array([self.places.get(text, np.nan) for text in texts_of(frame, self.column, spec=spec)])

    def finish(self, axes: Axes) -> None:
        """Label the ticks of categories."""
        if self.ticks:
            axes.set_xticks([place for place, _ in self.ticks], [label for _, label in self.ticks])


def _number_axis(spec: PlotSpec) -> _Axis:
    assert spec.x is not None
    return _Axis(spec.x, quantity(spec.x))


def ratio_of(placement: str) -> tuple[int, int]:
    """Return prefill and decode instances of a placement.

    >>> ratio_of("2xP:tp1pp1 + 3xD:tp1pp1")
    (2, 3)

    Raises:
        InputError: it is no placement.
        ValueError: it is colocated.
    """
    from dsim.pools import Placement, Role

    count = {pool.role: pool.count for pool in Placement.parse(placement).pools}
    if Role.PREFILL not in count or Role.DECODE not in count:
        raise ValueError(f"{placement} has no prefill : decode ratio")
    return count[Role.PREFILL], count[Role.DECODE]


def _ratio_axis(spec: PlotSpec, frame: pd.DataFrame) -> _Axis:
    """Return the ratios, from decode-heavy to prefill-heavy, evenly spaced."""
    assert spec.x is not None
    pairs = {}
    for value, text in zip(column_of(frame, spec.x, spec=spec), texts_of(frame, spec.x, spec=spec), strict=True):
        if is_missing(value):  # of a search that found none
            continue
        try:
            pairs[text] = ratio_of(text)
        except (InputError, ValueError):
            hint = "show placements such as 2xP:tp1pp1 + 3xD:tp1pp1; leave others out with `where`"
            raise problem(spec, "has no prefill : decode ratio", value=text, hint=hint) from None
    if not pairs:
        raise problem(spec, "has no placement, whose ratio is shown", hint="none of the rows shown has one")
    order = sorted(set(pairs.values()), key=lambda pair: (Fraction(*pair), sum(pair)))
    places = {text: float(order.index(pair)) for text, pair in pairs.items()}
    ticks = [(float(i), f"{p}:{d}") for i, (p, d) in enumerate(order)]
    return _Axis(spec.x, Quantity("prefill : decode instances"), places, ticks)


def _panels(spec: PlotSpec) -> list[_Panel]:
    by_unit: dict[str, list[str]] = {}
    for column in spec.y:
        by_unit.setdefault(quantity(column).unit, []).append(column)
    return [_Panel(unit, tuple(columns)) for unit, columns in by_unit.items()]


def _draw_panel(
    axes: Axes,
    spec: PlotSpec,
    panel: _Panel,
    *,
    frame: pd.DataFrame,
    published: pd.DataFrame | None,
    axis: _Axis,
) -> list[Legended]:
    tidy(axes)
    if spec.log_x:
        axes.set_xscale("log")
    if spec.log_y:
        axes.set_yscale("log")
    handles: list[Legended] = []
    every = series_of(spec, frame)
    drawn = [line for series in every for line in _lines(axes, spec, panel, series, axis=axis)]
    if drawn:
        _move_apart(axes, drawn)
    handles += [line.handle for line in drawn]
    handles += _styles(panel) if every[0].label else []
    handles += _lm(axes, spec, every)
    with_line = {line.series.number for line in drawn}
    for series in every:
        alone = None if series.number in with_line or not series.label else f"{series.label}, published alone"
        handles += _published(axes, spec, series, panel.columns[0], published=published, axis=axis, alone=alone)
    handles += _targets(axes, spec, panel)
    for mark in spec.marks:
        at = mark.x * axis.quantity.factor
        handles.append(axes.axvline(at, color=NEUTRAL, linestyle=":", linewidth=1.2, label=mark.label))
    first = quantity(panel.columns[0])
    label = first.label if len(panel.columns) == 1 else _common(panel.columns)
    axes.set_ylabel((spec.ylabel if len(_panels(spec)) == 1 else None) or Quantity(label, first.unit).axis)
    if panel.unit == "%" and not spec.log_y:
        axes.set_ylim(-2, 104)
    elif not spec.log_y:
        axes.set_ylim(bottom=0)
    elif ends := log_ends([*(line.values for line in drawn), *_hollow_values(axes)]):
        axes.set_ylim(ends)
    plain_ticks(axes, x=axis.places is None)
    if axis.places is None and not spec.log_x and _is_whole(axis.of(frame, spec)):
        axes.locator_params(axis="x", integer=True)
    return handles


def _lines(axes: Axes, spec: PlotSpec, panel: _Panel, series: Series, *, axis: _Axis) -> list[_Drawn]:
    """Draw the columns of one series: a line style for each, or a colour where nothing else is told apart.

    What has no point is not drawn.
    """
    drawn: list[_Drawn] = []
    for style, column in enumerate(panel.columns):
        x, y = curve(spec, series.frame, column, axis_values=axis.of(series.frame, spec))
        if not len(x):
            continue
        number = series.number if series.label else style
        colour = colour_of(number)
        # The axis says what a single line is.
        alone = not series.label and len(panel.columns) == 1
        label = ("" if drawn else series.label) if series.label or alone else short(column)
        meets = style == 0 and spec.kind in _ATTAINMENT
        if meets:
            label = f"{label or short(column)}{_meeting_text(spec, series, x, y)}"
        bars = axes.errorbar(
            x,
            y.best,
            yerr=y.errors,
            color=colour,
            marker=marker_of(number),
            markersize=5,
            linestyle=LINES[(style + series.number // len(STYLES)) % len(LINES)],
            linewidth=1.5,
            capsize=3,
            markerfacecolor=colour if style == 0 else "white",
            label=label,
            zorder=3,
        )
        drawn.append(_Drawn(series, bars, x, y))
        if meets:
            _draw_meeting(axes, spec, series, x, y, colour)
    return drawn


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """A line with its values."""

    series: Series
    handle: ErrorbarContainer
    places: Floats
    values: Values


def _move_apart(axes: Axes, drawn: Sequence[_Drawn]) -> None:
    """Move lines that share places by a point or two, so that the intervals of one do not lie on those of another."""
    from matplotlib.transforms import ScaledTranslation

    places = np.concatenate([np.unique(line.places) for line in drawn])
    if len(np.unique(places)) == len(places) or not any(line.values.has_interval for line in drawn):
        return
    step, middle = min(_ASIDE, _ASIDE_IN_ALL / len(drawn)), (len(drawn) - 1) / 2
    for number, line in enumerate(drawn):
        aside = ScaledTranslation((number - middle) * step / 72, 0, axes.figure.dpi_scale_trans)
        points, caps, intervals = line.handle.lines
        for artist in (points, *caps, *intervals):
            artist.set_transform(axes.transData + aside)


def _hollow_values(axes: Axes) -> list[Values]:
    """Return the published values of a panel."""
    shown = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines() if line.get_label() == HOLLOW]
    return [Values(y, y, y, has_interval=False) for y in shown]


def log_ends(values: Sequence[Values]) -> tuple[float, float] | None:
    """Return the ends of a logarithmic axis: intervals that go (next) to nothing leave it and do not stretch it.

    None where no value is positive.
    """
    if not values:
        return None
    best, low, high = (np.concatenate([getattr(v, name) for v in values]) for name in ("best", "low", "high"))
    positive = best > 0
    if not positive.any():
        return None
    start, end = best[positive].min(), best[positive].max()
    start = max(start / _BEYOND, min(start, low[positive].min()))
    end = min(end * _BEYOND, max(end, high[positive].max()))
    margin = (end / start) ** _MARGIN if end > start else _BEYOND
    return float(start / margin), float(end * margin)


def _is_whole(values: Floats) -> bool:
    known = values[~np.isnan(values)]
    return bool((known == np.round(known)).all())


def _styles(panel: _Panel) -> list[Legended]:
    """Return what the legend says about line styles."""
    from matplotlib.lines import Line2D

    if len(panel.columns) == 1:
        return []
    return [
        Line2D([], [], color=NEUTRAL, linestyle=LINES[style % len(LINES)], label=short(column))
        for style, column in enumerate(panel.columns)
    ]


def curve(spec: PlotSpec, frame: pd.DataFrame, column: str, *, axis_values: Floats) -> tuple[Floats, Values]:
    """Return positions, rising, and values in the unit of the axis; rows without a number are left out."""
    shown = quantity(column)
    y = values_of(frame, column, spec=spec) * shown.factor
    if shown.unit == "%":
        y = y.clipped(0, 100)
    order = np.argsort(axis_values, kind="stable")
    order = order[~np.isnan(axis_values[order]) & ~np.isnan(y.best[order])]
    twice = axis_values[order][1:][np.diff(axis_values[order]) == 0]
    if len(twice):
        hint = "tell them apart with `series`, or choose one with `where`"
        raise problem(spec, f"has several rows at {spec.x}={twice[0] / (quantity(spec.x or '').factor):g}", hint=hint)
    return axis_values[order], y.take(order)


def crossing(x: Floats, y: Floats, target: float, *, falling: bool) -> float | None:
    """Return where a curve meets a target, on the straight line between its points.

    Args:
        falling: the first point below it ends what meets the target; else the last point below it does.

    >>> crossing(np.array([1.0, 2.0]), np.array([95.0, 85.0]), 90.0, falling=True)
    1.5
    """
    below = y < target
    if not below.any() or below.all():
        return None
    i = int(np.argmax(below)) if falling else len(y) - 1 - int(np.argmax(below[::-1]))
    j = i - 1 if falling else i + 1
    if not 0 <= j < len(y):
        return None
    return float(x[i] + (x[j] - x[i]) * (target - y[i]) / (y[j] - y[i]))


def _meets(spec: PlotSpec, x: Floats, y: Values) -> float | None:
    return crossing(x, y.best, 100 * spec.target, falling=spec.kind is Kind.ATTAINMENT_RATE)


def _goodput(spec: PlotSpec, series: Series) -> Values | None:
    """Return the goodput of a series where its rows tell it, with its interval: one value."""
    if spec.kind is not Kind.ATTAINMENT_RATE or spec.x not in {"rate_per_gpu", "rate_per_gpu_per_s"}:
        return None
    if "goodput_per_gpu_per_s.best" not in series.frame.columns:
        return None
    found = values_of(series.frame, "goodput_per_gpu_per_s", spec=spec)
    same = len(found.best) > 0 and bool((found.best == found.best[0]).all())
    return found.take(np.array([0])) if same else None


def _meeting_text(spec: PlotSpec, series: Series, x: Floats, y: Values) -> str:
    goodput = _goodput(spec, series)
    if goodput is not None:
        return f": {interval_text(goodput.best[0], goodput.low[0], goodput.high[0])} {quantity(spec.x or '').unit}"
    at = _meets(spec, x, y)
    word = "up to" if spec.kind is Kind.ATTAINMENT_RATE else "from"
    return "" if at is None else f" (≥ {100 * spec.target:g} % {word} {digits(at)})"


def _draw_meeting(axes: Axes, spec: PlotSpec, series: Series, x: Floats, y: Values, colour: str) -> None:
    goodput = _goodput(spec, series)
    if goodput is not None:
        axes.axvspan(goodput.low[0], goodput.high[0], color=colour, alpha=0.15, linewidth=0)
        # Ends that can be told apart where bands lie on each other.
        axes.vlines([goodput.low[0], goodput.high[0]], -2, 104, color=colour, linewidth=0.8, alpha=0.7, zorder=1)
    at = _meets(spec, x, y) if goodput is None else float(goodput.best[0])
    if at is not None:
        axes.vlines(at, -2, 100 * spec.target, color=colour, linestyle=":", linewidth=1.2, zorder=2)


@dataclass(frozen=True, slots=True, eq=False)
class ShownLine:
    """The numbers of one line, in the units of the axes.

    Args:
        label: its series and, where a panel has several columns, the column; empty where nothing is told apart.
        number: by which it is styled.
        goodput: of its series, where the rows tell it: one value.
        published: places and values of the points beside it.
    """

    series: Series
    label: str
    number: int
    places: Floats
    values: Values
    goodput: Values | None
    published: tuple[Floats, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class ShownPanel:
    """The numbers of one pair of axes, with the texts on them.

    Args:
        ticks: position to label, for categories.
    """

    x_axis: str
    y_axis: str
    unit: str
    x_unit: str
    ticks: Sequence[tuple[float, str]]
    lines: Sequence[ShownLine]


def shown_panels(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> list[ShownPanel]:
    """Return what `lines_figure` shows, as numbers."""
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=(spec.x,))
    axis = _ratio_axis(spec, frame) if spec.kind is Kind.RATIO else _number_axis(spec)
    panels, found = _panels(spec), []
    for panel in panels:
        lines: list[ShownLine] = []
        for series in series_of(spec, frame):
            for style, column in enumerate(panel.columns):
                x, y = curve(spec, series.frame, column, axis_values=axis.of(series.frame, spec))
                beside = (np.empty(0), np.empty(0))
                if style == 0:
                    beside = _published_points(spec, series, column, published=points, axis=axis) or beside
                if len(x) or len(beside[0]):
                    names = [name for name in (series.label, short(column) if len(panel.columns) > 1 else "") if name]
                    number, goodput = series.number if series.label else style, _goodput(spec, series)
                    lines.append(ShownLine(series, ", ".join(names), number, x, y, goodput, beside))
        first = quantity(panel.columns[0])
        words = first.label if len(panel.columns) == 1 else _common(panel.columns)
        y_axis = (spec.ylabel if len(panels) == 1 else None) or Quantity(words, first.unit).axis
        x_axis = spec.xlabel or axis.quantity.axis
        found.append(ShownPanel(x_axis, y_axis, panel.unit, axis.quantity.unit, axis.ticks, lines))
    return found


def _published_points(
    spec: PlotSpec, series: Series, column: str, *, published: pd.DataFrame | None, axis: _Axis
) -> tuple[Floats, Floats] | None:
    """Return places and values of the points published for a series, NaN where unknown; None without any."""
    own = of_series(spec, published, series)
    if own is None or axis.column not in own.columns or column not in own.columns:
        return None
    return axis.of(own, spec), own[column].to_numpy(dtype=np.float64) * quantity(column).factor


def _published(
    axes: Axes,
    spec: PlotSpec,
    series: Series,
    column: str,
    *,
    published: pd.DataFrame | None,
    axis: _Axis,
    alone: str | None,
) -> list[Legended]:
    points = _published_points(spec, series, column, published=published, axis=axis)
    return [] if points is None else hollow(axes, *points, number=series.number, alone=alone)


def _lm(axes: Axes, spec: PlotSpec, every: Sequence[Series]) -> list[Legended]:
    """Draw the vertical lines that the rows name in a column: one for each series, or one where all agree."""
    if spec.mark is None:
        return []
    assert spec.x is not None
    drawn: list[Legended] = []
    by_series = []
    for series in every:
        found = values_of(series.frame, spec.mark, spec=spec).best
        by_series.append(sorted(set(found[~np.isnan(found)])))
    agree = all(places == by_series[0] for places in by_series)
    for series, places in zip(every, by_series, strict=True):
        for place in places if series.number == 0 or not agree else ():
            label = f"{short(spec.mark)} {place:g}"
            drawn.append(
                axes.axvline(
                    place * quantity(spec.x).factor,
                    color=NEUTRAL if agree else colour_of(series.number),
                    linestyle=LINES[2 + (0 if agree else series.number % 2)],
                    linewidth=1.2,
                    label=label if agree else f"{series.label} {label}",
                )
            )
    return drawn


def _targets(axes: Axes, spec: PlotSpec, panel: _Panel) -> list[Legended]:
    if spec.kind not in _ATTAINMENT or panel.unit != "%":
        return []
    target = 100 * spec.target
    return [axes.axhline(target, color=NEUTRAL, linestyle="--", linewidth=1, label=f"target {target:g} %", zorder=1)]


def _common(columns: Sequence[str]) -> str:
    """Return the words that columns of one unit share, or all of them."""
    if all(column.startswith("attainment") for column in columns):
        return "requests within limits"
    return " / ".join(dict.fromkeys(short(column) for column in columns))
