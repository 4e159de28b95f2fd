"""Checks of figures against what is known of their rows before these are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

from dsim.errors import InputError
from dsim.yamlfile import Field, Scalar, Section
from experiments.factors import row_value
from experiments.plots.data import key_of, same, series_columns
from experiments.plots.labels import quantity
from experiments.plots.lines import ratio_of
from experiments.plots.spec import Kind, PlotSpec

if TYPE_CHECKING:
    from experiments.expected import Expected

#: Last words of the measured columns that hold texts.
TEXTS: Final = frozenset({"placement", "policy", "limiting_role", "model", "gpu", "engine", "saturation"})
#: How columns begin that hold lists.
LISTS: Final = "quantiles."

_APART: Final = "tell them apart with `series`, or choose one with `where`"
_APART_IN_CELLS: Final = "make what they differ in x or y, or choose one with `where`"
#: What a kind calls the place that one row has to itself.
_PLACES: Final[Mapping[Kind, str]] = {
    Kind.GOODPUT_BARS: "bar",
    Kind.BREAKDOWN: "bar",
    Kind.STAIRCASE: "line",
    Kind.CDF: "line",
    Kind.HEATMAP: "cell",
}
_LINES: Final = (Kind.ATTAINMENT_RATE, Kind.ATTAINMENT_SCALE, Kind.RATIO, Kind.BANDWIDTH, Kind.LINE)
#: Kinds that leave rows out which have no x.
_BY_NUMBER: Final = (*_LINES, Kind.HEATMAP)
#: What gives a column that rows could have.
_REMEDIES: Final = (
    ("quantiles.", "add it to base.quantiles, as in quantiles: [ttft_s]"),
    ("attainment.", "give limits in base.slo"),
    ("good_throughput_per_s", "give limits in base.slo"),
    ("elapsed_s", "add base.search.timing: true"),
    ("cpu_s", "add base.search.timing: true"),
)


def check_plot(section: Section, spec: PlotSpec, rows: Sequence[Expected]) -> PlotSpec:
    """Return the figure with the values of `where` as rows have them.

    Args:
        section: the entry of `plots` that says it.
        rows: one for each combination of factors.

    Raises:
        InputError: no row is shown, none has a column, texts where numbers are needed, or several rows in one place.
    """
    spec, shown = _shown(section, spec, rows)
    if spec.kind is Kind.CDF:
        for column in spec.y:
            if not column.startswith(LISTS):
                rule, hint = "has no quantiles, which a distribution is drawn from", "name a column quantiles.<name>"
                _refuse(_field(section, "y", column), column, rule, hint)
    _check_columns(section, spec, shown)
    for key, column in _numbers(spec):
        _check_numbers(_field(section, key, column), column, shown)
    if any(name not in row.values and _has(row, name) for name in spec.where for row in shown):
        # Results choose among the rows.
        return spec
    if spec.kind is Kind.RATIO:
        _check_ratios(section, spec, shown)
    if spec.kind is not Kind.PARETO:
        _check_places(section, spec, shown)
    return spec


def _shown(section: Section, spec: PlotSpec, rows: Sequence[Expected]) -> tuple[PlotSpec, list[Expected]]:
    """Return the rows that `where` selects, as far as that is known."""
    kept, where = list(rows), dict(spec.where)
    for name, wanted in spec.where.items():
        field = section.section("where").need(name)
        found = _selected(kept, name, wanted)
        if not found:
            # As a factor's choices write it, 200ms is 0.2.
            where[name] = row_value(field)
            found = _selected(kept, name, where[name])
        if not found:
            values = dict.fromkeys(
                "null" if row.values[name] is None else str(row.values[name]) for row in kept if name in row.values
            )
            said = ", ".join(values)
            hint = f"it is {said if len(said) < 200 else said[:200] + '...'} in these rows" if values else "none has it"
            raise field.error("selects no row", f"{hint}; or leave the figure out")
        kept = found
    return replace(spec, where=where), kept


def _selected(rows: Sequence[Expected], name: str, wanted: Scalar) -> list[Expected]:
    return [row for row in rows if (same(row.values[name], wanted) if name in row.values else _has(row, name))]


def _has(row: Expected, column: str) -> bool:
    return not {column, f"{column}.best", column.removesuffix(".best")}.isdisjoint(row.columns)


def _check_columns(section: Section, spec: PlotSpec, rows: Sequence[Expected]) -> None:
    """Refuse a column in which none of the rows has a value."""
    named = [("x", spec.x), *(("y", name) for name in spec.y), ("series", spec.series), ("value", spec.value)]
    named += [("best", spec.best), ("labels", spec.labels), ("mark", spec.mark)]
    for key, column in named:
        if column is not None and column.startswith(LISTS) and (key, spec.kind) != ("y", Kind.CDF):
            hint = "show it in a figure of kind cdf"
            _refuse(_field(section, key, column), column, "has lists where single values are needed", hint)
        if column is None or any(_has(row, column) for row in rows):
            continue
        if spec.kind is Kind.BREAKDOWN and key == "y" and any(_has(row, name) for row in rows for name in spec.y):
            # A part that there is none of has no length.
            continue
        hint = next((hint for start, hint in _REMEDIES if column.startswith(start)), "name a column that they have")
        _refuse(_field(section, key, column), column, "is a column that none of the rows shown has", hint)


def _numbers(spec: PlotSpec) -> list[tuple[str, str]]:
    """Return the columns that must hold numbers, with the keys that name them."""
    x = () if spec.x is None else (("x", spec.x),)
    y = tuple(("y", name) for name in spec.y)
    match spec.kind:
        case Kind.CDF:
            return []
        case Kind.HEATMAP:
            y = () if spec.value is None else (("value", spec.value),)
            x = ()
        case Kind.GOODPUT_BARS | Kind.RATIO:
            x = ()
        case Kind.BREAKDOWN:
            # A number at a bar has its unit.
            x = x if spec.x is not None and quantity(spec.x).unit else ()
    return [*x, *y, *(() if spec.mark is None else (("mark", spec.mark),))]


def _check_numbers(field: Field, column: str, rows: Sequence[Expected]) -> None:
    hint = "name a column of numbers"
    for row in rows:
        value = row.values.get(column)
        is_text = isinstance(value, str) and not _is_number(value)
        if is_text or (column not in row.values and _has(row, column) and column.rpartition(".")[2] in TEXTS):
            shown = f", such as {value!r}," if is_text else ""
            _refuse(field, column, f"has texts{shown} where numbers are needed", hint)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_ratios(section: Section, spec: PlotSpec, rows: Sequence[Expected]) -> None:
    assert spec.x is not None
    field, hint = (
        _field(section, "x", spec.x),
        "show placements such as 2xP:tp1pp1 + 3xD:tp1pp1; leave others out with `where`",
    )
    for row in rows:
        if spec.x in row.values:
            try:
                ratio_of(str(row.values[spec.x]))
            except (InputError, ValueError):
                rule = f"has {row.values[spec.x]!r} among its values, which has no prefill : decode ratio"
                _refuse(field, spec.x, rule, hint)
        elif _has(row, spec.x) and spec.x.rpartition(".")[2] != "placement":
            _refuse(field, spec.x, "has no placements, whose prefill : decode ratios are shown", hint)


def _check_places(section: Section, spec: PlotSpec, rows: Sequence[Expected]) -> None:
    """Refuse rows that would hide one another, as far as it is known where they stand."""
    names = _place(spec)
    for column in spec.y if spec.kind in _LINES else (None,):
        seen = set()
        for row in rows:
            if not _stands(spec, row, names) or (column is not None and not _has(row, column)):
                continue
            where = tuple(key_of(row.values.get(name)) for name in names)
            if where in seen:
                said = ", ".join(f"{name}={row.values.get(name)}" for name in names)
                rule = f"has several rows for one {_PLACES.get(spec.kind, 'point')}{f': {said}' if said else ''}"
                raise section.field.error_of_key(rule, _APART_IN_CELLS if spec.kind is Kind.HEATMAP else _APART)
            seen.add(where)


def _stands(spec: PlotSpec, row: Expected, names: Sequence[str]) -> bool:
    """Return whether it is known where a row stands; rows without a place along an axis are left out."""
    along = [] if spec.x is None or spec.kind not in _BY_NUMBER else [spec.x]
    along += spec.y[:1] if spec.kind is Kind.HEATMAP else ()
    return all(row.values.get(name) is not None for name in along) and all(
        name in row.values or not _has(row, name) for name in names
    )


def _place(spec: PlotSpec) -> tuple[str, ...]:
    """Return the columns whose values together belong to one row."""
    x = () if spec.x is None else (spec.x,)
    match spec.kind:
        case Kind.STAIRCASE | Kind.CDF:
            return series_columns(spec)
        case Kind.HEATMAP:
            return (*x, spec.y[0])
        case Kind.BREAKDOWN if spec.series == spec.x:
            return x
        case _:
            return (*series_columns(spec), *x)


def _field(section: Section, key: str, column: str) -> Field:
    """Return where a column is named: the key's value, the item of it, or the whole entry where it is a default."""
    field = section.get(key)
    if field is None:
        return section.field
    items = field.value if isinstance(field.value, tuple) else ()
    return next((item for item in items if item.value == column), field)


def _refuse(field: Field, column: str, rule: str, hint: str) -> NoReturn:
    """Raise the error of a column, which may be a default that the file does not name."""
    if field.value == column:
        raise field.error(rule, hint)
    raise field.error_of_key(f"needs the column {column}, which {rule.removeprefix('is a column that ')}", hint)
