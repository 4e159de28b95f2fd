"""Fits: from raw timing rows to the latency models of all tensor parallel degrees, and what is known about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import AffineLatency, ValidRange
from dsim.model import Model
from dsim.profile_fit import AppendixA, Fit, FitError, SpeedUp
from profiles.appendix_a import fit_appendix_a
from profiles.errors import errors_of
from profiles.forms import LatencyFit, fit_latency
from profiles.knee import Saturation, saturation_of
from profiles.refuse import refuse_falling, refuse_rows_below_bound, refuse_violations
from profiles.rows import Phase, Row, Rows
from profiles.speedup import Degree, speed_ups
from profiles.timed import timed, valid_range_of


@dataclass(frozen=True, slots=True, eq=False)
class TpFit:
    """Everything fitted for one tensor parallel degree.

    Args:
        latency: of kernels; host work that was given is taken out.
        constants: its intervals by name.
        errors: of kernels and host work together, as timed.
    """

    tp: int
    latency: AffineLatency
    constants: dict[str, Fit]
    errors: tuple[FitError, ...]
    saturation: Saturation | None
    appendix_a: AppendixA | None


@dataclass(frozen=True, slots=True, eq=False)
class FittedRows:
    """What the rows of one file say.

    Args:
        speed_up: K of every degree against the smallest one.
        host_step_s: driver time of a launch, taken out of every fit's constants.
    """

    by_tp: dict[int, TpFit]
    valid_range: ValidRange
    speed_up: tuple[SpeedUp, ...]
    host_step_s: float


@dataclass(frozen=True, slots=True)
class _Subject:
    file: str
    model: Model | None
    gpu: Gpu | None
    host_step_s: float


def fit_rows(rows: Rows, *, model: Model | None = None, gpu: Gpu | None = None, host_step_s: float = 0.0) -> FittedRows:
    """Return the fits of all degrees in the rows.

    Args:
        model: for the contract and the appendix-A form; both are left out without it.
        gpu: likewise for the contract.
        host_step_s: driver time in every timed step, which is no kernel's.

    Raises:
        InputError: a degree has too few points, rows or fit break the contract of latency models, or steps without
            any work would take less than the host work.
    """
    ok, subject = rows.ok, _Subject(rows.file, model, gpu, host_step_s)
    degrees = sorted({row.point.tp for row in ok})
    whole: dict[int, LatencyFit] = {}
    by_tp: dict[int, TpFit] = {}
    for tp in degrees:
        own = [row for row in ok if row.point.tp == tp]
        _refuse_rows(own, tp, subject)
        whole[tp] = fit_latency(own, tp, model=model, gpu=gpu, file=rows.file)
        by_tp[tp] = _described(whole[tp], own, tp, subject)
    known = {tp: Degree(whole[tp].latency, _mean_errors(by_tp[tp])) for tp in degrees}
    return FittedRows(by_tp, valid_range_of(ok), tuple(speed_ups(known, ok)), host_step_s)


def _refuse_rows(rows: Sequence[Row], tp: int, subject: _Subject) -> None:
    if subject.model is not None and subject.gpu is not None:
        refuse_rows_below_bound(
            rows, subject.file, model=subject.model, gpu=subject.gpu, host_step_s=subject.host_step_s
        )
    refuse_falling(rows, tp, subject.file)


def _described(fit: LatencyFit, rows: Sequence[Row], tp: int, subject: _Subject) -> TpFit:
    """Return the fit with its errors, Lm and intervals, if its kernels keep the contract."""
    model, gpu, host_step_s = subject.model, subject.gpu, subject.host_step_s
    kernels = _without_host(fit.latency, host_step_s, tp)
    if model is not None and gpu is not None:
        refuse_violations(kernels, rows, tp, subject.file, model=model, gpu=gpu)
    saturation = _saturation(fit.latency, rows, tp)
    lm = None if saturation is None or saturation.method == "not-reached" else saturation.tokens.best
    return TpFit(
        tp,
        kernels,
        {name: _shifted(name, interval, host_step_s) for name, interval in fit.constants().items()},
        tuple(errors_of(rows, fit.latency, tp=tp, lm=lm, model=model, gpu=gpu)),
        saturation,
        None if model is None else fit_appendix_a(rows, tp, model),
    )


def _saturation(latency: AffineLatency, rows: Sequence[Row], tp: int) -> Saturation | None:
    prefill = timed(rows, Phase.PREFILL, tp)
    alone = prefill.only(prefill.column("cached_tokens") == 0)
    return saturation_of(alone.column("requests"), alone.column("prompt_tokens"), alone.step_s, latency=latency)


def _without_host(latency: AffineLatency, host_step_s: float, tp: int) -> AffineLatency:
    """Return the latency model of kernels."""
    for phase, constant_s in (("prefill", latency.prefill.constant_s), ("decode", latency.small.constant_s)):
        if host_step_s > constant_s:
            raise InputError(
                "--host-step",
                f"must be <= {constant_s * 1e3:.4g} ms, the constant of {phase} steps at tp {tp}",
                value=f"{host_step_s * 1e3:g}ms",
                hint="it is more than the rows leave for a step without any work",
            )
    decode = replace(latency.small, constant_s=latency.small.constant_s - host_step_s)
    prefill = replace(latency.prefill, constant_s=latency.prefill.constant_s - host_step_s)
    return replace(latency, prefill=prefill, small=decode, large=decode)


def _shifted(name: str, interval: Fit, host_step_s: float) -> Fit:
    if not name.endswith(".constant_s"):
        return interval
    low, best, high = (value - host_step_s for value in (interval.low, interval.best, interval.high))
    return Fit(max(low, 0.0), best, high)


def _mean_errors(fit: TpFit) -> dict[str, float]:
    return {error.phase: error.mean for error in fit.errors if error.region == "all"}
