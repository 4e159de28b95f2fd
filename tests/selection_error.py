"""How often a search's claims hold where the truth is known: `python -m tests.selection_error [SEARCHES]` prints it.

The truth of the placements that can win is found first, from many long runs whose requests no search has seen: the rate
at which their mean attainment is the target, between two rates close on either side, and its standard error.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsim.pools import Placement, Policy
from placement.probe import Probe, Scenario
from placement.result import SearchResult
from placement.runner import Runner, local_processes
from placement.search import Question, scenario, search
from placement.statistics import Interval
from tests.tiny import tiny_question

#: Seeds of the searches begin here; that of the truth.
_SEARCHES: Final = 1000
_TRUTH_SEED: Final = 7
#: Requests dropped, counted and arriving afterwards in one of the truth's runs.
_RUN: Final = (1000, 10_000, 200)


def question(**changes: object) -> Question:
    """Return a question whose two best placements are within 1 % of each other, a third within 10 %."""
    given: dict[str, object] = {"num_gpus": 4, "policies": (Policy.ORCA, Policy.PREFILL_FIRST), "precision": 0.02}
    return tiny_question(**{**given, **changes})


@dataclass(frozen=True, slots=True)
class Truth:
    """The goodput of one placement per GPU, and its standard error."""

    per_gpu_per_s: float
    error: float


def truth_of(placement: Placement, asked: Scenario, near_per_gpu_per_s: float, *, runs: int, jobs: int = 1) -> Truth:
    """Return the goodput of a placement from `runs` long runs at two rates on either side of it."""
    with local_processes(jobs) as executor:
        runner = Runner(dataclasses.replace(asked, seed=_TRUTH_SEED), executor=executor)
        rate = near_per_gpu_per_s
        for count in (4, 4, runs):
            rates = [rate * share for share in (0.985, 1.015)]
            met = [_met(runner, placement, r * placement.num_gpus, count) for r in rates]
            means = [float(values.mean()) for values in met]
            slope = (means[1] - means[0]) / math.log(rates[1] / rates[0])
            rate = rates[0] * math.exp((asked.target - means[0]) / slope)
    spread = (met[0] + met[1]) / 2
    return Truth(rate, rate * float(spread.std(ddof=1)) / math.sqrt(runs) / abs(slope))


def _met(runner: Runner, placement: Placement, rate_per_s: float, runs: int) -> np.ndarray:
    probes = [Probe(placement, rate_per_s, i, *_RUN) for i in range(runs)]
    return np.array([outcome.observation.attainment for outcome in runner.run(probes, stage="truth")])


@dataclass(slots=True)
class Tally:
    """Claims of searches that held.

    Args:
        intervals: the winner's goodput lies in its interval.
        winners: the winner is the best there is, or the search says that it is not sure which of the two kinds is.
        ratios: the goodputs of the best of both kinds are to each other as their interval says.
        losses: share of the best goodput that is lost by choosing the winner.
    """

    searches: int = 0
    intervals: int = 0
    winners: int = 0
    ratios: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)

    def add(self, result: SearchResult, truths: dict[Placement, Truth]) -> None:
        """Count one search."""
        winner = result.best.overall
        assert winner is not None
        best = max(truths, key=lambda placement: truths[placement].per_gpu_per_s)
        self.searches += 1
        self.intervals += _holds(winner.goodput_per_gpu_per_s, truths[winner.placement].per_gpu_per_s)
        sure = [t.placement for t in result.complete if t.tied]
        self.winners += winner.placement == best or best in sure
        split, whole = result.best.disaggregated, result.best.colocated
        assert split is not None
        assert whole is not None
        true = truths[split.placement].per_gpu_per_s / truths[whole.placement].per_gpu_per_s
        self.ratios += _holds(result.best.ratio, true)
        self.losses.append(1 - truths[winner.placement].per_gpu_per_s / truths[best].per_gpu_per_s)


def _holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high


def contenders(results: Sequence[SearchResult]) -> dict[Placement, float]:
    """Return the placements that any search found to be the best of their kind, and the goodput per GPU it saw."""
    found: dict[Placement, float] = {}
    for result in results:
        for trial in (result.best.disaggregated, result.best.colocated):
            assert trial is not None
            assert trial.goodput_per_gpu_per_s is not None
            found.setdefault(trial.placement, trial.goodput_per_gpu_per_s.best)
    return found


def main(searches: int, runs: int = 200) -> None:
    """Print the truth and how many claims held."""
    asked, out = question(), sys.stdout
    with local_processes(2) as executor:
        results = []
        for i in range(searches):
            results.append(search(dataclasses.replace(asked, seed=_SEARCHES + i), executor=executor))
    truths = {}
    for placement, near in contenders(results).items():
        truths[placement] = truth_of(placement, scenario(asked), near, runs=runs, jobs=2)
        found = truths[placement]
        out.write(f"{placement.label:32} {found.per_gpu_per_s:.3f} +- {found.error:.3f} requests/s per GPU\n")
    tally = Tally()
    for result in results:
        tally.add(result, truths)
    for name, held in (("intervals", tally.intervals), ("winners", tally.winners), ("ratios", tally.ratios)):
        out.write(f"{name:10} hold in {held} of {tally.searches}\n")
    out.write(f"lost by the choice: {np.mean(tally.losses):.2%} on average, {max(tally.losses):.2%} at most\n")
    requests = np.mean([result.requests for result in results])
    out.write(f"requests simulated: {requests:.0f} a search\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
