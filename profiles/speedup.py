"""K: how much faster a step is at a larger tensor parallel degree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dsim.latency import AffineLatency
from dsim.profile_fit import Fit, SpeedUp
from profiles.rows import Phase, Point, Row
from profiles.timed import Timed, predict_one, timed

#: Context of a decoding request at which K of a batch is taken, or the nearest that both degrees timed.
CONTEXT_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Degree:
    """The fit of one degree with its mean relative error by phase."""

    latency: AffineLatency
    errors: Mapping[str, float]


def speed_ups(degrees: Mapping[int, Degree], rows: Sequence[Row]) -> list[SpeedUp]:
    """Return K against the smallest degree at every number of tokens and every batch that both timed.

    Low and high are K / (1 + w) and K (1 + w), w twice the root of the sum of both fits' squared mean errors.
    """
    base = min(degrees)
    result = []
    for tp in sorted(set(degrees) - {base}):
        for phase in (Phase.PREFILL, Phase.DECODE):
            here, there = timed(rows, phase, tp), timed(rows, phase, base)
            width = 2 * math.hypot(*(degrees[n].errors.get(phase.value, 0.0) for n in (base, tp)))
            for point in _shared(here, there, base):
                k = predict_one(degrees[base].latency, replace(point, tp=base)) / predict_one(
                    degrees[tp].latency, point
                )
                fit = Fit(k / (1 + width), k, k * (1 + width))
                comm = here.comm_share[here.points.index(point)]
                result.append(SpeedUp(tp, base, phase.value, _size(point), fit, comm, point.context_tokens or None))
    return result


def _shared(here: Timed, there: Timed, base: int) -> list[Point]:
    """Return a point per size that both degrees timed: with the fewest prompts, or the context nearest to the usual."""
    known = set(there.points)
    chosen: dict[int, Point] = {}
    for point in sorted(here.points, key=_preference):
        if replace(point, tp=base) in known and not point.cached_tokens:
            chosen.setdefault(_size(point), point)
    return [chosen[size] for size in sorted(chosen)]


def _preference(point: Point) -> tuple[float, int]:
    if point.phase == Phase.PREFILL.value:
        return 0.0, point.requests
    return abs(math.log(point.context_tokens / CONTEXT_TOKENS)), point.requests


def _size(point: Point) -> int:
    return point.requests * point.prompt_tokens if point.phase == Phase.PREFILL.value else point.requests
