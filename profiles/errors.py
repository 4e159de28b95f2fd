"""How far a fit is from rows, by region of the grid, and from rows that were not fitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import AffineLatency
from dsim.model import Model
from dsim.profile_fit import FitError
from profiles.curve import Floats
from profiles.forms import fit_latency
from profiles.rows import Phase, Row
from profiles.timed import Timed, predict, timed

#: Fewest points of which every second one is held out.
_FEWEST_HELD_OUT = 6


def errors_of(
    rows: Sequence[Row], latency: AffineLatency, *, tp: int, lm: float | None, model: Model | None, gpu: Gpu | None
) -> list[FitError]:
    """Return the errors of the fit by region, and those of fits to every other point on the rest.

    Args:
        lm: Lm, tokens; None where unknown.
    """
    prefill, decode, mixed = (timed(rows, phase, tp) for phase in Phase)
    return [
        *_prefill_errors(latency, prefill, tp, lm),
        *_decode_errors(latency, decode, tp),
        *_error_of(latency, mixed, tp, "all"),
        *held_out(rows, prefill, tp, model=model, gpu=gpu),
        *held_out(rows, decode, tp, model=model, gpu=gpu),
    ]


def error_of(predicted_s: Floats, points: Timed, *, tp: int, region: str) -> FitError:
    """Return the relative errors of predicted times."""
    relative = np.abs(predicted_s / points.step_s - 1)
    spread = float(np.sum((points.step_s - points.step_s.mean()) ** 2))
    r2 = 1 - float(np.sum((predicted_s - points.step_s) ** 2)) / spread if spread > 0 else float("nan")
    return FitError(
        tp, points.points[0].phase, region, len(points.points), float(relative.mean()), float(relative.max()), r2
    )


def held_out(rows: Sequence[Row], found: Timed, tp: int, *, model: Model | None, gpu: Gpu | None) -> list[FitError]:
    """Return the error on every second of the points of a fit to the others; none where these are too few to fit."""
    test_points = set(found.points[1::2])
    if len(found.points) < _FEWEST_HELD_OUT:
        return []
    try:
        half = fit_latency([row for row in rows if row.point not in test_points], tp, model=model, gpu=gpu)
    except InputError:
        return []
    test = found.only(np.array([point in test_points for point in found.points]))
    return _error_of(half.latency, test, tp, "held out (every second point)")


def _prefill_errors(latency: AffineLatency, points: Timed, tp: int, lm: float | None) -> list[FitError]:
    result: list[FitError] = []
    if lm is not None:
        result += _error_of(latency, points.only(points.tokens <= lm), tp, f"prefill of up to {lm:.0f} tokens (Lm)")
        result += _error_of(latency, points.only(points.tokens > lm), tp, f"prefill beyond {lm:.0f} tokens (Lm)")
    return result + _error_of(latency, points, tp, "all")


def _decode_errors(latency: AffineLatency, points: Timed, tp: int) -> list[FitError]:
    result: list[FitError] = []
    batch = points.column("requests")
    edge = latency.small.bends[0][0] if latency.small.bends else float(np.median(batch))
    if np.any(batch > edge):
        result += _error_of(latency, points.only(batch <= edge), tp, f"decode of up to {edge:g} requests")
        result += _error_of(latency, points.only(batch > edge), tp, f"decode of more than {edge:g} requests")
    return result + _error_of(latency, points, tp, "all")


def _error_of(latency: AffineLatency, points: Timed, tp: int, region: str) -> list[FitError]:
    if not points.points:
        return []
    return [error_of(predict(latency, points.points), points, tp=tp, region=region)]
