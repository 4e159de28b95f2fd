"""Figures that keys describe which stand in no sweep file: options of `dsim plot`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from dsim.errors import InputError
from dsim.yamlfile import Section, parse_yaml
from experiments.plots.spec import FORMS, Kind, PlotSpec, parse_plot

#: Where errors in such keys are, before the line.
GIVEN: Final = "options"
#: Fields that a key sets, where they are not called as it is.
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {"log": ("log_x", "log_y")}


def plot_section(kind: Kind, keys: Mapping[str, object]) -> Section:
    """Return an entry of `plots` with these keys."""
    # JSON is YAML.
    return parse_yaml(json.dumps({"kind": kind.value, **keys}).encode(), file=GIVEN)


def changed(spec: PlotSpec, keys: Mapping[str, object], *, columns: Collection[str]) -> PlotSpec:
    """Return a figure with some keys set, which are checked as those of a sweep file are.

    Args:
        columns: names of what its rows have.

    Raises:
        InputError: the kind has no use for a key, or its value is out of range.
    """
    if spec.kind is Kind.TIMELINE:
        other = next((key for key in keys if key != "title"), None)
        if other is not None:
            raise InputError(GIVEN, "is not a known key", value=other, hint="leave it out")
        return replace(spec, title=str(keys.get("title", spec.title)))
    shown: dict[str, object] = {"x": spec.x, "y": list(spec.y), "series": spec.series}
    shown = {key: value for key, value in shown.items() if value and key not in FORMS[spec.kind].no}
    parsed = parse_plot(plot_section(spec.kind, {**shown, **keys}), columns=columns)
    fields = [name for key in keys for name in _FIELDS.get(key, (key,))]
    return replace(spec, **{name: getattr(parsed, name) for name in fields})
