"""Plots, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.curves import Curve


def attainment_png(curves: Sequence[Curve], *, target: float, title: str) -> bytes:
    """Return a PNG of attainment against the rate per GPU, one line for each curve.

    Args:
        target: share (0 to 1) drawn as a horizontal line.
    """
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        best = [100 * point.best for point in curve.both]
        line = axes.plot(curve.rates_per_gpu_per_s, best, marker="o", markersize=4, label=curve.placement.label)[0]
        low = [100 * max(point.low, 0.0) for point in curve.both]
        high = [100 * min(point.high, 1.0) for point in curve.both]
        axes.fill_between(curve.rates_per_gpu_per_s, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(100 * target, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("requests per second and GPU")
    axes.set_ylabel("requests within the limits, %")
    axes.set_ylim(0, 103)
    axes.set_xlim(left=0)
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
