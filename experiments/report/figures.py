"""What the figures of a report show, whoever draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

#: Okabe and Ito's colours as variables of the page's style, told apart with any colour vision; markers differ, too.
COLOURS = ("blue", "orange", "green", "purple", "yellow")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x")
#: Likewise of the ends of bands, and of bars; the first of these is plain.
DASHES = ("dot", "dash", "dashdot")
PATTERNS = ("", "/", ".", "x", "\\")


@dataclass(frozen=True, slots=True)
class Spread:
    """A value between its limits."""

    low: float
    best: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """Values with intervals against a quantity.

    Args:
        colour: index into `COLOURS` and `MARKERS`.
        band: range of the quantity that is shaded, such as an interval of the goodput.
        told: what each point says under the mouse, line by line; empty: quantity and share with its interval.
        across: intervals of the quantity, where it has any.
        joined: whether a line goes through the points.
        hollow: published points, which are only marked.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[Spread, ...]
    colour: int
    band: tuple[float, float] | None = None
    told: tuple[tuple[str, ...], ...] = ()
    across: tuple[Spread, ...] = ()
    joined: bool = True
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class LineFigure:
    """Lines against a common quantity.

    Args:
        identity: the element's id.
        summary: what a reader who cannot see the figure is told.
        y_range: ends of the axis; None: what the values need, from 0.
        target: a value that is marked by a line across.
        from_zero: the quantity's axis begins at 0.
        x_log, y_log: whether the axis is logarithmic.
        ticks: place and label, where the quantity is a name.
        marks: place and label of lines from top to bottom.
    """

    identity: str
    caption: str
    summary: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    y_range: tuple[float, float] | None
    target: float | None = None
    target_name: str = ""
    from_zero: bool = True
    x_log: bool = False
    y_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One part of every bar: None where the bar has none."""

    name: str
    values: tuple[float | None, ...]
    colour: int


@dataclass(frozen=True, slots=True)
class BarFigure:
    """Horizontal bars, each the sum of its parts.

    Args:
        rows: names of the bars, from the top.
        most: end of the axis; None: what the bars need.
        digits: after the point, where a value is shown.
    """

    identity: str
    caption: str
    summary: str
    x_label: str
    rows: tuple[str, ...]
    parts: tuple[Bars, ...]
    most: float | None = None
    digits: int = 1


@dataclass(frozen=True, slots=True)
class Dots:
    """One value with its interval in every row, None where there is none."""

    name: str
    values: tuple[Spread | None, ...]
    colour: int


@dataclass(frozen=True, slots=True)
class DotFigure:
    """Values with intervals by row."""

    identity: str
    caption: str
    summary: str
    x_label: str
    rows: tuple[str, ...]
    dots: tuple[Dots, ...]


Figure: TypeAlias = LineFigure | BarFigure | DotFigure
