"""Plain values: nested mappings and lists as files and tables need them."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any


def finite(value: object) -> Any:  # noqa: ANN401 a mapping gives a dict, a sequence a list, anything else itself
    """Return nested values with None for numbers that are not finite, lists for tuples, and texts as keys.

    >>> finite({"a": (1.0, float("inf")), 2: "b"})
    {'a': [1.0, None], '2': 'b'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def flat(
    tree: Mapping[str, Any], prefix: str = "", *, is_value: Callable[[Mapping[str, Any]], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested mappings.

    Args:
        is_value: whether a mapping within is a value by itself.

    >>> dict(flat({"a": {"b": 1, "c": {"d": 2}}, "e": []}))
    {'a.b': 1, 'a.c.d': 2, 'e': []}
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and not (is_value is not None and is_value(value)):
            yield from flat(value, f"{prefix}{key}.", is_value=is_value)
        else:
            yield f"{prefix}{key}", value


def content(value: object, *, leave_out: Collection[str] = ()) -> Any:  # noqa: ANN401 as `finite`
    """Return what a noun holds, for digests: the same for the same values, however they were written.

    Whole numbers are those with a point, arrays are their digests, mappings are sorted. Private fields
    are left out: they follow from the others, some only once they are asked for.

    Args:
        leave_out: names of fields that say nothing of the content, such as where it comes from.

    Raises:
        TypeError: something in it is no plain value, dataclass, enum or array.

    >>> content({"b": (1, 2.0), "a": None})
    [['a', None], ['b', [1.0, 2.0]]]
    """
    import numpy as np  # what only wants plain values, such as --help, goes without

    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        return content(value.item())
    if isinstance(value, int | float):
        return float(value) if abs(value) < 2**53 else repr(value)
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return [str(data.dtype), list(data.shape), hashlib.sha256(data.tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        pairs = [[content(key, leave_out=leave_out), content(item, leave_out=leave_out)] for key, item in value.items()]
        return sorted(pairs, key=repr)
    if isinstance(value, list | tuple):
        return [content(item, leave_out=leave_out) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.name[0] != "_" and f.name not in leave_out]
        return [type(value).__name__, {name: content(getattr(value, name), leave_out=leave_out) for name in fields}]
    raise TypeError(f"{type(value).__name__} has no content to digest")
