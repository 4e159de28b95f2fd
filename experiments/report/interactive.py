"""Figures for plotly.js: as JSON that the page's script hands to it."""

from __future__ import annotations

import html
import math
from typing import Any, Final

from dsim.errors import InputError
from experiments.report.figures import (
    COLOURS,
    DASHES,
    MARKERS,
    PATTERNS,
    BarFigure,
    DotFigure,
    Figure,
    Line,
    LineFigure,
    Spread,
)

#: Stands for a colour of the page's style, which the script looks up; light and dark pages have their own.
_COLOUR = "var(--{})"
#: Share of the axis between lines whose points have the same places.
_APART = 0.008
#: Of lines whose colours come round again.
_ROUNDS = ("solid", "dash", "dot", "dashdot")


def bundle() -> str:
    """Return plotly.js.

    Raises:
        InputError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("dsim report", "needs plotly", hint="install it: pip install 'dsim[report]'") from None
    text: str = get_plotlyjs()
    if "</script" in text.lower():
        raise InputError("dsim report", "cannot inline this release of plotly", hint="pip install 'dsim[report]'")
    return text


def specification(figure: Figure) -> dict[str, Any]:
    """Return data and layout of a figure."""
    if isinstance(figure, LineFigure):
        return {"data": _lines(figure), "layout": _line_layout(figure)}
    if isinstance(figure, BarFigure):
        return {"data": _bars(figure), "layout": _bar_layout(figure)}
    return {"data": _dots(figure), "layout": _dot_layout(figure)}


def _text(text: str) -> str:
    """Return a text that plotly shows as it is: it takes texts for HTML of its own."""
    return html.escape(text, quote=False)


def _wrapped(text: str) -> str:
    """Return a placement's name on several lines, so that it leaves room for the bars on narrow pages."""
    return _text(text).replace(" + ", " +<br>").replace(", ", ",<br>").replace(" (", "<br>(")


def _colour(index: int) -> str:
    return _COLOUR.format(COLOURS[index % len(COLOURS)])


def _error(spreads: list[Spread | None], colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if s is None else s.high - s.best for s in spreads],
        "arrayminus": [None if s is None else s.best - s.low for s in spreads],
        "thickness": 1.5,
        "width": 5,
        "color": colour,
    }


def _lines(figure: LineFigure) -> list[dict[str, Any]]:
    """Return the lines; where all have the same places they are moved apart, so that no interval hides another."""
    joined = [line for line in figure.lines if line.joined and not line.across]
    places = {line.x for line in joined}
    scale = math.log10 if figure.x_log else float
    span = max((scale(max(x)) - scale(min(x)) for x in places if x), default=0.0)
    step = _APART * span if len(places) == 1 < len(joined) else 0.0
    middle = (len(joined) - 1) / 2
    asides = {id(line): (number - middle) * step for number, line in enumerate(joined)}
    drawn = []
    for line in figure.lines:
        aside = asides.get(id(line), 0.0)
        places_of_line = [x * 10**aside if figure.x_log else x + aside for x in line.x]
        drawn.append(_told_line(line, places_of_line) if line.told else _line(line, places_of_line))
    return drawn


def _told_line(line: Line, places: list[float]) -> dict[str, Any]:
    """Return a line whose points say what is written for them; nothing in it is taken for a template."""
    drawn = _line(line, places)
    del drawn["customdata"], drawn["hovertemplate"]
    name = [_text(line.name)] if line.name else []
    drawn["hoverinfo"] = "text"
    drawn["hovertext"] = ["<br>".join([*name, *map(_text, texts)]) for texts in line.told]
    rounds = line.colour // len(MARKERS)
    drawn["marker"]["symbol"] = MARKERS[(line.colour + rounds) % len(MARKERS)]
    drawn["line"]["dash"] = _ROUNDS[rounds % len(_ROUNDS)]
    if not line.joined:
        drawn["mode"] = "markers"
    if line.across:
        drawn["error_x"] = _error(list(line.across), drawn["line"]["color"])
    if line.hollow:
        del drawn["error_y"]
        drawn["marker"] |= {"symbol": f"{drawn['marker']['symbol']}-open", "size": 11, "line": {"width": 2}}
    return drawn


def _line(line: Line, places: list[float]) -> dict[str, Any]:
    colour = _colour(line.colour)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _text(line.name),
        "x": places,
        "y": [point.best for point in line.y],
        "error_y": _error(list(line.y), colour),
        "customdata": [[point.low, point.high, x] for x, point in zip(line.x, line.y, strict=True)],
        "hovertemplate": "%{customdata[2]:.3f} requests/s per GPU<br>"
        "%{y:.1f} % (%{customdata[0]:.1f} – %{customdata[1]:.1f} %)"
        f"<extra>{_text(line.name)}</extra>",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "symbol": MARKERS[line.colour % len(MARKERS)], "size": 8},
    }


#: Pixels right of the axes that the name of a target takes.
_TARGET_MARGIN: Final = 92


def _line_layout(figure: LineFigure) -> dict[str, Any]:
    shapes: list[dict[str, Any]] = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": line.band[0], "x1": line.band[1], "y0": 0, "y1": 1,
         "fillcolor": _colour(line.colour), "opacity": 0.15, "line": {"width": 0}, "layer": "below"}
        for line in figure.lines
        if line.band is not None
    ]  # fmt: skip
    # Ends that can be told apart where bands lie on each other.
    shapes += [
        {"type": "line", "xref": "x", "yref": "paper", "x0": end, "x1": end, "y0": 0, "y1": 1, "layer": "below",
         "line": {"color": _colour(line.colour), "width": 1.5, "dash": DASHES[line.colour % len(DASHES)]}}
        for line in figure.lines
        if line.band is not None
        for end in line.band
    ]  # fmt: skip
    notes: list[dict[str, Any]] = []
    if figure.target is not None:
        shapes.append(
            {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": figure.target, "y1": figure.target,
             "line": {"color": "var(--muted)", "dash": "dash", "width": 1.5}}
        )  # fmt: skip
        notes.append(
            {"xref": "paper", "yref": "y", "x": 1, "y": figure.target, "xanchor": "left", "yanchor": "middle",
             "text": _text(figure.target_name), "showarrow": False, "font": {"color": "var(--muted)"}}
        )  # fmt: skip
    for place, label in figure.marks:
        shapes.append(
            {"type": "line", "xref": "x", "yref": "paper", "x0": place, "x1": place, "y0": 0, "y1": 1,
             "line": {"color": "var(--muted)", "dash": "dot", "width": 1.5}}
        )  # fmt: skip
        notes.append(
            {"xref": "x", "yref": "paper", "x": math.log10(place) if figure.x_log else place, "y": 1, "xanchor": "left",
             "yanchor": "top", "text": _text(label), "showarrow": False, "font": {"color": "var(--muted)"}}
        )  # fmt: skip
    horizontal = {**_axis(figure.x_label), "rangemode": "tozero" if figure.from_zero else "normal"}
    if figure.x_log:
        horizontal |= {"type": "log", "rangemode": "normal", "dtick": "D2"}
    if figure.ticks:
        horizontal |= {"tickmode": "array", "tickvals": [place for place, _ in figure.ticks]}
        horizontal |= {"ticktext": [_text(label) for _, label in figure.ticks]}
    vertical: dict[str, Any] = {**_axis(figure.y_label), "rangemode": "tozero"}
    if figure.y_range is not None:
        vertical |= {"range": [math.log10(end) if figure.y_log else end for end in figure.y_range]}
        del vertical["rangemode"]
    if figure.y_log:
        vertical |= {"type": "log", "dtick": "D2"}
    names = [line.name for line in figure.lines]
    common = _common()
    if figure.target is not None:
        # The target is named beside the axes, where no point of a line hides it.
        common["margin"] = {**common["margin"], "r": _TARGET_MARGIN}
    return {
        **common,
        "xaxis": horizontal,
        "yaxis": vertical,
        "shapes": shapes,
        "annotations": notes,
        # Long legends have a line each on narrow pages.
        "height": 400 + 22 * max(0, len(names) - 2),
        "showlegend": any(names),
    }


def _bars(figure: BarFigure) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": _text(part.name),
            "y": [_wrapped(row) for row in figure.rows],
            "x": list(part.values),
            "marker": {
                "color": _colour(part.colour),
                "line": {"color": "var(--page)", "width": 1},
                "pattern": {
                    "shape": PATTERNS[part.colour % len(PATTERNS)],
                    "fgcolor": "var(--page)",
                    "fillmode": "overlay",
                    "size": 9,
                    "solidity": 0.15,
                },
            },
            "hovertemplate": f"%{{x:.{figure.digits}f}}<extra>{_text(part.name)}</extra>",
        }
        for part in figure.parts
    ]


def _bar_layout(figure: BarFigure) -> dict[str, Any]:
    horizontal = _axis(figure.x_label)
    horizontal |= {"rangemode": "tozero"} if figure.most is None else {"range": [0, figure.most]}
    return {
        **_common(),
        "barmode": "stack",
        "showlegend": len(figure.parts) > 1,
        "xaxis": horizontal,
        "yaxis": _rows_axis(),
        "height": 150 + 56 * len(figure.rows),
    }


def _dots(figure: DotFigure) -> list[dict[str, Any]]:
    found = []
    for number, dots in enumerate(figure.dots):
        colour, shift = _colour(dots.colour), 0.12 * (2 * number - 1)  # rows are counted downwards
        found.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _text(dots.name),
                "x": [None if spread is None else spread.best for spread in dots.values],
                "y": [row + shift for row in range(len(figure.rows))],
                "error_x": _error(list(dots.values), colour),
                "text": [_text(row) for row in figure.rows],
                "customdata": [[None, None] if s is None else [s.low, s.high] for s in dots.values],
                "hovertemplate": "%{text}: %{x:.3f} (%{customdata[0]:.3f} – %{customdata[1]:.3f})"
                f"<extra>{_text(dots.name)}</extra>",
                "marker": {"color": colour, "symbol": MARKERS[dots.colour % len(MARKERS)], "size": 9},
            }
        )
    return found


def _dot_layout(figure: DotFigure) -> dict[str, Any]:
    rows = list(range(len(figure.rows)))
    vertical = {
        **_rows_axis(),
        "tickmode": "array",
        "tickvals": rows,
        "ticktext": [_text(row) for row in figure.rows],
        "range": [len(rows) - 0.5, -0.5],
        "zeroline": False,
    }
    vertical.pop("autorange")
    return {
        **_common(),
        "xaxis": {**_axis(figure.x_label), "rangemode": "tozero"},
        "yaxis": vertical,
        "height": 150 + 40 * len(rows),
    }


def _common() -> dict[str, Any]:
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "family": "inherit", "size": 14},
        "margin": {"l": 10, "r": 16, "t": 10, "b": 10},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "xanchor": "left",
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "hoverlabel": {"bgcolor": "var(--page)", "bordercolor": "var(--line)", "font": {"color": "var(--text)"}},
        "dragmode": False,
        "showlegend": True,
    }


def _axis(label: str) -> dict[str, Any]:
    return {
        "title": {"text": _text(label), "standoff": 12, "font": {"size": 14}},
        "tickangle": 0,
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "automargin": True,
        "fixedrange": True,
    }


def _rows_axis() -> dict[str, Any]:
    return {
        "autorange": "reversed",
        "automargin": True,
        "fixedrange": True,
        "ticklabelstandoff": 8,
        "gridcolor": "var(--line)",
    }
