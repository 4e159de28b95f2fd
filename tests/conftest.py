"""Settings of all tests: hypothesis profiles `dev` (default) and `ci` (when CI is set)."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.cli import Cli

# A shared machine stalls now and then: no per-example deadlines. CI draws the same examples every time.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background jobs of a shell ignore interrupts and hand that down to the commands whose interruption is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def no_gc_callbacks() -> Iterator[None]:
    """Nothing is called at garbage collections, as hypothesis asks for: a run that is stopped there is not stopped."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line, run in this process."""
    return Cli(capsys)
