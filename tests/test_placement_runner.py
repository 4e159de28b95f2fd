"""The runner: caches, deaths of workers, limits of time; nothing of it changes an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.analytic import AnalyticLatency
from dsim.errors import InputError, InternalError
from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.slo import Slo, parse_slo
from dsim.workload import Fixed, Poisson, Uniform, Workload
from placement.cache import Beside, Cache, Kept, code_id, codec, question_id, run_id, scenario_id
from placement.crew import Crew, Fault, each, failed
from placement.goodput import Observation
from placement.probe import Outcome, Probe, Scenario, run_probe
from placement.result import State, Trial
from placement.runner import LocalPool, Runner
from placement.search import Mode, Question, candidates, scenario, search, search_among
from placement.shards import Ledger, Shard, merge, search_shard
from profiles.choice import best_profile
from profiles.shipped import find_profile

SPLIT = find_profile("13b", "a100-80g", engine="distserve")
WHOLE = find_profile("13b", "a100-80g", engine="vllm")
PROFILES = {Role.PREFILL: SPLIT, Role.DECODE: SPLIT, Role.COLOCATED: WHOLE}
#: Twelve candidates, finite runs of few short requests: a search takes half a second.
QUESTION = Question(
    PROFILES,
    Workload(Poisson(), Fixed(512, 16)),
    parse_slo("ttft=0.4,tpot=0.1"),
    num_gpus=3,
    policies=(Policy.ORCA,),
    num_requests=30,
    precision=0.3,
    top=1,
)
SCENARIO = scenario(QUESTION)
PLACEMENT = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
PROBES = [Probe(PLACEMENT, float(rate), 0, 0, 10) for rate in range(1, 9)]

Opened = Callable[[Path], Cache]
#: The rate of the probe that kills its worker.
FATAL = 3.0


def bits(value: object) -> object:
    """Return a value with the bits of its floats, and the type of everything in it."""
    if isinstance(value, float):
        return type(value).__name__, struct.pack(">d", value)
    if isinstance(value, tuple | list):
        return type(value).__name__, [bits(item) for item in value]
    if isinstance(value, dict):
        return type(value).__name__, [(bits(key), bits(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(value):
        return type(value).__name__, [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return type(value).__name__, value


#: Of the numbers that are none Python has one.
floats = st.floats(allow_nan=False) | st.just(float("nan"))
outcomes = st.builds(
    Outcome,
    st.builds(Observation, floats, st.booleans(), st.booleans(), st.integers(0, 10**9), st.none() | floats),
    floats,
    st.tuples(floats, floats, floats),
    st.lists(st.tuples(st.sampled_from(Role), floats), max_size=3).map(tuple),
    st.lists(st.tuples(st.text(), floats), max_size=3).map(tuple),
    floats,
    st.none() | st.text(),
)


@given(outcomes)
def test_outcomes_survive_to_the_last_bit(outcome: Outcome) -> None:
    form = codec(Outcome)
    text, again = form.kept(outcome)
    assert bits(again) == bits(outcome)
    assert bits(form.value(text)) == bits(outcome)


def test_what_a_run_gives_is_what_comes_from_the_cache() -> None:
    for phase in (None, Role.PREFILL):
        outcome = run_probe(SCENARIO, dataclasses.replace(PROBES[3], counted=40, phase=phase))
        assert bits(codec(Outcome).kept(outcome)[1]) == bits(outcome)


def test_numbers_of_numpy_become_plain_ones() -> None:
    outcome = Outcome(Observation(np.float64(0.1), stable=np.bool_(True), requests=np.int64(3)))  # type: ignore[arg-type]
    assert bits(codec(Outcome).kept(outcome)[1]) == bits(Outcome(Observation(0.1, stable=True, requests=3)))


def test_a_type_without_a_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no form in a cache"):
        codec(set[int])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens caches, and closes them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda path: stack.enter_context(contextlib.closing(Cache(path)))


def filled(path: Path, ids: Sequence[bytes]) -> Path:
    cache = Cache(path)
    for run in ids:
        cache.put(run, Kept(f"[{run[0]}]"))
    cache.close()
    return path


def test_what_is_put_is_there_again(path: Path) -> None:
    filled(path, [b"a", b"b"])
    cache = Cache(path)
    cache.put(b"c", Kept("[0]", fault=True))
    assert cache.get([b"a", b"c", b"d"]) == {b"a": Kept("[97]"), b"c": Kept("[0]", fault=True)}
    assert cache.runs == 3
    cache.forget_faults()
    assert cache.get([b"c"]) == {}
    cache.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_same_runs_are_the_same_bytes(path: Path) -> None:
    ids = [bytes([i]) * 32 for i in range(200)]
    found = []
    for order in (ids, ids[::-1]):
        cache = Cache(path)
        cache.note({"question": "q"})
        for number, run in enumerate(order):
            cache.put(run, Kept(f"[{run[0]}]"))
            if number % 7 == 0:
                cache.commit()
        cache.settle()
        found.append(path.read_bytes())
        path.unlink()
    assert found[0] == found[1]


def test_an_empty_file_that_was_made_is_not_left(path: Path) -> None:
    Cache(path).close(unless_empty=True)
    assert not path.exists()
    filled(path, [b"a"])
    Cache(path).close(unless_empty=True)
    assert path.exists()


def refused(path: Path, **how: Any) -> str:  # noqa: ANN401 arguments of Cache
    """Return why a file is refused; it is as it was."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(InputError) as caught, contextlib.closing(Cache(path, **how)) as cache:
        cache.get([bytes([i]) for i in range(97, 110)])
    assert (path.read_bytes() if path.is_file() else None) == before
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_files_that_are_no_caches_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("notes of mine\n")
    assert refused(path, remedy="take another") == "is no cache of dsim; move it away, or give another place"
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    assert refused(path) == "is no cache of dsim; move it away, or give another place"
    path.unlink()
    path.mkdir()
    assert refused(path) == "is no file; move it away, or give another place"
    path.rmdir()
    assert refused(path, read_only=True) == "is not there; give another file"
    assert refused(path.parent / "none" / "x").startswith("cannot be made: its directory is not there")
    filled(path, [b"a"])
    data = bytearray(path.read_bytes())
    data[60:64] = (9).to_bytes(4)
    path.write_bytes(data)
    assert refused(path).startswith("is a cache of another version of dsim: its form is 9, and this dsim's is 1; ")
    path.unlink()
    filled(path, [b"a"])
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    assert refused(path) == "cannot be written: no permission; change that, or give another file"


def test_damage_is_seen(path: Path) -> None:
    filled(path, [bytes([i]) for i in range(97, 110)])
    whole = path.read_bytes()
    place = whole.index(b"[103]")
    path.write_bytes(whole[:place] + b"[104]" + whole[place + 5 :])
    assert refused(path) == "is damaged; give another file"
    path.write_bytes(whole[: len(whole) // 2])
    assert refused(path) == "is damaged; give another file"


def test_one_process_at_a_time(path: Path) -> None:
    first = Cache(path)
    with pytest.raises(InputError, match="is in use: another dsim is running with it; wait until it has ended"):
        Cache(path)
    code = f"from pathlib import Path; from placement.cache import Cache; Cache(Path({str(path)!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is in use: another dsim" in other.stderr
    first.close()
    filled(path, [b"a"])


def test_ids_are_of_everything_that_an_outcome_depends_on() -> None:
    def other(**changes: Any) -> Scenario:  # noqa: ANN401 fields of a scenario
        return dataclasses.replace(SCENARIO, **changes)

    lengths = Uniform(512, 16, low=0.9)
    slower = dataclasses.replace(SPLIT, request_s=SPLIT.request_s + 1e-9)
    scenarios = [
        SCENARIO,
        other(seed=1),
        other(slo=Slo(0.4, 0.1000001)),
        other(target=0.91),
        other(transient=False),
        other(workload=Workload(Poisson(), Fixed(512, 17))),
        other(workload=Workload(Poisson(), lengths)),
        other(options=Options(extrapolate=True)),
        other(profiles={**SCENARIO.profiles, Role.DECODE: slower}),
    ]
    assert len({scenario_id(each) for each in scenarios}) == len(scenarios)
    assert scenario_id(scenario(QUESTION)) == scenario_id(SCENARIO)
    own = scenario_id(SCENARIO)
    probes = [*PROBES, dataclasses.replace(PROBES[0], replication=1), dataclasses.replace(PROBES[0], phase=Role.DECODE)]
    probes.append(dataclasses.replace(PROBES[0], placement=Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1")))
    assert len({run_id(own, probe, "a") for probe in probes}) == len(probes)
    assert run_id(own, PROBES[0], "a") != run_id(own, PROBES[0], "b")


@dataclasses.dataclass(frozen=True)
class Quiet:
    """Something like a placement whose repr does not say all, and which counts as equal all the same."""

    name: str
    pp: int = dataclasses.field(default=1, repr=False, compare=False)


def test_ids_are_of_what_no_repr_says() -> None:
    own = scenario_id(SCENARIO)
    said: dict[int, tuple[object, str]] = {}
    quiet: list[Any] = [Quiet("a"), Quiet("a", 2)]
    probes = [dataclasses.replace(PROBES[0], placement=placement) for placement in quiet]
    assert repr(probes[0]) == repr(probes[1])
    ids = [run_id(own, probe, "a") for probe in probes]
    assert ids[0] != ids[1]
    assert [run_id(own, probe, "a", said) for probe in probes * 2] == ids * 2
    form = codec(Quiet)
    assert form.value(form.text(quiet[1])).pp == 2


def test_ids_do_not_change_as_runs_go_on() -> None:
    """Computed step times are kept in the profile once they are asked for; ids of a later search must not tell."""
    computed = best_profile("qwen2.5-72b", "h20")
    question = Question({Role.COLOCATED: computed}, QUESTION.workload, QUESTION.slo, mode=Mode.COLOCATED)
    before = question_id(question), scenario_id(scenario(question))
    latency = computed.latency[1]
    assert isinstance(latency, AnalyticLatency)
    latency.prefill_s([(77, 0)])
    assert (question_id(question), scenario_id(scenario(question))) == before


def test_ids_are_the_same_in_another_process() -> None:
    code = (
        "from tests.test_placement_runner import *; own = scenario_id(SCENARIO); search(QUESTION); "
        "print(own.hex(), scenario_id(SCENARIO).hex(), question_id(QUESTION), run_id(own, PROBES[0], 'a').hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    own = scenario_id(SCENARIO)
    assert run.stdout.split() == [own.hex(), own.hex(), question_id(QUESTION), run_id(own, PROBES[0], "a").hex()]


def test_requests_that_cannot_be_told_apart_are_not_cached(path: Path, opened: Opened) -> None:
    class Source:
        def trace(self, **how: Any) -> Any:  # noqa: ANN401 as Workload
            return QUESTION.workload.trace(**how)

    question = dataclasses.replace(QUESTION, workload=Source())
    assert search(question).probes > 0
    with pytest.raises(InputError, match="cache: cannot tell runs apart: Source has no content to digest; leave the"):
        search(question, executor=Crew(cache=opened(path)))


class Counting(Executor):
    """Runs calls here and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, function: Callable[..., Any], /, *arguments: object, **named: object) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **named))
        return future


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return search(QUESTION).to_dict()


def test_a_cache_changes_nothing_and_spares_everything(path: Path, answer: dict[str, Any], opened: Opened) -> None:
    cache = Cache(path)
    assert search(QUESTION, executor=Crew(cache=cache)).to_dict() == answer
    cache.close()
    again, executor = opened(path), Counting()
    assert search(QUESTION, executor=Crew(executor, cache=again)).to_dict() == answer
    assert executor.calls == 0
    # Others' runs are taken, and what is new goes to one's own.
    own = opened(path.with_name("own"))
    assert search(QUESTION, executor=Crew(executor, cache=Beside(own, [again]))).to_dict() == answer
    assert (executor.calls, own.runs) == (0, 0)


def test_any_executor_gives_the_same(answer: dict[str, Any]) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert search(QUESTION, executor=threads).to_dict() == answer
    counting = Counting()
    assert search(QUESTION, executor=counting).to_dict() == answer
    # The scenario goes where it is found missing, once for each of the calls sent before that.
    assert answer["probes"] < counting.calls < answer["probes"] + 16


def dies(_scenario: Scenario, probe: Probe) -> float:
    """Kill the process at one rate."""
    if probe.rate_per_s == FATAL:
        os.kill(os.getpid(), signal.SIGKILL)
    return probe.rate_per_s


def dies_once(marker: Path, probe: Probe) -> float:
    """Kill the process at one rate the first time."""
    if probe.rate_per_s == FATAL and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return probe.rate_per_s


def spins(_scenario: Scenario, probe: Probe) -> float:
    """Never end at one rate."""
    while probe.rate_per_s == FATAL:
        pass
    return probe.rate_per_s


def waits(_scenario: Scenario, probe: Probe) -> float:
    threading.Event().wait(0.3)
    return probe.rate_per_s


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    found = LocalPool(1)
    yield found
    found.kill()


def test_a_dead_worker_costs_a_retry(pool: LocalPool, tmp_path: Path) -> None:
    marker: Any = tmp_path / "died"
    assert each(dies_once, marker, PROBES, pool) == [probe.rate_per_s for probe in PROBES]  # type: ignore[arg-type]
    assert marker.exists()


def test_a_run_that_kills_its_worker_again_is_found_out(pool: LocalPool) -> None:
    results = list(Crew(pool).shift(SCENARIO).results(dies, PROBES))
    why = "its worker died twice; is there enough memory?"
    assert results == [Fault(why) if probe.rate_per_s == FATAL else probe.rate_per_s for probe in PROBES]
    assert each(waits, SCENARIO, PROBES[:2], pool) == [1.0, 2.0]
    with pytest.raises(InternalError, match=r"1xP:tp1pp1 \+ 1xD:tp1pp1: its worker died twice"):
        each(run_probe, SCENARIO, PROBES[:1], Mortal(PLACEMENT, 1))


def test_workers_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.runner._pool_of", lambda _jobs: Broken())
    with pytest.raises(InternalError, match="worker processes do not start"):
        LocalPool(2).renew(2)


class Broken(Executor):
    """A pool whose workers die at once."""

    _processes = None

    def submit(self, function: Callable[..., Any], /, *_arguments: object, **_named: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool())
        return future


def test_what_takes_too_long_is_stopped_wherever_it_runs() -> None:
    why = "its runs took more than 0.1 s of CPU time (--time-limit)"
    probes = [Probe(Placement.parse(f"{i}xC:tp1pp1"), rate, 0, 0, 10) for i, rate in ((1, 1.0), (2, FATAL), (3, 2.0))]
    with ThreadPoolExecutor(1) as thread:
        for executor in (None, thread):
            results = Crew(executor, time_limit_s=0.1).shift(SCENARIO).results(spins, probes)
            assert list(results) == [1.0, Fault(why), 2.0]
    # Waiting takes no time of the processor.
    assert list(Crew(time_limit_s=0.1).shift(SCENARIO).results(waits, probes[:1])) == [1.0]


def hungry(_scenario: Scenario, probe: Probe) -> float:
    if probe.rate_per_s == FATAL:
        raise MemoryError
    return probe.rate_per_s


#: A run that ends in time, one that does not, and Python under a profiler, which looks for exceptions of others first.
AFTERWARDS = """
import cProfile
from placement.worker import timed

def spins(scenario, item):
    while item:
        pass

assert not timed(spins, None, 0, 10.0).too_long
assert timed(spins, None, 1, 0.05).too_long
cProfile.Profile().runcall(spins, None, 0)
"""


def test_nothing_is_left_of_a_limit() -> None:
    subprocess.run([sys.executable, "-c", AFTERWARDS], check=True, timeout=60, cwd=Path(__file__).parents[1])


#: A finalizer in which the first exception is lost; one of its own.
FINALIZERS = """
import sys, time
from placement.worker import timed

class Loses:
    def __del__(self):
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass
        time.sleep(0)

class Breaks:
    def __del__(self):
        raise ValueError("of its own")

def spins(scenario, item):
    Loses()
    Breaks()
    while True:
        pass

before = sys.unraisablehook
assert timed(spins, None, 0, 0.05).too_long
assert sys.unraisablehook is before
"""


def test_a_limit_that_is_lost_in_a_finalizer_comes_again_and_nobody_is_told() -> None:
    """Python prints what finalizers raise."""
    told = subprocess.run(
        [sys.executable, "-c", FINALIZERS],
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
        stderr=subprocess.PIPE,
    ).stderr.decode()
    assert "of its own" in told
    assert "TimeOver" not in told


def test_a_run_without_memory_is_no_crash() -> None:
    with ThreadPoolExecutor(1) as thread:
        for executor in (None, thread):
            results = Crew(executor).shift(SCENARIO).results(hungry, PROBES[1:4])
            assert list(results) == [2.0, Fault("it ran out of memory"), 4.0]


def test_a_limit_that_nothing_reaches_changes_nothing(answer: dict[str, Any]) -> None:
    assert search(QUESTION, executor=Crew(time_limit_s=60)).to_dict() == answer


@pytest.mark.usefixtures("no_gc_callbacks")
def test_where_all_take_too_long_all_have_failed() -> None:
    result = search(QUESTION, executor=Crew(time_limit_s=1e-6))
    assert {trial.state for trial in result.trials} == {State.FAILED}
    assert result.best.overall is None
    assert {trial.reasons for trial in result.trials} == {
        ("its runs took more than 1e-06 s of CPU time (--time-limit)",)
    }


class Mortal(Counting):
    """Workers that die of one placement."""

    code: str | None = None

    def __init__(self, fatal: Placement, jobs: int) -> None:
        super().__init__()
        self.fatal = fatal
        self.jobs = jobs

    def submit(self, function: Callable[..., Any], /, *arguments: object, **named: object) -> Future[Any]:
        if arguments[3].placement != self.fatal:  # type: ignore[attr-defined]
            return super().submit(function, *arguments, **named)
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool())
        return future

    def has_died(self, error: BaseException) -> bool:
        return isinstance(error, BrokenProcessPool)

    def explained(self, error: BaseException) -> BaseException:
        return error

    def renew(self, jobs: int) -> None:
        pass


@pytest.mark.parametrize("label", ["1xP:tp1pp1 + 1xD:tp1pp1", "1xP:tp1pp1 + 2xD:tp1pp1", "2xC:tp1pp1 (orca)"])
def test_only_the_candidate_that_kills_its_workers_fails(
    label: str, path: Path, answer: dict[str, Any], opened: Opened
) -> None:
    (fatal,) = [placement for placement in candidates(QUESTION) if placement.label == label]
    # As if it were not there, whoever the others share a prefill pool with.
    others = [placement for placement in candidates(QUESTION) if placement != fatal]
    expected, _ = search_among(QUESTION, others)
    results = []
    cache = opened(path)
    for executor in (Mortal(fatal, 1), Mortal(fatal, 5), Counting()):
        results.append(search(QUESTION, executor=Crew(executor, cache=cache)))
    assert results[0].to_dict() == results[1].to_dict() == results[2].to_dict()
    failures = [trial for trial in results[0].trials if trial.state is State.FAILED]
    assert [(trial.placement, trial.reasons) for trial in failures] == [
        (fatal, ("its worker died twice; is there enough memory?",))
    ]
    best, wanted = results[0].best.overall, expected.best.overall
    assert best is not None
    assert wanted is not None
    assert best.placement == wanted.placement
    # Tried again, where nothing kills it, it is as if nothing had happened.
    cache.forget_faults()
    assert search(QUESTION, executor=Crew(cache=cache)).to_dict() == answer


def test_a_worker_of_other_code_is_refused() -> None:
    pool = Mortal(PLACEMENT, 2)
    pool.code = code_id()
    probe = dataclasses.replace(PROBES[0], placement=Placement.parse("1xC:tp1pp1"))
    assert Runner(SCENARIO, executor=pool).run([probe], stage="") == [run_probe(SCENARIO, probe)]
    pool.code = "other"
    with pytest.raises(InputError, match=r"--dask: a worker has another build of dsim .*; install the same on all"):
        Runner(SCENARIO, executor=pool).run([probe], stage="")


def test_a_failed_pool_alone_says_nothing_about_the_pool() -> None:
    outcome = failed(SCENARIO, dataclasses.replace(PROBES[0], phase=Role.PREFILL), Fault("no"))
    assert outcome.failure == "no"
    assert SCENARIO.target - 0.01 < outcome.observation.attainment < SCENARIO.target
    assert failed(SCENARIO, PROBES[0], Fault("no")).observation.attainment == 0


def test_all_of_a_candidate_fail_that_fails_once() -> None:
    runner = Runner(SCENARIO, executor=Crew(Mortal(PLACEMENT, 2)))
    other = dataclasses.replace(PROBES[0], placement=Placement.parse("1xC:tp1pp1"))
    first, second = runner.run([PROBES[0], other], stage="")
    assert first.failure is not None
    assert second.failure is None
    assert list(runner.faults) == [PLACEMENT]
    assert runner.run([PROBES[1]], stage="")[0].failure == first.failure
    assert runner.probes == 3


def shards(parts: int, executors: Sequence[Executor | None] = ()) -> list[Ledger]:
    found = []
    for part in range(1, parts + 1):
        shard = Shard(part, parts)
        executor = executors[part - 1] if executors else None
        found.append(search_shard(QUESTION, shard, executor=executor)[1])
    return found


def test_shards_give_the_answer_of_one_search(path: Path, answer: dict[str, Any], opened: Opened) -> None:
    caches = [opened(path.with_name(f"{part}.sqlite")) for part in range(3)]
    ledgers = shards(3, [Crew(cache=cache) for cache in caches])
    fresh = Counting()
    merged = merge(QUESTION, ledgers, executor=Crew(fresh, cache=Beside(None, caches)))
    assert merge(QUESTION, ledgers[::-1]).to_dict() == merged.to_dict()
    assert [Ledger.of_text(ledger.to_text()) for ledger in ledgers] == ledgers
    found = merged.to_dict()
    assert {trial["placement"] for trial in found["trials"]} == {trial["placement"] for trial in answer["trials"]}
    assert len(found["trials"]) == len(answer["trials"])
    for kind in ("disaggregated", "colocated"):
        here, there = found["best"][kind], answer["best"][kind]
        assert here["placement"] == there["placement"]
        low, high = (here["goodput_per_gpu_per_s"][limit] for limit in ("low", "high"))
        assert low < there["goodput_per_gpu_per_s"]["best"] < high
    ratio = found["best"]["ratio"]
    assert ratio["low"] < answer["best"]["ratio"]["best"] < ratio["high"]
    assert found["most_total"]["placement"] == answer["most_total"]["placement"]
    # What the shards have run is not run again.
    assert fresh.calls < 0.1 * answer["probes"]


def test_the_best_of_the_shards_is_in_the_merge() -> None:
    """Also where the short runs of the merge would drop it."""
    ledgers = shards(3)
    merged = merge(QUESTION, ledgers)
    shown = {trial.placement for trial in merged.complete}
    dropped = next(t for ledger in ledgers for t in ledger.trials if t.goodput and t.placement not in shown)
    best = max(t.goodput.rate_per_s.best / t.num_gpus for t in merged.complete if t.goodput)
    assert dropped.goodput is not None
    scale = 1.01 * best * dropped.num_gpus / dropped.goodput.rate_per_s.best
    better = dataclasses.replace(
        dropped, goodput=dataclasses.replace(dropped.goodput, rate_per_s=dropped.goodput.rate_per_s * scale)
    )
    told = [
        dataclasses.replace(ledger, trials=tuple(better if t is dropped else t for t in ledger.trials))
        for ledger in ledgers
    ]
    again = merge(QUESTION, told)
    assert {trial.placement for trial in again.complete} == {*shown, dropped.placement}
    assert again.question == merged.question == QUESTION.to_dict()


def test_every_candidate_is_in_one_shard() -> None:
    everyone = candidates(QUESTION)
    for parts in (1, 2, 5, 40):
        found = [placement for part in range(parts) for placement in Shard(part + 1, parts).share(everyone)]
        assert sorted(found, key=str) == sorted(everyone, key=str)


def test_parts_that_are_no_whole_are_refused() -> None:
    def ledger(part: int, parts: int, question: str = question_id(QUESTION), trials: tuple[Trial, ...] = ()) -> Ledger:
        return Ledger(Shard(part, parts), question, trials, {}, 0, 0)

    def why(*ledgers: Ledger) -> str:
        with pytest.raises(InputError) as caught:
            merge(QUESTION, ledgers)
        return str(caught.value)

    assert why() == "--merge: has no shards; give the directories that --shard wrote to"
    assert why(ledger(1, 3), ledger(3, 3)).startswith("--merge: lacks 1 of 3 shards: 2/3; run them with --shard")
    assert why(ledger(1, 9)).startswith("--merge: lacks 8 of 9 shards: 2/9, 3/9, 4/9, 5/9, 6/9 and more; ")
    assert why(ledger(1, 1), ledger(1, 1)) == "--merge: has shard 1/1 twice; give every directory once"
    assert why(ledger(1, 1), ledger(1, 2)).startswith("--merge: has shards of 1 and 2 parts; ")
    assert why(ledger(1, 1, "other")).startswith("--merge: has shard 1/1 of another search, or by another build of ")
