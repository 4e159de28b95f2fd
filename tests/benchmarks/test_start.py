"""How long the command line takes to start; run by name: pytest tests/benchmarks --benchmark-enable."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.benchmark(timer=time.perf_counter)
def test_help(benchmark: BenchmarkFixture) -> None:
    """`dsim --help`, wall seconds; 0.3 at most where nobody else uses the machine."""
    command = [sys.executable, "-m", "dsim", "--help"]
    run = benchmark.pedantic(  # type: ignore[no-untyped-call]
        subprocess.run, (command,), {"capture_output": True, "check": True}, rounds=5
    )
    assert run.stdout.startswith(b"Usage: dsim ")
