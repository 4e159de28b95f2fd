"""Values: typed access to the keys of a setting, with errors that name the place and the key."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from dsim.errors import InputError, by_option
from dsim.units import parse_share
from dsim.yamlfile import Section

E = TypeVar("E", bound=enum.Enum)


def text_at(section: Section, key: str) -> str | None:
    """Return the text at `key`, None where it is not given."""
    field = section.get(key)
    return None if field is None else field.text()


def path_at(section: Section, key: str, folder: Path) -> Path | None:
    """Return the path at `key`, which starts from `folder`; None where it is not given."""
    text = text_at(section, key)
    return None if text is None else folder / text


def whole_at(section: Section, key: str, *, at_least: int, at_most: int = 1_000_000_000) -> int | None:
    """Return the whole number at `key`, None where it is not given."""
    field = section.get(key)
    return None if field is None else field.integer(at_least=at_least, at_most=at_most)


def share_at(section: Section, key: str, default: float) -> float:
    """Return the share at `key`, a number above 0 and below 1 or a text such as `90%`; or the default."""
    field = section.get(key)
    if field is None:
        return default
    if isinstance(field.value, str):
        return parse_share(field.value, field.where, name=field.name)
    return field.number(above=0, below=1)


def choice_at(section: Section, key: str, default: E) -> E:
    """Return the member of the default's enum whose value is at `key`; or the default."""
    field = section.get(key)
    return default if field is None else field.choice(type(default))


@contextlib.contextmanager
def placed(section: Section, key: str) -> Iterator[None]:
    """Let errors that name an option of the command line name the place and key of the file.

    Args:
        key: taken where the error names neither a key of the section nor a place in a file.
    """
    try:
        yield
    except InputError as error:
        named = by_option(error)
        if not named.where.startswith("--"):
            raise
        option = named.where.removeprefix("--").replace("-", "_")
        field = section.get(option) or section.get(key) or section.field
        name = field.name if field is not section.field else f"{section.field.name}.{option}".lstrip(".")
        rule = _keys(named.rule)
        if named.name is not None:
            rule = f"is wrong: {named.name}={named.value} {rule}"
        value = None if isinstance(field.value, tuple | dict) else field.value
        raise InputError(field.where, rule, name=name, value=value, hint=_keys(named.hint)) from None


def _keys(text: str) -> str:
    """Return a text in which options of the command line are written as keys."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text)
