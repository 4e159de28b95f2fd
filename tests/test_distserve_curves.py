"""The paper's attainment curves (figure 8) from the paper's placements, targets and run lengths."""

from __future__ import annotations

import csv
import functools

import numpy as np
import pytest
from scipy.optimize import brentq

from dsim.slo import Slo
from tests.distserve import CURVE_PLACEMENTS, DATA, curve_differences, needs_data, simulated

pytestmark = needs_data

SEEDS = 40


@functools.cache
def differences() -> dict[tuple[str, str, str], list[float]]:
    return dict(curve_differences(seeds=SEEDS))


def test_all_readable_points_together() -> None:
    every = np.concatenate(list(differences().values()))
    assert len(every) > 60
    assert 100 * every.mean() <= 5


def test_each_curve() -> None:
    assert len(differences()) == 8
    for curve, values in differences().items():
        assert 100 * np.mean(values) <= 7, curve


@pytest.mark.parametrize("model", ["facebook/opt-13b", "facebook/opt-66b"])
def test_finite_run_goodput_of_distserve(model: str) -> None:
    with (DATA / "goodput90.csv").open(newline="") as file:
        row = next(r for r in csv.DictReader(file) if r["model"] == model and r["system"] == "distserve")
    slo = Slo(float(row["ttft_slo_s"]), float(row["tpot_slo_s"]))
    gpus = CURVE_PLACEMENTS[model, "distserve"].num_gpus
    assert gpus == int(row["gpus"])
    num_requests = {"facebook/opt-13b": 300, "facebook/opt-66b": 200}[model]

    def excess(per_gpu: float) -> float:
        results = simulated(model, "distserve", per_gpu * gpus, num_requests, 12)
        return float(np.mean([result.attainment(slo).both for result in results])) - 0.9

    published = float(row["goodput_req_s_per_gpu"])
    goodput = brentq(excess, 0.5 * published, 2 * published, xtol=0.02 * published)
    assert 0.8 <= goodput / published <= 1.2
