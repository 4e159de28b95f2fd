"""What all figures share: size, styles told apart with any colour vision, legends, deterministic files."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart with any colour vision; each with a marker of its own.
STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)
#: One for each colour, so that bars are told apart in print.
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
#: Of targets, marks and everything else that is no series.
NEUTRAL = "#444444"

#: Characters of a title's line, and of a label's line in a legend, at the common width.
_TITLE_WIDTH, _LEGEND_WIDTH = 78, 100
#: Label of lines of published points; what begins with a dash is not in the legend.
HOLLOW = "_published"
#: Share of the width that a legend may take.
_LEGEND_SHARE = 0.97
#: Inches of one line of a legend, and of a title.
_LEGEND_LINE, _TITLE_LINE = 0.175, 0.21

#: A logarithmic axis of fewer decades has more ticks; an axis up to so much has commas.
_DECADES, _THOUSANDS = 3.5, 10_000

Form = Literal["png", "svg"]
Floats = NDArray[np.float64]
Legended: TypeAlias = "Artist | Container"
#: Figures by the name of their files.
Figures: TypeAlias = "Mapping[str, Figure]"


def colour_of(number: int) -> str:
    """Return the colour of a series, counted from 0."""
    return STYLES[number % len(STYLES)][0]


def marker_of(number: int) -> str:
    """Return the marker of a series; where colours come round again, markers do not meet the same colour."""
    return STYLES[(number + number // len(STYLES)) % len(STYLES)][1]


def hatch_of(number: int) -> str:
    """Return the hatch of a series' bars."""
    return HATCHES[(number + number // len(STYLES)) % len(HATCHES)]


def new_figure(*, width: float = 7.0, height: float = 4.2) -> Figure:
    """Return an empty figure, by default of the common size (inches)."""
    # No pyplot: it keeps every figure alive and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, title: str) -> None:
    """Write the title, as it is, above everything, on as many lines as it needs; the figure grows by them."""
    if title:
        lines = balanced(title, int(_TITLE_WIDTH * figure.get_figwidth() / 7.0))
        figure.suptitle("\n".join(lines), fontsize="medium", parse_math=False)
        figure.set_figheight(figure.get_figheight() + _TITLE_LINE * len(lines))


def balanced(text: str, width: int) -> list[str]:
    """Return the text on as few lines as the width allows, of much the same length.

    >>> balanced("one two three four", 16)
    ['one two', 'three four']
    """
    lines = textwrap.wrap(text, width)
    for narrower in range(max(1, len(text) // max(1, len(lines))), width):
        fitted = textwrap.wrap(text, narrower)
        if len(fitted) <= len(lines):
            return fitted
    return lines


def finish(figure: Figure, title: str, handles: Sequence[Legended]) -> None:
    """Write the title, and put the legend below the axes, where it covers no data; the figure grows by both.

    The legend has as many columns as there is room for. Handles without a label are left out, and so are those whose
    label has come already. No text of the figure is markup.
    """
    from matplotlib.text import Text

    set_title(figure, title)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
    # matplotlib's annotations do not know that legends take containers.
    shown: dict[str, Any] = {}
    for handle in handles:
        label = str(handle.get_label())
        if label and not label.startswith("_"):
            shown.setdefault(label, handle)
    if not shown:
        return
    room = int(_LEGEND_WIDTH * figure.get_figwidth() / 7.0)
    labels = ["\n".join(textwrap.wrap(label, room)) for label in shown]
    for columns in range(len(shown), 0, -1):
        legend = figure.legend(
            list(shown.values()), labels, loc="outside lower center", ncols=columns, fontsize="small", handlelength=2.6
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        if columns == 1 or legend.get_window_extent().width <= _LEGEND_SHARE * figure.bbox.width:
            break
        legend.remove()
    parts = np.array_split([label.count("\n") + 1 for label in labels], columns)
    lines = max(int(part.sum()) for part in parts)
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * (lines + 1))


def hollow(
    axes: Axes,
    x: Sequence[float] | Floats,
    y: Sequence[float] | Floats,
    *,
    number: int,
    colour: str | None = None,
    alone: str | None = None,
) -> list[Legended]:
    """Draw published points, hollow and in the colour of their series, and return what the legend says of them.

    Args:
        alone: what it says where nothing else of the series is drawn.
    """
    from matplotlib.lines import Line2D

    places, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = ~np.isnan(places) & ~np.isnan(values)
    if not known.any():
        return []
    look: dict[str, Any] = {"linestyle": "none", "marker": marker_of(number), "markerfacecolor": "none"}
    look |= {"markersize": 8.5, "markeredgewidth": 1.5}
    edge = colour_of(number) if colour is None else colour
    axes.plot(places[known], values[known], **look, markeredgecolor=edge, label=HOLLOW, zorder=5)
    if alone is not None:
        return [Line2D([], [], **look, markeredgecolor=edge, label=alone)]
    return [Line2D([], [], **look, markeredgecolor=NEUTRAL, label="published (hollow)")]


def tidy(axes: Axes) -> None:
    """Give axes a light grid behind the data, and no frame where nothing is read off."""
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_ticks(axes: Axes, *, x: bool = True, y: bool = True) -> None:
    """Write ticks as plain numbers, thousands apart by commas; a short logarithmic axis also has ticks at 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, wanted in ((axes.xaxis, x), (axes.yaxis, y)):
        if not wanted:
            continue
        logarithmic = axis.get_scale() == "log"
        low, high = sorted(axis.get_view_interval())
        if logarithmic:
            decades = math.log10(high / low)
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < _DECADES else (1,), numticks=20))
            axis.set_minor_formatter(NullFormatter())
        if logarithmic or high >= _THOUSANDS:
            axis.set_major_formatter(FuncFormatter(lambda value, _position: _plain(value)))


def digits(value: float, significant: int = 3) -> str:
    """Return a number with that many digits, trailing zeros included.

    >>> digits(2.7), digits(22.94), digits(1234.5), digits(0.0)
    ('2.70', '22.9', '1230', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    # Rounding up may make one digit more.
    places = significant - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, places)}f}"


def interval_text(best: float, low: float, high: float) -> str:
    """Return an estimate and, where there is one, its interval.

    >>> interval_text(2.7, 2.584, 2.813), interval_text(2.7, 2.7, 2.7)
    ('2.70 [2.58, 2.81]', '2.70')
    """
    return f"{digits(best)} [{digits(low)}, {digits(high)}]" if low < high else digits(best)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= _THOUSANDS / 10 and value == round(value) else f"{value:g}"


def rendered(figure: Figure, form: Form) -> bytes:
    """Return the figure's file; it carries no date, so that the same data give the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "dsim", "svg.fonttype": "none"}):
        # A date and the maker's version would differ between runs and machines.
        metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        figure.savefig(content, format=form, dpi=150, metadata=metadata)
    return content.getvalue()
