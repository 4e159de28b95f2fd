"""Figures of a sweep's lines and points for plotly.js, from the numbers that its plots show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import Floats, Values, rows_of, series_of, texts_of
from experiments.plots.labels import brief, quantity
from experiments.plots.lines import ShownLine, ShownPanel, log_ends, shown_panels
from experiments.plots.pareto import on_front, per_gpu, per_gpu_axis, user_axis, user_speed
from experiments.plots.spec import Kind, PlotSpec
from experiments.plots.staircase import Copy, copies, copies_of, ending, stairs
from experiments.plots.style import digits
from experiments.report.figures import Line, LineFigure, Spread
from experiments.report.markup import Html, table

if TYPE_CHECKING:
    import pandas as pd

_LINES = (Kind.ATTAINMENT_RATE, Kind.ATTAINMENT_SCALE, Kind.RATIO, Kind.BANDWIDTH, Kind.LINE)


def interactive(
    spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None, *, summary_text: str
) -> list[LineFigure]:
    """Return the panels of a figure of lines or points; none for one of bars, cells or distributions.

    Args:
        summary_text: what a reader who cannot see it is told.
    """
    if spec.kind in _LINES:
        panels = shown_panels(spec, summary, published)
        return [_panel(spec, panel, number, summary_text) for number, panel in enumerate(panels)]
    if spec.kind is Kind.PARETO:
        return [_pareto(spec, summary, summary_text)]
    if spec.kind is Kind.STAIRCASE:
        return [_staircase(spec, summary, summary_text)]
    return []


def numbers(panels: list[LineFigure]) -> Html | None:
    """Return what the points say, as a table; None without any."""
    if not panels:
        return None
    rows = [
        [line.name or panel.y_label, *texts, *[""] * (2 - len(texts))]
        for panel in panels
        for line in panel.lines
        for texts in line.told
    ]
    return table("Every point of the figure", ["Line", "Place", "Value"], rows, texts=(1, 2))


def _panel(spec: PlotSpec, panel: ShownPanel, number: int, text: str) -> LineFigure:
    ticks = dict(panel.ticks)
    lines = [found for line in panel.lines for found in _lines(panel, line, ticks)]
    share = panel.unit == "%"
    ends = log_ends([line.values for line in panel.lines if len(line.places)]) if spec.log_y else None
    attainment = spec.kind in {Kind.ATTAINMENT_RATE, Kind.ATTAINMENT_SCALE} and share
    return LineFigure(
        identity=f"{spec.file}-{number + 1}",
        caption=spec.title,
        summary=f"{text}. {_ends(panel)}",
        x_label=panel.x_axis,
        y_label=panel.y_axis,
        lines=tuple(lines),
        y_range=ends if spec.log_y else (-2.0, 104.0) if share else None,
        target=100 * spec.target if attainment else None,
        target_name=f"target {100 * spec.target:g} %",
        from_zero=False,
        x_log=spec.log_x,
        y_log=spec.log_y and ends is not None,
        ticks=tuple(panel.ticks),
        marks=tuple((mark.x * quantity(spec.x or "").factor, mark.label) for mark in spec.marks),
    )


def _ends(panel: ShownPanel) -> str:
    """Return where each line begins and ends."""
    texts = []
    for line in panel.lines:
        if len(line.places):
            first, last = (_said(line.values, i, panel.unit) for i in (0, -1))
            place = dict(panel.ticks).get
            at = [place(x) or f"{x:g} {panel.x_unit}".strip() for x in (line.places[0], line.places[-1])]
            texts.append(f"{line.label or panel.y_axis}: {first} at {at[0]}, {last} at {at[1]}")
    return "; ".join(texts)


def _lines(panel: ShownPanel, line: ShownLine, ticks: dict[float, str]) -> list[Line]:
    """Return a line, and the published points beside it."""
    found = []
    places = [ticks.get(x) or f"{x:g} {panel.x_unit}".strip() for x in line.places]
    if len(line.places):
        band = None if line.goodput is None else (float(line.goodput.low[0]), float(line.goodput.high[0]))
        told = tuple((place, _said(line.values, i, panel.unit)) for i, place in enumerate(places))
        spreads = _spreads(line.values)
        found.append(Line(line.label, _floats(line.places), spreads, line.number, band, told=told))
    x, y = line.published
    known = ~np.isnan(x) & ~np.isnan(y)
    if known.any():
        x, y = x[known], y[known]
        told = tuple(
            (ticks.get(a) or f"{a:g} {panel.x_unit}".strip(), f"{digits(b)} {panel.unit}".strip())
            for a, b in zip(x, y, strict=True)
        )
        spreads = _spreads(Values(y, y, y, has_interval=False))
        name = f"{line.label}, published" if line.label else "published"
        found.append(Line(name, _floats(x), spreads, line.number, told=told, joined=False, hollow=True))
    return found


def _pareto(spec: PlotSpec, summary: pd.DataFrame, text: str) -> LineFigure:
    """Return throughput against speed; what no other point beats says so."""
    frame = rows_of(spec, summary)
    x, y = user_speed(spec, frame), per_gpu(spec, frame)
    finite = np.concatenate([x.best, x.high])
    x = x.clipped(-np.inf, 2 * float(finite[np.isfinite(finite)].max(initial=1.0)))
    front = on_front(x.best, y.best)
    names = [""] * len(frame)
    if spec.labels is not None:
        names = [f"{brief(spec.labels)} {name}" for name in texts_of(frame, spec.labels, spec=spec)]
    x_axis, y_axis = user_axis(spec), per_gpu_axis(spec)
    lines = []
    for series in series_of(spec, frame.assign(_row=np.arange(len(frame)))):
        rows = series.frame["_row"].to_numpy()
        rows = rows[~np.isnan(x.best[rows]) & ~np.isnan(y.best[rows])]
        told = tuple(
            (
                ", ".join(filter(None, [names[row], _said(x, row, x_axis.unit)])),
                _said(y, row, y_axis.unit) + (", on the front" if front[row] else ""),
            )
            for row in rows
        )
        xs, ys = x.take(rows), y.take(rows)
        label = series.label or y_axis.label
        lines.append(
            Line(label, _floats(xs.best), _spreads(ys), series.number, told=told, across=_spreads(xs), joined=False)
        )
    order = np.flatnonzero(front)[np.argsort(x.best[front], kind="stable")]
    ends = tuple((_said(x, row, x_axis.unit), _said(y, row, y_axis.unit)) for row in order)
    best = y.best[order]
    level = _spreads(Values(best, best, best, has_interval=False))
    lines.append(Line("Pareto front", _floats(x.best[order]), level, len(lines), told=ends))
    return LineFigure(
        identity=f"{spec.file}-1",
        caption=spec.title,
        summary=f"{text}. {int(front.sum())} of {len(frame)} points are on the front.",
        x_label=spec.xlabel or x_axis.axis,
        y_label=spec.ylabel or y_axis.axis,
        lines=tuple(line for line in lines if line.x),
        y_range=None,
    )


def _staircase(spec: PlotSpec, summary: pd.DataFrame, text: str) -> LineFigure:
    """Return GPUs against the rate; each step says its rates, its GPUs and what the goodput's interval leaves."""
    found = copies_of(spec, rows_of(spec, summary))
    end = ending(spec, found)
    lines = []
    for number, copy in enumerate(found):
        rates, gpus = stairs(copy.num_gpus, copy.goodput_per_s, end)
        steps = [_step(copy, start, stop) for start, stop in zip(rates[::2], rates[1::2], strict=True)]
        spreads = tuple(Spread(float(g), float(g), float(g)) for g in gpus)
        told = tuple(step for step in steps for _ in range(2))
        lines.append(Line(copy.label or "GPUs", _floats(rates), spreads, number, told=told))
    said = "; ".join(f"{copy.label or 'one copy'}: {digits(copy.goodput_per_s)} requests/s a copy" for copy in found)
    return LineFigure(
        identity=f"{spec.file}-1",
        caption=spec.title,
        summary=f"{text}. {said}",
        x_label=spec.xlabel or "required rate (requests/s)",
        y_label=spec.ylabel or "GPUs",
        lines=tuple(lines),
        y_range=None,
    )


def _step(copy: Copy, start: float, stop: float) -> tuple[str, str]:
    gpus = copy.gpus(stop)
    text = f"{gpus} GPUs"
    if copy.low_per_s < copy.high_per_s:
        fewest = copies(stop, copy.high_per_s) * copy.num_gpus
        most = "any number" if copy.is_open else f"{copies(stop, copy.low_per_s) * copy.num_gpus}"
        text += f" ({fewest} – {most})"
    if copy.price_usd_per_h is not None:
        text += f", {digits(gpus * copy.price_usd_per_h)} USD/h"
    return f"{digits(start)} – {digits(stop)} requests/s", text


def _said(values: Values, row: int, unit: str) -> str:
    """Return a value with its interval."""
    best, low, high = (float(part[row]) for part in (values.best, values.low, values.high))
    interval = f" ({digits(low)} – {digits(high)})" if low < high else ""
    return f"{digits(best)}{interval} {unit}".strip()


def _spreads(values: Values) -> tuple[Spread, ...]:
    return tuple(
        Spread(min(float(low), float(best)), float(best), max(float(best), float(high)))
        for low, best, high in zip(values.low, values.best, values.high, strict=True)
    )


def _floats(values: Floats) -> tuple[float, ...]:
    return tuple(map(float, values))
