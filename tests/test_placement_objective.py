"""Objectives and prices, by hand-computed numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.catalog import find_gpu
from dsim.errors import InputError
from dsim.pools import Placement, Role
from placement.goodput import Goodput
from placement.objective import (
    Price,
    check_prices,
    cost_usd_per_h,
    is_one_price,
    prices_of,
    ranked,
    requests_per_usd,
    thrift,
    tied,
)
from placement.pareto import front, pareto, shapes
from placement.result import Best, SearchResult, State, Trial
from placement.search import search
from placement.statistics import Interval
from tests.reference.systems import every_role
from tests.test_placement_search import answer
from tests.tiny import tiny_profile, tiny_question

SMALL = Placement.parse("2xP:tp2pp1 + 3xD:tp1pp1")
LARGE = Placement.parse("1xP:tp1pp1 + 4xD:tp1pp1")


def price(usd: float, gpu: str = "some") -> Price:
    return Price(gpu, Interval(usd / 2, usd, 3 * usd), "somewhere")


#: Prefill GPUs at 4 USD/h, decode GPUs at 1.
MIXED = {Role.PREFILL: price(4.0, "fast"), Role.DECODE: price(1.0, "slow")}


def trial(placement: Placement, rate: float, logs: tuple[float, ...] = ()) -> Trial:
    return Trial(placement, State.COMPLETE, goodput=Goodput(Interval(0.9 * rate, rate, 1.1 * rate), logs, (rate, rate)))


def result(*trials: Trial) -> SearchResult:
    return SearchResult(Best(None, None), trials, None, False, {}, 0, 0)


def test_each_pool_costs_the_price_of_its_gpu() -> None:
    # 4 GPUs at 4 and 3 at 1.
    assert cost_usd_per_h(SMALL, MIXED) == Interval(9.5, 19.0, 57.0)
    assert cost_usd_per_h(LARGE, MIXED) == Interval(4.0, 8.0, 24.0)
    unknown = {**MIXED, Role.DECODE: Price("h20-96g", None, "unknown")}
    assert cost_usd_per_h(SMALL, unknown) is None
    bought = requests_per_usd(trial(LARGE, 10.0), MIXED)
    assert bought is not None
    assert bought.low == pytest.approx(4050.0)
    assert bought.best == pytest.approx(4500.0)


def test_profiles_of_two_gpus_have_their_own_prices() -> None:
    profile = tiny_profile()
    profiles = {
        **every_role(profile),
        Role.PREFILL: dataclasses.replace(profile, gpu=find_gpu("h100")),
        Role.DECODE: dataclasses.replace(profile, gpu=find_gpu("h20")),
    }
    prices = prices_of(profiles, {"h20-96g": 1.25})
    assert prices[Role.DECODE] == Price("h20-96g", Interval(1.25, 1.25, 1.25), "as given", given=True)
    h100 = prices[Role.PREFILL]
    assert h100.price_usd_per_h == Interval(1.3, 2.95, 6.88)
    assert "May 2026" in h100.source
    cost = cost_usd_per_h(SMALL, prices)
    assert cost is not None
    assert cost.best == pytest.approx(4 * 2.95 + 3 * 1.25)
    with pytest.raises(InputError, match="--objective: needs a price above 0 for h20-96g; give one, as in --price h20"):
        check_prices({**prices, Role.DECODE: prices_of(profiles)[Role.DECODE]})


def test_goodput_per_dollar_turns_the_order_where_gpus_differ() -> None:
    # Per GPU 21 / 7 = 3 against 10 / 5 = 2; per dollar 21 / 19 against 10 / 8.
    best, other = trial(SMALL, 21.0), trial(LARGE, 10.0)
    assert ranked(result(best, other), None) == (best, other)
    assert ranked(result(best, other), MIXED) == (other, best)
    same = dict.fromkeys((Role.PREFILL, Role.DECODE), price(4.0))
    assert is_one_price(same)
    assert not is_one_price(MIXED)
    assert ranked(result(best, other), same) == (best, other)
    assert thrift(SMALL, same) == thrift(LARGE, same) == thrift(SMALL, None) == 1.0
    assert thrift(SMALL, MIXED) == 7 / 19


def test_ties_are_of_the_objective() -> None:
    logs = (0.0, 0.01, -0.01)
    best = trial(SMALL, 21.0, tuple(3.0445 + x for x in logs))
    other = trial(LARGE, 10.0, tuple(2.3026 + x for x in reversed(logs)))
    assert tied((best, other), None, confidence=0.95) == ()
    near = {Role.PREFILL: price(1.6), Role.DECODE: price(1.0)}
    # 21 / 9.4 = 2.234 and 10 / 5.6 = 1.786; with 2.7: 21 / 13.8 = 1.522 and 10 / 6.7 = 1.493.
    assert tied((best, other), near, confidence=0.95) == ()
    nearer = {Role.PREFILL: price(2.7), Role.DECODE: price(1.0)}
    assert tied((best, other), nearer, confidence=0.95) == (other,)


def test_a_search_by_dollars_finds_the_cheapest() -> None:
    plain = answer().best.overall
    assert plain is not None
    assert plain.placement.is_colocated
    prices = {role: price(50.0 if role is Role.COLOCATED else 1.0) for role in tiny_question().profiles}
    best = ranked(search(tiny_question(prices=prices)), prices)[0]
    assert not best.placement.is_colocated


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, ...]]) -> None:
    def beats(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    expected = {i for i, p in enumerate(points) if not any(beats(q, p) for q in points)}
    assert front(points) == expected


def test_the_front_of_a_search() -> None:
    asked = tiny_question()
    prices = prices_of(asked.profiles, {asked.gpu.name: 2.0})
    chosen = shapes(answer().trials, most=24)
    assert {t.state for t, _ in chosen} <= {State.COMPLETE, State.PRUNED}
    points = pareto(asked, answer(), prices=prices)
    best = [p for p in points if p.is_best]
    assert best
    assert points[: len(best)] == tuple(best)
    for p in points:
        # 24 output tokens of a request on average, 2 USD an hour and GPU.
        usd = 2.0 / (p.rate_per_gpu_per_s * 3600 * 24) * 1e6
        assert p.usd_per_million_output_tokens.best == pytest.approx(usd, rel=0.01)
        assert p.ttft_s.best > 0
        assert p.tpot_s.best > 0
    # The front trades: its cheapest point is not its fastest.
    assert min(best, key=lambda p: p.ttft_s.best) != best[0]
