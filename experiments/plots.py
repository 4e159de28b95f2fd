"""Plots: attainment against rate."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from placement.curve import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart with any colour vision; each with a marker of its own.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"))


def attainment_figure(curves: Sequence[Curve], *, target: float, title: str = "") -> Figure:
    """Return a figure of attainment (percent) against arrival rate (requests/s per GPU).

    Each curve carries its interval at every point; a band marks where it meets the target, the goodput's interval.

    Args:
        target: attainment (0 to 1) that defines goodput.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, marker = STYLES[number % len(STYLES)]
        best = [100 * point.best for point in curve.attainment]
        below = [100 * (point.best - point.low) for point in curve.attainment]
        above = [100 * (point.high - point.best) for point in curve.attainment]
        label = curve.trial.placement.label
        goodput = curve.goodput_per_gpu_per_s
        if goodput is not None:
            label += f"\n{goodput.best:.2f} [{goodput.low:.2f}, {goodput.high:.2f}] requests/s per GPU"
            axes.axvspan(goodput.low, goodput.high, color=colour, alpha=0.15, linewidth=0)
        axes.errorbar(
            curve.rate_per_gpu_per_s, best, yerr=[below, above], color=colour, marker=marker, capsize=3, label=label
        )
    axes.axhline(100 * target, color="#555555", linestyle="--", linewidth=1, label=f"target {100 * target:g} %")
    axes.set_xlabel("arrival rate (requests/s per GPU)")
    axes.set_ylabel("requests within all limits (%)")
    axes.set_ylim(0, 102)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    if title:
        axes.set_title(title, fontsize="medium")
    return figure


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


def new_figure() -> Figure:
    """Return an empty figure of the common size."""
    # No pyplot: it keeps every figure alive and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def rendered(figure: Figure, form: Literal["png", "svg"]) -> bytes:
    """Return the figure's file; it carries no date, so that the same curves give the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "dsim", "svg.fonttype": "none"}):
        figure.savefig(content, format=form, dpi=150, metadata={"Date": None} if form == "svg" else {"Software": None})
    return content.getvalue()
