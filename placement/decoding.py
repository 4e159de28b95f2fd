"""The least time that decoding takes of an instance if enough requests keep within their limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Contexts at which the price of a token is computed; between them it is interpolated.
_CONTEXTS: Final = 24
#: Prices of a second of waiting that are tried first, each so many times the one before; then steps of the refinement.
_FIRST_PRICE, _LAST_PRICE, _FACTOR, _REFINEMENTS = 1e-6, 10.0, 4.0, 6
#: Requests on which prices are chosen, and rounds of choosing costs and price in turn.
_FOR_PRICES, _ROUNDS = 1024, 3
#: Prices of memory that are tried, as shares of the one that is best where nobody waits.
_MEMORY_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """What a decode step of a batch takes at least: a convex line over the number of requests, linear in their context.

    Args:
        sizes: numbers of requests at which the line bends, rising from 1, shape (k,).
        instance_s: seconds that a step of so many requests without context takes of its instance, shape (k,).
        token_s: seconds from its start to its end, shape (k,).
        instance_slope_s, token_slope_s: the same for each token of context.
        most: requests of a step at most; the line goes on to them.
        kv_tokens: context of a step at most.
    """

    sizes: Floats
    instance_s: Floats
    token_s: Floats
    instance_slope_s: float
    token_slope_s: float
    most: float = math.inf
    kv_tokens: float = math.inf


class Demand:
    """What sampled requests ask of a decode instance, each column of shape (n,).

    Args:
        steps: decode steps from token 1 on, each of which counts for the limits.
        prompt_tokens: the context of these steps is from prompt_tokens + 1 to prompt_tokens + steps.
        first_steps: steps that show token 1, with a context of prompt_tokens: 0 or 1.
        budget_s: that the counted steps of a request may take together if it is to keep within its limits.
        possible: whether it can; None: all can.
    """

    def __init__(
        self,
        *,
        steps: Floats,
        prompt_tokens: Floats,
        first_steps: Floats,
        budget_s: Floats,
        possible: NDArray[np.bool_] | None = None,
    ) -> None:
        self.steps, self.prompt_tokens, self.first_steps = steps, prompt_tokens, first_steps
        self.budget_s = budget_s
        self.possible = np.ones(len(steps), dtype=np.bool_) if possible is None else possible

    def part(self, rows: slice) -> Demand:
        """Return the demand of some of the requests."""
        return Demand(
            steps=self.steps[rows],
            prompt_tokens=self.prompt_tokens[rows],
            first_steps=self.first_steps[rows],
            budget_s=self.budget_s[rows],
            possible=self.possible[rows],
        )

    @cached_property
    def all_steps(self) -> Floats:
        """Steps of each request."""
        return self.steps + self.first_steps

    @cached_property
    def contexts(self) -> Floats:
        """Sum of the contexts of each request's steps."""
        counted = self.steps * (self.prompt_tokens + (self.steps + 1) / 2)
        return counted + self.first_steps * self.prompt_tokens

    @cached_property
    def grid(self) -> Floats:
        """Contexts at which the price of a token is computed, from the least to the largest."""
        return np.geomspace(1.0, max(float((self.prompt_tokens + self.steps).max()), 2.0), _CONTEXTS)

    def mean_of_steps(self, heights: Floats) -> Floats:
        """Return a lower limit of the mean over each request's counted steps of something concave in their context.

        Args:
            heights: at the contexts of the grid.
        """
        # Nowhere is it below the chord from the first to the last step, nor there below that of the grid.
        (first, first_share), (last, last_share) = self._places
        rises = np.diff(heights)
        ends: Floats = (heights[first] + first_share * rises[first] + heights[last] + last_share * rises[last]) / 2
        return ends

    @cached_property
    def _places(self) -> tuple[tuple[NDArray[np.intp], Floats], tuple[NDArray[np.intp], Floats]]:
        first, last = self.prompt_tokens + 1, self.prompt_tokens + self.steps
        return _places(self.grid, first), _places(self.grid, last)


#: Costs, and what the requests of some rows take of the instance beside their steps.
Choice = tuple[StepCosts, Callable[[slice], Floats]]

_ALL: Final = slice(None)


def least_instance_s(choices: Sequence[Choice], demand: Demand, *, target: float, margin: float) -> float:
    """Return a lower limit of the time that a request takes of its instance on average, seconds.

    In the long run `target` of the requests, the hits, keep within their limits: the steps of a hit take no longer than
    its budget. Which they are is not known, nor how requests are batched. Let a step of B requests with context S in
    all take c(B) + e S of its instance and t(B) + f S from its start to its end. For any price mu >= 0 of a second by
    which hits stay below their budgets, and theta >= 0 of KV that a step leaves free, all steps take of the instance

        at least  sum over steps of  c(B) + e S - theta (1 - S / kv) + mu H (t(B) + f S),
        less      mu times the budgets of the hits,

    with H <= B hits in the step (weak duality: what is added is never positive). So a token is never cheaper than

        a miss's:  g + (e + theta / kv) s,  with g the least (c(B) - theta) / B of any B,
        a hit's:   the least (c(B) - theta - g (B - H)) / H + (e + theta / kv) s + mu (t(B) + f s H) of any H <= B,

    for the prices of any batch, whatever contexts s meet in it, add up to no more than what its step takes: the sums
    over its members are, for each member, at least its own minimum. The hits are those for whom being one costs the
    least: the share `target` with the smallest difference. The largest value over mu and theta is returned; that of
    mu = 0 is the fluid capacity at the best batching.

    Args:
        choices: lower limits, all of them; the largest result counts.
        target: share of the requests that are hits, at least.
        margin: standard errors by which the mean over the sample is taken lower.
    """
    if not float(demand.all_steps.sum()):
        return max(_lower_mean(beside(_ALL), margin) for _, beside in choices)
    # Any prices are valid, so a part of the sample is enough to choose them.
    thin = slice(None, None, max(len(demand.steps) // _FOR_PRICES, 1))
    few = demand.part(thin)
    programs: list[tuple[_Program, float, int]] = []
    for i, (costs, beside) in enumerate(choices):
        program = _Program(costs, few, beside(thin), target, 0.0)
        theta = program.best_memory_price()
        programs += [(program, share * theta, i) for share in (_MEMORY_SHARES if theta else (0.0,))]
    fluid = max(programs, key=lambda p: p[0].value(0.0, p[1]))
    # Where memory is worth most, waiting is worth nothing: begin with memory that is free.
    mu, best = 0.0, max((p for p in programs if not p[1]), key=lambda p: p[0].value(0.0, 0.0))
    for _ in range(_ROUNDS):
        mu = best[0].best_price(best[1])
        better = max(programs, key=lambda p: p[0].value(mu, p[1]))
        if better is best:
            break
        best = better
    found = 0.0
    for price, (_, theta, i) in ((0.0, fluid), (mu, best)):
        whole = _Program(choices[i][0], demand, choices[i][1](_ALL), target, margin)
        found = max(found, whole.value(price, theta))
    return found


class _Program:
    """The dual of one instance's decoding, as a function of its two prices."""

    def __init__(self, costs: StepCosts, demand: Demand, beside_s: Floats, target: float, margin: float) -> None:
        self.costs, self.demand, self.target, self.margin = costs, demand, target, margin
        self.beside_s = beside_s
        sizes, most = costs.sizes, costs.most
        instance, token = _with_last(costs.instance_s, sizes, most), _with_last(costs.token_s, sizes, most)
        self.ends = sizes if math.isinf(most) or most <= sizes[-1] else np.append(sizes, most)
        self.end_instance_s, self.end_token_s = instance[: len(self.ends)], token[: len(self.ends)]
        # Segments of the lines: between the ends, and from the last one on where nothing limits a batch.
        self.instance = _lines(self.ends, self.end_instance_s, further=math.isinf(most))
        self.token = _lines(self.ends, self.end_token_s, further=math.isinf(most))
        segments = len(self.instance[0])
        self.low = self.ends[:segments]
        self.high = np.append(self.ends[1:], most if math.isinf(most) else self.ends[-1])[:segments]

    def best_memory_price(self) -> float:
        """Return the price of memory that is best where nobody's limit matters."""
        steps, contexts = float(self.demand.all_steps.mean()), float(self.demand.contexts.mean())
        candidates = [0.0, *(float(a) for a in self.instance[0] if a > 0)]
        return max(candidates, key=lambda x: steps * self._miss_s(x) + contexts * x / self.costs.kv_tokens)

    def best_price(self, theta: float) -> float:
        """Return the best price of waiting; the value is concave in it."""
        prices, values = [0.0], [self.value(0.0, theta)]
        price = _FIRST_PRICE
        while price < _LAST_PRICE:
            prices.append(price)
            values.append(self.value(price, theta))
            if values[-1] < values[-2]:
                break
            price *= _FACTOR
        top = int(np.argmax(values))
        if top == 0:
            return 0.0
        low, high = prices[top - 1], prices[min(top + 1, len(prices) - 1)]
        best = (values[top], prices[top])
        for _ in range(_REFINEMENTS):
            first, second = low + 0.4 * (high - low), low + 0.6 * (high - low)
            at_first, at_second = self.value(first, theta), self.value(second, theta)
            best = max(best, (at_first, first), (at_second, second))
            low, high = (low, second) if at_first > at_second else (first, high)
        return best[1]

    def value(self, mu: float, theta: float) -> float:
        """Return seconds of an instance a request at these prices of waiting and memory."""
        demand, slope_s = self.demand, self.costs.instance_slope_s + theta / self.costs.kv_tokens
        miss_s = self.beside_s + self.demand.all_steps * self._miss_s(theta) + self.demand.contexts * slope_s
        if not mu:
            return _lower_mean(miss_s, self.margin)
        more_s = demand.steps * demand.mean_of_steps(self._excess_s(mu, theta)) - mu * demand.budget_s
        more_s = np.where(demand.possible, more_s, np.inf)
        wanted = max(math.ceil(self.target * len(more_s)) - 1, 0)
        threshold = float(np.partition(more_s, wanted)[wanted])
        if math.isinf(threshold):
            # Too few can be hits, which is another bound's affair.
            threshold = float(more_s[demand.possible].max(initial=0.0))
        threshold = max(threshold, 0.0)
        return _lower_mean(miss_s + np.minimum(more_s - threshold, 0.0), self.margin) + self.target * threshold

    def _miss_s(self, theta: float) -> float:
        """Return the price of a token without context of a request that need not keep within limits."""
        least = float(np.min((self.end_instance_s - theta) / self.ends))
        return min(least, float(self.instance[1][-1])) if math.isinf(self.costs.most) else least

    def _excess_s(self, mu: float, theta: float) -> Floats:
        """Return by how much a hit's token costs more than a miss's, at the contexts of the grid: concave in them."""
        costs, s = self.costs, self.demand.grid[:, None]
        miss_s = self._miss_s(theta)
        # Hits alone: (c - theta) / B + mu (t + f s B), with lines for c and t.
        fixed, rise = self.instance[0] - theta, mu * (self.token[1] + costs.token_slope_s * s)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            batch = np.where(fixed > 0, np.sqrt(np.maximum(fixed, 0.0) / rise), self.low)
        batch = np.clip(np.where(np.isnan(batch), self.high, batch), self.low, self.high)
        growing_s = np.where(rise > 0, rise * np.where(np.isinf(batch), 0.0, batch), 0.0)
        alone_s = fixed / batch + self.instance[1] + growing_s + mu * self.token[0]
        # Hits among misses, where the line bends.
        kept = np.maximum(self.end_instance_s - theta - miss_s * self.ends, 0.0)
        rise = mu * costs.token_slope_s * s
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            hits = np.sqrt(kept / rise)
        hits = np.clip(np.where(np.isnan(hits), self.ends, hits), 1.0, self.ends)
        among_s = kept / hits + miss_s + mu * self.end_token_s + rise * hits
        least_s: Floats = np.minimum(alone_s.min(axis=1), among_s.min(axis=1))
        return least_s - miss_s


def _with_last(seconds: Floats, sizes: Floats, most: float) -> Floats:
    """Return the line's values with one at `most` where that lies beyond its last bend."""
    if math.isinf(most) or most <= sizes[-1]:
        return seconds
    grows = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    return np.append(seconds, seconds[-1] + grows * (most - sizes[-1]))


def _lines(sizes: Floats, seconds: Floats, *, further: bool) -> tuple[Floats, Floats]:
    """Return constants and slopes of the lines between successive points, and of the one from the last point on."""
    slopes = np.diff(seconds) / np.diff(sizes)
    if further or len(sizes) == 1:
        slopes = np.append(slopes, slopes[-1] if len(slopes) else 0.0)
    return seconds[: len(slopes)] - slopes * sizes[: len(slopes)], slopes


def _places(grid: Floats, values: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Return, for each value, the place in the grid before it and the share of the way to the next one."""
    before = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    share = np.clip((values - grid[before]) / (grid[before + 1] - grid[before]), 0.0, 1.0)
    return before, share


def _lower_mean(values: Floats, margin: float) -> float:
    return float(values.mean()) - margin * float(values.std()) / math.sqrt(len(values))
