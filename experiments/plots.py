"""Plots: attainment against rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from placement.curve import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart with any colour vision; each with a marker of its own.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"))


def attainment_figure(curves: Sequence[Curve], *, target: float, title: str = "") -> Figure:
    """Return a figure of attainment (percent) against arrival rate (requests/s per GPU).

    Each curve carries its interval at every point; a band marks where it meets the target, the goodput's interval.

    Args:
        target: attainment (0 to 1) that defines goodput.
    """
    # No pyplot: it keeps every figure alive and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, marker = _STYLES[number % len(_STYLES)]
        rates, label = curve.rate_per_gpu_per_s, curve.trial.placement.label
        best = [100 * point.best for point in curve.attainment]
        line = axes.plot(rates, best, marker="o", markersize=4, label=label)[0]
        low = [100 * point.low for point in curve.attainment]
        high = [100 * point.high for point in curve.attainment]
        axes.fill_between(rates, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(100 * target, color="#555555", linestyle="--", linewidth=1, label=f"target {100 * target:g} %")
    axes.set_xlabel("arrival rate (requests/s per GPU)")
    axes.set_ylabel("requests within all limits (%)")
    axes.set_ylim(0, 102)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    if title:
        axes.set_title(title, fontsize="medium")
    return figure


def plot_attainment(curves: Sequence[Curve], path: Path, *, target: float, title: str = "") -> tuple[Path, Path]:
    """Write the figure as SVG and PNG and return their paths; the suffix of `path` is replaced.

    The files carry no date, so that the same curves give the same bytes.
    """
    from matplotlib import rc_context

    figure = attainment_figure(curves, target=target, title=title)
    svg, png = path.with_suffix(".svg"), path.with_suffix(".png")
    with rc_context({"svg.hashsalt": "dsim", "svg.fonttype": "none"}):
        figure.savefig(svg, metadata={"Date": None})
    figure.savefig(png, dpi=150, metadata={"Software": None})
    return svg, png
