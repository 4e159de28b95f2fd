"""What steps of the affine latency model take: its arithmetic, without the nouns, so that it can be compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsim.latency import AffineLatency, Bends, Chunk


def bent_s(amount: float, slope_s: float, bends: Bends) -> float:
    """Return seconds of `amount` units on a continuous line that starts with `slope_s` a unit and bends.

    >>> bent_s(10, 1.0, ()), bent_s(10, 1.0, ((4, 3.0),))
    (10.0, 22.0)
    """
    seconds, start = 0.0, 0
    for bend, next_slope_s in bends:
        if amount <= bend:
            break
        seconds += slope_s * (bend - start)
        start, slope_s = bend, next_slope_s
    return seconds + slope_s * (amount - start)


def prefill_s(model: AffineLatency, chunks: Sequence[Chunk]) -> float:
    """Return seconds of a prefill step."""
    tokens = squares = cached = 0
    for t, s in chunks:
        tokens += t
        squares += t * (t + 2 * s)
        cached += s
    p = model.prefill
    bends = p.bends
    tokens_s = bent_s(tokens, p.per_token_s, bends) if bends else p.per_token_s * tokens
    return (
        p.constant_s
        + tokens_s
        + p.per_token_squared_s * squares
        + model.small.per_context_token_s * cached
        + p.per_request_s * len(chunks)
    )


def decode_line(model: AffineLatency, requests: int) -> tuple[float, float]:
    """Return (a, b) of a decode step of `requests`: a + b * context_tokens seconds."""
    d = model.small if requests < model.threshold_requests else model.large
    bends = d.bends
    requests_s = bent_s(requests, d.per_request_s, bends) if bends else d.per_request_s * requests
    return d.constant_s + requests_s, d.per_context_token_s


def mixed_s(model: AffineLatency, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
    """Return seconds of a mixed step: both parts less the constant they share, never less than either part."""
    if not requests:
        return prefill_s(model, chunks)
    a, b = decode_line(model, requests)
    decode_s = a + b * context_tokens
    if not chunks:
        return decode_s
    alone_s = prefill_s(model, chunks)
    shared_s = min(model.prefill.constant_s, model.small.constant_s)
    return max(alone_s + decode_s - shared_s, alone_s, decode_s)
