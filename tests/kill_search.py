"""Kills searches and their workers at random moments: `python -m tests.kill_search 20` does it 20 times each.

It ends with 1 where fewer than three quarters of the kills of workers hit one that was alive.
"""

from __future__ import annotations

import argparse
import contextlib
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
#: Share of the kills of workers that must hit one.
HITS = 0.75
#: How often processes are looked at.
LOOKS_S = 0.02


def started(folder: Path, *more: str, question: Sequence[str] = QUESTION) -> subprocess.Popen[str]:
    """Start a search that writes into a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "dsim", *question, "-o", str(folder), *more],
        stdout=subprocess.DEVNULL,
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


def workers(group: int) -> dict[int, float]:
    """Return the worker processes of a group that are alive, each with the CPU seconds that it has taken."""
    found = {}
    for pid, command in members(group).items():
        if "spawn_main" in command:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def watched(process: subprocess.Popen[str], done: Callable[[dict[int, float]], bool]) -> dict[int, float]:
    """Look at the workers of a search until they are as wanted, and return them; none if it ends before."""
    until_s = time.monotonic() + HANGS_S
    while process.poll() is None and time.monotonic() < until_s:
        found = workers(process.pid)
        if done(found):
            return found
        time.sleep(LOOKS_S)
    return {}


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


def kill_worker(folder: Path, after_cpu_s: float, reference: dict[str, bytes], choose: random.Random) -> str | None:
    """Kill a worker of a search when all have taken so much CPU time; None if there was none any more.

    Returns:
        What became of it: a search replaces workers unless it has nothing left to do.
    """
    process = started(folder)
    alive = watched(process, lambda found: sum(found.values()) > after_cpu_s)
    hit = False
    if alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(choose.choice(sorted(alive)), signal.SIGKILL)
            hit = True
    replaced = bool(watched(process, lambda found: not found.keys() <= alive.keys())) if hit else False
    code, said = ended(process)
    assert code == 0, said
    check_same(folder, reference)
    return f"one of {len(alive)}{', replaced' if replaced else ''}" if hit else None


def uninterrupted(folder: Path) -> tuple[float, float]:
    """Search once; return the seconds that it took, and the CPU seconds of its workers."""
    start_s = time.monotonic()
    process = started(folder)
    worked_s = 0.0

    def measured(found: dict[int, float]) -> bool:
        nonlocal worked_s
        worked_s = max(worked_s, sum(found.values()))
        return False

    watched(process, measured)
    code, said = ended(process)
    assert code == 0, said
    return time.monotonic() - start_s, worked_s


def rounds(scratch: Path, times: int, seed: int, say: Callable[[str], object]) -> int:
    """Kill the runner so many times, then workers as often; the first difference or hang is an error.

    Returns:
        How many of the kills of workers hit one that was alive.
    """
    choose = random.Random(seed)
    took_s, worked_s = uninterrupted(scratch / "reference")
    reference = content(scratch / "reference")
    say(f"uninterrupted: {took_s:.1f} s, {worked_s:.1f} CPU s of workers, {', '.join(reference)}")
    for number in range(1, times + 1):
        folder = scratch / f"runner-{number}"
        after_s = choose.uniform(0.0, took_s)
        found = kill_runner(folder, after_s, reference)
        say(f"runner {number}/{times}: killed after {after_s:.2f} s, {found}; same bytes")
        shutil.rmtree(folder)
    hits = 0
    for number in range(1, times + 1):
        folder = scratch / f"worker-{number}"
        after_s = choose.uniform(0.0, worked_s)
        killed = kill_worker(folder, after_s, reference, choose)
        hits += killed is not None
        say(f"worker {number}/{times}: killed {killed or 'none'} after {after_s:.2f} CPU s of all; same bytes")
        shutil.rmtree(folder)
    say(f"{hits} of {times} kills of workers hit one that was alive")
    return hits


def main() -> None:
    """Kill as often as asked.

    Raises:
        SystemExit: too few workers were alive when they were killed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsim-kill-") as scratch:
        hits = rounds(Path(scratch), asked.times, asked.seed, lambda line: print(line, flush=True))  # noqa: T201
    if hits < HITS * asked.times:
        sys.exit(f"too few: at least {HITS:.0%} must")


if __name__ == "__main__":
    main()
