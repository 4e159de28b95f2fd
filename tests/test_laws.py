"""The laws of every run: a broken one is named, whichever record is corrupted."""

from __future__ import annotations

import copy
import cProfile
import dataclasses
import hashlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.latency import HostOverhead
from dsim.laws import BrokenLawError, Law, check_laws
from dsim.options import Options, Window
from dsim.pools import Placement, Policy, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Preemption
from dsim.records import StepRecord
from dsim.result import Result
from dsim.simulate import simulate
from dsim.workload import ClosedLoop, Fixed
from tests.reference.systems import every_role, make_profile, make_trace, tokens_per_s

ROOT = Path(__file__).resolve().parents[1]

Corruption = Callable[[Result], Result]

#: Thirty requests in a burst, so that all kinds of queues form, and one long after; a few of one token.
TRACE = make_trace(
    [2 * i for i in range(30)] + [100_000],
    [40] * 31,
    [1 if i % 10 == 9 else 6 for i in range(30)] + [6],
)
LONE = 30


def run(
    placement: str,
    *,
    mode: FirstToken = FirstToken.PREFILL,
    handover: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401
) -> Result:
    """Play the trace with slow transfers; the result obeys the laws."""
    slow = Handover(
        first_token_from=mode, stalls_decode=False, bandwidth_bytes_per_s=tokens_per_s(1024.0), watermark=1.0
    )
    profile = make_profile(
        decode=(30.0, 1 / 32, 0.5),
        host={role: HostOverhead(step_s=1 / 1024) for role in Role},
        limits={
            Role.PREFILL: BatchLimits(100, 2),
            Role.DECODE: BatchLimits(requests=2),
            Role.COLOCATED: BatchLimits(200, 8),
        },
        handover=dataclasses.replace(slow, **(handover or {})),
    )
    return simulate(parsed(placement), TRACE, profiles=every_role(profile), options=Options(check=True, **options))


def parsed(placement: str) -> Placement:
    """Return a placement; colocated ones are `orca` unless they say `chunked`."""
    chunked = placement.endswith(" chunked")
    policy = Policy.CHUNKED if chunked else Policy.ORCA
    return Placement.parse(placement.removesuffix(" chunked"), policy=policy, token_budget=64 if chunked else None)


def disaggregated(mode: FirstToken = FirstToken.PREFILL, **options: Any) -> Result:  # noqa: ANN401
    return run("1xP:tp1pp1 + 1xD:tp1pp1", mode=mode, **options)


def logged(mode: FirstToken = FirstToken.PREFILL, **options: Any) -> Result:  # noqa: ANN401
    return disaggregated(mode, log_steps=True, **options)


def posting(placement: str = "1xP:tp1pp1 + 1xD:tp1pp1", **handover: Any) -> Result:  # noqa: ANN401
    """Play the trace with pulls that take 2 ms of the decode loop, every step logged."""
    return run(placement, handover={"post_s": 2 / 1024, **handover}, log_steps=True, track_itl=False)


def layer_wise(**options: Any) -> Result:  # noqa: ANN401
    return run("1xP:tp1pp1 + 1xD:tp1pp1", handover={"mode": HandoverMode.LAYER_WISE}, **options)


def handover_altered(**fields: Any) -> Corruption:  # noqa: ANN401
    """Return what makes the handover another one than it was in the run."""

    def corrupt(result: Result) -> Result:
        profile = result.profiles[Role.DECODE]
        other = dataclasses.replace(profile, handover=dataclasses.replace(profile.handover, **fields))
        return dataclasses.replace(result, profiles={**result.profiles, Role.DECODE: other})

    return corrupt


def pulled_amid_a_step(result: Result) -> Result:
    """Move a transfer that its posting alone delayed into the step that ended then."""
    starts_s, ends_s = result.columns["transfer_start_s"], result.columns["transfer_end_s"]
    posted = next(i for i in range(5, LONE) if not np.isnan(starts_s[i]) and starts_s[i] not in ends_s)
    starts_s[posted] -= 1 / 4096
    ends_s[posted] -= 1 / 4096
    return result


def altered(name: str, row: int, value: object) -> Corruption:
    """Return what overwrites one number of a column."""

    def corrupt(result: Result) -> Result:
        result.columns[name][row] = value
        return result

    return corrupt


def moved(row: int, by_s: float, *names: str) -> Corruption:
    """Return what moves the times of one request."""

    def corrupt(result: Result) -> Result:
        for name in names:
            result.columns[name][row] += by_s
        return result

    return corrupt


def exchanged(a: int, b: int, *names: str) -> Corruption:
    """Return what exchanges the times of two equal requests."""

    def corrupt(result: Result) -> Result:
        for name in names:
            column = result.columns[name]
            column[a], column[b] = column[b], column[a]
        return result

    return corrupt


def restated(**fields: Any) -> Corruption:  # noqa: ANN401
    """Return what overwrites fields of the result."""
    return lambda result: dataclasses.replace(result, **fields)


def step_altered(role: str, number: int, **fields: Any) -> Corruption:  # noqa: ANN401
    """Return what overwrites a logged step, counted within its role."""

    def corrupt(result: Result) -> Result:
        assert result.steps is not None
        index = [i for i, step in enumerate(result.steps) if step.role == role][number]
        result.steps[index] = dataclasses.replace(result.steps[index], **fields)
        return result

    return corrupt


def step_changed(role: str, number: int, change: Callable[[StepRecord], dict[str, Any]]) -> Corruption:
    """Return what overwrites a logged step depending on what it was."""

    def corrupt(result: Result) -> Result:
        assert result.steps is not None
        step = [step for step in result.steps if step.role == role][number]
        return step_altered(role, number, **change(step))(result)

    return corrupt


def rejected(row: int) -> Corruption:
    """Return what makes one request look rejected, leaving no trace of its service."""

    def corrupt(result: Result) -> Result:
        for name, column in result.columns.items():
            if name.endswith("_s") and name != "arrival_s":
                column[row] = np.nan
        result.columns["rejected"][row] = True
        return result

    return corrupt


def earlier_prefill(result: Result) -> Result:
    """Let a batch start before the one before it ends."""
    starts_s, ends_s = result.columns["prefill_start_s"], result.columns["prefill_end_s"]
    batch = starts_s == starts_s[8]
    starts_s[batch] = ends_s[starts_s < starts_s[8]].max() - 1 / 1024
    return result


def gaps_altered(name: str, by: int) -> Corruption:
    """Return what changes the first of the gaps between tokens."""

    def corrupt(result: Result) -> Result:
        getattr(result.gaps, name)[0] += by
        return result

    return corrupt


def tighter(role: Role, **limits: float) -> Corruption:
    """Return what makes the engine's batch limit lower than it was in the run."""

    def corrupt(result: Result) -> Result:
        profile = result.profiles[role]
        tight = dataclasses.replace(profile, limits={**profile.limits, role: BatchLimits(**limits)})
        return dataclasses.replace(result, profiles={**result.profiles, role: tight})

    return corrupt


def late_decode(result: Result) -> Result:
    """Let the decode instance dawdle before the steps of the request that is alone."""
    for name in ("decode_start_s", "last_token_s"):
        result.columns[name][LONE] += 1.0
    assert result.steps is not None
    result.steps[:] = [_later(step) if step.decode == (LONE,) else step for step in result.steps]
    return dataclasses.replace(result, elapsed_s=result.elapsed_s + 1.0)


def pausing_decode(result: Result) -> Result:
    """Let the decode instance dawdle in the middle of the request that is alone."""
    assert result.steps is not None
    mine = [i for i, step in enumerate(result.steps) if step.decode == (LONE,)]
    for i in mine[2:]:
        result.steps[i] = _later(result.steps[i])
    result.columns["last_token_s"][LONE] += 1.0
    return dataclasses.replace(result, elapsed_s=result.elapsed_s + 1.0)


def late_colocated(result: Result) -> Result:
    """Let the colocated instance dawdle before the request that is alone."""
    for name, column in result.columns.items():
        if name.endswith("_s") and name != "arrival_s":
            column[LONE] += 1.0
    assert result.steps is not None
    result.steps[:] = [_later(step) if LONE in step.prefill + step.decode else step for step in result.steps]
    return dataclasses.replace(result, elapsed_s=result.elapsed_s + 1.0)


def _later(step: StepRecord) -> StepRecord:
    return dataclasses.replace(step, launch_s=step.launch_s + 1.0, end_s=step.end_s + 1.0)


ALL_TIMES: tuple[str, ...] = ("prefill_start_s", "prefill_end_s", "transfer_start_s", "transfer_end_s")
ALL_TIMES += ("decode_start_s", "first_token_s", "last_token_s")
FROM_PULL = ("transfer_start_s", "transfer_end_s", "decode_start_s", "last_token_s")

CORRUPTIONS: dict[str, tuple[Law, Callable[[], Result], Corruption]] = {
    "lost request": (Law.REQUESTS, disaggregated, altered("last_token_s", 4, np.nan)),
    "rejected but served": (Law.REQUESTS, disaggregated, altered("rejected", 4, True)),
    "rejected although it fits": (Law.REQUESTS, disaggregated, rejected(4)),
    "served although it cannot fit": (Law.REQUESTS, disaggregated, restated(kv_blocks={Role.PREFILL: 2})),
    "twice in a step": (Law.REQUESTS, logged, step_changed("D", 5, lambda s: {"decode": s.decode + s.decode[:1]})),
    "a gap too many": (Law.TOKENS, disaggregated, gaps_altered("weight", 1)),
    "a token too few": (Law.TOKENS, disaggregated, altered("output_tokens", 4, 7)),
    "left out of a step": (Law.TOKENS, logged, step_changed("D", 5, lambda s: {"decode": s.decode[1:]})),
    "prefilled twice": (Law.TOKENS, logged, step_altered("P", 5, prefill=(0, 1))),
    "starts before it is queued": (Law.CAUSALITY, disaggregated, altered("prefill_start_s", 0, -0.5)),
    "takes no time": (Law.CAUSALITY, disaggregated, altered("prefill_start_s", 5, 50.0)),
    "pulled before prefilled": (Law.CAUSALITY, disaggregated, moved(LONE, -1.0, "transfer_start_s")),
    "decoded before pulled": (Law.CAUSALITY, disaggregated, moved(LONE, -0.01, "decode_start_s")),
    "ends before it decodes": (Law.CAUSALITY, disaggregated, moved(LONE, -5.0, "last_token_s")),
    "skips its transfer": (Law.CAUSALITY, disaggregated, altered("transfer_end_s", 4, np.nan)),
    "never decoded": (Law.CAUSALITY, disaggregated, altered("decode_start_s", 4, np.nan)),
    "one token, yet decoded": (Law.CAUSALITY, disaggregated, altered("transfer_start_s", 9, 60.0)),
    "nowhere": (Law.CAUSALITY, disaggregated, altered("decode_instance", 4, 1)),
    "token 1 not from prefill": (Law.CAUSALITY, disaggregated, moved(4, 1e-6, "first_token_s")),
    "token 1 not from transfer": (
        Law.CAUSALITY,
        lambda: disaggregated(FirstToken.TRANSFER_END),
        moved(4, 1e-6, "first_token_s"),
    ),
    "token 1 before decode": (
        Law.CAUSALITY,
        lambda: disaggregated(FirstToken.DECODE),
        moved(LONE, -0.05, "first_token_s"),
    ),
    "token 1 not from the first step": (
        Law.CAUSALITY,
        lambda: logged(FirstToken.DECODE, track_itl=False),
        moved(LONE, 1e-6, "first_token_s"),
    ),
    "one token, two times": (Law.CAUSALITY, disaggregated, moved(9, 1e-6, "last_token_s")),
    "a later launch on record": (Law.CAUSALITY, logged, moved(LONE, 1e-6, "decode_start_s")),
    "a later end on record": (
        Law.CAUSALITY,
        lambda: logged(track_itl=False),
        moved(4, -1e-6, "last_token_s"),
    ),
    "too much KV": (Law.CAPACITY, disaggregated, restated(kv_peak={Role.DECODE: 1.01})),
    "another peak of KV": (Law.CAPACITY, disaggregated, restated(kv_peak={Role.PREFILL: 0.5})),
    "busy for longer than the run": (Law.CAPACITY, disaggregated, restated(utilization={Role.DECODE: 1.01})),
    "prefill token limit": (Law.CAPACITY, disaggregated, tighter(Role.PREFILL, tokens=64)),
    "prefill request limit": (Law.CAPACITY, disaggregated, tighter(Role.PREFILL, requests=1)),
    "decode request limit": (Law.CAPACITY, logged, tighter(Role.DECODE, requests=1)),
    "decode KV": (
        Law.CAPACITY,
        logged,
        restated(kv_blocks={Role.PREFILL: 1 << 16, Role.DECODE: 5}),
    ),
    "colocated request limit": (
        Law.CAPACITY,
        lambda: run("1xC:tp1pp1", log_steps=True),
        tighter(Role.COLOCATED, requests=3),
    ),
    "overlapping prefills": (Law.OVERLAP, disaggregated, earlier_prefill),
    "a batch that ends at two times": (
        Law.OVERLAP,
        lambda: disaggregated(FirstToken.TRANSFER_END),
        moved(1, -1e-6, "prefill_end_s"),
    ),
    "overlapping decodes": (Law.OVERLAP, logged, step_changed("D", 6, lambda s: {"launch_s": s.launch_s - 1 / 1024})),
    "a step of no time": (Law.OVERLAP, logged, step_changed("D", 6, lambda s: {"end_s": s.launch_s})),
    "a step too short for its batch": (
        Law.OVERLAP,
        logged,
        step_changed("D", 6, lambda s: {"end_s": s.end_s - 1 / 1024}),
    ),
    "overtaking micro-batches": (
        Law.OVERLAP,
        lambda: run("1xP:tp1pp1 + 1xD:tp1pp2", log_steps=True),
        step_changed("D", 7, lambda s: {"end_s": s.launch_s + 1 / 4096}),
    ),
    "overlapping loops": (
        Law.OVERLAP,
        lambda: run("1xC:tp1pp1 chunked", log_steps=True),
        step_changed("C", 6, lambda s: {"launch_s": s.launch_s - 1 / 1024}),
    ),
    "time between tokens": (Law.LITTLE, disaggregated, gaps_altered("gap_s", 1)),
    "two transfers at a port": (Law.PORTS, disaggregated, moved(8, -0.02, "transfer_start_s", "transfer_end_s")),
    "a short transfer": (Law.PORTS, disaggregated, moved(5, -0.02, "transfer_end_s")),
    "idle prefill": (
        Law.WORK,
        lambda: disaggregated(track_itl=False),
        lambda result: moved(LONE, 1.0, *ALL_TIMES)(dataclasses.replace(result, elapsed_s=result.elapsed_s + 1.0)),
    ),
    "a prompt left waiting": (
        Law.WORK,
        lambda: disaggregated(prefill_token_limit=50),
        lambda result: dataclasses.replace(result, options=Options()),
    ),
    "idle decode": (Law.WORK, lambda: logged(track_itl=False), late_decode),
    "pausing decode": (Law.WORK, lambda: logged(track_itl=False), pausing_decode),
    "pausing micro-batches": (
        Law.WORK,
        lambda: run("1xP:tp1pp1 + 1xD:tp1pp2", log_steps=True, track_itl=False),
        pausing_decode,
    ),
    "idle colocated": (Law.WORK, lambda: run("1xC:tp1pp2", log_steps=True), late_colocated),
    "handed over before the second hop": (
        Law.CAUSALITY,
        lambda: run("1xP:tp1pp1 + 1xD:tp1pp1", handover={"hop_s": 4 / 1024}),
        handover_altered(hop_s=5 / 1024),
    ),
    "pulled before its prefill began": (Law.CAUSALITY, layer_wise, moved(LONE, -0.1, "transfer_start_s")),
    "layer-wise, but not here": (Law.CAUSALITY, layer_wise, handover_altered(mode=HandoverMode.DIRECT)),
    "there before its last layer": (
        Law.PORTS,
        layer_wise,
        lambda result: altered("transfer_end_s", LONE, result.columns["prefill_end_s"][LONE])(result),
    ),
    "a pull at no turn of the driver": (
        Law.CAUSALITY,
        lambda: run(
            "4xP:tp1pp1 + 1xD:tp1pp1",
            handover={"mode": HandoverMode.PULL_AT_STEP, "bandwidth_bytes_per_s": tokens_per_s(1 << 20)},
            log_steps=True,
        ),
        pulled_amid_a_step,
    ),
    "a launch while a pull stalls": (
        Law.OVERLAP,
        lambda: run(
            "1xP:tp1pp1 + 1xD:tp1pp1",
            handover={"mode": HandoverMode.PULL_AT_STEP},
            log_steps=True,
        ),
        handover_altered(mode=HandoverMode.DIRECT, stalls_decode=True),
    ),
    "posting takes no time": (Law.OVERLAP, logged, handover_altered(post_s=1 / 1024)),
    "posting takes no time of a pipelined driver": (
        Law.OVERLAP,
        lambda: run("1xP:tp1pp1 + 1xD:tp1pp2", log_steps=True),
        handover_altered(post_s=40 / 1024),
    ),
    "posting takes longer": (Law.OVERLAP, posting, handover_altered(post_s=1 / 1024)),
    "posting by blocks takes longer": (
        Law.OVERLAP,
        lambda: posting(post_block_s=1 / 1024),
        handover_altered(post_block_s=0.5 / 1024),
    ),
    "the connector takes no time": (Law.OVERLAP, logged, handover_altered(step_s=1 / 1024)),
    "pausing after a posting": (Law.WORK, lambda: posting("1xP:tp1pp1 + 1xD:tp1pp2"), pausing_decode),
    "overtaken before prefill": (Law.FCFS, disaggregated, exchanged(4, 7, *ALL_TIMES)),
    "overtaken before the pull": (Law.FCFS, disaggregated, exchanged(7, 8, *FROM_PULL)),
    "overtaken before decode": (Law.FCFS, disaggregated, exchanged(20, 22, "decode_start_s", "last_token_s")),
    "overtaken in a loop": (Law.FCFS, lambda: run("1xC:tp1pp1"), exchanged(10, 20, *ALL_TIMES)),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_names_the_broken_law(name: str) -> None:
    law, run_it, corrupt = CORRUPTIONS[name]
    result = run_it()
    columns = {column: values.copy() for column, values in result.columns.items()}
    bad = corrupt(dataclasses.replace(result, columns=columns, steps=copy.copy(result.steps)))
    with pytest.raises(BrokenLawError, match=r"\d") as caught:
        check_laws(bad)
    assert caught.value.law is law, str(caught.value)


def test_every_law_is_broken_by_some_corruption() -> None:
    assert {law for law, _, _ in CORRUPTIONS.values()} == set(Law)


def test_the_error_says_who_broke_what() -> None:
    result = disaggregated()
    result.columns["first_token_s"][4] += 1.0
    with pytest.raises(
        BrokenLawError, match=r"^internal error: broken law 'causes precede effects': request 4: first_"
    ):
        check_laws(result)


@pytest.mark.parametrize("phase", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("mode", FirstToken)
@pytest.mark.parametrize("degree", ["tp1pp1", "tp1pp2"])
@pytest.mark.parametrize("pulls", HandoverMode)
def test_hold_for_one_phase(phase: Role, mode: FirstToken, degree: str, pulls: HandoverMode) -> None:
    hop_s = 0.0 if pulls is HandoverMode.LAYER_WISE else 3 / 1024
    handover = Handover(first_token_from=mode, mode=pulls, stalls_decode=False, post_s=2 / 1024, hop_s=hop_s)
    profile = make_profile(handover=handover, limits={Role.PREFILL: BatchLimits(100, 2)})
    placement = Placement.parse(f"2xP:{degree} + 2xD:{degree}")
    for log_steps in (False, True):
        options = Options(check=True, log_steps=log_steps)
        simulate(placement, TRACE, profiles=every_role(profile), options=options, phase=phase)


@pytest.mark.parametrize("placement", ["2xP:tp1pp1 + 2xD:tp1pp2", "2xC:tp1pp1", "1xC:tp1pp2 chunked"])
def test_hold_for_runs_that_stop_early_and_closed_loops(placement: str) -> None:
    profile = make_profile(decode=(4.0, 1 / 32, 0.5), request_s=1 / 1024)
    for counted in (1, 7, 20):
        for log_steps in (False, True):
            options = Options(check=True, log_steps=log_steps)
            window = Window(counted=counted)
            result = simulate(parsed(placement), TRACE, profiles=every_role(profile), options=options, window=window)
            assert not result.drained
            loop = ClosedLoop(users=4, lengths=Fixed(40, 6), num_requests=20)
            simulate(parsed(placement), loop, profiles=every_role(profile), options=options)


def test_hold_where_pulls_follow_launches_of_the_same_instant() -> None:
    """Small caches: a launch preempts, so layer-wise pulls of no time follow it, and launches follow them."""
    at_once = Handover(
        first_token_from=FirstToken.DECODE, mode=HandoverMode.LAYER_WISE, stalls_decode=False, watermark=1.0
    )
    host = {role: HostOverhead(sequence_s=1 / 4096, token_s=1 / 65536) for role in (Role.PREFILL, Role.DECODE)}
    host[Role.DECODE] = dataclasses.replace(host[Role.DECODE], step_s=1 / 1024)
    prompts = make_profile(
        prefill=(8.0, 0.5, 1 / 64),
        decode=(4.0, 1 / 32, 0.0),
        decode_large=(2.0, 1 / 32, 1.0),
        threshold_requests=3,
        host=host,
        limits={Role.PREFILL: BatchLimits(4096, 4), Role.DECODE: BatchLimits(requests=4)},
        kv_tokens=128,
        swap_tokens_per_s=1024.0,
        handover=dataclasses.replace(at_once, post_s=7 / 1024),
    )
    freed_late = make_trace(
        [161, 172, 172, 212, 212, 362, 363, 364, 364, 374, 374, 414, 564, 564, 565, 566, 609, 649, 659, 659, 659, 662],
        [20, 1, 19, 15, 13, 12, 8, 6, 5, 7, 17, 7, 17, 15, 7, 18, 9, 17, 8, 13, 18, 2],
        [60, 1, 1, 1, 1, 17, 2, 3, 3, 17, 2, 17, 60, 17, 1, 1, 17, 60, 17, 5, 5, 5],
        [0, 0, 0, 14, 12, 11, 7, 5, 0, 0, 0, 0, 0, 14, 4, 1, 0, 16, 0, 0, 17, 1],
    )
    options = Options(check=True, prefill_token_limit=32)
    simulate(parsed("1xP:tp1pp4 + 1xD:tp2pp1"), freed_late, profiles=every_role(prompts), options=options)

    launches = make_profile(
        prefill=(8.296875, 0.5, 0.0),
        decode=(4.1484375, 1 / 32, 0.5),
        decode_large=(2.07421875, 1 / 32, 1.0),
        threshold_requests=3,
        kv_tokens=96,
        preemption=Preemption.RECOMPUTE,
        handover=dataclasses.replace(at_once, post_block_s=0.0005),
    )
    in_turns = make_trace(
        [259, 300, 460, 649, 689, 689, 690, 690, 693, 844, 844, 994, 1143, 1143, 1144, 1144, 1145, 1155],
        [17, 46, 6, 67, 45, 52, 61, 67, 2, 21, 69, 21, 27, 2, 20, 27, 50, 45],
        [60, 17, 33, 2, 3, 1, 2, 5, 60, 3, 2, 1, 17, 5, 17, 60, 33, 33],
    )
    options = Options(check=True)
    simulate(parsed("3xP:tp1pp2 + 1xD:tp1pp4"), in_turns, profiles=every_role(launches), options=options)


def digest(result: Result) -> str:
    """Return a digest of everything that a run recorded."""
    sha = hashlib.sha256()
    for name in sorted(result.columns):
        sha.update(result.columns[name].tobytes())
    sha.update(repr((result.steps, result.events, result.kv_peak, result.utilization)).encode())
    gaps = result.gaps
    assert gaps is not None
    for values in (gaps.gap_s, gaps.weight, gaps.run_first_s, gaps.run_growth_s, gaps.run_steps, gaps.run_weight):
        sha.update(values.tobytes())
    return sha.hexdigest()


def seeded_digest() -> str:
    """Return the digest of runs that use every random stream and all kinds of instances."""
    from dsim.options import Routing
    from dsim.workload import LogNormal, Poisson, Workload

    lengths = LogNormal(prompt_mean=40.0, output_mean=12.0, prompt_cv=1.0, output_cv=1.0)
    trace = Workload(Poisson(), lengths).trace(rate_per_s=20.0, num_requests=300, seed=5, context_tokens=4096)
    profile = every_role(make_profile(decode=(4.0, 1 / 32, 0.5), kv_tokens=2048))
    texts = []
    for placement in ("3xP:tp1pp2 + 3xD:tp1pp2", "2xP:tp1pp1 + 3xD:tp1pp1", "3xC:tp1pp1"):
        options = Options(seed=7, prefill_routing=Routing.POWER_OF_TWO, decode_routing=Routing.POWER_OF_TWO)
        texts.append(digest(simulate(Placement.parse(placement), trace, profiles=profile, options=options)))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def test_same_seed_same_bytes_also_in_a_fresh_process() -> None:
    here = seeded_digest()
    assert seeded_digest() == here
    program = "from tests.test_laws import seeded_digest; import sys; sys.stdout.write(seeded_digest())"
    command = [sys.executable, "-c", program]
    for hash_seed in ("1", "2"):
        fresh = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=ROOT, env={"PYTHONHASHSEED": hash_seed}
        )
        assert fresh.stdout == here


def test_checking_is_vectorised() -> None:
    """Counted, not timed: few Python calls however many requests, and memory in proportion to them."""
    n = 20_000
    trace = make_trace(list(range(0, 40 * n, 40)), [20] * n, [2] * n)
    result = simulate(Placement.parse("2xP:tp1pp1 + 2xD:tp1pp1"), trace, profiles=every_role(make_profile()))
    profiler = cProfile.Profile()
    profiler.runcall(check_laws, result)
    assert sum(entry.callcount for entry in profiler.getstats()) < 2_000
    tracemalloc.start()
    try:
        check_laws(result)
        assert tracemalloc.get_traced_memory()[1] < 1_000 * n
    finally:
        tracemalloc.stop()
