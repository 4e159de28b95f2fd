"""Curves: attainment of a placement against the rate it is offered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from dsim.pools import Placement
from placement.probe import Probe, Scenario
from placement.runner import Progress, Runner
from placement.statistics import Interval, mean_interval


@dataclass(frozen=True, slots=True)
class Sampling:
    """Requests dropped and counted in one run, and runs for one point."""

    warmup: int = 1000
    counted: int = 1500
    replications: int = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """Attainment (0 to 1) at each rate.

    Args:
        rates_per_gpu_per_s: requests per second and GPU, shape (n,).
        both: share that met all limits, with its interval over replications; `ttft`, `tpot`: means of one limit alone.
    """

    placement: Placement
    rates_per_gpu_per_s: tuple[float, ...]
    both: tuple[Interval, ...]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]

    def to_rows(self) -> list[dict[str, object]]:
        """Return one row for each rate."""
        return [
            {
                "placement": self.placement.label,
                "num_gpus": self.placement.num_gpus,
                "rate_per_gpu_per_s": rate,
                "attainment": {"both": both.best, "low": both.low, "high": both.high, "ttft": ttft, "tpot": tpot},
            }
            for rate, both, ttft, tpot in zip(self.rates_per_gpu_per_s, self.both, self.ttft, self.tpot, strict=True)
        ]


def attainment_curves(
    scenario: Scenario,
    placements: Sequence[Placement],
    rates_per_gpu_per_s: Sequence[float],
    *,
    sampling: Sampling | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Curve]:
    """Return a curve for each placement, all from the same requests.

    Args:
        executor: where the runs take place; None: here.
    """
    sampling = sampling or Sampling()
    points = [(p, r, i) for p in placements for r in rates_per_gpu_per_s for i in range(sampling.replications)]
    probes = [Probe(p, r * p.num_gpus, i, sampling.warmup, sampling.counted) for p, r, i in points]
    outcomes = Runner(scenario, executor=executor, progress=progress).run(probes, stage="curves")
    shape = (len(placements), len(rates_per_gpu_per_s), sampling.replications, 3)
    shares = np.array([outcome.attainment for outcome in outcomes], dtype=np.float64).reshape(shape)
    return [
        Curve(
            placement,
            tuple(rates_per_gpu_per_s),
            tuple(mean_interval(row[:, 0].tolist(), confidence=0.95) for row in share),
            tuple(share[:, :, 1].mean(axis=1).tolist()),
            tuple(share[:, :, 2].mean(axis=1).tolist()),
        )
        for placement, share in zip(placements, shares, strict=True)
    ]
