"""Attainment against rate of the placements that a search has found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.plots.draw import draw
from experiments.plots.spec import Kind, PlotSpec
from experiments.plots.style import rendered
from placement.curve import Curve

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def attainment_figure(curves: Sequence[Curve], *, target: float, title: str = "") -> Figure:
    """Return a figure of attainment (percent) against arrival rate (requests/s per GPU).

    Each curve carries its interval at every point; a band marks where it meets the target, the goodput's interval.

    Args:
        target: attainment (0 to 1) that defines goodput.
    """
    return draw(attainment_spec(target=target, title=title), _frame(curves))


def attainment_spec(*, target: float, title: str) -> PlotSpec:
    """Return the spec of that figure, for rows with `placement`, `rate_per_gpu_per_s` and `attainment`."""
    return PlotSpec(
        kind=Kind.ATTAINMENT_RATE,
        file="attainment",
        title=title,
        x="rate_per_gpu_per_s",
        y=("attainment",),
        series="placement",
        target=target,
    )


def attainment_png(curves: Sequence[Curve], *, target: float, title: str = "") -> bytes:
    """Return the figure as a PNG file."""
    return rendered(attainment_figure(curves, target=target, title=title), "png")


def attainment_svg(curves: Sequence[Curve], *, target: float, title: str = "") -> bytes:
    """Return the figure as an SVG file with selectable text."""
    return rendered(attainment_figure(curves, target=target, title=title), "svg")


def plot_attainment(curves: Sequence[Curve], path: Path, *, target: float, title: str = "") -> tuple[Path, Path]:
    """Write the figure as SVG and PNG and return their paths; the suffix of `path` is replaced."""
    svg, png = path.with_suffix(".svg"), path.with_suffix(".png")
    figure = attainment_figure(curves, target=target, title=title)
    svg.write_bytes(rendered(figure, "svg"))
    png.write_bytes(rendered(figure, "png"))
    return svg, png


def _frame(curves: Sequence[Curve]) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for curve in curves:
        goodput = curve.goodput_per_gpu_per_s
        for rate, share in zip(curve.rate_per_gpu_per_s, curve.attainment, strict=True):
            row: dict[str, object] = {"placement": curve.trial.placement.label, "rate_per_gpu_per_s": rate}
            row |= {f"attainment.{key}": value for key, value in share.to_dict().items()}
            if goodput is not None:
                row |= {f"goodput_per_gpu_per_s.{key}": value for key, value in goodput.to_dict().items()}
            rows.append(row)
    return pd.DataFrame(rows)
