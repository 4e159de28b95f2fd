"""Sizing: the fewest GPUs, checked by brute force, by hand, and by simulating what it says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.catalog import find_gpu
from dsim.cli.plans import not_enough
from dsim.errors import InputError
from dsim.options import Options, Window
from dsim.pools import Placement, Policy, Role
from dsim.simulate import simulate
from dsim.workload import ClosedLoop, Fixed, Poisson, Uniform, Workload, replication_seed
from placement import size as sizing
from placement.goodput import Goodput
from placement.objective import prices_of
from placement.result import Best, SearchResult, State, Trial
from placement.search import Question, search
from placement.size import (
    Block,
    Copies,
    Population,
    Rate,
    Sizing,
    _Sizer,
    copies_to_spare,
    cover,
    most_served,
    num_nodes,
    size,
    solve_law,
)
from placement.space import Cluster
from placement.statistics import Interval
from tests.tiny import tiny_question

GPU = "a100-80g"


def block(num_gpus: int, low: float, *, best: float | None = None, weight: int | None = None) -> Block:
    """A placement of so many GPUs that serves so much."""
    serves = Interval(low, best or low, best or low)
    placement = Placement.parse(f"{num_gpus}xC:tp1pp1")
    goodput = Goodput(serves, (), (low, low))
    return Block(Trial(placement, State.COMPLETE, goodput=goodput), serves, weight or num_gpus)


def totals(chosen: dict[Block, int]) -> tuple[int, float]:
    """Weight and what it serves."""
    weight = sum(b.weight * n for b, n in chosen.items())
    return weight, sum(b.serves.low * n for b, n in chosen.items())


def test_a_cover_by_hand() -> None:
    large, middle, small = block(8, 22.0), block(5, 13.0), block(1, 2.0)
    assert cover([large, middle, small], 40.0) == {large: 2}
    # 22 + 13 + 2 = 37 on 14 GPUs; 13 + 13 + 4 x 2 = 34 on 14 and 22 + 6 x 2 = 34 on 14.
    assert cover([large, middle, small], 37.0) == {large: 1, middle: 1, small: 1}
    assert cover([large, middle, small], 2.0) == {small: 1}
    assert cover([], 1.0) == {}
    assert cover([block(1, 0.0)], 1.0) == {}
    weight, served = totals(cover([large, middle, small], 22e6))
    assert weight == 8_000_000
    assert served == pytest.approx(22e6)


def test_a_cover_by_the_estimate_needs_no_more() -> None:
    blocks = [block(8, 22.0, best=24.0), block(1, 2.0, best=2.5)]
    assert totals(cover(blocks, 48.0, serve="best"))[0] == 16
    assert totals(cover(blocks, 48.0))[0] == 18


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 400)), min_size=1, max_size=4),
    st.integers(1, 2500),
)
def test_a_cover_is_what_brute_force_finds(kinds: list[tuple[int, int]], amount: int) -> None:
    blocks = [block(gpus, float(serves)) for gpus, serves in kinds]
    weight, served = totals(cover(blocks, amount))
    assert served >= amount * (1 - 1e-9)
    # most[w]: what w GPUs serve at most.
    most = [0]
    while most[-1] < amount:
        best = [most[len(most) - gpus] + serves for gpus, serves in kinds if gpus <= len(most)]
        most.append(max([most[-1], *best]))
    assert weight == len(most) - 1
    assert served == most[-1]


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 100)), min_size=1, max_size=5),
    st.lists(st.floats(0.1, 5000), min_size=2, max_size=6),
)
def test_more_requests_never_need_fewer_gpus(kinds: list[tuple[int, float]], amounts: list[float]) -> None:
    blocks = [block(*kind) for kind in kinds]
    needed = [totals(cover(blocks, amount))[0] for amount in sorted(amounts)]
    assert needed == sorted(needed)


@given(st.floats(1, 1e4), st.floats(0, 60), st.floats(0.05, 5), st.floats(0, 2))
def test_the_law_holds_where_it_is_solved(users: float, think_s: float, idle_s: float, growth: float) -> None:
    def e2e(rate: float) -> Interval:
        seconds = idle_s * (1 + growth * rate)
        return Interval(seconds, seconds, seconds)

    rate, seen = solve_law(e2e, users=users, think_time_s=think_s, start_per_s=1.0)
    assert rate * (think_s + seen.best) == pytest.approx(users, rel=0.02)


@given(st.dictionaries(st.integers(1, 8), st.integers(1, 12), min_size=1), st.integers(0, 7))
def test_nodes_hold_the_instances(counts: dict[int, int], spare: int) -> None:
    """At least the GPUs' worth, at most what any greedy packing may waste, and none without an instance."""
    nodes = num_nodes(counts, 8, spare=spare)
    gpus = sum(size * count for size, count in counts.items())
    assert -(-max(gpus - spare, 0) // 8) <= nodes <= sum(counts.values())
    # One instance after the other, the largest first, each where it fits first.
    rooms = [spare]
    for wanted in sorted(itertools.chain.from_iterable([s] * n for s, n in counts.items()), reverse=True):
        place = next((i for i, room in enumerate(rooms) if room >= wanted), None)
        if place is None:
            rooms.append(8 - wanted)
        else:
            rooms[place] -= wanted
    assert abs(nodes - (len(rooms) - 1)) <= 1


def pairs(notation: str, cluster: Cluster) -> Block:
    """A disaggregated placement that serves as much as its GPUs, as it lies in a cluster."""
    placement = cluster.on(Placement.parse(notation))
    serves = Interval(*[float(placement.num_gpus)] * 3)
    return Block(Trial(placement, State.COMPLETE, goodput=Goodput(serves, (), (1, 1))), serves, placement.num_gpus)


def sizer(asked: Question, available: int | None) -> _Sizer:
    return _Sizer(asked, Rate(2.0), prices_of(asked.profiles), available, None, None)


@pytest.mark.parametrize(
    ("copies", "available", "nodes", "fits"),
    [
        ({"3xP:tp1pp1 + 2xD:tp1pp1": 2}, 16, 2, True),
        # Ten GPUs are a node of eight and one of two.
        ({"3xP:tp1pp1 + 2xD:tp1pp1": 2}, 10, 2, False),
        ({"3xP:tp1pp1 + 2xD:tp1pp1": 1, "1xP:tp1pp1 + 1xD:tp1pp1": 1}, 8, 1, True),
        ({"3xP:tp1pp1 + 5xD:tp1pp1": 1, "1xP:tp1pp1 + 1xD:tp1pp1": 1}, 10, 2, True),
        ({"3xP:tp1pp1 + 2xD:tp1pp1": 3}, 16, 3, False),
        # Colocated instances lie anywhere.
        ({"5xC:tp1pp1": 2}, 10, 2, True),
    ],
)
def test_copies_lie_in_the_nodes_that_there_are(
    copies: dict[str, int], available: int, nodes: int, *, fits: bool
) -> None:
    asked = question(num_gpus=8)
    chosen = {pairs(text, asked.cluster): count for text, count in copies.items()}
    found = sizer(asked, available)
    assert found._num_nodes(chosen) == nodes
    assert found._fits(chosen) == fits
    assert sizer(asked, None)._fits(chosen)


def test_copies_lie_in_racks() -> None:
    profile = dataclasses.replace(question().profiles[Role.PREFILL], gpu=find_gpu("gb200"))
    asked = question(profiles=dict.fromkeys(Role, profile), num_gpus=128, gpus_per_node=None)
    assert (asked.cluster.gpus_per_node, asked.cluster.domain_gpus) == (4, 72)
    # Each instance fills a node; the copy lies in two racks.
    large = pairs("10xP:tp4pp1 + 10xD:tp4pp1", asked.cluster)
    found = sizer(asked, 144)
    assert found._num_nodes({large: 1}) == 20
    assert found._fits({large: 1})
    assert not found._fits({large: 2})
    # Two nodes hold an instance of eight GPUs, and a third one the other.
    assert found._num_nodes({pairs("1xP:tp4pp2 + 1xD:tp4pp1", asked.cluster): 3}) == 9
    # Three copies of 40 GPUs are less than two racks, but each has to lie in one.
    middle = pairs("5xP:tp4pp1 + 5xD:tp4pp1", asked.cluster)
    assert found._fits({middle: 2})
    assert not found._fits({middle: 3})


def test_copies_that_fill_nodes_are_taken_where_others_do_not_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(num_gpus=8)
    five, four = (pairs(text, asked.cluster) for text in ("3xP:tp1pp1 + 2xD:tp1pp1", "2xP:tp1pp1 + 2xD:tp1pp1"))
    trials = tuple(b.trial for b in (five, four))
    searched = SearchResult(Best(None, None), trials, None, False, {}, 0, 0)
    monkeypatch.setattr(sizing, "search", lambda *_, **__: searched)
    monkeypatch.setattr(_Sizer, "_may_fail", lambda *_: 0)

    def sized(rate: float, available: int | None) -> Sizing:
        return size(asked, Rate(rate), prices=prices_of(asked.profiles), available_gpus=available)

    def copies(available: int | None) -> dict[str, int]:
        found = sized(15.0, available)
        assert found.plan is not None
        assert found.fits
        return {str(kind.placement): kind.count for kind in found.plan.copies}

    assert copies(None) == copies(24) == {"3xP:tp1pp1 + 2xD:tp1pp1": 3}
    # Two nodes of eight hold two of five GPUs, and four of four.
    assert copies(16) == {"2xP:tp1pp1 + 2xD:tp1pp1": 4}
    # A node of eight and one of three hold one copy of five, or two of four.
    none = sized(10.0, 11)
    assert not none.fits
    assert not_enough("--rate", 10.0, none, asked) == (
        "--rate: needs 10 GPUs on 2 nodes of 8, and such copies do not pack into the nodes there are; "
        "give more GPUs, ask for less, or relax the limits"
    )
    short = not_enough("--rate", 40.0, sized(40.0, 11), asked)
    assert short.startswith("--rate: needs 40 GPUs on 5 nodes of 8, of which the GPUs there are serve 10 safely; ")


@functools.cache
def found(num_gpus: int) -> SearchResult:
    return search(question(num_gpus=num_gpus))


def question(**changes: object) -> Question:
    return tiny_question(**{"workload": Workload(Poisson(), Uniform(200, 40, low=0.2)), **changes})


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is searched once for all tests."""
    monkeypatch.setattr(sizing, "search", lambda asked, **_: found(asked.cluster.num_gpus))


def sized(demand: Rate | Population, *, price: float = 2.0, available: int | None = None) -> Sizing:
    asked = question()
    prices = prices_of(asked.profiles, {asked.gpu.name: price})
    return size(asked, demand, prices=prices, available_gpus=available)


@pytest.mark.usefixtures("searched_once")
def test_a_plan_sustains_its_rate_when_simulated() -> None:
    asked = question()
    plan = sized(Rate(33.0)).plan
    assert plan is not None
    assert plan.rate_per_s == pytest.approx(33.0)
    assert plan.num_gpus >= plan.gpus_at_estimate >= plan.gpus_at_most_optimistic
    assert plan.capacity_per_s.low >= 33.0
    assert plan.load.low <= plan.load.best <= plan.load.high <= 1
    for kind in plan.copies:
        assert kind.rate_per_s <= kind.goodput_per_s.low
        shares = []
        # Requests that no search has seen.
        for i in range(4):
            trace = asked.workload.trace(
                num_requests=8000, seed=replication_seed(99, i), context_tokens=4096, rate_per_s=kind.rate_per_s
            )
            run = simulate(kind.placement, trace, profiles=asked.profiles, window=Window(1000, 6000))
            shares.append(run.attainment(asked.slo).both)
        error = float(np.std(shares, ddof=1)) / 2
        assert np.mean(shares) + 2 * error >= asked.attainment, kind.placement.label


@pytest.mark.usefixtures("searched_once")
def test_gpus_grow_with_the_rate_and_cost_with_the_price() -> None:
    plans = [sized(Rate(rate)).plan for rate in (0.5, 5.0, 9.0, 14.0, 25.0, 40.0, 90.0, 1000.0)]
    gpus = [plan.num_gpus for plan in plans if plan is not None]
    assert len(gpus) == len(plans)
    assert gpus == sorted(gpus)
    dear = sized(Rate(40.0), price=6.0).plan
    cheap = plans[5]
    assert cheap is not None
    assert dear is not None
    assert cheap.cost_usd_per_h == Interval(*[2.0 * cheap.num_gpus] * 3)
    assert dear.cost_usd_per_h is not None
    assert dear.cost_usd_per_h.best == pytest.approx(6.0 * cheap.num_gpus)
    for name, amount in cheap.usd_per_million_tokens.items():
        other = dear.usd_per_million_tokens[name]
        assert amount is not None
        assert other is not None
        assert other.best == pytest.approx(3 * amount.best)
    # Prompts are uniform in 40 to 200 tokens, outputs in 8 to 40: 120 and 24 on average.
    hour = 40.0 * 3600
    for name, tokens in (("input", 120), ("output", 24), ("total", 144)):
        amount = cheap.usd_per_million_tokens[name]
        assert amount is not None
        assert amount.best == pytest.approx(cheap.num_gpus * 2.0 / (hour * tokens) * 1e6, rel=0.01)


@pytest.mark.usefixtures("searched_once")
def test_gpus_that_are_not_there() -> None:
    answer = sized(Rate(1000.0), available=4)
    assert answer.plan is not None
    assert not answer.fits
    assert answer.most is not None
    assert 0 < answer.most < 1000.0
    # What they serve at most fits on them.
    at_most = sized(Rate(answer.most), available=4)
    assert at_most.fits
    assert at_most.plan is not None
    assert at_most.plan.num_gpus <= 4
    assert not sized(Rate(answer.most * 1.01), available=4).fits


@pytest.mark.usefixtures("searched_once")
def test_users_who_think_are_served_in_a_closed_loop() -> None:
    asked = question()
    plan = sized(Population(50, 4.0)).plan
    assert plan is not None
    assert plan.e2e_s is not None
    assert plan.rate_per_s * (4.0 + plan.e2e_s.best) == pytest.approx(50, rel=0.01)
    assert plan.rate_per_s < 50 / 4.0
    (kind,) = plan.copies
    users = round(50 / kind.count)
    assert isinstance(asked.workload, Workload)
    loop = ClosedLoop(users, asked.workload.lengths, num_requests=200 * users, stagger_s=4.2 / users, think_time_s=4.0)
    run = simulate(
        kind.placement, loop, profiles=asked.profiles, options=Options(seed=5), window=Window(20 * users, 150 * users)
    )
    assert run.attainment(asked.slo).both >= asked.attainment
    assert run.throughput_per_s == pytest.approx(users / 50 * plan.rate_per_s, rel=0.03)
    # Equal pauses keep together who was answered together: what the plan assumes of users matters.
    bunched = dataclasses.replace(loop, think_time_s=0.0, turnaround_s=4.0)
    run = simulate(kind.placement, bunched, profiles=asked.profiles, window=Window(20 * users, 150 * users))
    assert run.attainment(asked.slo).both < 0.5


@pytest.mark.usefixtures("searched_once")
def test_instances_that_may_fail() -> None:
    asked = question(num_gpus=4)
    prices = prices_of(asked.profiles)
    sizer = _Sizer(asked, Rate(2.0), prices, None, None, None)
    pair = Placement.colocated(
        parallelism=Placement.parse("1xC:tp1pp1").pools[0].parallelism, count=2, policy=Policy.ORCA
    )
    goodput = Interval(12.0, 12.5, 13.0)
    # One of two instances carries 2 requests/s, none carries nothing.
    assert sizer._may_fail([Copies(pair, 1, 2.0, goodput)], 2.0) == 1
    # At 12 requests/s one alone is overloaded.
    assert sizer._may_fail([Copies(pair, 1, 12.0, goodput)], 12.0) == 0
    # Two of three copies carry what the third did.
    assert sizer._may_fail([Copies(pair, 3, 8.0, goodput)], 24.0) == 1


@given(
    kinds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=3),
    percent=st.integers(1, 110),
)
def test_copies_to_spare_are_what_one_by_one_gives(kinds: list[tuple[int, int]], percent: int) -> None:
    placement = Placement.parse("1xC:tp1pp1")
    copies = [Copies(placement, count, 1.0, Interval(float(low), low + 1.0, low + 2.0)) for count, low in kinds]
    lows = sorted((low for count, low in kinds for _ in range(count)), reverse=True)
    rate = sum(lows) * percent / 100
    spared = [number for number in range(len(lows)) if sum(lows[number:]) >= rate]
    assert copies_to_spare(copies, rate) == max(spared, default=0)


@given(
    kinds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), max_size=4),
    num_gpus=st.integers(0, 120),
)
def test_the_most_that_gpus_serve_is_what_all_combinations_give(kinds: list[tuple[int, int]], num_gpus: int) -> None:
    most = [0] * (num_gpus + 1)
    for left in range(1, num_gpus + 1):
        most[left] = max([most[left - 1], *(most[left - gpus] + each for gpus, each in kinds if gpus <= left)])
    assert most_served([(gpus, float(each)) for gpus, each in kinds], num_gpus) == most[num_gpus]
    assert most_served([(1, 1.0), (3, 3.5)], 10**9) == 333_333_333 * 3.5 + 1


def test_millions_of_copies_are_not_counted_one_by_one() -> None:
    many = Copies(Placement.parse("1xC:tp1pp1"), 10**9, 1.0, Interval(1.5, 2.0, 2.5))
    assert copies_to_spare([many], 1.2e9) == 200_000_000


@pytest.mark.parametrize("demand", [(0, 1.0), (3, -1.0), (3, math.nan)])
def test_populations_that_are_none(demand: tuple[int, float]) -> None:
    with pytest.raises(InputError, match="population"):
        Population(*demand)


def test_users_who_hardly_ever_come_back() -> None:
    with pytest.raises(InputError, match=r"--think-time: 1e\+30 is so long that fewer than 1e-09 requests per second"):
        Population(1000, 1e30)


def test_what_a_finite_run_serves_does_not_last() -> None:
    asked = question(num_requests=100, workload=Workload(Poisson(), Fixed(64, 8)))
    with pytest.raises(InputError, match="finite run"):
        size(asked, Rate(1.0), prices=prices_of(asked.profiles))
    with pytest.raises(InputError, match="rate"):
        Rate(0.0)
