"""Mixes of GPUs and limits of batches: spaces, budgets, bounds, answers and plans against brute force and the twin."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsim.catalog import find_gpu
from dsim.errors import InfeasiblePlacementError, InputError
from dsim.gpu import LINK_SHARE
from dsim.latency import AffineLatency, ValidRange
from dsim.options import Options, PrefillBatching
from dsim.pools import Parallelism, Placement, Policy, Pool, Role
from dsim.profile import BatchLimits, Profile
from dsim.recorder import TIME_COLUMNS
from dsim.simulate import simulate
from placement import bounds
from placement.batches import parse_batches
from placement.cover import Limited
from placement.fleet import budgets, fleet_of
from placement.goodput import Goodput
from placement.mixes import BatchChoices, Fleet, case_of, check_mixes
from placement.objective import Price, PriceList, cost_usd_per_h, ranked, requests_per_usd, thrift
from placement.result import Best, SearchResult, State, Trial
from placement.search import Affinity, Mode, Question, candidates, case, search
from placement.single import goodput_of
from placement.size import Block, Rate, Sizing, _Sizer, cover, size
from placement.space import Cluster
from placement.statistics import Interval
from profiles.choice import best_profile
from profiles.mixed import Wanted, handed_over, mixes_of, profiles_of_roles
from tests.reference.simulator import run_reference
from tests.reference.systems import make_profile, make_trace
from tests.test_twin import System, systems
from tests.tiny import tiny_question

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
FAST, SLOW = "h100-sxm", "h20-96g"


def made(gpu: str, **changes: float) -> Profile:
    """A made-up profile on a GPU: prompts are slow on one of the two, decoding is not."""
    limits = {P: BatchLimits(512, 16), D: BatchLimits(requests=32), C: BatchLimits(512, 32)}
    profile = make_profile(
        tps=(1,),
        pps=(1,),
        prefill=(8.0, 0.5 * changes.get("prefill", 1.0), 0.0),
        decode=(8.0 * changes.get("decode", 1.0), 0.002, 0.2),
        limits=limits,
        kv_tokens=8192,
    )
    return dataclasses.replace(profile, name=f"tiny-{gpu}", gpu=find_gpu(gpu))


#: One is six times slower at prompts, the other a little slower at decoding.
ON = {FAST: made(FAST, decode=1.2), SLOW: made(SLOW, prefill=6.0)}
MIXES = tuple({P: ON[a], D: ON[b]} for a, b in itertools.product(ON, ON)) + tuple({C: ON[gpu]} for gpu in ON)


def fleet(fast: int, slow: int, *, per_node: int = 8, total: int | None = None) -> Fleet:
    types = {FAST: Cluster(fast, per_node), SLOW: Cluster(slow, per_node)}
    return Fleet(types, total or fast + slow)


def mixed_question(**changes: object) -> Question:
    given: dict[str, object] = {
        "profiles": {P: ON[FAST], D: ON[FAST], C: ON[FAST]},
        "mixes": MIXES,
        "fleet": fleet(2, 2),
        "num_gpus": None,
        "num_requests": 60,
    }
    return tiny_question(**{**given, **changes})


# Pools


@given(
    st.sampled_from("PDC"),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.none() | st.integers(1, 9999),
    st.none() | st.integers(1, 9999),
    st.sampled_from([None, FAST, "rtx-4090"]),
    st.sampled_from(Policy),
)
def test_the_notation_has_all_of_a_pool(
    role: str, numbers: tuple[int, int, int], tokens: int | None, requests: int | None, gpu: str | None, policy: Policy
) -> None:
    chunked = role == "C" and policy is Policy.CHUNKED
    pool = Pool(
        Role(role),
        numbers[0],
        Parallelism(*numbers[1:]),
        policy if role == "C" else None,
        512 if chunked else None,
        max_batch_tokens=None if chunked or role == "D" else tokens,
        max_batch_requests=requests,
        gpu=gpu,
    )
    other = Pool(P if role == "D" else D, 1, Parallelism(), gpu=gpu)
    placement = Placement(
        (pool,) if role == "C" else tuple(sorted((pool, other), key=lambda p: "PDC".index(p.role.value)))
    )
    again = Placement.parse(str(placement), policy=policy, token_budget=512 if chunked else None)
    assert again == placement
    assert str(placement).replace(" (", "") in placement.label.replace(" (", "") or role == "C"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1xP:tp1/foo3 + 1xD:tp1", "is no limit of a batch"),
        ("1xP:tp1/tokens3/tokens4 + 1xD:tp1", "stands twice"),
        ("1xP:tp1/tokens0 + 1xD:tp1", "max_batch_tokens=0 must be >= 1"),
        (
            "1xP:tp1 + 1xD:tp1/tokens5",
            "max_batch_tokens=5 belongs to pools that prefill whole prompts; use max_batch_requests",
        ),
        ("1xP:tp1@ + 1xD:tp1", "is not a pool"),
        ("1xP:tp1@h100/tokens5 + 1xD:tp1", "is not a pool"),
    ],
)
def test_what_is_no_pool_is_refused(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=r"--placement: .*") as error:
        Placement.parse(text)
    assert rule in str(error.value)


def test_a_token_budget_is_the_limit_of_chunked() -> None:
    with pytest.raises(
        InputError, match="max_batch_tokens=512 belongs to pools that prefill whole prompts; use the token"
    ):
        Pool(C, 1, Parallelism(), Policy.CHUNKED, 512, max_batch_tokens=512)


# The simulator


@settings(max_examples=40)
@given(systems(dyadic=True), st.sampled_from([None, 1, 20, 300]), st.sampled_from([None, 1, 2, 7]), st.booleans())
def test_limits_of_pools_are_those_of_the_twins_profiles(
    system: System, tokens: int | None, requests: int | None, first: bool
) -> None:
    """The twin knows limits of profiles only: what a pool says of its own is written into one."""
    number = 0 if first else len(system.placement.pools) - 1
    pools, profiles = list(system.placement.pools), dict(system.profiles)
    pool = pools[number]
    engine = profiles[pool.role].limits.get(pool.role, BatchLimits())
    own = tokens if pool.limits_tokens else None
    pools[number] = dataclasses.replace(pool, max_batch_tokens=own, max_batch_requests=requests)
    limit = system.options.prefill_token_limit_at(pools[0].parallelism.tp)
    written = BatchLimits(own or engine.tokens, requests or engine.requests)
    theirs = dataclasses.replace(profiles[pool.role], limits={**profiles[pool.role].limits, pool.role: written})
    reference = run_reference(
        system.placement,
        system.trace,
        {**profiles, pool.role: theirs},
        seed=system.options.seed,
        prefill_router=system.options.prefill_routing.value,
        decode_router=system.options.decode_routing.value,
        colocated_router=system.options.prefill_routing.value,
        prefill_token_limit=None if pool.role is P and own else limit,
    )
    options = dataclasses.replace(system.options, check=True)
    fast = simulate(Placement(tuple(pools)), system.trace, profiles=profiles, options=options)
    for name in TIME_COLUMNS:
        np.testing.assert_array_equal(fast.columns[name], getattr(reference, name), err_msg=name)


def test_a_limit_of_the_pool_stands_before_the_one_for_all() -> None:
    # 8 ticks and 1 a token: all four prompts of 5 tokens at once, two at a time, or each alone.
    trace, profile = make_trace([0.0] * 4, [5] * 4, [1] * 4), make_profile()
    for text, limit, ends in (
        ("1xP:tp1 + 1xD:tp1", None, [28] * 4),
        ("1xP:tp1 + 1xD:tp1", 10, [18, 18, 36, 36]),
        ("1xP:tp1/tokens5 + 1xD:tp1", 10, [13, 26, 39, 52]),
        ("1xP:tp1/tokens20 + 1xD:tp1", 10, [28] * 4),
        ("1xP:tp1/requests1 + 1xD:tp1", 10, [13, 26, 39, 52]),
    ):
        options = Options(prefill_token_limit=limit, check=True)
        result = simulate(Placement.parse(text), trace, profiles=profile, options=options)
        assert (result.columns["prefill_end_s"] * 1024).tolist() == ends


@settings(max_examples=25)
@given(systems(dyadic=True))
def test_pools_on_two_gpus_equal_the_twin(system: System) -> None:
    profiles = dict(system.profiles)
    slower = {
        tp: dataclasses.replace(model, small=dataclasses.replace(model.small, constant_s=model.small.constant_s * 3))
        if isinstance(model, AffineLatency)
        else model
        for tp, model in profiles[D].latency.items()
    }
    profiles[D] = dataclasses.replace(profiles[D], latency=slower, gpu=find_gpu("h20"))
    profiles[P] = dataclasses.replace(profiles[P], gpu=find_gpu("h100"))
    pools = [dataclasses.replace(pool, gpu=profiles[pool.role].gpu.name) for pool in system.placement.pools]
    reference = run_reference(
        system.placement,
        system.trace,
        profiles,
        seed=system.options.seed,
        prefill_router=system.options.prefill_routing.value,
        decode_router=system.options.decode_routing.value,
        colocated_router=system.options.prefill_routing.value,
        prefill_token_limit=system.options.prefill_token_limit_at(pools[0].parallelism.tp),
    )
    fast = simulate(Placement(tuple(pools)), system.trace, profiles=profiles, options=system.options)
    for name in TIME_COLUMNS:
        np.testing.assert_array_equal(fast.columns[name], getattr(reference, name), err_msg=name)


def test_a_pool_needs_a_profile_of_its_gpu() -> None:
    placement = Placement.parse("1xP:tp1@h100-sxm + 1xD:tp1@h20-96g")
    with pytest.raises(InputError, match="has a profile of h100-sxm; give a profile of h20-96g"):
        simulate(placement, make_trace([0.0], [9], [2]), profiles={P: ON[FAST], D: ON[FAST]})


def test_limits_beyond_the_valid_range_cannot_run() -> None:
    latency = {
        tp: dataclasses.replace(model, valid_range=ValidRange(prefill_tokens=600, decode_requests=40))
        for tp, model in ON[FAST].latency.items()
        if isinstance(model, AffineLatency)
    }
    profile = dataclasses.replace(ON[FAST], latency=latency)
    placement = Placement.parse("1xP:tp1/tokens601 + 1xD:tp1/requests41")
    trace = make_trace([0.0], [9], [2])
    with pytest.raises(
        InfeasiblePlacementError, match="max_batch_tokens=601 is beyond profile tiny-h100-sxm's 600 prefill"
    ):
        simulate(placement, trace, profiles=profile)
    simulate(placement, trace, profiles=profile, options=Options(extrapolate=True))
    question = tiny_question(
        profiles=dict.fromkeys(Role, profile),
        mode=Mode.DISAGGREGATED,
        num_requests=60,
        batches=parse_batches(None, "decode=32,41"),
    )
    states = {str(t.placement): t.state for t in search(question).trials if "tp1pp1 + 1xD:tp1pp1" in str(t.placement)}
    assert states["1xP:tp1pp1 + 1xD:tp1pp1/requests41"] is State.INFEASIBLE
    assert states["1xP:tp1pp1 + 1xD:tp1pp1"] is State.COMPLETE


# Space and budgets


def by_hand(types: Mapping[str, int], *, per_node: int, total: int, by_role: Mapping[Role, int]) -> set[str]:
    """Every placement of one-GPU and two-GPU instances on nodes of one type each."""

    def nodes(gpu: str) -> list[int]:
        whole, rest = divmod(types[gpu], per_node)
        return [per_node] * whole + [rest] * (rest > 0)

    def holds(gpu: str, wanted: Sequence[int]) -> bool:
        # Instances of one and two GPUs, the large first.
        free = nodes(gpu)
        for need in sorted(wanted, reverse=True):
            at = next((i for i, left in enumerate(free) if left >= need), None)
            if at is None:
                return False
            free[at] -= need
        return True

    def cut(degrees: str) -> list[int]:
        # On nodes of one type a pipeline too large for a node lies on several.
        return [1, 1] if degrees == "tp1pp2" and per_node == 1 else [sizes[degrees]]

    found = set()
    sizes = {"tp1pp1": 1, "tp2pp1": 2, "tp1pp2": 2}
    for (p, pn), (d, dn) in itertools.product(sizes.items(), repeat=2):
        for a, b, n, m in itertools.product(types, types, range(1, 9), range(1, 9)):
            if n * pn + m * dn > total or n * pn > by_role.get(P, 99) or m * dn > by_role.get(D, 99):
                continue
            fits = holds(a, cut(p) * n + cut(d) * m) if a == b else holds(a, [pn] * n) and holds(b, [dn] * m)
            if fits:
                found.add(f"{n}xP:{p}@{a} + {m}xD:{d}@{b}")
    for (c, cn), gpu, n in itertools.product(sizes.items(), types, range(1, 9)):
        if n * cn <= total and holds(gpu, cut(c) * n):
            found.add(f"{n}xC:{c}@{gpu}")
    return found


@pytest.mark.parametrize(
    ("fast", "slow", "per_node", "total", "by_role"),
    [
        (2, 3, 8, 5, {}),
        (3, 3, 2, 6, {}),
        (3, 3, 2, 4, {}),
        (3, 3, 2, 2, {}),
        (2, 4, 8, 6, {P: 2, D: 3}),
        (4, 1, 1, 5, {}),
    ],
)
def test_the_space_is_what_the_nodes_hold(
    fast: int, slow: int, per_node: int, total: int, by_role: Mapping[Role, int]
) -> None:
    there = dataclasses.replace(fleet(fast, slow, per_node=per_node, total=total), by_role=by_role)
    found = [str(p) for p in candidates(mixed_question(fleet=there))]
    small = [text for text in found if all(size in ("tp1pp1", "tp2pp1", "tp1pp2") for size in _degrees(text))]
    assert len(set(found)) == len(found)
    assert set(small) == by_hand({FAST: fast, SLOW: slow}, per_node=per_node, total=total, by_role=by_role)


def _degrees(text: str) -> list[str]:
    return [part.split(":")[1].split("@")[0] for part in text.split(" + ")]


def test_gpus_of_two_types_in_all() -> None:
    there = fleet(4, 4, total=5).of({P: FAST, D: SLOW})
    assert there.num_nodes == 2
    assert there.packs(Placement.parse("1xP:tp2 + 3xD:tp1"))
    assert not there.packs(Placement.parse("2xP:tp1 + 4xD:tp1"))
    assert not there.packs(Placement.parse("1xP:tp8 + 1xD:tp1"))


def test_one_type_is_the_plain_space() -> None:
    there = Fleet({FAST: Cluster(4, 8)}, 4)
    mixes = ({P: ON[FAST], D: ON[FAST]}, {C: ON[FAST]})
    plain = tiny_question(profiles={P: ON[FAST], D: ON[FAST], C: ON[FAST]}, num_gpus=4)
    assert candidates(mixed_question(mixes=mixes, fleet=there)) == candidates(plain)


def test_pairs_within_a_node_are_of_one_type() -> None:
    found = candidates(mixed_question(affinity=Affinity.LOW, fleet=fleet(3, 3)))
    pairs = {tuple(pool.gpu for pool in p.pools) for p in found if not p.is_colocated}
    assert pairs == {(FAST, FAST), (SLOW, SLOW)}


def test_fewer_gpus_are_a_part_of_the_space() -> None:
    larger, smaller = (candidates(mixed_question(fleet=fleet(2, 3), num_gpus=n)) for n in (5, 2))
    assert set(smaller) == {p for p in larger if p.num_gpus <= 2}


PROFILES = {P: [ON[FAST], ON[SLOW]], D: [ON[SLOW]], C: [ON[FAST], ON[SLOW]]}
ASKED = {"roles": (P, D, C), "nodes": None, "gpus_per_node": None, "side_by_side": False}


def numbers(text: str | None) -> tuple[dict[str, int], int, dict[Role, int]]:
    found = fleet_of(PROFILES, gpus=text, **ASKED)  # type: ignore[arg-type]
    return {name: part.num_gpus for name, part in found.types.items()}, found.num_gpus, dict(found.by_role)


def test_budgets_as_they_are_written() -> None:
    assert numbers("h100=4,h20=8") == ({FAST: 4, SLOW: 8}, 12, {})
    assert numbers("6") == ({FAST: 6, SLOW: 6}, 6, {})
    assert numbers(None) == ({FAST: 8, SLOW: 8}, 16, {})
    # Prefill pools lie on either: of one type there may be the 4 for them, of the other the 8 for decode too.
    assert numbers("prefill=4,decode=8") == ({FAST: 4, SLOW: 12}, 12, {P: 4, D: 8})
    assert numbers("prefill=4,decode=8,colocated=16") == ({FAST: 16, SLOW: 16}, 16, {P: 4, D: 8, C: 16})
    assert numbers("h100=4,h20=8,prefill=2") == ({FAST: 4, SLOW: 8}, 12, {P: 2})


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("h100=4", "'h100=4' says nothing of h20-96g; add h20-96g=N"),
        ("prefill=4", "'prefill=4' says nothing of decode; add decode=N"),
        ("h100=4,h20", "'h20' does not say of what; as in h100=8,h20=16"),
        ("h100=4,h100-sxm=4,h20=1", "'h100-sxm' stands twice"),
        ("h100=4,b200=4", "'b200' is not searched: h100-sxm, h20-96g"),
        ("h100=4,h2=4", "'h2' is neither a GPU nor a role"),
        ("h100=0,h20=4", "0 must be >= 1"),
        ("h100=x,h20=4", "'x' must be a whole number"),
        ("many", "'many' must be a whole number, or numbers by GPU or role"),
    ],
)
def test_budgets_that_cannot_be(text: str, rule: str) -> None:
    with pytest.raises(InputError) as error:
        numbers(text)
    assert str(error.value).startswith(f"--gpus: {rule}")


def test_a_role_that_is_not_searched_has_no_budget() -> None:
    with pytest.raises(InputError, match="'colocated' is a role that is not searched"):
        budgets("prefill=1,decode=1,colocated=1", [FAST], [P, D])


# Limits of batches


def test_limits_are_read_by_role() -> None:
    found = parse_batches("2048,lm,prefill=engine,512", "64,decode=128,engine,colocated=8")
    assert found.max_batch_tokens == {P: (PrefillBatching.ENGINE, 512), C: (2048, PrefillBatching.LM)}
    assert found.max_batch_requests == {P: (64,), D: (128, None), C: (8,)}
    for tokens, rule in (
        ("decode=4", "is no role that has this limit"),
        ("0", "must be >= 1"),
        ("few", "is no number"),
    ):
        with pytest.raises(InputError, match=rule):
            parse_batches(tokens, None)


def test_every_combination_of_limits_is_tried_once() -> None:
    profile = dataclasses.replace(ON[FAST], saturation_tokens=300, saturation_tokens_at={1: 300, 2: 400})
    choices = parse_batches("prefill=engine,lm,512,200,colocated=100,512", "decode=32,8")
    pair = Placement.parse("1xP:tp1 + 2xD:tp1")
    found = {str(p) for p in choices.variants(pair, {P: profile, D: profile})}
    # 512 tokens and 32 requests are the engine's own.
    assert found == {
        f"1xP:tp1pp1{tokens} + 2xD:tp1pp1{requests}"
        for tokens in ("", "/tokens300", "/tokens200")
        for requests in ("", "/requests8")
    }
    chunked = Placement.parse("1xC:tp1", policy=Policy.CHUNKED)
    assert list(choices.variants(chunked, {C: profile})) == [chunked]
    whole = {str(p) for p in choices.variants(Placement.parse("1xC:tp1"), {C: profile})}
    assert whole == {"1xC:tp1pp1/tokens100", "1xC:tp1pp1"}
    with pytest.raises(
        InputError, match="--max-batch-tokens: 'lm' needs Lm, which profile tiny-h100-sxm does not have"
    ):
        choices.check_lm({P: ON[FAST]})
    assert list(BatchChoices().variants(pair, {})) == [pair]


@functools.cache
def tight() -> Question:
    """An engine that decodes two requests at a time, unless its pool says otherwise."""
    limits = {P: BatchLimits(512, 16), D: BatchLimits(requests=2), C: BatchLimits(512, 2)}
    profile = dataclasses.replace(ON[FAST], limits=limits)
    return tiny_question(profiles=dict.fromkeys(Role, profile), mode=Mode.DISAGGREGATED)


def test_bounds_know_the_limits_of_pools() -> None:
    placement = Placement.parse("1xP:tp1 + 1xD:tp1/requests16")
    question = tight()
    rate = goodput_of(question, placement, counted=400).goodput.rate_per_s.best
    known = case(question)
    assert bounds.upper_bounds(placement, known)[0].rate_per_s < rate, "the engine's limit is no bound here"
    assert bounds.upper_bounds(placement, case_of(placement, known, (), {}))[0].rate_per_s >= rate


def test_a_search_finds_the_better_limit() -> None:
    question = dataclasses.replace(tight(), batches=parse_batches(None, "decode=engine,16"))
    best = search(question).best.disaggregated
    assert best is not None
    assert str(best.placement) == "1xP:tp1pp1 + 1xD:tp1pp1/requests16"
    assert best.goodput is not None
    # More than an engine with its own limit can ever serve, which must not end the search for it.
    assert best.goodput.rate_per_s.best > 1.1 * bounds.upper_bounds(best.placement, case(question))[0].rate_per_s


# Answers


@functools.cache
def union() -> SearchResult:
    return search(mixed_question())


@functools.cache
def brute() -> SearchResult:
    """Everything with an interval."""
    return search(mixed_question(always=candidates(mixed_question())))


def worth(trial: Trial) -> float:
    assert trial.goodput is not None
    return trial.goodput.rate_per_s.best / trial.num_gpus * trial.thrift


def test_the_union_is_as_good_as_its_best_part() -> None:
    """One race of all mixes names what the best of the separate searches is, and the same goodput."""
    parts = []
    for mix in MIXES:
        mode = Mode.COLOCATED if C in mix else Mode.DISAGGREGATED
        parts.append(search(mixed_question(mixes=(mix,), profiles=mix, mode=mode)).best.overall)
    for kind in (False, True):
        best = max((t for t in parts if t and t.placement.is_colocated is kind), key=worth)
        found = union().best.colocated if kind else union().best.disaggregated
        assert found is not None
        assert found.placement == best.placement
        assert worth(found) == pytest.approx(worth(best), rel=0.02)
    # The fast prefills and the cheap decodes here, as one would have it.
    split = union().best.disaggregated
    assert split is not None
    assert [pool.gpu for pool in split.placement.pools] == [FAST, SLOW]


def test_the_ranking_is_that_of_brute_force() -> None:
    first, found = brute().complete[0], union().best.overall
    assert found is not None
    assert found.placement in {t.placement for t in brute().complete if t.tied}
    assert worth(found) == pytest.approx(worth(first), rel=0.02)
    assert {t.placement for t in union().trials} == set(candidates(mixed_question()))
    assert union().probes < brute().probes / 2


def priced(fast: float, slow: float) -> PriceList:
    by_gpu = {name: Price(name, Interval(usd, usd, usd), "", given=True) for name, usd in ((FAST, fast), (SLOW, slow))}
    return PriceList({P: by_gpu[FAST], D: by_gpu[FAST], C: by_gpu[FAST]}, by_gpu)


def test_costs_are_those_of_the_gpus_that_pools_name() -> None:
    placement = Placement.parse(f"2xP:tp2@{FAST} + 3xD:tp1@{SLOW}")
    prices = priced(3.0, 1.0)
    assert cost_usd_per_h(placement, prices) == Interval(15.0, 15.0, 15.0)
    assert thrift(placement, prices) == pytest.approx(7 / 15)
    assert thrift(Placement.parse(f"4xC:tp1@{SLOW}"), prices) == 1.0
    assert thrift(placement, priced(2.0, 2.0)) == 1.0


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 20.0), (20.0, 1.0)])
def test_the_objective_holds_all_through(fast: float, slow: float) -> None:
    """The order, the best of each kind, the ties and the ratio are of goodput per dollar, not per GPU."""
    prices = priced(fast, slow)
    truth, found = ranked(brute(), prices), search(mixed_question(prices=prices))
    assert [t.placement for t in truth] != [t.placement for t in ranked(brute(), None)]
    assert [worth(t) for t in found.complete] == sorted((worth(t) for t in found.complete), reverse=True)
    for kind, best in ((False, found.best.disaggregated), (True, found.best.colocated)):
        expected = next(t for t in truth if t.placement.is_colocated is kind)
        assert best is not None
        assert best.placement == expected.placement
    overall, split, whole = found.best.overall, found.best.disaggregated, found.best.colocated
    assert overall is not None
    assert split is not None
    assert whole is not None
    assert overall.placement == ranked(found, prices)[0].placement
    bought = [requests_per_usd(t, prices) for t in (split, whole)]
    assert bought[0] is not None
    assert bought[1] is not None
    assert found.best.ratio is not None
    # The ratio is of paired runs: close to that of the two means.
    assert found.best.ratio.best == pytest.approx(bought[0].best / bought[1].best, rel=0.05)
    assert all(t.tied for t in found.complete[:1])


def test_prices_that_are_equal_change_nothing() -> None:
    def facts(result: SearchResult) -> list[tuple[str, State, Goodput | None]]:
        return [(t.placement.label, t.state, t.goodput) for t in result.trials]

    assert facts(search(mixed_question(prices=priced(2.0, 2.0)))) == facts(union())


# Profiles and handovers


def test_profiles_of_roles_are_those_with_the_best_evidence() -> None:
    found = profiles_of_roles(Wanted(model="llama-3.1-8b", gpus={P: ("h100",), D: ("h20", "h100")}))
    assert [p.name for p in found[P]] == ["llama-3.1-8b-h100-sxm-vllm"]
    assert [p.evidence.value for p in found[D]] == ["roofline", "kernels"]
    # Colocated placements on every GPU that is named.
    assert [p.gpu.name for p in found[C]] == [FAST, SLOW]
    one = profiles_of_roles(Wanted(model="llama-3.1-8b", gpu="h200", gpus={D: ("h20",), C: ("h20",)}))
    assert [[p.gpu.name for p in one[role]] for role in Role] == [["h200-sxm"], [SLOW], [SLOW]]
    with pytest.raises(InputError, match="--decode-gpu: 'x200' is not a known GPU"):
        profiles_of_roles(Wanted(model="llama-3.1-8b", gpus={D: ("x200",)}))
    with pytest.raises(InputError, match="--decode-gpu: 'h20-96g' stands twice; name each GPU once"):
        profiles_of_roles(Wanted(model="llama-3.1-8b", gpus={D: ("h20", "h20-96gb")}))


def test_kv_goes_over_the_network_of_the_slower_end() -> None:
    prefill, decode = best_profile("llama-3.1-8b", "h100"), best_profile("llama-3.1-8b", "a100-80g")
    asked: list[str | None] = []

    def change(profile: Profile, link: str | None) -> Profile:
        from profiles.handover import asked_handover

        asked.append(link)
        return asked_handover(profile, None, link, crosses_nodes=link is not None)

    for ends in ((prefill, decode), (decode, prefill)):
        sender, receiver = handed_over(*ends, change)
        least = min(end.gpu.network_bytes_per_s for end in ends)
        assert receiver.handover.bandwidth_bytes_per_s == LINK_SHARE * least
        assert receiver.gpu == ends[1].gpu
        assert sender == ends[0]
    assert asked == ["nic", None] * 2
    mixes = mixes_of({P: [prefill, decode], D: [prefill], C: [decode]}, list(Role), change)
    assert [tuple(p.gpu.name for p in mix.values()) for mix in mixes] == [
        (FAST, FAST), ("a100-80g", FAST), ("a100-80g",)
    ]  # fmt: skip


def test_kv_of_another_form_cannot_be_handed_over() -> None:
    wide = dataclasses.replace(ON[SLOW], block_tokens=32)
    with pytest.raises(
        InputError, match=r"profiles: block_tokens='16 and 32' differ: KV of tiny-h100-sxm and tiny-h20"
    ):
        check_mixes([{P: ON[FAST], D: wide}])
    model = dataclasses.replace(ON[SLOW].model, kv_dtype_bytes=1)
    with pytest.raises(InputError, match="kv_bytes_per_token"):
        check_mixes([{P: ON[FAST], D: dataclasses.replace(ON[SLOW], model=model)}])
    check_mixes([{C: ON[FAST]}, {C: wide}])
    other = dataclasses.replace(ON[SLOW], model=dataclasses.replace(ON[SLOW].model, name="other"))
    with pytest.raises(InputError, match="model='other and tiny' must be the same"):
        check_mixes([{C: ON[FAST]}, {C: other}])


# Plans


def block(text: str, serves: float, weight: int | None = None) -> Block:
    placement = Placement.parse(text)
    interval = Interval(serves, serves, serves)
    goodput = Goodput(interval, (), (serves, serves))
    return Block(Trial(placement, State.COMPLETE, goodput=goodput), interval, weight or placement.num_gpus)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=4),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.integers(1, 20),
)
def test_plans_on_so_many_gpus_of_each_type(
    shapes: list[tuple[int, int, int]], there: tuple[int, int], amount: int
) -> None:
    """The least weight of any whole numbers of copies that the GPUs of both types hold."""
    blocks = []
    for fast, slow, serves in shapes:
        if fast and slow:
            blocks.append(block(f"{fast}xP:tp1@{FAST} + {slow}xD:tp1@{SLOW}", float(serves)))
        elif fast or slow:
            blocks.append(block(f"{fast or slow}xC:tp1@{FAST if fast else SLOW}", float(serves)))
    needs = [(f, s, serves) for f, s, serves in shapes if f or s]
    feasible = []
    for counts in itertools.product(range(7), repeat=len(needs)):
        used = [sum(n * need[i] for n, need in zip(counts, needs, strict=True)) for i in (0, 1)]
        serves = sum(n * need[2] for n, need in zip(counts, needs, strict=True))
        if used[0] <= there[0] and used[1] <= there[1]:
            feasible.append((sum(used), serves))
    limited = Limited(blocks, dict(zip((FAST, SLOW), there, strict=True)))
    assert limited.most == max(serves for _, serves in feasible)
    enough = [weight for weight, serves in feasible if serves >= amount]
    found = limited.cover(float(amount))
    if not enough:
        assert found == {}
        return
    assert sum(b.weight * n for b, n in found.items()) == min(enough)
    assert sum(b.serves.best * n for b, n in found.items()) >= amount
    plain = cover(blocks, float(amount))
    assert sum(b.weight * n for b, n in plain.items()) <= min(enough)


@pytest.mark.parametrize(
    ("by_role", "copies"), [({}, 3), ({P: 2}, 2), ({P: 2, D: 4}, 2), ({D: 1}, 1), ({C: 1, P: 3, D: 3}, 3)]
)
def test_copies_share_what_a_role_may_have(by_role: dict[Role, int], copies: int) -> None:
    for slow in (FAST, SLOW):
        placement = Placement.parse(f"1xP:tp1@{FAST} + 1xD:tp1@{slow}")
        types = {FAST: Cluster(6, 8), SLOW: Cluster(3, 8)}
        within = Fleet(types, 6, by_role).of({P: FAST, D: slow})
        assert within.copies(placement) == copies
    # Pools need not name the only type.
    assert Fleet({FAST: Cluster(6, 8)}, 6, by_role).all.copies(Placement.parse("1xP:tp1 + 1xD:tp1")) == copies


def test_copies_lie_in_nodes_of_their_own_types() -> None:
    """A pair on two types is in two nodes; what there is of whichever type says nothing of them."""
    pair = block(f"1xP:tp1@{FAST} + 1xD:tp1@{SLOW}", 1.0)
    same = block(f"2xP:tp1@{FAST} + 1xD:tp1@{FAST}", 1.0)
    alone = block(f"2xC:tp1@{SLOW}", 1.0)
    question = mixed_question(fleet=fleet(8, 8), num_requests=None)

    def sizer(total: int | None, there: dict[str, int] | None = None) -> _Sizer:
        return _Sizer(question, Rate(1.0), priced(1.0, 1.0), total, None, None, there)

    for chosen, nodes in (
        ({pair: 1}, 2),
        ({pair: 8}, 2),
        ({pair: 9}, 4),
        ({same: 2}, 1),
        ({same: 3}, 2),
        ({same: 2, pair: 2}, 2),
        ({same: 2, pair: 3}, 3),
        ({alone: 4}, 1),
        ({alone: 4, pair: 1}, 3),
    ):
        assert sizer(None)._num_nodes(chosen) == nodes
    assert sizer(2)._fits({pair: 1})
    assert not sizer(2)._fits({pair: 2})
    assert sizer(4, {FAST: 2, SLOW: 2})._fits({pair: 2})
    assert not sizer(6, {FAST: 2, SLOW: 4})._fits({pair: 3})
    assert not sizer(5, {FAST: 3, SLOW: 3})._fits({pair: 3})
    # Nine GPUs of a type are a node of eight and one alone: three pairs of three GPUs do not pack.
    assert not sizer(18, {FAST: 9, SLOW: 9})._fits({same: 3})
    assert sizer(20, {FAST: 11, SLOW: 9})._fits({same: 3})


def test_nodes_of_types_of_other_sizes() -> None:
    types = {FAST: Cluster(8, 8), SLOW: Cluster(8, 4)}
    question = mixed_question(fleet=Fleet(types, 16), num_requests=None)
    sizer = _Sizer(question, Rate(1.0), priced(1.0, 1.0), None, None, None)
    assert sizer._num_nodes({block(f"8xP:tp1@{FAST} + 8xD:tp1@{SLOW}", 1.0): 1}) == 3


def test_a_size_uses_what_is_there_of_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of copies whose goodputs are given: the better one is short, and the other one fills up."""
    blocks = [block(f"1xC:tp1@{FAST}", 10.0), block(f"1xC:tp1@{SLOW}", 4.0)]
    found = SearchResult(Best(None, None), tuple(b.trial for b in blocks), None, False, {}, 0, 0)
    monkeypatch.setattr("placement.size.search", lambda *_, **__: found)

    def plan(rate: float, there: dict[str, int]) -> Sizing:
        question = mixed_question(fleet=fleet(1, 1), num_requests=None, mode=Mode.COLOCATED)
        available = sum(there.values())
        prices = priced(1.0, 1.0)
        return size(question, Rate(rate), prices=prices, available_gpus=available, available_by_type=there)

    def copies(sizing: Sizing) -> dict[str, int]:
        assert sizing.plan is not None
        return {str(kind.placement): kind.count for kind in sizing.plan.copies}

    enough = plan(25.0, {FAST: 3, SLOW: 9})
    assert enough.fits
    assert copies(enough) == {f"1xC:tp1pp1@{FAST}": 3}
    assert enough.most == 3 * 10.0 + 9 * 4.0
    short = plan(25.0, {FAST: 2, SLOW: 9})
    assert short.fits
    assert copies(short) == {f"1xC:tp1pp1@{FAST}": 2, f"1xC:tp1pp1@{SLOW}": 2}
    question = mixed_question(fleet=fleet(1, 1), num_requests=None, mode=Mode.COLOCATED)
    there = {FAST: 2, SLOW: 9}
    in_all = size(question, Rate(25.0), prices=priced(1.0, 1.0), available_gpus=3, available_by_type=there)
    assert not in_all.fits
    assert in_all.most == 2 * 10.0 + 4.0
    few = plan(25.0, {FAST: 2, SLOW: 1})
    assert not few.fits
    assert copies(few) == {f"1xC:tp1pp1@{FAST}": 3}
    assert few.most == 24.0
