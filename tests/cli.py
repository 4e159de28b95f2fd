"""Runs the command line in this process, the way the `dsim` script does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dsim.cli import main

#: A search by finite runs of few short requests on two GPUs: a second, and wide intervals.
QUICK = (
    *(
        "search",
        "-m",
        "13b",
        "--slo",
        "ttft=0.4,tpot=0.1",
        "--gpus",
        "2",
        "-n",
        "50",
        "--precision",
        "30%",
        "--top",
        "2",
    ),
    *("--policy", "orca", "-w", "fixed:512,16", "-j", "1"),
)


@dataclass(frozen=True)
class Run:
    """What one run of the command line left behind."""

    code: int
    out: str
    err: str


class Cli:
    """Calls `main` and captures what it prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Run:
        self._capsys.readouterr()
        code = main(arguments)
        out, err = self._capsys.readouterr()
        return Run(code, out, err)

    def refused(self, *arguments: str, code: int = 2) -> str:
        """Return the one line that refuses these arguments; nothing else may be printed."""
        run = self(*arguments)
        assert run.out == ""
        assert run.err.count("\n") == 1, run.err
        assert run.err.startswith("error: ")
        assert "Traceback" not in run.err
        assert run.code == code
        return run.err.removeprefix("error: ").removesuffix("\n")
