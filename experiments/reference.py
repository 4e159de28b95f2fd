"""Tables of docs/sweeps.md, made of the schema: `python -m experiments.reference docs/sweeps.md` renews them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from experiments.factors import FACTOR_KEYS, RANGE_KEYS
from experiments.keys import KEYS
from experiments.measures import columns
from experiments.plots import COMMON_KEYS, FORMS, OWN_KEYS, Kind
from experiments.settings import Measure
from experiments.sweepfile import FILE_KEYS, POINT_KEYS, PUBLISHED_KEYS

_BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with every table between `<!-- table: NAME -->` and `<!-- end -->` made anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_TABLES[match['name']]()}\n{match[3]}", page)


def _keys(keys: Mapping[str, str]) -> str:
    return _table(("key", "meaning"), ((f"`{key}`", meaning) for key, meaning in keys.items()))


def _settings() -> str:
    heading = ("key of `base`", "written as", "unit", "default", "meaning")
    return _table(heading, ((f"`{key.name}`", key.form, key.unit, key.default, key.meaning) for key in KEYS))


def _kinds() -> str:
    rows = []
    for kind in Kind:
        form = FORMS[kind]
        x = "–" if "x" in form.no else "needed" if form.x is None else f"`{form.x}`"
        y = "–" if "y" in form.no else "needed" if form.y is None else _ticked(form.y)
        rows.append((f"`{kind.value}`", form.about, x, y, _ticked(form.keys) or "–"))
    return _table(("kind", "shows", "x", "y", "own keys"), rows)


def _columns() -> str:
    return _table(("measure", "columns"), ((f"`{m.value}`", _ticked(_grouped(columns(m)))) for m in Measure))


def _grouped(names: Sequence[str]) -> list[str]:
    """Return dotted names with those of one group taken together.

    >>> _grouped(["a", "b.x", "b.y", "c.d.x"])
    ['a', 'b.(x, y)', 'c.d.x']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, last = name.rpartition(".")
        groups.setdefault(group or name, []).append(last)
    return [
        group
        if members == [group]
        else f"{group}.{members[0] if len(members) == 1 else '(' + ', '.join(members) + ')'}"
        for group, members in groups.items()
    ]


def _ticked(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines).replace(
        "| --- " * len(heading) + "|", "|---" * len(heading) + "|"
    )


_TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "file": lambda: _keys(FILE_KEYS),
    "base": _settings,
    "factor": lambda: _keys(FACTOR_KEYS),
    "range": lambda: _keys(RANGE_KEYS),
    "plot": lambda: _keys(COMMON_KEYS),
    "own keys": lambda: _keys(OWN_KEYS),
    "kinds": _kinds,
    "published": lambda: _keys(PUBLISHED_KEYS),
    "point": lambda: _keys(POINT_KEYS),
    "columns": _columns,
}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
