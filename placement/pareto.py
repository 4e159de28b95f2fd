"""What speed costs: the placements and rates of which none is better in TTFT, TPOT and cost at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsim.metrics import Saturation
from dsim.options import Window
from dsim.pools import Placement
from dsim.result import Result
from dsim.simulate import simulate
from dsim.workload import replication_seed
from placement.crew import each
from placement.objective import Prices, cost_usd_per_h, usd_per_million_tokens
from placement.probe import Probe, Scenario
from placement.result import SearchResult, State, Trial
from placement.search import Question, case, horizon, scenario
from placement.statistics import Interval, mean_interval

#: Rates of each placement, as shares of what is known to be its most.
SHARES: Final = (0.1, 0.4, 0.7, 0.9)
#: Placements compared beside those that have a goodput: the best known of so many combinations of degrees.
_OTHERS: Final = 24
_REPLICATIONS: Final = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One placement at one rate.

    Args:
        ttft_s, tpot_s: the quantile of the attainment target: so large a share of the requests is no slower.
        usd_per_million_output_tokens: the whole cost over the output tokens, between the lowest and the highest price.
        attainment: share of the requests within all limits, mean over the replications.
        is_best: no other point is as good in TTFT, TPOT and cost and better in one of them.
    """

    placement: Placement
    rate_per_gpu_per_s: float
    ttft_s: Interval
    tpot_s: Interval
    usd_per_million_output_tokens: Interval
    attainment: float
    is_best: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the point as in docs/output.md."""
        return {
            **self.placement.named_dict(),
            "num_gpus": self.placement.num_gpus,
            "rate_per_gpu_per_s": self.rate_per_gpu_per_s,
            "ttft_s": self.ttft_s.to_dict(),
            "tpot_s": self.tpot_s.to_dict(),
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens.to_dict(),
            "attainment": self.attainment,
            "is_best": self.is_best,
        }


def pareto(
    question: Question, result: SearchResult, *, prices: Prices, executor: Executor | None = None
) -> tuple[Point, ...]:
    """Return every point simulated whose backlog does not grow, the best ones first, by cost.

    Args:
        result: the question's answer; its trials say which placements look best and where their goodput may lie.

    Raises:
        InputError: a price is unknown.
    """
    chosen = shapes(result.trials, most=_OTHERS)
    asked, run = scenario(question), horizon(question)
    probes = [
        Probe(trial.placement, share * per_gpu * trial.num_gpus, i, run.warmup, run.counted, run.tail)
        for trial, per_gpu in chosen
        for share in SHARES
        for i in range(_REPLICATIONS)
    ]
    seen = each(_latencies, asked, probes, executor)
    output_tokens = float(case(question).sample.output_tokens.mean())
    points = []
    for start in range(0, len(probes), _REPLICATIONS):
        own, probe = seen[start : start + _REPLICATIONS], probes[start]
        if any(run is None for run in own):
            continue
        cost = usd_per_million_tokens(cost_usd_per_h(probe.placement, prices), probe.rate_per_s, output_tokens)
        assert cost is not None
        ttft, tpot, shares = zip(*(run for run in own if run is not None), strict=True)
        points.append(
            Point(
                probe.placement,
                probe.rate_per_s / probe.placement.num_gpus,
                mean_interval(ttft, confidence=question.confidence),
                mean_interval(tpot, confidence=question.confidence),
                cost,
                float(np.mean(shares)),
            )
        )
    best = front([(p.ttft_s.best, p.tpot_s.best, p.usd_per_million_output_tokens.best) for p in points])
    marked = [replace(point, is_best=number in best) for number, point in enumerate(points)]
    return tuple(sorted(marked, key=lambda p: (not p.is_best, p.usd_per_million_output_tokens.best)))


def shapes(trials: Sequence[Trial], *, most: int) -> list[tuple[Trial, float]]:
    """Return complete trials, and the best known of other combinations of degrees and policies.

    Args:
        trials: in the order of a search's answer.
        most: combinations at most, beside those of complete trials.

    Returns:
        Each with the goodput per GPU, or the least that is known to be too much for it.
    """
    found: list[tuple[Trial, float]] = []
    seen: set[object] = set()
    others = 0
    for trial in trials:
        shape = tuple(replace(pool, count=1) for pool in trial.placement.pools)
        goodput = trial.goodput_per_gpu_per_s
        if trial.state is State.COMPLETE and goodput is not None and goodput.best > 0:
            found.append((trial, goodput.best))
        elif trial.state is State.PRUNED and shape not in seen and others < most:
            limits = (trial.failed_at_per_gpu_per_s, trial.bound_per_gpu_per_s)
            known = [limit for limit in limits if limit is not None and limit > 0]
            if not known:
                continue
            others += 1
            found.append((trial, min(known)))
        seen.add(shape)
    return found


def front(points: Sequence[tuple[float, ...]]) -> frozenset[int]:
    """Return which points no other one is as good as everywhere and better than somewhere; small is good.

    >>> sorted(front([(1, 3), (2, 2), (2, 3), (3, 1), (2, 2)]))
    [0, 1, 3, 4]
    """
    if not points:
        return frozenset()
    table: NDArray[np.float64] = np.array(points, dtype=np.float64)
    return frozenset(
        number
        for number, row in enumerate(table)
        if not bool(np.any(np.all(table <= row, axis=1) & np.any(table < row, axis=1)))
    )


def _latencies(asked: Scenario, probe: Probe) -> tuple[float, float, float] | None:
    """Return TTFT and TPOT at the target's quantile, seconds, and the attainment; None where the backlog grows."""
    result = played(asked, probe)
    if result.saturation is Saturation.OVERLOADED:
        return None
    # One-token outputs have no TPOT: a run of nothing else has none to lose.
    tpot = result.tpot_s[~np.isnan(result.tpot_s)]
    return (
        float(np.quantile(result.ttft_s, asked.target)),
        float(np.quantile(tpot, asked.target)) if len(tpot) else 0.0,
        result.attainment(asked.slo).both,
    )


def played(asked: Scenario, probe: Probe) -> Result:
    """Return all that one run of a probe left."""
    seed = replication_seed(asked.seed, probe.replication)
    trace = asked.workload.trace(
        num_requests=probe.warmup + probe.counted + probe.tail,
        seed=seed,
        context_tokens=asked.context_tokens,
        rate_per_s=probe.rate_per_s,
    )
    return simulate(
        probe.placement,
        trace,
        profiles=asked.profiles_of(probe.placement),
        options=replace(asked.options, seed=seed, track_itl=False, log_steps=False),
        window=Window(probe.warmup, probe.counted),
    )
