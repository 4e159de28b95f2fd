"""Ctrl-C and SIGTERM: prompt, silent, with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONG = {
    "simulate": ["simulate", "-m", "13b", "-p", "1xP:tp2pp1 + 1xD:tp1pp1", "--rate", "3", "-n", "100000000"],
    "search": ["search", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "-j", "2", "--precision", "0.0001"],
}


def processes_of(group: int) -> list[str]:
    """Return the process ids in a process group, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def test_an_interrupt_within_exec_is_like_any_other(tmp_path: Path) -> None:
    """As while dataclasses are made: Python would end by the signal."""
    (tmp_path / "typer.py").write_text("exec('raise KeyboardInterrupt')")
    run = subprocess.run(
        [sys.executable, "-m", "dsim", "models"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("command", "after_s", "number"),
    [
        ("simulate", 0.0, signal.SIGINT),
        ("simulate", 3.0, signal.SIGINT),
        ("search", 0.0, signal.SIGINT),
        ("search", 3.0, signal.SIGINT),
        ("search", 3.0, signal.SIGTERM),
    ],
)
def test_an_interrupt_ends_everything_promptly(
    command: str, after_s: float, number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "dsim", *LONG[command], "-o", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # The command has begun when it imports numpy; before that, Python itself may still be starting.
        start_s = time.perf_counter()
        while "numpy" not in Path(f"/proc/{process.pid}/maps").read_text() and time.perf_counter() - start_s < 20:
            time.sleep(0.01)
        time.sleep(after_s)
        assert process.poll() is None
        # As a terminal does: the whole process group gets it. A batch system may send SIGTERM to the runner alone.
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        start_s = time.perf_counter()
        out, err = process.communicate(timeout=30)
        took_s = time.perf_counter() - start_s
        # What a search has run is kept, if there is anything, and it says how to go on with it.
        kept = [path.name for path in folder.iterdir()] if folder.exists() else []
        said = f"stopped; the same command with --resume goes on with {folder}\n" if kept else ""
        assert (process.returncode, out, err) == ({signal.SIGINT: 130, signal.SIGTERM: 143}[number], "", said)
        assert kept in ([], ["runs.sqlite"] if command == "search" else [])
        assert took_s < 3
        # Python's resource tracker ends by itself, a moment after its last user.
        while processes_of(process.pid) and time.perf_counter() - start_s < 5:
            time.sleep(0.05)
        assert processes_of(process.pid) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
