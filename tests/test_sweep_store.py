# ruff: noqa: E501 (tables of one case a line)
"""The store of a sweep: killed at any moment and resumed, torn, sharded, of another sweep, with failures."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from experiments import runner
from experiments.compare import closeness, compare
from experiments.runner import Outcome, run_tasks
from experiments.settings import Setting
from experiments.store import Row, RowsFile, check_same, load_sweep, read_rows, summarized
from experiments.sweepfile import Sweep, Task
from placement.shards import Shard
from placement.statistics import mean_interval
from tests.cli import Cli
from tests.test_sweep_files import GOOD, sweep_of

#: 60 tasks of a few milliseconds each.
SMALL = GOOD.replace("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 7.5, step: 0.5}")

COMMAND = [sys.executable, "-m", "dsim", "sweep"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("files") / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a sweep that runs through leaves behind."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = subprocess.run([*COMMAND, str(small), "-o", str(folder), "-j", "2"], capture_output=True, check=True)
    assert done.stdout
    return files(folder)


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder; locks are gone."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows(folder: Path) -> int:
    return (folder / "rows.jsonl").read_bytes().count(b"\n") if (folder / "rows.jsonl").exists() else 0


def killed_after(count: int, command: list[str], folder: Path, *, wait_s: float) -> int:
    """Start the command and kill it with SIGKILL when `count` rows are there; return how many then are."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    start_s = time.perf_counter()
    while process.poll() is None and rows(folder) < count and time.perf_counter() - start_s < 60:
        time.sleep(0.001)
    time.sleep(wait_s)
    process.kill()
    process.communicate()
    return rows(folder)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_killed_at_many_moments(jobs: int, small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Ten times each: the first kills fall into start and check, the later ones between and within writes."""
    rng = random.Random(jobs)
    folder = tmp_path / "out"
    command = [*COMMAND, str(small), "-o", str(folder), "-j", str(jobs), "--resume"]
    counts = sorted(rng.randrange(60) for _ in range(10))
    for count in counts:
        left = killed_after(count, command, folder, wait_s=rng.random() * 0.02)
        if left:
            data = (folder / "rows.jsonl").read_bytes()
            complete = data[: data.rfind(b"\n") + 1]
            assert whole["rows.jsonl"].startswith(complete), "what is stored is the beginning of the whole"
    subprocess.run(command, capture_output=True, check=True)
    assert files(folder) == whole


@pytest.mark.parametrize("cut", [None, 0, 1, 300, -1, -2])
def test_a_torn_last_line_is_dropped(
    cut: int | None, cli: Cli, small: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    lines = whole["rows.jsonl"].splitlines(keepends=True)
    torn = b"\0\0\0" if cut is None else lines[40][:cut]
    (folder / "rows.jsonl").write_bytes(b"".join(lines[:40]) + torn)
    assert cli("sweep", str(small), "-o", str(folder), "-j", "1", "--resume").code == 0
    assert files(folder) == whole


def test_a_broken_line_is_no_torn_one(cli: Cli, small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    lines = whole["rows.jsonl"].splitlines(keepends=True)
    for number, broken in enumerate(
        (b"{}\n", b"[1]\n", b"\xff\n", b"\n", lines[2][:100] + b"\n", b'{"status":"odd"}\n')
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(b"".join([*lines[:2], broken, *lines[3:]]))
        line = cli.refused("sweep", str(small), "-o", str(folder), "--resume")
        assert "rows.jsonl:3: is no row of a sweep; delete the line and run again with --resume" in line
    # As it says.
    (folder / "rows.jsonl").write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert cli("sweep", str(small), "-o", str(folder), "--resume", "-j", "1", "--quiet").code == 0
    assert files(folder)["summary.csv"] == whole["summary.csv"]


def test_a_finished_sweep_is_not_run_again(cli: Cli, small: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "out"
    assert cli("sweep", str(small), "-o", str(folder), "-j", "1").code == 0
    assert files(folder) == whole
    line = cli.refused("sweep", str(small), "-o", str(folder))
    assert "has 60 of the 60 rows of a sweep already; go on with --resume, replace them with --overwrite" in line
    assert cli("sweep", str(small), "-o", str(folder), "--resume").code == 0
    assert files(folder) == whole
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write("torn")
    assert cli("sweep", str(small), "-o", str(folder), "--overwrite", "-j", "1").code == 0
    assert files(folder) == whole


def test_overwriting_leaves_nothing_of_the_old_sweep(cli: Cli, small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    base = ("sweep", str(small), "-o", str(folder), "-j", "1", "--set", "replications=1")
    assert cli(*base).code == 0
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    changes = ("--set", "plots=[]", "--set", "published={source: x, points: []}", "--set", "base.requests=10")
    assert cli(*base, *changes, "--overwrite").code == 0
    assert list(files(folder)) == [".made.json", "notes.txt", "rows.jsonl", "summary.csv", "summary.json", "sweep.yaml"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("requests: 50", "requests: 51"), "holds rows of another sweep: base.requests is 50 there and 51 here; give an"),
        (("step: 0.5", "step: 1"), "holds rows of another sweep: factors.rate_per_gpu.range.step is 0.5 there and 1 here"),
        (("replications: 2", "replications: 1"), "replications is 2 there and 1 here; give another directory, or replace"),
        (("  slo: {", "  slo_scale: 2\n  slo: {"), "another sweep: base.slo_scale is not given there and 2 here"),
        (("ttft: 0.25", "ttft: 0.26"), "another sweep: base.slo.ttft is 0.25 there and 0.26 here"),
    ],
)  # fmt: skip
def test_another_sweep_is_refused(
    change: tuple[str, str], words: str, cli: Cli, whole: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    file = tmp_path / "other.yaml"
    file.write_text(SMALL.replace(*change), encoding="utf-8")
    assert words in cli.refused("sweep", str(file), "-o", str(folder), "--resume")
    assert files(folder) == whole


def test_a_file_named_from_another_folder_is_no_difference(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,2\n", encoding="utf-8")
    text = re.sub("workload: .*", "workload: lengths.csv", SMALL)
    file, folder = tmp_path / "own.yaml", tmp_path / "out"
    file.write_text(text, encoding="utf-8")
    assert cli("sweep", str(file), "-o", str(folder), "-j", "1", "--set", "base.requests=5").code == 0
    refused = cli.refused("sweep", str(file), "-o", str(folder), "--set", "base.requests=6", "--resume")
    assert "holds rows of another sweep: base.requests is 5 there and 6 here" in refused


def test_rows_of_another_version_are_refused(cli: Cli, small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "sweep.yaml").write_bytes(whole["sweep.yaml"])
    row = Row.from_line(whole["rows.jsonl"].splitlines()[0].decode())
    changed = Row("0" * 64, row.factors, 0, 0, row.outputs, None, row.profiles, version="0.0.1")
    (folder / "rows.jsonl").write_text(changed.to_line(), encoding="utf-8")
    assert "they are of dsim 0.0.1, this is 0." in cli.refused("sweep", str(small), "-o", str(folder), "--resume")
    changed = Row("0" * 64, row.factors, 0, 0, row.outputs, None, row.profiles)
    (folder / "rows.jsonl").write_text(changed.to_line(), encoding="utf-8")
    words = "a latency profile, a trace or the code of dsim has changed since"
    assert words in cli.refused("sweep", str(small), "-o", str(folder), "--resume")


def test_more_replications_add_to_what_is_there(cli: Cli, small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "rows.jsonl").write_bytes(whole["rows.jsonl"])
    assert cli("sweep", str(small), "-o", str(folder), "--resume", "--set", "replications=3", "-j", "1").code == 0
    stored = (folder / "rows.jsonl").read_bytes()
    assert stored.startswith(whole["rows.jsonl"])
    assert stored.count(b"\n") == 90
    results = load_sweep(folder)
    assert [row.replication for row in results.rows[:4]] == [0, 1, 2, 0]
    assert set(results.summary["replications"]) == {3}


def test_shards_make_the_same_results(cli: Cli, small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    base = ("sweep", str(small), "-o", str(folder), "-j", "1")
    for part in ("2/3", "1/3"):
        run = cli(*base, "--shard", part)
        assert run.code == 0
        assert "--resume without --shard runs the rest and sums up" in run.err
        assert not (folder / "summary.csv").exists()
    again = cli.refused(*base, "--shard", "2/3")
    assert "has 40 of the 60 rows of a sweep already" in again
    assert cli(*base, "--shard", "2/3", "--resume").code == 0
    assert cli(*base, "--shard", "2/3", "--overwrite").code == 0
    names = sorted(path.name for path in folder.glob("rows*"))
    assert names == ["rows-1-of-3.jsonl", "rows-2-of-3.jsonl"]
    assert [len((folder / name).read_bytes().splitlines()) for name in names] == [20, 20]
    assert "has 40 of the 60 rows" in cli.refused(*base)
    (folder / ".lock-3-of-3").touch()  # of a process that was killed
    assert cli(*base, "--resume").code == 0
    assert rows(folder) == 20
    assert not list(folder.glob(".lock*"))
    made = files(folder)
    for name, content in whole.items():
        if name != "rows.jsonl":
            assert made[name] == content, name
    parts = b"".join(made[name] for name in made if name.startswith("rows"))
    assert sorted(parts.splitlines()) == sorted(whole["rows.jsonl"].splitlines())
    assert cli(*base, "--overwrite").code == 0
    assert files(folder) == whole


def test_the_last_shard_sums_up(cli: Cli, small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert cli("sweep", str(small), "-o", str(folder), "-j", "1", "--shard", part).code == 0
    assert files(folder)["summary.csv"] == whole["summary.csv"]
    made = files(folder)
    for more in ((), ("--shard", "1/2")):
        assert cli("sweep", str(small), "-o", str(folder), "-j", "1", "--resume", *more).code == 0
        assert files(folder) == made


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", "1/0", ""])
def test_refused_shards(text: str, cli: Cli, small: Path, tmp_path: Path) -> None:
    line = cli.refused("sweep", str(small), "-o", str(tmp_path / "out"), "--shard", text)
    assert f"--shard: {text!r} is no part of a whole; as in 1/4" in line
    assert not (tmp_path / "out").exists()


def test_shards_are_a_partition(tmp_path: Path) -> None:
    tasks = sweep_of(GOOD, tmp_path).tasks
    for parts in range(1, 15):
        found = [task for part in range(parts) for task in Shard(part + 1, parts).share(tasks)]
        assert sorted(task.id for task in found) == sorted(task.id for task in tasks)


def test_two_processes_do_not_share_a_folder(cli: Cli, small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    words = "is in use: another dsim sweep is running there; wait until it has ended, or give another directory"
    with RowsFile(folder).locked():
        assert words in cli.refused("sweep", str(small), "-o", str(folder))
        assert words in cli.refused("sweep", str(small), "-o", str(folder), "--shard", "1/2")
    with RowsFile(folder, Shard(1, 2)).locked():
        assert words in cli.refused("sweep", str(small), "-o", str(folder))
        assert words in cli.refused("sweep", str(small), "-o", str(folder), "--shard", "1/2")
        assert cli("sweep", str(small), "-o", str(folder), "--shard", "2/2", "-j", "1").code == 0
        assert (folder / ".lock").exists(), "a part that has ended leaves the lock to those that have not"
        assert not (folder / ".lock-2-of-2").exists()
    assert not list(folder.glob(".lock*"))
    assert cli("sweep", str(small), "-o", str(folder), "--shard", "1/2", "-j", "1").code == 0
    assert not list(folder.glob(".lock*"))


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last holder ends, and removes it, between another one's opening and locking: that one must not have it alone."""
    first, tries = RowsFile(tmp_path).locked(), []
    first.__enter__()
    lock = fcntl.flock

    def late(file: BinaryIO, operation: int) -> None:
        tries.append(operation)
        if len(tries) == 1:
            monkeypatch.setattr(fcntl, "flock", lock)
            first.__exit__(None, None, None)
            monkeypatch.setattr(fcntl, "flock", late)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with RowsFile(tmp_path).locked():
        assert len(tries) == 2
        assert (tmp_path / ".lock").exists()
        with pytest.raises(InputError, match="is in use"), RowsFile(tmp_path).locked():
            pass
    assert not (tmp_path / ".lock").exists()


# Failures


def tasks_of(folder: Path, count: int = 60) -> tuple[Task, ...]:
    return sweep_of(SMALL, folder).tasks[:count]


def failing(setting: Setting, *, seed: int) -> dict[str, Any]:
    if setting.traffic.rate_per_s == 1.0:
        raise InputError("a request", "does not fit")
    if setting.traffic.rate_per_s == 1.5:
        raise ZeroDivisionError("division\nby zero")
    return {"attainment": {"both": 0.5 + seed / 10}}


def test_failures_are_rows(cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "measure", failing)
    folder = tmp_path / "out"
    run = cli("sweep", str(small), "-o", str(folder), "-j", "1")
    assert run.code == 1
    # An error that is no user's says where it came from.
    raised = failing.__code__.co_firstlineno + 4
    bug = f"ZeroDivisionError: division by zero (test_sweep_store.py:{raised})"
    assert f"error: 6 tasks of 60 failed, first rate_per_gpu=0.5, system=DistServe: {bug}" in run.err
    stored = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["status"] for row in stored].count("failed") == 6
    assert {row["error"] for row in stored if row["status"] == "failed"} == {
        "a request: does not fit; correct it or leave it out",
        bug,
    }
    assert all(("outputs" in row) is (row["status"] == "ok") for row in stored)
    summary = load_sweep(folder).summary
    failed = summary[summary["failed"] == 2]
    assert len(failed) == 3
    assert failed["attainment.both"].isna().all()
    # Failures stay until they are asked to be tried again, and then only they are.
    before = (folder / "rows.jsonl").read_bytes()
    assert cli("sweep", str(small), "-o", str(folder), "--resume", "-j", "1").code == 1
    assert (folder / "rows.jsonl").read_bytes() == before
    monkeypatch.setattr(runner, "measure", lambda setting, *, seed: {"attainment": {"both": 0.25}})
    assert cli("sweep", str(small), "-o", str(folder), "--resume", "--retry-failed", "-j", "1").code == 0
    after = (folder / "rows.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 66
    results = load_sweep(folder)
    assert len(results.rows) == 60
    assert results.failed == ()
    assert (results.summary["attainment.both"] == 0.25).sum() == 3


def deadly(setting: Setting, seed: int) -> Outcome:
    """Kill the own process for one setting; twice for another, beside others and alone, and then no more."""
    if setting.traffic.rate_per_s == 1.0:
        os.kill(os.getpid(), signal.SIGKILL)
    for mark in (Path(os.environ["DSIM_TEST_MARK"]), Path(os.environ["DSIM_TEST_MARK"] + "-2")):
        if setting.traffic.rate_per_s == 4.5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return Outcome({"seed": seed})


def test_the_death_of_a_worker_is_one_task_s_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSIM_TEST_MARK", str(tmp_path / "mark"))
    monkeypatch.setattr(runner, "run_task", deadly)
    tasks = tasks_of(tmp_path, 8)
    found = list(run_tasks(tasks, jobs=2))
    assert [row.id for row in found] == [task.id for task in tasks]
    lost = [row for row in found if row.error is not None]
    assert [(row.factors["rate_per_gpu"], row.factors["system"]) for row in lost] == [(1.0, "vLLM")] * 2
    assert {row.error for row in lost} == {"its process was killed twice; is there enough memory?"}


def test_a_task_that_kills_its_process_once_alone_may_yet_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSIM_TEST_MARK", str(tmp_path / "mark"))
    monkeypatch.setattr(runner, "run_task", deadly)
    # It alone kills, so that the first time is beside others.
    tasks = [*tasks_of(tmp_path, 4), tasks_of(tmp_path, 9)[8]]
    assert [row.error for row in run_tasks(tasks, jobs=2)] == [None] * 5
    assert (tmp_path / "mark-2").exists()


def test_workers_that_do_not_start_are_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.runner._start_worker", die)
    (row,) = run_tasks(tasks_of(tmp_path, 1), jobs=2)
    assert row.error == "its process was killed twice; is there enough memory?"


def die() -> None:
    os._exit(1)


def test_a_killed_worker_of_the_command(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """The kernel kills a worker in the middle: its task is run again, and the results are the same."""
    folder = tmp_path / "out"
    process = subprocess.Popen([*COMMAND, str(small), "-o", str(folder), "-j", "2"], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and rows(folder) < 5:
            time.sleep(0.001)
        for child in children(process.pid):
            os.kill(child, signal.SIGKILL)
            break
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    assert files(folder) == whole


def children(parent: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text(encoding="utf-8")
        except OSError:
            continue
        if int(fields[1]) == parent and "spawn_main" in command:
            yield int(stat.parent.name)


def test_an_interrupt_leaves_a_store_to_go_on_with(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = [*COMMAND, str(small), "-o", str(folder), "-j", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while process.poll() is None and rows(folder) < 7:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (130, "")
    assert err == f"stopped; the same command with --resume goes on with {folder}\n"
    assert 7 <= rows(folder) < 60
    subprocess.run([*command, "--resume"], capture_output=True, check=True)
    assert files(folder) == whole


# What is made of rows


def row_of(sweep: Sweep, task: Task, outputs: Mapping[str, Any] | None) -> Row:
    del sweep
    error = None if outputs is not None else "no"
    return Row(task.id, task.factors, task.replication, task.seed, outputs or {}, error, task.profiles)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_a_metric_is_its_mean_with_an_interval(values: list[float]) -> None:
    rows = [Row("x", {"a": 1}, number, number, {"m": {"n": v}}, None, {}) for number, v in enumerate(values)]
    (record,) = summarized(rows)
    interval = mean_interval(values, confidence=0.95)
    assert (record["m.n"], record["m.n.low"], record["m.n.high"]) == (interval.best, interval.low, interval.high)
    assert (record["replications"], record["failed"]) == (len(values), 0)


def test_intervals_texts_lists_and_gaps() -> None:
    def row(number: int, outputs: dict[str, Any]) -> Row:
        return Row("x", {"a": "b"}, number, number, outputs, None, {})

    one = {
        "g": {"low": 1.0, "best": 2.0, "high": 3.0},
        "text": "stable",
        "flag": True,
        "q": [1.0, 2.0],
        "gap": None,
        "part": {"x": 1.0},
        "odd": [1.0],
        "num_gpus": 3,
        "trials": [{"a": 1}],
    }
    two = {
        **one,
        "g": {"low": 2.0, "best": 4.0, "high": 6.0},
        "text": "overloaded",
        "q": [3.0, 4.0],
        "part": None,
        "odd": [],
    }
    (record,) = summarized([row(0, one), row(1, two)])
    assert record == {
        "a": "b",
        "g.low": 1.5,
        "g.best": 3.0,
        "g.high": 4.5,
        "text": "stable; overloaded",
        "flag": True,
        "q": [2.0, 3.0],
        "q.low": [mean_interval(pair, confidence=0.95).low for pair in ([1.0, 3.0], [2.0, 4.0])],
        "q.high": [mean_interval(pair, confidence=0.95).high for pair in ([1.0, 3.0], [2.0, 4.0])],
        "gap": None,
        "part.x": None,
        "part.x.low": None,
        "part.x.high": None,
        "part": None,
        "num_gpus": 3,
        "replications": 2,
        "failed": 0,
        "missing": "part in 1 of 2",
    }


def test_a_mean_is_of_all_replications_or_not_there() -> None:
    """Where one replication sustains nothing, the mean of the others would be too good; the column `missing` says so."""

    def row(number: int, outputs: dict[str, Any] | None) -> Row:
        return Row("x", {"a": 1}, number, number, outputs or {}, None if outputs else "no", {})

    full = {
        "goodput": {"low": 1.0, "best": 2.0, "high": 3.0},
        "open": {"low": 1.0, "best": 2.0, "high": None},
        "best": {"x": 1.0, "y": {"z": 2.0}, "never": None},
        "half": {"x": 1.0, "y": 2.0},
        "num_gpus": 3,
        "placement": "p",
        "list": [1.0, 2.0],
        "attainment": {"both": 0.5},
        "never": None,
    }
    none = {
        **full,
        "goodput": None,
        "open": {"low": 1.0, "best": 2.0, "high": 3.0},
        "best": None,
        "half": {"x": None, "y": 2.0},
        "num_gpus": None,
        "placement": None,
        "list": None,
    }
    (record,) = summarized([row(0, full), row(1, none), row(2, full), row(3, None)])
    gone = [
        "goodput.low",
        "goodput.best",
        "goodput.high",
        "open.high",
        "best.x",
        "best.y.z",
        "half.x",
        "num_gpus",
        "list",
    ]
    assert [record[name] for name in gone] == [None] * len(gone)
    assert (record["half.y"], record["open.best"], record["attainment.both"], record["placement"]) == (2, 2, 0.5, "p")
    assert (record["replications"], record["failed"]) == (3, 1)
    told = "goodput in 1 of 3, open.high in 2 of 3, best in 1 of 3, half.x in 1 of 3, num_gpus in 1 of 3, "
    assert record["missing"] == told + "placement in 1 of 3, list in 1 of 3"
    (whole,) = summarized([row(0, full), row(1, full)])
    assert whole["missing"] is None
    assert (whole["open.high"], whole["best.x"]) == (None, 1)


def test_what_replications_lack_is_said(cli: Cli, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(setting: Setting, *, seed: int) -> dict[str, Any]:
        lacks = setting.traffic.rate_per_s == 1.0 and seed == 1
        return {"attainment": {"both": None if lacks else 0.5}}

    monkeypatch.setattr(runner, "measure", some)
    run = cli("sweep", str(small), "-o", str(tmp_path / "out"), "-j", "1")
    words = "no mean of some numbers in 1 of 30 combinations, first rate_per_gpu=1.0, system=vLLM: missing attainment in 1 of 2"
    assert words in run.err
    assert "no mean" not in cli("sweep", str(small), "-o", str(tmp_path / "out"), "--resume", "--quiet").err
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "summary.csv").read_text(encoding="utf-8"))))
    assert [row["missing"] for row in rows if row["missing"]] == ["attainment in 1 of 2"]
    assert [row["attainment.both"] for row in rows].count("") == 1


def test_intervals_end_where_their_numbers_do() -> None:
    """Shares at 0 and 1, times and rates at 0; other numbers do not."""
    rows = [
        Row("x", {"a": 1}, n, n, {"attainment": {"both": both}, "ttft_s": {"mean": one}, "slowdown": one}, None, {})
        for n, (both, one) in enumerate([(1.0, 0.0), (0.8, 1.0)])
    ]
    (record,) = summarized(rows)
    assert record["attainment.both.high"] == 1
    assert 0 <= record["attainment.both.low"] < 0.8
    assert (record["ttft_s.mean.low"], record["slowdown.low"] < 0) == (0, True)
    assert record["ttft_s.mean.high"] > 1
    rows = [Row("x", {"a": 1}, n, n, {"kv_peak": {"decode": share}}, None, {}) for n, share in enumerate([0.0, 0.2])]
    (record,) = summarized(rows)
    assert record["kv_peak.decode.low"] == 0


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = Row(
        "ab", {"a": 0.1, "b": "ü", "c": None, "d": True}, 1, 2, {"x": [0.1, math.nan], "y": {"z": math.inf}}, None, {}
    )
    again = Row.from_line(row.to_line())
    assert again.factors == row.factors
    assert again.outputs == {"x": [0.1, None], "y": {"z": None}}
    assert again.to_line() == row.to_line()
    assert "\n" not in row.to_line()[:-1]
    del tmp_path


def test_comparison(tmp_path: Path) -> None:
    text = GOOD.replace("attainment.both: 0.9}", "attainment.both: 0.8, attainment.ttft: 0.5, note: read off}")
    text = text.replace("  - {where", "  - {where: {rate_per_gpu: 1.0}, attainment.both: 0.6}\n  - {where")
    sweep = sweep_of(text, tmp_path)
    (tmp_path / "sweep.yaml").write_text(sweep.outline.yaml(), encoding="utf-8")
    with RowsFile(tmp_path).writer() as writer:
        for task in sweep.tasks:
            both = 0.7 + 0.1 * task.replication
            bad = task.factors == {"rate_per_gpu": 1.0, "system": "vLLM"}
            writer.append(row_of(sweep, task, None if bad else {"attainment": {"both": both, "ttft": 0.5}}))
    found = compare(load_sweep(tmp_path))
    assert [(tuple(c.factors.values()), c.column, c.published) for c in found] == [
        ((1.0, "DistServe"), "attainment.both", 0.6),
        ((1.0, "vLLM"), "attainment.both", 0.6),
        ((0.5, "vLLM"), "attainment.both", 0.8),
        ((0.5, "vLLM"), "attainment.ttft", 0.5),
    ]
    assert found[0].difference == pytest.approx(0.15)
    assert found[0].ratio == pytest.approx(1.25)
    assert found[0].low is not None
    assert found[0].low < 0.75
    assert (found[1].simulated, found[1].difference, found[1].ratio) == (None, None, None)
    assert found[2].note == "read off"
    near, exact = closeness(found)
    assert near.points == 2
    assert (near.mean, near.worst) == pytest.approx((0.1, 0.15))
    assert near.mean_ratio == pytest.approx(math.sqrt(1.25 * 0.75 / 0.8))
    assert (exact.column, exact.mean, exact.mean_ratio) == ("attainment.ttft", 0, 1)


def test_rows_of_the_sweep_are_its_own(tmp_path: Path) -> None:
    sweep = sweep_of(GOOD, tmp_path)
    with RowsFile(tmp_path).writer() as writer:
        for task in sweep.tasks[::3]:
            writer.append(row_of(sweep, task, {}))
    stored = read_rows(tmp_path)
    check_same(sweep, stored, tmp_path)
    assert len(stored) == 4
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "rows-1-of-2.jsonl")
    assert read_rows(tmp_path) == stored
    (tmp_path / "rows-1-of.jsonl").write_text("no file of rows", encoding="utf-8")
    assert read_rows(tmp_path) == stored


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no sweep.yaml: it holds no results of a sweep; give the directory"):
        load_sweep(tmp_path)
