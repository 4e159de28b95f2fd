"""What all figures share: size, styles told apart with any colour vision, legends, deterministic files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
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
LINES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
#: Of targets, marks and everything else that is no series.
NEUTRAL = "#444444"

#: Characters of a title's line, and of all labels in a legend's line, at the common width.
_TITLE_WIDTH, _LEGEND_WIDTH = 78, 88

Form = Literal["png", "svg"]


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
    """Write the title, as it is, above everything, on as many lines as it needs."""
    if title:
        width = int(_TITLE_WIDTH * figure.get_figwidth() / 7.0)
        figure.suptitle("\n".join(textwrap.wrap(title, width)), fontsize="medium", parse_math=False)


def add_legend(figure: Figure, handles: Sequence[Artist], *, title: str | None = None) -> None:
    """Put the legend below the axes, where it covers no data, in as many columns as its labels leave room for."""
    shown = [handle for handle in handles if str(handle.get_label())]
    if not shown:
        return
    labels = ["\n".join(textwrap.wrap(str(handle.get_label()), _LEGEND_WIDTH)) for handle in shown]
    longest = max(len(line) for label in labels for line in label.splitlines()) + 6
    columns = max(1, min(len(shown), int(_LEGEND_WIDTH * figure.get_figwidth() / 7.0) // longest))
    legend = figure.legend(
        shown, labels, loc="outside lower center", ncols=columns, fontsize="small", title=title, handlelength=2.6
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def tidy(axes: Axes) -> None:
    """Give axes a light grid behind the data, and no frame where nothing is read off."""
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def rendered(figure: Figure, form: Form) -> bytes:
    """Return the figure's file; it carries no date, so that the same data give the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "dsim", "svg.fonttype": "none"}):
        # A date and the maker's version would differ between runs and machines.
        metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        figure.savefig(content, format=form, dpi=150, metadata=metadata)
    return content.getvalue()
