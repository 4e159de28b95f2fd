"""Workloads: the same requests at every rate and in every block, with the lengths they promise."""

from __future__ import annotations

import hashlib
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.trace import Trace
from dsim.workload import (
    PRESETS,
    Arrivals,
    ClosedLoop,
    Constant,
    Empirical,
    Fixed,
    Gamma,
    Lengths,
    LogNormal,
    Poisson,
    Replayed,
    Uniform,
    Workload,
    cv_from_median,
    parse_arrivals,
    parse_workload,
    preset,
    replication_seed,
    stream,
)

CONTEXT = 2048


def table_of(rows: list[tuple[int, int, int]]) -> Empirical:
    prompt, output, cached = np.array(rows, dtype=np.int64).T
    return Empirical(prompt, output, cached)


arrivals: st.SearchStrategy[Arrivals] = st.one_of(
    st.just(Poisson()),
    st.just(Constant()),
    st.builds(Gamma, cv=st.floats(0.1, 5)),
    st.lists(st.floats(0, 100), min_size=2, max_size=20)
    .map(sorted)
    .filter(lambda times: times[-1] - times[0] > 1e-3)
    .map(lambda times: Replayed(np.array(times))),
)
lengths: st.SearchStrategy[Lengths] = st.one_of(
    st.sampled_from(PRESETS).map(preset),
    st.builds(Fixed, st.integers(1, 1000), st.integers(1, 1000)),
    st.builds(Uniform, st.integers(1, 1500), st.integers(1, 1500), low=st.floats(0, 0.8)),
    st.builds(LogNormal, st.floats(1, 900), st.floats(0, 3), st.floats(1, 900), st.floats(0, 3)),
    st.just(table_of([(5, 1, 4), (100, 30, 0), (2000, 48, 512)])),
)
workloads = st.builds(Workload, arrivals, lengths)
seeds = st.integers(0, 2**32 - 1)


def columns(trace: Trace) -> tuple[np.ndarray, ...]:
    return (trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.cached_prompt_tokens)


def assert_same(a: Trace, b: Trace) -> None:
    for left, right in zip(columns(a), columns(b), strict=True):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


@given(workloads, seeds, st.sampled_from([1, 7, 100, 4095, 4096, 4097, 9000]), st.floats(0.01, 1000))
@settings(max_examples=40)
def test_any_blocks_are_the_one_trace(workload: Workload, seed: int, block: int, rate: float) -> None:
    count = min(3, -(-9000 // block)) if block > 100 else 100
    blocks = workload.blocks(rate_per_s=rate, seed=seed, context_tokens=CONTEXT, block=block)
    parts = [columns(part) for part in itertools.islice(blocks, count)]
    joined = Trace(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    assert_same(joined, workload.trace(rate_per_s=rate, num_requests=count * block, seed=seed, context_tokens=CONTEXT))


@given(workloads, seeds, st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=40)
def test_a_shorter_trace_is_the_beginning_of_a_longer_one(workload: Workload, seed: int, m: int, n: int) -> None:
    short, long = sorted((m, n))
    a = workload.trace(rate_per_s=1, num_requests=short, seed=seed, context_tokens=CONTEXT)
    b = workload.trace(rate_per_s=1, num_requests=long, seed=seed, context_tokens=CONTEXT)
    assert_same(a, Trace(*(column[:short] for column in columns(b))))


@given(workloads, seeds, st.floats(0.01, 1000))
@settings(max_examples=40)
def test_every_rate_sees_the_same_requests(workload: Workload, seed: int, rate: float) -> None:
    unit = workload.trace(rate_per_s=1, num_requests=500, seed=seed, context_tokens=CONTEXT)
    scaled = workload.trace(rate_per_s=rate, num_requests=500, seed=seed, context_tokens=CONTEXT)
    assert scaled.arrival_s.tobytes() == (unit.arrival_s / rate).tobytes()
    for left, right in zip(columns(unit)[1:], columns(scaled)[1:], strict=True):
        assert left.tobytes() == right.tobytes()


@given(workloads, seeds, st.integers(1001, 4096))
@settings(max_examples=40)
def test_every_request_fits_the_context(workload: Workload, seed: int, context: int) -> None:
    try:
        trace = workload.trace(rate_per_s=1, num_requests=2000, seed=seed, context_tokens=context)
    except InputError as error:
        # Rows and exact lengths that somebody wrote are not silently replaced.
        assert isinstance(workload.lengths, Fixed | Empirical) or "practically never" in str(error)  # noqa: PT017
    else:
        assert (trace.prompt_tokens + trace.output_tokens).max() <= context


def test_arrivals_do_not_depend_on_lengths() -> None:
    a = Workload(Poisson(), Fixed(1, 1)).trace(rate_per_s=3, num_requests=5000, seed=4, context_tokens=CONTEXT)
    b = Workload(Poisson(), preset("sharegpt")).trace(rate_per_s=3, num_requests=5000, seed=4, context_tokens=CONTEXT)
    assert a.arrival_s.tobytes() == b.arrival_s.tobytes()


@pytest.mark.parametrize(
    ("process", "cv"), [(Poisson(), 1.0), (Gamma(0.5), 0.5), (Gamma(2.0), 2.0), (Constant(), 0.0)], ids=str
)
def test_gaps_have_the_mean_and_the_spread_they_promise(process: Arrivals, cv: float) -> None:
    trace = Workload(process, Fixed(1, 1)).trace(rate_per_s=8, num_requests=400_000, seed=1, context_tokens=2)
    gaps = np.diff(trace.arrival_s)
    # Five standard errors of the mean; the spread of heavy tails converges more slowly.
    assert gaps.mean() * 8 == pytest.approx(1, abs=5 * cv / 400_000**0.5 + 1e-9)
    assert gaps.std() * 8 == pytest.approx(cv, rel=0.03, abs=1e-9)


def test_constant_gaps_are_exact() -> None:
    trace = Workload(Constant(), Fixed(1, 1)).trace(rate_per_s=4, num_requests=10_000, seed=0, context_tokens=2)
    assert trace.arrival_s.tolist() == [(i + 1) / 4 for i in range(10_000)]


def test_replayed_arrivals_are_the_traces_own_and_repeat_one_mean_gap_later() -> None:
    times = np.array([0.1, 0.2, 0.2, 1.3])
    workload = Workload(Replayed(times), Fixed(1, 1))
    trace = workload.trace(num_requests=8, seed=0, context_tokens=2)
    assert trace.arrival_s[:4].tobytes() == times.tobytes()
    assert trace.arrival_s[4:] == pytest.approx(times + 1.2 + 0.4)
    scaled = workload.trace(rate_per_s=10, num_requests=4, seed=0, context_tokens=2)
    assert 3 / (scaled.arrival_s[-1] - scaled.arrival_s[0]) == pytest.approx(10)


def test_replayed_arrivals_of_a_million_stay_exact_and_at_their_rate() -> None:
    workload = Workload(Replayed(np.array([0.0, 1.0, 3.0])), Fixed(1, 1))
    trace = workload.trace(num_requests=300_000, seed=0, context_tokens=2)
    assert trace.arrival_s[-3:].tolist() == [4.5 * 99_999 + t for t in (0.0, 1.0, 3.0)]


# What each preset must reach. Sources: arXiv 2401.09670v3, figure 7 (means); the lengths of 1600 requests of a real run
# for ShareGPT's shape, where the mean output is 186 beside figure 7's 200.3.
PRESET_MEANS = {
    "sharegpt": ((755.5, 0.02), (200.3, 0.05)),
    "humaneval": ((171.3, 0.01), (98.2, 0.01)),
    "longbench": ((1738.3, 0.01), (90.7, 0.01)),
}


def drawn(name: str, count: int = 400_000) -> tuple[np.ndarray, np.ndarray]:
    trace = Workload(Poisson(), preset(name)).trace(rate_per_s=1, num_requests=count, seed=0, context_tokens=CONTEXT)
    return trace.prompt_tokens, trace.output_tokens


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_means(name: str) -> None:
    for column, (mean, tolerance) in zip(drawn(name), PRESET_MEANS[name], strict=True):
        assert column.mean() == pytest.approx(mean, rel=tolerance)
    of_workload = Workload(Poisson(), preset(name)).mean_tokens(context_tokens=CONTEXT)
    assert of_workload[:2] == pytest.approx([column.mean() for column in drawn(name)], rel=0.01)


def test_sharegpt_has_the_shape_of_the_real_runs() -> None:
    prompt, output = drawn("sharegpt")
    assert prompt.mean() == pytest.approx(759, rel=0.01)
    assert np.quantile(prompt, [0.5, 0.9]) == pytest.approx([680, 1543], rel=0.015)
    assert output.mean() == pytest.approx(186, rel=0.04)
    assert np.quantile(output, [0.5, 0.9]) == pytest.approx([77, 507], rel=0.05)
    assert (prompt + output).max() < 2048


def test_sharegpt_keeps_prompt_and_output_together() -> None:
    prompt, output = drawn("sharegpt")
    ranks = [np.argsort(np.argsort(column + np.linspace(0, 0.5, len(column)))) for column in (prompt, output)]
    # The sample: Spearman -0.121; prompt + output above 1500 / 1800 / 1900 / 2000 tokens: 19.5 / 8.6 / 5.1 / 1.4 %.
    centred = [rank - rank.mean() for rank in ranks]
    spearman = (centred[0] @ centred[1]) / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
    assert spearman == pytest.approx(-0.121, abs=0.02)
    total = prompt + output
    shares = [(total > tokens).mean() for tokens in (1500, 1800, 1900, 2000)]
    assert shares == pytest.approx([0.195, 0.0862, 0.0512, 0.0138], abs=0.0125)


def test_longbench_prompts_fill_the_context() -> None:
    prompt, output = drawn("longbench")
    assert np.median(prompt) > 1900
    assert (prompt + output).max() <= 2040


def test_exact_means() -> None:
    assert Fixed(512, 64).mean_tokens(context_tokens=CONTEXT) == (512, 64, 0)
    assert Uniform(512, 64, low=0.8).mean_tokens(context_tokens=CONTEXT) == ((410 + 512) / 2, (51 + 64) / 2, 0)
    assert table_of([(10, 2, 4), (20, 4, 0)]).mean_tokens(context_tokens=CONTEXT) == (15, 3, 2)


@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0, 1), st.floats(1, 2), seeds)
def test_uniform_lengths_stay_in_their_range(prompt: int, output: int, low: float, high: float, seed: int) -> None:
    uniform = Uniform(prompt, output, low=low, high=high)
    tokens = uniform.draw(stream(seed, "lengths"), 500, context_tokens=20_000)
    for column, nominal in ((tokens.prompt, prompt), (tokens.output, output)):
        least, most = uniform.range_of(nominal)
        assert max(1, round(low * nominal)) == least <= column.min() <= column.max() <= most == round(high * nominal)


def test_lognormal_has_the_mean_and_cv_before_the_cut_and_less_after() -> None:
    lognormal = LogNormal(700, 1.2, 200, 1.5)
    free = lognormal.draw(stream(1, "lengths"), 400_000, context_tokens=10**8)
    for column, mean, cv in ((free.prompt, 700, 1.2), (free.output, 200, 1.5)):
        assert column.mean() == pytest.approx(mean, rel=0.01)
        assert column.std() / column.mean() == pytest.approx(cv, rel=0.03)
    cut = lognormal.mean_tokens(context_tokens=CONTEXT)
    assert cut.prompt < 700
    assert cut.output < 200
    assert cv_from_median(mean=700, median=500) == pytest.approx(((700 / 500) ** 2 - 1) ** 0.5)


def test_empirical_rows_are_drawn_whole() -> None:
    rows = [(5, 1, 4), (100, 30, 0), (2000, 48, 512)]
    trace = Workload(Poisson(), table_of(rows)).trace(rate_per_s=1, num_requests=9000, seed=2, context_tokens=CONTEXT)
    found = set(zip(*(column.tolist() for column in columns(trace)[1:]), strict=True))
    assert found == set(rows)


def test_streams_are_numpys_documented_ones() -> None:
    for name, code in (("arrivals", 1), ("lengths", 2), ("routing", 3)):
        expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, code]))).random(4)
        assert stream(5, name).random(4).tobytes() == expected.tobytes()


@given(seeds, seeds, st.integers(0, 2**32 - 1))
def test_streams_differ_by_seed_name_and_index(a: int, b: int, index: int) -> None:
    firsts = {stream(seed, name, index).random() for seed in {a, b} for name in ("arrivals", "lengths", "users")}
    assert len(firsts) == 3 * len({a, b})
    assert stream(a, "users", index).random() != stream(a, "users", (index + 1) % 2**32).random()


def test_replication_seeds_are_all_different() -> None:
    found = {replication_seed(seed, r) for seed in range(20) for r in range(200)}
    assert len(found) == 4000


def digest() -> str:
    """A hash of requests of every kind."""
    found = hashlib.sha256()
    drawn_lengths: tuple[Lengths, ...] = (
        *map(preset, PRESETS),
        LogNormal(700, 1.2, 200, 1.5),
        Uniform(512, 64, low=0.8),
    )
    processes: tuple[Arrivals, ...] = (Poisson(), Gamma(2.0))
    for process, drawn_from in itertools.product(processes, drawn_lengths):
        workload = Workload(process, drawn_from)
        for column in columns(workload.trace(rate_per_s=3.7, num_requests=5000, seed=11, context_tokens=CONTEXT)):
            found.update(column.tobytes())
    found.update(repr(first(ClosedLoop(3, preset("sharegpt"), num_requests=9), 2)).encode())
    return found.hexdigest()


def test_same_seed_same_bytes_in_a_fresh_process() -> None:
    code = "import sys; from tests.test_workload import digest; sys.stdout.write(digest())"
    root = Path(__file__).parents[1]
    fresh = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert fresh.stdout == digest()


def test_a_million_requests_take_less_than_a_second() -> None:
    workload = Workload(Poisson(), preset("sharegpt"))
    workload.trace(rate_per_s=4, num_requests=1, seed=1, context_tokens=CONTEXT)
    start = time.process_time()
    workload.trace(rate_per_s=4, num_requests=1_000_000, seed=1, context_tokens=CONTEXT)
    assert time.process_time() - start < 1


def test_import_needs_neither_pandas_nor_scipy() -> None:
    code = "import sys, dsim.workload; sys.exit(any(m in sys.modules for m in ('pandas', 'scipy', 'simpy', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def first(loop: ClosedLoop, user: int, count: int = 200) -> list[tuple[int, int]]:
    return list(itertools.islice(loop.user_lengths(user, seed=3, context_tokens=CONTEXT), count))


def test_each_user_asks_the_same_whatever_the_others_do() -> None:
    few = ClosedLoop(2, preset("sharegpt"), num_requests=50)
    many = ClosedLoop(500, preset("sharegpt"), num_requests=5000, stagger_s=0.25)
    assert first(few, 1) == first(many, 1)
    assert first(few, 0) != first(few, 1)
    assert [many.start_s(user) for user in (0, 1, 4)] == [0.0, 0.25, 1.0]
    assert all(type(tokens) is int for pair in first(few, 0) for tokens in pair)
    assert few.mean_tokens(context_tokens=CONTEXT) == preset("sharegpt").mean_tokens(context_tokens=CONTEXT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fixed:512,64", Fixed(512, 64)),
        ("fixed: 512 , 64", Fixed(512, 64)),
        ("uniform:512,64,0.8", Uniform(512, 64, low=0.8)),
        ("uniform:512,64,0.8,1.2", Uniform(512, 64, low=0.8, high=1.2)),
        ("lognormal:prompt=700/1.2,output=200/1.5", LogNormal(700, 1.2, 200, 1.5)),
        ("lognormal:output=200/1.5,prompt=700/cv=1.2", LogNormal(700, 1.2, 200, 1.5)),
        (
            "lognormal:prompt=700/median=500,output=200/1.5",
            LogNormal(700, cv_from_median(mean=700, median=500), 200, 1.5),
        ),
    ],
)
def test_workloads_as_people_write_them(text: str, expected: Lengths) -> None:
    assert parse_workload(text) == expected


def test_presets_and_arrivals_as_people_write_them() -> None:
    assert [parse_workload(name) for name in PRESETS] == [preset(name) for name in PRESETS]
    assert [parse_arrivals(text) for text in ("poisson", "constant", "gamma:cv=2")] == [
        Poisson(),
        Constant(),
        Gamma(2.0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharegtp", "--workload: 'sharegtp' is unknown; did you mean 'sharegpt'?"),
        ("", "--workload: '' is unknown; expected one of sharegpt,"),
        ("lognorml:prompt=7/1,output=2/1", "did you mean 'lognormal'?"),
        ("x" * 5000, "--workload: 'xxx"),
        ("fixed", "as in fixed:512,64"),
        ("fixed:512", "must have 2 parts"),
        ("fixed:512,64,3", "must have 2 parts"),
        ("fixed:512,0", "output_tokens=0 must be between 1 and"),
        ("fixed:-5,64", "'-5' must be a whole number"),
        ("fixed:5.5,64", "'5.5' must be a whole number"),
        ("fixed:1e3,64", "'1e3' must be a whole number"),
        ("fixed:nan,64", "'nan' must be a whole number"),
        ("fixed:99999999999999999999,64", "must be a whole number"),
        ("fixed:999999999999,64", "must be between 1 and"),
        ("uniform:512,64", "must have 3 or 4 parts"),
        ("uniform:512,64,2,1", "low=2.0 must be at most high=1.0"),
        ("uniform:512,64,nan", "'nan' must be a number"),
        ("lognormal:prompt=700/1.2", "must have 2 parts"),
        ("lognormal:prompt=700/1.2,prompt=700/1.2", "appears twice"),
        ("lognormal:prompt=700/1.2,outptu=200/1", "unknown key 'outptu'"),
        ("lognormal:prompt=700,output=200/1", "must have 2 parts"),
        ("lognormal:prompt=700/median=800,output=200/1", "median=800.0 must be > 0 and at most the mean"),
        ("lognormal:prompt=700/mode=8,output=200/1", "unknown key 'mode'"),
        ("lognormal:prompt=0/1,output=200/1", "prompt_mean=0.0 must be between"),
        ("lognormal:prompt=inf/1,output=200/1", "'inf' must be a number"),
        ("lognormal:prompt=1e999/1,output=200/1", "prompt_mean=inf must be between"),
        ("no/such/file.csv", "no/such/file.csv: cannot be read: No such file or directory"),
    ],
)
def test_malformed_workloads_give_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_workload(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "--arrivals: 'poison' is unknown; did you mean 'poisson'?"),
        ("gamma", "cv is missing; as in gamma:cv=2"),
        ("gamma:cv=0", "cv=0.0 must be between"),
        ("gamma:cv=-1", "'-1' must be a number"),
        ("gamma:cv=nan", "'nan' must be a number"),
        ("gamma:shape=2", "unknown key 'shape'"),
        ("missing.csv", "cannot be read"),
    ],
)
def test_malformed_arrivals_give_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arrivals(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def sharegpt_trace(**changes: float) -> Trace:
    arguments = {"num_requests": 5, "seed": 0, "context_tokens": CONTEXT, "rate_per_s": 1.0} | changes
    return Workload(Poisson(), preset("sharegpt")).trace(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sharegpt_trace(rate_per_s=-1), "rate: -1 must be between"),
        (lambda: sharegpt_trace(rate_per_s=0), "rate: 0 must be between"),
        (lambda: sharegpt_trace(rate_per_s=float("nan")), "rate: nan must be between"),
        (lambda: sharegpt_trace(rate_per_s=float("inf")), "rate: inf must be between"),
        (lambda: sharegpt_trace(num_requests=0), "requests: 0 must be >= 1"),
        (lambda: sharegpt_trace(seed=-1), "seed: -1 must be a whole number"),
        (lambda: sharegpt_trace(seed=2**32), "seed: 4294967296 must be a whole number"),
        (lambda: sharegpt_trace(seed=1.5), "seed: 1.5 must be a whole number"),
        (lambda: sharegpt_trace(context_tokens=1), "context_tokens: 1 must be >= 2"),
        (lambda: sharegpt_trace(context_tokens=2), "practically never fit the model's context of 2"),
        (
            lambda: Workload(Poisson(), Fixed(1, 1)).trace(num_requests=5, seed=0, context_tokens=2),
            "rate: must be given; only replayed arrivals have a rate of their own",
        ),
        (
            lambda: Workload(Poisson(), Fixed(2000, 49)).mean_tokens(context_tokens=CONTEXT),
            "prompt_tokens + output_tokens=2049 must be at most the model's context of 2048",
        ),
        (
            lambda: table_of([(1, 1, 0), (2000, 60, 0)]).mean_tokens(context_tokens=CONTEXT),
            "prompt_tokens + output_tokens=2060 must be at most",
        ),
        (lambda: table_of([(5, 1, 5)]), "cached_prompt_tokens must be >= 0 and below prompt_tokens"),
        (lambda: Replayed(np.array([1.0])), "must hold at least 2 arrivals"),
        (lambda: Replayed(np.array([1.0, 1.0])), "must not all be equal"),
        (lambda: Replayed(np.array([2.0, 1.0])), "non-decreasing"),
        (lambda: ClosedLoop(0, Fixed(1, 1), num_requests=1), "users=0 must be between"),
        (lambda: ClosedLoop(4, Fixed(1, 1), num_requests=3), "num_requests=3 must be at least 4"),
        (lambda: ClosedLoop(1, Fixed(1, 1), num_requests=1, stagger_s=-1), "stagger_s=-1 must be finite"),
        (lambda: first(ClosedLoop(1, Fixed(1, 1), num_requests=1), 1), "user=1 must be >= 0 and below 1"),
        (
            lambda: first(ClosedLoop(1, table_of([(5, 1, 2)]), num_requests=1), 0),
            "cannot carry cached_prompt_tokens",
        ),
        (lambda: preset("humanevil"), "did you mean 'humaneval'?"),
        (lambda: stream(0, "users", -1), "index=-1 must be >= 0"),
    ],
)
def test_values_out_of_range_give_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_users_who_think_pause_for_exponential_times() -> None:
    loop = ClosedLoop(3, Fixed(1, 1), num_requests=9, turnaround_s=0.5, think_time_s=4.0)
    pauses = np.array(list(itertools.islice(loop.user_pauses_s(1, seed=7), 20_000)))
    assert pauses.min() >= 0.5
    # Mean and standard deviation of an exponential are equal; four standard errors.
    assert abs(pauses.mean() - 4.5) < 4 * 4.0 / math.sqrt(20_000)
    assert abs(pauses.std() - 4.0) < 4 * 4.0 * math.sqrt(2 / 20_000)
    # What a user does depends on the seed and that user alone.
    more = ClosedLoop(50, Fixed(1, 1), num_requests=99, turnaround_s=0.5, think_time_s=4.0)
    assert list(itertools.islice(more.user_pauses_s(1, seed=7), 100)) == pauses[:100].tolist()
    assert next(loop.user_pauses_s(2, seed=7)) != pauses[0]
    assert list(itertools.islice(ClosedLoop(1, Fixed(1, 1), num_requests=1).user_pauses_s(0, seed=7), 3)) == [0, 0, 0]
    with pytest.raises(InputError, match="think_time_s=-1"):
        ClosedLoop(1, Fixed(1, 1), num_requests=1, think_time_s=-1)
