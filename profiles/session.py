"""One profiling run: points in, rows out, within a time budget; knows nothing of torch."""

from __future__ import annotations

import csv
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from dsim.errors import DsimError, InputError
from dsim.files import write_whole
from profiles.allreduce import AllReduces
from profiles.grid import CostModel, dominated
from profiles.rows import COLUMNS, Metadata, Point, Row, Status, head_text, parse_rows, row_text

#: Seconds of timing that one visit of a point gets at most.
_SLICE_S = 0.5
#: A single visit may take this share of the remaining time, else a few slow points would be all there is.
_SHARE = 0.1
#: All rounds of a point beyond the coarse levels may take this share of the remaining time.
_SHARE_OF_ROUNDS = 0.2
#: Share of the remaining time that is planned; visits vary.
_PLANNED = 0.9
#: Levels that are timed once before it is decided how many rounds the budget has: they cover the whole range.
_COARSE_LEVELS = 2
#: This many points in a row that fail are no bad luck.
_FAILURES = 3
#: The resumed file must agree with the run in these.
_SAME = ("dtype", "device", "driver", "torch", "all_reduce")
_SAME_SETTINGS = ("threads", "clock", "statistic", "tp", "cuda_graphs", "grouped_queries", "copies")
#: How every file of ours begins.
_BEGINNING = b"# dsim_rows:"


class OutOfMemoryError(DsimError):
    """The device has too little memory for a step."""


class StepFailedError(DsimError):
    """A step could not be run for another reason than memory."""


class NothingTimedError(DsimError):
    """A run that has no times to show."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one visit of a point gave, all-reduces apart.

    Args:
        step_s: median.
        spread_s: half of the 16-84 % range; None of a single one.
        samples: timings behind them.
    """

    step_s: float
    spread_s: float | None
    samples: int


class Timer(Protocol):
    """Runs steps on a device."""

    def time(self, point: Point, *, seconds: float) -> Timing:
        """Time the step again and again for about so many seconds, but a few times at least.

        Raises:
            OutOfMemoryError: the device has too little memory.
            StepFailedError: the step cannot be run.
        """
        ...

    def visit_s(self, point: Point, step_s: float) -> float:
        """Return how long the shortest visit of a point takes if its step takes `step_s`."""
        ...


class Progress(Protocol):
    """Shows how far a run is."""

    def update(self, *, elapsed_s: float, budget_s: float, rows: int, text: str) -> None:
        """Take note of the state before a point is timed, or at the end."""
        ...


class RowsFile:
    """A rows file that grows line by line and that a killed run leaves readable.

    Args:
        rows: those already in it.
    """

    def __init__(self, path: Path, rows: Sequence[Row] = ()) -> None:
        self.path = path
        self.rows = list(rows)

    @classmethod
    def create(cls, path: Path, head: Mapping[str, object], *, overwrite: bool = False) -> RowsFile:
        """Return a new file with the head; it appears whole or not at all.

        Raises:
            InputError: there is such a file already and it may not be replaced.
        """
        check_output(path, resume=False, overwrite=overwrite)
        write_whole(path, head_text(head))
        return cls(path)

    @classmethod
    def resume(cls, path: Path, head: Mapping[str, object]) -> RowsFile:
        """Return the file with the rows of an earlier run of the same kind; a line cut short is dropped.

        Raises:
            InputError: the file is none of this program's, or was timed with another model, device, type or version.
        """
        if not path.exists():
            return cls.create(path, head)
        data = path.read_bytes()
        if _has_no_rows(data):
            return cls.create(path, head, overwrite=True)
        whole = data[: data.rfind(b"\n") + 1]
        columns = _columns(whole)
        if not data.startswith(_BEGINNING) or columns != list(COLUMNS):
            rule = "is no file of this version of dsim profile run"
            raise InputError(str(path), f"{rule}, so nothing is added to it", hint="give another --out")
        # A file whose every step ran out of memory is no mistake here: one more row makes it pass for one with times.
        without_times = not any(line.endswith(b",ok") for line in whole.splitlines())
        there = parse_rows(whole + (row_text(_ANY).encode() if without_times else b""), file=str(path))
        wanted = parse_rows((head_text(head) + row_text(_ANY)).encode(), file="this run").metadata
        _refuse_other(path, there.metadata, wanted)
        if whole != data:
            os.truncate(path, len(whole))
        file = cls(path, there.rows[:-1] if without_times else there.rows)
        file.remark(f"resumed {head.get('date')}, budget_s {_settings_of(head).get('budget_s')}")
        return file

    def append(self, row: Row) -> None:
        """Add a row; it is on disk when this returns."""
        self._write(row_text(row))
        self.rows.append(row)

    def remark(self, text: str) -> None:
        """Add a line that readers pass over."""
        self._write(f"# {text}\n")

    def _write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


#: No point of a grid, and a time that is possible for any of them.
_ANY = Row(Point("prefill", 1, 1, 1), 1.0, 999_999_999)


def check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    """See that the rows file can be written.

    Raises:
        InputError: it exists and may neither be extended nor replaced, or its directory is none or not writable.
    """
    if path.is_dir():
        raise InputError("--out", "is a directory", value=str(path), hint="give a file, such as rows.csv")
    if path.exists() and not resume and not overwrite:
        raise InputError("--out", "exists", value=str(path), hint="--resume adds to it, --overwrite replaces it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError("--out", f"cannot be written: {folder} is no directory", value=str(path))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError("--out", "cannot be written: no permission", value=str(path))


def _has_no_rows(data: bytes) -> bool:
    """Return whether a run of ours was killed before its first row: then nothing is lost with the file."""
    if not data.startswith(_BEGINNING):
        return _BEGINNING.startswith(data)
    rest = b"".join(line for line in data.splitlines(keepends=True) if not line.startswith(b"#"))
    return (",".join(COLUMNS) + "\n").encode().startswith(rest)


def _columns(data: bytes) -> list[str]:
    lines = [line for line in data.decode("utf-8", errors="replace").splitlines() if not line.startswith("#")]
    return next(csv.reader(lines[:1]), [])


def _settings_of(head: Mapping[str, object]) -> Mapping[str, object]:
    settings = head.get("settings")
    return settings if isinstance(settings, Mapping) else {}


def _refuse_other(path: Path, there: Metadata, wanted: Metadata) -> None:
    reduced = sorted({key for side in (there, wanted) for key in side.settings if key.startswith("all_reduce_tp")})
    pairs: list[tuple[str, object, object]] = [
        ("model", there.model and there.model.name, wanted.model and wanted.model.name),
        ("gpu", there.gpu and there.gpu.name, wanted.gpu and wanted.gpu.name),
        *((key, getattr(there, key), getattr(wanted, key)) for key in _SAME),
        *((key, there.settings.get(key), wanted.settings.get(key)) for key in _SAME_SETTINGS),
        *((key, _source(there.settings.get(key)), _source(wanted.settings.get(key))) for key in reduced),
    ]
    for key, old, new in pairs:
        if old != new:
            hint = "give another --out, or --overwrite"
            raise InputError(str(path), f"was timed with {old}, this run has {new}", name=key, hint=hint)


def _source(all_reduces: str | None) -> str | None:
    """Return what must not be mixed: the whole of a model, but of timed all-reduces only that they were timed."""
    return "measured" if all_reduces is not None and all_reduces.startswith("measured") else all_reduces


@dataclass(slots=True)
class Session:
    """One run over a grid.

    Times of one point from different minutes differ more than those within one visit, so several short visits say more
    than a long one: the coarse levels are timed once, then as many finer points join as can have all their rounds, then
    come the other rounds, over all points each. Which points join depends on what visits take, never on their times'
    agreement with anything.

    Args:
        budget_s: wall-clock seconds from `started_s` on; no visit is begun that is expected to end later.
        started_s: when the run began, on `clock`.
        rounds: visits of each point at most; each is a row.
    """

    timer: Timer
    file: RowsFile
    cost: CostModel
    all_reduces: AllReduces
    budget_s: float
    started_s: float
    clock: Callable[[], float]
    progress: Progress
    rounds: int = 3
    _failures: int = field(default=0, init=False)
    _done: set[tuple[Point, int]] = field(default_factory=set, init=False)
    _unusable: set[Point] = field(default_factory=set, init=False)
    _out_of_memory: list[Point] = field(default_factory=list, init=False)
    #: What a visit of a point took, wall-clock seconds.
    _took_s: dict[Point, float] = field(default_factory=dict, init=False)
    #: Seconds that visits took, and that they were expected to take.
    _seconds: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def run(self, levels: Sequence[Sequence[Point]]) -> Outcome:
        """Time the points until all rounds are done or the budget is spent.

        Raises:
            StepFailedError: step after step fails, so that nothing will come of going on.
        """
        self._recall()
        points = [point for level in levels for point in level]
        joined = self._once([point for level in levels[:_COARSE_LEVELS] for point in level])
        rounds = self._affordable_rounds(joined)
        while True:
            left = [point for point in points if point not in joined]
            more = self._joining(left, joined, rounds)
            joined += more
            self._rounds(joined, rounds)
            if not more and rounds < self.rounds and self._remaining_s() > 0:
                # Visits took less than expected.
                rounds += 1
            elif not more:
                break
        self._show("done")
        timed = {row.point for row in self.file.rows if row.status is Status.OK}.intersection(points)
        return Outcome(
            rows=len(self.file.rows),
            timed=len(timed),
            left_out=len(set(points) - timed - self._unusable),
            unusable=len((self._unusable - timed).intersection(points)),
            elapsed_s=self.clock() - self.started_s,
        )

    def _recall(self) -> None:
        """Take note of the rows that an earlier run left."""
        for row in self.file.rows:
            self._done.add((row.point, row.repeat))
            if row.status is Status.OK:
                self.cost.learn(row.point, row.step_s - (row.comm_s or 0.0))
                self._took_s[row.point] = self.timer.visit_s(row.point, row.step_s - (row.comm_s or 0.0))
            else:
                self._unusable.add(row.point)
            if row.status is Status.OOM:
                self._out_of_memory.append(row.point)

    def _once(self, points: Sequence[Point]) -> list[Point]:
        """Time the points once and return those that have a time now; leave out what takes too much of what is left."""
        for point in points:
            remaining_s = self._remaining_s()
            if remaining_s <= 0:
                break
            if not self._visited(point) and self._visit_s(point) <= _SHARE * remaining_s:
                self._visit(point, 0, seconds=0.0)
        return [point for point in points if self._visited(point) and point not in self._unusable]

    def _affordable_rounds(self, points: Sequence[Point]) -> int:
        """Return how many rounds of the coarse points the budget has, the first of them included."""
        once_s = sum(self._visit_s(point) for point in points)
        if not once_s:
            return 1
        return max(1, min(self.rounds, 1 + int(_PLANNED * self._remaining_s() / once_s)))

    def _joining(self, points: Sequence[Point], joined: Sequence[Point], rounds: int) -> list[Point]:
        """Time those of the points once for which the budget has all rounds beside those that joined before."""
        promised_s = sum(self._visit_s(point) * self._missing(point, rounds) for point in joined)
        more: list[Point] = []
        for point in points:
            remaining_s = self._remaining_s()
            if remaining_s <= 0:
                break
            if point in self._unusable:
                continue
            whole_s = self._visit_s(point) * self._missing(point, rounds)
            if promised_s + whole_s > _PLANNED * remaining_s or whole_s > _SHARE_OF_ROUNDS * remaining_s:
                continue
            if not self._visited(point):
                self._visit(point, 0, seconds=0.0)
            if point not in self._unusable:
                more.append(point)
                promised_s += self._visit_s(point) * self._missing(point, rounds)
        return more

    def _rounds(self, points: Sequence[Point], rounds: int) -> None:
        """Time every point in every round, degree by degree: weights are built once for each."""
        ordered = sorted(points, key=lambda point: point.tp)
        left = [(p, n) for n in range(rounds) for p in ordered if (p, n) not in self._done]
        for number, (point, repeat) in enumerate(left):
            remaining_s = self._remaining_s()
            if remaining_s <= 0:
                break
            if point in self._unusable or self._visit_s(point) > remaining_s:
                continue
            self._visit(point, repeat, seconds=remaining_s / (len(left) - number) / 2)

    def _visited(self, point: Point) -> bool:
        return point in self._took_s or point in self._unusable

    def _missing(self, point: Point, rounds: int) -> int:
        return sum((point, repeat) not in self._done for repeat in range(rounds))

    def _visit_s(self, point: Point) -> float:
        """Return what a visit of the point takes: what it took, or a guess that past guesses correct."""
        took_s = self._took_s.get(point)
        if took_s is not None:
            return took_s
        spent_s, expected_s = self._seconds
        # As if some visits had taken what was expected: the first says little.
        factor = (spent_s + 0.5) / (expected_s + 0.5)
        return self.timer.visit_s(point, self.cost.step_s(point)) * factor

    def _visit(self, point: Point, repeat: int, *, seconds: float) -> None:
        """Time a point for at most so many seconds, or as long as it takes, and write what came of it."""
        self._show(str(point))
        if dominated(point, self._out_of_memory):
            status = Status.SKIPPED
        else:
            begun_s = self.clock()
            status = self._timed(point, repeat, seconds=min(_SLICE_S, seconds))
            took_s = self.clock() - begun_s
            self._took_s[point] = min(took_s, self._took_s.get(point, took_s))
        if status is not Status.OK:
            self._unusable.add(point)
            self.file.append(Row(point, math.nan, repeat, status=status))
        if status is Status.OOM:
            self._out_of_memory.append(point)
        self._done.add((point, repeat))

    def _timed(self, point: Point, repeat: int, *, seconds: float) -> Status:
        begun_s = self.clock()
        try:
            timing = self.timer.time(point, seconds=seconds)
        except OutOfMemoryError:
            return Status.OOM
        except StepFailedError as error:
            self._failures += 1
            if self._failures >= _FAILURES:
                raise StepFailedError(f"{self._failures} steps in a row failed, the last, {point}: {error}") from error
            return Status.FAILED
        self._failures = 0
        self.cost.learn(point, timing.step_s)
        spent_s, expected_s = self._seconds
        expected_s += max(self.timer.visit_s(point, timing.step_s), seconds)
        self._seconds = (spent_s + self.clock() - begun_s, expected_s)
        comm_s = self.all_reduces.step_s(point)
        self.file.append(Row(point, timing.step_s + comm_s, repeat, comm_s, timing.spread_s))
        return Status.OK

    def _remaining_s(self) -> float:
        return self.started_s + self.budget_s - self.clock()

    def _show(self, text: str) -> None:
        elapsed_s = self.clock() - self.started_s
        self.progress.update(elapsed_s=elapsed_s, budget_s=self.budget_s, rows=len(self.file.rows), text=text)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Args:
        rows: lines of the file.
        timed: points with at least one time.
        left_out: points that the budget did not reach.
        unusable: points that ran out of memory or failed.
    """

    rows: int
    timed: int
    left_out: int
    unusable: int
    elapsed_s: float

    def __str__(self) -> str:
        text = f"{self.timed} points timed in {self.elapsed_s:.0f} s, {self.rows} rows"
        if self.left_out:
            text += f"; {self.left_out} points beyond the budget (--resume with more time adds them)"
        if self.unusable:
            text += f"; {self.unusable} points ran out of memory or failed, see their status"
        return text


@dataclass(slots=True)
class Bar:
    """A progress bar on one line of a terminal; elsewhere a line now and then.

    Args:
        every_s: between lines where the stream is no terminal.
    """

    stream: TextIO = sys.stderr
    every_s: float = 30.0
    _shown_s: float = field(default=float("-inf"), init=False)

    def update(self, *, elapsed_s: float, budget_s: float, rows: int, text: str) -> None:
        """Show the state."""
        share = min(elapsed_s / budget_s, 1.0) if budget_s > 0 else 1.0
        if self.stream.isatty():
            filled = round(20 * share)
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {elapsed_s:4.0f}/{budget_s:.0f} s  {rows} rows  {text}"
            self.stream.write(f"\r\x1b[2K{line[:110]}" + ("\n" if text == "done" else ""))
            self.stream.flush()
        elif text == "done" or elapsed_s - self._shown_s >= self.every_s:
            self._shown_s = elapsed_s
            self.stream.write(f"{elapsed_s:.0f}/{budget_s:.0f} s, {rows} rows: {text}\n")


class Silence:
    """Shows nothing."""

    def update(self, *, elapsed_s: float, budget_s: float, rows: int, text: str) -> None:
        """Take note of nothing."""
