"""Figures as SVG without script: what is printed, and what a browser without script shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.report.figures import COLOURS, DASHES, BarFigure, Dots, Figure, Line, LineFigure, Spread
from experiments.report.markup import Html, element

_WIDTH = 720
_RIGHT = 16
#: Width of a letter at the size of the labels, roughly; labels that are longer than the half are cut.
_LETTER = 7.4
_MOST_LETTERS = 44
#: Between lines whose points have the same places.
_APART = 6.0


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps a range of values to a range of pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def drawing(figure: Figure) -> Html:
    """Return the figure as an SVG element."""
    if isinstance(figure, LineFigure):
        return _lines(figure)
    if isinstance(figure, BarFigure):
        return _bars(figure)
    return _rows_figure(
        figure.rows,
        [(dots.name, dots.colour) for dots in figure.dots],
        x_label=figure.x_label,
        most=_nice_end(max((s.high for d in figure.dots for s in d.values if s is not None), default=1.0)),
        row_height=32,
        draw=lambda row, y, x: [_dot(dots, number, row, y, x) for number, dots in enumerate(figure.dots)],
        summary=figure.summary,
    )


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Return round values within a range, four to ten of them.

    >>> ticks(0, 3.1)
    (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    """
    step = _step(high - low)
    first = math.ceil(low / step - 1e-9)
    return tuple(round(i * step, 10) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1))


def _step(width: float) -> float:
    power = 10.0 ** math.floor(math.log10(width / 4))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= width / 4)


def _nice_end(value: float) -> float:
    value = value if math.isfinite(value) and value > 0 else 1.0
    step = _step(value)
    return math.ceil(value / step + 1e-9) * step


def _svg(height: float, summary: str, *content: Html | Sequence[Html]) -> Html:
    return element("svg", content, class_="static", viewBox=f"0 0 {_WIDTH} {height:g}", role="img", aria_label=summary)


def _text(text: str, x: float, y: float, *, anchor: str = "start", class_: str | None = None) -> Html:
    return element("text", text, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, class_=class_)


def _stroke(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return element("line", x1=f"{x1:g}", y1=f"{y1:g}", x2=f"{x2:g}", y2=f"{y2:g}", class_=class_)


def _class(colour: int) -> str:
    return COLOURS[colour % len(COLOURS)]


def _legend(names: Sequence[tuple[str, int]]) -> tuple[list[Html], float]:
    """Return the legend and the height it takes; entries that do not fit into a line begin the next."""
    found, x, y = [], 0.0, 14.0
    for name, colour in names:
        width = 34 + _LETTER * len(name)
        if x and x + width > _WIDTH:
            x, y = 0.0, y + 20
        found.append(
            element("rect", x=f"{x:g}", y=f"{y - 10:g}", width="12", height="12", class_=f"fill {_class(colour)}")
        )
        found.append(_text(name, x + 18, y))
        x += width
    return found, y + 10


def _lines(figure: LineFigure) -> Html:
    legend, top = _legend([(line.name, line.colour) for line in figure.lines])
    bottom, left = top + 300.0, 56.0
    y_range = figure.y_range or (0.0, _nice_end(max((s.high for line in figure.lines for s in line.y), default=1.0)))
    x, y = _Scale(*_ends(figure), left, _WIDTH - _RIGHT), _Scale(*y_range, bottom, top)
    content: list[Html] = []
    for value in ticks(*y_range):
        content += [_stroke(left, y(value), _WIDTH - _RIGHT, y(value), "grid")]
        content += [_text(f"{value:g}", left - 8, y(value) + 4, anchor="end")]
    content += _bottom_axis(x, top, bottom, figure.x_label)
    content.append(
        element(
            "text", figure.y_label, transform=f"translate(14 {(top + bottom) / 2:g}) rotate(-90)", text_anchor="middle"
        )
    )
    if figure.target is not None:
        content.append(_stroke(left, y(figure.target), _WIDTH - _RIGHT, y(figure.target), "target"))
        content.append(_text(figure.target_name, left + 6, y(figure.target) + 16, class_="muted"))
    together = len({line.x for line in figure.lines}) == 1
    for number, line in enumerate(figure.lines):
        aside = _APART * (number - (len(figure.lines) - 1) / 2) if together else 0.0
        content += _line(line, x, y, top, bottom, aside=aside)
    return _svg(bottom + 46, figure.summary, legend, content)


def _ends(figure: LineFigure) -> tuple[float, float]:
    """Return the ends of the quantity's axis."""
    values = [x for line in figure.lines for x in line.x] or [0.0, 1.0]
    if figure.from_zero or min(values) == max(values):
        return 0.0, _nice_end(max(values))
    margin = 0.06 * (max(values) - min(values))
    return min(values) - margin, max(values) + margin


def _line(line: Line, x: _Scale, y: _Scale, top: float, bottom: float, *, aside: float) -> list[Html]:
    colour, found = _class(line.colour), []
    if line.band is not None:
        start, end = x(line.band[0]), x(min(line.band[1], x.high))
        found.append(
            element("rect", x=f"{start:g}", y=f"{top:g}", width=f"{max(end - start, 0):g}", height=f"{bottom - top:g}",
                    class_=f"band {colour}")
        )  # fmt: skip
        found += [
            _stroke(edge, top, edge, bottom, f"edge {DASHES[line.colour % len(DASHES)]} {colour}")
            for edge in (start, end)
        ]
    points = [(x(value) + aside, spread) for value, spread in zip(line.x, line.y, strict=True)]
    found.append(
        element("polyline", points=" ".join(f"{px:g},{y(s.best):g}" for px, s in points), class_=f"line {colour}")
    )
    for px, spread in points:
        found.append(_stroke(px, y(spread.low), px, y(spread.high), f"line {colour}"))
        found.append(_marker(line.colour, px, y(spread.best)))
    return found


def _marker(colour: int, x: float, y: float) -> Html:
    class_ = f"fill {_class(colour)}"
    if colour % 2 == 0:
        return element("circle", cx=f"{x:g}", cy=f"{y:g}", r="4", class_=class_)
    return element("rect", x=f"{x - 4:g}", y=f"{y - 4:g}", width="8", height="8", class_=class_)


def _bottom_axis(x: _Scale, top: float, bottom: float, label: str) -> list[Html]:
    found = []
    for value in ticks(x.low, x.high):
        found.append(_stroke(x(value), top, x(value), bottom, "grid"))
        found.append(_text(f"{value:g}", x(value), bottom + 18, anchor="middle"))
    found.append(_text(label, (x.start + x.end) / 2, bottom + 40, anchor="middle"))
    return found


def _bars(figure: BarFigure) -> Html:
    sums = [sum(part.values[row] or 0.0 for part in figure.parts) for row in range(len(figure.rows))]

    def draw(row: int, y: float, x: _Scale) -> list[Html]:
        found, start = [], 0.0
        for part in figure.parts:
            value = part.values[row]
            if value:
                width = x(start + value) - x(start)
                found.append(
                    element("rect", x=f"{x(start):g}", y=f"{y - 12:g}", width=f"{width:g}", height="24",
                            class_=f"fill {_class(part.colour)}")
                )  # fmt: skip
                shown = f"{value:.{0 if value >= 100 else 1}f}"
                if width > _LETTER * len(shown):
                    found.append(_text(shown, x(start) + width / 2, y + 4, anchor="middle", class_="inside"))
                start += value
        return found

    return _rows_figure(
        figure.rows,
        [(part.name, part.colour) for part in figure.parts] if len(figure.parts) > 1 else [],
        x_label=figure.x_label,
        most=figure.most or _nice_end(max(sums, default=1.0)),
        row_height=40,
        draw=draw,
        summary=figure.summary,
    )


def _dot(dots: Dots, number: int, row: int, y: float, x: _Scale) -> list[Html]:
    spread: Spread | None = dots.values[row]
    if spread is None:
        return []
    y += 6 * (2 * number - 1)
    bar = _stroke(x(max(spread.low, 0)), y, x(min(spread.high, x.high)), y, f"line {_class(dots.colour)}")
    return [bar, _marker(dots.colour, x(spread.best), y)]


def _rows_figure(
    rows: Sequence[str],
    names: Sequence[tuple[str, int]],
    *,
    x_label: str,
    most: float,
    row_height: float,
    draw: Callable[[int, float, _Scale], Sequence[Html | list[Html]]],
    summary: str,
) -> Html:
    legend, top = _legend(names)
    shown = [row if len(row) <= _MOST_LETTERS else row[: _MOST_LETTERS - 1] + "…" for row in rows]
    left = 14 + _LETTER * max((len(row) for row in shown), default=0)
    bottom = top + row_height * len(rows)
    x = _Scale(0, most, left, _WIDTH - _RIGHT)
    content: list[Html] = _bottom_axis(x, top, bottom, x_label)
    for number, name in enumerate(shown):
        middle = top + row_height * (number + 0.5)
        content.append(_text(name, left - 8, middle + 4, anchor="end"))
        for part in draw(number, middle, x):
            content += [part] if isinstance(part, Html) else part
    return _svg(bottom + 46, summary, legend, content)
