"""Timed points: rows grouped by point, the range they span, and what a latency model says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsim.latency import AffineLatency, ValidRange
from profiles.rows import Phase, Point, Row

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """The timed points of one phase and degree: medians over repeats."""

    points: tuple[Point, ...]
    step_s: Floats
    comm_share: tuple[float | None, ...]

    def column(self, name: str) -> Floats:
        """Return a column of the points, shape (n,)."""
        values: list[float] = [getattr(point, name) for point in self.points]
        return np.array(values, dtype=np.float64)

    @property
    def tokens(self) -> Floats:
        """Tokens that each step computes for prompts, shape (n,)."""
        return self.column("requests") * self.column("prompt_tokens")

    def only(self, keep: NDArray[np.bool_]) -> Timed:
        """Return the points where `keep` holds."""
        chosen = np.flatnonzero(keep)
        return Timed(
            tuple(self.points[i] for i in chosen), self.step_s[chosen], tuple(self.comm_share[i] for i in chosen)
        )


def timed(rows: Sequence[Row], phase: Phase, tp: int) -> Timed:
    """Return the points of a phase and degree, each the median of its repeats, by length and requests."""
    groups = by_point([row for row in rows if row.point.phase == phase.value and row.point.tp == tp])
    ordered = sorted(groups, key=lambda p: (p.prompt_tokens, p.cached_tokens, int(p.context_tokens), p.requests, p))
    shares: list[float | None] = []
    for point in ordered:
        known = [row.comm_s / row.step_s for row in groups[point] if row.comm_s is not None]
        shares.append(float(np.median(known)) if known else None)
    return Timed(
        tuple(ordered),
        np.array([np.median([row.step_s for row in groups[point]]) for point in ordered]),
        tuple(shares),
    )


def by_point(rows: Sequence[Row]) -> dict[Point, list[Row]]:
    """Return the rows of each point."""
    groups: dict[Point, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.point, []).append(row)
    return groups


def valid_range_of(rows: Sequence[Row]) -> ValidRange:
    """Return the range that the rows span."""
    prefill = [row.point for row in rows if row.point.prompt_tokens]
    decode = [row.point for row in rows if row.point.context_tokens]
    decoding = [(p.decode_requests or p.requests, p.context_tokens) for p in decode]
    return ValidRange(
        # A context that decodes is no cached prompt: reading it is timed, computing tokens after it is not.
        chunk_tokens=max((p.prompt_tokens + p.cached_tokens for p in prefill), default=1),
        prefill_tokens=max((p.requests * p.prompt_tokens for p in prefill), default=1),
        decode_requests=max((b for b, _ in decoding), default=1),
        context_tokens=int(max((b * c for b, c in decoding), default=1)),
    )


def predict(latency: AffineLatency, points: Sequence[Point]) -> Floats:
    """Return the model's step times of the points, seconds, shape (n,)."""
    return np.array([predict_one(latency, point) for point in points])


def predict_one(latency: AffineLatency, point: Point) -> float:
    """Return the model's step time of one point, seconds."""
    chunks = [(point.prompt_tokens, point.cached_tokens)] * point.requests if point.prompt_tokens else []
    if point.phase == Phase.PREFILL.value:
        return latency.prefill_s(chunks)
    requests = point.decode_requests or point.requests
    # Contexts of static batches are means, so the total need not be whole.
    a, b = latency.decode_line(requests)
    decode_s = a + b * requests * point.context_tokens
    if not chunks:
        return decode_s
    return latency.mixed_s(chunks, requests, round(requests * point.context_tokens))
