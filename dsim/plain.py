"""Plain values: nested mappings and lists as files and tables need them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
