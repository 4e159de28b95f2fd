"""The forms of prefill and decode steps, fitted to the timed points of one degree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsim.contract import ViolationKind, decode_bound_s, find_violations, prefill_bound_s
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, Bends
from dsim.model import Model
from dsim.profile_fit import Fit
from profiles.curve import Curve, Floats, Problem, fit_curve, stretches
from profiles.rows import Phase, Row
from profiles.timed import Timed, timed, valid_range_of

#: Weights of "squares cost nothing" and "a prompt costs nothing beside its tokens": where the points cannot tell these
#: from tokens (all prompts equally long), tokens win.
THRIFT: Final = {"per_token_squared_s": 0.02, "per_request_s": 0.1}
#: Fewest points of a phase.
_FEWEST = 3
#: Columns whose smallest singular value is below this share of the largest are one column too many.
_RANK = 1e-6


@dataclass(frozen=True, slots=True)
class Least:
    """Seconds that the rows leave open and that a step takes at least, by the datasheet."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    per_context_token_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LatencyFit:
    """The latency model of one degree with the curves behind it."""

    latency: AffineLatency
    prefill: Curve
    decode: Curve
    least: Least

    def constants(self) -> dict[str, Fit]:
        """Return the 95 % intervals of all constants by name, such as `prefill.constant_s`."""
        result = _named("prefill", _prefill_names(self.prefill), self.prefill, {"constant_s": self.least.prefill_s})
        result.setdefault("prefill.per_request_s", Fit(0.0, 0.0, 0.0))
        least = {"constant_s": self.least.decode_s, "per_context_token_s": self.least.per_context_token_s}
        return result | _named("decode", _decode_names(self.decode), self.decode, least)


def fit_latency(
    rows: Sequence[Row], tp: int, *, model: Model | None = None, gpu: Gpu | None = None, file: str = "rows"
) -> LatencyFit:
    """Return the latency model of one degree.

    Where the rows leave it open, the constants are at least the time to read the weights once, and a context token
    the time to read its KV.

    Args:
        file: names the rows in errors.

    Raises:
        InputError: a phase has too few points, or points that cannot tell what a batch costs from what context costs.
    """
    prefill_rows, decode_rows = timed(rows, Phase.PREFILL, tp), timed(rows, Phase.DECODE, tp)
    _refuse_few(decode_rows, prefill_rows, tp, file)
    _refuse_rank(decode_rows, tp, file, rows)
    fit = _fitted(rows, prefill_rows, decode_rows, tp, Least())
    if model is None or gpu is None:
        return fit
    least = _least(fit, prefill_rows, decode_rows, model=model, gpu=gpu, tp=tp)
    return fit if least == Least() else _fitted(rows, prefill_rows, decode_rows, tp, least)


def _fitted(rows: Sequence[Row], prefill_rows: Timed, decode_rows: Timed, tp: int, least: Least) -> LatencyFit:
    decode, decode_curve = _fit_decode(decode_rows, least)
    prefill, prefill_curve = _fit_prefill(prefill_rows, decode.per_context_token_s, least.prefill_s)
    valid = valid_range_of([row for row in rows if row.point.tp == tp])
    return LatencyFit(AffineLatency(prefill, decode, decode, 1, valid), prefill_curve, decode_curve, least)


def _least(fit: LatencyFit, prefill_rows: Timed, decode_rows: Timed, *, model: Model, gpu: Gpu, tp: int) -> Least:
    """Return what the fit lacks to the datasheet's least times where the rows leave that open, all 0 if nothing."""
    latency = fit.latency
    context_s = _least_context_s(fit, model=model, gpu=gpu, tp=tp)
    bounds = (
        prefill_bound_s([(1, 0)], model=model, gpu=gpu, tp=tp),
        decode_bound_s(1, 1, model=model, gpu=gpu, tp=tp),
    )
    if latency.prefill_s([(1, 0)]) >= bounds[0] and latency.decode_s(1, 1) >= bounds[1]:
        return Least(per_context_token_s=context_s)
    return Least(
        min(bounds[0], 0.999 * float(prefill_rows.step_s.min())),
        min(bounds[1], 0.999 * float(decode_rows.step_s.min())),
        context_s,
    )


def _least_context_s(fit: LatencyFit, *, model: Model, gpu: Gpu, tp: int) -> float:
    """Return the seconds to read the KV of a context token, where the fit has less and that shows.

    Either a step would be faster than the datasheet allows, or context costs nothing and the rows do not say so.
    """
    least_s = model.kv_bytes_per_token / gpu.hbm_bytes_per_s / tp
    found_s = fit.latency.small.per_context_token_s
    if found_s >= least_s:
        return 0.0
    found = find_violations(fit.latency, model=model, gpu=gpu, tp=tp)
    if any(v.phase == "decode" and v.kind is ViolationKind.BELOW_BOUND for v in found):
        return least_s
    hidden = found_s == 0 and fit.constants()["decode.per_context_token_s"].high >= least_s
    return least_s if hidden else 0.0


def _refuse_few(decode_rows: Timed, prefill_rows: Timed, tp: int, file: str) -> None:
    for name, found, what in (("decode", decode_rows, "batch or context"), ("prefill", prefill_rows, "tokens")):
        if len(found.points) < _FEWEST:
            raise InputError(
                file,
                f"has {len(found.points)} {name} points for tp {tp}, a fit needs 3 or more",
                hint=f"time more of them, differing in {what}",
            )


def _refuse_rank(decode_rows: Timed, tp: int, file: str, rows: Sequence[Row]) -> None:
    """Refuse decode points from which batch and context cannot be told apart, or from the constant."""
    batch, total = decode_rows.column("requests"), decode_rows.column("requests") * decode_rows.column("context_tokens")
    columns = np.stack([np.ones_like(batch), total, batch], 1)
    sizes = np.linalg.svd(columns / np.linalg.norm(columns, axis=0), compute_uv=False)
    if sizes[-1] > _RANK * sizes[0]:
        return
    lines = [row.line for row in rows if row.point.tp == tp and row.point.phase == Phase.DECODE.value]
    what = "several batches and several contexts a request"
    if len({p.context_tokens for p in decode_rows.points}) == 1:
        what = f"a second context (all have {decode_rows.points[0].context_tokens:g} tokens a request)"
    raise InputError(
        f"{file}:{min(lines)}",
        f"decode points of tp {tp} cannot tell what a request costs from what its context costs "
        f"(lines {min(lines)} to {max(lines)})",
        hint=f"time {what}",
    )


def _fit_decode(rows: Timed, least: Least) -> tuple[AffineDecode, Curve]:
    batch = rows.column("requests")
    total = batch * rows.column("context_tokens")
    one = np.ones_like(batch)

    def design(bends: Sequence[float]) -> Floats:
        return np.concatenate([np.stack([one, total], 1), stretches(batch, bends)], 1)

    # Only what is above the least time is fitted, but errors are relative to all of it.
    offset_s = least.decode_s + least.per_context_token_s * total
    if least.per_context_token_s:
        offset_s = np.minimum(offset_s, 0.999 * rows.step_s)
    curve = fit_curve(Problem(design, batch, rows.step_s, offset_s, 2, {}))
    found = dict(zip(_decode_names(curve), curve.values.tolist(), strict=True))
    decode = AffineDecode(
        least.decode_s + found["constant_s"],
        least.per_context_token_s + found["per_context_token_s"],
        found["per_request_s"],
        _bends(curve, found, "per_request_s"),
    )
    return decode, curve


def _fit_prefill(rows: Timed, per_context_token_s: float, least_s: float) -> tuple[AffinePrefill, Curve]:
    prompts, each, cached = rows.column("requests"), rows.column("prompt_tokens"), rows.column("cached_tokens")
    tokens = rows.tokens
    columns = {"constant_s": np.ones_like(prompts), "per_token_squared_s": tokens * (each + 2 * cached)}
    # With prompts one at a time, squares and bends explain the same thing; so do prompts and the constant.
    if np.any(prompts != prompts[0]):
        columns["per_request_s"] = prompts
    names = list(columns)

    def design(bends: Sequence[float]) -> Floats:
        return np.concatenate([np.stack(list(columns.values()), 1), stretches(tokens, bends)], 1)

    reread_s = per_context_token_s * prompts * cached
    offset_s = np.minimum(least_s + reread_s, 0.99 * rows.step_s)
    thrift = {names.index(name): weight for name, weight in THRIFT.items() if name in columns}
    curve = fit_curve(Problem(design, tokens, rows.step_s, offset_s, len(columns), thrift))
    found = dict(zip(_prefill_names(curve), curve.values.tolist(), strict=True))
    prefill = AffinePrefill(
        least_s + found["constant_s"],
        found["per_token_s"],
        found["per_token_squared_s"],
        found.get("per_request_s", 0.0),
        _bends(curve, found, "per_token_s"),
    )
    return prefill, curve


def _prefill_names(curve: Curve) -> list[str]:
    """Return the names of the curve's constants, in their order."""
    shared = ["constant_s", "per_token_squared_s", "per_request_s"][: curve.problem.slopes_at]
    return [*shared, "per_token_s", *_bend_names(curve, "per_token_s")]


def _decode_names(curve: Curve) -> list[str]:
    return ["constant_s", "per_context_token_s", "per_request_s", *_bend_names(curve, "per_request_s")]


def _bend_names(curve: Curve, slope: str) -> list[str]:
    return [f"bends.{start}.{slope}" for start in _starts(curve)]


def _bends(curve: Curve, found: dict[str, float], slope: str) -> Bends:
    return tuple((start, found[f"bends.{start}.{slope}"]) for start in _starts(curve))


def _starts(curve: Curve) -> list[int]:
    return [max(round(bend), 1) for bend in curve.bends]


def _named(phase: str, names: Sequence[str], curve: Curve, least: dict[str, float]) -> dict[str, Fit]:
    result = {}
    for name, fit in zip(names, curve.intervals(), strict=True):
        shift = least.get(name, 0.0)
        result[f"{phase}.{name}"] = Fit(fit.low + shift, fit.best + shift, fit.high + shift)
    return result
