"""What the instances of one run did in a window: their steps and transfers, who waited, and KV use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsim.errors import InputError
from experiments.plots.data import Floats
from experiments.plots.runlog import ROLES, Instance, Level, LoggedStep, RunLog
from experiments.plots.style import (
    LINES,
    Legended,
    colour_of,
    finish,
    new_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Instances that get lanes; instances that get lines of their own below.
_MOST_LANES, _MOST_LINES = 16, 6
#: Steps in the window where none is asked for.
_STEPS = 60
#: Bars of a lane that have edges.
_MOST_EDGED = 150
#: What a lane shows: colour and hatch, told apart without colour too.
_LOOKS = {
    "prefill": (colour_of(0), ""),
    "decode": (colour_of(2), "..."),
    "prefill and decode": (colour_of(4), "xxx"),
    "KV transfer": (colour_of(3), ""),
}


#: Colours of a role's lines, the first that of its bars.
_HUES = {"P": (0, 5, 6), "D": (2, 1, 4, 3, 6), "C": (0, 1, 2, 3, 4, 5)}
_WAITING = {"P": "waiting\nfor prefill", "D": "waiting\nto decode", "C": "waiting"}


@dataclass(frozen=True, slots=True)
class Span:
    """One bar: what it is, and from when to when."""

    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars that do not overlap, in one row; the first of an instance has its label."""

    label: str
    spans: tuple[Span, ...]


def timeline_figure(log: RunLog, *, window_s: tuple[float, float] | None = None, title: str = "") -> Figure:
    """Return a figure of lanes for each instance, requests that wait, and KV use below, over a window of the run.

    Bars and KV are exactly what was logged; `RunLog.waiting` says how exact the queues are. More than a few
    instances of a role share one line below: all that wait, and their KV use together.

    Args:
        window_s: start and end; by default some sixty steps in the middle of the run.

    Raises:
        InputError: the window is empty, or lies outside the run.
    """
    start_s, end_s = window_of(log) if window_s is None else _checked(log, window_s)
    shown = log.instances[:_MOST_LANES]
    lanes = [lane for instance in shown for lane in lanes_of(log, instance, start_s, end_s)]
    lines = _lines(log)
    roles = list(dict.fromkeys(members[0].role for _, members in lines))
    heights = [0.35 + 0.24 * len(lanes), *([1.0] * len(roles)), 1.2]
    figure = new_figure(width=9.6, height=sum(heights) + 0.5)
    grid = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    handles = _draw_lanes(grid[0], lanes)
    for number, (label, members) in enumerate(lines):
        role = members[0].role
        among = sum(1 for _, others in lines[:number] if others[0].role == role)
        colour = colour_of(_HUES[role][among % len(_HUES[role])])
        style: dict[str, Any] = {"color": colour, "linestyle": LINES[among % len(LINES)], "linewidth": 1.4}
        waiting = total([log.waiting(member) for member in members]).window(start_s, end_s)
        grid[1 + roles.index(role)].step(*waiting, where="post", **style)
        taken = total([log.kv_blocks(member) for member in members]).window(start_s, end_s)
        share = 100 / max(1, sum(log.summary["kv_blocks"][ROLES[member.role]] for member in members))
        style["linestyle"] = LINES[number % len(LINES)]
        handles += grid[-1].step(taken[0], taken[1] * share, where="post", label=label, **style)
    for role, axes in zip(roles, grid[1:-1], strict=True):
        _finish(axes, f"{_WAITING[role]}\n(requests)")
        axes.set_ylim(bottom=0, top=max(1.05, axes.get_ylim()[1]))
        axes.locator_params(axis="y", integer=True, nbins=4)
    _finish(grid[-1], "KV taken\n(%)")
    grid[-1].set_ylim(-2, 102)
    grid[-1].set_xlim(start_s, end_s)
    grid[-1].set_xlabel("time since the start of the run (s)")
    more = len(log.instances) - len(shown)
    finish(figure, f"{title}{f' (lanes of {len(shown)} of {len(shown) + more} instances)' if more else ''}", handles)
    return figure


def _finish(axes: Axes, label: str) -> None:
    tidy(axes)
    axes.set_ylabel(label, fontsize="small")


def window_of(log: RunLog) -> tuple[float, float]:
    """Return a window in the middle of the run with some sixty steps of the busiest instance."""
    per_instance: dict[Instance, int] = {}
    for step in log.steps:
        per_instance[step.instance] = per_instance.get(step.instance, 0) + 1
    width_s = log.end_s * min(1.0, _STEPS / max(per_instance.values(), default=1))
    digit = 10.0 ** np.floor(np.log10(width_s)) if width_s > 0 else 1.0
    width_s = float(np.ceil(width_s / digit) * digit)
    start_s = max(0.0, float(np.floor((log.end_s - width_s) / 2 / digit) * digit))
    return start_s, start_s + width_s


def lanes_of(log: RunLog, instance: Instance, start_s: float, end_s: float) -> list[Lane]:
    """Return the rows of an instance in a window: transfers to it, then its steps, micro-batches apart."""
    lanes = []
    if instance.role == "D":
        spans = [Span("KV transfer", *span) for span in sorted(log.transfers(instance.index))]
        lanes.append(Lane(f"{instance.label} KV in", tuple(_inside(spans, start_s, end_s))))
    own = [step for step in log.steps if step.instance == instance]
    rows = _rows([step for step in own if step.end_s > start_s and step.launch_s < end_s])
    for number, row in enumerate(rows or [[]]):
        label = instance.label if len(rows) <= 1 else f"{instance.label} ({number + 1})"
        lanes.append(Lane(label, tuple(_inside([_span(step) for step in row], start_s, end_s))))
    return lanes


def total(levels: Sequence[Level]) -> Level:
    """Return the sum of levels."""
    if len(levels) == 1:
        return levels[0]
    at_s = np.unique(np.concatenate([level.at_s for level in levels]))
    return Level(at_s, np.sum([_values(level, at_s) for level in levels], axis=0))


def _values(level: Level, at_s: Floats) -> Floats:
    if not len(level.at_s):
        return np.zeros(len(at_s))
    place = np.searchsorted(level.at_s, at_s, side="right")
    return np.concatenate([[0.0], level.value])[place]


def _rows(steps: Sequence[LoggedStep]) -> list[list[LoggedStep]]:
    """Return the steps in rows in which none overlap: by micro-batch or loop; prefills wherever there is room."""
    rows: list[list[LoggedStep]] = []
    if steps and steps[0].instance.role != "P":
        for part in sorted({step.part for step in steps}):
            rows.append([step for step in steps if step.part == part])
        return rows
    for step in steps:
        free = next((row for row in rows if row[-1].end_s <= step.launch_s), None)
        if free is None:
            rows.append([step])
        else:
            free.append(step)
    return rows


def _span(step: LoggedStep) -> Span:
    both = step.prefill and step.decode
    return Span("prefill and decode" if both else "prefill" if step.prefill else "decode", step.launch_s, step.end_s)


def _inside(spans: Sequence[Span], start_s: float, end_s: float) -> Iterator[Span]:
    """Yield the spans that have a part in the window, cut to it."""
    for span in spans:
        if span.end_s > start_s and span.start_s < end_s:
            yield Span(span.what, max(span.start_s, start_s), min(span.end_s, end_s))


def _draw_lanes(axes: Axes, lanes: Sequence[Lane]) -> list[Legended]:
    from matplotlib.patches import Patch

    tidy(axes)
    axes.grid(visible=False, axis="y")
    used = []
    for what, (colour, hatch) in _LOOKS.items():
        for row, lane in enumerate(lanes):
            ranges = [(span.start_s, span.end_s - span.start_s) for span in lane.spans if span.what == what]
            if ranges:
                used.append(what)
                # Many thin bars would be all edge; transfers are thinner than a line, and shown all the same.
                thin = what == "KV transfer"
                edge: dict[str, Any] = {"edgecolor": colour if thin else "white", "linewidth": 1.0 if thin else 0.6}
                if len(ranges) > _MOST_EDGED and not thin:
                    edge = {"edgecolor": colour, "linewidth": 0.0}
                axes.broken_barh(ranges, (row - 0.38, 0.76), facecolor=colour, hatch=None if thin else hatch, **edge)
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes], fontsize="small")
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=what)
        for what, (colour, hatch) in _LOOKS.items()
        if what in used
    ]


def _lines(log: RunLog) -> list[tuple[str, list[Instance]]]:
    """Return the lines below the lanes: label and the instances that it sums up."""
    if len(log.instances) <= _MOST_LINES:
        return [(instance.label, [instance]) for instance in log.instances]
    by_role: dict[str, list[Instance]] = {}
    for instance in log.instances:
        by_role.setdefault(instance.role, []).append(instance)
    return [(f"all {len(members)} {ROLES[role]} instances", members) for role, members in by_role.items()]


def _checked(log: RunLog, window_s: tuple[float, float]) -> tuple[float, float]:
    start_s, end_s = window_s
    if not start_s < end_s:
        raise InputError("--window", "must start before it ends", value=f"{start_s:g},{end_s:g}", hint="as in 10s,12s")
    if start_s >= log.end_s or end_s <= 0:
        hint = f"the run lasts {log.end_s:g} s"
        raise InputError("--window", "lies outside the run", value=f"{start_s:g},{end_s:g}", hint=hint)
    return start_s, end_s
