"""OPT-175B: the analytic model calibrated on OPT-13B and OPT-66B only, and the paper's placements of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsim.options import Evidence, Options
from dsim.pools import Placement
from dsim.profile_file import load_profile
from dsim.simulate import simulate
from dsim.workload import Poisson, Workload, preset
from profiles.choice import best_profile, choose_colocated
from profiles.rows import Phase
from profiles.scripts.opt175b import (
    CALIBRATED_ON,
    DATA,
    ENGINES,
    GPU,
    MODEL,
    Calibration,
    Step,
    calibrate,
    left_out_error,
    main,
    published_steps,
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_calibration_finds_the_numbers_behind_exact_steps() -> None:
    truth = Calibration(scale=1.3, layer_s=8e-5)
    steps = [Step(n, a, truth.step_s(a, n)) for n in (40, 64) for a in (0.01, 0.1, 1.0)]
    found = calibrate(steps)
    assert found.scale == pytest.approx(1.3)
    assert found.layer_s == pytest.approx(8e-5)
    assert np.abs(found.errors(steps)).max() < 1e-12


def test_a_calibration_has_no_negative_number() -> None:
    steps = [Step(40, a, 2 * a - 0.004) for a in (0.01, 0.1, 1.0)]
    found = calibrate(steps)
    assert found.layer_s == 0
    assert 1.6 < found.scale < 2


def test_the_shipped_files_are_what_the_script_writes(tmp_path: Path) -> None:
    assert main(["-o", str(tmp_path)]) == 0
    for engine in ENGINES:
        name = f"{MODEL}-{GPU}-{engine}.yaml"
        assert (DATA / name).read_bytes() == (tmp_path / name).read_bytes(), "write it again"


def test_the_stated_error_is_that_of_a_model_left_out(engine: str) -> None:
    profile = load_profile(DATA / f"{MODEL}-{GPU}-{engine}.yaml")
    prefill, decode = (left_out_error(engine, phase) for phase in (Phase.PREFILL, Phase.DECODE))
    assert profile.expected_error.startswith(f"about {prefill:.0%} (prefill), {decode:.0%} (decode)")
    # What "calibrated" may mean: within a quarter of a model that it did not see.
    assert prefill < 0.15
    assert decode < 0.25


def test_the_fit_of_the_profile_adds_little_to_that(engine: str) -> None:
    profile = load_profile(DATA / f"{MODEL}-{GPU}-{engine}.yaml")
    assert profile.fit is not None
    assert max(error.mean for error in profile.fit.errors) < 0.05


def test_it_is_slower_than_opt_66b_by_its_layers_and_weights(engine: str) -> None:
    small, large = (load_profile(DATA / f"{name}-{GPU}-{engine}.yaml") for name in ("opt-66b", MODEL))
    layers = large.model.layers / small.model.layers
    weights = large.model.weight_bytes / small.model.weight_bytes
    for tp in (4, 8):
        prefill = large.latency_at(tp).prefill_s([(1024, 0)]) / small.latency_at(tp).prefill_s([(1024, 0)])
        decode = large.latency_at(tp).decode_s(32, 32 * 512) / small.latency_at(tp).decode_s(32, 32 * 512)
        assert layers < prefill < 1.1 * weights
        assert layers < decode < 1.1 * weights


def test_published_steps_are_those_of_every_degree(engine: str) -> None:
    for model in CALIBRATED_ON:
        degrees = load_profile(DATA / f"{model}-{GPU}-{engine}.yaml").latency
        steps = published_steps(model, engine, Phase.DECODE)
        assert len(steps) == 24 * len(degrees)


@pytest.mark.parametrize(("engine", "placement"), [("distserve", "1xP:tp3pp3 + 1xD:tp4pp3"), ("vllm", "1xC:tp8pp1")])
def test_the_papers_placements_run(engine: str, placement: str) -> None:
    profile = load_profile(DATA / f"{MODEL}-{GPU}-{engine}.yaml")
    workload = Workload(Poisson(), preset("sharegpt"))
    trace = workload.trace(num_requests=100, seed=3, context_tokens=2048, rate_per_s=0.8)
    result = simulate(Placement.parse(placement), trace, profiles=profile, options=Options(check=True))
    assert len(result) == 100
    assert not np.isnan(result.column("last_token_s")).any()
    # One request on an idle instance cannot beat its own steps.
    assert np.nanmin(result.column("first_token_s") - result.column("arrival_s")) > 0.08


def test_searches_take_the_calibrated_profiles() -> None:
    best = best_profile(MODEL, GPU)
    assert (best.name, best.evidence) == ("opt-175b-a100-80g-distserve", Evidence.ROOFLINE)
    assert best_profile(MODEL, GPU, evidence=Evidence.ROOFLINE).name == best.name
    assert choose_colocated(best).name == "opt-175b-a100-80g-vllm"
    # Of others, a shipped profile of measured steps is no roofline.
    assert best_profile("13b", GPU, evidence=Evidence.ROOFLINE).name == "opt-13b-a100-80g-vllm-roofline"
