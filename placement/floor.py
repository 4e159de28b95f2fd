"""Affine models that are nowhere above an analytic one, so that bounds on the affine form hold for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsim.analytic import AnalyticLatency
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends

#: (constant, slope) of a line, both >= 0.
Line = tuple[float, float]

#: Lines of an envelope at most: bounds try every pair of its bends.
_MOST_LINES = 8
#: Between the amounts looked at, at most 2 % apart, a curve lies below its chord by less than this share.
_BELOW_CHORD = 1e-3
_LARGEST_BATCH, _LARGEST_TOKENS = 4096, 1 << 17


@functools.lru_cache(maxsize=64)
def affine_floor(latency: AnalyticLatency) -> AffineLatency:
    """Return an affine model none of whose steps takes longer.

    Its tokens start with the least slope that they have anywhere, so tokens added to any step cost that at least.
    """
    requests = int(min(latency.valid_range.decode_requests, _LARGEST_BATCH))
    constant_s, per_request_s, bends = _below(lambda n: latency.decode_s(n, 0), list(range(1, requests + 1)))
    slope_s = min(latency.context_slope_s, latency.cached_slope_s)
    decode = AffineDecode(constant_s, slope_s, per_request_s, bends)
    tokens = [*range(1, 513), *(int(n) for n in np.geomspace(513, _LARGEST_TOKENS, 300))]
    constant_s, per_token_s, bends = _below(latency.products_s, tokens, from_least_slope=True)
    return AffineLatency(
        prefill=AffinePrefill(constant_s, per_token_s, latency.token_pair_s / 2, bends=bends),
        small=decode,
        large=decode,
        threshold_requests=1,
        valid_range=latency.valid_range,
    )


def _below(
    curve: Callable[[int], float], amounts: list[int], *, from_least_slope: bool = False
) -> tuple[float, float, Bends]:
    """Return constant, slope and bends of a convex line that is nowhere above a rising curve."""
    x = np.array(amounts, dtype=np.float64)
    y = (1 - _BELOW_CHORD) * np.array([curve(n) for n in amounts])
    least = float(np.min(np.diff(y) / np.diff(x), initial=math.inf)) if len(x) > 1 else 0.0
    least = max(least, 0.0)
    first = (float(np.min(y - least * x)), least)
    lines = [line for line in _edges(x, y) if line[0] >= 0]
    if from_least_slope:
        lines = [line for line in lines if line[0] < first[0] and line[1] > first[1]]
    if from_least_slope or not lines:
        lines.append((max(first[0], 0.0), first[1]))
    return _envelope(lines)


def _edges(x: NDArray[np.float64], y: NDArray[np.float64]) -> list[Line]:
    """Return lines through a few edges of the lower convex hull: each is nowhere above a point."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    edges = list(pairwise(hull))
    picked = {round(i * (len(edges) - 1) / (_MOST_LINES - 1)) for i in range(_MOST_LINES)} if edges else set()
    lines = []
    for a, b in (edges[i] for i in sorted(picked)):
        slope = float((y[b] - y[a]) / (x[b] - x[a]))
        lines.append((float(y[a] - slope * x[a]), slope))
    return lines


def _envelope(lines: list[Line]) -> tuple[float, float, Bends]:
    """Return the largest of the lines as one that bends; a bend between whole numbers is put off to the next one."""
    constant, slope = current = max(lines)
    bends: list[tuple[int, float]] = []
    while steeper := [line for line in lines if line[1] > current[1]]:
        at, line = min(((current[0] - line[0]) / (line[1] - current[1]), line) for line in steeper)
        start = max(math.ceil(at), bends[-1][0] + 1 if bends else 1)
        bends.append((start, line[1]))
        current = line
    return constant, slope, tuple(bends)
