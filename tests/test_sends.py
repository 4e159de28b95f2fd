"""Sends between pipeline stages: what they add to a step, the same in simulator, twin and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.analytic import analytic_latency
from dsim.catalog import find_gpu, find_model
from dsim.errors import InputError
from dsim.latency import AffineLatency, LatencyModel
from dsim.options import Options
from dsim.pools import Parallelism, Placement, Policy
from dsim.profile import PointToPoint, Profile
from dsim.profile_file import parse_profile
from dsim.sends import SendingLatency, Sends, affine_with_sends, with_sends
from dsim.table_latency import DecodeRow, PrefillTable, TableLatency
from placement.floor import affine_floor
from profiles.estimate import estimated_profile
from profiles.shipped import find_profile, profile_file
from tests.reference.systems import TICK_S, make_profile, make_trace
from tests.test_twin import Listed, System, assert_equal_to_reference

SENDS = Sends(fixed_s=3 * TICK_S, token_s=TICK_S / 64)


def pipelined(p2p: PointToPoint) -> Profile:
    profile = make_profile(tps=(1,), pps=(1, 2, 3), prefill=(8, 1, 0), decode=(8, 0, 2))
    return replace(profile, p2p=p2p)


def test_without_numbers_nothing_changes() -> None:
    profile = pipelined(PointToPoint())
    for pp in (1, 3):
        assert profile.latency_of(Parallelism(1, pp)) is profile.latency_at(1)
    some = pipelined(PointToPoint(latency_s=1.0))
    assert some.latency_of(Parallelism(1, 1)) is some.latency_at(1)
    assert some.latency_of(Parallelism(1, 2)) is some.latency_of(Parallelism(1, 2))
    for engine in ("distserve", "vllm"):
        assert find_profile("66b", "a100-80g", engine=engine).p2p == PointToPoint()


def test_a_step_sends_once_from_stage_to_stage() -> None:
    """T(pp) = T + (pp - 1) · (latency + tokens · hidden size · bytes of an activation / rate)."""
    p2p = PointToPoint(latency_s=TICK_S, bandwidth_bytes_per_s=1024.0)
    profile = pipelined(p2p)
    token_s = profile.model.hidden_size * profile.model.dtype_bytes / 1024.0
    for pp in (1, 2, 3):
        latency, plain = profile.latency_of(Parallelism(1, pp)), profile.latency_at(1)
        for tokens in (1, 7, 500):
            sends_s = (pp - 1) * (TICK_S + tokens * token_s)
            assert latency.prefill_s([(tokens, 3)]) == pytest.approx(
                plain.prefill_s([(tokens, 3)]) + sends_s, rel=1e-12
            )
            assert latency.decode_s(tokens, 9000) == pytest.approx(plain.decode_s(tokens, 9000) + sends_s, rel=1e-12)
        mixed = latency.mixed_s([(5, 0), (6, 2)], 4, 400) - plain.mixed_s([(5, 0), (6, 2)], 4, 400)
        assert mixed == pytest.approx((pp - 1) * (TICK_S + 15 * token_s), rel=1e-12)


def test_sends_to_another_node_cost_what_its_link_does() -> None:
    gpu = replace(make_profile().gpu, gpus_per_node=4, scale_up_domain_gpus=4)
    p2p = PointToPoint(latency_s=1.0, node_latency_s=10.0)
    profile = make_profile(tps=(1, 2), pps=(1, 2, 4, 8), prefill=(8, 1, 0), decode=(8, 0, 2))
    profile = replace(profile, gpu=gpu, p2p=p2p)

    def added_s(tp: int, pp: int) -> float:
        return profile.latency_of(Parallelism(tp, pp)).decode_s(1, 1) - profile.latency_at(tp).decode_s(1, 1)

    assert [round(added_s(1, pp)) for pp in (2, 4, 8)] == [1, 3, 6 + 10]
    assert [round(added_s(2, pp)) for pp in (2, 4, 8)] == [1, 2 + 10, 4 + 30]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sends_bend_with_the_model(tp: int) -> None:
    """Every token costs a send, those beyond a bend too, where a slope stands instead of the first one."""
    plain = find_profile("llama-3.1-70b", "h100", engine="vllm").latency_at(tp)
    assert isinstance(plain, AffineLatency)
    assert plain.prefill.bends
    assert plain.small.bends
    sending = affine_with_sends(plain, Sends(fixed_s=0.001, token_s=3e-6))
    for tokens in (1, 40, 400, 4000):
        added_s = 0.001 + 3e-6 * tokens
        assert sending.prefill_s([(tokens, 0)]) - plain.prefill_s([(tokens, 0)]) == pytest.approx(added_s, rel=1e-9)
    for requests in (1, 50, 90, 100, 1000):
        added_s = 0.001 + 3e-6 * requests
        both_s = sending.decode_s(requests, 200_000), plain.decode_s(requests, 200_000)
        assert both_s[0] - both_s[1] == pytest.approx(added_s, rel=1e-9)


def _table() -> TableLatency:
    prefill = PrefillTable(tokens=(16, 64, 256), step_s=((0.1, 0.2, 0.9),))
    rows = (DecodeRow(1, (10, 100), (0.1, 0.2)), DecodeRow(8, (10, 100), (0.2, 0.7)))
    return TableLatency(prefill, rows, TableLatency.range_of(prefill, rows))


@pytest.mark.parametrize(
    "model",
    [
        make_profile(prefill=(8, 1, 0), decode=(8, 1 / 8, 2), decode_large=(4, 1 / 8, 3)).latency[1],
        _table(),
        analytic_latency(find_model("llama-3.1-8b"), find_gpu("h100"), 2),
        analytic_latency(find_model("gpt-oss-20b"), find_gpu("h100"), 2),
    ],
    ids=["affine", "table", "analytic", "windows"],
)
def test_one_step_by_every_way_to_ask(model: LatencyModel) -> None:
    wrapped, used = SendingLatency(model, SENDS), with_sends(model, SENDS)
    assert isinstance(used, LatencyModel)
    assert used.valid_range == model.valid_range
    chunks = [(17, 0), (40, 20)]
    for latency in (wrapped, used):
        assert latency.prefill_s(chunks) == pytest.approx(model.prefill_s(chunks) + SENDS.step_s(57), rel=1e-12)
        assert latency.decode_s(6, 300) == pytest.approx(model.decode_s(6, 300) + SENDS.step_s(6), rel=1e-12)
        mixed_s = model.mixed_s(chunks, 6, 300) + SENDS.step_s(63)
        assert latency.mixed_s(chunks, 6, 300) == pytest.approx(mixed_s, rel=1e-12)
        run = [latency.decode_s(6, 300 + 6 * i) for i in range(9)]
        assert latency.decode_run_s(6, 300, 9) == pytest.approx(run, rel=1e-12)
        line, plain = latency.decode_line(6), model.decode_line(6)
        assert (line is None) == (plain is None)
        if line is not None:
            assert line[0] + line[1] * 300 == pytest.approx(run[0], rel=1e-12)


def test_bounds_stand_on_a_floor_with_sends() -> None:
    model = analytic_latency(find_model("llama-3.1-70b"), find_gpu("h100"), 4)
    floor, used = affine_with_sends(affine_floor(model), SENDS), SendingLatency(model, SENDS)
    for tokens in (1, 31, 512, 3000, 9000):
        assert floor.prefill_s([(tokens, 64)]) <= used.prefill_s([(tokens, 64)])
        assert floor.decode_s(min(tokens, 256), tokens * 50) <= used.decode_s(min(tokens, 256), tokens * 50)
        assert floor.mixed_s([(tokens, 0)], 16, 16_000) <= used.mixed_s([(tokens, 0)], 16, 16_000)
    assert floor.decode_s(1, 1) > affine_floor(model).decode_s(1, 1)


@given(
    notation=st.sampled_from(["1xP:tp1pp3 + 1xD:tp1pp2", "2xP:tp1pp1 + 1xD:tp1pp3", "1xC:tp1pp2", "1xC:tp1pp3"]),
    policy=st.sampled_from(list(Policy)),
    latency_ticks=st.sampled_from([0, 1, 5]),
    listed=st.booleans(),
    requests=st.lists(
        st.tuples(st.sampled_from([0, 2, 30, 200]), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=25
    ),
)
def test_simulator_and_twin_send_alike(
    notation: str, policy: Policy, latency_ticks: int, listed: bool, requests: list[tuple[int, int, int]]
) -> None:
    profile = pipelined(PointToPoint(latency_ticks * TICK_S, bandwidth_bytes_per_s=2.0**16))
    if listed:
        profile = replace(profile, latency={1: Listed(profile.latency[1])})
    arrivals = [float(sum(gap for gap, _, _ in requests[: i + 1])) for i in range(len(requests))]
    trace = make_trace(arrivals, [p for _, p, _ in requests], [n for _, _, n in requests])
    placement = Placement.parse(notation, policy=policy)
    assert_equal_to_reference(System(placement, profile, trace, Options(check=True)), tolerance_s=1e-9)


def test_estimates_send() -> None:
    profile = estimated_profile(find_model("llama-3.1-70b"), find_gpu("a100-80g"))
    plain, piped = profile.latency_at(2), profile.latency_of(Parallelism(2, 4))
    added_s = piped.prefill_s([(8192, 0)]) - plain.prefill_s([(8192, 0)])
    # Three sends of 134 MB, hidden states and residual, over NVLink: no faster than its datasheet.
    assert added_s > 3 * 2 * 8192 * 8192 * 2 / find_gpu("a100-80g").nvlink_bytes_per_s
    assert added_s < 0.05 * plain.prefill_s([(8192, 0)])
    assert 0 < piped.decode_s(1, 100) - plain.decode_s(1, 100) < 1e-3


def test_a_file_may_say_what_a_send_takes() -> None:
    text = profile_file(model="13b", gpu="a100-80g", engine="distserve").read_text()
    text += "p2p: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 1.0e+11}\n"
    one = parse_profile(text.encode(), file="p").p2p
    assert one == PointToPoint(2e-5, 1e11, node_latency_s=2e-5, node_bandwidth_bytes_per_s=1e11)
    two = text.replace("1.0e+11}", "1.0e+11, across_nodes: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 2.0e+10}}")
    assert parse_profile(two.encode(), file="p").p2p == replace(
        one, node_latency_s=1e-4, node_bandwidth_bytes_per_s=2e10
    )
    with pytest.raises(InputError, match=r"p2p\.bandwidth_bytes_per_s=100 must be >= 1000000"):
        parse_profile(text.replace("1.0e+11", "100").encode(), file="p")
