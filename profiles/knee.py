"""Lm: from how many prompt tokens on a prefill step is compute-bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import chi2

from dsim.latency import AffineLatency
from dsim.profile_fit import Fit

Floats = NDArray[np.float64]

#: Without a knee, Lm is where a step reaches this share of the best rate: with DistServe's coefficients that puts a 13B
#: model on an A100 at 711 tokens, where the paper says "about 512".
SATURATED_SHARE: Final = 0.8
#: Left of a knee a token costs at most this share of what it costs to the right.
_SLOPE_SHARE = 0.6
#: One bend tells the whole story where its fit is within this error (root mean square).
_ONE_BEND = 0.04
#: A rate this near the best is the best.
_NEARLY = 0.97
#: Relative error that timings have in any case.
_NOISE = 1e-3
_GRID = 400


@dataclass(frozen=True, slots=True)
class Saturation:
    """Lm of one degree.

    Args:
        tokens: Lm and its 95 % interval.
        method: `knee` of a segmented fit; `share` where the times have no knee: tokens at 80 % of the best rate.
    """

    tokens: Fit
    method: str


def saturation_of(
    requests: Floats, prompt_tokens: Floats, step_s: Floats, *, latency: AffineLatency | None = None
) -> Saturation | None:
    """Return Lm of prefill steps without cached context, None where the points say nothing about it.

    A continuous line with one bend (and squared tokens) is fitted for every position of the bend; the interval is that
    of the profile likelihood. If no bend explains the times significantly better than none, or tokens do not get
    clearly dearer at it, Lm is where the rate reaches 80 % of its best.

    Args:
        requests: shape (n,).
        prompt_tokens: of each request, shape (n,).
        step_s: shape (n,).
        latency: gives the rate where there is no knee; a straight line is fitted where it is None.
    """
    tokens = requests * prompt_tokens
    values = np.unique(tokens)
    if len(values) < 4:
        return None
    knee = _knee(requests, prompt_tokens, step_s, most_error=_ONE_BEND)
    if knee is None:
        # More bends than one: the knee is the one before the rate is at its best.
        rate = tokens / step_s
        rising = tokens <= float(tokens[rate >= _NEARLY * rate.max()].max())
        knee = _knee(requests[rising], prompt_tokens[rising], step_s[rising], most_error=np.inf)
    if knee is not None:
        return Saturation(knee, "knee")
    if latency is None:
        line, residuals = _straight(requests, prompt_tokens, step_s)
        constant_s, per_token_s = float(line[0]), float(line[2])
        return _share(lambda t: constant_s + per_token_s * t, values, float(np.sqrt(np.mean(residuals**2))))
    p = latency.prefill
    chunks = [[(int(t), 0)] * int(r) for r, t in zip(requests, prompt_tokens, strict=True)]
    off = np.array([latency.prefill_s(chunk) for chunk in chunks]) / step_s - 1
    error = float(np.sqrt(np.mean(off**2)))
    return _share(lambda t: p.constant_s + p.per_request_s + p.tokens_s(t), values, error)


def _columns(requests: Floats, prompt_tokens: Floats) -> list[Floats]:
    return [np.ones_like(requests), requests * prompt_tokens**2, requests * prompt_tokens]


def _fitted(columns: list[Floats], step_s: Floats) -> tuple[Floats, Floats]:
    """Return constants >= 0 of the columns and relative residuals."""
    matrix = np.stack(columns, 1) / step_s[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    x, _ = nnls(matrix / scale, np.ones(len(step_s)))
    return x / scale, matrix @ (x / scale) - 1


def _straight(requests: Floats, prompt_tokens: Floats, step_s: Floats) -> tuple[Floats, Floats]:
    return _fitted(_columns(requests, prompt_tokens), step_s)


def _knee(requests: Floats, prompt_tokens: Floats, step_s: Floats, *, most_error: float) -> Fit | None:
    """Return the bend of the segmented fit with its interval, None where there is none worth the name."""
    tokens, n = requests * prompt_tokens, len(step_s)
    values = np.unique(tokens)
    if len(values) < 4 or n < 5:
        return None
    columns = _columns(requests, prompt_tokens)

    def loss(residuals: Floats) -> float:
        return float(np.sum(residuals**2)) + n * _NOISE**2

    grid = np.geomspace(values[0], values[-2], _GRID)
    fits = [_fitted([*columns, np.maximum(tokens - bend, 0)], step_s) for bend in grid]
    losses = np.array([loss(residuals) for _, residuals in fits])
    best = int(np.argmin(losses))
    x, residuals = fits[best]
    straight = loss(_straight(requests, prompt_tokens, step_s)[1])
    clearly = straight > losses[best] * np.exp(2 * np.log(n) / n)
    bends = x[3] > 0 and x[2] <= _SLOPE_SHARE * (x[2] + x[3])
    if not clearly or not bends or np.sqrt(np.mean(residuals**2)) > most_error:
        return None
    # Profile likelihood with estimated variance: freedom * log(loss) rises by chi-squared of one degree of freedom.
    cut = float(chi2.ppf(0.95, 1)) / max(n - 4, 1)
    inside = grid[np.log(losses / losses[best]) <= cut]
    step, bend = float(grid[1] / grid[0]), float(grid[best])
    return Fit(float(inside[0]) / step, bend, float(inside[-1]) * step)


def share_tokens(constant_s: float, per_token_s: float, share: float = SATURATED_SHARE) -> float:
    """Return the tokens at which a straight line's rate is this share of its best, 1 / per_token_s.

    >>> round(share_tokens(0.0181, 0.0001019))
    711
    """
    return share / (1 - share) * constant_s / per_token_s


def _share(step_s: Callable[[float], float], values: Floats, error: float) -> Saturation:
    grid = np.geomspace(1, 64 * values[-1], 4000)
    rate = grid / np.array([step_s(t) for t in grid])
    peak = float(rate.max())

    def at(share: float) -> float:
        return float(grid[int(np.argmax(rate >= min(share, 0.99) * peak))])

    # An error of the step moves the share of the rate that is reached by as much.
    wide = min(max(2 * error, 0.05), 0.15)
    return Saturation(Fit(at(SATURATED_SHARE - wide), at(SATURATED_SHARE), at(SATURATED_SHARE + wide)), "share")
