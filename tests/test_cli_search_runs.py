"""How the runs of `dsim search` are done: kept, gone on with, spread out, limited; what it answers stays the same."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dsim.cli import main
from placement.cache import Cache
from placement.runner import Runner
from tests.cli import Cli
from tests.kill_search import content, rounds

#: Finite runs of few short requests on three GPUs: half a second.
QUICK = (
    *("search", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--gpus", "3", "-n", "30", "--precision", "30%"),
    *("--top", "1", "--policy", "orca", "-w", "fixed:512,16", "-j", "1", "-q"),
)
COLOCATED = (*QUICK, "--mode", "colocated")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


def broken_off(cli: Cli, monkeypatch: pytest.MonkeyPatch, *arguments: str, after: int) -> str:
    """Run a search that Ctrl-C ends after so many batches of runs; return what it says on stderr."""
    run, batches = Runner.run, []

    def interrupted(self: Runner, *probes: Any, **how: Any) -> Any:  # noqa: ANN401 as Runner.run
        batches.append(probes)
        if len(batches) > after:
            raise KeyboardInterrupt
        return run(self, *probes, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "run", interrupted)
        found = cli(*arguments)
    assert (found.code, found.out) == (130, "")
    return found.err


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("searched") / "reference"
    assert main([*QUICK, "-o", str(folder)]) == 0
    return content(folder)


def test_what_was_interrupted_goes_on_with_resume(
    cli: Cli, folder: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = [part for part in QUICK if part != "-q"]
    said = broken_off(cli, monkeypatch, *loud, "-o", str(folder), after=3)
    assert said == f"stopped; the same command with --resume goes on with {folder}\n"
    assert list(content(folder)) == ["runs.sqlite"]
    why = cli.refused(*QUICK, "-o", str(folder))
    assert why == (
        f"--output-dir: '{folder}' already has runs.sqlite, the runs of a search; go on with --resume, "
        "replace them with --overwrite, or give another directory"
    )
    assert broken_off(cli, monkeypatch, *QUICK, "-o", str(folder), "--resume", after=5) == ""
    done = cli(*QUICK, "-o", str(folder), "--resume", "-j", "2")
    assert (done.code, done.err) == (0, "")
    assert content(folder) == reference
    # Once more, nothing runs; and nothing that another hand has written is replaced.
    monkeypatch.setattr("placement.crew.Shift._here", None)
    assert cli(*QUICK, "-o", str(folder), "--resume").out == done.out
    assert content(folder) == reference
    (folder / "trials.csv").write_text("mine\n")
    why = cli.refused(*QUICK, "-o", str(folder), "--resume")
    assert why == (
        f"--output-dir: '{folder}' already has trials.csv, not as this search writes it; move what is there away"
    )
    assert (folder / "trials.csv").read_text() == "mine\n"


def test_resume_of_nothing_is_a_search(cli: Cli, folder: Path, reference: dict[str, bytes]) -> None:
    assert cli(*QUICK, "-o", str(folder), "--resume").code == 0
    assert content(folder) == reference
    assert cli(*QUICK, "-o", str(folder), "--overwrite").code == 0
    assert content(folder) == reference


def test_another_search_does_not_go_on(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off(cli, monkeypatch, *COLOCATED, "-o", str(folder), after=1)
    runs = (folder / "runs.sqlite").read_bytes()

    def why(*more: str) -> str:
        said = cli.refused(*COLOCATED, "-o", str(folder), "--resume", *more)
        start = f"--output-dir: '{folder}' holds runs of another search: "
        assert said.startswith(start)
        assert said.endswith("; give another directory, or replace them with --overwrite")
        assert (folder / "runs.sqlite").read_bytes() == runs
        return said.removeprefix(start).rpartition("; ")[0]

    assert why("--seed", "7") == "seed is 0 there and 7 here"
    assert why("--attainment", "0.8") == 'attainment is "0.9" there and "0.8" here'
    with sqlite3.connect(folder / "runs.sqlite") as cache:
        cache.execute("UPDATE notes SET value = 'other' WHERE name = 'question'")
    cache.close()
    runs = (folder / "runs.sqlite").read_bytes()
    assert why() == "a latency profile, a trace or the code of dsim has changed since"
    with sqlite3.connect(folder / "runs.sqlite") as cache:
        cache.execute("UPDATE notes SET value = '0.0.7' WHERE name = 'version'")
    cache.close()
    runs = (folder / "runs.sqlite").read_bytes()
    assert why() == "they are of dsim 0.0.7, this is 0.1.0"
    assert cli(*COLOCATED, "-o", str(folder), "--overwrite").code == 0


def test_a_file_of_ones_own_is_not_touched(cli: Cli, folder: Path) -> None:
    folder.mkdir()
    own = folder / "runs.sqlite"
    own.write_text("mine\n")
    for option in ("--resume", "--overwrite"):
        why = cli.refused(*COLOCATED, "-o", str(folder), option)
        assert why == f"{own}: is no cache of dsim; move it away, or give another place"
        assert own.read_text() == "mine\n"
    own.unlink()
    Cache(own).close()
    data = bytearray(own.read_bytes())
    own.write_bytes(data[: len(data) // 2])
    why = cli.refused(*COLOCATED, "-o", str(folder), "--resume")
    assert why == f"{own}: is damaged; replace it with --overwrite, or give another directory"
    assert cli(*COLOCATED, "-o", str(folder), "--overwrite").code == 0
    for path in folder.iterdir():
        path.unlink()
    held = Cache(own)
    for option in ("--resume", "--overwrite"):
        assert "is in use: another dsim is running with it" in cli.refused(*COLOCATED, "-o", str(folder), option)
    held.close()


def test_options_that_do_not_go_together(cli: Cli, folder: Path) -> None:
    out = ("-o", str(folder))
    for options, why in (
        (("--resume", "--overwrite", *out), "--resume: contradicts --overwrite; leave one out"),
        (("--retry-failed", *out), "--retry-failed: needs --resume; add --resume"),
        (("--resume",), "--resume: needs the directory that the search wrote to; add --output-dir"),
        (
            ("--resume", "--cache", "x", *out),
            "--resume: is not needed with --cache: the same command goes on by itself; leave it out",
        ),
        (("--dask", "tcp://host:1"), "--jobs: does not go with --dask: the cluster has its own workers; leave one out"),
        (("--shard", "1/2"), "--shard: '1/2' needs a directory for what it finds; give --output-dir, without --cache"),
        (("--shard", "3/2", *out), "--shard: '3/2' is no part of a whole; as in 1/4, 2/4, 3/4 and 4/4"),
        (
            ("--shard", "1/2", "--merge", "a", *out),
            "--shard: '1/2' does not go with --merge; merge when all shards have ended",
        ),
        (("--time-limit", "0s"), "--time-limit: '0s' must be > 0; as in 60s"),
        (("--merge", str(folder)), f"--merge: '{folder}' is no directory; give the directories that --shard wrote to"),
    ):
        assert cli.refused(*COLOCATED, *options).startswith(why)
        assert not folder.exists()
    steady = [word for word in COLOCATED if word not in {"-n", "30"}]
    why = "--pareto: is not for parts of a search; leave it out, or search without --shard"
    assert cli.refused(*steady, "--shard", "1/2", "--pareto", *out) == why
    why = "--objective: is not for parts of a search; ask it of dsim size"
    assert cli.refused(*steady, "--merge", "x", "--objective", "min_gpus", "--rate", "4") == why


def test_a_dry_run_writes_nothing(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = cli(*COLOCATED, "--dry-run", "-o", str(folder))
    names = "result.json, trials.csv, attainment.csv, attainment.png, config.yaml, runs.sqlite"
    assert run.out.endswith(f"would write {names}\n")
    run = cli(*COLOCATED, "--dry-run", "-o", str(folder), "--shard", "2/3")
    assert run.out.endswith("would write runs-2-of-3.sqlite\n")
    assert cli(*COLOCATED, "--dry-run", "--cache", str(tmp_path / "cache")).code == 0
    assert cli.refused(*COLOCATED, "--dry-run", "--merge", str(tmp_path)).startswith("--merge: has no shards; ")
    assert list(tmp_path.iterdir()) == []


def test_searches_share_a_cache(cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ("--cache", str(tmp_path / "cache.sqlite"))
    # Those who had too little time say nothing about others.
    assert cli(*QUICK, *cache, "--time-limit", "1us").code == 3
    first = cli(*QUICK, *cache)
    assert first.code == 0
    assert first.out == cli(*QUICK).out
    assert [path.name for path in tmp_path.iterdir()] == ["cache.sqlite"]
    with_top = cli(*QUICK, "--top", "2", *cache)
    monkeypatch.setattr("placement.crew.Shift._here", None)
    assert cli(*QUICK, *cache).out == first.out
    assert cli(*QUICK, "--top", "2", *cache).out == with_top.out
    assert not folder.exists()


def test_shards_and_their_merge(cli: Cli, folder: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    shards, other = tmp_path / "shards", tmp_path / "other"
    merging = (*QUICK, "--format", "json", "--merge", str(shards))
    places = {1: shards, 2: other, 3: shards}
    for part, place in places.items():
        run = cli(*[word for word in QUICK if word != "-q"], "--shard", f"{part}/3", "-o", str(place))
        assert run.code == 0
        assert run.err == f"wrote runs-{part}-of-3.sqlite to {place}\n"
        if part == 1:
            assert cli.refused(*merging).startswith("--merge: lacks 2 of 3 shards: 2/3, 3/3; ")
            already = cli.refused(*QUICK, "--shard", "1/3", "-o", str(place))
            assert already.startswith(f"--output-dir: '{place}' already has runs-1-of-3.sqlite, the runs of a search")
            again = (place / "runs-1-of-3.sqlite").read_bytes()
            assert cli(*QUICK, "--shard", "1/3", "-o", str(place), "--resume", "-j", "2").code == 0
            assert (place / "runs-1-of-3.sqlite").read_bytes() == again
    before = {**content(shards), **content(other)}
    merged = cli(*merging, "--merge", str(other), "-o", str(folder))
    assert merged.code == 0
    assert cli(*QUICK, "--format", "json", "--merge", str(other), "--merge", str(shards)).out == merged.out
    assert {**content(shards), **content(other)} == before
    assert list(content(folder)) == list(reference)
    found, whole = json.loads(merged.out), json.loads(reference["result.json"])
    assert json.loads((folder / "result.json").read_text()) == found
    assert [t["placement"] for t in found["trials"]][:2] == [t["placement"] for t in whole["trials"]][:2]
    assert sorted(t["placement"] for t in found["trials"]) == sorted(t["placement"] for t in whole["trials"])
    assert found["question"] == whole["question"]
    twice = f"{shards}{os.sep}."
    for shown in (str(shards), twice):
        why = cli.refused(*merging, "--merge", str(other), "--merge", shown)
        assert why == f"--merge: '{Path(shown)}' is given twice; give every directory once"
    assert cli.refused(*merging, "--merge", str(other), "--seed", "1").startswith(
        "--merge: has shard 1/3 of another search, or by another build of dsim; "
    )
    with sqlite3.connect(other / "runs-2-of-3.sqlite") as cache:
        cache.execute("DELETE FROM notes WHERE name = 'ledger'")
    cache.close()
    assert cli.refused(*merging, "--merge", str(other)) == (
        f"{other / 'runs-2-of-3.sqlite'}: holds a shard that has not ended; finish it with --shard and --resume"
    )


def test_a_placement_whose_time_is_over_is_a_failed_row(cli: Cli, folder: Path) -> None:
    run = cli(*COLOCATED, "--time-limit", "1us", "--format", "json", "-o", str(folder))
    assert run.err.startswith("error: search: ")
    assert "took more than 1e-06 s of CPU time (--time-limit)); mend what made them fail" in run.err
    # There are no others.
    assert " failed (" in run.err
    assert "fell behind" not in run.err
    assert run.code == 3
    trials = json.loads(run.out)["trials"]
    assert {trial["state"] for trial in trials} == {"FAILED"}
    assert trials[0]["reasons"] == ["its runs took more than 1e-06 s of CPU time (--time-limit)"]
    # A failure stays one until it is tried again; then the files are those of a search in which nothing failed.
    assert cli(*COLOCATED, "-o", str(folder), "--resume").code == 3
    run = cli(*COLOCATED, "-o", str(folder), "--resume", "--retry-failed", "--format", "json")
    assert run.code == 0
    fresh = folder.with_name("fresh")
    assert run.out == cli(*COLOCATED, "-o", str(fresh), "--format", "json").out
    assert content(folder) == content(fresh)
    (folder / "runs.sqlite").unlink()
    why = cli.refused(*COLOCATED, "-o", str(folder), "--resume", "--retry-failed")
    assert why.startswith(f"--retry-failed: '{folder}' finds no runs.sqlite; leave it out")


def test_a_directory_that_cannot_be_made(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    why = f"--output-dir: '{folder}' cannot be made: Operation not permitted; give another directory"
    assert cli.refused(*COLOCATED, "-o", str(folder)) == why
    simulated = ("simulate", "-m", "13b", "--placement", "1xC:tp1pp1", "--rate", "2", "-n", "20", "--finite")
    assert cli.refused(*simulated, "-o", str(folder)) == why


def test_size_goes_on_too(cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (
        *("size", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--rate", "40", "--copy-gpus", "1", "--mode", "colocated"),
        *("--policy", "orca", "-w", "fixed:512,16", "--precision", "30%", "-j", "1", "-q"),
    )
    whole = cli(*size, "-o", str(tmp_path / "reference"))
    assert whole.code == 0
    broken_off(cli, monkeypatch, *size, "-o", str(folder), after=2)
    assert list(content(folder)) == ["runs.sqlite"]
    assert cli(*size, "-o", str(folder), "--resume").out == whole.out
    assert content(folder) == content(tmp_path / "reference")


def test_nothing_is_written_without_being_asked(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(*COLOCATED).code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_kills_cost_nothing_but_time(tmp_path: Path) -> None:
    """`python -m tests.kill_search 20` does it often. Here a worker dies after a third of the time."""
    lines: list[str] = []
    assert rounds(tmp_path, 1, 29, lines.append) == 1
    assert [line.split()[0] for line in lines] == ["uninterrupted:", "runner", "worker", "1"]
