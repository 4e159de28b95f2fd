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
from profiles.allreduce import AllReduces
from profiles.grid import CostModel, dominated, visits
from profiles.rows import COLUMNS, Metadata, Point, Row, Status, head_text, parse_rows, row_text

#: Seconds of timing that one visit of a point gets at most.
_SLICE_S = 0.5
#: A single visit may take this share of the remaining time, else a few slow points would be all there is.
_SHARE = 0.1
#: This many points in a row that fail are no bad luck.
_FAILURES = 3
#: The resumed file must agree with the run in these.
_SAME = ("dtype", "device", "driver", "torch")


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
        spread_s: half of the 16-84 % range.
        samples: timings behind them.
    """

    step_s: float
    spread_s: float
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
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            temporary.write_text(head_text(head), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return cls(path)

    @classmethod
    def resume(cls, path: Path, head: Mapping[str, object]) -> RowsFile:
        """Return the file with the rows of an earlier run of the same kind; a line cut short is dropped.

        Raises:
            InputError: the file cannot be read, or was timed with another model, device, type or version.
        """
        if not path.exists():
            return cls.create(path, head)
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not has_rows(whole):
            # Nothing was timed, or the header line itself was cut: nothing is lost.
            return cls.create(path, head, overwrite=True)
        columns = _columns(whole)
        if columns != list(COLUMNS):
            raise InputError(str(path), "has other columns than this version writes", hint="give another --out")
        there = parse_rows(whole, file=str(path))
        wanted = parse_rows((head_text(head) + row_text(_ANY)).encode(), file="this run").metadata
        _refuse_other(path, there.metadata, wanted)
        if whole != data:
            os.truncate(path, len(whole))
        return cls(path, there.rows)

    def append(self, row: Row) -> None:
        """Add a row; it is on disk when this returns."""
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(row_text(row))
        self.rows.append(row)


_ANY = Row(Point("prefill", 1, 1, 1), 1.0)


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


def has_rows(data: bytes) -> bool:
    """Return whether there is a timed row, at least one `ok`, in the bytes of a rows file."""
    return any(line.endswith(b",ok") for line in data.splitlines() if not line.startswith(b"#"))


def _columns(data: bytes) -> list[str]:
    lines = [line for line in data.decode("utf-8", errors="replace").splitlines() if not line.startswith("#")]
    return next(csv.reader(lines[:1]), [])


def _refuse_other(path: Path, there: Metadata, wanted: Metadata) -> None:
    pairs: list[tuple[str, object, object]] = [
        ("model", there.model and there.model.name, wanted.model and wanted.model.name),
        ("gpu", there.gpu and there.gpu.name, wanted.gpu and wanted.gpu.name),
        *((key, getattr(there, key), getattr(wanted, key)) for key in _SAME),
        ("threads", there.settings.get("threads"), wanted.settings.get("threads")),
    ]
    for key, old, new in pairs:
        if old != new:
            hint = "give another --out, or --overwrite"
            raise InputError(str(path), f"was timed with {old}, this run has {new}", name=key, hint=hint)


@dataclass(slots=True)
class Session:
    """One run over a grid.

    Args:
        budget_s: wall-clock seconds from `started_s` on; no visit is begun that is expected to end later.
        started_s: when the run began, on `clock`.
        rounds: visits of each point at most; each is a row, so that slow minutes of the machine show.
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

    def run(self, levels: Sequence[Sequence[Point]]) -> Outcome:
        """Time the points in order, round after round, until all is done or the budget is spent.

        Raises:
            StepFailedError: step after step fails, so that nothing will come of going on.
        """
        done = {(row.point, row.repeat) for row in self.file.rows}
        out_of_memory = [row.point for row in self.file.rows if row.status is Status.OOM]
        unusable = {row.point for row in self.file.rows if row.status is not Status.OK}
        for row in self.file.rows:
            if row.status is Status.OK:
                self.cost.learn(row.point, row.step_s - (row.comm_s or 0.0))
        left = [visit for visit in visits(levels, rounds=self.rounds) if visit not in done]
        for number, (point, repeat) in enumerate(left):
            remaining_s = self._remaining_s()
            if remaining_s <= 0:
                break
            if point in unusable or self.timer.visit_s(point, self.cost.step_s(point)) > _SHARE * remaining_s:
                continue
            self._show(str(point))
            if dominated(point, out_of_memory):
                status = Status.SKIPPED
            else:
                fair_s = remaining_s / (len(left) - number) / 2
                status = self._visit(point, repeat, seconds=min(_SLICE_S, fair_s))
            if status is not Status.OK:
                unusable.add(point)
                self.file.append(Row(point, math.nan, repeat, status=status))
            if status is Status.OOM:
                out_of_memory.append(point)
        self._show("done")
        points = {point for level in levels for point in level}
        timed = points.intersection(row.point for row in self.file.rows if row.status is Status.OK)
        return Outcome(
            rows=len(self.file.rows),
            timed=len(timed),
            left_out=len(points - timed - unusable),
            unusable=len(points & unusable - timed),
            elapsed_s=self.clock() - self.started_s,
        )

    def _visit(self, point: Point, repeat: int, *, seconds: float) -> Status:
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
