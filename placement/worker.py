"""Worker: what runs in another process, thread or machine, which is told the scenario once and may be short of time."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dsim.version import __version__

#: Scenarios that a worker remembers.
_REMEMBERED: Final = 4
#: Time between two attempts to stop a run.
_AGAIN_S: Final = 0.5

#: Scenarios that this process was told, by token, the last used last: state of a worker, which nobody else sees.
_told: dict[bytes, object] = {}


class Unknown(enum.Enum):
    """What a worker says that does not know the scenario yet."""

    SCENARIO = "scenario"


@dataclass(frozen=True, slots=True)
class Done:
    """What a call gave.

    Args:
        result: None if the time was over, or the memory used up.
        cpu_s: CPU time that it took.
    """

    result: Any
    cpu_s: float
    too_long: bool = False
    no_memory: bool = False


@dataclass(frozen=True, slots=True)
class OtherCode:
    """What a worker says whose code is not that of whoever asks."""

    version: str


def call(
    function: Callable[[Any, Any], Any],
    token: bytes,
    scenario: object | None,
    item: object,
    limit_s: float | None,
    code: str | None,
) -> Done | Unknown | OtherCode:
    """Return what `function(scenario, item)` returns, with its CPU time.

    Args:
        token: of the scenario.
        scenario: None: the one that was told with this token.
        limit_s: CPU seconds after which the call is stopped.
        code: digest of the code that must run here; None: whatever runs here.
    """
    if code is not None:
        from placement.cache import code_id  # only workers elsewhere need it

        if code != code_id():
            return OtherCode(__version__)
    if scenario is None:
        scenario = _told.pop(token, None)
        if scenario is None:
            return Unknown.SCENARIO
    _told[token] = scenario
    while len(_told) > _REMEMBERED:
        _told.pop(next(iter(_told)), None)
    return timed(function, scenario, item, limit_s)


def timed(function: Callable[[Any, Any], Any], scenario: object, item: object, limit_s: float | None) -> Done:
    """Return what `function(scenario, item)` returns, with its CPU time, unless it takes more than the limit."""
    start_s = time.thread_time()
    result, too_long, no_memory = None, False, False
    watch = None if limit_s is None else _Watch(limit_s)
    try:
        try:
            result = function(scenario, item)
        finally:
            if watch is not None:
                watch.end()
    except MemoryError:
        no_memory = True
    except _TimeOverError:
        too_long = True
        while watch is not None:
            with contextlib.suppress(_TimeOverError):
                watch.end()
                break
    return Done(result, time.thread_time() - start_s, too_long, no_memory)


class _TimeOverError(BaseException):
    """Is raised in a call whose time is over; no handler of errors may catch it."""


class _Silence:
    """Keeps Python from reporting, while any watch runs, that an exception of its was lost in a finalizer.

    It comes again, so nobody has to know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: set[_Watch] = set()
        self._before: Callable[[sys.UnraisableHookArgs], object] = sys.unraisablehook

    def begin(self, watch: _Watch) -> None:
        """That watch runs."""
        with self._lock:
            if not self._watches:
                self._before, sys.unraisablehook = sys.unraisablehook, self._hook
            self._watches.add(watch)

    def end(self, watch: _Watch) -> None:
        """That watch runs no more."""
        with self._lock:
            self._watches.discard(watch)
            if not self._watches and sys.unraisablehook == self._hook:
                sys.unraisablehook = self._before

    def _hook(self, lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, _TimeOverError):
            self._before(lost)


_silence: Final = _Silence()


class _Watch:
    """Stops this thread when it has taken so much CPU time.

    CPython raises an exception in another thread where it is asked to. A thread whose CPU time the system does not tell
    has its time on the clock counted.
    """

    def __init__(self, limit_s: float) -> None:
        self._thread = threading.get_ident()
        self._clock = _clock_of(self._thread)
        self._until_s = self._clock() + limit_s
        self._ended = threading.Event()
        self._lock = threading.Lock()
        _silence.begin(self)
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Stop nothing any more. Where this is interrupted itself, it can be called again.

        To take an exception back by sending none would make CPython 3.11 look for one for ever after: everything is
        slower then, and what is profiled never ends.
        """
        with self._lock:
            self._ended.set()
        _silence.end(self)
        for _ in range(2):
            # One that was sent before arrives here at the latest: backward jumps look for it.
            pass

    def _watch(self) -> None:
        while not self._ended.wait(max(self._until_s - self._clock(), 0.01)):
            if self._clock() < self._until_s:
                continue
            with self._lock:
                if not self._ended.is_set():
                    error = ctypes.py_object(_TimeOverError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), error)
            # Where the exception was lost, in a finalizer say, it comes again.
            self._until_s = self._clock() + _AGAIN_S


def _clock_of(thread: int) -> Callable[[], float]:
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)
