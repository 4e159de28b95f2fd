"""What every command has in common: help, exit codes, one line for each mistake, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsim.cli.app
import dsim.simulate
from dsim.version import __version__
from tests.cli import Cli

HEAVY = ["numpy", "pandas", "scipy", "simpy", "matplotlib", "plotly", "torch", "rich", "yaml", "dask"]


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_help_imports_nothing_heavy() -> None:
    """`dsim --help` must answer within 0.3 s; time is noisy, imports are what it is made of."""
    run = fresh(
        "import sys\nfrom dsim.cli import main\nmain(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    assert run.stderr == "[]\n"
    assert "simulate" in run.stdout


@pytest.mark.parametrize(
    "command", ["search", "size", "simulate", "sweep", "plot", "report", "validate", "models", "gpus", "profiles"]
)
def test_help_of_a_command_imports_nothing_heavy(command: str) -> None:
    run = fresh(
        f"import sys\nfrom dsim.cli import main\nmain(['{command}', '-h'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    assert run.stderr == "[]\n"
    assert "Usage: dsim " + command in run.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "show", "llama-2-70b-h100-sxm-vllm-2023"],
        ["profile", "compare", "llama-2-70b-h100-sxm-vllm-2023", "llama-2-70b-a100-80g-vllm-2023"],
        ["search", "--model", "13b", "--slo", "ttft=0.4,tpot=0.1", "--dry-run"],
    ],
)
def test_only_timing_imports_torch(arguments: list[str]) -> None:
    run = fresh(
        f"import sys\nfrom dsim.cli import main\nprint(main({arguments!r}), file=sys.stderr)\n"
        "print([name for name in ['torch', 'matplotlib'] if name in sys.modules], file=sys.stderr)"
    )
    assert run.stderr.endswith("0\n[]\n"), run.stderr


def test_version(cli: Cli) -> None:
    run = cli("--version")
    build = "compiled" if dsim.simulate.__file__.endswith((".so", ".pyd")) else "pure Python"
    assert (run.code, run.out, run.err) == (0, f"dsim {__version__} ({build})\n", "")


def test_without_a_command_help_is_shown(cli: Cli) -> None:
    run = cli()
    assert run.code == 0
    assert run.out.startswith("Usage: dsim ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["modls"], "dsim: 'modls' is no command; did you mean 'models'?"),
        (["frobnicate"], "dsim: 'frobnicate' is no command; expected one of "),
        (["--vers"], "--vers: is no option of dsim; did you mean '--version'?"),
        (["models", "--frmat", "json"], "--frmat: is no option of dsim models; did you mean '--format'?"),
        (
            ["models", "--format", "yaml"],
            "--format: 'yaml' is not one of 'table', 'json', 'csv'; see dsim models --help",
        ),
        (["models", "--format"], "--format: requires an argument; see dsim"),
        (["models", "extra"], "dsim models: got unexpected extra argument(s) (extra); see dsim models --help"),
        (["models", "\x1b[31m\n"], "dsim models: got unexpected extra argument(s) "),
    ],
)
def test_usage_errors_are_one_line(cli: Cli, arguments: list[str], line: str) -> None:
    error = cli.refused(*arguments)
    assert error.startswith(line)
    assert error.isprintable()


@pytest.mark.parametrize("command", ["models", "gpus", "profiles"])
def test_lists_print_as_table_json_and_csv(cli: Cli, command: str) -> None:
    table, as_json, as_csv = (cli(command, "--format", form) for form in ("table", "json", "csv"))
    assert (table.code, as_json.code, as_csv.code) == (0, 0, 0)
    assert table.err == as_json.err == as_csv.err == ""
    rows = json.loads(as_json.out)
    names = [row["name"] for row in rows]
    assert names == [line.split(",")[0] for line in as_csv.out.splitlines()[1:]]
    assert all(name in table.out for name in names)
    assert all(row["source"] for row in rows)


def test_tables_are_never_cut_when_piped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = cli("models").out.splitlines()
    assert lines[0].split()[0] == "name"
    assert not any(line != line.rstrip() for line in lines)
    assert any("facebook/opt-13b" in line and "819,200" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_models_show_the_nominal_kv_bytes(cli: Cli) -> None:
    rows = {row["name"]: row for row in json.loads(cli("models", "--format", "json").out)}
    assert rows["opt-13b"]["kv_bytes_per_token"] == 819_200
    assert rows["llama-3.1-70b"]["kv_bytes_per_token"] == 327_680


def test_a_closed_pipe_is_harmless() -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "dsim", "gpus", "--format", "json"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (0, b"")


def test_an_interrupt_exits_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsim.catalog.models", interrupted)
    run = cli("models")
    assert (run.code, run.out, run.err) == (130, "", "")


def test_a_failing_file_system_exits_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "/data/x")

    monkeypatch.setattr("dsim.catalog.models", full)
    assert cli.refused("models", code=1) == "/data/x: No space left on device"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_a_full_disk_behind_stdout_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "dsim", "gpus"]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "error: standard output: No space left on device\n")


def test_an_error_of_dsims_own_is_not_disguised(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dsim.catalog.models", broken)
    with pytest.raises(ZeroDivisionError):
        cli("models")


def test_the_app_is_what_the_script_runs() -> None:
    run = subprocess.run([sys.executable, "-m", "dsim", "nonsense"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: dsim: 'nonsense' is no command")
    assert dsim.cli.app.app.info.name == "dsim"


def test_sigint_during_imports_exits_130(tmp_path: Path) -> None:
    """Even before a command runs."""
    code = """
import os, signal, sys
from dsim import cli
import dsim.cli.app as app
app.run = lambda _: os.kill(os.getpid(), signal.SIGINT)
sys.exit(cli.main([]))
"""
    script = tmp_path / "run.py"
    script.write_text(code)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=os.environ)
    assert run.returncode == 130
    assert run.stderr == ""
