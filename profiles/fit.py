"""Fits: from raw timing rows to latency models, by weighted least squares on relative errors with constants >= 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import t as student

from dsim.contract import decode_bound_s, find_violations, prefill_bound_s
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends, ValidRange
from dsim.model import Model
from dsim.profile_fit import AppendixA, Fit, FitError, SpeedUp
from profiles.knee import Saturation, saturation_of
from profiles.rows import Phase, Point, Row, Rows, bound_s

Floats = NDArray[np.float64]

#: Relative errors beyond this count linearly, not squared: one bad point must not bend a curve (Huber).
HUBER: Final = 0.05
#: Weight of "neighbouring slopes are alike" against relative errors; results hardly change between 0.05 and 0.2.
SMOOTHNESS: Final = 0.1
#: Weights of "squares cost nothing" and "a prompt costs nothing beside its tokens": where the points cannot tell these
#: from tokens (all prompts equally long), tokens win.
THRIFT: Final = {1: 0.02, 2: 0.1}
#: A simpler form is taken unless its cross-validated error is above the best form's by this factor plus this share.
PARSIMONY: Final = (1.1, 0.001)
#: A form whose own points are off by more on average is too simple, unless no form does better.
MISFIT: Final = 0.02
#: FlashAttention block of appendix A.
APPENDIX_A_BLOCK: Final = 16
_MOST_BENDS = 8
_LEVEL = 0.95
_FLOOR_ERROR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Constants >= 0 of a form linear in them, with their covariance.

    Args:
        bends: where the form bends, in units of its bending quantity.
        values: shape (p,).
        covariance: shape (p, p); rows of constants at 0 hold their own variance only.
        quantile: of Student's t for the intervals.
        cross_validated: mean relative error of points left out, ends apart; NaN with too few points.
    """

    bends: tuple[float, ...]
    values: Floats
    covariance: Floats
    quantile: float
    cross_validated: float

    def interval(self, combination: Floats) -> Fit:
        """Return a linear combination of the constants, never below 0, with its interval."""
        best = float(combination @ self.values)
        half = self.quantile * math.sqrt(max(float(combination @ self.covariance @ combination), 0.0))
        return Fit(max(best - half, 0.0), best, best + half)


@dataclass(frozen=True, slots=True, eq=False)
class TpFit:
    """Everything fitted for one tensor parallel degree."""

    tp: int
    latency: AffineLatency
    constants: dict[str, Fit]
    errors: tuple[FitError, ...]
    saturation: Saturation | None
    appendix_a: AppendixA | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FittedRows:
    """What the rows of one file say.

    Args:
        speed_up: K of every degree against the smallest one.
    """

    by_tp: dict[int, TpFit]
    valid_range: ValidRange
    speed_up: tuple[SpeedUp, ...]


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

    def only(self, keep: NDArray[np.bool_]) -> Timed:
        """Return the points where `keep` holds."""
        chosen = np.flatnonzero(keep)
        return Timed(
            tuple(self.points[i] for i in chosen), self.step_s[chosen], tuple(self.comm_share[i] for i in chosen)
        )


def timed(rows: Sequence[Row], phase: Phase, tp: int) -> Timed:
    """Return the points of a phase and degree, each the median of its repeats, by length and requests."""
    groups: dict[Point, list[Row]] = {}
    for row in rows:
        if row.point.phase == phase.value and row.point.tp == tp:
            groups.setdefault(row.point, []).append(row)
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


def fit_rows(rows: Rows, *, model: Model | None = None, gpu: Gpu | None = None) -> FittedRows:
    """Return the fits of all degrees in the rows.

    Args:
        model: for the contract and the appendix-A form; both are left out without it.
        gpu: likewise for the contract.

    Raises:
        InputError: a degree has too few points, or the rows break the contract of latency models.
    """
    ok = rows.ok
    degrees = sorted({row.point.tp for row in ok})
    by_tp = {tp: _fit_tp([row for row in ok if row.point.tp == tp], tp, rows.file, model, gpu) for tp in degrees}
    return FittedRows(by_tp, valid_range_of(ok), tuple(_speed_ups(by_tp, ok)))


def valid_range_of(rows: Sequence[Row]) -> ValidRange:
    """Return the range that the rows span."""
    prefill = [row.point for row in rows if row.point.prompt_tokens]
    decode = [row.point for row in rows if row.point.context_tokens]
    decoding = [(p.decode_requests or p.requests, p.context_tokens) for p in decode]
    contexts = [c for _, c in decoding]
    return ValidRange(
        chunk_tokens=int(max([p.prompt_tokens + p.cached_tokens for p in prefill] + contexts, default=1)),
        prefill_tokens=max((p.requests * p.prompt_tokens for p in prefill), default=1),
        decode_requests=max((b for b, _ in decoding), default=1),
        context_tokens=int(max((b * c for b, c in decoding), default=1)),
    )


def fit_latency(
    rows: Sequence[Row], tp: int, *, model: Model | None = None, gpu: Gpu | None = None, file: str = "rows"
) -> tuple[AffineLatency, dict[str, Fit], dict[str, float]]:
    """Return the latency model of one degree, its constants' intervals, and the cross-validated error by phase."""
    valid = valid_range_of([row for row in rows if row.point.tp == tp])
    decode_rows, prefill_rows = timed(rows, Phase.DECODE, tp), timed(rows, Phase.PREFILL, tp)
    for name, found, what in (("decode", decode_rows, "batch or context"), ("prefill", prefill_rows, "tokens")):
        if len(found.points) < 3:
            raise InputError(
                file,
                f"has {len(found.points)} {name} points for tp {tp}, a fit needs 3 or more",
                hint=f"time more of them, differing in {what}",
            )
    least_s = (0.0, 0.0)
    for attempt in range(2):
        decode, curve_d = _fit_decode(decode_rows, least_s[1])
        prefill, curve_p = _fit_prefill(prefill_rows, decode.per_context_token_s, least_s[0])
        latency = AffineLatency(prefill, decode, decode, 1, valid)
        if attempt or model is None or gpu is None:
            break
        # Where the rows leave the constant open, it is at least the time to read the weights once.
        bounds = (
            prefill_bound_s([(1, 0)], model=model, gpu=gpu, tp=tp),
            decode_bound_s(1, 1, model=model, gpu=gpu, tp=tp),
        )
        ask = (latency.prefill_s([(1, 0)]), latency.decode_s(1, 1))
        if ask[0] >= bounds[0] and ask[1] >= bounds[1]:
            break
        least_s = (
            min(bounds[0], 0.999 * float(prefill_rows.step_s.min())),
            min(bounds[1], 0.999 * float(decode_rows.step_s.min())),
        )
    constants = _prefill_intervals(curve_p, least_s[0]) | _decode_intervals(curve_d, least_s[1])
    return latency, constants, {"prefill": curve_p.cross_validated, "decode": curve_d.cross_validated}


def predict(latency: AffineLatency, points: Sequence[Point]) -> Floats:
    """Return the model's step times of the points, seconds, shape (n,)."""
    return np.array([_predict(latency, point) for point in points])


def _predict(latency: AffineLatency, point: Point) -> float:
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


def fit_curve(
    design: Callable[[Sequence[float]], Floats],
    quantity: Floats,
    step_s: Floats,
    *,
    offset_s: Floats | None = None,
    slopes_at: int,
    thrift: Sequence[int] = (),
) -> Curve:
    """Return the simplest of three forms that predicts points left out about as well as the best of them.

    The forms: a straight line in `quantity`, one bend anywhere, a bend at (up to 8 of) the points' own values.

    Args:
        design: columns of the form, shape (n, p), with these bends; its last columns are the stretches between bends.
        quantity: what the form bends in, shape (n,).
        step_s: times, shape (n,); errors are relative to them.
        offset_s: what the form need not explain, shape (n,).
        slopes_at: number of columns before the stretches.
        thrift: columns that are pulled towards 0.
    """
    values = np.unique(quantity)
    target = np.ones_like(step_s) if offset_s is None else 1 - offset_s / step_s
    many = tuple(float(v) for v in values[1:-1])
    if len(many) > _MOST_BENDS:
        many = tuple(many[i] for i in np.unique(np.linspace(0, len(many) - 1, _MOST_BENDS).round().astype(int)))

    def solved(bends: Sequence[float], keep: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
        matrix = design(bends)[keep]
        penalty = _penalty(matrix, quantity[keep], step_s[keep], bends, slopes_at=slopes_at, thrift=thrift)
        return _solve(matrix / step_s[keep, None], target[keep], penalty)

    everything = np.ones(len(step_s), dtype=np.bool_)
    forms: list[list[tuple[float, ...]]] = [[()]]
    if len(values) >= 4:
        ranked = sorted(_bend_candidates(values), key=lambda bend: _loss(solved((bend,), everything)[1]))
        forms.append([(bend,) for bend in ranked[:6]])
    if len(many) > 1:
        forms.append([many])
    scores = [_left_out(form, solved, design, quantity, step_s, target) for form in forms]
    factor, slack = PARSIMONY
    known = [score for score in scores if np.isfinite(score)]
    limit = factor * min(known) + slack if known else np.inf
    # On a wide grid a point left out says little about forms that bend near it; but a form must fit its own points.
    inside = [float(np.abs(solved(form[0], everything)[1]).mean()) for form in forms]
    fits = [error <= max(MISFIT, factor * min(inside)) for error in inside]
    index = next((i for i, score in enumerate(scores) if fits[i] and score <= limit), fits.index(True))
    bends = forms[index][0]
    if index == 1:
        bends = (_refined(bends[0], values, lambda bend: _loss(solved((bend,), everything)[1])),)
    x, residuals, hessian = solved(bends, everything)
    return _curve(bends, x, residuals, hessian, score=scores[index])


def _refined(bend: float, values: Floats, loss: Callable[[float], float]) -> float:
    """Return the bend with the least loss near a candidate, by ever finer grids."""
    ratio = (values[-1] / values[0]) ** (1 / 24)
    for _ in range(5):
        near = [bend * ratio**step for step in (-1, -0.67, -0.33, 0, 0.33, 0.67, 1)]
        inside = [b for b in near if values[0] < b < values[-1]]
        bend = min(inside or [bend], key=loss)
        ratio **= 0.4
    return bend


def _bend_candidates(values: Floats) -> list[float]:
    # Two values on either side, else a bend is free to follow one point.
    inner = values[1:-1]
    return [float(b) for b in np.geomspace(inner[0], inner[-1], 24)] if inner[-1] > inner[0] else [float(inner[0])]


def _left_out(
    form: Sequence[tuple[float, ...]],
    solved: Callable[[Sequence[float], NDArray[np.bool_]], tuple[Floats, Floats, Floats]],
    design: Callable[[Sequence[float]], Floats],
    quantity: Floats,
    step_s: Floats,
    target: Floats,
) -> float:
    """Return the mean relative error of points left out in turn; the ends are never left out: nobody extrapolates."""
    inner = np.flatnonzero((quantity > quantity.min()) & (quantity < quantity.max()))
    if len(inner) < 2:
        return float("nan") if len(form[0]) else 0.0
    errors: list[float] = []
    folds = [inner[i::8] for i in range(8)] if len(inner) > 12 else [np.array([i]) for i in inner]
    for fold in folds:
        keep = np.ones(len(step_s), dtype=np.bool_)
        keep[fold] = False
        trials = [(bends, *solved(bends, keep)[:2]) for bends in form]
        bends, x, _ = min(trials, key=lambda trial: _loss(trial[2]))
        predicted = design(bends)[fold] @ x
        errors += list(np.abs(predicted / step_s[fold] - target[fold]))
    return float(np.mean(errors))


def _penalty(
    matrix: Floats,
    quantity: Floats,
    step_s: Floats,
    bends: Sequence[float],
    *,
    slopes_at: int,
    thrift: Sequence[int],
) -> Floats:
    """Return pseudo-rows that say: neighbouring slopes are alike, and thrifty columns 0. One bend is not smoothed."""
    rows = []
    order = np.argsort(quantity)
    if len(bends) > 1:
        for k, bend in enumerate(bends):
            row = np.zeros(matrix.shape[1])
            scale = SMOOTHNESS * bend / float(np.interp(bend, quantity[order], step_s[order]))
            row[slopes_at + k], row[slopes_at + k + 1] = -scale, scale
            rows.append(row)
    for column in thrift:
        row = np.zeros(matrix.shape[1])
        row[column] = THRIFT[column] * float(np.median(matrix[:, column] / step_s))
        rows.append(row)
    return np.array(rows).reshape(-1, matrix.shape[1])


def _solve(relative: Floats, goal: Floats, penalty: Floats) -> tuple[Floats, Floats, Floats]:
    """Return constants >= 0, relative residuals, and the weighted normal matrix, by iterated NNLS."""
    weights = np.ones(len(relative))
    # Columns of like size, or the solver's tolerances mean nothing for squared tokens.
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
    full = np.concatenate([relative * weights[:, None], penalty])
    return x, residuals, full.T @ full


def _loss(residuals: Floats) -> float:
    size = np.abs(residuals)
    return float(np.mean(np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2)))


def _curve(bends: tuple[float, ...], x: Floats, residuals: Floats, hessian: Floats, *, score: float) -> Curve:
    active = x > 0
    freedom = max(len(residuals) - int(active.sum()) - (len(bends) == 1), 1)
    variance = max(float(np.sum(residuals**2)) / freedom, _FLOOR_ERROR**2)
    covariance = np.diag(variance / np.maximum(np.diag(hessian), 1e-300))
    block = np.ix_(active, active)
    scale = np.sqrt(np.maximum(np.diag(hessian)[active], 1e-300))
    covariance[block] = variance * np.linalg.pinv(hessian[block] / np.outer(scale, scale)) / np.outer(scale, scale)
    return Curve(bends, x, covariance, float(student.ppf((1 + _LEVEL) / 2, freedom)), score)


def stretches(quantity: Floats, bends: Sequence[float]) -> Floats:
    """Return how much of each quantity lies between 0, the bends and infinity, shape (n, bends + 1)."""
    edges = [0.0, *bends, np.inf]
    return np.stack([np.clip(quantity - low, 0, high - low) for low, high in pairwise(edges)], 1)


def _fit_decode(rows: Timed, least_s: float) -> tuple[AffineDecode, Curve]:
    batch, total = rows.column("requests"), rows.column("requests") * rows.column("context_tokens")
    one = np.ones_like(batch)

    def design(bends: Sequence[float]) -> Floats:
        return np.concatenate([np.stack([one, total], 1), stretches(batch, bends)], 1)

    # Only what is above the least time is fitted, but errors are relative to all of it.
    curve = fit_curve(design, batch, rows.step_s, offset_s=np.full_like(batch, least_s), slopes_at=2)
    x = curve.values
    starts = _whole(curve.bends)
    return AffineDecode(least_s + float(x[0]), float(x[1]), float(x[2]), _bends(starts, x[3:])), curve


def _fit_prefill(rows: Timed, per_context_token_s: float, least_s: float) -> tuple[AffinePrefill, Curve]:
    prompts, each, cached = rows.column("requests"), rows.column("prompt_tokens"), rows.column("cached_tokens")
    tokens, squares = prompts * each, prompts * each * (each + 2 * cached)
    one = np.ones_like(prompts)
    several = bool(np.any(prompts != prompts[0]))
    # With prompts one at a time, squares and bends explain the same thing; so do prompts and the constant.
    columns = [one, squares, *([prompts] if several else [])]

    def design(bends: Sequence[float]) -> Floats:
        return np.concatenate([np.stack(columns, 1), stretches(tokens, bends)], 1)

    reread_s = per_context_token_s * prompts * cached
    curve = fit_curve(
        design,
        tokens,
        rows.step_s,
        offset_s=np.minimum(least_s + reread_s, 0.99 * rows.step_s),
        slopes_at=len(columns),
        thrift=(1, 2) if several else (1,),
    )
    x, first = curve.values, len(columns)
    starts = _whole(curve.bends)
    prefill = AffinePrefill(
        least_s + float(x[0]),
        float(x[first]),
        float(x[1]),
        float(x[2]) if several else 0.0,
        _bends(starts, x[first + 1 :]),
    )
    if not several:
        curve = replace(
            curve, values=np.insert(x, 2, 0.0), covariance=np.insert(np.insert(curve.covariance, 2, 0, 0), 2, 0, 1)
        )
    return prefill, curve


def _whole(bends: Sequence[float]) -> tuple[int, ...]:
    return tuple(max(round(bend), 1) for bend in bends)


def _bends(starts: Sequence[int], slopes: Floats) -> Bends:
    bends: dict[int, float] = {}
    for start, slope in zip(starts, slopes, strict=True):
        bends[start] = float(slope)
    return tuple(bends.items())


def _prefill_intervals(curve: Curve, least_s: float) -> dict[str, Fit]:
    names = ["constant_s", "per_token_squared_s", "per_request_s", "per_token_s"]
    names += [f"bends.{round(bend)}.per_token_s" for bend in curve.bends]
    return _intervals("prefill", names, curve, least_s)


def _decode_intervals(curve: Curve, least_s: float) -> dict[str, Fit]:
    names = ["constant_s", "per_context_token_s", "per_request_s"]
    names += [f"bends.{round(bend)}.per_request_s" for bend in curve.bends]
    return _intervals("decode", names, curve, least_s)


def _intervals(phase: str, names: Sequence[str], curve: Curve, least_s: float) -> dict[str, Fit]:
    unit = np.eye(len(curve.values))
    result = {f"{phase}.{name}": curve.interval(unit[i]) for i, name in enumerate(names)}
    constant = result[f"{phase}.constant_s"]
    result[f"{phase}.constant_s"] = Fit(constant.low + least_s, constant.best + least_s, constant.high + least_s)
    return result


def _fit_tp(rows: Sequence[Row], tp: int, file: str, model: Model | None, gpu: Gpu | None) -> TpFit:
    latency, constants, _ = fit_latency(rows, tp, model=model, gpu=gpu, file=file)
    warnings = []
    if model is not None and gpu is not None:
        _refuse_rows_below_bound(rows, file, model, gpu)
        warnings = [str(v) for v in find_violations(latency, model=model, gpu=gpu, tp=tp)]
    prefill = timed(rows, Phase.PREFILL, tp)
    alone = prefill.only(prefill.column("cached_tokens") == 0)
    saturation = None
    if len({p.requests * p.prompt_tokens for p in alone.points}) >= 4:
        saturation = saturation_of(
            alone.column("requests"), alone.column("prompt_tokens"), alone.step_s, latency=latency
        )
    return TpFit(
        tp,
        latency,
        constants,
        tuple(_errors(rows, tp, latency, saturation, model, gpu)),
        saturation,
        None if model is None else fit_appendix_a(rows, tp, model),
        tuple(warnings),
    )


def _refuse_rows_below_bound(rows: Sequence[Row], file: str, model: Model, gpu: Gpu) -> None:
    below = [(row, bound_s(row.point, model=model, gpu=gpu)) for row in rows]
    below = [(row, bound) for row, bound in below if row.step_s < bound]
    if not below:
        return
    row, bound = max(below, key=lambda pair: pair[1] / pair[0].step_s)
    shown = ", ".join(str(row.line) for row, _ in below[:8]) + (", ..." if len(below) > 8 else "")
    raise InputError(
        f"{file}:{row.line}",
        f"{row.point} is below the {bound * 1e3:.3g} ms that {gpu.name}'s datasheet allows {model.name} "
        f"({len(below)} such rows, lines {shown})",
        name="step_s",
        value=row.step_s,
        hint="check model, gpu, dtype and tp of the rows",
    )


def _errors(
    rows: Sequence[Row],
    tp: int,
    latency: AffineLatency,
    saturation: Saturation | None,
    model: Model | None,
    gpu: Gpu | None,
) -> list[FitError]:
    """Return the errors of the fit by region, and of half-grid fits on the other half."""
    result: list[FitError] = []
    prefill, decode, mixed = (timed(rows, phase, tp) for phase in Phase)
    lm = saturation.tokens.best if saturation is not None else None
    tokens = prefill.column("requests") * prefill.column("prompt_tokens")
    if lm is not None:
        result += _error_of(latency, prefill.only(tokens <= lm), tp, f"prefill of up to {lm:.0f} tokens (Lm)")
        result += _error_of(latency, prefill.only(tokens > lm), tp, f"prefill beyond {lm:.0f} tokens (Lm)")
    result += _error_of(latency, prefill, tp, "all")
    batch = decode.column("requests")
    edge = latency.small.bends[0][0] if latency.small.bends else float(np.median(batch)) if len(batch) else 1
    if np.any(batch > edge):
        result += _error_of(latency, decode.only(batch <= edge), tp, f"decode of up to {edge:g} requests")
        result += _error_of(latency, decode.only(batch > edge), tp, f"decode of more than {edge:g} requests")
    result += _error_of(latency, decode, tp, "all")
    result += _error_of(latency, mixed, tp, "all")
    for phase, found in (("prefill", prefill), ("decode", decode)):
        result += _held_out(rows, tp, phase, found, model, gpu)
    return result


def _error_of(latency: AffineLatency, points: Timed, tp: int, region: str) -> list[FitError]:
    if not points.points:
        return []
    return [error_of(predict(latency, points.points), points, tp=tp, region=region)]


def error_of(predicted_s: Floats, points: Timed, *, tp: int, region: str) -> FitError:
    """Return the relative errors of predicted times."""
    relative = np.abs(predicted_s / points.step_s - 1)
    spread = float(np.sum((points.step_s - points.step_s.mean()) ** 2))
    r2 = 1 - float(np.sum((predicted_s - points.step_s) ** 2)) / spread if spread > 0 else float("nan")
    return FitError(
        tp, points.points[0].phase, region, len(points.points), float(relative.mean()), float(relative.max()), r2
    )


def _held_out(
    rows: Sequence[Row], tp: int, phase: str, found: Timed, model: Model | None, gpu: Gpu | None
) -> list[FitError]:
    """Return the error on every second point of a fit to the others."""
    test_points = set(found.points[1::2])
    if len(found.points) < 6:
        return []
    train = [row for row in rows if row.point not in test_points]
    latency, _, _ = fit_latency(train, tp, model=model, gpu=gpu)
    test = found.only(np.array([point in test_points for point in found.points]))
    return [replace(error, phase=phase) for error in _error_of(latency, test, tp, "held out (every second point)")]


def fit_appendix_a(rows: Sequence[Row], tp: int, model: Model) -> AppendixA | None:
    """Return C1 to C5 of the paper's appendix A for one degree; None with fewer than 3 points of a phase.

    Source:
        arXiv 2401.09670v3, appendix A: T_prefill = C1·(4·t·h² + 2·t·h·m) + C2·3·h·t2/b + C3,
        T_decode = C4·(4h² + 2hm) + C5·3·h·t, with h and m divided by the tensor parallel degree.
    """
    prefill, decode = timed(rows, Phase.PREFILL, tp), timed(rows, Phase.DECODE, tp)
    if min(len(prefill.points), len(decode.points)) < 3:
        return None
    h, m = model.hidden_size, model.ffn_size
    weights = (4 * h * h + 2 * h * m) / tp
    n, each, cached = (prefill.column(name) for name in ("requests", "prompt_tokens", "cached_tokens"))
    matrix = np.stack(
        [n * each * weights, 3 * h / tp * n * each * (each + 2 * cached) / APPENDIX_A_BLOCK, np.ones_like(n)], 1
    )
    nothing = np.zeros((0, 3))
    first, residual_p, _ = _solve(matrix / prefill.step_s[:, None], np.ones(len(prefill.step_s)), nothing)
    total = decode.column("requests") * decode.column("context_tokens")
    matrix = np.stack([np.full_like(total, weights), 3 * h / tp * total], 1)
    second, residual_d, _ = _solve(matrix / decode.step_s[:, None], np.ones(len(decode.step_s)), nothing[:, :2])
    c1, c2, c3, c4, c5 = (float(c) for c in (*first, *second))
    return AppendixA(tp, (c1, c2, c3, c4, c5), float(np.abs(residual_p).mean()), float(np.abs(residual_d).mean()))


def _speed_ups(by_tp: dict[int, TpFit], rows: Sequence[Row]) -> list[SpeedUp]:
    """Return K at the tokens and batches that the base degree timed, with the errors of both fits as its interval."""
    base = min(by_tp)
    result = []
    for tp in sorted(by_tp):
        if tp == base:
            continue
        for phase in (Phase.PREFILL, Phase.DECODE):
            here, there = timed(rows, phase, tp), timed(rows, phase, base)
            width = 2 * math.hypot(_mean_error(by_tp[base], phase.value), _mean_error(by_tp[tp], phase.value))
            seen: set[int] = set()
            # One prompt of a length rather than several short ones.
            for i, point in sorted(enumerate(here.points), key=lambda pair: pair[1].requests):
                pair = replace(point, tp=base)
                size = point.requests * point.prompt_tokens if phase is Phase.PREFILL else point.requests
                if pair not in there.points or size in seen or point.cached_tokens:
                    continue
                seen.add(size)
                k = _predict(by_tp[base].latency, pair) / _predict(by_tp[tp].latency, point)
                fit = Fit(k / (1 + width), k, k * (1 + width))
                result.append(SpeedUp(tp, base, phase.value, size, fit, here.comm_share[i]))
    return result


def _mean_error(fit: TpFit, phase: str) -> float:
    return next((e.mean for e in fit.errors if e.phase == phase and e.region == "all"), 0.0)
