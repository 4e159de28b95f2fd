"""Step times from kernel tables and datasheets against measurements of others; nothing is fitted on what is tested."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from dsim.pools import Role
from profiles.kernels.hosts import HOSTS, HostConstants
from profiles.splitwise import GPUS
from tests.truth import closed_loop, layer_tables, open_loop, splitwise, static_batches, summary
from tests.truth.common import mean_error, needs_truth, profile_of, worst_error

pytestmark = [needs_truth, pytest.mark.slow]


def test_every_target_is_met() -> None:
    found = list(summary.targets())
    assert len(found) == 19
    missed = [f"{target.run}: {target.name} {target.reached:.1%}" for target in found if not target.is_met]
    assert missed == []


def test_at_most_four_numbers_of_host_work_are_fitted() -> None:
    """And each stands in the profile, with what it was fitted to."""
    numbers = [field.name for field in fields(HostConstants) if field.name != "source"]
    assert len(numbers) == 4
    for model, gpu, engine in (("qwen3-8b", "h100-sxm", "vllm"), ("llama-3.1-8b", "h200-sxm", "trtllm")):
        profile, host = profile_of(model, gpu, engine), HOSTS[engine]
        for role in Role:
            assert profile.host[role].step_s == host.step_s
            assert profile.host[role].sequence_s == host.sequence_s
            assert profile.host[role].token_s == profile.host[role].mixed_s == 0
        assert profile.request_s == host.request_s
        assert "fitted to" in profile.reasons["host"]


class TestStaticBatches:
    """TensorRT-LLM 0.9."""

    @pytest.mark.parametrize(
        ("kind", "worst_prefill", "worst_decode"),
        [("trtllm", 0.16, 0.12), ("vllm", 0.18, 0.12), ("roofline", 0.23, 0.20)],
    )
    def test_each_model_gpu_and_degree(self, kind: str, worst_prefill: float, worst_decode: float) -> None:
        by_place = static_batches.tested(kind)
        assert len(by_place) == 8
        for place, found in by_place.items():
            assert mean_error(step.prefill for step in found) <= worst_prefill, place
            assert mean_error(step.decode for step in found) <= worst_decode, place

    def test_what_is_fitted_is_not_tested(self) -> None:
        steps = static_batches.steps("vllm")
        tested = {step.what for found in static_batches.tested("vllm").values() for step in found}
        places = {(step.place, step.what) for step in steps}
        assert len(steps) == len(places) == 254
        fitted = {(step.place, step.what) for step in steps[0::2]}
        held_out = {(place, step.what) for place, found in static_batches.tested("vllm").items() for step in found}
        assert tested
        assert not fitted & held_out
        assert fitted | held_out == places
        assert 0.5e-3 < static_batches.host_s("vllm") < 3e-3
        assert static_batches.host_s("roofline") == 0


class TestClosedLoop:
    """vLLM 0.30, Qwen3-8B on one H100."""

    def test_each_run(self) -> None:
        for run in closed_loop.not_fitted():
            key = run.workload, run.users
            assert abs(run.pairs["TPOT p95"].error) <= 0.10, key
            assert abs(run.pairs["throughput"].error) <= 0.20, key
            if not run.is_cached:
                assert abs(run.pairs["TTFT p99"].error) <= 0.45, key

    def test_prefix_hits_are_those_that_no_gpu_could_compute(self) -> None:
        assert [(run.workload, run.users) for run in closed_loop.runs() if run.is_cached] == [
            ("prefill", 4),
            ("prefill", 32),
        ]

    def test_above_the_knee(self) -> None:
        """Where the KV cache or the GPU is full, queueing decides TTFT."""
        full = [run for run in closed_loop.not_fitted() if run.users >= 256]
        assert len(full) == 14
        assert mean_error(closed_loop.pairs(full, "TTFT p99")) <= 0.10


class TestOpenLoop:
    """TensorRT-LLM 0.14 under Triton, Llama-3.1-8B on H100 and H200."""

    def test_no_ttft_below_saturation_is_far_off(self) -> None:
        assert worst_error(open_loop.not_fitted()["TTFT below saturation"]) <= 0.25

    def test_six_of_thirty_six_runs_are_fitted(self) -> None:
        assert [run.is_fitted for run in open_loop.runs()].count(True) == 6
        assert len(open_loop.runs()) == 36


class TestLayerTables:
    """vLLM 0.19, Llama-3.1-8B on one RTX PRO 6000."""

    def test_host_work_fitted_elsewhere_brings_it_nearer(self) -> None:
        bare, hosted = layer_tables.pairs("bare"), layer_tables.pairs("hosted")
        for metric in layer_tables.METRICS:
            assert abs(hosted[metric, "mean"].error) < abs(bare[metric, "mean"].error)
            assert abs(hosted[metric, "mean"].error) <= 0.04

    def test_every_request_in_its_place(self) -> None:
        """Not only the means: the order in which requests finish, and each one's latency."""
        mine, theirs = layer_tables.simulated("hosted"), layer_tables.measured()[0]
        assert np.corrcoef(mine.e2e, theirs.e2e)[0, 1] > 0.98
        assert np.median(np.abs(mine.e2e / theirs.e2e - 1)) < 0.03


class TestSplitwise:
    """vLLM of 2023, Llama-2-70B."""

    @pytest.mark.parametrize("gpu", GPUS)
    @pytest.mark.parametrize("tp", splitwise.DEGREES)
    def test_what_was_not_fitted(self, gpu: str, tp: int) -> None:
        prefill, decode = (splitwise.held_out(gpu, tp)[phase] for phase in splitwise.PHASES)
        assert mean_error(prefill) <= 0.06
        assert mean_error(decode) <= 0.04
