"""Crew: an executor, and what goes with it: results that are there already, deaths of workers, a limit of time."""

from __future__ import annotations

import math
import queue
import typing
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from dsim.errors import InputError, InternalError
from dsim.pools import Placement
from dsim.version import __version__
from placement.goodput import Observation
from placement.probe import Outcome, Probe, Scenario, run_probe
from placement.worker import Done, OtherCode, Unknown, call, timed

if TYPE_CHECKING:
    from placement.cache import Codec, Store

Result = TypeVar("Result")

#: How often a run may kill its worker while it is alone.
_DEATHS: Final = 2
_DIED: Final = "its worker died twice; is there enough memory?"
_NO_MEMORY: Final = "it ran out of memory"


@runtime_checkable
class Pool(Protocol):
    """An executor whose workers may die and be replaced."""

    jobs: int
    #: Digest of the code that workers must have; None where they cannot have another.
    code: str | None

    def has_died(self, error: BaseException) -> bool:
        """Return whether a call failed because its worker died."""
        ...

    def explained(self, error: BaseException) -> BaseException:
        """Return what to raise where a call failed otherwise."""
        ...

    def renew(self, jobs: int) -> None:
        """Replace the workers after a death."""
        ...


class Crew(Executor):
    """Runs probes; whoever passes it on as an executor passes on its cache and its limit, too.

    Args:
        executor: where calls run; None: here, one after the other.
        cache: results of runs; what is there does not run again.
        time_limit_s: CPU seconds that the runs of one placement may take; then it has failed.
    """

    def __init__(
        self, executor: Executor | None = None, *, cache: Store | None = None, time_limit_s: float | None = None
    ) -> None:
        if time_limit_s is not None and not time_limit_s > 0:
            raise InputError("crew", "must be > 0", name="time_limit_s", value=time_limit_s)
        self.executor = executor
        self.cache = cache
        self.time_limit_s = time_limit_s

    def submit(self, function: Callable[..., Any], /, *arguments: object, **named: object) -> Future[Any]:
        """Run a call that is no probe's."""
        if self.executor is not None:
            return self.executor.submit(function, *arguments, **named)
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **named))
        return future

    def shift(self, scenario: Scenario) -> Shift:
        """Return what runs the probes of a scenario."""
        return Shift(self, scenario, uuid.uuid4().bytes)


def crew_of(executor: Executor | None) -> Crew:
    """Return the executor if it is a crew, else one around it."""
    return executor if isinstance(executor, Crew) else Crew(executor)


def each(
    function: Callable[[Scenario, Probe], Result],
    scenario: Scenario,
    probes: Sequence[Probe],
    executor: Executor | None,
) -> list[Result]:
    """Return what `function(scenario, probe)` returns for every probe, from the cache if the executor has one.

    A limit of time does not count here.

    Raises:
        InternalError: a worker died again and again.
    """
    crew = crew_of(executor)
    unlimited = Crew(crew.executor, cache=crew.cache)
    found: list[Result] = []
    for probe, result in zip(probes, unlimited.shift(scenario).results(function, probes), strict=True):
        if isinstance(result, Fault):
            raise InternalError(f"{probe.placement.label}: {result.why}")
        found.append(result)
    return found


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a run did not end by itself."""

    why: str


@dataclass(slots=True, eq=False)
class Shift:
    """The probes of one scenario.

    A candidate one of whose runs did not end by itself has failed: none of it runs again.

    Args:
        faults: by candidate.
        spent_s: CPU time of its runs, by candidate.
    """

    crew: Crew
    scenario: Scenario
    token: bytes
    faults: dict[Placement, Fault] = field(default_factory=dict)
    spent_s: defaultdict[Placement, float] = field(default_factory=lambda: defaultdict(float))
    _id: bytes | None = None
    _said: dict[int, tuple[object, str]] = field(default_factory=dict)

    def outcomes(self, probes: Sequence[Probe]) -> Iterator[Outcome]:
        """Yield the outcome of every probe, in their order."""
        known = set(self.faults)
        ready = iter(self.results(run_probe, [probe for probe in probes if probe.placement not in known]))
        for probe in probes:
            result = self.faults[probe.placement] if probe.placement in known else next(ready)
            if isinstance(result, Fault):
                self.faults.setdefault(probe.placement, result)
                result = failed(self.scenario, probe, result)
            yield result

    def results(
        self, function: Callable[[Scenario, Probe], Result], probes: Sequence[Probe]
    ) -> Iterator[Result | Fault]:
        """Yield what the function returns for every probe, in their order, or why it did not."""
        store = self.crew.cache
        if store is None:
            yield from self._in_order(function, probes)
            return
        from placement.cache import Kept, codec, run_id, scenario_id

        if self._id is None:
            self._id = scenario_id(self.scenario)
        form, fault_form = codec(typing.get_type_hints(function)["return"]), codec(Fault)
        name = f"{function.__module__}.{function.__qualname__}"
        ids = [run_id(self._id, probe, name, self._said) for probe in probes]
        kept = store.get(ids)
        missing = {run: probe for run, probe in zip(ids, probes, strict=True) if run not in kept}

        def finished(number: int, result: Any) -> Any:  # noqa: ANN401 whatever the function returns
            fault = isinstance(result, Fault)
            form_of: Codec = fault_form if fault else form
            text, again = form_of.kept(result)
            store.put(runs[number], Kept(text, fault))
            return again

        runs = list(missing)
        fresh = self._in_order(function, list(missing.values()), finished)
        got: dict[bytes, Any] = {}
        for run in ids:
            if run in kept:
                yield (fault_form if kept[run].fault else form).value(kept[run].result)
                continue
            if run not in got:
                got[run] = next(fresh)
            yield got[run]

    def _in_order(
        self,
        function: Callable[[Scenario, Probe], Any],
        probes: Sequence[Probe],
        finished: Callable[[int, Any], Any] = lambda _number, result: result,
    ) -> Iterator[Any]:
        """Yield results in the order of the probes.

        Args:
            finished: is told each result as soon as it is there, and returns what is yielded.
        """
        done: dict[int, Any] = {}
        first = 0
        if self.crew.executor is None:
            results = self._here(function, probes)
        else:
            results = _Work(self, self.crew.executor, function, probes).results()
        for number, result in results:
            done[number] = finished(number, result)
            while first in done:
                yield done.pop(first)
                first += 1

    def _here(self, function: Callable[[Scenario, Probe], Any], probes: Sequence[Probe]) -> Iterator[tuple[int, Any]]:
        for number, probe in enumerate(probes):
            left_s = self.left_s(probe)
            if left_s is not None and left_s <= 0:
                yield number, self.too_long
            else:
                yield number, self.noted(probe, timed(function, self.scenario, probe, left_s))

    def left_s(self, probe: Probe) -> float | None:
        """Return the CPU seconds that a probe may take, None for any."""
        limit_s = self.crew.time_limit_s
        return None if limit_s is None else limit_s - self.spent_s[probe.placement]

    def noted(self, probe: Probe, done: Done) -> Any:  # noqa: ANN401 what the function returned
        """Return a call's result, its time noted."""
        if self.crew.time_limit_s is not None:
            self.spent_s[probe.placement] += done.cpu_s
        if done.no_memory:
            return Fault(_NO_MEMORY)
        return self.too_long if done.too_long else done.result

    @property
    def too_long(self) -> Fault:
        """What befalls a candidate whose time is over."""
        return Fault(f"its runs took more than {self.crew.time_limit_s:g} s of CPU time (--time-limit)")


def failed(scenario: Scenario, probe: Probe, fault: Fault) -> Outcome:
    """Return the outcome of a probe that did not end by itself.

    Of a pool alone it says nothing: other candidates have the same pool and must not pay for this one.
    """
    if probe.phase is None:
        return Outcome(Observation(0.0, stable=False), failure=fault.why)
    return Outcome(Observation(scenario.target * (1 - 1e-9)), error=1.0, failure=fault.why)


@dataclass(slots=True, eq=False)
class _Work:
    """Calls in flight.

    When a worker dies, every call in flight is a suspect. Suspects run again, one at a time, with one worker; one that
    then kills it twice has not ended by itself.

    Args:
        waiting, suspects: numbers of probes; the first suspect may be in flight, alone.
        deaths: of workers, by the suspect that ran alone.
        lost: probes in flight when a worker died, until nothing is in flight any more.
        ended: calls that are done, in the order in which they ended.
    """

    shift: Shift
    executor: Executor
    function: Callable[[Scenario, Probe], Any]
    probes: Sequence[Probe]
    waiting: deque[int] = field(default_factory=deque)
    suspects: deque[int] = field(default_factory=deque)
    deaths: Counter[int] = field(default_factory=Counter)
    flight: dict[Future[Any], int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    ended: queue.SimpleQueue[Future[Any]] = field(default_factory=queue.SimpleQueue)
    _pool: Pool | None = None

    def __post_init__(self) -> None:
        self._pool = self.executor if isinstance(self.executor, Pool) else None

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield the number and the result of every probe, as they come."""
        self.waiting.extend(range(len(self.probes)))
        try:
            while self.waiting or self.suspects or self.flight:
                yield from self._submit()
                if self.flight:
                    yield from self._take(self.ended.get())
                if self.lost and not self.flight:
                    yield from self._after_death()
        finally:
            for future in self.flight:
                future.cancel()

    def _next(self) -> int | None:
        """Return the probe to send now; few are in flight where a death makes all of them suspects."""
        if self.lost:
            return None
        if self.suspects:
            return None if self.flight else self.suspects[0]
        room = math.inf if self._pool is None else self._pool.jobs + 2
        return self.waiting[0] if self.waiting and len(self.flight) < room else None

    def _submit(self) -> Iterator[tuple[int, Any]]:
        while (number := self._next()) is not None:
            left_s = self.shift.left_s(self.probes[number])
            if left_s is not None and left_s <= 0:
                if not self.suspects:
                    self.waiting.popleft()
                yield number, self.shift.too_long
                self._settle(number)
                continue
            try:
                self._send(number, left_s=left_s, told=False)
            except BrokenExecutor:
                if self._pool is None:
                    raise
                if self.flight:
                    return
                # A worker died between two calls: it is nobody's fault.
                self._pool.renew(self._pool.jobs)
                continue
            if not self.suspects:
                self.waiting.popleft()

    def _send(self, number: int, *, left_s: float | None, told: bool) -> None:
        code = None if self._pool is None else self._pool.code
        scenario = self.shift.scenario if told else None
        probe = self.probes[number]
        future = self.executor.submit(call, self.function, self.shift.token, scenario, probe, left_s, code)
        self.flight[future] = number
        future.add_done_callback(self.ended.put)

    def _take(self, future: Future[Any]) -> Iterator[tuple[int, Any]]:
        number = self.flight.pop(future)
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            if self._pool is None:
                raise error
            if not self._pool.has_died(error):
                raise self._pool.explained(error)
            self.lost.append(number)
            return
        answer = future.result()
        if isinstance(answer, OtherCode):
            raise other_code(answer)
        if answer is Unknown.SCENARIO:
            try:
                self._send(number, left_s=self.shift.left_s(self.probes[number]), told=True)
            except BrokenExecutor:
                self.lost.append(number)
            return
        yield number, self.shift.noted(self.probes[number], answer)
        self._settle(number)

    def _settle(self, number: int) -> None:
        """Clear a suspect; when there is none any more, all workers are wanted."""
        if self.suspects and self.suspects[0] == number:
            self.suspects.popleft()
            if not self.suspects and self._pool is not None:
                self._pool.renew(self._pool.jobs)

    def _after_death(self) -> Iterator[tuple[int, Any]]:
        """Find out whose fault it is that a worker died."""
        assert self._pool is not None
        if not self.suspects:
            self.suspects.extend(sorted(self.lost))
        else:
            number = self.suspects[0]
            self.deaths[number] += 1
            if self.deaths[number] >= _DEATHS:
                self.suspects.popleft()
                yield number, Fault(_DIED)
        self.lost.clear()
        self._pool.renew(1 if self.suspects else self._pool.jobs)


def other_code(answer: OtherCode, address: str = "a worker") -> InputError:
    """Return what is wrong with a worker that runs other code.

    Args:
        address: which worker.
    """
    there = f"dsim {answer.version}" if answer.version != __version__ else f"another build of dsim {__version__}"
    rule = f"{address} has {there}, or another Python or numpy; here is dsim {__version__}"
    return InputError("--dask", rule, hint="install the same on all workers")
