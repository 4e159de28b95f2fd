"""The sweep files that come with dsim: they run, keep within the bounds they state, and the paper's claims hold.

Each file's quick variant is simulated once, in this process, for all tests.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.compare import closeness, compare
from experiments.runner import run_tasks
from experiments.store import SweepResults, summarized
from experiments.sweepfile import read_outline, read_sweep
from placement.statistics import student_t

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
NAMES = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))

#: The figures and tables of results in the paper, each with a file of its own.
PAPER = {
    *("fig1", "fig1_goodput", "fig2", "fig3", "fig4", "fig5", "fig8_opt13b", "fig8_opt13b_scale", "fig8_opt66b"),
    *("fig8_opt66b_scale", "fig8_opt175b", "fig8_opt175b_scale", "fig9", "fig9_scale", "fig10", "fig11"),
    *("fig11_search", "fig12", "table2", "table3"),
    *("chunked", "chunked_serving", "policies"),
}
PLANNING = {"plan_bandwidth", "plan_gpus", "plan_pareto", "plan_ratio", "plan_targets"}

#: Systems that may be apart from a file's bound: nothing was measured that a profile could be made of.
APART = ("DeepSpeed-MII", "OPT-175B")
#: How a file states its bound: `Bound of the mean difference: COLUMN NUMBER, COLUMN NUMBER.`
BOUND = re.compile(
    rf"Bound of the mean difference(?: \((?:{'|'.join(APART)}) apart\))?: ((?:[\w.]+ [0-9.e-]*[0-9](?:, )?)+)\."
)


@functools.cache
def quick(name: str) -> SweepResults:
    """Return the results of a file's quick variant."""
    sweep = read_sweep(EXPERIMENTS / f"{name}.yaml", quick=True)
    return SweepResults(sweep.outline, tuple(run_tasks(sweep.tasks, jobs=1)))


def row(name: str, **where: object) -> Mapping[str, Any]:
    """Return the one combination of a quick variant with these factor values; `__` stands for a dot."""
    wanted = {key.replace("__", "."): value for key, value in where.items()}
    found = [r for r in summarized(quick(name).rows) if all(r[key] == value for key, value in wanted.items())]
    assert len(found) == 1, (name, wanted, len(found))
    return found[0]


def bounds_of(name: str) -> dict[str, float]:
    """Return the largest mean absolute difference that a file states, by column."""
    match = BOUND.search(read_outline(EXPERIMENTS / f"{name}.yaml").about)
    if match is None:
        return {}
    return {column: float(number) for column, number in (item.split(" ") for item in match[1].split(", "))}


def test_there_is_a_file_for_everything() -> None:
    assert set(NAMES) == PAPER | PLANNING


def test_the_page_has_every_file() -> None:
    page = (EXPERIMENTS.parent / "docs" / "paper.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_valid(name: str) -> None:
    sweep = read_sweep(EXPERIMENTS / f"{name}.yaml")
    assert sweep.tasks
    assert len({task.id for task in sweep.tasks}) == len(sweep.tasks), "two combinations are the same run"
    assert sweep.outline.plots
    assert len(sweep.outline.about) > 200
    assert "quick" in (EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_variant_runs(name: str) -> None:
    results = quick(name)
    assert [found.error for found in results.failed] == []
    assert len(results.table())


@pytest.mark.parametrize("name", sorted(PAPER))
def test_what_was_published_is_as_near_as_the_file_says(name: str) -> None:
    outline = read_outline(EXPERIMENTS / f"{name}.yaml")
    stated = bounds_of(name)
    assert set(stated) == {point.column for point in outline.published.points}
    compared = [pair for pair in compare(quick(name)) if pair.factors.get("system") not in APART]
    for found in closeness(compared):
        assert found.mean <= stated[found.column], f"{found.column}: mean difference {found.mean}"


def two_stages_s(rate_per_s: float) -> float:
    return 0.2 + rate_per_s * 0.2**2 / (4 * (2 - rate_per_s * 0.2))


def speedup_s(rate_per_s: float, k: float) -> float:
    return 0.2 / k + rate_per_s * 0.2**2 / (2 * k * (k - rate_per_s * 0.2))


def test_figure_4_equals_the_formulas() -> None:
    for rate in (1.0, 3.0):
        inter = row("fig4", parallelism="inter-operator, formula", rate_per_gpu=rate)
        assert inter["ttft_s.mean"] == pytest.approx(two_stages_s(2 * rate), abs=1e-4)
        for k in (1.5, 1.6, 1.7, 1.8, 1.9):
            intra = row("fig4", parallelism=f"intra-operator K={k}, formula", rate_per_gpu=rate)
            assert intra["ttft_s.mean"] == pytest.approx(speedup_s(2 * rate, k), abs=1e-4)
            assert intra["crossover_per_gpu_per_s"] > 0


def test_figure_4_simulated_is_the_formula_within_its_interval() -> None:
    for rate in (1.0, 3.0):
        exact_s = {"inter-operator": two_stages_s(2 * rate)}
        exact_s |= {f"intra-operator K={k}": speedup_s(2 * rate, k) for k in (1.5, 1.6, 1.7, 1.8, 1.9)}
        for name, expected_s in exact_s.items():
            found = row("fig4", parallelism=f"{name}, simulated", rate_per_gpu=rate)
            n = found["replications"]
            # Twelve intervals at once, of common random numbers: 99.9 % each.
            wider = student_t(0.999, n - 1) / student_t(0.95, n - 1)
            half_s = wider * (found["ttft_s.mean.high"] - found["ttft_s.mean"])
            assert abs(found["ttft_s.mean"] - expected_s) <= half_s, name


def test_figure_4_crosses_where_the_paper_says() -> None:
    found = row("fig4", parallelism="intra-operator K=1.7, formula", rate_per_gpu=1.0)
    assert found["crossover_per_gpu_per_s"] == pytest.approx(3.1, abs=0.05)


def test_figure_1_each_phase_alone_stays_below_both_together() -> None:
    for rate in (2.0, 4.0):
        both = row("fig1", system="colocated", rate_per_gpu=rate)
        prefill = row("fig1", system="prefill only", rate_per_gpu=rate)
        decode = row("fig1", system="decode only", rate_per_gpu=rate)
        assert prefill["ttft_s.p90"] < both["ttft_s.p90"]
        assert decode["tpot_s.p90"] < both["tpot_s.p90"]


def test_figure_1_two_prefill_and_one_decode_serve_more_per_gpu() -> None:
    split = row("fig1_goodput", system="2 prefill + 1 decode")
    both = row("fig1_goodput", system="colocated")
    assert split["goodput_per_gpu_per_s.low"] > 1.5 * both["goodput_per_gpu_per_s.high"]


def test_figure_2_a_prompt_costs_a_decode_step_more_the_longer_it_is() -> None:
    added = [row("fig2", step__phase="mixed", length=n, step__batch=64)["added_s"] for n in (128, 256, 512, 1024)]
    assert added == sorted(added)
    assert added[-1] > 6 * added[0]


def test_figure_3_lm_is_where_batching_stops_to_pay() -> None:
    alone, batched = (row("fig3", phase="prefill, 512 tokens", step__batch=n)["tokens_per_s"] for n in (1, 16))
    short, full = (row("fig3", phase="prefill, 128 tokens", step__batch=n)["tokens_per_s"] for n in (1, 64))
    assert row("fig3", phase="prefill, 512 tokens", step__batch=1)["saturation_tokens"] == 512
    assert batched < 1.4 * alone
    assert full > 2 * short


def test_figure_5_tensor_parallelism_saves_time_and_pipelines_multiply_throughput() -> None:
    def found(tp: int, pp: int) -> Mapping[str, Any]:
        return row("fig5", driver="kernels only", step__tp=tp, step__pp=pp)

    assert found(4, 1)["step_s"] < found(2, 1)["step_s"] < found(1, 1)["step_s"]
    assert found(1, 4)["step_s"] == pytest.approx(found(1, 1)["step_s"], rel=1e-9)
    assert found(1, 4)["tokens_per_s"] == pytest.approx(4 * found(1, 1)["tokens_per_s"], rel=1e-9)
    assert found(4, 1)["tokens_per_s"] < 4 * found(1, 1)["tokens_per_s"]


def test_chunks_read_kv_again_with_the_square_of_their_number() -> None:
    ns, reads = [], []
    for size in (32, 64, 128, 256, 512, 1024):
        found = row("chunked", step__prompt_tokens=2048, step__batch=32, step__chunk_tokens=size)
        ns.append(found["chunks"])
        reads.append(found["reread_chunks"])
    assert reads == [n * (n - 1) / 2 for n in ns]
    # Doubling the chunks of one prompt tends to four times the reads.
    assert reads[0] / reads[1] == pytest.approx(4, rel=0.05)


def test_chunks_trade_ttft_for_tpot() -> None:
    sizes = (64, 256, 1024)
    rows = [row("chunked", step__prompt_tokens=2048, step__batch=32, step__chunk_tokens=size) for size in sizes]
    assert rows[0]["ttft_s"] > rows[1]["ttft_s"] > rows[2]["ttft_s"]
    assert rows[0]["longest_step_s"] < rows[1]["longest_step_s"] < rows[2]["longest_step_s"]
    served = [row("chunked_serving", token_budget=size, rate=2) for size in (256, 2048)]
    assert served[0]["ttft_s.p90"] > served[1]["ttft_s.p90"]
    assert served[0]["itl_s.p99"] < served[1]["itl_s.p99"]


def test_priorities_only_trade_one_target_for_the_other() -> None:
    """From prefill-first to decode-first TTFT only gets worse and the gaps between tokens only better."""
    order = ("prefill-first", "orca", "chunked 512", "chunked 128", "decode-first")
    rows = [row("policies", system=name, rate_per_gpu=4.0) for name in order]
    ttft_s = [found["ttft_s.p90"] for found in rows]
    itl_s = [found["itl_s.p99"] for found in rows]
    assert ttft_s == sorted(ttft_s)
    assert itl_s == sorted(itl_s, reverse=True)
    split = row("policies", system="1 prefill + 1 decode", rate_per_gpu=6.0)
    others = [row("policies", system=name, rate_per_gpu=6.0)["attainment.both"] for name in order]
    assert split["attainment.both"] > max(others) + 0.2


@pytest.mark.parametrize("name", ["fig8_opt13b", "fig8_opt66b", "table2"])
def test_disaggregation_attains_more_at_the_highest_rate(name: str) -> None:
    records = list(summarized(quick(name).rows))
    highest = max(r["rate_per_gpu"] for r in records)
    attained = {r["system"]: r["attainment.both"] for r in records if r["rate_per_gpu"] == highest}
    split = attained.pop("DistServe", None) or attained.pop("DistServe-Low")
    assert all(split > other for other in attained.values())


def test_figure_10_transfers_are_a_small_part() -> None:
    for system in ("OPT-13B", "OPT-66B"):
        found = row("fig10", system=system, rate_per_gpu=0.5)
        assert found["parts_share.transfer"] < 0.01
        assert math.fsum(found[f"parts_share.{part}"] for part in ("prefill", "decode")) > 0.8


def test_figure_12_is_faster_than_published() -> None:
    """CPU seconds of one process, whatever else this machine does, below the published seconds of 96 cores."""
    published_s = {("low", 2): 1.24, ("low", 4): 2.84, ("high", 2): 3.14, ("high", 4): 5.49}
    for (affinity, gpus), limit_s in published_s.items():
        assert row("fig12", affinity=affinity, search__gpus=gpus)["cpu_s"] < limit_s
