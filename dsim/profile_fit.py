"""What a fitted profile says about its own fit: intervals, errors, Lm, speed-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsim.yamlfile import Field, Section

#: Errors beyond this are no fit.
_MAX_ERROR = 100.0
#: How Lm may have been found.
SATURATION_METHODS = ("knee", "share", "not-reached")


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted number and its interval, a 95 % one unless its place says otherwise; 0 and infinity are open ends."""

    low: float
    best: float
    high: float


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fit is from rows: shares of the measured times.

    Args:
        region: part of the grid; `held out` where the rows were not fitted.
        r2: share of the variance explained; NaN where there is none.
    """

    tp: int
    phase: str
    region: str
    points: int
    mean: float
    worst: float
    r2: float


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """K: step time at `base_tp` / at `tp`.

    Args:
        tokens: prompt tokens of a prefill step, batch of a decode step.
        k: low and high follow the mean errors of both fits.
        comm_share: share of the all-reduce in the step at `tp`; None where no row says.
        context_tokens: of each request of a decode step; None in prefill.
    """

    tp: int
    base_tp: int
    phase: str
    tokens: int
    k: Fit
    comm_share: float | None = None
    context_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class AppendixA:
    """The paper's appendix-A form fitted to the same rows, for comparison.

    Args:
        constants: C1 to C5.
        prefill_error: mean relative error.
        decode_error: mean relative error.
    """

    tp: int
    constants: tuple[float, float, float, float, float]
    prefill_error: float
    decode_error: float


@dataclass(frozen=True, slots=True)
class FitReport:
    """The section `fit` of a profile file (docs/profiles.md).

    Args:
        rows: name of the rows file.
        rows_sha256: its digest.
        saturation_tokens: Lm with its interval, by tensor parallel degree.
        saturation_methods: how each was found: `knee`, `share` or `not-reached`, which has only `low`.
        constants: intervals by tensor parallel degree and dotted name.
    """

    rows: str
    rows_sha256: str
    saturation_tokens: Mapping[int, Fit] = field(default_factory=dict)
    saturation_methods: Mapping[int, str] = field(default_factory=dict)
    constants: Mapping[int, Mapping[str, Fit]] = field(default_factory=dict)
    errors: tuple[FitError, ...] = ()
    speed_up: tuple[SpeedUp, ...] = ()
    appendix_a: tuple[AppendixA, ...] = ()


def read_fit(field_: Field) -> FitReport:
    """Return the report in the section `fit`.

    Raises:
        InputError: a key is unknown or missing, or a value impossible.
    """
    section = field_.section().only(
        ("rows", "rows_sha256", "saturation_tokens", "constants", "errors", "speed_up", "appendix_a", "reason")
    )
    saturation: dict[int, Fit] = {}
    methods: dict[int, str] = {}
    for tp, entry in _by_tp(section, "saturation_tokens").items():
        saturation[tp], methods[tp] = _saturation(entry.section())
    constants = {
        tp: {
            name: _fit(value.section().only(("low", "best", "high"))) for name, value in entry.section().fields.items()
        }
        for tp, entry in _by_tp(section, "constants").items()
    }
    return FitReport(
        rows=section.text("rows"),
        rows_sha256=section.text("rows_sha256"),
        saturation_tokens=saturation,
        saturation_methods=methods,
        constants=constants,
        errors=tuple(_error(item) for item in _items(section, "errors")),
        speed_up=tuple(_speed_up(item) for item in _items(section, "speed_up")),
        appendix_a=tuple(_appendix_a(item) for item in _items(section, "appendix_a")),
    )


def _by_tp(section: Section, key: str) -> dict[int, Field]:
    found = section.get(key)
    return {} if found is None else found.section().by_integer()


def _items(section: Section, key: str) -> tuple[Section, ...]:
    found = section.get(key)
    return () if found is None else tuple(item.section() for item in found.items())


def _saturation(section: Section) -> tuple[Fit, str]:
    """Return Lm and its method; ends that are left out are open, and so is all but `low` where it is not reached."""
    section.only(("low", "best", "high", "method"))
    method = section.text("method")
    if method not in SATURATION_METHODS:
        raise section.need("method").error(f"must be one of {', '.join(SATURATION_METHODS)}")
    if method == "not-reached":
        section.only(("low", "method"))
        return Fit(section.number("low", 0.0, at_least=0), math.inf, math.inf), method
    return _fit(section, low=0.0, high=math.inf), method


def _fit(section: Section, *, low: float | None = None, high: float | None = None) -> Fit:
    """Return a number and its interval; `low` and `high` stand for ends that may be left out."""
    fit = Fit(
        section.number("low", low, at_least=0),
        section.number("best", at_least=0),
        section.number("high", high, at_least=0),
    )
    if not fit.low <= fit.best <= fit.high:
        raise section.need("best").error(f"must lie between low={fit.low:g} and high={fit.high:g}")
    return fit


def _error(section: Section) -> FitError:
    section.only(("tp", "phase", "region", "points", "mean", "worst", "r2"))
    r2 = section.get("r2")
    return FitError(
        tp=section.integer("tp", at_least=1),
        phase=_phase(section),
        region=section.text("region"),
        points=section.integer("points", at_least=1),
        mean=section.number("mean", at_least=0, at_most=_MAX_ERROR),
        worst=section.number("worst", at_least=0, at_most=_MAX_ERROR),
        r2=float("nan") if r2 is None else r2.number(at_most=1),
    )


def _speed_up(section: Section) -> SpeedUp:
    section.only(("tp", "base_tp", "phase", "tokens", "context_tokens", "low", "best", "high", "comm_share"))
    comm, context = section.get("comm_share"), section.get("context_tokens")
    return SpeedUp(
        tp=section.integer("tp", at_least=1),
        base_tp=section.integer("base_tp", at_least=1),
        phase=_phase(section),
        tokens=section.integer("tokens", at_least=1),
        k=_fit(section),
        comm_share=None if comm is None else comm.number(at_least=0, at_most=1),
        context_tokens=None if context is None else context.number(at_least=1),
    )


def _appendix_a(section: Section) -> AppendixA:
    section.only(("tp", "c1", "c2", "c3", "c4", "c5", "prefill_error", "decode_error"))
    c1, c2, c3, c4, c5 = (section.number(key, at_least=0) for key in ("c1", "c2", "c3", "c4", "c5"))
    return AppendixA(
        tp=section.integer("tp", at_least=1),
        constants=(c1, c2, c3, c4, c5),
        prefill_error=section.number("prefill_error", at_least=0, at_most=_MAX_ERROR),
        decode_error=section.number("decode_error", at_least=0, at_most=_MAX_ERROR),
    )


def _phase(section: Section) -> str:
    phase = section.text("phase")
    if phase not in ("prefill", "decode", "mixed"):
        raise section.need("phase").error("must be prefill, decode or mixed")
    return phase
