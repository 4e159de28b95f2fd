"""Strict, safe YAML files: every value knows its file and line, and nothing unexpected passes."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml

from dsim.errors import InputError, elided, nearest

Scalar = str | int | float | bool | None
E = TypeVar("E", bound=enum.Enum)
Made = TypeVar("Made")

#: Larger files are no configuration; the cap also ends reads of endless devices.
MAX_FILE_BYTES = 1_000_000

#: Beyond it a float no longer holds every whole number, and no quantity here comes near.
_MAX_INTEGER = 2**53
#: Deeper files are no configuration, and would exhaust the interpreter's stack.
_MAX_DEPTH = 100

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
#: YAML 1.2's core schema: `null`, `Null` and `NULL`, but not `nULL`.
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_PLAIN_TAGS = {"tag:yaml.org,2002:" + kind for kind in ("str", "seq", "map")}
# The C parser is some ten times faster; a PyYAML built without it still works.
_LOADER: type[yaml.BaseLoader] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a YAML file with the place it stands at and typed, checked access to it.

    Args:
        file: the file's name as the user gave it.
        line: counted from 1.
        name: dotted path of keys, such as `latency.2.prefill.constant_s`; empty for the whole file.
        value: a scalar, a tuple of items, or a `Section`'s fields by key.
    """

    file: str
    line: int
    name: str
    value: Scalar | tuple[Field, ...] | dict[str, Field]

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"

    @property
    def plain(self) -> object:
        """The value without its place: a scalar, a list or a dict."""
        if isinstance(self.value, dict):
            return {key: field.plain for key, field in self.value.items()}
        return [item.plain for item in self.value] if isinstance(self.value, tuple) else self.value

    def error(self, rule: str, hint: str | None = None) -> InputError:
        """Return the error that says this value breaks `rule`."""
        if self.value is None:
            return InputError(self.where, rule, name=_subject(self.name, "nothing"), hint=hint)
        if isinstance(self.value, tuple):
            return InputError(self.where, rule, name=_subject(self.name, "[...]"), hint=hint)
        if isinstance(self.value, dict):
            return InputError(self.where, rule, name=_subject(self.name, "{...}"), hint=hint)
        return InputError(self.where, rule, name=self.name or None, value=self.value, hint=hint)

    def error_of_key(self, rule: str, hint: str | None = None) -> InputError:
        """Return the error that says this value's key breaks `rule`."""
        return InputError(self.where, rule, name=self.name, hint=hint)

    def number(
        self,
        *,
        above: float = -math.inf,
        at_least: float = -math.inf,
        below: float = math.inf,
        at_most: float = math.inf,
    ) -> float:
        """Return a finite number within the bounds.

        Raises:
            InputError: it is no number, not finite, or out of bounds.
        """
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error("must be a number", _number_hint(value))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error("must be a finite number")
        self._check_bounds(number, above=above, at_least=at_least, below=below, at_most=at_most)
        return number

    def integer(self, *, at_least: float = -math.inf, at_most: float = _MAX_INTEGER) -> int:
        """Return a whole number within the bounds; `80e9` is one, `2.5` is not.

        Raises:
            InputError: it is no whole number or out of bounds.
        """
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error("must be a whole number", _number_hint(value))
        if isinstance(value, float) and not value.is_integer():
            raise self.error("must be a whole number")
        self._check_bounds(value, at_least=at_least, at_most=at_most)
        return int(value)

    def numbers(self, *, above: float = -math.inf, at_most: float = math.inf) -> tuple[float, ...]:
        """Return a list of finite numbers, each within the bounds."""
        return tuple(item.number(above=above, at_most=at_most) for item in self.items())

    def integers(self, *, at_least: float = -math.inf) -> tuple[int, ...]:
        """Return a list of whole numbers, each within the bound."""
        return tuple(item.integer(at_least=at_least) for item in self.items())

    def _check_bounds(
        self,
        number: float,
        *,
        above: float = -math.inf,
        at_least: float = -math.inf,
        below: float = math.inf,
        at_most: float = math.inf,
    ) -> None:
        if number <= above:
            raise self.error(f"must be > {_shown(above)}")
        if number < at_least:
            raise self.error(f"must be >= {_shown(at_least)}")
        if number >= below:
            raise self.error(f"must be < {_shown(below)}")
        if number > at_most:
            raise self.error(f"must be <= {_shown(at_most)}")

    def text(self) -> str:
        """Return a non-empty text on one line.

        Raises:
            InputError: it is a number, a truth value, a collection, or blank.
        """
        if not isinstance(self.value, str):
            hint = None if isinstance(self.value, tuple | dict | None) else "put it in quotes"
            raise self.error("must be a text", hint)
        text = " ".join(self.value.split())
        if not text:
            raise self.error("must not be empty")
        return text

    def flag(self) -> bool:
        """Return a truth value; InputError unless it is `true` or `false`."""
        if not isinstance(self.value, bool):
            raise self.error("must be true or false")
        return self.value

    def choice(self, kind: type[E]) -> E:
        """Return the member of `kind` whose value is written here; InputError where there is none."""
        known = [str(member.value) for member in kind]
        if isinstance(self.value, str):
            for member in kind:
                if member.value == self.value:
                    return member
        hint = nearest(self.value, known) if isinstance(self.value, str) else "expected one of " + ", ".join(known)
        raise self.error("is not known", hint)

    def items(self) -> tuple[Field, ...]:
        """Return the items of a list; InputError where it is none."""
        if not isinstance(self.value, tuple):
            raise self.error("must be a list", "write [a, b], or one `- item` a line")
        return self.value

    def section(self) -> Section:
        """Return the mapping; InputError where it is none."""
        if not isinstance(self.value, dict):
            raise self.error("must be a mapping of keys to values")
        return Section(self)


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of a YAML file; make one with `Field.section`."""

    field: Field

    @property
    def fields(self) -> dict[str, Field]:
        """The values by key, in the file's order."""
        value = self.field.value
        if not isinstance(value, dict):
            raise TypeError(f"{self.field.name} is no mapping")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __contains__(self, key: str) -> bool:
        return key in self.fields

    def only(self, known: Iterable[str]) -> Section:
        """Return self; InputError naming the nearest known key where another is used."""
        names = list(known)
        for key, field in self.fields.items():
            if key not in names:
                place = f" in {self.field.name}" if self.field.name else ""
                raise InputError(field.where, f"is not a known key{place}", value=key, hint=nearest(key, names))
        return self

    def get(self, key: str) -> Field | None:
        """Return the value of `key`, None where it is not given."""
        return self.fields.get(key)

    def changed(self, path: str, field: Field) -> Section:
        """Return the section with `field` at a dotted path of keys, mappings made on the way where there are none.

        Raises:
            InputError: a part of the path is a plain value in the file.
        """
        key, _, rest = path.partition(".")
        if rest:
            inner = self.fields.get(key) or Field(field.file, field.line, _join(self.field.name, key), {})
            if not isinstance(inner.value, dict):
                raise field.error_of_key(f"goes through {inner.name}, which is no mapping", "check the dotted key")
            field = inner.section().changed(rest, field).field
        return Section(replace(self.field, value={**self.fields, key: field}))

    def need(self, key: str) -> Field:
        """Return the value of `key`; InputError where it is not given."""
        field = self.fields.get(key)
        if field is None:
            raise InputError(self.field.where, "is missing", name=_join(self.field.name, key), hint="add this key")
        return field

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = -math.inf,
        at_least: float = -math.inf,
        at_most: float = math.inf,
    ) -> float:
        """Return the number at `key`, or the default; without a default the key is needed."""
        field = self.fields.get(key)
        if field is None and default is not None:
            return default
        return self.need(key).number(above=above, at_least=at_least, at_most=at_most)

    def integer(
        self, key: str, default: int | None = None, *, at_least: float = -math.inf, at_most: float = _MAX_INTEGER
    ) -> int:
        """Return the whole number at `key`, or the default; without a default the key is needed."""
        field = self.fields.get(key)
        if field is None and default is not None:
            return default
        return self.need(key).integer(at_least=at_least, at_most=at_most)

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text at `key`, or the default; without a default the key is needed."""
        field = self.fields.get(key)
        if field is None and default is not None:
            return default
        return self.need(key).text()

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Return the truth value at `key`, or the default; without a default the key is needed."""
        field = self.fields.get(key)
        if field is None and default is not None:
            return default
        return self.need(key).flag()

    def section(self, key: str) -> Section:
        """Return the mapping at `key`, which is needed."""
        return self.need(key).section()

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the list of texts at `key`; empty where the key is not given."""
        field = self.fields.get(key)
        return () if field is None else tuple(item.text() for item in field.items())

    def by_integer(self, *, at_least: int = 1) -> dict[int, Field]:
        """Return the values by key, where every key must be a whole number (a parallel degree, say)."""
        result: dict[int, Field] = {}
        for key, field in self.fields.items():
            if not _INT.fullmatch(key) or len(key) > 9 or int(key) < at_least:
                what = self.field.name or "this mapping"
                raise InputError(
                    field.where, f"is not a key of {what}: must be a whole number >= {at_least}", value=key
                )
            if int(key) in result:
                raise InputError(field.where, "stands twice", name=field.name, hint="keep one of the two")
            result[int(key)] = field
        return result


def read_bytes(path: Path | str) -> bytes:
    """Return a file's bytes.

    Raises:
        InputError: there is no such file, it cannot be read, or it is beyond `MAX_FILE_BYTES`.
    """
    where = str(path) or "''"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(where, "does not exist", hint="check the path") from None
    except IsADirectoryError:
        raise InputError(where, "is a directory", hint="give a file") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(where, f"cannot be read: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(where, f"is larger than {MAX_FILE_BYTES} bytes", hint="this is not a YAML file of dsim's")
    return data


def read_yaml(path: Path | str) -> Section:
    """Return the mapping that a YAML file holds.

    Raises:
        InputError: as `read_bytes` and `parse_yaml`.
    """
    return parse_yaml(read_bytes(path), file=str(path))


def parse_yaml(data: bytes, *, file: str) -> Section:
    """Return the mapping in `data`, which must be UTF-8 and one plain YAML document.

    Scalars follow YAML 1.2's core schema: `1e-5` is a number, `yes` and `2024-01-01` are texts.

    Args:
        file: named in errors.

    Raises:
        InputError: no UTF-8, not YAML, empty, no mapping, a key twice, a tag or an alias.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{file}:{line}", "is not UTF-8 text", hint="save the file as UTF-8") from None
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = file if mark is None else f"{file}:{mark.line + 1}"
        problem = " ".join((error.problem or "it cannot be parsed").split())
        raise InputError(where, f"is not YAML: {problem}", hint="check quotes, brackets and indentation") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{file}:{line}", "is not YAML: control characters are not allowed") from None
    except RecursionError:
        raise _too_deep(file) from None
    if node is None:
        raise InputError(file, "is empty", hint="expected a mapping of keys to values")
    return _Reader(file).field(node, name="", line=node.start_mark.line + 1).section()


class _Reader:
    """Turns the nodes of one file into fields."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._seen: set[int] = set()

    def field(self, node: yaml.Node, *, name: str, line: int, depth: int = 0) -> Field:
        """Return the field of `node`, found under `name` at `line`."""

        def fail(rule: str, hint: str | None = None) -> NoReturn:
            raise InputError(f"{self._file}:{line}", rule, name=name or None, hint=hint)

        if id(node) in self._seen:
            fail("uses a YAML alias (*), which is not supported", "write the value out")
        self._seen.add(id(node))
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            fail(f"uses the YAML tag {tag!r}, which is not allowed", "write the plain value")
        if depth > _MAX_DEPTH:
            raise _too_deep(self._file)
        if isinstance(node, yaml.ScalarNode):
            return Field(self._file, line, name, _scalar(node))
        if isinstance(node, yaml.SequenceNode):
            items = [
                self.field(item, name=f"{name}[{i}]", line=item.start_mark.line + 1, depth=depth + 1)
                for i, item in enumerate(node.value)
            ]
            return Field(self._file, line, name, tuple(items))
        fields: dict[str, Field] = {}
        own_line = line
        for key_node, value_node in node.value:
            # A nested value starts on a later line than its key, and there users look for the key in vain.
            line = key_node.start_mark.line + 1
            if (
                not isinstance(key_node, yaml.ScalarNode)
                or key_node.tag not in _PLAIN_TAGS
                or id(key_node) in self._seen
            ):
                fail("has a key that is not a plain word")
            key = key_node.value
            if key in fields:
                hint = f"it also stands on line {fields[key].line}; keep one of the two"
                raise InputError(f"{self._file}:{line}", "stands twice", name=_join(name, key), hint=hint)
            fields[key] = self.field(value_node, name=_join(name, key), line=line, depth=depth + 1)
        return Field(self._file, own_line, name, fields)


def relocated(field: Field, parts: tuple[str, ...], make: Callable[[], Made]) -> Made:
    """Return what `make` makes of a field; its own errors know no file, so say where it stands.

    Args:
        parts: what the places of such errors begin with.
    """
    try:
        return make()
    except InputError as error:
        if not error.where.startswith(parts):
            raise
        name = f"{field.name}.{error.name}" if error.name else f"{field.name}: {error.where}"
        raise InputError(field.where, error.rule, name=name, value=error.value, hint=error.hint) from None


def _too_deep(file: str) -> InputError:
    return InputError(file, f"is nested deeper than {_MAX_DEPTH} levels", hint="this is not a file of dsim's")


def _scalar(node: yaml.ScalarNode) -> Scalar:
    text: str = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INFINITY.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    if _NAN.fullmatch(text):
        return math.nan
    if _INT.fullmatch(text):
        # Python refuses to parse integers of thousands of digits; no quantity here has more than a float holds.
        return int(text) if len(text) <= 400 else math.inf
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _number_hint(value: object) -> str | None:
    if isinstance(value, str) and (_FLOAT.fullmatch(value) or _INT.fullmatch(value)):
        return "remove the quotes"
    return None


def _shown(bound: float) -> str:
    return str(int(bound)) if abs(bound) < 1e9 and bound == int(bound) else f"{bound:g}"


def _subject(name: str, value: str) -> str:
    return f"{name}={value}" if name else value


def _join(name: str, key: str) -> str:
    shown = key if key.isprintable() else repr(key)
    shown = elided(shown, 60)
    return f"{name}.{shown}" if name else shown
