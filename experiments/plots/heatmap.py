"""A value over two factors, printed in each cell."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import Floats, different_texts, problem, published_of, rows_of, text_of, texts_of, values_of
from experiments.plots.labels import quantity
from experiments.plots.spec import PlotSpec
from experiments.plots.style import Legended, add_legend, digits, new_figure, set_title

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def heatmap_figure(spec: PlotSpec, summary: pd.DataFrame, published: pd.DataFrame | None) -> Figure:
    """Return a figure of `value` over `x` and `y`; a letter says what is `best` in a cell, the legend what it means.

    Published values stand below in brackets. A cell without a number is empty.
    """
    from matplotlib import colormaps

    frame = rows_of(spec, summary)
    points = published_of(spec, published, frame, shown=(spec.x, spec.y[0]))
    assert spec.x is not None
    assert spec.value is not None
    columns, rows = _order(frame, spec.x), _order(frame, spec.y[0])
    cells = _cells(spec, frame, spec.value, columns, rows)
    shown = quantity(spec.value)
    figure = new_figure(width=max(5.0, 1.6 + 0.85 * len(columns)), height=1.2 + 0.55 * len(rows))
    axes = figure.subplots()
    map_of = colormaps["cividis"]
    mesh = axes.pcolormesh(np.ma.masked_invalid(cells), cmap=map_of, edgecolors="white", linewidth=1.5)
    figure.colorbar(mesh, ax=axes, label=shown.axis, pad=0.02)
    letters = _letters(spec, frame)
    names = {} if spec.best is None else _named(spec, frame, columns, rows)
    outside = None if points is None or not {spec.x, spec.y[0], spec.value} <= set(points.columns) else points
    theirs = None if outside is None else _cells(spec, outside, spec.value, columns, rows)
    for i in range(len(rows)):
        for j in range(len(columns)):
            if cells[i, j] == cells[i, j]:
                text = f"{digits(cells[i, j])}"
                text += f" {letters[names[i, j]]}" if (i, j) in names else ""
                text += f"\n({digits(theirs[i, j])})" if theirs is not None and theirs[i, j] == theirs[i, j] else ""
                bright = sum(map_of(mesh.norm(cells[i, j]))[:3]) > 1.5
                axes.text(
                    j + 0.5, i + 0.5, text, ha="center", va="center", fontsize="small",
                    color="black" if bright else "white",
                )  # fmt: skip
    axes.set_xticks(np.arange(len(columns)) + 0.5, _shown(spec.x, columns))
    axes.set_yticks(np.arange(len(rows)) + 0.5, _shown(spec.y[0], rows))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(spec.xlabel or quantity(spec.x).axis)
    axes.set_ylabel(spec.ylabel or quantity(spec.y[0]).axis)
    set_title(figure, spec.title)
    add_legend(figure, [*_legend(letters), *_brackets(theirs)])
    return figure


def _order(frame: pd.DataFrame, column: str) -> list[object]:
    """Return the values of a factor, numbers rising, texts as they come."""
    values = list(dict.fromkeys(frame[column].to_list()))
    numbers = all(isinstance(value, int | float | np.number) for value in values)
    return sorted(values) if numbers else values


def _cells(spec: PlotSpec, frame: pd.DataFrame, value: str, columns: list[object], rows: list[object]) -> Floats:
    """Return the value of each cell in the unit of the axis, shape (rows, columns); NaN where there is none.

    Raises:
        InputError: two rows belong to one cell.
    """
    assert spec.x is not None
    cells = np.full((len(rows), len(columns)), np.nan)
    filled = set()
    numbers = values_of(frame, value, spec=spec).best * quantity(value).factor
    for x, y, number in zip(frame[spec.x], frame[spec.y[0]], numbers, strict=True):
        if x not in columns or y not in rows:
            continue
        place = (rows.index(y), columns.index(x))
        if place in filled:
            where = f"{spec.x}={text_of(x)}, {spec.y[0]}={text_of(y)}"
            raise problem(spec, "has several rows for one cell", value=where, hint="choose one with `where`")
        filled.add(place)
        cells[place] = number
    return cells


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


def _brackets(theirs: Floats | None) -> list[Legended]:
    from matplotlib.lines import Line2D

    if theirs is None or np.isnan(theirs).all():
        return []
    return [Line2D([], [], linestyle="none", label="(in brackets)  published")]


def _shown(column: str, values: Sequence[object]) -> list[str]:
    """Return the values of a factor as at the axis, numbers in its unit."""
    factor = quantity(column).factor
    shown = [float(value) * factor if isinstance(value, int | float | np.number) else value for value in values]
    return different_texts(shown)
