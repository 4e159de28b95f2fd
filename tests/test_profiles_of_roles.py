"""Pools with profiles of their own: what goes together, what is refused, and where the range ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dsim.errors import InfeasiblePlacementError, InputError
from dsim.latency import AffineLatency, LatencyModel, ValidRange
from dsim.options import Options, Window
from dsim.pools import Placement, Policy, Role
from dsim.profile import FirstToken, Handover, Profile
from dsim.simulate import simulate
from dsim.slo import Slo
from tests.reference.systems import every_role, make_profile, make_trace

PAIR = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
TRACE = make_trace([0.0, 3.0, 40.0], [20, 30, 10], [4, 1, 9])


def with_range(profile: Profile, **limits: float) -> Profile:
    latency: dict[int, LatencyModel] = {}
    for tp, model in profile.latency.items():
        assert isinstance(model, AffineLatency)
        latency[tp] = dataclasses.replace(model, valid_range=ValidRange(**limits))
    return dataclasses.replace(profile, latency=latency)


@pytest.mark.parametrize("shown", FirstToken)
def test_the_decode_side_says_who_shows_the_first_token(shown: FirstToken) -> None:
    decode = make_profile(handover=Handover(first_token_from=shown, latency_s=1 / 64))
    prefill = make_profile(handover=Handover(first_token_from=FirstToken.DECODE))
    mixed = simulate(PAIR, TRACE, profiles={Role.PREFILL: prefill, Role.DECODE: decode})
    alike = simulate(PAIR, TRACE, profiles=decode)
    np.testing.assert_array_equal(mixed.columns["first_token_s"], alike.columns["first_token_s"])
    assert not np.isnan(mixed.columns["first_token_s"]).any()


def test_profiles_of_different_models_are_refused() -> None:
    one = make_profile()
    other = dataclasses.replace(one, model=dataclasses.replace(one.model, name="other"))
    with pytest.raises(InputError, match=r"profiles: model=.*must be the same"):
        simulate(PAIR, TRACE, profiles={Role.PREFILL: one, Role.DECODE: other})
    blocks = make_profile(block_tokens=32)
    with pytest.raises(InputError, match="block_tokens"):
        simulate(PAIR, TRACE, profiles={Role.PREFILL: one, Role.DECODE: blocks})


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", ["D", "C"])
def test_context_beyond_the_valid_range(kind: str, pp: int) -> None:
    profile = with_range(make_profile(), context_tokens=33)
    text = f"1xP:tp1pp1 + 1xD:tp1pp{pp}" if kind == "D" else f"1xC:tp1pp{pp}"
    # It would need three blocks of 16 tokens, of which two are within the range; the next request fits them.
    trace = make_trace([0.0, 0.0], [30, 30], [9, 3])
    kept = simulate(Placement.parse(text), trace, profiles=profile, options=Options(log_steps=True))
    assert kept.columns["rejected"].tolist() == [True, pp > 1 and kind == "C"]
    assert kept.kv_blocks[Role(kind)] == 2
    result = simulate(
        Placement.parse(text), make_trace([0.0], [30], [9]), profiles=profile, options=Options(extrapolate=True)
    )
    assert not np.isnan(result.columns["last_token_s"]).any()


def test_token_budget_beyond_the_valid_range() -> None:
    profile = with_range(make_profile(), prefill_tokens=64)
    placement = Placement.parse("1xC:tp1pp1", policy=Policy.CHUNKED, token_budget=65)
    with pytest.raises(InfeasiblePlacementError, match="token budget of 65"):
        simulate(placement, TRACE, profiles=profile)


def test_good_throughput_counts_what_met_the_limits_over_its_own_span() -> None:
    # Two of four can never fit: they count neither in the numerator nor in the span's end.
    profile = make_profile(kv_tokens=64)
    trace = make_trace([0.0, 1.0, 2.0, 3.0], [16, 100, 16, 100], [2, 2, 2, 2])
    result = simulate(PAIR, trace, profiles=every_role(profile))
    ends = result.columns["last_token_s"]
    assert result.good_throughput_per_s(Slo()) == 2 / np.nanmax(ends)


def test_rows_of_the_frame_are_numbered_as_steps_are() -> None:
    result = simulate(
        PAIR, TRACE, profiles=make_profile(), options=Options(log_steps=True), window=Window(warmup=1, counted=2)
    )
    frame = result.to_frame()
    assert frame.index.to_list() == [1, 2]
    for step in result.steps or []:
        for request in step.prefill:
            if request in frame.index:
                assert frame.loc[request, "prefill_start_s"] == step.launch_s
