"""GPUs, and what they cost, against the rate that must be served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.plots.data import Floats, problem, rows_of, series_of, values_of
from experiments.plots.labels import quantity
from experiments.plots.spec import PlotSpec
from experiments.plots.style import (
    LINES,
    Legended,
    colour_of,
    finish,
    hatch_of,
    interval_text,
    new_figure,
    plain_ticks,
    tidy,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Copies of the placement with the highest goodput of one copy that the axis goes to.
_COPIES = 6
#: A band is open upwards where the goodput may be less than this share of its estimate.
_NOTHING = 0.1
#: End of the axis over the highest number, where a band is open.
_ABOVE = 1.05
#: Of one copy.
_COST = "cost_usd_per_h"


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a placement.

    Args:
        num_gpus: that it takes.
        goodput_per_s: requests/s that it serves within the limits.
        low_per_s, high_per_s: the interval of that, >= 0.
        price_usd_per_h: of one GPU, None where it is not known.
    """

    label: str
    num_gpus: int
    goodput_per_s: float
    low_per_s: float
    high_per_s: float
    price_usd_per_h: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the interval leaves it open how many copies are needed at most."""
        return self.low_per_s < _NOTHING * self.goodput_per_s

    def gpus(self, rate_per_s: float) -> int:
        """Return the GPUs of the copies that serve a rate.

        >>> copy = Copy("", num_gpus=3, goodput_per_s=4.0, low_per_s=3.9, high_per_s=4.1)
        >>> [copy.gpus(rate) for rate in (0.1, 4.0, 4.1, 8.5)]
        [3, 3, 6, 9]
        """
        return copies(rate_per_s, self.goodput_per_s) * self.num_gpus


def copies(rate_per_s: float, goodput_per_s: float) -> int:
    """Return how many copies serve a rate; a rate above whole copies by rounding alone needs no other one."""
    return max(0, math.ceil(rate_per_s / goodput_per_s * (1 - 1e-12)))


def stairs(num_gpus: int, goodput_per_s: float, end_per_s: float) -> tuple[Floats, Floats]:
    """Return the corners of GPUs against rate: rates and GPUs.

    >>> [values.tolist() for values in stairs(3, 4.0, 10.0)]
    [[0.0, 4.0, 4.0, 8.0, 8.0, 10.0], [3.0, 3.0, 6.0, 6.0, 9.0, 9.0]]
    """
    steps = max(1, copies(end_per_s, goodput_per_s))
    edges = np.minimum(goodput_per_s * np.arange(steps + 1), end_per_s)
    rates = np.column_stack([edges[:-1], edges[1:]]).ravel()
    return rates, np.repeat(num_gpus * np.arange(1.0, steps + 1), 2)


def copies_of(spec: PlotSpec, frame: pd.DataFrame) -> list[Copy]:
    """Return one copy of each series' placement; one without goodput serves no rate and is left out.

    Raises:
        InputError: a series has several rows, or none serves any rate.
    """
    assert spec.x is not None
    found = []
    for series in series_of(spec, frame):
        goodput = values_of(series.frame, spec.y[0], spec=spec)
        gpus = values_of(series.frame, spec.x, spec=spec).best
        if len(gpus) > 1:
            hint = "tell them apart with `series`, or choose one with `where`"
            raise problem(spec, "has several rows for one line", value=series.label or None, hint=hint)
        factor = gpus[0] if "per_gpu" in spec.y[0] else 1.0
        price = spec.price_usd_per_h
        if price is None and _COST in series.frame.columns:
            cost = float(values_of(series.frame, _COST, spec=spec).best[0])
            price = cost / gpus[0] if cost > 0 else None
        if goodput.best[0] > 0 and gpus[0] > 0:
            low = max(0.0, goodput.low[0])
            found.append(
                Copy(
                    series.label, int(gpus[0]), goodput.best[0] * factor, low * factor, goodput.high[0] * factor, price
                )
            )
    if not found:
        raise problem(spec, "has no goodput to show", hint="none of the rows serves any rate within the limits")
    return found


def staircase_figure(spec: PlotSpec, summary: pd.DataFrame) -> Figure:
    """Return a figure of GPUs against the required rate: whole copies, with the band of the goodput's interval.

    A second axis shows the cost per hour where all GPUs have one price, a second panel where prices differ.
    """
    found = copies_of(spec, rows_of(spec, summary))
    end = ending(spec, found)
    prices = {copy.price_usd_per_h for copy in found}
    priced = None not in prices
    panels = 2 if priced and len(prices) > 1 else 1
    figure = new_figure(height=3.6 if panels == 1 else 5.6)
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    handles: list[Legended] = []
    for panel, axes in enumerate(grid):
        tidy(axes)
        factors = [(copy.price_usd_per_h or 0.0) if panel else 1.0 for copy in found]
        highest = max(_highest(copy, end) * factor for copy, factor in zip(found, factors, strict=True))
        top = _ABOVE * highest
        for number, (copy, factor) in enumerate(zip(found, factors, strict=True)):
            drawn = _draw(axes, copy, number=number, end=end, price=factor, beyond=2 * top)
            handles += drawn if panel == 0 else []
        axes.set_xlim(0, end)
        axes.set_ylim(bottom=0, top=top if any(copy.is_open for copy in found) else None)
        axes.set_ylabel("cost (USD/h)" if panel else spec.ylabel or "GPUs")
        axes.locator_params(axis="y", integer=not panel)
        plain_ticks(axes)
    if priced and panels == 1:
        price = next(iter(prices)) or 0.0
        grid[0].spines["right"].set_visible(True)
        cost = grid[0].secondary_yaxis("right", functions=(lambda gpus: gpus * price, lambda usd: usd / price))
        cost.set_ylabel(f"cost (USD/h, at {price:g} USD/h a GPU)")
    grid[-1].set_xlabel(spec.xlabel or "required rate (requests/s)")
    finish(figure, spec.title, handles)
    return figure


def ending(spec: PlotSpec, found: Sequence[Copy]) -> float:
    """Return the end of the axis, requests/s."""
    return spec.max_rate_per_s or _round_up(_COPIES * max(copy.goodput_per_s for copy in found))


def _highest(copy: Copy, end: float) -> float:
    """Return the most GPUs that the stairs and a band that ends need."""
    return float(copy.gpus(end) if copy.is_open else band(copy, end)[2].max())


def _draw(axes: Axes, copy: Copy, *, number: int, end: float, price: float, beyond: float) -> list[Legended]:
    """Draw the stairs and the band of one copy; a band that is open goes `beyond` the axes."""
    colour = colour_of(number)
    rates, gpus = stairs(copy.num_gpus, copy.goodput_per_s, end)
    unit = quantity("rate_per_s").unit
    label = f"{copy.label}: " if copy.label else ""
    label += f"{copy.num_gpus} GPU{'s' if copy.num_gpus != 1 else ''} a copy, "
    label += interval_text(copy.goodput_per_s, copy.low_per_s, copy.high_per_s)
    if copy.low_per_s < copy.high_per_s:
        edges, fewest, most = band(copy, end)
        axes.fill_between(
            edges, fewest * price, np.where(np.isinf(most), beyond, most * price), facecolor=colour, alpha=0.2,
            hatch=hatch_of(number), edgecolor=colour, linewidth=0,
        )  # fmt: skip
    return list(
        axes.plot(
            rates,
            gpus * price,
            color=colour,
            linestyle=LINES[number % len(LINES)],
            linewidth=1.8,
            label=f"{label} {unit}",
        )
    )


def band(copy: Copy, end_per_s: float) -> tuple[Floats, Floats, Floats]:
    """Return rates, and the fewest and most GPUs there that the goodput's interval leaves possible.

    The most are infinite where the interval goes down to (next to) nothing.
    """
    limits = (copy.high_per_s,) if copy.is_open else (copy.low_per_s, copy.high_per_s)
    corners = [stairs(copy.num_gpus, goodput, end_per_s)[0] for goodput in limits]
    edges = np.unique(np.concatenate(corners))
    middle = (edges[:-1] + edges[1:]) / 2
    fewest = np.array([copies(rate, copy.high_per_s) * copy.num_gpus for rate in middle], dtype=np.float64)
    if copy.is_open:
        most = np.full(len(middle), np.inf)
    else:
        most = np.array([copies(rate, copy.low_per_s) * copy.num_gpus for rate in middle], dtype=np.float64)
    return np.column_stack([edges[:-1], edges[1:]]).ravel(), np.repeat(fewest, 2), np.repeat(most, 2)


def _round_up(value: float) -> float:
    """Return the next number of two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(math.ceil(value / unit) * unit)
