"""Lm: from how many prompt tokens on a prefill step is compute-bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import chi2

from dsim.latency import AffineLatency, Bends
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
#: How sharp a knee may be, with how many positions of it to try.
_SHARPNESS = {math.inf: 400, 8.0: 120, 4.0: 120, 3.0: 120, 2.0: 120}


@dataclass(frozen=True, slots=True)
class Saturation:
    """Lm of one degree.

    Args:
        tokens: Lm and its interval; an end is 0 or infinite where the timed tokens do not reach it.
        method: `knee` of a segmented fit, with a 95 % interval; `share` where the times have no knee: tokens at 80 % of
            the best rate; `not-reached` where that is beyond the timed tokens: only `low` is known.
    """

    tokens: Fit
    method: str


@dataclass(frozen=True, slots=True, eq=False)
class Prefills:
    """Timed prefill steps without cached context: prompts, tokens of each and seconds, all of shape (n,)."""

    requests: Floats
    prompt_tokens: Floats
    step_s: Floats

    @property
    def tokens(self) -> Floats:
        """Tokens of each step."""
        return self.requests * self.prompt_tokens

    def only(self, keep: NDArray[np.bool_]) -> Prefills:
        """Return the steps where `keep` holds."""
        return Prefills(self.requests[keep], self.prompt_tokens[keep], self.step_s[keep])

    def fitted(self, hinge: Floats | None = None) -> tuple[Floats, Floats]:
        """Return constants >= 0 of a line in tokens (constant, squares, tokens, hinge) and relative residuals."""
        columns = [np.ones_like(self.requests), self.tokens * self.prompt_tokens, self.tokens]
        matrix = np.stack(columns if hinge is None else [*columns, hinge], 1) / self.step_s[:, None]
        scale = np.linalg.norm(matrix, axis=0)
        scale[scale == 0] = 1
        x, _ = nnls(matrix / scale, np.ones(len(self.step_s)))
        return x / scale, matrix @ (x / scale) - 1

    def loss(self, residuals: Floats) -> float:
        """Return the squared errors, never less than timings have."""
        return float(np.sum(residuals**2)) + len(residuals) * _NOISE**2


def saturation_of(
    requests: Floats, prompt_tokens: Floats, step_s: Floats, *, latency: AffineLatency | None = None
) -> Saturation | None:
    """Return Lm of prefill steps without cached context, None where the points say nothing about it.

    A continuous line with one bend (and squared tokens) is fitted for every position of the bend, sharp and rounded
    ones; the interval is that of the profile likelihood. If no bend explains the times significantly better than none,
    or tokens do not get clearly dearer at it, Lm is where the rate reaches 80 % of its best.

    Args:
        requests: shape (n,).
        prompt_tokens: of each request, shape (n,).
        step_s: shape (n,).
        latency: gives the rate where there is no knee; a straight line is fitted where it is None.
    """
    steps = Prefills(requests, prompt_tokens, step_s)
    if len(np.unique(steps.tokens)) < 4:
        return None
    knee = _knee(steps, most_error=_ONE_BEND)
    if knee is None:
        # More bends than one: the knee is the one before the rate is at its best.
        rate = steps.tokens / step_s
        knee = _knee(steps.only(steps.tokens <= steps.tokens[rate >= _NEARLY * rate.max()].max()), most_error=np.inf)
    return _share(steps, latency) if knee is None else Saturation(knee, "knee")


@dataclass(frozen=True, slots=True, eq=False)
class _Trials:
    """Fits with bends of one sharpness at every position of a grid."""

    grid: Floats
    losses: Floats
    sharpness: float

    @property
    def best(self) -> float:
        return float(self.losses.min())

    @property
    def bend(self) -> float:
        return float(self.grid[int(np.argmin(self.losses))])

    def within(self, limit: float) -> tuple[float, float]:
        """Return the first and last position with a loss within the limit, a step of the grid wider.

        0 and infinity where that is the end of the grid: nothing shows how much further they lie.
        """
        inside = np.flatnonzero(self.losses <= limit)
        if not len(inside):
            return math.inf, 0.0
        step = float(self.grid[1] / self.grid[0])
        low = 0.0 if inside[0] == 0 else float(self.grid[inside[0]]) / step
        high = math.inf if inside[-1] == len(self.grid) - 1 else float(self.grid[inside[-1]]) * step
        return low, high


def _knee(steps: Prefills, *, most_error: float) -> Fit | None:
    """Return the bend of the segmented fit with its interval, None where there is none worth the name."""
    values, n = np.unique(steps.tokens), len(steps.step_s)
    if len(values) < 4 or n < 5:
        return None
    trials = list(_trials(steps, float(values[0]), float(values[-2])))
    # Each parameter must pay for itself (BIC): slope, bend and sharpness; the bend twice, as it is searched for.
    worth = math.exp(math.log(n) / n)
    best = min(trials, key=lambda trial: trial.best * (1 if math.isinf(trial.sharpness) else worth))
    straight = steps.loss(steps.fitted()[1])
    clearly = straight > best.best * worth ** (3 if math.isinf(best.sharpness) else 4)
    x, residuals = steps.fitted(hinge(steps.tokens, best.bend, best.sharpness))
    bends = x[3] > 0 and x[2] <= _SLOPE_SHARE * (x[2] + x[3])
    if not clearly or not bends or np.sqrt(np.mean(residuals**2)) > most_error:
        return None
    # Profile likelihood with estimated variance: freedom * log(loss) rises by chi-squared of one degree of freedom.
    cut = float(chi2.ppf(0.95, 1)) / max(n - 4, 1)
    limit = min(trial.best for trial in trials) * math.exp(cut)
    ends = [trial.within(limit) for trial in trials]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    return Fit(min(low, best.bend), best.bend, max(high, best.bend))


def _trials(steps: Prefills, first: float, last: float) -> Iterator[_Trials]:
    for sharpness, positions in _SHARPNESS.items():
        grid = np.geomspace(first, last, positions)
        losses = [steps.loss(steps.fitted(hinge(steps.tokens, bend, sharpness))[1]) for bend in grid]
        yield _Trials(grid, np.array(losses), sharpness)


def hinge(tokens: Floats, bend: float, sharpness: float) -> Floats:
    """Return what a unit of slope beyond a bend adds: flat before it, straight after it, rounded about it.

    >>> hinge(np.array([0.0, 400.0, 600.0]), 500.0, math.inf).tolist()
    [0.0, 0.0, 100.0]
    >>> hinge(np.array([0.0, 500.0, 50000.0]), 500.0, 2.0).round().tolist()
    [0.0, 207.0, 49502.0]
    """
    if math.isinf(sharpness):
        return np.maximum(tokens - bend, 0)
    rounded: Floats = bend * ((1 + (tokens / bend) ** sharpness) ** (1 / sharpness) - 1)
    return rounded


def share_tokens(constant_s: float, per_token_s: float, share: float = SATURATED_SHARE, bends: Bends = ()) -> float:
    """Return the fewest tokens with this share of the best rate of a line that may bend; infinity if none have it.

    >>> round(share_tokens(0.0181, 0.0001019))
    711
    >>> round(share_tokens(0.02, 0.0, bends=((1000, 1e-4),)))  # the best rate is at the bend
    800
    """
    corners = [float(start) for start, _ in bends]
    pieces = list(_pieces(constant_s, per_token_s, bends))
    rates = [corner / (a + b * corner) for (a, b), corner in zip(pieces, corners, strict=False)]
    last = pieces[-1][1]
    wanted = share * max([*rates, 1 / last if last > 0 else math.inf])
    for (a, b), (start, end) in zip(pieces, pairwise([0.0, *corners, math.inf]), strict=True):
        # tokens / (a + b tokens) = wanted
        if wanted * b < 1:
            tokens = max(wanted * a / (1 - wanted * b), start)
            if tokens <= end:
                return tokens
    return math.inf


def _pieces(constant_s: float, per_token_s: float, bends: Bends) -> Iterator[tuple[float, float]]:
    """Yield (a, b) of the straight pieces a + b * tokens of a line that bends."""
    yield constant_s, per_token_s
    for start, slope_s in bends:
        constant_s += (per_token_s - slope_s) * start
        per_token_s = slope_s
        yield constant_s, per_token_s


def _share(steps: Prefills, latency: AffineLatency | None) -> Saturation:
    """Return where the rate reaches its share; an error of the step moves that share by as much."""
    bends: Bends = ()
    if latency is None:
        line, residuals = steps.fitted()
        constant_s, per_token_s = float(line[0]), float(line[2])
    else:
        p = latency.prefill
        constant_s, per_token_s, bends = p.constant_s + p.per_request_s, p.per_token_s, p.bends
        residuals = _residuals(latency, steps)
    wide = min(max(2 * float(np.sqrt(np.mean(residuals**2))), 0.05), 0.15)
    last = float(steps.tokens.max())
    low, best, high = (
        share_tokens(constant_s, per_token_s, min(share, 0.99), bends)
        for share in (SATURATED_SHARE - wide, SATURATED_SHARE, SATURATED_SHARE + wide)
    )
    # Beyond the timed tokens nobody knows the rate.
    if best > last:
        return Saturation(Fit(min(low, last), math.inf, math.inf), "not-reached")
    return Saturation(Fit(low, best, high if high <= last else math.inf), "share")


def _residuals(latency: AffineLatency, steps: Prefills) -> Floats:
    chunks: Sequence[list[tuple[int, int]]] = [
        [(int(t), 0)] * int(r) for r, t in zip(steps.requests, steps.prompt_tokens, strict=True)
    ]
    off: Floats = np.array([latency.prefill_s(chunk) for chunk in chunks]) / steps.step_s - 1
    return off
