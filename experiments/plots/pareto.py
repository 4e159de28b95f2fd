"""Throughput per GPU against the speed that each user sees, with the front."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from experiments.plots.data import (
    Floats,
    Values,
    of_series,
    published_of,
    rows_of,
    series_of,
    texts_of,
    values_of,
)
from experiments.plots.labels import Quantity, brief, quantity
from experiments.plots.spec import PlotSpec
from experiments.plots.style import (
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

_GPUS = "num_gpus"
#: End of the axis over the fastest number, where an interval is open.
_BESIDE = 1.1


def on_front(x: Floats, y: Floats) -> NDArray[np.bool_]:
    """Return which points no other beats in both: none has at least its x and its y and more of one of them.

    >>> on_front(np.array([1.0, 2.0, 3.0, 2.0]), np.array([9.0, 5.0, 5.0, 7.0])).tolist()
    [True, False, True, True]
    """
    beaten = (x[None, :] >= x[:, None]) & (y[None, :] >= y[:, None])
    beaten &= (x[None, :] > x[:, None]) | (y[None, :] > y[:, None])
    front: NDArray[np.bool_] = ~beaten.any(axis=1) & ~np.isnan(x) & ~np.isnan(y)
    return front


def pareto_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of `y` against tokens/s of a user (1 / TPOT where x is a TPOT); points off the front are pale."""
    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=(spec.x, *_divisor(spec)))
    x, y = user_speed(spec, frame), per_gpu(spec, frame)
    end = _end(x)
    if end is not None:
        x = x.clipped(-np.inf, 2 * end)  # beyond the axes
    front = on_front(x.best, y.best)
    figure = new_figure(height=3.8)
    axes = figure.subplots()
    tidy(axes)
    order = np.flatnonzero(front)[np.argsort(x.best[front], kind="stable")]
    (line,) = axes.plot(
        x.best[order], y.best[order], color=NEUTRAL, linestyle="--", linewidth=1.2, label="Pareto front", zorder=2
    )
    handles: list[Legended] = []
    member = np.arange(len(frame))
    for series in series_of(spec, frame.assign(_row=member)):
        rows = series.frame["_row"].to_numpy()
        handles += _points(axes, x.take(rows), y.take(rows), front[rows], number=series.number, label=series.label)
        own = of_series(spec, points, series)
        handles += _published(axes, spec, own, number=series.number)
    handles.append(line)
    handles += _named(axes, spec, frame, x, y, order)
    axes.set_xlim(left=0, right=end)
    axes.set_ylim(bottom=0)
    plain_ticks(axes)
    axes.set_xlabel(spec.xlabel or user_axis(spec).axis)
    axes.set_ylabel(spec.ylabel or per_gpu_axis(spec).axis)
    finish(figure, spec.title, handles)
    return figure


def user_speed(spec: PlotSpec, frame: pd.DataFrame) -> Values:
    """Return tokens/s of a user: 1 / TPOT where x is one, x itself otherwise."""
    assert spec.x is not None
    values = values_of(frame, spec.x, spec=spec)
    return values.inverse() if _is_tpot(spec.x) else values * quantity(spec.x).factor


def _end(x: Values) -> float | None:
    """Return where the axis ends if an interval does not."""
    ends = np.concatenate([x.best, x.high])
    return _BESIDE * float(ends[np.isfinite(ends)].max()) if np.isinf(ends).any() else None


def user_axis(spec: PlotSpec) -> Quantity:
    """Return what the axis shows."""
    assert spec.x is not None
    if not _is_tpot(spec.x):
        return quantity(spec.x)
    return Quantity(f"speed of one user, 1 / {quantity(spec.x).label}", "tokens/s")


def per_gpu(spec: PlotSpec, frame: pd.DataFrame) -> Values:
    """Return `y` for each GPU: what is of all GPUs together is divided by their number."""
    values = values_of(frame, spec.y[0], spec=spec) * quantity(spec.y[0]).factor
    if not _divisor(spec):
        return values
    gpus = values_of(frame, _GPUS, spec=spec).best
    return Values(values.best / gpus, values.low / gpus, values.high / gpus, values.has_interval)


def per_gpu_axis(spec: PlotSpec) -> Quantity:
    """Return what the axis shows."""
    shown = quantity(spec.y[0])
    return Quantity(shown.label, f"{shown.unit} per GPU", shown.factor) if _divisor(spec) else shown


def _divisor(spec: PlotSpec) -> tuple[str, ...]:
    """Return the column that `y` is divided by, if any."""
    column = spec.y[0].removesuffix(".mean").removesuffix(".best")
    return (_GPUS,) if column.endswith("_per_s") and "per_gpu" not in column else ()


def _is_tpot(column: str) -> bool:
    return column.split(".", maxsplit=1)[0] == "tpot_s"


def _points(axes: Axes, x: Values, y: Values, front: NDArray[np.bool_], *, number: int, label: str) -> list[Legended]:
    colour, marker = colour_of(number), marker_of(number)
    for chosen, alpha in ((~front, 0.35), (front, 1.0)):
        rows = np.flatnonzero(chosen)
        if len(rows):
            xs, ys = x.take(rows), y.take(rows)
            axes.errorbar(
                xs.best, ys.best, xerr=xs.errors, yerr=ys.errors, linestyle="none", color=colour, marker=marker,
                markersize=6, capsize=2, elinewidth=1, alpha=alpha, label="_points", zorder=3,
            )  # fmt: skip
    if not label:
        return []
    from matplotlib.lines import Line2D

    return [Line2D([], [], linestyle="none", color=colour, marker=marker, markersize=6, label=label)]


def _published(axes: Axes, spec: PlotSpec, own: pd.DataFrame | None, *, number: int) -> list[Legended]:
    if own is None or not {spec.x, spec.y[0], *_divisor(spec)} <= set(own.columns):
        return []
    return hollow(axes, user_speed(spec, own).best, per_gpu(spec, own).best, number=number)


def _named(
    axes: Axes, spec: PlotSpec, frame: pd.DataFrame, x: Values, y: Values, order: NDArray[np.intp]
) -> list[Legended]:
    """Number the points of the front, and name them in the legend."""
    if spec.labels is None:
        return []
    from matplotlib.lines import Line2D

    names = texts_of(frame, spec.labels, spec=spec)
    if all(isinstance(value, int | float | np.number) for value in frame[spec.labels]):
        names = [f"{brief(spec.labels)} {name}" for name in names]
    if spec.series not in {None, spec.labels}:
        names = [
            f"{label}, {name}" for label, name in zip(texts_of(frame, str(spec.series), spec=spec), names, strict=True)
        ]
    handles: list[Legended] = []
    for place, row in enumerate(order, start=1):
        axes.annotate(
            str(place), (x.best[row], y.best[row]), xytext=(6, 6), textcoords="offset points", fontsize="small"
        )
        handles.append(Line2D([], [], linestyle="none", label=f"{place}  {names[row]}"))
    return handles
