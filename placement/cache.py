"""Cache: what runs gave, by content id, in one SQLite file that one process at a time has open."""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import hashlib
import json
import operator
import os
import sqlite3
import struct
import sys
import time
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import dsim
import placement
from dsim.errors import InputError
from dsim.plain import content
from dsim.version import __version__
from placement.probe import Probe, Scenario

#: What SQLite's header has at byte 68 of a cache ("dsim"), and at byte 60: the form of the tables.
_APPLICATION: Final = 0x6473696D
_FORM: Final = 1
_HEADER: Final = b"SQLite format 3\0"
_IN_USE: Final = "is in use: another dsim is running with it"
_ELSEWHERE: Final = "move it away, or give another place"
#: Longest time that finished runs wait to be written, and the largest file that is looked through when it is opened.
_COMMIT_S: Final = 0.5
_LOOKED_THROUGH_BYTES: Final = 2**26
#: Fields that say where requests come from, not which they are.
_ORIGIN: Final = ("source", "lines")
_TABLES: Final = (
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_FORM}",
    "CREATE TABLE runs (id BLOB PRIMARY KEY, result TEXT NOT NULL, checksum INTEGER NOT NULL, fault INTEGER NOT NULL) "
    "WITHOUT ROWID",
    "CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_SELECT: Final = "SELECT result, checksum, fault FROM runs WHERE id = ?"
_INSERT: Final = "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?)"

#: Caches that this process has open: to open such a file once more, even to read it, would end its lock.
_open: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Kept:
    """What a cache has of one run.

    Args:
        fault: the run did not end by itself (its worker died, its time was over): another try may end otherwise.
    """

    result: str
    fault: bool = False


class Store(typing.Protocol):
    """Where results of runs are kept."""

    def get(self, ids: Sequence[bytes]) -> dict[bytes, Kept]:
        """Return what is there of runs, by id."""
        ...

    def put(self, run: bytes, kept: Kept) -> None:
        """Keep the result of a run."""
        ...


class Cache:
    """Results of runs in a file, which this process alone has open.

    A finished run is in the file half a second later; a process that is killed loses no more. Nothing in the file is
    changed but by adding to it.

    Args:
        where: what an error names: the option, or the file.
        remedy: what to do about a cache that is damaged, or of another form.
        read_only: nothing is added, and others may read it, too.

    Raises:
        InputError: the file is something else, is damaged, is of another form, or is in use.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, *, remedy: str = "give another file", read_only: bool = False) -> None:
        self.path = path
        self._remedy = remedy
        self._read_only = read_only
        self._waiting: dict[bytes, Kept] = {}
        self._committed_s = time.monotonic()
        self.created = not path.exists()
        self._place = path.absolute()
        if self._place in _open:
            raise self._in_use()
        self._check_file()
        with self._told():
            mode = "ro" if read_only else "rwc"
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            self._database = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None)
        _open.add(self._place)
        try:
            with self._told():
                self._open()
        except BaseException:
            self._shut()
            raise

    def _check_file(self) -> None:
        """Refuse what is no cache without touching it."""
        path = self.path
        if path.exists() and not path.is_file():
            raise InputError(str(path), "is no file", hint=_ELSEWHERE)
        if not path.exists():
            if self._read_only:
                raise InputError(str(path), "is not there", hint=self._remedy)
            if not path.parent.is_dir():
                raise InputError(str(path), "cannot be made: its directory is not there", hint="make the directory")
            return
        with path.open("rb") as file:
            header = file.read(100)
        if header and (not header.startswith(_HEADER) or len(header) < 100):
            raise _foreign(path)
        if header:
            (form,), (application,) = struct.unpack(">I", header[60:64]), struct.unpack(">I", header[68:72])
            if application != _APPLICATION:
                raise _foreign(path)
            if form != _FORM:
                rule = f"is a cache of another version of dsim: its form is {form}, and this dsim's is {_FORM}"
                raise InputError(str(path), rule, hint=self._remedy)
        places = [path] if self._read_only else [path, path.parent]
        wanted = os.R_OK if self._read_only else os.W_OK
        if not all(os.access(place, wanted) for place in places):
            how = "read" if self._read_only else "written"
            raise InputError(str(path), f"cannot be {how}: no permission", hint="change that, or give another file")

    def _open(self) -> None:
        execute = self._database.execute
        if self._read_only:
            execute("SELECT name FROM notes LIMIT 1").fetchall()
        else:
            execute("PRAGMA locking_mode = EXCLUSIVE")
            execute("BEGIN EXCLUSIVE")
            # In one transaction with a journal, so that a file with anything in it says that it is a cache.
            if not execute("SELECT name FROM sqlite_master").fetchall():
                for statement in _TABLES:
                    execute(statement)
            execute("COMMIT")
            # From now on a log that is written on: a commit waits for no disk.
            execute("PRAGMA journal_mode = WAL")
            execute("PRAGMA synchronous = NORMAL")
            execute("BEGIN IMMEDIATE")
        if self.path.stat().st_size <= _LOOKED_THROUGH_BYTES:
            found = execute("PRAGMA quick_check(1)").fetchone()
            if found != ("ok",):
                raise self._damaged()

    def get(self, ids: Sequence[bytes]) -> dict[bytes, Kept]:
        """Return what is there of runs, by id.

        Raises:
            InputError: a result is not what was put there.
        """
        found = {run: self._waiting[run] for run in ids if run in self._waiting}
        with self._told():
            for run in ids:
                if run in found:
                    continue
                row = self._database.execute(_SELECT, (run,)).fetchone()
                if row is None:
                    continue
                if row[1] != _checksum(run, row[0], row[2]):
                    raise self._damaged()
                found[run] = Kept(row[0], bool(row[2]))
        return found

    def put(self, run: bytes, kept: Kept) -> None:
        """Keep the result of a run; it is in the file half a second later, if another one has come by then."""
        self._waiting[run] = kept
        if time.monotonic() - self._committed_s > _COMMIT_S:
            self.commit()

    def commit(self) -> None:
        """Write what was kept so far."""
        with self._told():
            self._flush()
            self._database.execute("COMMIT")
            self._database.execute("BEGIN")
        self._committed_s = time.monotonic()

    def _flush(self) -> None:
        rows = [(r, k.result, _checksum(r, k.result, int(k.fault)), int(k.fault)) for r, k in self._waiting.items()]
        self._database.executemany(_INSERT, rows)
        self._waiting.clear()

    @property
    def runs(self) -> int:
        """How many results there are."""
        with self._told():
            self._flush()
            return int(self._database.execute("SELECT count(*) FROM runs").fetchone()[0])

    @property
    def notes(self) -> dict[str, str]:
        """Texts about the whole of the runs, by name."""
        with self._told():
            return dict(self._database.execute("SELECT name, value FROM notes").fetchall())

    def note(self, notes: Mapping[str, str]) -> None:
        """Add texts about the whole of the runs, and write them at once."""
        with self._told():
            self._database.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", list(notes.items()))
        self.commit()

    def forget_faults(self) -> None:
        """Drop the runs that did not end by themselves, so that they are tried again."""
        with self._told():
            self._flush()
            self._database.execute("DELETE FROM runs WHERE fault")
        self.commit()

    def settle(self) -> None:
        """Close it with its rows in order: the same runs are then the same bytes, whenever each was added."""
        part = self.path.with_name(f".{self.path.name}.part")
        part.unlink(missing_ok=True)
        with self._told():
            self._flush()
            self._database.execute("COMMIT")
            fresh = sqlite3.connect(part, isolation_level=None)
            try:
                for statement in ("PRAGMA journal_mode = OFF", "BEGIN", *_TABLES):
                    fresh.execute(statement)
                rows = self._database.execute("SELECT id, result, checksum, fault FROM runs ORDER BY id")
                fresh.executemany(_INSERT, rows)
                fresh.executemany(
                    "INSERT INTO notes VALUES (?, ?)", self._database.execute("SELECT * FROM notes ORDER BY name")
                )
                fresh.execute("COMMIT")
            finally:
                fresh.close()
            self._shut()
        part.replace(self.path)

    def close(self, *, unless_empty: bool = False) -> None:
        """Write everything and close the file.

        Args:
            unless_empty: remove a file that was made by this process and has no runs.
        """
        with contextlib.suppress(sqlite3.ProgrammingError):  # it is closed already
            try:
                with self._told():
                    drop = unless_empty and self.created and not self.runs
                    if not self._read_only:
                        self._flush()
                        self._database.execute("COMMIT")
            finally:
                self._shut()
            if drop:
                self.path.unlink(missing_ok=True)

    def _shut(self) -> None:
        _open.discard(self._place)
        self._database.close()

    def _in_use(self) -> InputError:
        hint = "wait until it has ended, or give another place"
        return InputError(str(self.path), _IN_USE, hint=hint)

    def _damaged(self) -> InputError:
        return InputError(str(self.path), "is damaged", hint=self._remedy)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one line what is wrong with the file."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                raise self._in_use() from None
            if code == sqlite3.SQLITE_NOTADB:
                raise _foreign(self.path) from None
            if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}:
                hint = "change its permissions, or give another place"
                raise InputError(str(self.path), f"cannot be written: {error}", hint=hint) from None
            if code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}:
                number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
                raise OSError(number, str(error), str(self.path)) from None
            raise self._damaged() from None


def remove(path: Path) -> None:
    """Delete a cache, also one that is damaged or of another form, but nothing else.

    Raises:
        InputError: it is none, or in use.
    """
    with path.open("rb") as file:
        if struct.pack(">I", _APPLICATION) != file.read(72)[68:]:
            raise _foreign(path)
    try:
        Cache(path).close()
    except InputError as error:
        if error.rule == _IN_USE:
            raise
    for suffix in ("-wal", "-shm", "-journal", ""):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)


def _foreign(path: Path) -> InputError:
    return InputError(str(path), "is no cache of dsim", hint=_ELSEWHERE)


class Beside:
    """A cache, and others beside it that are only read.

    Args:
        own: where new results go; None: nowhere.
    """

    def __init__(self, own: Store | None, others: Sequence[Store]) -> None:
        self._own = own
        self._others = others

    def get(self, ids: Sequence[bytes]) -> dict[bytes, Kept]:
        """Return what any of them has; faults count only where they are this search's own."""
        found = {} if self._own is None else self._own.get(ids)
        for other in self._others:
            missing = [run for run in ids if run not in found]
            found |= {run: kept for run, kept in other.get(missing).items() if not kept.fault}
        return found

    def put(self, run: bytes, kept: Kept) -> None:
        """Keep the result of a run."""
        if self._own is not None:
            self._own.put(run, kept)


def _checksum(run: bytes, result: str, fault: int) -> int:
    return zlib.crc32(run + bytes([fault]) + result.encode())


def scenario_id(scenario: Scenario) -> bytes:
    """Return a digest of all that the outcomes of a scenario's probes depend on, the code that computes them included.

    Raises:
        InputError: it has parts that only say what they do, not what they are, such as requests from a function.
    """
    try:
        said = json.dumps(content(scenario, leave_out=_ORIGIN), sort_keys=True)
    except TypeError as error:
        raise InputError("cache", f"cannot tell runs apart: {error}", hint="leave the cache out") from None
    return hashlib.sha256(f"{code_id()}\n{said}".encode()).digest()


def question_id(question: object) -> str:
    """Return a digest of a question and of the code that answers it."""
    said = json.dumps(content(question, leave_out=_ORIGIN), sort_keys=True)
    return hashlib.sha256(f"{code_id()}\n{said}".encode()).hexdigest()


def run_id(scenario: bytes, probe: Probe, what: str, said: dict[int, tuple[object, str]] | None = None) -> bytes:
    """Return the id of a run's result.

    Args:
        what: names the result: a probe may be asked for several.
        said: what placements hold, by `id`, each with the placement itself: many probes have the same one.
    """
    parts = [what]
    for field in fields(probe):
        value = getattr(probe, field.name)
        if field.name != "placement" or said is None:
            parts.append(_said(value))
            continue
        if id(value) not in said:
            said[id(value)] = (value, _said(value))
        parts.append(said[id(value)][1])
    return hashlib.sha256(scenario + "\n".join(parts).encode()).digest()


def _said(value: object) -> str:
    # Not its repr, which may leave fields out.
    return _JSON.encode(content(value))


@functools.cache
def code_id() -> str:
    """Return a digest of the code that runs are computed by: dsim's, Python's and numpy's."""
    digest = hashlib.sha256(f"{__version__} {sys.version_info[:2]} {np.__version__}\n".encode())
    for package in (dsim, placement):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            if not name.startswith("cli/"):
                digest.update(f"{package.__name__}/{name}\n".encode())
                digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


_JSON: Final = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Codec:
    """Values of one type as JSON and back, every bit of every number the same."""

    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]

    def text(self, value: object) -> str:
        """Return a value as text."""
        return _JSON.encode(self.to_plain(value))

    def kept(self, value: object) -> tuple[str, Any]:
        """Return a value as text, and as it will be when it comes from the text."""
        plain = self.to_plain(value)
        return _JSON.encode(plain), self.from_plain(plain)

    def value(self, text: str) -> Any:  # noqa: ANN401 what the type says
        """Return the value that a text stands for."""
        return self.from_plain(json.loads(text))


@functools.cache
def codec(kind: Any) -> Codec:  # noqa: ANN401 a type, or what stands in an annotation
    """Return the codec of a type: plain ones, enumerations, tuples, mappings, optional ones, and dataclasses of those.

    >>> pair = codec(tuple[float, int | None])
    >>> pair.text((0.1, None)), pair.value("[0.1,null]")
    ('[0.1,null]', (0.1, None))

    Raises:
        TypeError: it is another type.
    """
    if kind in {bool, int, float, str}:
        return Codec(kind, kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union} and len(arguments) == 2 and types.NoneType in arguments:
        some = codec(next(part for part in arguments if part is not types.NoneType))
        return Codec(
            lambda value: None if value is None else some.to_plain(value),
            lambda plain: None if plain is None else some.from_plain(plain),
        )
    if origin is tuple and arguments[-1] is Ellipsis:
        item = codec(arguments[0])
        return Codec(
            lambda value: list(map(item.to_plain, value)),
            lambda plain: tuple(map(item.from_plain, plain)),
        )
    if origin is tuple:
        return _row(tuple(codec(part) for part in arguments), tuple, lambda value: value)
    if origin is Mapping:
        key, item = codec(arguments[0]), codec(arguments[1])
        return Codec(
            lambda value: [[key.to_plain(name), item.to_plain(part)] for name, part in value.items()],
            lambda plain: {key.from_plain(name): item.from_plain(part) for name, part in plain},
        )
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return Codec(lambda value: value.name, lambda plain: kind[plain])
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in fields(kind) if field.init]
        parts = tuple(codec(hints[name]) for name in names)
        fields_of = operator.attrgetter(*names)
        return _row(
            parts,
            lambda values: kind(**dict(zip(names, values, strict=True))),
            fields_of if len(names) > 1 else lambda value: (fields_of(value),),
        )
    raise TypeError(f"{kind} has no form in a cache")


def _row(parts: Sequence[Codec], make: Callable[[Iterator[Any]], Any], values: Callable[[Any], Sequence[Any]]) -> Codec:
    to_plain, from_plain = [part.to_plain for part in parts], [part.from_plain for part in parts]
    return Codec(
        lambda value: list(map(_apply, to_plain, values(value))),
        lambda plain: make(map(_apply, from_plain, plain)),
    )


def _apply(function: Callable[[Any], Any], value: object) -> object:
    return function(value)
