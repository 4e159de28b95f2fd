"""Figures of any kind from a frame of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.plots.bars import breakdown_figure, goodput_figure
from experiments.plots.cdf import cdf_figure
from experiments.plots.data import problem
from experiments.plots.heatmap import heatmap_figure
from experiments.plots.lines import lines_figure
from experiments.plots.pareto import pareto_figure
from experiments.plots.spec import Kind, PlotSpec
from experiments.plots.staircase import staircase_figure
from experiments.plots.style import rendered

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def draw(spec: PlotSpec, summary: pd.DataFrame, *, published: pd.DataFrame | None = None) -> Figure:
    """Return the figure that a spec asks for.

    Args:
        summary: one row for each combination of factors: their values, and for a metric `m` the columns `m`,
            and `m.low` and `m.high` where it has an interval (or `m.best`, `m.low`, `m.high`).
        published: points to show beside: values of factors, and of metrics, NaN where unknown.

    Raises:
        InputError: the rows lack what the figure needs.
    """
    match spec.kind:
        case Kind.GOODPUT_BARS:
            return goodput_figure(spec, summary, published)
        case Kind.STAIRCASE:
            return staircase_figure(spec, summary)
        case Kind.PARETO:
            return pareto_figure(spec, summary, published)
        case Kind.BREAKDOWN:
            return breakdown_figure(spec, summary)
        case Kind.CDF:
            return cdf_figure(spec, summary, published)
        case Kind.HEATMAP:
            return heatmap_figure(spec, summary, published)
        case Kind.TIMELINE:
            raise problem(spec, "is drawn from one run", hint="dsim plot DIR --kind timeline draws it")
        case Kind.ATTAINMENT_RATE | Kind.ATTAINMENT_SCALE | Kind.RATIO | Kind.BANDWIDTH | Kind.LINE:
            return lines_figure(spec, summary, published)


def render(spec: PlotSpec, summary: pd.DataFrame, *, published: pd.DataFrame | None = None) -> dict[str, bytes]:
    """Return the figure's files, SVG and PNG, by name."""
    figure = draw(spec, summary, published=published)
    return {f"{spec.file}.svg": rendered(figure, "svg"), f"{spec.file}.png": rendered(figure, "png")}
