"""The search as DistServe's authors set it up, for speed comparisons only: it ranks on a transient of one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dsim.pools import Placement
from placement import bounds, feasibility
from placement.probe import Probe, run_probe
from placement.search import Question, candidates, case, scenario

#: Requests of one run, and rates probed for one candidate.
NUM_REQUESTS: Final = 300
RATE_PROBES: Final = 5


@dataclass(frozen=True, slots=True)
class QuickTrial:
    """What five short runs say of a candidate.

    Args:
        low_per_gpu_per_s: highest rate per GPU that met the target, 0 if none did.
        high_per_gpu_per_s: lowest one that did not.
        probes: runs made; one if the candidate failed at the rate of the best before it.
    """

    placement: Placement
    low_per_gpu_per_s: float
    high_per_gpu_per_s: float
    probes: int


def authors_settings(question: Question) -> tuple[QuickTrial, ...]:
    """Return every candidate that can run, best first, as 300 requests, five rates and one seed rank them.

    The rates of a candidate are bisected. The first is that of the best candidate so far: one that fails there cannot
    be the best, and its other four probes are saved. A run stops when too many requests have missed.
    """
    question = replace(question, num_requests=NUM_REQUESTS)
    known, runs = case(question), scenario(question)
    cluster, longest = question.cluster, known.sample.longest
    running = []
    for placement in candidates(question):
        if not feasibility.reasons(placement, profiles=question.used_profiles, cluster=cluster, longest=longest):
            capacity = bounds.upper_bounds(placement, known)[0].rate_per_s / placement.num_gpus
            running.append((capacity * bounds.headroom(placement, known), capacity, placement))
    running.sort(key=lambda item: (-item[0], item[2].num_gpus, item[2].label))
    best, found = 0.0, []
    for _, capacity, placement in running:
        # A finite run may outlive its capacity for a while.
        low, high, probes = 0.0, 2 * capacity, 0
        while probes < RATE_PROBES and high > 0:
            rate = best if probes == 0 and 0 < best < high else (low + high) / 2
            probes += 1
            probe = Probe(placement, rate * placement.num_gpus, 0, 0, NUM_REQUESTS, slack=0.0)
            outcome = run_probe(runs, probe)
            if outcome.failure is None and not outcome.observation.stopped_early:
                low = rate
            else:
                high = rate
                if high <= best:
                    break
        best = max(best, low)
        found.append(QuickTrial(placement, low, high, probes))
    return tuple(sorted(found, key=_rank))


def _rank(trial: QuickTrial) -> tuple[float, float, int, str]:
    return (-trial.low_per_gpu_per_s, -trial.high_per_gpu_per_s, trial.placement.num_gpus, trial.placement.label)


def best_of(trials: Sequence[QuickTrial]) -> Placement | None:
    """Return the winner, None if no candidate met the target at any rate."""
    return trials[0].placement if trials and trials[0].low_per_gpu_per_s > 0 else None
