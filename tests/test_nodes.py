"""Nodes: where instances lie, what crosses nodes and what that costs, in simulator, twin and bounds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsim.errors import InfeasiblePlacementError, InputError
from dsim.nodes import Nodes
from dsim.options import Options, Routing
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import Handover, HandoverMode, PointToPoint, Profile
from dsim.simulate import simulate
from experiments.report.answer import Node, _placement
from placement import bounds
from placement.search import Affinity, Mode, Question, candidates
from placement.space import Cluster, cluster_of
from profiles.handover import with_nic
from profiles.shipped import find_profile
from tests.cli import Cli
from tests.reference.nodes import capacities, crossings, step_times, where
from tests.reference.systems import TICK_S, every_role, make_profile, make_trace, tokens_per_s
from tests.test_placement_bounds import case_of, profiles
from tests.test_twin import assert_equal_to_reference, systems


def pools_of(placement: Placement) -> tuple[tuple[tuple[int, ...], ...], ...]:
    found = placement.layout
    assert found is not None
    return found.pools


def test_prefill_and_decode_instances_are_paired_in_nodes() -> None:
    """Six pairs of 2 x 4 and 2 x 2 share a node; (3, 1) and (1, 5) would be 8."""
    placed = Placement.parse("4xP:tp2pp1 + 6xD:tp1pp1").on(Nodes(16, 8))
    assert pools_of(placed) == (((0,), (0,), (1,), (1,)), ((0,), (0,), (0,), (0,), (1,), (1,)))
    one = Placement.parse("2xP:tp2pp1 + 4xD:tp1pp1")
    assert one.on(Nodes(16, 8)) == one
    assert one.on(Nodes(16, 8)).layout is None
    with pytest.raises(InfeasiblePlacementError, match="do not pack into 2 nodes of 8 GPUs"):
        Placement.parse("3xC:tp5pp1").on(Nodes(16, 8))


def test_an_instance_larger_than_a_node_is_cut_into_equal_segments_of_stages() -> None:
    placed = Placement.parse("1xP:tp4pp6 + 2xD:tp1pp1").on(Nodes(32, 8))
    assert pools_of(placed) == (((0, 1, 2),), ((3,), (3,)))
    assert [pool.parallelism.inter_node_pp for pool in placed.pools] == [3, 1]
    assert placed.crossings == ((True, True),)
    # Three stages of three GPUs: two would fit a node, but not in equal segments.
    assert pools_of(Placement.parse("1xP:tp3pp3 + 1xD:tp4pp3").on(Nodes(32, 8)))[0] == ((0, 1, 2),)
    with pytest.raises(InfeasiblePlacementError):
        Placement.parse("1xC:tp16pp1").on(Nodes(32, 8))


def test_segments_lie_side_by_side() -> None:
    """Algorithm 2: stages of the same layers share a node, so no KV crosses."""
    nodes = Nodes(32, 8, side_by_side=True)
    placed = Placement.parse("1xP:tp4pp4 + 1xD:tp2pp4").on(nodes)
    # 24 GPUs: three nodes would do, but four stages are cut into two or four.
    assert pools_of(placed) == (((0, 1, 2, 3),), ((0, 1, 2, 3),))
    assert placed.crossings == ((False,),)
    apart = Placement.parse("1xP:tp4pp4 + 1xD:tp2pp4").on(Nodes(32, 8))
    assert pools_of(apart) == (((0, 1),), ((2,),))
    assert apart.crossings == ((True,),)
    with pytest.raises(InfeasiblePlacementError):
        Placement.parse("1xP:tp4pp2 + 1xD:tp8pp1").on(nodes)


@st.composite
def placed(draw: st.DrawFn, *, colocated: bool | None = None) -> Placement:
    """Draw a placement that packs onto some nodes; most do not fit one."""
    per_node = draw(st.sampled_from([2, 3, 4, 8]))
    degrees = [Parallelism(tp, pp) for tp in (1, 2, 4) for pp in (1, 1, 2, 4) if tp <= per_node]
    pools = [(draw(st.sampled_from(degrees)), draw(st.integers(1, 3))) for _ in range(2)]
    nodes = Nodes(per_node * draw(st.integers(2, 5)) + draw(st.integers(0, per_node - 1)), per_node)
    (first, n), (second, m) = pools
    if draw(st.booleans()) if colocated is None else colocated:
        placement = Placement.colocated(parallelism=first, count=n, policy=draw(st.sampled_from(list(Policy)[:3])))
    else:
        nodes = replace(nodes, side_by_side=draw(st.booleans()))
        placement = Placement.disaggregated(prefill=first, num_prefill=n, decode=second, num_decode=m)
    if not placement.packs(nodes):
        placement = placement.with_counts([1 for _ in placement.pools])
    assume(placement.packs(nodes))
    return placement.on(nodes)


@given(placed())
def test_every_stage_lies_where_the_text_puts_it(placement: Placement) -> None:
    stages = where(placement)
    found = placement.layout
    assert (stages is None) == (found is None)
    if stages is None or found is None:
        return
    assert placement.nodes is not None
    room = capacities(placement.nodes)
    for pool, expected, at in zip(placement.pools, stages, found.pools, strict=True):
        pp = pool.parallelism.pp
        assert [[segments[i * len(segments) // pp] for i in range(pp)] for segments in at] == expected
        assert {len(segments) for segments in at} == {pool.parallelism.inter_node_pp}
        for stage in (node for instance in expected for node in instance):
            room[stage] -= pool.parallelism.tp
    assert min(room) >= 0, "a node has more instances than GPUs"
    if not placement.is_colocated:
        assert placement.crossings is not None
        assert [list(row) for row in placement.crossings] == crossings(placement, layers=8)


@given(
    st.integers(1, 20),
    st.integers(1, 8),
    *[st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 4]), st.integers(1, 3)] * 2,
    st.booleans(),
)
def test_what_packs_is_what_the_text_finds_room_for(
    gpus: int, per_node: int, tp: int, pp: int, n: int, tp2: int, pp2: int, m: int, side_by_side: bool
) -> None:
    nodes = Nodes(gpus, per_node, side_by_side=side_by_side)
    placement = Placement.disaggregated(
        prefill=Parallelism(tp, pp), num_prefill=n, decode=Parallelism(tp2, pp2), num_decode=m
    )
    assert placement.packs(nodes) == (where(replace(placement, nodes=nodes)) is not None)


def linked(mode: HandoverMode = HandoverMode.DIRECT, *, node_tokens_per_s: float | None = 2.0**8) -> Profile:
    """Return a profile whose links are quick within a node and slow beyond it."""
    return replace(
        make_profile(
            prefill=(8, 0.5, 0),
            decode=(4, 1 / 32, 0.5),
            kv_tokens=400,
            handover=Handover(
                mode=mode,
                stalls_decode=False,
                latency_s=2 * TICK_S,
                bandwidth_bytes_per_s=tokens_per_s(2.0**12),
                node_bandwidth_bytes_per_s=None if node_tokens_per_s is None else tokens_per_s(node_tokens_per_s),
                watermark=1.0,
            ),
        ),
        p2p=PointToPoint(TICK_S / 2, 2.0**17, node_latency_s=4 * TICK_S, node_bandwidth_bytes_per_s=2.0**13),
    )


def test_a_transfer_takes_what_its_links_do() -> None:
    """One at a time: all are prefilled by instance 0, and decoded by instance 0 beside it and 1 in the other node."""
    placement = Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1").on(Nodes(4, 2))
    trace = make_trace([9000.0 * i for i in range(4)], [256] * 4, [2] * 4)
    profile = linked()
    options = Options(check=True, decode_routing=Routing.ROUND_ROBIN)
    result = simulate(placement, trace, profiles=profile, options=options)
    taken_s = result.columns["transfer_end_s"] - result.columns["transfer_start_s"]
    assert taken_s.tolist() == pytest.approx([2 * TICK_S + s for s in (256 / 2**12, 1.0) * 2], abs=1e-12)
    # 80 % of the network's 2^34 bytes per second, no faster than the link within.
    derived, near = (
        simulate(placed, trace, profiles=linked(node_tokens_per_s=None), options=options).columns["transfer_end_s"]
        for placed in (placement, Placement(placement.pools))
    )
    assert derived.tolist() == near.tolist()


@settings(max_examples=60)
@given(st.data())
def test_simulator_and_twin_agree_on_any_nodes(data: st.DataObject) -> None:
    drawn = data.draw(systems(dyadic=True))
    profile = drawn.profile
    slow = tokens_per_s(data.draw(st.sampled_from([2.0**6, 2.0**9])))
    p2p = PointToPoint(TICK_S / 2, 2.0**17, node_latency_s=3 * TICK_S, node_bandwidth_bytes_per_s=2.0**13)
    handover = replace(profile.handover, node_bandwidth_bytes_per_s=slow)
    profile = replace(profile, handover=handover, p2p=data.draw(st.sampled_from([p2p, replace(p2p, latency_s=0.0)])))
    placement = data.draw(placed(colocated=drawn.placement.is_colocated))
    assert_equal_to_reference(replace(drawn, placement=placement, profile=profile), tolerance_s=0.0)


@settings(max_examples=40)
@given(st.data())
def test_they_agree_where_the_costs_are_derived(data: st.DataObject) -> None:
    drawn = data.draw(systems(dyadic=False))
    placement = data.draw(placed(colocated=drawn.placement.is_colocated))
    assert_equal_to_reference(replace(drawn, placement=placement), tolerance_s=1e-9)


@settings(max_examples=60)
@given(profiles(), placed(), st.integers(0, 1000), st.sampled_from([1e-3, 0.1, 2.0]), st.floats(100.0, 1e5))
def test_bounds_hold_on_any_nodes(profile: Profile, placement: Placement, seed: int, gap_s: float, rate: float) -> None:
    """No request is faster than alone over the fastest links, and no run than its work and its links allow."""
    handover = replace(profile.handover, node_bandwidth_bytes_per_s=tokens_per_s(rate))
    profile = replace(profile, handover=handover)
    rng = np.random.default_rng(seed)
    n = 60
    prompts = rng.integers(1, 200, n)
    ticks = np.cumsum(rng.standard_exponential(n)) * gap_s / TICK_S
    trace = make_trace(ticks.tolist(), prompts.tolist(), rng.integers(1, 60, n).tolist())
    result = simulate(placement, trace, profiles=profile, options=Options(track_itl=False, check=True))
    assume(not result.columns["rejected"].any())
    case = case_of(result, profile)
    ttft_s, tpot_s, e2e_s = bounds.alone_s(placement, case)
    several, slack = result.columns["output_tokens"] > 1, 1 - 1e-9
    assert np.all(result.ttft_s >= ttft_s * slack)
    assert np.all(result.e2e_s >= e2e_s * slack)
    assert np.all(result.tpot_s[several] >= tpot_s[several] * slack - 1e-12)
    least = bounds.upper_bounds(placement, case)[0]
    span_s = float(result.columns["last_token_s"].max() - result.columns["arrival_s"][0])
    assert n / span_s <= least.rate_per_s * (1 + 1e-9), least.name


def test_where_all_kv_crosses_the_bound_is_that_of_the_network() -> None:
    profile = linked(node_tokens_per_s=64.0)
    trace = make_trace([0.0] * 8, [256] * 8, [2] * 8)
    apart = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1").on(Nodes(2, 1))
    case = case_of(simulate(apart, trace, profiles=profile), profile)
    # 256 tokens at 64 a second.
    assert {b.name: b.rate_per_s for b in bounds.upper_bounds(apart, case)}["prefill egress"] == pytest.approx(
        1 / (4 + 2 * TICK_S)
    )
    # Of several pairs one shares a node.
    mixed = Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1").on(Nodes(4, 2))
    assert {b.name: b.rate_per_s for b in bounds.upper_bounds(mixed, case)}["prefill egress"] == pytest.approx(
        2 / (256 / 2**12 + 2 * TICK_S)
    )


def test_a_network_faster_than_the_links_of_a_node_bounds_what_may_take_it() -> None:
    profile = linked(node_tokens_per_s=2.0**20)
    trace = make_trace([0.0] * 8, [256] * 8, [2] * 8)
    mixed = Placement.parse("1xP:tp1pp1 + 2xD:tp1pp1").on(Nodes(4, 2))
    result = simulate(mixed, trace, profiles=profile)
    tpot_s = bounds.alone_s(mixed, case_of(result, profile))[1]
    assert np.all(result.tpot_s >= tpot_s * (1 - 1e-9))
    within = bounds.alone_s(Placement.parse("1xP:tp1pp1 + 2xD:tp1pp1"), case_of(result, profile))[1]
    assert np.all(tpot_s < within)


def test_sends_from_node_to_node_are_derived_where_nobody_timed_them() -> None:
    profile = find_profile("66b", "a100-80g", engine="distserve")
    placement = Placement.parse("1xP:tp4pp2 + 1xD:tp4pp2").on(Nodes(16, 8, side_by_side=True))
    pool = placement.pools[1]
    plain, across = profile.latency_at(4), profile.latency_of(pool.parallelism)
    # 9216 values of two bytes a token over 80 % of 200 Gbit/s, after 20 µs.
    hop_s = 20e-6 + 100 * 9216 * 2 / 20e9
    assert across.decode_s(100, 5000) == pytest.approx(plain.decode_s(100, 5000) + hop_s, rel=1e-12)
    assert across.decode_s(7, 50) == pytest.approx(step_times(placement, pool, profile).decode_s(7, 50), rel=1e-12)
    # Nobody named nodes: as ever, nothing.
    assert profile.latency_of(Parallelism(4, 2)) is plain
    assert profile.kv_tokens(pool.parallelism) == profile.kv_tokens(Parallelism(4, 2))
    slow = with_nic(profile, 1e9)
    assert slow.latency_of(pool.parallelism).decode_s(100, 5000) == pytest.approx(
        plain.decode_s(100, 5000) + 20e-6 + 100 * 9216 * 2 / 1e9, rel=1e-12
    )
    assert slow.handover.reached_bytes_per_s(slow.gpu, crosses=True) == 1e9
    assert slow.sha256 != profile.sha256


def test_rack_scale_links_join_nodes() -> None:
    gpu = replace(make_profile().gpu, gpus_per_node=4, scale_up_domain_gpus=8)
    cluster = cluster_of(gpu, num_gpus=16, gpus_per_node=4)
    two = Placement.parse("2xP:tp4pp1 + 2xD:tp4pp1")
    assert cluster.on(Placement.parse("1xP:tp4pp1 + 1xD:tp4pp1")).nodes is None
    assert cluster.on(two).nodes == Nodes(16, 8)
    # Nodes that somebody names smaller than an ordinary GPU's stay so.
    assert cluster_of(make_profile().gpu, num_gpus=8, gpus_per_node=4).on(two.with_counts([1, 1])).nodes == Nodes(8, 4)


@pytest.mark.parametrize(
    ("notation", "cluster", "copies"),
    [
        ("1xP:tp4pp1 + 1xD:tp1pp1", Cluster(24, 8), 3),
        ("1xP:tp2pp1 + 1xD:tp1pp1", Cluster(20, 8), 5),
        ("2xP:tp4pp1 + 1xD:tp4pp1", Cluster(32, 8), 2),
        ("3xC:tp4pp1", Cluster(24, 8), 2),
        # Racks of 72 GPUs: two of them hold one copy that fills more than one, and each one that fits into it.
        ("10xP:tp4pp1 + 10xD:tp4pp1", Cluster(128, 4, 72), 1),
        ("5xP:tp4pp1 + 5xD:tp4pp1", Cluster(128, 4, 72), 2),
        # Of nodes of four GPUs each holds one instance.
        ("2xP:tp3pp1 + 2xD:tp3pp1", Cluster(24, 4, 72), 1),
        # Three GPUs in each of two nodes: two of them side by side in a node, four copies on eight halves.
        ("1xP:tp3pp2 + 1xD:tp2pp2", Cluster(32, 8, side_by_side=True), 2),
        ("1xP:tp2pp4 + 1xD:tp1pp4", Cluster(32, 8, side_by_side=True), 2),
    ],
)
def test_copies_have_room_each_as_the_one_that_is_simulated(notation: str, cluster: Cluster, copies: int) -> None:
    placement = cluster.on(Placement.parse(notation))
    assert cluster.copies(placement) == copies
    assert copies * placement.num_gpus <= cluster.num_gpus


def question(profile: Profile, **changes: object) -> Question:
    return replace(
        Question(every_role(profile), None, None, mode=Mode.DISAGGREGATED),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )


def test_low_affinity_is_every_pair_of_segments() -> None:
    """Algorithm 2: for inter-node degrees up to the nodes, all pairs of intra-node configurations that fit one."""
    profile = make_profile(tps=(1, 2, 4), pps=(1, 2, 4, 8))
    asked = question(profile, affinity=Affinity.LOW, num_gpus=16, gpus_per_node=4)
    degrees = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]
    expected = {
        (tp, inter * pp, tp2, inter * pp2)
        for inter in (1, 2, 4)
        for tp, pp in degrees
        for tp2, pp2 in degrees
        if tp * pp + tp2 * pp2 <= 4 and 8 % (inter * pp) == 0 and 8 % (inter * pp2) == 0
    }
    found = candidates(asked)
    assert {(*_degrees(p, 0), *_degrees(p, 1)) for p in found} == expected
    assert len(found) == len(expected)
    assert all(p.crossings in (None, ((False,),)) for p in found)


def _degrees(placement: Placement, pool: int) -> tuple[int, int]:
    at = placement.pools[pool].parallelism
    return at.tp, at.pp


def test_high_affinity_has_instances_of_several_nodes() -> None:
    profile = make_profile(tps=(1, 2, 4), pps=(1, 2, 4, 8))
    found = candidates(question(profile, num_gpus=8, gpus_per_node=4))
    assert any(p.pools[0].parallelism.num_gpus == 6 for p in found) is False
    assert {(4, 1), (2, 2), (1, 4)} <= {_degrees(p, 0) for p in found}
    large = candidates(question(profile, num_gpus=12, gpus_per_node=4))
    spans = [p for p in large if p.pools[0].parallelism.inter_node_pp == 2]
    assert {_degrees(p, 0) for p in spans} == {(4, 2), (2, 4), (1, 8)}


@given(placed())
def test_an_answer_is_read_with_its_layout(placement: Placement) -> None:
    pool = placement.pools[0]
    row = {
        "placement": str(placement),
        "policy": None if pool.policy is None else pool.policy.value,
        "token_budget": pool.token_budget,
        **placement.layout_dict(),
    }
    assert _placement(Node("result.json", "", json.loads(json.dumps(row)))) == placement


RUN = ("simulate", "-m", "13b", "-p", "4xP:tp2pp1 + 6xD:tp1pp1", "-r", "4", "-n", "60", "--finite")


def test_the_command_line_names_nodes(cli: Cli) -> None:
    out = cli(*RUN, "--nodes", "2", "--check").out
    assert "nodes of 8 GPUs: node 0: P0, P1, D0, D1, D2, D3; node 1: P2, P3, D4, D5" in out
    assert "KV crosses nodes between 12 of 24 pairs, at 20 GB/s a link, derived" in out
    assert "at 3.12 GB/s a link\n" in cli(*RUN, "--nodes", "2", "--nic", "25Gbit/s").out
    plan = json.loads(cli(*RUN, "--nodes", "2", "--dry-run", "--format", "json").out)
    assert plan["layout"] == {
        "num_gpus": 16,
        "gpus_per_node": 8,
        "side_by_side": False,
        "prefill": [[0], [0], [1], [1]],
        "decode": [[0], [0], [0], [0], [1], [1]],
    }
    assert "layout" not in json.loads(cli(*RUN, "--dry-run", "--format", "json").out)
    assert cli.refused(*RUN, "--nodes", "1") == (
        "--nodes: 1 its instances do not pack into 1 nodes of 8 GPUs; give more nodes, or smaller instances"
    )
    assert cli.refused(*RUN, "--affinity", "low") == "--affinity: 'low' belongs to --nodes; add --nodes N"
    assert cli.refused(*RUN, "--nic", "20GB/s").startswith("--nic: '20GB/s' belongs to --nodes; ")


def test_segments_must_divide_the_stages() -> None:
    with pytest.raises(InputError, match="inter_node_pp=2 must divide pp=3"):
        Parallelism(1, 3, inter_node_pp=2)
    assert math.isinf(Handover().reached_bytes_per_s(make_profile().gpu, crosses=False))
    assert Role.PREFILL.value == "P"
