"""What DistServe measured, and its replay: shared by the validation tests and docs/validation.md."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile
from dsim.result import Result
from dsim.simulate import simulate
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import Poisson, Workload, preset
from profiles.shipped import find_profile

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "distserve"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="DistServe's measurements are not beside the repository")

#: Targets at which the runs are compared.
RUN_SLO = Slo(ttft_s=0.2, tpot_s=0.1)

#: The placement behind each kind of run.
RUN_PLACEMENTS = {
    "c21d11": Placement.parse("1xP:tp2pp1 + 1xD:tp1pp1"),
    "c21d12": Placement.parse("1xP:tp2pp1 + 1xD:tp1pp2"),
    "vllm": Placement.parse("1xC:tp1pp1", policy=Policy.PREFILL_FIRST),
}

#: (model, system) of the published curves to the paper's placement (Table 3).
CURVE_PLACEMENTS = {
    ("facebook/opt-13b", "distserve"): Placement.parse("1xP:tp2pp1 + 1xD:tp1pp1"),
    ("facebook/opt-13b", "vllm"): Placement.parse("1xC:tp1pp1", policy=Policy.PREFILL_FIRST),
    ("facebook/opt-66b", "distserve"): Placement.parse("1xP:tp4pp1 + 1xD:tp2pp2"),
    ("facebook/opt-66b", "vllm"): Placement.parse("1xC:tp4pp1", policy=Policy.PREFILL_FIRST),
}


@dataclass(frozen=True, eq=False)
class Run:
    """One measured run: its requests and what each of them saw, seconds."""

    name: str
    kind: str
    trace: Trace
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]

    def attainment(self, slo: Slo) -> float:
        """Measured share of requests that met both limits."""
        return float(np.mean((self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)))


def profile_of(model: str, engine: str) -> Profile:
    """Return the shipped A100 profile of `facebook/opt-13b` or `-66b`."""
    return find_profile(model, "a100-80g", engine=engine)


def runs(kind: str) -> list[Run]:
    """Read the measured runs of one kind."""
    found = []
    for path in sorted((DATA / "runs").glob(f"{kind}-*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        column = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
        trace = Trace(
            column["arrival_s"],
            column["prompt_tokens"].astype(np.int64),
            column["output_tokens"].astype(np.int64),
            np.zeros(len(rows), dtype=np.int64),
        )
        tpot_s = np.where(trace.output_tokens == 1, 0.0, column["tpot_s"])
        found.append(Run(path.stem, kind, trace, column["ttft_s"], tpot_s))
    return found


def replay(run: Run) -> Result:
    """Simulate the arrivals and lengths of a measured run with the shipped profile."""
    profile = profile_of("facebook/opt-13b", "vllm" if run.kind == "vllm" else "distserve")
    options = Options(track_itl=False, check=True)
    return simulate(RUN_PLACEMENTS[run.kind], run.trace, profiles=profile, options=options)


@dataclass(frozen=True)
class CurvePoint:
    """One published attainment: per-GPU rate or SLO scale on the axis."""

    figure: str
    model: str
    system: str
    num_requests: int
    rate_per_s: float
    slo: Slo
    attainment: float


def curve_points() -> list[CurvePoint]:
    """Read the readable points of figures 8 of DistServe and vLLM."""
    points = []
    with (DATA / "slo_attainment.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["attainment_pct"] and row["system"] in ("distserve", "vllm"):
                points.append(
                    CurvePoint(
                        row["figure"],
                        row["model"],
                        row["system"],
                        int(row["n_requests"]),
                        float(row["total_rate_req_s"]),
                        Slo(float(row["ttft_slo_s"]), float(row["tpot_slo_s"])),
                        float(row["attainment_snapped_pct"]) / 100,
                    )
                )
    return points


@functools.cache
def simulated(model: str, system: str, rate_per_s: float, num_requests: int, seeds: int) -> tuple[Result, ...]:
    """Simulate one point of a curve with fresh arrivals and ShareGPT lengths per seed."""
    profile = profile_of(model, system)
    workload = Workload(Poisson(), preset("sharegpt"))
    results = []
    for seed in range(seeds):
        trace = workload.trace(
            rate_per_s=rate_per_s, num_requests=num_requests, seed=seed, context_tokens=profile.model.context_tokens
        )
        placement = CURVE_PLACEMENTS[model, system]
        results.append(simulate(placement, trace, profiles=profile, options=Options(track_itl=False)))
    return tuple(results)


def curve_attainment(point: CurvePoint, *, seeds: int) -> float:
    """Return the mean simulated attainment of a published point over `seeds` runs of its own length."""
    results = simulated(point.model, point.system, point.rate_per_s, point.num_requests, seeds)
    return float(np.mean([result.attainment(point.slo).both for result in results]))


def curve_differences(*, seeds: int) -> Mapping[tuple[str, str, str], list[float]]:
    """Return |simulated - published| attainment of every readable point, by (figure, model, system)."""
    differences: dict[tuple[str, str, str], list[float]] = {}
    for point in curve_points():
        key = (point.figure, point.model, point.system)
        differences.setdefault(key, []).append(abs(curve_attainment(point, seeds=seeds) - point.attainment))
    return differences


def roles_of(profile: Profile) -> dict[Role, Profile]:
    """Return the mapping that gives each role the same profile."""
    return dict.fromkeys(Role, profile)


def runs_report() -> str:
    """Return the table of every run."""
    lines = [
        "| run | joint attainment, measured | simulated | difference | P90 TTFT s, measured | simulated "
        "| median TPOT ms, measured | simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in RUN_PLACEMENTS:
        differences = []
        for run in sorted(runs(kind), key=lambda run: (len(run.trace), run.name)):
            result = replay(run)
            measured, simulated_share = run.attainment(RUN_SLO), result.attainment(RUN_SLO).both
            differences.append(100 * (simulated_share - measured))
            several = run.trace.output_tokens > 1
            lines.append(
                f"| {run.name} | {100 * measured:.1f} % | {100 * simulated_share:.1f} % | {differences[-1]:+.1f} "
                f"| {np.quantile(run.ttft_s, 0.9):.3f} | {np.quantile(result.ttft_s, 0.9):.3f} "
                f"| {1e3 * np.median(run.tpot_s[several]):.1f} | {1e3 * np.nanmedian(result.tpot_s):.1f} |"
            )
        rmse = np.sqrt(np.mean(np.square(differences)))
        lines.append(f"| **{kind}** | | | RMSE {rmse:.2f}, worst {np.max(np.abs(differences)):.1f} | | | | |")
    return "\n".join(lines)


def curves_report(*, seeds: int = 40) -> str:
    """Return the table of every curve."""
    lines = ["| curve | points | mean absolute difference, points | worst |", "|---|---|---|---|"]
    every: list[float] = []
    for (figure, model, system), values in curve_differences(seeds=seeds).items():
        every += values
        axis = "rate" if figure == "fig8_rate" else "SLO scale"
        name = f"{model.removeprefix('facebook/')}, {system}, {axis}"
        lines.append(f"| {name} | {len(values)} | {100 * np.mean(values):.1f} | {100 * max(values):.1f} |")
    lines.append(f"| **all** | {len(every)} | {100 * np.mean(every):.1f} | {100 * max(every):.1f} |")
    return "\n".join(lines)
