"""The space is the filtered product of everything that could be tried."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.catalog import find_model
from dsim.model import Model
from dsim.pools import Parallelism, Placement, Policy
from placement.space import Cluster, colocated, disaggregated, paired, parallelisms, schedulings

OPT_13B = find_model("opt-13b")


def brute_parallelisms(model: Model, gpus: int) -> set[Parallelism]:
    return {
        Parallelism(tp, pp)
        for tp, pp in itertools.product(range(1, gpus + 1), repeat=2)
        if tp * pp <= gpus and model.attention_heads % tp == 0 and model.layers % pp == 0
        if model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    }


@pytest.mark.parametrize("name", ["opt-13b", "opt-66b", "llama-3.1-70b", "llama-3.1-8b"])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_parallelisms_are_the_product_that_divides(name: str, gpus: int) -> None:
    model = find_model(name)
    found = parallelisms(model, max_gpus=gpus)
    assert len(found) == len(set(found))
    assert set(found) == brute_parallelisms(model, gpus)


def test_parallelisms_of_opt_13b_on_a_node() -> None:
    assert {(p.tp, p.pp) for p in parallelisms(OPT_13B, max_gpus=8)} == {
        *((1, pp) for pp in (1, 2, 4, 5, 8)),
        *((2, pp) for pp in (1, 2, 4)),
        *((4, pp) for pp in (1, 2)),
        (5, 1),
        (8, 1),
    }


@pytest.mark.parametrize("gpus", [1, 2, 3, 5, 8])
def test_disaggregated_is_the_product_under_an_exact_budget(gpus: int) -> None:
    degrees = parallelisms(OPT_13B, max_gpus=gpus)
    found = list(disaggregated(degrees, degrees, cluster=Cluster(gpus, 8)))
    brute = {
        Placement.disaggregated(prefill=p, num_prefill=n, decode=d, num_decode=m)
        for p, d in itertools.product(degrees, repeat=2)
        for n, m in itertools.product(range(1, gpus + 1), repeat=2)
        if n * p.num_gpus + m * d.num_gpus <= gpus
    }
    assert len(found) == len(set(found))
    assert set(found) == brute


@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_colocated_is_the_product_with_every_policy(gpus: int) -> None:
    degrees = parallelisms(OPT_13B, max_gpus=gpus)
    variants = schedulings()
    assert {(v.policy, v.token_budget) for v in variants} == {
        (Policy.ORCA, None),
        (Policy.PREFILL_FIRST, None),
        (Policy.DECODE_FIRST, None),
        *((Policy.CHUNKED, budget) for budget in (512, 2048, 8192)),
    }
    found = list(colocated(degrees, variants, cluster=Cluster(gpus, 8)))
    brute = {
        Placement.colocated(parallelism=p, count=n, policy=v.policy, token_budget=v.token_budget)
        for p, n, v in itertools.product(degrees, range(1, gpus + 1), variants)
        if n * p.num_gpus <= gpus
    }
    assert len(found) == len(set(found))
    assert set(found) == brute


def test_pairs_are_single_instances_side_by_side_in_one_node() -> None:
    degrees = parallelisms(OPT_13B, max_gpus=8)
    found = set(paired(degrees, degrees, cluster=Cluster(8, 8)))
    assert found == {
        p for p in disaggregated(degrees, degrees, cluster=Cluster(8, 8)) if all(pool.count == 1 for pool in p.pools)
    }


def packs_by_trying(sizes: tuple[int, ...], nodes: tuple[int, ...]) -> bool:
    if not sizes:
        return True
    return any(
        packs_by_trying(sizes[1:], (*nodes[:i], nodes[i] - sizes[0], *nodes[i + 1 :]))
        for i in range(len(nodes))
        if nodes[i] >= sizes[0]
    )


@given(
    st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)
)
def test_packing_is_exact(gpus: int, per_node: int, a: int, n: int, b: int, m: int) -> None:
    cluster = Cluster(gpus, per_node)
    placement = Placement.disaggregated(
        prefill=Parallelism(a, 1), num_prefill=n, decode=Parallelism(b, 1), num_decode=m
    )
    nodes = tuple(min(per_node, gpus - i * per_node) for i in range(cluster.num_nodes))
    assert cluster.packs(placement) == packs_by_trying((a,) * n + (b,) * m, nodes)


def test_an_instance_lies_within_one_node() -> None:
    three_on_two_nodes = Placement.parse("3xC:tp5pp1")
    assert not Cluster(16, 8).packs(three_on_two_nodes)
    assert Cluster(16, 8).packs(Placement.parse("2xC:tp5pp1"))
