"""Changes to a sweep file before it is read: those of `quick` and those of `--set`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dsim.errors import InputError, elided
from dsim.yamlfile import Field, Scalar, parse_yaml

#: Keys of which one takes the place of another.
_RIVALS = {"num": ("step",), "step": ("num",), "choices": ("range",), "range": ("choices",)}

#: Where a value that `--set` gives stands; there are no lines.
SET = "--set"


def parse_assignment(text: str) -> tuple[str, Field]:
    """Return the path and the value of `PATH=VALUE`, the value in YAML."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(part.strip() for part in path.split(".")):
        raise InputError(SET, "is no assignment", value=text, hint="write PATH=VALUE, as in base.requests=300")
    try:
        field = parse_yaml(b"value: " + value.encode(), file=SET).need("value")
    except InputError as error:
        raise InputError(SET, error.rule, value=text, hint=error.hint) from None
    return path, renamed(field, path)


def renamed(field: Field, name: str) -> Field:
    """Return the field, and those within it, under another name."""
    value = field.value
    if isinstance(value, dict):
        value = {key: renamed(item, f"{name}.{key}") for key, item in value.items()}
    elif isinstance(value, tuple):
        value = tuple(renamed(item, f"{name}[{i}]") for i, item in enumerate(value))
    return replace(field, name=name, value=value)


def edited(tree: Field, path: str, value: Field) -> Field:
    """Return the tree with the value at a dotted path.

    Keys may have dots themselves: the longest key that is there goes first. The items of a list go by number, from 0.

    Raises:
        InputError: the path leads through a plain value.
    """
    return _edited(tree, path.split("."), value, level=0)


def _edited(tree: Field, parts: Sequence[str], value: Field, *, level: int) -> Field:
    if not parts:
        return value
    if isinstance(tree.value, tuple):
        return _in_list(tree, parts, value, level=level)
    if not isinstance(tree.value, dict):
        shown = tree.name or "the file"
        raise value.error_of_key(
            f"leads through {shown}, which is a plain value", f"write {shown} as a mapping of keys to values"
        )
    length = _key_length(tree, parts, level=level)
    key, rest = ".".join(parts[:length]), parts[length:]
    name = f"{tree.name}.{key}" if tree.name else key
    inner = tree.value.get(key, Field(value.file, value.line, name, {}))
    if inner.value is None:
        inner = replace(inner, value={})
    kept = {name: field for name, field in tree.value.items() if name not in _RIVALS.get(key, ()) or level < 2}
    return replace(tree, value={**kept, key: _edited(inner, rest, value, level=level + 1)})


def _key_length(tree: Field, parts: Sequence[str], *, level: int) -> int:
    """Return how many parts of the path are the next key."""
    assert isinstance(tree.value, dict)
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in tree.value:
            return length
    if level == 1 and tree.name == "factors":
        for length, part in enumerate(parts):
            if length and part in ("choices", "range"):
                return length
        return len(parts)
    return 1


def _in_list(tree: Field, parts: Sequence[str], value: Field, *, level: int) -> Field:
    assert isinstance(tree.value, tuple)
    if re.fullmatch("[0-9]{1,6}", parts[0]) is None or int(parts[0]) >= len(tree.value):
        rule = f"leads through {tree.name}, a list of {len(tree.value)}"
        raise value.error_of_key(rule, "name an item by its number, from 0")
    number = int(parts[0])
    items = list(tree.value)
    items[number] = _edited(items[number], parts[1:], value, level=level + 1)
    return replace(tree, value=tuple(items))


def plain(field: Field) -> object:
    """Return the value without its places: a scalar, a list or a dict."""
    value = field.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def first_difference(a: object, b: object, path: str = "") -> tuple[str, Scalar | str, Scalar | str] | None:
    """Return the first path at which two plain trees differ, and what stands there in each; None where they agree."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            found = first_difference(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None if list(a) == list(b) else (path, "in one order", "in another")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            found = first_difference(left, right, f"{path}[{number}]")
            if found is not None:
                return found
        return None
    return None if a == b else (path, _shown(a), _shown(b))


def _shown(value: object) -> str:
    return elided("not given" if value is None else str(value), 60)
