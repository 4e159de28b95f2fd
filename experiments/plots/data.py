"""The numbers of a figure, taken from a frame of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from dsim.yamlfile import Scalar
from experiments.plots.labels import brief

if TYPE_CHECKING:
    import pandas as pd

    from experiments.plots.spec import PlotSpec

Floats = NDArray[np.float64]

#: Digits of a number at least (where they tell it from others), and those by which numbers are told apart.
_SHORT, _EXACT = 6, 12


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A column with its interval; NaN where there is no number.

    Args:
        low, high: limits of the interval; the estimate itself where there is none.
        has_interval: whether the column has limits at all.
    """

    best: Floats
    low: Floats
    high: Floats
    has_interval: bool

    def __mul__(self, factor: float) -> Values:
        return Values(self.best * factor, self.low * factor, self.high * factor, self.has_interval)

    def inverse(self) -> Values:
        """Return 1 / each of positive values; the limits change places, and one at or below 0 becomes infinite."""
        low, high = (np.divide(1, v, out=np.full(len(v), np.inf), where=~(v <= 0)) for v in (self.high, self.low))
        best = np.divide(1, self.best, out=np.full(len(self.best), np.nan), where=self.best > 0)
        return Values(best, low, high, self.has_interval)

    def clipped(self, low: float, high: float) -> Values:
        """Return the values with their intervals cut to what is possible."""
        return Values(self.best, np.clip(self.low, low, high), np.clip(self.high, low, high), self.has_interval)

    def take(self, order: NDArray[np.intp]) -> Values:
        """Return the values in another order."""
        return Values(self.best[order], self.low[order], self.high[order], self.has_interval)

    @property
    def errors(self) -> Floats | None:
        """Lengths of the bars below and above, shape (2, n); None without intervals."""
        if not self.has_interval:
            return None
        # A mean of values and limits is rounded, so a limit may pass the estimate by a last bit.
        below, above = self.best - self.low, self.high - self.best
        return np.nan_to_num(np.clip(np.vstack([below, above]), 0, None))


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Rows that are shown alike.

    Args:
        number: counted from 0, by which it is styled.
        label: how it is called; empty where nothing is told apart.
        key: the values that its rows share, as `key_of` tells them apart.
    """

    number: int
    label: str
    key: tuple[str, ...]
    frame: pd.DataFrame


def values_of(frame: pd.DataFrame, column: str, *, spec: PlotSpec) -> Values:
    """Return a column of numbers with its interval.

    Raises:
        InputError: there is no such column, or it has texts.
    """
    import pandas as pd

    column = column if column in frame.columns else column.removesuffix(".best")
    name = column if column in frame.columns else f"{column}.best"
    if name not in frame.columns:
        raise problem(spec, "is no column of the rows", value=column, hint="name one that the rows have")
    try:
        best = pd.to_numeric(frame[name]).to_numpy(dtype=np.float64)
    except (TypeError, ValueError):
        raise problem(
            spec, "has texts where numbers are needed", value=column, hint="name a column of numbers"
        ) from None
    limits = []
    for end in ("low", "high"):
        name = f"{column.removesuffix('.best')}.{end}"
        limit = (
            pd.to_numeric(frame[name]).to_numpy(dtype=np.float64)
            if name in frame.columns
            else np.full(len(best), np.nan)
        )
        limits.append(limit)
    known = not all(np.isnan(limit).all() for limit in limits)
    low, high = (np.where(np.isnan(limit), best, limit) for limit in limits)
    return Values(best, low, high, known)


def column_of(frame: pd.DataFrame, column: str, *, spec: PlotSpec) -> list[object]:
    """Return a column's values as they are.

    Raises:
        InputError: there is no such column.
    """
    if column not in frame.columns:
        raise problem(spec, "is no column of the rows", value=column, hint="name one that the rows have")
    return frame[column].to_list()


def texts_of(frame: pd.DataFrame, column: str, *, spec: PlotSpec) -> list[str]:
    """Return a column as texts: numbers with as many digits as tell them apart.

    Raises:
        InputError: there is no such column.
    """
    return different_texts(column_of(frame, column, spec=spec))


def different_texts(values: Sequence[object]) -> list[str]:
    """Return values as texts, numbers with as many digits as tell them apart.

    >>> different_texts([1.0, 2.5]), different_texts([1234567.5, 1234568.5])
    (['1', '2.5'], ['1234567.5', '1234568.5'])
    """
    different = len({key_of(value) for value in values})
    for digits in range(_SHORT, _EXACT):
        texts = [text_of(value, digits=digits) for value in values]
        if len(set(texts)) == different:
            return texts
    return [key_of(value) for value in values]


def keys_of(frame: pd.DataFrame, column: str, *, spec: PlotSpec) -> list[str]:
    """Return a column as texts by which values are told apart, whatever other rows there are.

    Raises:
        InputError: there is no such column.
    """
    return [key_of(value) for value in column_of(frame, column, spec=spec)]


def key_of(value: object) -> str:
    """Return a text that is another one for another value; numbers that differ by rounding alone are the same.

    >>> key_of(1000001.0), key_of(1000001), key_of(0.1 + 0.2)
    ('1000001', '1000001', '0.3')
    """
    number = float(value) if isinstance(value, float | np.floating) else math.nan
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return text_of(value, digits=_EXACT)


def text_of(value: object, *, digits: int = 6) -> str:
    """Return a value as people write it, a number that is not whole by type with at most so many digits.

    >>> text_of(0.25), text_of(3), text_of(None)
    ('0.25', '3', 'none')
    """
    if is_missing(value):
        return "none"
    if isinstance(value, float | np.floating):
        return f"{float(value):.{digits}g}"
    return str(value)


def rows_of(spec: PlotSpec, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that the figure shows.

    Raises:
        InputError: there are none.
    """
    kept = frame[matches(frame, spec.where)]
    if not len(kept):
        hint = "relax `where`" if len(frame) else "run the sweep first"
        raise problem(spec, "has no rows to show", hint=hint)
    return kept


def published_of(
    spec: PlotSpec, published: pd.DataFrame | None, frame: pd.DataFrame, *, shown: Sequence[str | None]
) -> pd.DataFrame | None:
    """Return the published points that belong to the figure; a column that a point lacks does not exclude it.

    Args:
        frame: the rows beside which they are shown: what a point lacks of `shown` comes from the row that agrees with
            all the point has but `y`.
        shown: columns that say where a point stands, beside those of its series.
    """
    if published is None or not len(published):
        return None
    places = [name for name in (*shown, *series_columns(spec)) if name is not None]
    published = _located(spec, published, frame, places)
    where = {name: value for name, value in spec.where.items() if name in published.columns}
    kept = published[matches(published, where, lenient=True)]
    return kept if len(kept) else None


def _located(spec: PlotSpec, published: pd.DataFrame, frame: pd.DataFrame, shown: Sequence[str]) -> pd.DataFrame:
    """Return the points with the columns of `shown` filled in from the rows that agree with them."""
    missing = [name for name in shown if name in frame.columns and name not in published.columns]
    if not missing:
        return published
    factors = [name for name in published.columns if name in frame.columns and name not in {*spec.y, spec.value}]
    found = []
    for _, point in published.iterrows():
        known = {name: point[name] for name in factors if not is_missing(point[name])}
        rows = frame[matches(frame, known)]
        found.append({name: rows[name].iloc[0] if len(rows) else None for name in missing})
    for name in missing:
        published = published.assign(**{name: np.array([row[name] for row in found], dtype=object)})
    return published


def matches(frame: pd.DataFrame, where: Mapping[str, Scalar], *, lenient: bool = False) -> NDArray[np.bool_]:
    """Return which rows have these values.

    Args:
        lenient: a row without a value in a column has any.
    """
    kept = np.ones(len(frame), dtype=bool)
    for name, wanted in where.items():
        # What no row got is no column.
        column = frame[name].to_list() if name in frame.columns else [None] * len(frame)
        kept &= np.array([same(value, wanted) or (lenient and is_missing(value)) for value in column], dtype=bool)
    return kept


def series_of(spec: PlotSpec, frame: pd.DataFrame) -> list[Series]:
    """Return the rows by series, in the order in which the series come first.

    Raises:
        InputError: there is no such column.
    """
    columns = series_columns(spec)
    if not columns:
        return [Series(0, "", (), frame)]
    names = [_shown(frame, column, spec=spec) for column in columns]
    keys = list(zip(*(keys_of(frame, column, spec=spec) for column in columns), strict=True))
    labels = {key: ", ".join(parts) for key, parts in zip(keys, zip(*names, strict=True), strict=True)}
    return [
        Series(number, label, key, frame[[other == key for other in keys]])
        for number, (key, label) in enumerate(labels.items())
    ]


def series_columns(spec: PlotSpec) -> tuple[str, ...]:
    """Return the columns whose values make series."""
    return (*(() if spec.series is None else (spec.series,)), *spec.also)


def _shown(frame: pd.DataFrame, column: str, *, spec: PlotSpec) -> list[str]:
    """Return a column's values as in a legend: numbers with what they are."""
    texts = texts_of(frame, column, spec=spec)
    numbers = all(isinstance(value, int | float | np.number) for value in frame[column])
    return [f"{brief(column)} {text}" for text in texts] if numbers else texts


def of_series(spec: PlotSpec, published: pd.DataFrame | None, series: Series) -> pd.DataFrame | None:
    """Return the published points of one series; those that name none belong to the only one."""
    if published is None:
        return None
    columns = series_columns(spec)
    if not set(columns) <= set(published.columns):
        return published if not series.label else None
    own = np.ones(len(published), dtype=bool)
    for column, key in zip(columns, series.key, strict=True):
        own &= np.array([key_of(value) == key for value in published[column]], dtype=bool)
    kept = published[own]
    return kept if len(kept) else None


def problem(spec: PlotSpec, rule: str, *, value: object = None, hint: str | None = None) -> InputError:
    """Return the error that says why a figure cannot be drawn."""
    return InputError(f"plot {spec.file}", rule, value=value, hint=hint)


def same(value: object, wanted: Scalar) -> bool:
    """Return whether a value of a row is the one that `where` asks for."""
    if is_missing(value) or is_missing(wanted):
        return is_missing(value) and is_missing(wanted)
    if isinstance(value, bool | np.bool_) or isinstance(wanted, bool):
        return bool(value == wanted)
    if isinstance(value, int | float | np.number) and isinstance(wanted, int | float):
        return bool(np.isclose(float(value), wanted, rtol=1e-9, atol=0))
    return text_of(value) == text_of(wanted)


def is_missing(value: object) -> bool:
    """Return whether a row has no value there: None, of which pandas makes NaN."""
    return value is None or (isinstance(value, float) and value != value)
