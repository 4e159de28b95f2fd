"""Lines that no step of a latency model lies below: what bounds know of its times."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from dsim.analytic import AnalyticLatency
from dsim.latency import AffineLatency, AffinePrefill, LatencyModel
from dsim.sends import SendingLatency, affine_with_sends
from placement.floor import affine_floor

Floats = NDArray[np.float64]

#: Largest decode batch looked at where nothing limits it; beyond it a latency model is taken as linear.
_LARGEST_BATCH = 4096


def decode_steps_s(latency: AffineLatency, steps: float, launches: float, contexts: float, requests: float) -> float:
    """Return the least step time of `steps` tokens of a request in at least `launches` launches.

    A launch of B costs at least f(B) + b·S with f convex (the lower hull over all batch sizes); by Jensen K launches of
    N tokens cost at least K·f(N/K), and K may be larger than the fewest where smaller batches are cheaper a token.
    """
    if steps <= 0:
        return 0.0
    sizes, floor_s, slope_s = decode_hull(latency, requests)
    mean_batch = min(max(steps / launches, 1.0), requests)
    if mean_batch > sizes[-1]:
        growth_s = float((floor_s[-1] - floor_s[-2]) / (sizes[-1] - sizes[-2])) if len(sizes) > 1 else 0.0
        floor = float(floor_s[-1]) + (mean_batch - float(sizes[-1])) * growth_s
    else:
        floor = float(np.interp(mean_batch, sizes, floor_s))
    smaller = sizes <= mean_batch
    per_token_s = min(floor / mean_batch, float(np.min(floor_s[smaller] / sizes[smaller])))
    return steps * per_token_s + slope_s * contexts


@functools.lru_cache(maxsize=256)
def decode_hull(latency: AffineLatency, requests: float) -> tuple[Floats, Floats, float]:
    """Return the lower convex hull (sizes, seconds) of a step without context over batch sizes, and the least slope."""
    largest = int(min(requests, max(_LARGEST_BATCH, 2 * latency.threshold_requests)))
    sizes = np.arange(1, largest + 1, dtype=np.float64)
    small, large = (d.constant_s + np.array([d.requests_s(n) for n in sizes]) for d in (latency.small, latency.large))
    seconds = np.where(sizes < latency.threshold_requests, small, large)
    hull: list[int] = []
    for i in range(largest):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (seconds[b] - seconds[a]) * (i - a) < (seconds[i] - seconds[a]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    slope_s = min(latency.small.per_context_token_s, latency.large.per_context_token_s)
    return sizes[hull], seconds[hull], slope_s


def affine(latency: LatencyModel) -> LatencyModel:
    """Return the model itself, or an affine one below it where it is analytic."""
    if isinstance(latency, SendingLatency):
        below = affine(latency.model)
        return affine_with_sends(below, latency.sends) if isinstance(below, AffineLatency) else latency
    return affine_floor(latency) if isinstance(latency, AnalyticLatency) else latency


def is_bounded(latency: LatencyModel) -> TypeGuard[AffineLatency]:
    """Return whether the fluid bounds know this form and its coefficients are such that they hold."""
    if not isinstance(latency, AffineLatency):
        return False
    p = latency.prefill
    numbers = [p.constant_s, p.per_token_s, p.per_token_squared_s, p.per_request_s, *(slope for _, slope in p.bends)]
    for d in (latency.small, latency.large):
        numbers += [d.constant_s, d.per_context_token_s, d.per_request_s, *(slope for _, slope in d.bends)]
    return min(numbers) >= 0


def prefill_lines(prefill: AffinePrefill) -> list[tuple[float, float]]:
    """Return lines (a, b), a and b >= 0: constant and tokens of a prefill step never take less than a + b * tokens.

    They are the edges of the lower convex hull that meet the axis at or above zero, and the steepest line through zero.
    """
    corners = [(0.0, prefill.constant_s)]
    corners += [(float(bend), prefill.constant_s + prefill.tokens_s(bend)) for bend, _ in prefill.bends]
    last_s = _last_slope_s(prefill)
    lines = {(prefill.constant_s, prefill.least_per_token_s)}
    slopes = {*_hull_slopes(corners, last_s), min([last_s, *(seconds / tokens for tokens, seconds in corners[1:])])}
    for slope_s in sorted(slopes):
        if 0 <= slope_s <= last_s:
            constant_s = min(seconds - slope_s * tokens for tokens, seconds in corners)
            if constant_s >= 0:
                lines.add((constant_s, slope_s))
    return sorted(lines)


def _last_slope_s(prefill: AffinePrefill) -> float:
    return prefill.bends[-1][1] if prefill.bends else prefill.per_token_s


def _hull_slopes(corners: list[tuple[float, float]], last_s: float) -> list[float]:
    """Return the slopes of the lower convex hull of a line through corners that goes on with slope `last_s`."""
    hull = [corners[0]]
    while later := [corner for corner in corners if corner[0] > hull[-1][0]]:
        start = hull[-1]
        hull.append(min(later, key=lambda corner: ((corner[1] - start[1]) / (corner[0] - start[0]), -corner[0])))
    return [*((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(hull)), last_s]


def added_lines(latency: LatencyModel, cost_alone_s: float) -> list[tuple[float, float]]:
    """Return lines (a, b): x prompt tokens computed in any step lengthen it by at least b * x - a, with 0 <= a.

    Of an affine model they are tangents from below to the curve of a prefill step without its constant. Of another one
    the least slope of all is known only: what tokens cost beside others may be less than what they cost alone.

    Args:
        cost_alone_s: what a step without decoding requests takes beside these tokens: a is no more than that, so that
            such a step is covered as well.
    """
    below = affine(latency)
    if not is_bounded(below):
        return []
    prefill = below.prefill
    if not isinstance(latency, AffineLatency):
        return [(0.0, prefill.least_per_token_s)]
    corners = [(0.0, 0.0), *((float(bend), prefill.tokens_s(bend)) for bend, _ in prefill.bends)]
    last_s = _last_slope_s(prefill)
    # The tangent that a step without decoding requests allows, too.
    steepest_s = min([last_s, *((seconds + cost_alone_s) / tokens for tokens, seconds in corners[1:])])
    slopes = {*_hull_slopes(corners, last_s), steepest_s}
    lines = {(max(b * x - seconds for x, seconds in corners), b) for b in slopes if 0 <= b <= last_s}
    return sorted((max(a, 0.0), b) for a, b in lines if a <= cost_alone_s * (1 + 1e-12))
