"""Kills searches and their workers at random moments: `python -m tests.kill_search 20` does it 20 times each."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: A search of few short requests: some 400 runs on two processes.
QUESTION = (
    *("search", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--gpus", "2", "-n", "50", "--precision", "30%"),
    *("--top", "2", "--policy", "orca", "-w", "fixed:512,16", "-j", "2", "--quiet"),
)
#: Longest time that anything may take before it hangs, on a busy machine.
HANGS_S = 120.0
#: How long workers may outlive the process that was killed.
OUTLIVES_S = 20.0


def started(folder: Path, *more: str, question: Sequence[str] = QUESTION) -> subprocess.Popen[str]:
    """Start a search that writes into a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "dsim", *question, "-o", str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for its end and return the exit code and what it said on stderr; kill what hangs."""
    try:
        _, said = process.communicate(timeout=HANGS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise AssertionError(f"hangs: no end within {HANGS_S:g} s") from None
    return process.returncode, said


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def check_same(folder: Path, reference: dict[str, bytes]) -> None:
    """See that a folder has the same files with the same bytes."""
    found = content(folder)
    assert sorted(found) == sorted(reference), f"files {sorted(found)}, not {sorted(reference)}"
    differ = [name for name, data in found.items() if data != reference[name]]
    assert not differ, f"other bytes in {', '.join(differ)}"


def members(group: int) -> dict[int, str]:
    """Return the processes of a group that are alive, with their command lines."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found[int(stat.parent.name)] = command
    return found


def kill_runner(folder: Path, after_s: float, reference: dict[str, bytes]) -> str:
    """Kill a search after some time, go on with it, and return what it had left."""
    process = started(folder)
    try:
        process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate(timeout=HANGS_S)
    until_s = time.monotonic() + OUTLIVES_S
    while (left := members(process.pid)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not left, f"still alive: {left}"
    names = ", ".join(content(folder)) or "nothing"
    code, said = ended(started(folder, "--resume"))
    assert code == 0, said
    check_same(folder, reference)
    return f"left {names}"


def kill_worker(folder: Path, after_s: float, reference: dict[str, bytes], choose: random.Random) -> str:
    """Kill a worker of a search after some time, and return what became of it."""
    process = started(folder)
    killed = "none: it had ended"
    try:
        process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        workers = [pid for pid, command in members(process.pid).items() if "spawn_main" in command]
        killed = "none: there was none yet"
        if workers:
            victim = choose.choice(sorted(workers))
            os.kill(victim, signal.SIGKILL)
            killed = f"one of {len(workers)}"
    code, said = ended(process)
    assert code == 0, said
    check_same(folder, reference)
    return f"killed {killed}"


def rounds(scratch: Path, times: int, seed: int, say: Callable[[str], object]) -> None:
    """Kill the runner so many times, then workers as often; the first difference or hang is an error."""
    choose = random.Random(seed)
    reference_folder = scratch / "reference"
    start_s = time.monotonic()
    code, said = ended(started(reference_folder))
    assert code == 0, said
    took_s = time.monotonic() - start_s
    reference = content(reference_folder)
    say(f"uninterrupted: {took_s:.1f} s, {', '.join(reference)}")
    for what in ("runner", "worker"):
        for number in range(1, times + 1):
            folder = scratch / f"{what}-{number}"
            after_s = choose.uniform(0.0, took_s)
            if what == "runner":
                found = kill_runner(folder, after_s, reference)
            else:
                found = kill_worker(folder, after_s, reference, choose)
            say(f"{what} {number}/{times}: killed after {after_s:.2f} s, {found}; same bytes")
            shutil.rmtree(folder)


def main() -> None:
    """Kill as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsim-kill-") as scratch:
        rounds(Path(scratch), asked.times, asked.seed, lambda line: print(line, flush=True))  # noqa: T201


if __name__ == "__main__":
    main()
