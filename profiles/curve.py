"""Curves: constants >= 0 of forms that are linear in them, by weighted least squares on relative errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, nnls
from scipy.stats import t as student

from dsim.profile_fit import Fit

Floats = NDArray[np.float64]

#: Relative errors beyond this count linearly, not squared: one bad point must not bend a curve (Huber).
HUBER: Final = 0.05
#: Weight of "neighbouring slopes are alike" against relative errors; results hardly change between 0.05 and 0.2.
SMOOTHNESS: Final = 0.1
#: A simpler form is taken unless its cross-validated error is above the best form's by this factor plus this share.
PARSIMONY: Final = (1.1, 0.001)
#: A form whose own points are off by more on average is too simple, unless no form does better.
MISFIT: Final = 0.02
_MOST_BENDS = 8
_LEVEL = 0.95
_FLOOR_ERROR = 1e-6
#: Positions of one bend that an interval is the union over: how many of those likely enough, and those tried anywhere
#: and ever closer to the best, as shares of it.
_BENDS_KEPT = 17
_BENDS_TRIED = 60
_BENDS_NEAR = np.geomspace(3e-5, 0.3, 40)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Step times and the columns that explain them.

    Args:
        design: columns of the form, shape (n, p), with these bends; its last columns are the stretches between bends.
        quantity: what the form bends in, shape (n,).
        step_s: times, shape (n,); errors are relative to them.
        offset_s: what the form need not explain, shape (n,).
        slopes_at: number of columns before the stretches.
        thrift: weights, by column, of columns that are pulled towards 0.
    """

    design: Callable[[Sequence[float]], Floats]
    quantity: Floats
    step_s: Floats
    offset_s: Floats
    slopes_at: int
    thrift: dict[int, float]

    @property
    def goal(self) -> Floats:
        """The share of each step that the form is to explain, shape (n,)."""
        return 1 - self.offset_s / self.step_s

    def relative(self, bends: Sequence[float]) -> Floats:
        """Return the columns as shares of the step times, shape (n, p)."""
        return self.design(bends) / self.step_s[:, None]

    def solved(self, bends: Sequence[float], keep: NDArray[np.bool_] | None = None) -> Solved:
        """Return the constants with these bends, fitted to the points that are kept."""
        keep = np.ones(len(self.step_s), dtype=np.bool_) if keep is None else keep
        matrix = self.design(bends)[keep]
        return solve(matrix / self.step_s[keep, None], self.goal[keep], self._penalty(matrix, keep, bends))

    def _penalty(self, matrix: Floats, keep: NDArray[np.bool_], bends: Sequence[float]) -> Floats:
        """Return pseudo-rows: neighbouring slopes are alike, and thrifty columns 0. One bend is not smoothed."""
        rows = []
        quantity, step_s = self.quantity[keep], self.step_s[keep]
        order = np.argsort(quantity)
        if len(bends) > 1:
            for k, bend in enumerate(bends):
                row = np.zeros(matrix.shape[1])
                scale = SMOOTHNESS * bend / float(np.interp(bend, quantity[order], step_s[order]))
                row[self.slopes_at + k], row[self.slopes_at + k + 1] = -scale, scale
                rows.append(row)
        for column, weight in self.thrift.items():
            row = np.zeros(matrix.shape[1])
            row[column] = weight * float(np.median(matrix[:, column] / step_s))
            rows.append(row)
        return np.array(rows).reshape(-1, matrix.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Constants >= 0, shape (p,), with the relative residuals and the weights of the points, shape (n,)."""

    values: Floats
    residuals: Floats
    weights: Floats

    @property
    def loss(self) -> float:
        """Mean Huber loss."""
        size = np.abs(self.residuals)
        return float(np.mean(np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2)))


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Constants >= 0 of a form linear in them.

    Args:
        bends: where the form bends, in units of its bending quantity.
    """

    problem: Problem
    bends: tuple[float, ...]
    solved: Solved

    @property
    def values(self) -> Floats:
        """The constants, shape (p,)."""
        return self.solved.values

    def intervals(self) -> list[Fit]:
        """Return every constant with its 95 % interval, never below 0: that of the profile likelihood.

        All values belong to it with which the form still fits the points nearly as well, whatever the other constants
        (0 included) and the place of a single bend. So a constant that the points cannot tell from another one gets
        an interval as wide as that leaves open. What is only preferred (alike slopes, thrift) is not counted.
        """
        weights = self.solved.weights
        freedom = self._freedom()
        quantile = float(student.ppf((1 + _LEVEL) / 2, freedom))
        own = float(np.sum((weights * self.solved.residuals) ** 2))
        variance = max(own / freedom, _FLOOR_ERROR**2)
        trials = [_Weighted.of(self.problem, bends, weights) for bends in self._trials()]
        limit = min(trial.least for trial in trials) + quantile**2 * variance
        likely = [trial for trial in trials if trial.least <= limit]
        if len(likely) > _BENDS_KEPT:
            # Evenly spread in the bend itself, as near the best they are many.
            places = np.array([trial.bend for trial in likely])
            wanted = np.linspace(places[0], places[-1], _BENDS_KEPT)
            likely = [likely[i] for i in np.unique([int(np.argmin(np.abs(places - place))) for place in wanted])]
        result = []
        for i, best in enumerate(self.values):
            spans = [trial.span(i, limit) for trial in likely]
            low, high = min(low for low, _ in spans), max(high for _, high in spans)
            result.append(Fit(min(low, float(best)), float(best), max(high, float(best))))
        return result

    def _freedom(self) -> int:
        used = int(np.count_nonzero(self.values)) + (len(self.bends) == 1)
        return max(len(self.solved.residuals) - used, 1)

    def _trials(self) -> list[tuple[float, ...]]:
        if len(self.bends) != 1:
            return [self.bends]
        best, inner = self.bends[0], np.unique(self.problem.quantity)[1:-1]
        near = np.concatenate([best * (1 - _BENDS_NEAR), best * (1 + _BENDS_NEAR)])
        tried = np.concatenate([np.geomspace(inner[0], inner[-1], _BENDS_TRIED), near, [best]])
        return [(float(bend),) for bend in np.unique(tried)]


@dataclass(frozen=True, slots=True, eq=False)
class _Weighted:
    """Weighted squared errors of a form with given bends, as a function of one constant, the others free (>= 0)."""

    matrix: Floats
    goal: Floats
    best: Floats
    least: float
    bend: float

    @classmethod
    def of(cls, problem: Problem, bends: Sequence[float], weights: Floats) -> _Weighted:
        matrix, goal = problem.relative(bends) * weights[:, None], problem.goal * weights
        best, least = _nonnegative(matrix, goal)
        return cls(matrix, goal, best, least, bends[0] if bends else 0.0)

    def span(self, i: int, limit: float) -> tuple[float, float]:
        """Return the values of constant `i` between which the squared errors stay within `limit`."""
        column, others = self.matrix[:, i], np.delete(self.matrix, i, axis=1)
        size = float(np.linalg.norm(column))
        best = float(self.best[i])
        if size == 0:
            return 0.0, best

        def beyond(value: float) -> float:
            return math.sqrt(_nonnegative(others, self.goal - value * column)[1]) - math.sqrt(limit)

        if beyond(best) >= 0:
            return best, best
        step = max(math.sqrt(limit) / size, 1e-6 * best)
        high = best + step
        while beyond(high) < 0:
            high += (step := 2 * step)
        high = float(brentq(beyond, best, high, xtol=1e-5 * high, rtol=1e-5))
        low = 0.0
        if best > 0 and beyond(0.0) > 0:
            low = float(brentq(beyond, 0.0, best, xtol=1e-5 * best, rtol=1e-5))
        return low, high


def _nonnegative(matrix: Floats, goal: Floats) -> tuple[Floats, float]:
    """Return constants >= 0 and their sum of squared errors."""
    # Columns of like size, or the solver's tolerances mean nothing for squared tokens.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    if not matrix.shape[1]:
        return np.zeros(0), float(goal @ goal)
    x, norm = nnls(matrix / scale, goal)
    return x / scale, float(norm**2)


def solve(relative: Floats, goal: Floats, penalty: Floats) -> Solved:
    """Return constants >= 0 of relative columns, by iterated NNLS with Huber weights."""
    weights = np.ones(len(relative))
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1.0
    target = np.concatenate([goal, np.zeros(len(penalty))])
    for _ in range(12):
        stacked = np.concatenate([relative * weights[:, None], penalty]) / scale
        x, _ = nnls(stacked, target * np.concatenate([weights, np.ones(len(penalty))]))
        x = x / scale
        residuals = relative @ x - goal
        new = np.sqrt(np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12)))
        if np.allclose(new, weights, atol=1e-4):
            break
        weights = new
    return Solved(x, residuals, weights)


def fit_curve(problem: Problem) -> Curve:
    """Return the simplest of three forms that predicts points left out about as well as the best of them.

    The forms: a straight line in the bending quantity, one bend anywhere, bends at (up to 8 of) the points' own values.
    """
    forms = _forms(problem)
    scores = [_left_out(form, problem) for form in forms]
    factor, slack = PARSIMONY
    known = [score for score in scores if np.isfinite(score)]
    limit = factor * min(known) + slack if known else np.inf
    # On a wide grid a point left out says little about forms that bend near it; but a form must fit its own points.
    inside = [float(np.abs(problem.solved(form[0]).residuals).mean()) for form in forms]
    fits = [error <= max(MISFIT, factor * min(inside)) for error in inside]
    index = next((i for i, score in enumerate(scores) if fits[i] and score <= limit), fits.index(True))
    bends = forms[index][0]
    if index == 1:
        bends = (_refined(bends[0], problem),)
    return Curve(problem, bends, problem.solved(bends))


def stretches(quantity: Floats, bends: Sequence[float]) -> Floats:
    """Return how much of each quantity lies between 0, the bends and infinity, shape (n, bends + 1)."""
    edges = [0.0, *bends, np.inf]
    return np.stack([np.clip(quantity - low, 0, high - low) for low, high in pairwise(edges)], 1)


def _forms(problem: Problem) -> list[list[tuple[float, ...]]]:
    """Return the bends to try for each form, the best of all points first."""
    values = np.unique(problem.quantity)
    many = tuple(float(v) for v in values[1:-1])
    if len(many) > _MOST_BENDS:
        many = tuple(many[i] for i in np.unique(np.linspace(0, len(many) - 1, _MOST_BENDS).round().astype(int)))
    forms: list[list[tuple[float, ...]]] = [[()]]
    if len(values) >= 4:
        ranked = sorted(_bend_candidates(values), key=lambda bend: problem.solved((bend,)).loss)
        forms.append([(bend,) for bend in ranked[:6]])
    if len(many) > 1:
        forms.append([many])
    return forms


def _bend_candidates(values: Floats) -> list[float]:
    # Two values on either side, else a bend is free to follow one point.
    inner = values[1:-1]
    return [float(b) for b in np.geomspace(inner[0], inner[-1], 24)] if inner[-1] > inner[0] else [float(inner[0])]


def _refined(bend: float, problem: Problem) -> float:
    """Return the bend with the least loss near a candidate, by ever finer grids."""
    first, last = float(problem.quantity.min()), float(problem.quantity.max())
    ratio = (last / first) ** (1 / 24)
    for _ in range(5):
        near = [bend * ratio**step for step in (-1, -0.67, -0.33, 0, 0.33, 0.67, 1)]
        inside = [b for b in near if first < b < last]
        bend = min(inside or [bend], key=lambda b: problem.solved((b,)).loss)
        ratio **= 0.4
    return bend


def _left_out(form: Sequence[tuple[float, ...]], problem: Problem) -> float:
    """Return the mean relative error of points left out in turn; the ends are never left out: nobody extrapolates."""
    quantity = problem.quantity
    inner = np.flatnonzero((quantity > quantity.min()) & (quantity < quantity.max()))
    if len(inner) < 2:
        return float("nan") if len(form[0]) else 0.0
    errors: list[float] = []
    folds = [inner[i::8] for i in range(8)] if len(inner) > 12 else [np.array([i]) for i in inner]
    for fold in folds:
        keep = np.ones(len(quantity), dtype=np.bool_)
        keep[fold] = False
        trials = [(bends, problem.solved(bends, keep)) for bends in form]
        bends, solved = min(trials, key=lambda trial: trial[1].loss)
        predicted = problem.design(bends)[fold] @ solved.values
        errors += list(np.abs(predicted / problem.step_s[fold] - problem.goal[fold]))
    return float(np.mean(errors))
