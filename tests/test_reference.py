"""The reference twin against pencil and paper. All times in ticks of 1/1024 s.

Unless a test says otherwise a prefill step of t tokens takes 8 + t ticks, a decode step of B requests 4 + B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from dsim.latency import HostOverhead
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Preemption, Profile
from tests.reference import ReferenceResult, run_reference, run_reference_closed
from tests.reference.systems import TICK_S, every_role, make_profile, make_trace, tokens_per_s

P1_D1 = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
ONE_AT_A_TIME = {Role.PREFILL: BatchLimits(requests=1)}


def ticks(times_s: NDArray[np.float64] | Sequence[float]) -> list[float]:
    return [float(t) / TICK_S for t in times_s]


def tokens(result: ReferenceResult) -> list[list[float]]:
    return [ticks(times) for times in result.token_times]


def handover(
    *,
    first_token_from: FirstToken = FirstToken.PREFILL,
    stalls_decode: bool = False,
    latency: float = 0.0,
    tokens_per_tick: float = np.inf,
    watermark: float = 1.0,
    mode: HandoverMode = HandoverMode.DIRECT,
    hop: float = 0.0,
    post: float = 0.0,
    post_block: float = 0.0,
    step: float = 0.0,
) -> Handover:
    return Handover(
        first_token_from=first_token_from,
        stalls_decode=stalls_decode,
        latency_s=latency * TICK_S,
        bandwidth_bytes_per_s=tokens_per_s(tokens_per_tick / TICK_S),
        watermark=watermark,
        mode=mode,
        hop_s=hop * TICK_S,
        post_s=post * TICK_S,
        post_block_s=post_block * TICK_S,
        step_s=step * TICK_S,
    )


def test_prefill_batches() -> None:
    # At most 10 tokens and 2 requests. 0: [4, 5], the third would be one request too many: 8 + 9 = 17.
    # 17: [3], since 3 + 12 > 10: 11 -> 28. 28: [12] is over the limit and goes alone: 20 -> 48. 48: [1]: 9 -> 57.
    profile = make_profile(limits={Role.PREFILL: BatchLimits(tokens=10, requests=2)})
    trace = make_trace([0, 0, 0, 1, 1], [4, 5, 3, 12, 1], [1] * 5)
    result = run_reference(P1_D1, trace, every_role(profile))
    assert [step.prefill_ids for step in result.steps] == [(0, 1), (2,), (3,), (4,)]
    assert ticks(result.prefill_start_s) == [0, 0, 17, 28, 48]
    assert tokens(result) == [[17], [17], [28], [48], [57]]
    assert list(result.decode_instance) == [-1] * 5
    assert np.all(np.isnan(result.transfer_start_s))


def test_prefill_token_limit_replaces_the_profiles() -> None:
    # At most 4 tokens: each prompt alone, 12, then 13, then 11.
    profile = make_profile(limits={Role.PREFILL: BatchLimits(tokens=10)})
    trace = make_trace([0, 0, 0], [4, 5, 3], [1] * 3)
    result = run_reference(P1_D1, trace, every_role(profile), prefill_token_limit=4)
    assert tokens(result) == [[12], [25], [36]]


def test_prefill_computes_only_what_is_not_cached() -> None:
    # 8 of 20 tokens: 8 + 8, and reading 12 cached tokens' KV at 1 tick each: 28.
    profile = make_profile(decode=(4, 1, 1))
    result = run_reference(P1_D1, make_trace([0], [20], [1], cached=[12]), every_role(profile))
    assert tokens(result) == [[28]]


def test_front_end_time_comes_before_the_queue() -> None:
    # Arrives at 5, is queued at 7, 8 + 4 later has its token.
    result = run_reference(P1_D1, make_trace([5], [4], [1]), every_role(make_profile(request_s=2 * TICK_S)))
    assert ticks(result.arrival_s) == [5]
    assert ticks(result.prefill_start_s) == [7]
    assert tokens(result) == [[19]]


def test_prefill_stages() -> None:
    # Two stages, one request a batch, 2 ticks of host work in stage 1. T = 16, 32, 16; T/2 = 8, 16, 8.
    # 0: stage 1 0-10, stage 2 10-18. 1: stage 1 10-28, stage 2 28-44.
    # 2: stage 1 28-38, then waits for stage 2 to be left by 1: 44-52.
    profile = make_profile(limits=ONE_AT_A_TIME, host={Role.PREFILL: HostOverhead(step_s=2 * TICK_S)})
    placement = Placement.parse("1xP:tp1pp2 + 1xD:tp1pp1")
    result = run_reference(placement, make_trace([0, 0, 0], [8, 24, 8], [1] * 3), every_role(profile))
    assert ticks(result.prefill_start_s) == [0, 10, 28]
    assert ticks(result.prefill_end_s) == [18, 44, 52]


def test_pipelined_host_overhead_replaces_the_plain_one() -> None:
    # As above, with 4 ticks instead of 2: stage 1 0-12, stage 2 12-20.
    profile = make_profile(
        host={Role.PREFILL: HostOverhead(step_s=2 * TICK_S)},
        host_pipelined={Role.PREFILL: HostOverhead(step_s=4 * TICK_S)},
    )
    placement = Placement.parse("1xP:tp1pp2 + 1xD:tp1pp1")
    assert tokens(run_reference(placement, make_trace([0], [8], [1]), every_role(profile))) == [[20]]


def test_prefill_memory_is_the_buffer() -> None:
    # Blocks of 4, 4 blocks on the prefill side; prompts of 2 blocks; a transfer takes 100 and stalls the decode loop.
    # 0: [0, 1] fill the cache: 24. Pulls 0: 24-124, 1: 124-224. 124: two blocks are free, so 2 is prefilled: 124-140;
    # pulled 224-324. All join at 324: 4 + 3 -> 331.
    profile = make_profile(
        kv_tokens={Parallelism(1, 1): 16, Parallelism(2, 1): 1 << 20},
        block_tokens=4,
        handover=handover(stalls_decode=True, latency=100),
        decode=(8, 0, 2),  # Halved by tp 2: 4 + B.
    )
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp2pp1")
    result = run_reference(placement, make_trace([0, 0, 0], [8, 8, 8], [2, 2, 2]), every_role(profile))
    assert ticks(result.prefill_start_s) == [0, 0, 124]
    assert ticks(result.transfer_start_s) == [24, 124, 224]
    assert ticks(result.transfer_end_s) == [124, 224, 324]
    assert ticks(result.last_token_s) == [331, 331, 331]


@pytest.mark.parametrize(
    ("stalls_decode", "expected"),
    [
        # Two prefill instances end at 18; the ingress takes 0: 18-30, then 1: 30-42 (2 + 10 tokens, one a tick).
        # Not stalled: 0 decodes alone at 30-35-40-45, 1 joins at 45, B = 2: 51.
        (False, [[18, 35, 40, 45, 51], [18, 51]]),
        # Stalled: 1 is pulled before the loop goes on; B = 2 from 42: 48; then 0 alone.
        (True, [[18, 48, 53, 58, 63], [18, 48]]),
    ],
)
def test_transfers_share_the_ingress_port(stalls_decode: bool, expected: list[list[float]]) -> None:
    profile = make_profile(handover=handover(stalls_decode=stalls_decode, latency=2, tokens_per_tick=1))
    placement = Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1")
    result = run_reference(placement, make_trace([0, 0], [10, 10], [5, 2]), every_role(profile))
    assert list(result.prefill_instance) == [0, 1]
    assert ticks(result.transfer_start_s) == [18, 30]
    assert ticks(result.transfer_end_s) == [30, 42]
    assert tokens(result) == expected
    assert ticks(result.decode_start_s) == ([42, 42] if stalls_decode else [30, 45])


def test_transfers_share_the_egress_port() -> None:
    # One prefill instance, two decode instances: both prompts are ready at 28 and leave one after the other.
    profile = make_profile(handover=handover(latency=2, tokens_per_tick=1))
    placement = Placement.parse("1xP:tp1pp1 + 2xD:tp1pp1")
    result = run_reference(placement, make_trace([0, 0], [10, 10], [2, 2]), every_role(profile))
    assert list(result.decode_instance) == [0, 1]
    assert ticks(result.transfer_start_s) == [28, 40]
    assert tokens(result) == [[28, 45], [28, 57]]


def test_links_follow_the_smaller_side() -> None:
    # tp 2 halves the prefill: 8. 8 tokens over min(2, 4) links: 4 -> 12.
    profile = make_profile(handover=handover(tokens_per_tick=1))
    placement = Placement.parse("1xP:tp2pp1 + 1xD:tp2pp2")
    result = run_reference(placement, make_trace([0], [8], [2]), every_role(profile))
    assert ticks(result.transfer_end_s) == [12]


@pytest.mark.parametrize(
    ("first_token_from", "expected"),
    [
        # Prefill ends at 18, the transfer at 30. A decode step at context c takes 4 + c + 1.
        (FirstToken.PREFILL, [18, 46, 63]),  # contexts 11, 12: 16, 17
        (FirstToken.TRANSFER_END, [30, 46, 63]),
        (FirstToken.DECODE, [45, 61, 78]),  # contexts 10, 11, 12: 15, 16, 17
    ],
)
def test_who_shows_the_first_token(first_token_from: FirstToken, expected: list[float]) -> None:
    profile = make_profile(
        decode=(4, 1, 1), handover=handover(first_token_from=first_token_from, latency=2, tokens_per_tick=1)
    )
    result = run_reference(P1_D1, make_trace([0], [10], [3]), every_role(profile))
    assert tokens(result) == [expected]
    assert ticks(result.decode_start_s) == [30]


@pytest.mark.parametrize(
    ("first_token_from", "expected", "decode_instance"),
    [(FirstToken.PREFILL, 18, -1), (FirstToken.TRANSFER_END, 30, 0), (FirstToken.DECODE, 35, 0)],
)
def test_one_token(first_token_from: FirstToken, expected: float, decode_instance: int) -> None:
    profile = make_profile(handover=handover(first_token_from=first_token_from, latency=2, tokens_per_tick=1))
    result = run_reference(P1_D1, make_trace([0], [10], [1]), every_role(profile))
    assert tokens(result) == [[expected]]
    assert list(result.decode_instance) == [decode_instance]


@pytest.mark.parametrize(
    ("watermark", "third_transfer", "third_token"),
    [
        # Prefill of all three until 32. One request a batch on the decode side. 0 is pulled 32-42 and decodes
        # 42-47-52-57; 1 is pulled 42-52 and waits.
        # Watermark of one block: 2 is pulled once 1 has joined, at 57-67; 1 is done at 62; 2 decodes 67-72.
        (1e-9, 57, 72),
        # No watermark to speak of: 2 is pulled 52-62, and decodes 62-67.
        (1.0, 52, 67),
    ],
)
def test_watermark(watermark: float, third_transfer: float, third_token: float) -> None:
    profile = make_profile(
        limits={Role.DECODE: BatchLimits(requests=1)}, handover=handover(latency=10), watermark=watermark
    )
    result = run_reference(P1_D1, make_trace([0, 0, 0], [8, 8, 8], [4, 2, 2]), every_role(profile))
    assert ticks(result.transfer_start_s) == [32, 42, third_transfer]
    assert tokens(result) == [[32, 47, 52, 57], [32, 62], [32, third_token]]


@pytest.mark.parametrize("stalls_decode", [False, True])
def test_micro_batches(stalls_decode: bool) -> None:
    # Prefill (pp 1) ends at 24, transfers take no time. 0 joins micro-batch 0, 1 micro-batch 1. T = 5, 2.5 a stage,
    # 1 tick of the driver a launch.
    # mb 0: launch 24, stage 1 25-27.5, stage 2 27.5-30. mb 1: launch 25, stage 1 27.5-30, stage 2 30-32.5.
    # mb 0: launch 30, stage 1 31-33.5, stage 2 33.5-36. mb 1: launch 32.5, stage 1 33.5-36, stage 2 36-38.5.
    profile = make_profile(
        host={Role.DECODE: HostOverhead(step_s=TICK_S)}, handover=handover(stalls_decode=stalls_decode)
    )
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp2")
    result = run_reference(placement, make_trace([0, 0], [8, 8], [3, 3]), every_role(profile))
    assert tokens(result) == [[24, 30, 36], [24, 32.5, 38.5]]
    decode_steps = [step for step in result.steps if step.role == "D"]
    assert [step.index for step in decode_steps] == [0, 1, 0, 1]
    assert ticks([step.launch_s for step in decode_steps]) == [24, 25, 30, 32.5]


@pytest.mark.parametrize(
    ("mode", "transfer_start", "expected"),
    [
        # 0 and 1 are prefilled until 24, 2 until 36. Transfers take 1: 0 24-25, 1 25-26. T = 5, 2.5 a stage.
        # mb 0 is launched at 25, 30, 35, 40, mb 1 at 26, 32.5, 37.5. So at 36 both are in flight.
        # Direct: 2 arrives at 37. 37.5: both micro-batches have context 11, so it joins mb 0, launched at 40: T = 6,
        # stage 1 40-43, stage 2 43-46.
        (HandoverMode.DIRECT, 36, 46),
        # Pulled at 37.5, here at 38.5. 40: mb 0 has context 12, mb 1, in flight, 11. Its next launch is at 42.5:
        # stage 1 42.5-45.5, stage 2 45.5-48.5.
        (HandoverMode.PULL_AT_STEP, 37.5, 48.5),
    ],
)
def test_pulls_wait_for_the_driver_and_a_micro_batch(
    mode: HandoverMode, transfer_start: float, expected: float
) -> None:
    profile = make_profile(limits={Role.PREFILL: BatchLimits(requests=2)}, handover=handover(latency=1, mode=mode))
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp2")
    result = run_reference(placement, make_trace([0, 0, 8], [8, 8, 4], [10, 10, 2]), every_role(profile))
    assert ticks(result.transfer_start_s) == [24, 25, transfer_start]
    assert tokens(result)[2] == [36, expected]


@pytest.mark.parametrize(
    ("mode", "stalls_decode", "expected"),
    [
        # Posting costs 3 and half a tick a block of 4: 0 (10 tokens) 4.5, 1 (4 tokens) 3.5. Prefill of 0 until 18, of 1
        # 20-32. Transfers of 2 + 10 and 2 + 4.
        # 0: 18-30, then 30 + 4.5 + 5 = 39.5. 1: 32-38, during that step, and paid by the next one: 39.5 + 3.5 + 6 = 49.
        (HandoverMode.DIRECT, False, [[18, 39.5, 49, 54], [32, 49]]),
        # 1 is pulled at 39.5, until 45.5; the launch after that pays: 45.5 + 3.5 + 6 = 55.
        (HandoverMode.DIRECT, True, [[18, 39.5, 55, 60], [32, 55]]),
        # 1 is pulled at 39.5, and the step of 0 alone pays for it: 39.5 + 3.5 + 5 = 48. It is here at 45.5: 48 + 6.
        (HandoverMode.PULL_AT_STEP, False, [[18, 39.5, 48, 54], [32, 54]]),
        # 0 is posted at 0 and here at 18 + 2 + 10/8 = 21.25, 1 at 20, here at 32 + 2 + 4/8 = 34.5. The first step pays
        # for both: 21.25 + 8 + 5 = 34.25, just before 1 comes: 39.25. Then both: 45.25.
        (HandoverMode.LAYER_WISE, False, [[18, 34.25, 39.25, 45.25], [32, 45.25]]),
    ],
)
def test_the_next_launch_pays_for_posting(mode: HandoverMode, stalls_decode: bool, expected: list[list[float]]) -> None:
    profile = make_profile(
        block_tokens=4,
        handover=handover(latency=2, tokens_per_tick=1, mode=mode, stalls_decode=stalls_decode, post=3, post_block=0.5),
    )
    result = run_reference(P1_D1, make_trace([0, 20], [10, 4], [4, 2]), every_role(profile))
    assert tokens(result) == expected


def test_the_second_hop_comes_before_the_transfer() -> None:
    # Prefill 18, handed over at 25, here at 37. A request of one token takes no second hop.
    profile = make_profile(limits=ONE_AT_A_TIME, handover=handover(latency=2, tokens_per_tick=1, hop=7))
    result = run_reference(P1_D1, make_trace([0, 0], [10, 4], [3, 1]), every_role(profile))
    assert ticks(result.transfer_start_s)[0] == 25
    assert tokens(result) == [[18, 42, 47], [30]]


def test_a_prompt_is_routed_after_its_second_hop() -> None:
    # 0: prefill 0-16, handed over at 26 and done at 31. 1: prefill 14-30, handed over at 40, when both are empty.
    placement = Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1")
    trace = make_trace([0, 14], [8, 8], [2, 2])
    result = run_reference(placement, trace, every_role(make_profile(handover=handover(hop=10))))
    assert list(result.decode_instance) == [0, 0]
    assert tokens(result) == [[16, 31], [30, 45]]


def test_prompts_keep_their_prefill_blocks_during_the_second_hop() -> None:
    # 2 blocks of 4 for prompts of 8. 0: 0-16, handed over at 26, here at 30; only then is 1 prefilled: 46, 60.
    profile = make_profile(
        kv_tokens={Parallelism(1, 1): 8, Parallelism(2, 1): 1 << 20},
        block_tokens=4,
        handover=handover(latency=4, hop=10),
    )
    result = run_reference(
        Placement.parse("1xP:tp1pp1 + 1xD:tp2pp1"), make_trace([0, 0], [8, 8], [2, 2]), every_role(profile)
    )
    assert ticks(result.prefill_start_s) == [0, 30]
    assert ticks(result.transfer_end_s) == [30, 60]


def test_each_role_pays_the_step_cost_of_its_own_connector() -> None:
    # Two stages each. Prefill, both prompts together: T = 24, 1 + 12 in stage 1, 12 in stage 2: 25. Decode: the driver
    # 3, then T = 5: 33, 41. Nothing else of the prefill side's handover counts.
    profiles = {
        Role.PREFILL: make_profile(handover=handover(step=1, hop=99, post=99, mode=HandoverMode.PULL_AT_STEP)),
        Role.DECODE: make_profile(handover=handover(step=3)),
    }
    placement = Placement.parse("1xP:tp1pp2 + 1xD:tp1pp2")
    result = run_reference(placement, make_trace([0, 0], [8, 8], [3, 1]), profiles)
    assert tokens(result) == [[25, 33, 41], [25]]


def test_recomputing_pays_the_step_cost_too() -> None:
    # SHORT_OF_MEMORY with 1 tick more a launch on the decode side: 22 + 7, then 6, 6; recompute: 41 + 18 = 59, 65.
    profile = short_of_memory(Preemption.RECOMPUTE, kv_tokens=20)
    decode = replace(profile, handover=handover(step=1))
    result = run_reference(P1_D1, make_trace([0, 0], [7, 7], [4, 4]), {Role.PREFILL: profile, Role.DECODE: decode})
    assert tokens(result) == [[22, 29, 35, 41], [22, 29, 59, 65]]


@pytest.mark.parametrize(
    ("tokens_per_tick", "arrival"),
    [
        # Prefill until 16. The last of 8 layers: 16 + 2 + 1; all of them in 10 ticks from 0 on.
        (1.0, 19),
        # A slow link is not done by then: 2 + 32 from 0 on.
        (0.25, 34),
        # No time but the latency.
        (np.inf, 18),
    ],
)
def test_layers_follow_the_prefill(tokens_per_tick: float, arrival: float) -> None:
    profile = make_profile(handover=handover(latency=2, tokens_per_tick=tokens_per_tick, mode=HandoverMode.LAYER_WISE))
    result = run_reference(P1_D1, make_trace([0], [8], [2]), every_role(profile))
    assert ticks(result.transfer_start_s) == [0]
    assert ticks(result.transfer_end_s) == [arrival]
    assert tokens(result) == [[16, arrival + 5]]


def test_layer_wise_transfers_hold_ports_for_their_seconds_and_may_overtake() -> None:
    # Prefilled together: 8 + 24 = 32. 0 holds the ports 0-18, 1 18-28; their last layers come at 32 + 2 + 2 and
    # 32 + 2 + 1. So 1 decodes alone, 35-40, then both: 46.
    profile = make_profile(handover=handover(latency=2, tokens_per_tick=1, mode=HandoverMode.LAYER_WISE))
    result = run_reference(P1_D1, make_trace([0, 0], [16, 8], [2, 3]), every_role(profile))
    assert ticks(result.transfer_start_s) == [0, 18]
    assert ticks(result.transfer_end_s) == [36, 35]
    assert tokens(result) == [[32, 46], [32, 40, 46]]


def test_layer_wise_transfers_that_end_together_keep_their_order() -> None:
    # Prefilled until 24, both here at 27. One request a batch: 0 first, 27-32, then 1.
    profile = make_profile(
        limits={Role.DECODE: BatchLimits(requests=1)},
        handover=handover(latency=2, tokens_per_tick=1, mode=HandoverMode.LAYER_WISE),
    )
    result = run_reference(P1_D1, make_trace([0, 0], [8, 8], [2, 2]), every_role(profile))
    assert ticks(result.transfer_end_s) == [27, 27]
    assert tokens(result) == [[24, 32], [24, 37]]


def test_a_layer_wise_transfer_posted_late_takes_all_its_seconds() -> None:
    # As above, but 1 is pulled only when 0 has joined: 27-37; 0 decodes 27-32-37 and then with it: 43.
    profile = make_profile(
        handover=handover(latency=2, tokens_per_tick=1, watermark=1e-9, mode=HandoverMode.LAYER_WISE)
    )
    result = run_reference(P1_D1, make_trace([0, 0], [8, 8], [4, 2]), every_role(profile))
    assert ticks(result.transfer_start_s) == [0, 27]
    assert ticks(result.transfer_end_s) == [27, 37]
    assert tokens(result) == [[24, 32, 37, 43], [24, 43]]


def test_layer_wise_prompts_leave_a_pipeline_when_it_is_known_when_they_end() -> None:
    # Two stages of 8. 0: launched 0, ends 16; ports 0-10, here at 19. 1: launched 8, ends 24; ports 10-20, here at 27.
    profile = make_profile(
        limits=ONE_AT_A_TIME, handover=handover(latency=2, tokens_per_tick=1, mode=HandoverMode.LAYER_WISE)
    )
    result = run_reference(
        Placement.parse("1xP:tp1pp2 + 1xD:tp1pp1"), make_trace([0, 0], [8, 8], [2, 2]), every_role(profile)
    )
    assert ticks(result.transfer_start_s) == [0, 10]
    assert ticks(result.transfer_end_s) == [19, 27]
    assert tokens(result) == [[16, 24], [24, 32]]


@pytest.mark.parametrize(
    ("mode", "instances"),
    [
        # 0: prefill 0-12, decoded until 17. 1: prefill 0-48, handed over to an empty pool.
        (HandoverMode.DIRECT, [0, 0]),
        # Both are routed at 0.
        (HandoverMode.LAYER_WISE, [0, 1]),
    ],
)
def test_layer_wise_prompts_are_routed_when_their_prefill_is_launched(mode: HandoverMode, instances: list[int]) -> None:
    placement = Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1")
    result = run_reference(
        placement, make_trace([0, 0], [4, 40], [2, 2]), every_role(make_profile(handover=handover(mode=mode)))
    )
    assert list(result.decode_instance) == instances
    assert tokens(result) == [[12, 17], [48, 53]]


@pytest.mark.parametrize("mode", HandoverMode)
def test_prompts_of_one_instant_are_handed_over_in_order_of_request(mode: HandoverMode) -> None:
    # Prefill instance 0 has requests 0, 2 and 4, 0-12-24-36, and 1 has 1 and 3, 0-24-36. Layer-wise 3 and 4 are
    # handed over at 24, else 1 and 2 at 24, 3 and 4 at 36: each time instance 0 has the later one.
    profile = make_profile(limits=ONE_AT_A_TIME, handover=handover(mode=mode))
    result = run_reference(
        Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1"),
        make_trace([0] * 5, [4, 16, 4, 4, 4], [2] * 5),
        every_role(profile),
        prefill_router="round-robin",
        decode_router="round-robin",
    )
    assert ticks(result.prefill_end_s) == [12, 24, 24, 36, 36]
    assert list(result.decode_instance) == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("first_token_from", "instances", "expected"),
    [
        # Three prompts of 8 until 32, here at 32 + 2 + 1. 1 has its only token at 32 and is not handed over.
        (FirstToken.PREFILL, [0, -1, 1], [[32, 40], [32], [32, 40]]),
        # 0 and 2 share instance 0: 6. 1 is done when it arrives.
        (FirstToken.TRANSFER_END, [0, 1, 0], [[35, 41], [35], [35, 41]]),
        (FirstToken.DECODE, [0, 1, 0], [[41, 47], [40], [41, 47]]),
    ],
)
def test_one_token_layer_wise(first_token_from: FirstToken, instances: list[int], expected: list[list[float]]) -> None:
    profile = make_profile(
        handover=handover(first_token_from=first_token_from, latency=2, tokens_per_tick=1, mode=HandoverMode.LAYER_WISE)
    )
    placement = Placement.parse("1xP:tp1pp1 + 2xD:tp1pp1")
    result = run_reference(
        placement, make_trace([0, 0, 0], [8, 8, 8], [2, 1, 2]), every_role(profile), decode_router="round-robin"
    )
    assert list(result.decode_instance) == instances
    assert tokens(result) == expected


def test_layer_wise_prompts_keep_their_prefill_blocks_until_they_are_there() -> None:
    # 2 blocks of 4: 0 is prefilled until 16 and there at 19, when 1 is launched; 35, 38.
    profile = make_profile(
        kv_tokens={Parallelism(1, 1): 8, Parallelism(2, 1): 1 << 20},
        block_tokens=4,
        handover=handover(latency=2, tokens_per_tick=1, mode=HandoverMode.LAYER_WISE),
    )
    result = run_reference(
        Placement.parse("1xP:tp1pp1 + 1xD:tp2pp1"), make_trace([0, 0], [8, 8], [2, 2]), every_role(profile)
    )
    assert ticks(result.prefill_start_s) == [0, 19]
    assert ticks(result.transfer_end_s) == [19, 38]


def test_layer_wise_handovers_follow_the_launches_of_their_instant() -> None:
    # Posting costs 3. 0 is posted at 0, here at 16: 16 + 3 + 5 = 24. At 24 its next step is launched before 1, whose
    # prefill is launched then too, is posted: 29. The step after that pays: 29 + 3 + 5 = 37. 1: 24-40, 45.
    profile = make_profile(handover=handover(post=3, mode=HandoverMode.LAYER_WISE))
    result = run_reference(P1_D1, make_trace([0, 24], [8, 8], [4, 2]), every_role(profile))
    assert ticks(result.transfer_start_s) == [0, 24]
    assert tokens(result) == [[16, 24, 29, 37], [40, 45]]


def test_rescue_waits_for_transfers_of_running_prefills() -> None:
    # 4 blocks of 4. 0: prefill 0-16; 1: 4-20, posted at 4, so all blocks are taken when 0 comes. It cannot grow to 9
    # tokens, nothing runs, and there is nobody to evict before 20: then 1 goes (8 tokens): 20 + 8 + 5 = 33.
    # 33: 1 comes back: 33 + 8 + 5 = 46.
    profile = replace(short_of_memory(Preemption.SWAP, kv_tokens=16), handover=handover(mode=HandoverMode.LAYER_WISE))
    result = run_reference(
        Placement.parse("2xP:tp1pp1 + 1xD:tp1pp1"), make_trace([0, 4], [8, 8], [2, 2]), every_role(profile)
    )
    assert ticks(result.transfer_end_s) == [16, 20]
    assert tokens(result) == [[16, 33], [20, 46]]
    assert list(result.preemptions) == [0, 1]


def test_a_driver_without_overhead_launches_all_micro_batches_at_once() -> None:
    # As above without host work: mb 0 24-26.5-29, mb 1 enters stage 1 at 26.5: 29, 31.5.
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp2")
    profile = make_profile(handover=handover())
    result = run_reference(placement, make_trace([0, 0], [8, 8], [2, 2]), every_role(profile))
    assert ticks(result.decode_start_s) == [24, 24]
    assert tokens(result) == [[24, 29], [24, 31.5]]


SHORT_OF_MEMORY = [
    # Blocks of 4, 5 of them where tokens are decoded. Prompts of 7, prefilled together: 8 + 14 = 22. Contexts of 8
    # need 2 blocks each, step of 2: 28. Contexts of 9 need 3 each, one too many: 1 is preempted, 8 tokens stored.
    # Swap, one token a tick: 28 + 8 + 5 = 41, 46; then 1 comes back: 46 + 8 + 5 = 59, 64.
    (Preemption.SWAP, [[22, 28, 41, 46], [22, 28, 59, 64]]),
    # Recompute: 33, 38; then 9 tokens are prefilled: 38 + 8 + 9 = 55, one decode step: 60.
    (Preemption.RECOMPUTE, [[22, 28, 33, 38], [22, 28, 55, 60]]),
]


def short_of_memory(preemption: Preemption, kv_tokens: int) -> Profile:
    return make_profile(
        kv_tokens=kv_tokens,
        block_tokens=4,
        preemption=preemption,
        swap_tokens_per_s=1 / TICK_S,
        handover=handover(),
    )


@pytest.mark.parametrize("notation", ["1xP:tp1pp1 + 1xD:tp1pp1", "1xC:tp1pp1"])
@pytest.mark.parametrize(("preemption", "expected"), SHORT_OF_MEMORY)
def test_preemption(notation: str, preemption: Preemption, expected: list[list[float]]) -> None:
    profile = short_of_memory(preemption, kv_tokens=20)
    result = run_reference(Placement.parse(notation), make_trace([0, 0], [7, 7], [4, 4]), every_role(profile))
    assert tokens(result) == expected
    assert list(result.preemptions) == [0, 1]
    assert ticks(result.prefill_end_s) == [22, 22]
    # The recomputing step is a prefill, and not the first decode launch.
    assert ticks(result.decode_start_s) == [22, 22]


def test_rescue_evicts_what_was_pulled_last() -> None:
    # 4 blocks of 4, two prompts of 8 prefilled and pulled at 24 fill them. Neither can grow to 9 tokens, nothing runs:
    # 1 is swapped out (8 tokens), 0 joins: 24 + 8 + 5 = 37, 42, 47, 52, 57. Its 3 blocks leave too few for 1.
    # 57: 1 comes back: 57 + 8 + 5 = 70, 75, 80, 85, 90.
    profile = short_of_memory(Preemption.SWAP, kv_tokens=16)
    result = run_reference(P1_D1, make_trace([0, 0], [8, 8], [6, 6]), every_role(profile))
    assert tokens(result) == [[24, 37, 42, 47, 52, 57], [24, 70, 75, 80, 85, 90]]
    assert list(result.preemptions) == [0, 1]


@pytest.mark.parametrize(
    ("token_limit", "expected"),
    [
        # 2 and 3 join again at 34, 3 first. One at a time: 3: 34 + 13 = 47. 2 before 3 may decode: 60. 3: 65.
        (5, [[20, 28, 34], [20, 28, 34], [20, 28, 60], [20, 28, 47, 65]]),
        # Together: 34 + 18 = 52, 3 decodes until 57.
        (10, [[20, 28, 34], [20, 28, 34], [20, 28, 52], [20, 28, 52, 57]]),
    ],
)
def test_recomputing_keeps_the_prefill_limits_of_the_decode_profile(
    token_limit: int, expected: list[list[float]]
) -> None:
    # 4 blocks of 4 on the decode side; four prompts of 3, prefilled until 8 + 12 = 20. Contexts of 4: a step of 4
    # requests: 28. Contexts of 5 need 4 blocks more: 3 and then 2 are preempted, 0 and 1 finish at 34.
    prefill = make_profile()
    decode = make_profile(
        block_tokens=4,
        kv_tokens=16,
        limits={Role.PREFILL: BatchLimits(tokens=token_limit)},
        preemption=Preemption.RECOMPUTE,
        handover=handover(),
    )
    result = run_reference(
        P1_D1, make_trace([0] * 4, [3] * 4, [3, 3, 3, 4]), {Role.PREFILL: prefill, Role.DECODE: decode}
    )
    assert tokens(result) == expected
    assert list(result.preemptions) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("policy", "token_budget", "expected"),
    [
        # 0 (4 tokens) arrives at 0: 12, and decodes until 17. 1 (6 tokens) has arrived at 13.
        # Its prompt first: 14 -> 31; then both: 6 -> 37.
        (Policy.PREFILL_FIRST, None, [[12, 17, 37], [31, 37]]),
        # 0 until it is done: 22. 1: 14 -> 36, 5 -> 41.
        (Policy.DECODE_FIRST, None, [[12, 17, 22], [36, 41]]),
        # Together: 14 + 5 - 4 = 15 -> 32; 1 alone: 37.
        (Policy.ORCA, None, [[12, 17, 32], [32, 37]]),
        # Beside one decode 3 of 4 tokens: 11 + 5 - 4 = 12 -> 29. The other 3: 11 -> 40. Then 45.
        (Policy.CHUNKED, 4, [[12, 17, 29], [40, 45]]),
    ],
)
def test_colocated_policies(policy: Policy, token_budget: int | None, expected: list[list[float]]) -> None:
    placement = Placement.colocated(parallelism=Parallelism(), count=1, policy=policy, token_budget=token_budget)
    result = run_reference(placement, make_trace([0, 13], [4, 6], [3, 2]), every_role(make_profile()))
    assert tokens(result) == expected
    assert list(result.prefill_instance) == list(result.decode_instance) == [0, 0]
    assert ticks(result.prefill_end_s) == [times[0] for times in expected]


def test_mixed_host_overhead() -> None:
    # ORCA; a launch costs 1 + 1 a sequence + 3 if mixed. 0: 0 + 2 + 12 = 14, 14 + 2 + 5 = 21.
    # Mixed: 21 + (1 + 2 + 3) + 15 = 42. 1: 42 + 2 + 5 = 49.
    host = {Role.COLOCATED: HostOverhead(step_s=TICK_S, sequence_s=TICK_S, mixed_s=3 * TICK_S)}
    placement = Placement.parse("1xC:tp1pp1", policy=Policy.ORCA)
    result = run_reference(placement, make_trace([0, 15], [4, 6], [3, 2]), every_role(make_profile(host=host)))
    assert tokens(result) == [[14, 21, 42], [42, 49]]


def test_a_partial_prompt_is_preempted_first_and_starts_anew() -> None:
    # 3 blocks of 4, 3 tokens a step. 0 (3 tokens) alone: 11. 1 (8 tokens, 2 blocks) has arrived: a chunk of 2 beside
    # one decode at context 4: 10 + 5 - 4 = 11 -> 22. Context 5 needs a second block, which 1 has: 1 goes, and 0 decodes
    # contexts 5 to 8 alone: 27, 32, 37, 42. Then 1 in chunks of 3, 3 and 2: 11 + 11 + 10 -> 74.
    profile = make_profile(block_tokens=4, kv_tokens=12)
    placement = Placement.parse("1xC:tp1pp1", policy=Policy.CHUNKED, token_budget=3)
    result = run_reference(placement, make_trace([0, 1], [3, 8], [6, 1]), every_role(profile))
    assert tokens(result) == [[11, 22, 27, 32, 37, 42], [74]]
    assert list(result.preemptions) == [0, 1]
    assert ticks(result.prefill_start_s) == [0, 11]


def test_colocated_admission_watermark() -> None:
    # 8 blocks of 4, 2 of them kept free: 1 (3 blocks) is not admitted beside 0 (4 blocks; 4 free), although it fits.
    # 0: 8 + 16 = 24, context 17 (5 blocks) 29. 1: 29 + 8 + 12 = 49.
    profile = make_profile(block_tokens=4, kv_tokens=32, admission_watermark=0.25)
    placement = Placement.parse("1xC:tp1pp1")
    result = run_reference(placement, make_trace([0, 0], [16, 12], [2, 1]), every_role(profile))
    assert tokens(result) == [[24, 29], [49]]


def test_colocated_loops() -> None:
    # Two loops, two stages, 1 tick of the driver a launch. T = 16, 8 a stage.
    # Loop 0: launch 0, 1-9-17. Loop 1: launch 1, stage 1 9-17, stage 2 17-25.
    # Decode, T = 5: loop 0: launch 17, stage 1 18-20.5, stage 2 25-27.5. Loop 1: launch 25, 26-28.5-31.
    profile = make_profile(host={Role.COLOCATED: HostOverhead(step_s=TICK_S)})
    placement = Placement.parse("1xC:tp1pp2")
    result = run_reference(placement, make_trace([0, 0], [8, 8], [2, 2]), every_role(profile))
    assert tokens(result) == [[17, 27.5], [25, 31]]
    assert [step.index for step in result.steps] == [0, 1, 0, 1]


def test_what_never_fits_is_rejected() -> None:
    # 2 blocks of 16. 0: 33 tokens of prompt. 1: 32 + 1 generated and stored. 2: 32 and nothing stored. 3: 31 + 1.
    trace = make_trace([0, 0, 0, 0], [33, 32, 32, 31], [1, 2, 1, 2])
    for notation in ("1xP:tp1pp1 + 1xD:tp1pp1", "1xC:tp1pp1"):
        result = run_reference(Placement.parse(notation), trace, every_role(make_profile(kv_tokens=47)))
        assert list(result.rejected) == [True, True, False, False]
        assert list(result.prefill_instance) == [-1, -1, 0, 0]
        assert np.all(np.isnan(result.first_token_s[:2]))


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ("round-robin", [0, 1, 2, 0, 1]),
        ("join-shortest-queue", [0, 1, 2, 0, 1]),
        # 30 | 1 | 2; 3 joins the 1 and makes it 4; 1 joins the 2.
        ("least-loaded", [0, 1, 2, 1, 2]),
    ],
)
def test_routers(router: str, expected: list[int]) -> None:
    trace = make_trace([0] * 5, [30, 1, 2, 3, 1], [1] * 5)
    placement = Placement.parse("3xP:tp1pp1 + 1xD:tp1pp1")
    result = run_reference(placement, trace, every_role(make_profile()), prefill_router=router)
    assert list(result.prefill_instance) == expected


def test_power_of_two_draws() -> None:
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, 3])))
    lengths = [0, 0, 0, 0]
    expected = []
    for _ in range(20):
        a, b = int(draws.integers(4)), int(draws.integers(3))
        b += b >= a
        chosen = a if (lengths[a], a) < (lengths[b], b) else b
        lengths[chosen] += 1
        expected.append(chosen)
    result = run_reference(
        Placement.parse("4xC:tp1pp1"),
        make_trace([0] * 20, [8] * 20, [1] * 20),
        every_role(make_profile()),
        seed=7,
        colocated_router="power-of-two",
    )
    assert list(result.prefill_instance) == expected


def test_closed_loop() -> None:
    # Both users' first prompts together: 8 + 8 = 16. Both send again at that instant, and batch together: 8 + 5 -> 29.
    # User 1 has none left; user 0's third goes alone: 12 -> 41. The fourth would be one request too many.
    users = [[(4, 1), (2, 1), (4, 1), (4, 1)], [(4, 1), (3, 1)]]
    result = run_reference_closed(P1_D1, users, [0.0, 0.0], 5, every_role(make_profile()))
    assert ticks(result.arrival_s) == [0, 0, 16, 16, 29]
    assert tokens(result) == [[16], [16], [29], [29], [41]]


def test_closed_loop_staggered_with_a_front_end() -> None:
    # User 1 sends first, at 0: queued at 2, 12 -> 14, sends at 14, queued at 16. User 0 sends at 16, queued at 18,
    # while user 1's second runs 16-28; then 28-40.
    users = [[(4, 1)], [(4, 1), (4, 1)]]
    profile = make_profile(request_s=2 * TICK_S)
    result = run_reference_closed(P1_D1, users, [16 * TICK_S, 0.0], 3, every_role(profile))
    assert ticks(result.arrival_s) == [0, 14, 16]
    assert tokens(result) == [[14], [28], [40]]


def test_lindley() -> None:
    # One FIFO server, one request at a time: departure = max(arrival, departure before) + service, bit for bit.
    rng = np.random.default_rng(1)
    n = 2000
    prompts = rng.integers(1, 64, n)
    arrivals = np.cumsum(rng.integers(0, 90, n))  # Mean 44.5 between arrivals, 40 a service: a busy server.
    trace = make_trace(arrivals.tolist(), prompts.tolist(), [1] * n)
    result = run_reference(P1_D1, trace, every_role(make_profile(limits=ONE_AT_A_TIME)))
    expected = []
    departure = 0.0
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        departure = max(float(arrival), departure) + 8 + int(prompt)
        expected.append(departure)
    assert ticks(result.first_token_s) == expected
