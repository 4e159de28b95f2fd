"""The profiler's grid: what it times, in which order, and what it expects of a step's time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.catalog import find_gpu
from profiles.allreduce import AllReduceModel, AllReduces, interpolated
from profiles.grid import (
    PHASES,
    CostModel,
    Limits,
    computed_tokens,
    decoding_requests,
    dominated,
    knee_tokens,
    make_grid,
    powers,
    thinned,
)
from profiles.profiling import Question, parse_tps
from profiles.rows import Point
from profiles.scripts import h200
from profiles.shapes import shape_of

TINY_LOGITS_BYTES = shape_of("tiny").model.vocabulary * 4


def question(model: str = "llama-3.1-8b", tps: tuple[int, ...] = (1,), gpu: str = "h200") -> Question:
    return Question(shape_of(model), find_gpu(gpu), "cuda", tps, "bf16")


def points(asked: Question) -> list[Point]:
    return [point for level in asked.levels() for point in level]


limits = st.builds(
    lambda prompt, prefill, batch, context, kv: Limits(prompt, prefill, 16, batch, context, {1: kv, 2: 2 * kv}),
    st.integers(1, 40_000),
    st.integers(1, 40_000),
    st.integers(1, 600),
    st.integers(1, 40_000),
    st.integers(1, 10**7),
)


@given(limits)
def test_every_point_is_within_its_limits_and_stands_once(ends: Limits) -> None:
    levels = make_grid(shape_of("llama-3.1-8b"), find_gpu("h200"), tps=(1, 2), limits=ends, dtype_bytes=2)
    flat = [point for level in levels for point in level]
    assert len(set(flat)) == len(flat)
    for point in flat:
        assert ends.allow(point)
        prompt = point.prompt_tokens + point.cached_tokens
        assert prompt <= ends.prompt_tokens
        assert point.requests * point.prompt_tokens <= ends.prefill_tokens
        assert decoding_requests(point) <= ends.decode_requests
        assert point.context_tokens <= ends.context_tokens


def test_the_first_level_already_spans_the_whole_range() -> None:
    asked = question(tps=(1, 2))
    first = asked.levels()[0]
    for tp in (1, 2):
        prefills = [p.prompt_tokens for p in first if p.phase == "prefill" and p.tp == tp]
        assert (min(prefills), max(prefills)) == (16, 16384)
        decodes = [p for p in first if p.phase == "decode" and p.tp == tp]
        assert {p.requests for p in decodes} >= {1, 16, 256}
        assert {p.context_tokens for p in decodes} >= {64.0, 16384.0}
    assert len(first) < 60


def test_coarse_decodes_have_one_request_and_two() -> None:
    for gpu, device in (("h200", "cuda"), ("cpu", "cpu")):
        asked = Question(shape_of("tiny"), find_gpu(gpu), device, (1,), "fp32")
        coarse = [p for level in asked.levels()[:2] for p in level if p.phase == "decode"]
        for context in (64.0, 256.0, 1024.0):
            assert {1, 2, 4, 16} <= {p.requests for p in coarse if p.context_tokens == context}


def test_a_step_may_not_need_more_kv_than_there_is() -> None:
    asked = question()
    # (0.9 * 151e9 bytes - 16e9 of weights) / 131,072 bytes a token.
    assert asked.limits.kv_tokens[1] == pytest.approx(917_000, rel=0.01)
    assert max(p.requests * p.context_tokens for p in points(asked) if p.phase == "decode") <= 917_000 * 1.01


def test_a_model_that_fills_several_gpus_is_still_timed() -> None:
    asked = question("llama-3.1-405b", tps=(1, 8))
    assert all(tokens > 0 for tokens in asked.limits.kv_tokens.values())
    assert {p.phase for p in points(asked) if p.tp == 1} == set(PHASES)


def test_the_grid_is_denser_around_the_knee() -> None:
    knee = knee_tokens(find_gpu("h200"), 2)
    lengths = sorted({p.prompt_tokens for p in points(question()) if p.phase == "prefill" and p.requests == 1})

    def density(first: float, last: float) -> int:
        return sum(1 for n in lengths if first <= n < last)

    assert density(knee, 2 * knee) > 2 * density(4096, 8192)


def test_phases_can_be_chosen() -> None:
    asked = Question(shape_of("tiny"), find_gpu("cpu"), "cpu", (1,), "fp32", phases=("decode",))
    assert {p.phase for p in points(asked)} == {"decode"}


def test_a_short_context_ends_the_grid() -> None:
    assert max(p.prompt_tokens + p.cached_tokens for p in points(question("opt-13b"))) == 2048
    assert max(p.context_tokens for p in points(question("opt-13b"))) == 2048


@given(st.integers(1, 1000), st.integers(1, 100_000))
def test_powers_begin_and_end_where_they_should(first: int, last: int) -> None:
    steps = powers(first, last)
    assert steps == sorted(set(steps))
    assert steps[-1] == last
    assert steps[0] == min(first, last)
    assert all(b <= 2 * a for a, b in itertools.pairwise(steps))


@given(st.lists(st.integers(1, 10_000), min_size=1, unique=True), st.sampled_from([2, 4, 8]))
def test_thinning_keeps_the_ends(numbers: list[int], ratio: int) -> None:
    numbers.sort()
    kept = thinned(numbers, ratio)
    assert (kept[0], kept[-1]) == (numbers[0], numbers[-1])
    assert set(kept) <= set(numbers)


def test_the_cost_model_learns() -> None:
    gpu = find_gpu("h200")
    shape = shape_of("llama-3.1-8b")
    cost = CostModel(shape, 2, gpu.bf16_flops_per_s, gpu.hbm_bytes_per_s)
    decode = Point("decode", 1, 1, context_tokens=64.0)
    # 15 GB of layers and head at 40 % of 4.8 TB/s.
    assert cost.step_s(decode) == pytest.approx(15.0e9 / 4.8e12 / 0.4, rel=0.02)
    cost.learn(decode, 0.1)
    assert cost.step_s(decode) == pytest.approx(0.1)
    for _ in range(20):
        cost.learn(decode, 0.2)
    assert cost.step_s(decode) == pytest.approx(0.2, rel=1e-3)
    # Longer steps take longer, in proportion to what they compute.
    long, longer = Point("prefill", 1, 1, 4096), Point("prefill", 1, 1, 8192)
    assert 2 < cost.step_s(longer) / cost.step_s(long) < 2.5


def test_what_needs_at_least_as_much_memory_is_dominated() -> None:
    failed = [Point("decode", 1, 64, context_tokens=4096.0)]
    assert dominated(Point("decode", 1, 64, context_tokens=8192.0), failed)
    assert dominated(Point("decode", 1, 128, context_tokens=4096.0), failed)
    assert not dominated(Point("decode", 1, 32, context_tokens=8192.0), failed)
    assert not dominated(Point("decode", 2, 64, context_tokens=8192.0), failed)
    assert not dominated(Point("prefill", 1, 64, 8192), failed)


@pytest.mark.parametrize("job", h200.JOBS)
def test_the_prepared_jobs_are_possible(job: str) -> None:
    model, _, tps = job.partition(":")
    asked = question(model, tps=parse_tps(tps))
    first = asked.levels()[0]
    assert {point.tp for point in first} == set(asked.tps)
    assert max(p.prompt_tokens for p in first) == min(asked.shape.model.context_tokens, 16384)


def test_mixed_steps_compute_both_parts() -> None:
    assert computed_tokens(Point("mixed", 1, 2, 512, 0, 1024.0, 8)) == 2 * 512 + 8
    assert computed_tokens(Point("decode", 1, 8, context_tokens=1024.0)) == 8


def test_modelled_collectives_are_two_a_layer_one_more_and_the_gather_of_logits() -> None:
    shape = shape_of("llama-3.1-8b")
    model = AllReduceModel(latency_s=1e-5, bandwidth_bytes_per_s=300e9)
    reduces = AllReduces(shape, 2, models={4: model})
    point = Point("prefill", 4, 1, 1000)
    each_s = 1e-5 + 2 * 3 / 4 * 1000 * 4096 * 2 / 300e9
    # The all-gather of one prompt's logits moves half of what an all-reduce of them would.
    gather_s = 1e-5 + 3 / 4 * 128256 * 2 / 300e9
    assert reduces.step_s(point) == pytest.approx(65 * each_s + gather_s, rel=1e-12)
    many = Point("mixed", 4, 2, 100, 0, 64.0, 254)
    each_s = 1e-5 + 2 * 3 / 4 * 454 * 4096 * 2 / 300e9
    gather_s = 1e-5 + 3 / 4 * 256 * 128256 * 2 / 300e9
    assert reduces.step_s(many) == pytest.approx(65 * each_s + gather_s, rel=1e-12)
    assert reduces.step_s(Point("prefill", 1, 1, 1000)) == 0
    assert (reduces.kind, AllReduces(shape, 2).kind, AllReduces(shape, 2, {2: {1: 1.0}}).kind) == (
        "modelled",
        "none",
        "measured",
    )


def test_within_a_node_links_count_beyond_it_the_network() -> None:
    gpu = find_gpu("h200")
    assert AllReduceModel.modelled(gpu, 8).bandwidth_bytes_per_s == 0.7 * gpu.nvlink_bytes_per_s
    assert AllReduceModel.modelled(gpu, 16).bandwidth_bytes_per_s == 0.7 * gpu.network_bytes_per_s


def test_timed_all_reduces_are_interpolated() -> None:
    timed = {1024: 1e-5, 4096: 1.3e-5, 16384: 4e-5}
    model = AllReduceModel(latency_s=1e-5, bandwidth_bytes_per_s=300e9)
    assert interpolated(timed, 16) == 1e-5
    assert interpolated(timed, 4096) == pytest.approx(1.3e-5)
    assert interpolated(timed, 10240) == pytest.approx(2.65e-5)
    assert interpolated(timed, 2 * 16384) == pytest.approx(4e-5 + 16384 * 2.7e-5 / 12288)
    assert AllReduces(shape_of("tiny"), 4, {2: {1024: 1e-5}}).step_s(
        Point("decode", 2, 1, context_tokens=16.0)
    ) == pytest.approx(25 * 1e-5 + interpolated({1024: 1e-5}, TINY_LOGITS_BYTES / 2))
    assert AllReduces(shape_of("tiny"), 4, {2: timed}, {4: model}).settings() == {
        "all_reduce_tp2": ["measured", "1024 bytes 1e-05 s", "4096 bytes 1.3e-05 s", "16384 bytes 4e-05 s"],
        "all_reduce_tp4": "modelled: 1e-05 s + 2 (n - 1) / n x bytes / 3e+11 bytes per s",
    }
