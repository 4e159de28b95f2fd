"""Values: typed access to the keys of a setting, with errors that name the place and the key."""

from __future__ import annotations

import contextlib
import enum
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from dsim.errors import InputError, by_option
from dsim.units import parse_share
from dsim.yamlfile import Field, Section

E = TypeVar("E", bound=enum.Enum)


def text_at(section: Section, key: str) -> str | None:
    """Return the text at `key`, None where it is not given."""
    field = section.get(key)
    return None if field is None else field.text()


def path_at(section: Section, key: str, folder: Path) -> Path | None:
    """Return the path at `key`, which starts from `folder`; None where it is not given."""
    text = text_at(section, key)
    return None if text is None else folder / text


def file_at(section: Section, key: str, folder: Path) -> Path | None:
    """Return the path of the file at `key`, which starts from `folder`; None where it is not given.

    Raises:
        InputError: there is no such file, or it is none that can be read twice.
    """
    path = path_at(section, key, folder)
    if path is not None:
        check_file(section.need(key), path)
    return path


def check_file(field: Field, path: Path) -> None:
    """Refuse what is no plain file: devices and pipes do not end, or give their content once."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise field.error("does not exist", "check the path, which starts from the sweep file's folder") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise field.error(f"cannot be read: {reason}", "check the path and its permissions") from None
    if stat.S_ISDIR(mode):
        raise field.error("is a directory", "give a file")
    if not stat.S_ISREG(mode):
        raise field.error("is no plain file", "give a file that can be read twice")


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
def placed(section: Section, key: str, *, files: Mapping[str, Path | None] = MappingProxyType({})) -> Iterator[None]:
    """Let every error name the place and a key of the section, whatever it named: an option, a file, a place alone.

    Args:
        key: named where the error says nothing that leads to another one.
        files: by the key that names them; an error in one of them is that key's.
    """
    try:
        yield
    except InputError as error:
        raise _placed(error, section, key, files) from None


def _placed(error: InputError, section: Section, key: str, files: Mapping[str, Path | None]) -> InputError:
    for owner, file in files.items():
        field = section.get(owner)
        if file is None or field is None:
            continue
        for spelled in (str(file), str(field.value)):
            if f"{error.where}:".startswith(f"{spelled}:"):
                line, said = error.where.removeprefix(spelled).removeprefix(":"), _said(error)
                if line or error.name is not None or error.value is not None:
                    said = f"is wrong{f' on line {line}' if line else ''}: {said}"
                return field.error(said, error.hint)
    field = section.get(key) or section.field
    if re.sub(":[0-9]+$", "", error.where) in _files_of(section.field):
        prefix = f"{section.field.name}." if section.field.name else ""
        if error.name is not None and re.split(r"[.\[]", error.name.removeprefix(prefix))[0] in section:
            return error
        return InputError(error.where, f"is wrong: {_said(error)}", name=field.name or None, hint=error.hint)
    named = by_option(error)
    if named.where.startswith("--"):
        return _of_option(named, section, key)
    return InputError(field.where, f"is wrong: {error.where}: {_said(error)}", name=field.name or None, hint=error.hint)


def _of_option(named: InputError, section: Section, key: str) -> InputError:
    """Return the error of the key of an option's name, if the section has it or nothing better."""
    option = named.where.removeprefix("--").replace("-", "_")
    field = section.get(option) or section.get(key) or section.field
    name = field.name if field is not section.field else f"{section.field.name}.{option}".lstrip(".")
    value = None if isinstance(field.value, tuple | dict) else field.value
    rule = _keys(named.rule)
    if named.name is not None or (named.value is not None and str(named.value).split() != str(value).split()):
        rule = f"is wrong: {_keys(_said(named))}"
    return InputError(field.where, rule, name=name, value=value, hint=_keys(named.hint))


def _said(error: InputError) -> str:
    """Return what an error says without its place and its hint."""
    return str(error).removeprefix(f"{error.where}: ").removesuffix(f"; {error.hint}")


def _files_of(field: Field) -> set[str]:
    """Return the files in which a value and those within it stand."""
    value = field.value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return {field.file}.union(*(_files_of(item) for item in inner))


def _keys(text: str) -> str:
    """Return a text in which options of the command line are written as keys."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text)
