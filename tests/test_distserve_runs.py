"""Replays of DistServe's measured runs, request by request, against what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distserve import RUN_SLO, needs_data, replay, runs

pytestmark = needs_data

#: Root mean square and worst difference of joint attainment, in points, that each kind of run must keep within.
BOUNDS = {"c21d11": (2.5, 6.0), "c21d12": (6.0, 15.0), "vllm": (9.0, 15.0)}


@pytest.mark.parametrize("kind", BOUNDS)
def test_joint_attainment(kind: str) -> None:
    differences = [100 * (replay(run).attainment(RUN_SLO).both - run.attainment(RUN_SLO)) for run in runs(kind)]
    assert len(differences) == {"c21d11": 9, "c21d12": 4, "vllm": 4}[kind]
    rmse, worst = BOUNDS[kind]
    assert np.sqrt(np.mean(np.square(differences))) <= rmse
    assert np.max(np.abs(differences)) <= worst


def test_p90_ttft_even_where_it_is_tens_of_seconds() -> None:
    for run in runs("c21d11"):
        simulated, measured = np.quantile(replay(run).ttft_s, 0.9), np.quantile(run.ttft_s, 0.9)
        assert 0.7 <= simulated / measured <= 1.3, run.name


def test_saturation_is_seen_in_short_runs() -> None:
    flags = {run.name: replay(run).saturation.value for run in runs("c21d11")}
    assert flags["c21d11-300-3rps"] == flags["c21d11-300-4.5rps"] == "stable"
    assert flags["c21d11-1200-12rps"] == flags["c21d11-900-9rps"] == flags["c21d11-300-12rps"] == "overloaded"
