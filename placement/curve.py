"""Attainment against rate, around a goodput that a search has found."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from placement.probe import Probe
from placement.result import Trial
from placement.runner import Progress, Runner
from placement.search import Question, horizon, scenario
from placement.statistics import Interval, mean_interval

#: Rates probed, as shares of the goodput.
SHARES = (0.6, 0.8, 0.9, 0.96, 1.0, 1.04, 1.1, 1.2)


@dataclass(frozen=True, slots=True)
class Curve:
    """Attainment of one placement at several rates.

    Args:
        rate_per_gpu_per_s: arrival rates, rising.
        attainment: mean over replications with its interval at each, limits within 0 and 1.
    """

    trial: Trial
    rate_per_gpu_per_s: tuple[float, ...]
    attainment: tuple[Interval, ...]

    @property
    def goodput_per_gpu_per_s(self) -> Interval | None:
        """Where the curve meets the target."""
        return self.trial.goodput_per_gpu_per_s


def attainment_curves(
    question: Question,
    trials: Sequence[Trial],
    *,
    shares: Sequence[float] = SHARES,
    replications: int = 3,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> tuple[Curve, ...]:
    """Return the attainment of complete trials at `shares` of their goodput.

    The requests are those of the search: the same for every trial and rate.

    Raises:
        ValueError: if a trial has no goodput.
    """
    runner = Runner(scenario(question), executor=executor, progress=progress)
    probes: list[Probe] = []
    for trial in trials:
        if trial.goodput is None:
            raise ValueError(f"{trial.placement}: has no goodput")
        run = horizon(question)
        probes += [
            Probe(trial.placement, trial.goodput.rate_per_s.best * share, i, run.warmup, run.counted, run.tail)
            for share in sorted(shares)
            for i in range(replications)
        ]
    outcomes = runner.run(probes, stage="curves")
    size = len(shares) * replications
    curves = []
    for number, trial in enumerate(trials):
        own = outcomes[number * size : (number + 1) * size]
        rates = [probe.rate_per_s / trial.num_gpus for probe in probes[number * size : (number + 1) * size]]
        points = []
        for i in range(0, size, replications):
            values = [outcome.observation.attainment for outcome in own[i : i + replications]]
            spread = mean_interval(values, confidence=question.confidence)
            points.append(Interval(max(0.0, spread.low), spread.best, min(1.0, spread.high)))
        curves.append(Curve(trial, tuple(rates[::replications]), tuple(points)))
    return tuple(curves)
