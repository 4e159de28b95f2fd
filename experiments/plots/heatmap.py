"""A value over two factors, printed in each cell."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import (
    Floats,
    column_of,
    different_texts,
    is_missing,
    problem,
    published_of,
    rows_of,
    text_of,
    texts_of,
    values_of,
)
from experiments.plots.labels import quantity
from experiments.plots.spec import PlotSpec
from experiments.plots.style import Legended, digits, finish, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


#: Inches of a letter in a cell, roughly.
_LETTER = 0.075


def heatmap_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of `value` over `x` and `y`; a letter says what is `best` in a cell, the legend what it means.

    Below a value stands its interval, where it has one, and then the published value in brackets. A cell without a
    number is empty.
    """
    from matplotlib import colormaps

    frame = _with_place(spec, rows_of(spec, summary))
    points = published_of(spec, published, frame, shown=(spec.x, spec.y[0]))
    assert spec.x is not None
    assert spec.value is not None
    columns, rows = _order(frame, spec.x), _order(frame, spec.y[0])
    cells = _cells(spec, frame, spec.value, columns, rows)
    letters = _letters(spec, frame)
    names = {} if spec.best is None else _named(spec, frame, columns, rows)
    outside = None if points is None or not {spec.x, spec.y[0], spec.value} <= set(points.columns) else points
    theirs = None if outside is None else _cells(spec, outside, spec.value, columns, rows)
    texts = {
        place: _text(cells, theirs, place, letters.get(names.get(place, ""), "")) for place in np.ndindex(cells.shape)
    }
    lines = [line for text in texts.values() for line in text.splitlines()]
    width = max(0.85, _LETTER * max(map(len, lines), default=0) + 0.2)
    height = 0.35 + 0.2 * max(text.count("\n") + 1 for text in texts.values())
    figure = new_figure(width=max(5.0, 1.6 + width * len(columns)), height=1.2 + height * len(rows))
    axes = figure.subplots()
    map_of = colormaps["cividis"]
    mesh = axes.pcolormesh(np.ma.masked_invalid(cells.best), cmap=map_of, edgecolors="white", linewidth=1.5)
    figure.colorbar(mesh, ax=axes, label=quantity(spec.value).axis, pad=0.02)
    for (i, j), text in texts.items():
        if not text:
            continue
        bright = sum(map_of(mesh.norm(cells.best[i, j]))[:3]) > 1.5
        colour = "black" if bright else "white"
        axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize="small", color=colour)
    axes.set_xticks(np.arange(len(columns)) + 0.5, _shown(spec.x, columns), parse_math=False)
    axes.set_yticks(np.arange(len(rows)) + 0.5, _shown(spec.y[0], rows), parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(spec.xlabel or quantity(spec.x).axis)
    axes.set_ylabel(spec.ylabel or quantity(spec.y[0]).axis)
    finish(figure, spec.title, [*_legend(letters), *_meaning(cells, theirs)])
    return figure


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Values of the cells in the unit of the axis with their limits, shape (rows, columns); NaN where there is none."""

    best: Floats
    low: Floats
    high: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.best.shape

    def interval(self, place: tuple[int, ...]) -> str:
        """Return the limits of a cell; empty where there are none."""
        low, high = self.low[place], self.high[place]
        return f"{digits(low)} – {digits(high)}" if low < high else ""


def _text(cells: _Cells, theirs: _Cells | None, place: tuple[int, ...], letter: str) -> str:
    """Return what stands in a cell."""
    if np.isnan(cells.best[place]):
        return ""
    lines = [f"{digits(cells.best[place])} {letter}".rstrip(), cells.interval(place)]
    if theirs is not None and not np.isnan(theirs.best[place]):
        lines.append(f"({digits(theirs.best[place])})")
    return "\n".join(filter(None, lines))


def _with_place(spec: PlotSpec, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have a place: an x and a y.

    Raises:
        InputError: there are none.
    """
    assert spec.x is not None
    places = zip(*(column_of(frame, name, spec=spec) for name in (spec.x, spec.y[0])), strict=True)
    kept = frame[[not any(map(is_missing, place)) for place in places]]
    if not len(kept):
        raise problem(spec, f"has no rows with both {spec.x} and {spec.y[0]}", hint="relax `where`, or name others")
    return kept


def _order(frame: pd.DataFrame, column: str) -> list[object]:
    """Return the values of a factor, numbers rising, texts as they come."""
    values = list(dict.fromkeys(frame[column].to_list()))
    numbers = all(isinstance(value, int | float | np.number) for value in values)
    return sorted(values) if numbers else values


def _cells(spec: PlotSpec, frame: pd.DataFrame, value: str, columns: list[object], rows: list[object]) -> _Cells:
    """Return the values of the cells.

    Raises:
        InputError: two rows belong to one cell.
    """
    assert spec.x is not None
    best, low, high = (np.full((len(rows), len(columns)), np.nan) for _ in range(3))
    filled = set()
    numbers = values_of(frame, value, spec=spec) * quantity(value).factor
    for row, (x, y) in enumerate(zip(frame[spec.x], frame[spec.y[0]], strict=True)):
        if x not in columns or y not in rows:
            continue
        place = (rows.index(y), columns.index(x))
        if place in filled:
            where = f"{spec.x}={text_of(x)}, {spec.y[0]}={text_of(y)}"
            raise problem(spec, "has several rows for one cell", value=where, hint="choose one with `where`")
        filled.add(place)
        best[place], low[place], high[place] = numbers.best[row], numbers.low[row], numbers.high[row]
    return _Cells(best, low, high)


def _letters(spec: PlotSpec, frame: pd.DataFrame) -> dict[str, str]:
    """Return a letter for each value of `best`; numbers after Z."""
    if spec.best is None:
        return {}
    names = dict.fromkeys(texts_of(frame, spec.best, spec=spec))
    alphabet = string.ascii_uppercase
    return {name: alphabet[i] if i < len(alphabet) else str(i + 1) for i, name in enumerate(names)}


def _named(
    spec: PlotSpec, frame: pd.DataFrame, columns: list[object], rows: list[object]
) -> dict[tuple[int, int], str]:
    assert spec.x is not None
    assert spec.best is not None
    names = texts_of(frame, spec.best, spec=spec)
    return {
        (rows.index(y), columns.index(x)): name
        for x, y, name in zip(frame[spec.x], frame[spec.y[0]], names, strict=True)
    }


def _legend(letters: dict[str, str]) -> list[Legended]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], linestyle="none", label=f"{letter}  {name}") for name, letter in letters.items()]


def _meaning(cells: _Cells, theirs: _Cells | None) -> list[Legended]:
    """Return what the legend says of the lines in the cells."""
    from matplotlib.lines import Line2D

    texts = ["below a value  95 % interval"] if (cells.low < cells.high).any() else []
    texts += ["(in brackets)  published"] if theirs is not None and not np.isnan(theirs.best).all() else []
    return [Line2D([], [], linestyle="none", label=text) for text in texts]


def _shown(column: str, values: Sequence[object]) -> list[str]:
    """Return the values of a factor as at the axis, numbers in its unit."""
    factor = quantity(column).factor
    shown = [float(value) * factor if isinstance(value, int | float | np.number) else value for value in values]
    return different_texts(shown)
