"""Store of a sweep: one line a finished task, only ever appended, and what is made of the lines."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsim.errors import InputError
from dsim.files import write_whole
from dsim.plain import finite, flat
from dsim.version import __version__
from dsim.yamlfile import Scalar
from experiments.edits import first_difference
from experiments.sweepfile import COUNTS, Outline, Sweep, Task, read_outline
from placement.shards import Shard
from placement.statistics import mean_interval

if TYPE_CHECKING:
    import pandas as pd

    from experiments.plots import PlotSpec

#: The resolved sweep file in the folder of its results.
SWEEP_FILE = "sweep.yaml"
#: Digests of the files that a sweep has made of its rows, by name.
_CLAIMS = ".made.json"
#: What reading a line that is no row may raise.
_NO_ROW = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
#: The bytes that every row begins with, as many as there are of them: its id, a SHA-256.
_HEAD = len('{"id":"') + 64
_TORN = re.compile(rb'|\{|\{"|\{"i|\{"id|\{"id"|\{"id":|\{"id":"[0-9a-f]{0,64}')
#: Confidence of the intervals over replications.
CONFIDENCE = 0.95

#: Time between two waits for the disk: each takes as long as many a task.
_SYNC_S = 0.5

_ROWS_FILE = re.compile(r"rows(-(?P<part>[0-9]+)-of-(?P<parts>[0-9]+))?\.jsonl")
_LIMITS = ("low", "best", "high")
#: Numbers that the setting says, which replications do not vary.
_SET = frozenset(
    {"num_requests", "num_gpus", "max_gpus", "rate_per_s", "rate_per_gpu_per_s", "token_budget", "cost_usd_per_h"}
    | {"saturation_tokens", "kv_blocks.prefill", "kv_blocks.decode", "kv_blocks.colocated"}
)

#: Metrics printed where the file does not say which.
_MOST_SHOWN = 8

#: Groups of shares, whose intervals end at 0 and 1.
_SHARES = frozenset({"attainment", "utilization", "kv_peak", "parts_share"})

#: What tells rows apart: content, factor values, replication.
RowKey = tuple[str, tuple[tuple[str, Scalar], ...], int]


@dataclass(frozen=True, slots=True)
class Row:
    """One finished task.

    Args:
        id: of its content.
        factors: value by factor.
        outputs: what was measured, nested; empty if the task failed.
        error: why it failed, on one line; None if it did not.
        profiles: SHA-256 of the latency profiles, by role.
        version: of dsim.
    """

    id: str
    factors: Mapping[str, Scalar]
    replication: int
    seed: int
    outputs: Mapping[str, Any]
    error: str | None
    profiles: Mapping[str, str]
    version: str = __version__

    @property
    def key(self) -> RowKey:
        """What tells it apart from other rows of the sweep."""
        return self.id, tuple(self.factors.items()), self.replication

    def to_line(self) -> str:
        """Return the row as a line of JSON; numbers that are not finite become null."""
        record = {
            "id": self.id,
            "factors": self.factors,
            "replication": self.replication,
            "seed": self.seed,
            "status": "ok" if self.error is None else "failed",
            **({"outputs": finite(self.outputs)} if self.error is None else {"error": self.error}),
            "version": self.version,
            "profiles": self.profiles,
        }
        return json.dumps(record, separators=(",", ":"), allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Row:
        """Return the row that a line says.

        Raises:
            ValueError, KeyError, TypeError: it is no such line.
        """
        record = json.loads(line)
        failed = {"ok": False, "failed": True}[record["status"]]
        return cls(
            id=str(record["id"]),
            factors=dict(record["factors"]),
            replication=int(record["replication"]),
            seed=int(record["seed"]),
            outputs={} if failed else dict(record["outputs"]),
            error=str(record["error"]) if failed else None,
            profiles=dict(record["profiles"]),
            version=str(record["version"]),
        )


@dataclass(frozen=True, slots=True)
class RowsFile:
    """The file that one process appends to.

    Args:
        shard: the part of the sweep that it holds; None: all of it.
    """

    folder: Path
    shard: Shard | None = None

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.folder / f"rows{self.shard.suffix if self.shard else ''}.jsonl"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from these rows; the parts of a sweep can be run beside each other.

        Raises:
            InputError: another process runs the sweep.
        """
        with contextlib.ExitStack() as stack:
            whole = self.shard is None
            stack.enter_context(_lock(self.folder / ".lock", shared=not whole))
            if not whole:
                stack.enter_context(_lock(self.folder / f".lock{self.shard.suffix if self.shard else ''}"))
            yield
            if whole:
                # Nobody runs a part now: these are of processes that were killed.
                for path in self.folder.glob(".lock-*-of-*"):
                    if path.is_file() and not path.stat().st_size:
                        path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writer(self) -> Iterator[_Writer]:
        """Open it for more rows; what a killed process left of its last line is dropped."""
        created = not self.path.exists() and not self.path.is_symlink()
        if not created:
            _check_ours(self.path)
        with self.path.open("ab") as file:
            _drop_torn_line(self.path)
            file.seek(0, os.SEEK_END)
            if created:
                _sync_folder(self.folder)
            writer = _Writer(file.fileno())
            try:
                yield writer
            finally:
                writer.sync()


@dataclass(slots=True)
class _Writer:
    _descriptor: int
    _synced_s: float = 0.0

    def append(self, row: Row) -> None:
        """Add a row: this process may be killed from now on, and the power may fail half a second later."""
        data = row.to_line().encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        if time.monotonic() - self._synced_s > _SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Wait until the rows are on the disk."""
        os.fsync(self._descriptor)
        self._synced_s = time.monotonic()


def rows_files(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, the whole one first, then the parts by number."""
    found = {path: match for path in folder.glob("rows*.jsonl") if (match := _ROWS_FILE.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path]["parts"] or 0), int(found[path]["part"] or 0)))


def check_places(folder: Path, names: Iterable[str]) -> None:
    """Refuse to work where something that is no file has the name of one of the sweep's own.

    Raises:
        InputError: a directory, say, has the name of a file of rows, of a lock, or one of `names`.
    """
    locks = [path.name for path in folder.glob(".lock*")]
    for name in dict.fromkeys([*(path.name for path in rows_files(folder)), *locks, _CLAIMS, *names]):
        path = folder / name
        if path.exists() and not path.is_file():
            what = "a directory" if path.is_dir() else "something that is no file, named"
            raise InputError("--output-dir", f"has {what} {name}", value=str(folder), hint="move it away")


def claim(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Note, before they are written, that these files are the sweep's own and not a user's."""
    own = _claimed(folder) | {name: _digest(content) for name, content in files.items()}
    write_whole(folder / _CLAIMS, json.dumps(dict(sorted(own.items())), indent=1) + "\n")


def check_claims(folder: Path, names: Iterable[str]) -> None:
    """Refuse to replace files of these names that no sweep has made here, or that were changed since.

    Raises:
        InputError: there is one.
    """
    foreign = [name for name in names if (folder / name).exists() and not _is_claimed(folder, name)]
    if foreign:
        rule = f"already has {', '.join(foreign)}, not as a sweep wrote {'it' if len(foreign) == 1 else 'them'}"
        hint = "give another directory, or replace with --overwrite"
        raise InputError("--output-dir", rule, value=str(folder), hint=hint)


def made_files(folder: Path) -> list[Path]:
    """Return the files in a folder that a sweep has made and nobody changed: its rows and what was made of them.

    Raises:
        InputError: a file named as rows are holds something else.
    """
    for path in rows_files(folder):
        _check_ours(path)
    made = [folder / name for name in _claimed(folder) if _is_claimed(folder, name)]
    return [*rows_files(folder), *made, *([folder / _CLAIMS] if (folder / _CLAIMS).is_file() else [])]


def _claimed(folder: Path) -> dict[str, str]:
    """Return the digests of the files that a sweep has made in a folder, by name."""
    try:
        known = json.loads((folder / _CLAIMS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(name): str(digest) for name, digest in known.items()} if isinstance(known, dict) else {}


def _is_claimed(folder: Path, name: str) -> bool:
    path = folder / name
    if Path(name).name != name or path.is_symlink() or not path.is_file():
        return False
    return _claimed(folder).get(name) == _digest(path.read_bytes())


def _check_ours(path: Path) -> None:
    if not _is_ours(path):
        raise InputError(str(path), "holds no rows of a sweep", hint="move the file away, or give another directory")


def _is_ours(path: Path) -> bool:
    """Return whether a file holds rows: its first line is one, or what a kill left of one."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline()
    if not first.endswith(b"\n"):
        return _TORN.fullmatch(first[:_HEAD]) is not None
    try:
        Row.from_line(first.decode())
    except _NO_ROW:
        return False
    return True


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def read_rows(folder: Path, *, leave_out: Path | None = None) -> dict[RowKey, Row]:
    """Return the rows of all files in a folder; of two rows of a task, a retried one, the later counts.

    An unfinished last line is left out: its writer was killed, or is at it.

    Args:
        leave_out: a file not to read.

    Raises:
        InputError: another line is no row.
    """
    rows: dict[RowKey, Row] = {}
    for path in rows_files(folder):
        if path == leave_out:
            continue
        complete, _, _ = path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(complete.split(b"\n") if complete else (), 1):
            try:
                row = Row.from_line(line.decode())
                hash(row.key)
            except _NO_ROW:
                hint = "delete the line and run again with --resume, or start anew with --overwrite"
                raise InputError(f"{path}:{number}", "is no row of a sweep", hint=hint) from None
            if row.error is None or row.key not in rows or rows[row.key].error is not None:
                rows[row.key] = row
    return rows


def check_same(sweep: Sweep, rows: Mapping[RowKey, Row], folder: Path) -> None:
    """See that the rows in a folder belong to the sweep.

    Raises:
        InputError: they do not; it names the first difference.
    """
    own = {task_key(task) for task in sweep.tasks}
    foreign = next((row for key, row in rows.items() if key not in own), None)
    if foreign is None:
        return
    raise InputError(
        "--output-dir",
        f"holds rows of another sweep: {_difference(sweep, foreign, folder)}",
        value=str(folder),
        hint="give another directory, or replace it with --overwrite",
    )


def task_key(task: Task) -> RowKey:
    """Return the key of the task's row."""
    return task.id, tuple(task.factors.items()), task.replication


def _difference(sweep: Sweep, row: Row, folder: Path) -> str:
    if row.version != __version__:
        return f"they are of dsim {row.version}, this is {__version__}"
    try:
        there = read_outline(folder / SWEEP_FILE).resolved
    except InputError:
        there = {}
    here = sweep.outline.resolved
    for key in ("base", "factors", "replications"):
        found = first_difference(there.get(key), here.get(key), key) if there else None
        if found is not None:
            return f"{found[0]} is {found[1]} there and {found[2]} here"
    return "a latency profile, a trace or the code of dsim has changed since"


@dataclass(frozen=True, slots=True)
class SweepResults:
    """Rows of a sweep with what its file says about them.

    Args:
        rows: in the order of the tasks.
    """

    outline: Outline
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.outline.name

    @property
    def about(self) -> str:
        """What is measured and simulated."""
        return self.outline.about

    @property
    def plots(self) -> tuple[PlotSpec, ...]:
        """The figures that the file asks for."""
        return self.outline.plots

    @property
    def is_complete(self) -> bool:
        """Whether every task has its row."""
        return len(self.rows) == self.outline.num_combinations * self.outline.replications

    def check_complete(self, folder: Path) -> None:
        """Refuse to draw or report what has not run to its end.

        Raises:
            InputError: rows are missing.
        """
        if not self.is_complete:
            total = self.outline.num_combinations * self.outline.replications
            rule = f"has {len(self.rows)} of the {total} rows of its sweep"
            raise InputError(str(folder), rule, hint="finish it with dsim sweep --resume")

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows of tasks that failed."""
        return tuple(row for row in self.rows if row.error is not None)

    @property
    def summary(self) -> pd.DataFrame:
        """One row for each combination: factors, every metric's mean with its interval, counts."""
        import pandas as pd

        records = list(summarized(self.rows))
        others = (*self.outline.keys, *COUNTS)
        found = dict.fromkeys(name for record in records for name in record if name not in others)
        metrics = [name for name in found if not self._is_group(name)]
        names = [*self.outline.keys, *metrics, *COUNTS]
        return pd.DataFrame([[record.get(name) for name in names] for record in records], columns=names)

    def _is_group(self, name: str) -> bool:
        """Return whether a name is that of a group of metrics, which stands alone where the group is null."""
        measured = self.outline.measured
        return name not in measured and any(column.startswith(f"{name}.") for column in measured)

    def table(self) -> pd.DataFrame:
        """Return the summary's plain columns, those of `outputs` where the file has any: what summary.csv holds."""
        summary = self.summary
        wanted = [
            name for name in summary.columns if not summary[name].map(lambda value: isinstance(value, list)).any()
        ]
        if self.outline.outputs:
            others = (*self.outline.keys, *COUNTS)
            wanted = [name for name in wanted if name in others or _is_of(name, self.outline.outputs)]
        return summary[wanted]

    @property
    def shown(self) -> tuple[str, ...]:
        """Metrics for a narrow table: those drawn and compared, else those of `outputs`, else the first few."""
        table = self.table()
        others = (*self.outline.keys, *COUNTS)
        columns = [str(name) for name in table.columns]
        names = [name for name in columns if name not in others and not _is_limit(name, columns)]
        drawn = [name for spec in self.plots for name in spec.y]
        asked = {name.removesuffix(".best") for name in (*drawn, *(p.column for p in self.outline.published.points))}
        found = [name for name in names if name.removesuffix(".best") in asked]
        return tuple(name.removesuffix(".best") for name in found or names[:_MOST_SHOWN])

    @property
    def published(self) -> pd.DataFrame | None:
        """Published points: factor values and metrics, as far as each is known; None without any."""
        import pandas as pd

        points = self.outline.published.points
        return pd.DataFrame([{**point.where, point.column: point.value} for point in points]) if points else None


def load_sweep(folder: Path) -> SweepResults:
    """Return the results in a folder, those of all parts together.

    Raises:
        InputError: it holds no results of a sweep.
    """
    if not (folder / SWEEP_FILE).is_file():
        hint = "give the directory that dsim sweep wrote to"
        raise InputError(str(folder), f"has no {SWEEP_FILE}: it holds no results of a sweep", hint=hint)
    outline = read_outline(folder / SWEEP_FILE)
    return SweepResults(outline, in_order(outline, read_rows(folder).values()))


def in_order(outline: Outline, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows in the order of the sweep's combinations and replications."""
    places = {values: number for number, values in enumerate(outline.values())}
    after = len(places)
    return tuple(sorted(rows, key=lambda row: (places.get(tuple(row.factors.values()), after), row.replication)))


def summarized(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield factors, metrics with their intervals over replications, and counts of each combination of factors."""
    groups: dict[tuple[Scalar, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.factors.values()), []).append(row)
    for group in groups.values():
        good = [row for row in group if row.error is None]
        factors = group[0].factors
        yield {
            **factors,
            **_summary_of([row.outputs for row in good]),
            **factors,  # where a column has the name of a factor, as `model`, the file's own word stands
            "replications": len(good),
            "failed": len(group) - len(good),
        }


def _summary_of(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each metric over replications; one that some of them lack has no mean, and `missing` says so."""
    records = [dict(flat(output, is_value=_is_interval)) for output in outputs]
    found: dict[str, Any] = {}
    lacking: dict[str, int] = {}
    for name in dict.fromkeys(name for record in records for name in record if name not in COUNTS):
        values = [record[name] for record in records if record.get(name) is not None]
        if values and len(values) < len(records):
            lacking[name] = len(records) - len(values)
        if not values:
            found[name] = None
        elif all(isinstance(value, dict) for value in values):
            for limit in _LIMITS:
                limits = [value[limit] for value in values if value[limit] is not None]
                found[f"{name}.{limit}"] = _mean(limits) if len(limits) == len(records) else None
                if limits and len(limits) < len(values):
                    lacking[f"{name}.{limit}"] = len(records) - len(limits)
        elif all(_is_number(value) for value in values):
            found |= _mean_with_interval(name, values, complete=name not in lacking)
        elif all(isinstance(value, list) for value in values):
            found |= _list(name, values, complete=name not in lacking)
        else:
            texts = dict.fromkeys(values)
            found[name] = next(iter(texts)) if len(texts) == 1 else "; ".join(map(str, texts))
    names = dict.fromkeys(name for record in records for name, value in record.items() if value is not None)
    return {**found, "missing": _missing(lacking, names, len(records))}


def _missing(lacking: Mapping[str, int], names: Collection[str], replications: int) -> str | None:
    """Return which metrics some replications lack; a group that all lack alike is named once.

    >>> _missing({"a.b": 1, "a.c": 1, "d": 2}, ["a.b", "a.c", "d", "e"], 3)
    'a in 1 of 3, d in 2 of 3'
    """
    shown: dict[str, int] = {}
    for name, count in lacking.items():
        parts = name.split(".")
        groups = [".".join(parts[:length]) for length in range(1, len(parts))]
        alike = [group for group in groups if _counts_below(group, lacking, names) == {count}]
        shown[(alike or [name])[0]] = count
    return ", ".join(f"{name} in {count} of {replications}" for name, count in shown.items()) or None


def _counts_below(group: str, lacking: Mapping[str, int], names: Collection[str]) -> set[int]:
    return {lacking.get(name, 0) for name in names if name.startswith(f"{group}.")}


def _mean_with_interval(name: str, values: Sequence[float], *, complete: bool) -> dict[str, Any]:
    if not complete:
        return {name: None} if name in _SET else {name: None, f"{name}.low": None, f"{name}.high": None}
    if name in _SET:
        return {name: values[0]} if len(set(values)) == 1 else {name: _mean(values)}
    if len(values) < 2:
        return {name: values[0], f"{name}.low": None, f"{name}.high": None}
    interval = mean_interval(values, confidence=CONFIDENCE)
    low, high = interval.low, interval.high
    if not _SHARES.isdisjoint(name.split(".")):
        low, high = max(low, 0.0), min(high, 1.0)
    elif any(part.endswith("_s") for part in name.split(".")):
        low = max(low, 0.0)  # no time and no rate is below it
    return {name: interval.best, f"{name}.low": low, f"{name}.high": high}


def _list(name: str, values: Sequence[list[Any]], *, complete: bool) -> dict[str, Any]:
    """Return the mean of lists of numbers with its interval, item by item; other lists stay in the rows."""
    if len({len(value) for value in values}) > 1 or not all(_is_number(item) for value in values for item in value):
        return {}
    if not complete or len(values) < 2:
        return {name: list(values[0]) if complete else None}
    items = [_mean_with_interval(name, item, complete=True) for item in zip(*values, strict=True)]
    return {key: [item[key] for item in items] for key in (name, f"{name}.low", f"{name}.high")}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_interval(value: Mapping[str, Any]) -> bool:
    return set(value) == set(_LIMITS)


def _is_of(name: str, outputs: Sequence[str]) -> bool:
    """Return whether a column is one of the metrics, or of a group of them, or a limit of one."""
    return any(name == metric or name.startswith(f"{metric}.") for metric in outputs)


def _is_limit(name: str, columns: Collection[str]) -> bool:
    """Return whether a column is a limit of another one's interval."""
    group, _, last = name.rpartition(".")
    return last in ("low", "high") and (group in columns or f"{group}.best" in columns)


def records_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame as mappings; None where there is no number."""
    return [
        {str(name): None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


@contextlib.contextmanager
def _lock(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock file, which is gone when nobody holds it any more."""
    try:
        import fcntl
    except ImportError:  # not on Windows, where nothing refuses the second process
        yield
        return
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                rule = "is in use: another dsim sweep is running there"
                hint = "wait until it has ended, or give another directory"
                raise InputError("--output-dir", rule, value=str(path.parent), hint=hint) from None
            if _is_at(path, os.fstat(file.fileno())):
                break
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while others share it
                path.unlink(missing_ok=True)


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Return whether an open file is still the one at this path: the last holder of a lock removes it."""
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def _drop_torn_line(path: Path) -> None:
    """Cut what a killed process left of its last line."""
    with path.open("r+b") as file:
        data = file.read()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            file.truncate(complete)
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
