"""Infeasible placements are told every reason at once."""

from __future__ import annotations

import dataclasses

import pytest

from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import Profile
from placement.feasibility import LongestRequest, reasons
from placement.space import Cluster
from tests.reference.systems import every_role, make_profile

NODE = Cluster(8, 8)
SHORT = LongestRequest(prompt_tokens=100, kv_tokens=150)


def why(text: str, profile: Profile, *, cluster: Cluster = NODE, longest: LongestRequest = SHORT) -> tuple[str, ...]:
    placement = Placement.parse(text, policy=Policy.ORCA)
    return reasons(placement, profiles=every_role(profile), cluster=cluster, longest=longest)


def test_what_can_run_has_no_reason() -> None:
    profile = make_profile()
    assert why("1xP:tp2pp1 + 2xD:tp1pp2", profile) == ()
    assert why("2xC:tp2pp2", profile) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1xC:tp3pp1", "colocated tp3pp1: tp=3 does not divide the 8 attention and 8 KV heads of tiny"),
        ("1xC:tp1pp3", "colocated tp1pp3: pp=3 does not divide the 8 layers of tiny"),
        ("1xC:tp8pp1", "colocated tp8pp1: profile tiny has no coefficients for tp=8 (it has 1, 2, 4)"),
        ("1xC:tp1pp8", "colocated tp1pp8: profile tiny has no KV capacity for tp1pp8"),
        ("3xC:tp4pp1", "needs 12 GPUs, there are 8"),
    ],
)
def test_each_reason(text: str, reason: str) -> None:
    assert reason in why(text, make_profile())


def test_refused_coefficients_say_why() -> None:
    profile = dataclasses.replace(make_profile(), refused={2: "a negative constant"})
    assert why("1xP:tp2pp1 + 1xD:tp1pp1", profile) == (
        "prefill tp2pp1: profile tiny refuses tp=2: a negative constant",
    )


def test_kv_cache_below_the_longest_request() -> None:
    profile = make_profile(kv_tokens=128)
    assert why("1xP:tp1pp1 + 1xD:tp1pp1", profile) == (
        "decode tp1pp1: the KV cache holds 128 tokens, the longest request of the workload needs 150",
    )
    longer = LongestRequest(prompt_tokens=140, kv_tokens=150)
    assert len(why("1xP:tp1pp1 + 1xD:tp1pp1", profile, longest=longer)) == 2
    assert why("1xC:tp1pp2", make_profile(kv_tokens=256)) == (
        "colocated tp1pp2: the KV cache holds 128 tokens in each of 2 engine loops, "
        "the longest request of the workload needs 150",
    )


def test_weights_that_do_not_fit() -> None:
    profile = dataclasses.replace(make_profile(), kv_capacity_tokens={}, kv_bytes_per_gpu=1000.0)
    assert why("1xC:tp1pp1", profile) == (
        "colocated tp1pp1: weights of 0.0 GB leave no room for KV in 0.0 GB of usable memory",
    )


def test_all_reasons_at_once() -> None:
    found = why("2xP:tp3pp3 + 1xD:tp1pp1", make_profile(kv_tokens={Parallelism(1, 1): 64}), cluster=Cluster(8, 4))
    assert len(found) == 7
    assert [reason.partition(":")[0] for reason in found] == ["prefill tp3pp3"] * 5 + [
        "decode tp1pp1",
        "needs 19 GPUs, there are 8",
    ]


def test_a_role_without_profile() -> None:
    profiles = {Role.PREFILL: make_profile()}
    placement = Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1")
    assert reasons(placement, profiles=profiles, cluster=NODE, longest=SHORT) == (
        "decode tp1pp1: no profile for this role",
    )


def test_packing_is_a_reason_of_its_own() -> None:
    profile = make_profile(kv_tokens=1 << 16)
    cluster = Cluster(6, 3)
    assert why("3xC:tp2pp1", profile, cluster=cluster) == ("its instances do not pack into 2 nodes of 3 GPUs",)
