"""`dsim profile run` without torch: what it lists and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import profiles.profiling
from profiles.rows import Point
from tests.cli import Cli

TINY = ("profile", "run", "--model", "tiny", "--device", "cpu")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles.profiling, "has_torch", lambda: False)


def test_dry_run_lists_the_points(cli: Cli) -> None:
    run = cli(*TINY, "--tp", "1,2", "--dry-run", "--format", "json")
    assert (run.code, run.err) == (0, "")
    points = [Point(**row) for row in json.loads(run.out)]
    assert len(set(points)) == len(points) > 100
    assert {point.tp for point in points} == {1, 2}
    assert {point.phase for point in points} == {"prefill", "decode", "mixed"}
    table = cli(*TINY, "--tp", "1,2", "--dry-run")
    assert table.out.startswith(f"{len(points)} points of dsim-tiny-14m on cpu (cpu), most telling first\n")
    assert not list(Path().iterdir())


def test_ends_of_the_grid_can_be_set(cli: Cli) -> None:
    more = (
        "--largest-prefill",
        "512",
        "--largest-batch",
        "4",
        "--largest-context",
        "256",
        "--phases",
        "prefill,decode",
    )
    rows = json.loads(cli(*TINY, *more, "--dry-run", "--format", "json").out)
    assert max(row["prompt_tokens"] * row["requests"] for row in rows) == 512
    assert max(row["requests"] for row in rows if row["phase"] == "decode") == 4
    assert max(row["context_tokens"] for row in rows) == 256
    assert {row["phase"] for row in rows} == {"prefill", "decode"}


def test_dry_run_imports_no_torch() -> None:
    code = (
        "import sys\nfrom dsim.cli import main\n"
        "main(['profile', 'run', '--model', 'tiny', '--device', 'cpu', '--dry-run'])\n"
        "main(['profile', '--help'])\nassert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.usefixtures("_without_torch")
def test_without_torch_one_line_names_the_extra(cli: Cli) -> None:
    assert cli.refused(*TINY) == (
        "dsim profile run: needs torch, which is not installed; pip install '.[profile]' in the repository"
    )
    assert cli.refused("profile", "run", "-m", "13b").startswith("--gpu: is needed: without torch nobody can ask")
    assert not list(Path().iterdir())
    assert cli("profile", "run", "-m", "13b", "--gpu", "h200", "--dry-run").code == 0


def test_whether_torch_is_there_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiles.profiling.has_torch() == (importlib.util.find_spec("torch") is not None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not profiles.profiling.has_torch()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["profile", "run"], "--model: is needed; see dsim profile run --help"),
        (["profile", "rum"], "dsim profile: 'rum' is no command; did you mean 'run'?"),
        (
            ["profile", "run", "--model", "tinny", "--device", "cpu"],
            "--model: 'tinny' is not a known model; did you mean",
        ),
        (["profile", "run", "--model", "tiny", "--device", "gpu"], "--device: 'gpu' is not known; expected cpu, cuda"),
        (["profile", "run", "--model", "tiny", "--device", "cpu:1"], "--device: 'cpu:1' is not known"),
        (["profile", "run", "--model", "absent.json", "--device", "cpu"], "absent.json: cannot be read: No such file"),
        ([*TINY, "--tp", "3"], "--tp: 3 must divide attention_heads=8 of dsim-tiny-14m"),
        ([*TINY, "--tp", "1,x"], "--tp: '1,x' must be whole numbers from 1 to 1024; as in 1,2,4"),
        ([*TINY, "--tp", "0"], "--tp: '0' must be whole numbers"),
        ([*TINY, "--tp", "2,2"], "--tp: '2,2' has a degree twice"),
        ([*TINY, "--budget", "60x"], "--budget: '60x' has an unknown unit 'x'"),
        ([*TINY, "--budget", "0"], "--budget: '0' must be from 1 s to 24 h; as in 300s or 5min"),
        ([*TINY, "--budget", "nan"], "--budget: 'nan' must be a finite number"),
        ([*TINY, "--phases", "prefil"], "--phases: 'prefil' is not a phase; expected some of prefill,decode,mixed"),
        ([*TINY, "--dtype", "int3"], "--dtype: 'int3' is not one of 'bf16', 'fp16', 'fp32'"),
        ([*TINY, "--gpu", "h1000"], "--gpu: 'h1000' is not a known GPU"),
        ([*TINY, "--largest-batch", "0"], "--largest-batch: 0 must be >= 1"),
        ([*TINY, "--largest-prefill", "8"], "--largest-prefill: 8 must be >= 16"),
        ([*TINY, "--rounds", "0"], "--rounds: 0 must be >= 1"),
        ([*TINY, "--threads", "0"], "--threads: 0 must be >= 1"),
        (["profile", "run", "-m", "tiny", "--gpu", "h200", "--threads", "2"], "--threads: 2 is for --device cpu only"),
        ([*TINY, "--all-reduce", "10us"], "--all-reduce: '10us' must be a latency and a rate; as in 10us,300GB/s"),
        ([*TINY, "--all-reduce", "10us,3GB"], "--all-reduce: '3GB' has an unknown unit 'GB'"),
        ([*TINY, "--all-reduce", "-1us,3GB/s"], "--all-reduce: -1e-06 must be >= 0"),
        ([*TINY, "--resume", "--overwrite"], "--resume: contradicts --overwrite; leave one out"),
        ([*TINY, "--out", "."], "--out: '.' is a directory; give a file, such as rows.csv"),
        ([*TINY, "--out", "no/rows.csv"], "--out: 'no/rows.csv' cannot be written: "),
        ([*TINY, "--out", ""], "--out: '' must not be empty"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, arguments: list[str], line: str) -> None:
    assert cli.refused(*arguments).startswith(line)
    assert not list(Path().iterdir())


def test_an_existing_file_is_kept(cli: Cli) -> None:
    Path("rows.csv").write_text("mine")
    error = cli.refused(*TINY)
    assert error == "--out: 'rows.csv' exists; --resume adds to it, --overwrite replaces it"
    assert Path("rows.csv").read_text() == "mine"


def test_without_a_subcommand_help_is_shown(cli: Cli) -> None:
    run = cli("profile")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith("Usage: dsim profile ")
