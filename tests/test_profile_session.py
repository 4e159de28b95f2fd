"""A profiling run without a device: budget, rounds, resuming, memory that runs out, steps that fail."""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsim.catalog import find_gpu
from dsim.errors import InputError
from profiles.allreduce import AllReduceModel, AllReduces
from profiles.grid import CostModel, make_grid
from profiles.profiling import Question
from profiles.rows import COLUMNS, Point, Status, read_rows
from profiles.session import (
    Bar,
    Outcome,
    OutOfMemoryError,
    RowsFile,
    Session,
    Silence,
    StepFailedError,
    Timing,
    check_output,
)
from profiles.shapes import shape_of

SHAPE = shape_of("tiny")
GPU = find_gpu("cpu")
HEAD: dict[str, object] = {
    "model": "dsim-tiny-14m",
    "gpu": "cpu",
    "dtype": "fp32",
    "device": "a CPU",
    "driver": "Linux",
    "torch": "2.13.0",
    "settings": {"threads": 1},
}
SETTINGS = {
    "threads": 1,
    "tp": [2],
    "cuda_graphs": "yes",
    "grouped_queries": "native",
    "all_reduce_tp2": "modelled: 1 s",
}


@dataclass
class FakeMachine:
    """A clock and a timer: a step takes what its tokens say, a visit ten steps."""

    now_s: float = 1000.0
    slowness: float = 1.0
    expected: float = 1.0
    fails: Callable[[Point], Exception | None] = lambda _: None
    visited: list[Point] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_s

    def step_s(self, point: Point) -> float:
        return self.slowness * (0.005 + 1e-4 * point.requests * (point.prompt_tokens + point.context_tokens / 100))

    def time(self, point: Point, *, seconds: float) -> Timing:
        self.visited.append(point)
        error = self.fails(point)
        if error is not None:
            raise error
        step_s = self.step_s(point)
        self.seconds.append(seconds)
        self.now_s += max(10 * step_s, seconds)
        return Timing(step_s, step_s / 100, 5)

    def visit_s(self, point: Point, step_s: float) -> float:
        del point
        return self.expected * 10 * step_s


def levels(tps: tuple[int, ...] = (1,)) -> list[list[Point]]:
    asked = Question(SHAPE, GPU, "cpu", tps, "fp32")
    return make_grid(SHAPE, GPU, tps=tps, limits=asked.limits, dtype_bytes=4)


def session(machine: FakeMachine, file: RowsFile, *, budget_s: float = 1e6, rounds: int = 3) -> Session:
    return Session(
        timer=machine,
        file=file,
        cost=CostModel(SHAPE, 4, GPU.bf16_flops_per_s, GPU.hbm_bytes_per_s),
        all_reduces=AllReduces(SHAPE, 4, models={2: AllReduceModel(1e-5, 1e9)}),
        budget_s=budget_s,
        started_s=machine.now_s,
        clock=machine.clock,
        progress=Silence(),
        rounds=rounds,
    )


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of rows need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.csv"


def test_with_time_enough_every_point_is_timed_in_every_round(path: Path) -> None:
    machine = FakeMachine()
    outcome = session(machine, RowsFile.create(path, HEAD)).run(levels((1, 2)))
    points = [point for level in levels((1, 2)) for point in level]
    rows = read_rows(path).rows
    assert len(rows) == outcome.rows == 3 * len(points)
    assert {(row.point, row.repeat) for row in rows} == {(p, r) for p in points for r in range(3)}
    assert (outcome.timed, outcome.left_out, outcome.unusable) == (len(points), 0, 0)
    for row in rows:
        assert row.comm_s is not None
        assert (row.comm_s > 0) == (row.point.tp == 2)
        assert row.step_s - row.comm_s == pytest.approx(machine.step_s(row.point), rel=1e-4)


@pytest.mark.parametrize("budget_s", [5.0, 30.0, 60.0, 300.0])
@pytest.mark.parametrize("slowness", [0.2, 1.0, 10.0])
def test_the_budget_is_kept_and_used(path: Path, budget_s: float, slowness: float) -> None:
    machine = FakeMachine(slowness=slowness)
    points = sum(len(level) for level in levels())
    outcome = session(machine, RowsFile.create(path, HEAD), budget_s=budget_s).run(levels())
    # A visit that turns out slower than expected may end late, at worst by some steps.
    assert outcome.elapsed_s <= 1.1 * budget_s + 10 * machine.step_s(Point("prefill", 1, 1, 256))
    assert outcome.timed + outcome.left_out == points
    # Points too slow for a tenth of what is left are left out; else the time is used.
    assert outcome.elapsed_s >= 0.5 * budget_s or outcome.left_out or outcome.rows == 3 * points


@pytest.mark.parametrize("expected", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("budget_s", [30.0, 60.0, 120.0])
@pytest.mark.parametrize("slowness", [0.2, 1.0])
def test_every_point_has_several_rounds_from_different_times(
    path: Path, budget_s: float, slowness: float, expected: float
) -> None:
    """However wrong the first guesses are, the budget goes to points that get all of their rounds."""
    machine = FakeMachine(slowness=slowness, expected=expected)
    outcome = session(machine, RowsFile.create(path, HEAD), budget_s=budget_s, rounds=5).run(levels())
    rows = read_rows(path).rows
    repeats = Counter(row.point for row in rows)
    coarse = {point for level in levels()[:2] for point in level}
    assert outcome.elapsed_s <= 1.1 * budget_s
    once_s = sum(10 * machine.step_s(point) for point in coarse)
    wanted = 5 if 6 * once_s < budget_s else max(1, int(budget_s / once_s) - 2)
    assert sum(repeats[point] >= wanted for point in coarse & repeats.keys()) >= 0.9 * len(coarse & repeats.keys())
    # Of points that joined, none has only a part of the rounds that others have, but for the last round.
    assert min(repeats.values()) >= max(repeats.values()) - 1 or 6 * once_s > budget_s
    # Between two times of a point all the others are timed: a disturbance hits one round of many points.
    first = rows[0].point
    places = [i for i, row in enumerate(rows) if row.point == first]
    assert all(b - a >= 10 for a, b in itertools.pairwise(places))


def test_time_that_visits_did_not_need_gives_more_rounds(path: Path) -> None:
    machine = FakeMachine(slowness=5.0)
    coarse = [point for level in levels()[:2] for point in level]
    once_s = sum(10 * machine.step_s(point) for point in coarse)

    def faster_later(point: Point) -> Exception | None:
        del point
        if len(machine.visited) > len(coarse):
            machine.slowness = 0.1
        return None

    machine.fails = faster_later
    outcome = session(machine, RowsFile.create(path, HEAD), budget_s=2.5 * once_s, rounds=4).run(levels()[:2])
    repeats = Counter(row.point for row in read_rows(path).rows)
    assert set(repeats.values()) == {4}
    assert outcome.elapsed_s <= 2.5 * once_s


def test_first_visits_are_short_and_spare_time_makes_later_ones_longer(path: Path) -> None:
    machine = FakeMachine(slowness=0.01)
    session(machine, RowsFile.create(path, HEAD), budget_s=600.0, rounds=2).run(levels())
    points = sum(len(level) for level in levels())
    assert machine.seconds[:points] == [0.0] * points
    assert set(machine.seconds[points:]) == {0.5}


def test_a_budget_of_a_minute_covers_the_range_first(path: Path) -> None:
    machine = FakeMachine()
    session(machine, RowsFile.create(path, HEAD), budget_s=60.0).run(levels())
    rows = read_rows(path).rows
    prefills = {row.point.prompt_tokens for row in rows if row.point.phase == "prefill"}
    assert {16, 64, 256, 1024} <= prefills
    assert {row.point.context_tokens for row in rows if row.point.phase == "decode"} >= {64.0, 512.0, 2048.0}


def test_a_resumed_run_times_only_what_is_missing(path: Path) -> None:
    first = FakeMachine()
    session(first, RowsFile.create(path, HEAD), budget_s=20.0).run(levels())
    before = read_rows(path).rows
    second = FakeMachine()
    session(second, RowsFile.resume(path, HEAD)).run(levels())
    after = read_rows(path).rows
    assert after[: len(before)] == before
    assert len(after) == 3 * sum(len(level) for level in levels()) == len(before) + len(second.visited)
    third = FakeMachine()
    session(third, RowsFile.resume(path, HEAD)).run(levels())
    assert third.visited == []
    assert read_rows(path).rows == after


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_cut_short_is_dropped_and_timed_again(path: Path, cut: int) -> None:
    session(FakeMachine(), RowsFile.create(path, HEAD), rounds=1).run(levels())
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    machine = FakeMachine()
    session(machine, RowsFile.resume(path, HEAD), rounds=1).run(levels())
    assert len(machine.visited) == 1
    assert len(read_rows(path).rows) == sum(len(level) for level in levels())


def test_an_interrupted_run_leaves_a_file_to_resume(path: Path) -> None:
    machine = FakeMachine()

    def interrupt(point: Point) -> Exception | None:
        del point
        if len(machine.visited) > 10:
            raise KeyboardInterrupt
        return None

    machine.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        session(machine, RowsFile.create(path, HEAD)).run(levels())
    assert len(read_rows(path).rows) == 10
    machine.fails = lambda _: None
    session(machine, RowsFile.resume(path, HEAD), rounds=1).run(levels())
    assert len(read_rows(path).rows) == sum(len(level) for level in levels())


@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_a_head_without_rows_is_begun_anew(path: Path, kept: float) -> None:
    RowsFile.create(path, HEAD)
    head = path.read_bytes()
    path.write_bytes(head[: int(len(head) * kept)])
    file = RowsFile.resume(path, HEAD)
    assert file.rows == []
    assert path.read_bytes() == head


SIX_COLUMNS = "phase,tp,requests,prompt_tokens,context_tokens,step_s\nprefill,1,1,16,0,0.1\ndecode,1,1,0,64,0.01\n"


@pytest.mark.parametrize(
    "text",
    [
        SIX_COLUMNS,
        "# measured on Monday\n" + SIX_COLUMNS,
        "# dsim_rows: 1\n# model: dsim-tiny-14m\n" + SIX_COLUMNS,
        "Buy milk.\nCall home.\n",
        "Buy milk",
        "# dsim_rowing: notes\n",
        "\n",
        ",".join(COLUMNS) + "\ndecode,1,1,0,0,64,0,0,0.01,,,ok\n",
    ],
    ids=["six columns", "remark", "with head", "notes", "one line", "a remark", "empty line", "no head"],
)
def test_what_is_not_ours_is_not_resumed(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match="is no file of this version of dsim profile run, so nothing is added to it"):
        RowsFile.resume(path, HEAD)
    assert path.read_text() == text


def test_records_of_steps_that_ran_out_of_memory_are_kept(path: Path) -> None:
    machine = FakeMachine(fails=lambda _: OutOfMemoryError("full"))
    session(machine, RowsFile.create(path, HEAD)).run(levels())
    before = path.read_text()
    assert "oom" in before
    assert ",ok" not in before
    file = RowsFile.resume(path, HEAD)
    assert {row.status for row in file.rows} == {Status.OOM, Status.SKIPPED}
    assert path.read_text().startswith(before)
    again = FakeMachine()
    session(again, file).run(levels())
    assert again.visited == []


def test_a_resumed_file_says_so(path: Path) -> None:
    session(FakeMachine(), RowsFile.create(path, HEAD), budget_s=20.0).run(levels())
    rows = read_rows(path).rows
    RowsFile.resume(path, {**HEAD, "date": "2026-05-02", "settings": {"threads": 1, "budget_s": 30.0}})
    assert path.read_text().endswith(",ok\n# resumed 2026-05-02, budget_s 30.0\n")
    assert read_rows(path).rows == rows


def test_memory_that_runs_out_is_recorded_and_larger_steps_are_skipped(path: Path) -> None:
    machine = FakeMachine()

    def full(point: Point) -> Exception | None:
        return OutOfMemoryError("full") if point.requests * point.context_tokens > 8000 else None

    machine.fails = full
    outcome = session(machine, RowsFile.create(path, HEAD)).run(levels())
    rows = read_rows(path).rows
    failed = {row.point for row in rows if row.status in (Status.OOM, Status.SKIPPED)}
    assert failed == {p for level in levels() for p in level if p.requests * p.context_tokens > 8000}
    assert len([row for row in rows if row.point in failed]) == len(failed) == outcome.unusable
    tried = [p for p in machine.visited if p in failed]
    assert len(set(tried)) == len(tried) < len(failed)
    # A resumed run does not try them again.
    again = FakeMachine()
    session(again, RowsFile.resume(path, HEAD)).run(levels())
    assert again.visited == []


def test_a_failing_step_is_recorded(path: Path) -> None:
    machine = FakeMachine()
    bad = levels()[0][3]
    machine.fails = lambda point: StepFailedError("no such kernel") if point == bad else None
    outcome = session(machine, RowsFile.create(path, HEAD), rounds=2).run(levels())
    assert [row.status for row in read_rows(path).rows if row.point == bad] == [Status.FAILED]
    assert outcome.unusable == 1


def test_when_every_step_fails_the_run_ends(path: Path) -> None:
    machine = FakeMachine(fails=lambda _: StepFailedError("an illegal memory access was encountered"))
    with pytest.raises(StepFailedError, match=r"3 steps in a row failed, the last, tp 1 prefill .*: an illegal memory"):
        session(machine, RowsFile.create(path, HEAD)).run(levels())
    assert len(machine.visited) == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama-3.1-8b", "model was timed with dsim-tiny-14m, this run has llama-3.1-8b"),
        ("gpu", "h200", "gpu was timed with cpu, this run has h200-sxm"),
        ("dtype", "bf16", "dtype was timed with fp32, this run has bf16"),
        ("device", "another", "device was timed with a CPU, this run has another"),
        ("torch", "2.5.0", "torch was timed with 2.13.0, this run has 2.5.0"),
        ("all_reduce", "measured", "all_reduce was timed with modelled, this run has measured"),
        ("settings", {**SETTINGS, "threads": 2}, "threads was timed with 1, this run has 2"),
        ("settings", {**SETTINGS, "tp": [1, 2]}, "tp was timed with 2, this run has 1, 2"),
        ("settings", {**SETTINGS, "cuda_graphs": "no"}, "cuda_graphs was timed with yes, this run has no"),
        ("settings", {**SETTINGS, "grouped_queries": "x"}, "grouped_queries was timed with native, this run has x"),
        (
            "settings",
            {**SETTINGS, "all_reduce_tp2": "modelled: 2 s"},
            "all_reduce_tp2 was timed with modelled: 1 s, this run has modelled: 2 s",
        ),
        (
            "settings",
            {**SETTINGS, "all_reduce_tp2": ["measured", "4 bytes 1 s"]},
            "all_reduce_tp2 was timed with modelled: 1 s, this run has measured",
        ),
    ],
)
def test_rows_of_different_runs_are_not_mixed(path: Path, key: str, value: object, message: str) -> None:
    head = {**HEAD, "all_reduce": "modelled", "settings": SETTINGS}
    session(FakeMachine(), RowsFile.create(path, head), budget_s=5.0).run(levels())
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        RowsFile.resume(path, {**head, key: value})
    assert str(caught.value) == f"{path}: {message}; give another --out, or --overwrite"
    assert path.read_bytes() == before


def test_all_reduces_timed_anew_are_the_same_kind(path: Path) -> None:
    head = {**HEAD, "settings": {"all_reduce_tp2": ["measured", "4 bytes 1 s"]}}
    session(FakeMachine(), RowsFile.create(path, head), budget_s=5.0).run(levels())
    again = {**HEAD, "settings": {"all_reduce_tp2": ["measured", "4 bytes 1.1 s"]}}
    assert RowsFile.resume(path, again).rows


def test_an_existing_file_is_not_touched_unasked(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(InputError) as caught:
        RowsFile.create(path, HEAD)
    assert str(caught.value) == f"--out: '{path}' exists; --resume adds to it, --overwrite replaces it"
    assert path.read_text() == "mine"
    RowsFile.create(path, HEAD, overwrite=True)
    assert path.read_text().startswith("# dsim_rows: 1\n")
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory"):
        check_output(tmp_path, resume=False, overwrite=True)
    with pytest.raises(InputError, match="is no directory"):
        check_output(tmp_path / "a" / "rows.csv", resume=False, overwrite=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_stays_on_one_line_of_a_terminal() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.update(elapsed_s=30, budget_s=60, rows=7, text="x" * 200)
    bar.update(elapsed_s=60, budget_s=60, rows=9, text="done")
    lines = stream.getvalue().split("\r\x1b[2K")[1:]
    assert lines[0].startswith("[##########..........]   30/60 s  7 rows  xxx")
    assert len(lines[0]) <= 110
    assert lines[1].endswith("9 rows  done\n")


def test_elsewhere_a_line_appears_now_and_then() -> None:
    stream = io.StringIO()
    bar = Bar(stream, every_s=10)
    for second in range(25):
        bar.update(elapsed_s=second, budget_s=60, rows=second, text="busy")
    assert stream.getvalue().count("\n") == 3


def test_the_outcome_says_what_is_missing() -> None:
    outcome = Outcome(rows=20, timed=8, left_out=3, unusable=2, elapsed_s=59.6)
    assert str(outcome) == (
        "8 points timed in 60 s, 20 rows; 3 points beyond the budget (--resume with more time adds them); "
        "2 points ran out of memory or failed, see their status"
    )
