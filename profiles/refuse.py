"""What no fit is made of, by line: rows below the datasheet, rows that fall, fits that break the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from dsim.contract import ViolationKind, find_violations
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import LatencyModel
from dsim.model import Model
from profiles.rows import Phase, Point, Row, bound_s
from profiles.timed import Timed, by_point, timed

#: A larger step may be this much faster, plus three times the spread of repeats: engines pad and tile.
FALL: Final = 0.1
_SPREADS = 3.0
_SHOWN = 8


def refuse_rows_below_bound(rows: Sequence[Row], file: str, *, model: Model, gpu: Gpu, host_step_s: float) -> None:
    """Refuse rows whose kernels would be faster than the datasheet allows.

    Raises:
        InputError: there are some.
    """
    bounds = [(row, bound_s(row.point, model=model, gpu=gpu)) for row in rows]
    below = [(row, bound) for row, bound in bounds if row.step_s - host_step_s < bound]
    if not below:
        return
    row, bound = max(below, key=lambda pair: pair[1] / pair[0].step_s)
    less = f" less {host_step_s * 1e3:g} ms of host work" if host_step_s else ""
    raise InputError(
        f"{file}:{row.line}",
        f"{row.point}{less} is below the {bound * 1e3:.3g} ms that {gpu.name}'s datasheet allows {model.name} "
        f"({len(below)} such rows, {lines_of([row for row, _ in below])})",
        name="step_s",
        value=row.step_s,
        hint="check model, gpu, dtype and tp of the rows",
    )


def refuse_falling(rows: Sequence[Row], tp: int, file: str) -> None:
    """Refuse points that get faster with more tokens, context or requests, beyond noise and beyond one bad point.

    Raises:
        InputError: some do.
    """
    for phase in (Phase.PREFILL, Phase.DECODE):
        points = timed(rows, phase, tp)
        most = FALL + _SPREADS * _noise([row for row in rows if row.point in set(points.points)])
        step_s = dict(zip(points.points, points.step_s.tolist(), strict=True))
        for order in _orders(points):
            falls = [(a, b) for a, b in combinations(order, 2) if step_s[b] < (1 - most) * step_s[a]]
            # One point that is off bends no fit (Huber): without it nothing falls.
            if not falls or any(all(point in pair for pair in falls) for point in order):
                continue
            a, b = min(falls, key=lambda pair: step_s[pair[1]] / step_s[pair[0]])
            both = [row for row in rows if row.point in (a, b)]
            raise InputError(
                f"{file}:{next(row.line for row in both if row.point == b)}",
                f"{b} takes {step_s[b] * 1e3:.3g} ms, {1 - step_s[b] / step_s[a]:.0%} less than {a} with "
                f"{step_s[a] * 1e3:.3g} ms ({lines_of(both)})",
                hint="larger steps are never faster: time these points again, or leave them out",
            )


def refuse_violations(
    latency: LatencyModel, rows: Sequence[Row], tp: int, file: str, *, model: Model, gpu: Gpu
) -> None:
    """Refuse a fit that breaks the contract of latency models, with the rows behind it.

    Raises:
        InputError: it does.
    """
    for violation in find_violations(latency, model=model, gpu=gpu, tp=tp):
        phase_rows = [row for row in rows if row.point.phase == violation.phase and row.point.tp == tp]
        if violation.kind is ViolationKind.BELOW_BOUND:
            # Those that come nearest to the datasheet pull the fit below it.
            phase_rows.sort(key=lambda row: row.step_s / bound_s(row.point, model=model, gpu=gpu))
            phase_rows = phase_rows[:3]
        raise InputError(
            f"{file}:{phase_rows[0].line}",
            f"the fit of tp {tp} breaks the contract of latency models: {violation.detail} ({lines_of(phase_rows)})",
            hint="check model, gpu and units of these rows, or time more points",
        )


def lines_of(rows: Sequence[Row]) -> str:
    """Return the lines of the rows in words.

    >>> lines_of([Row(Point("prefill", 1, 1, 64), 0.1, line=line) for line in (7, 3)])
    'lines 3, 7'
    """
    lines = sorted(row.line for row in rows)
    shown = ", ".join(str(line) for line in lines[:_SHOWN]) + (", ..." if len(lines) > _SHOWN else "")
    return ("line " if len(lines) == 1 else "lines ") + shown


def _orders(points: Timed) -> Iterator[list[Point]]:
    """Yield the points that differ in one size only, by that size."""
    for size in ("requests", "prompt_tokens", "cached_tokens", "context_tokens"):
        others = [name for name in ("requests", "prompt_tokens", "cached_tokens", "context_tokens") if name != size]
        groups: dict[tuple[float, ...], list[Point]] = {}
        for point in points.points:
            groups.setdefault(tuple(getattr(point, name) for name in others), []).append(point)
        for group in groups.values():
            if len(group) > 2:
                yield sorted(group, key=lambda point: float(getattr(point, size)))


def _noise(rows: Sequence[Row]) -> float:
    """Return the usual spread of a point's timings, as a share of them; 0 where nothing shows it."""
    spreads = []
    for repeats in by_point(rows).values():
        times = np.array([row.step_s for row in repeats])
        within = [row.spread_s / row.step_s for row in repeats if row.spread_s is not None]
        between = float(times.std(ddof=1) / times.mean()) if len(times) > 1 else 0.0
        spreads.append(max([between, *within]))
    return float(np.median(spreads)) if spreads else 0.0
