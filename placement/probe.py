"""Probes: one placement simulated at one rate with one replication's requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from dsim.errors import InfeasiblePlacementError, InputError
from dsim.metrics import Saturation
from dsim.options import Look, Options, Window
from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.result import Result
from dsim.simulate import simulate
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import replication_seed
from placement.goodput import Observation
from placement.mixes import Mix, mix_of
from placement.statistics import stretches

#: Batches of successive requests from whose means the error of one run's attainment is taken.
_BATCHES = 15
#: Stretches whose attainment is told apart, of runs that have at least so many requests for each: shorter stretches
#: would be too much like their neighbours.
PARTS: Final = 16
_STRETCH: Final = 200
#: Share of the requests after whose arrival an overloaded placement is taken to be full.
_FILLING = 0.4


class Source(Protocol):
    """Draws the requests of a replication; `dsim.workload.Workload` is one."""

    def trace(self, *, num_requests: int, seed: int, context_tokens: int, rate_per_s: float | None = None) -> Trace:
        """Return the first requests."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """What all probes of one search share.

    Args:
        seed: replications get seeds spawned from it, the same for every placement and rate.
        transient: play a finite run from an empty system to its end, as published experiments do, instead of
            looking at the steady state.
        mixes: profiles by role for each combination of GPUs that placements name.
    """

    profiles: Mapping[Role, Profile]
    workload: Source
    slo: Slo
    target: float
    seed: int = 0
    options: Options = field(default_factory=Options)
    transient: bool = False
    mixes: tuple[Mix, ...] = ()

    def profiles_of(self, placement: Placement) -> Mapping[Role, Profile]:
        """Return the profiles of the GPUs that a placement lies on."""
        return mix_of(placement, self.mixes, self.profiles)

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens at most: the smallest context of the models."""
        return min(profile.model.context_tokens for profile in self.profiles.values())


@dataclass(frozen=True, slots=True)
class EarlyLook:
    """Requests of a run's warm-up that are judged, too.

    Args:
        first, judged: number of the first, and how many.
        slack: attainment that they may fall short of the target before the run is stopped.
    """

    first: int
    judged: int
    slack: float


@dataclass(frozen=True, slots=True)
class Probe:
    """One run.

    Args:
        warmup: requests dropped at its start.
        counted: requests counted after them.
        tail: requests that still arrive after those, so that they see no empty system. They need not go on until the
            last counted one has finished: the few that stay longer would cost as much as all that count.
        skip: requests of the replication that are left out before those: runs of another warm-up count the same ones.
        slack: attainment that the run may fall short of the target before it is stopped; None: never stop it.
        hasty: stop it as soon as so many more have missed than may of those so far, not only when it is certain.
        look: judge some of the warm-up as well.
        phase: simulate one side of a disaggregated placement alone.
    """

    placement: Placement
    rate_per_s: float
    replication: int
    warmup: int
    counted: int
    tail: int = 0
    skip: int = 0
    slack: float | None = None
    hasty: bool = False
    look: EarlyLook | None = None
    phase: Role | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a probe saw.

    Args:
        error: standard error of the attainment over successive requests.
        attainment: shares that met all limits, the TTFT limit, the TPOT limit.
        utilization: by role.
        parts_s: mean seconds of the parts of TTFT.
        throughput_per_s: completed requests per second while requests arrived, the first part of the run left out.
        failure: why the run broke off, None if it did not.
        in_warmup: a run that was stopped early was stopped by what its early look saw.
    """

    observation: Observation
    error: float = 0.0
    attainment: tuple[float, float, float] = (0.0, 0.0, 0.0)
    utilization: tuple[tuple[Role, float], ...] = ()
    parts_s: tuple[tuple[str, float], ...] = ()
    throughput_per_s: float = 0.0
    failure: str | None = None
    in_warmup: bool = False


#: Requests that come at such a rate come at once.
_ANY_RATE_PER_S = 1e6


def run_probe(scenario: Scenario, probe: Probe) -> Outcome:
    """Simulate a probe; faults of the placement and the requests are part of the outcome, those of dsim are not."""
    if scenario.transient and probe.rate_per_s > _ANY_RATE_PER_S:
        failure = f"runs of {probe.counted} requests meet the limits at any rate: ask for longer ones"
        return Outcome(Observation(0.0, stable=False), failure=failure)
    try:
        return _outcome(scenario, probe, _simulate(scenario, probe))
    except (InfeasiblePlacementError, InputError) as error:
        return Outcome(Observation(0.0, stable=False), failure=str(error))


def _simulate(scenario: Scenario, probe: Probe) -> Result:
    seed = replication_seed(scenario.seed, probe.replication)
    draw = {"seed": seed, "context_tokens": scenario.context_tokens}
    workload, rate = scenario.workload, probe.rate_per_s
    requests = probe.skip + probe.warmup + probe.counted + probe.tail
    misses = math.inf
    if probe.slack is not None:
        misses = probe.counted - required_hits(scenario.target - probe.slack, probe.counted)
    growing = 1 - scenario.target if probe.hasty else 0.0
    look = None
    if (early := probe.look) is not None:
        allowed = early.judged - required_hits(scenario.target - early.slack, early.judged)
        look = Look(early.first, early.judged, allowed)
    window = Window(probe.warmup, probe.counted, scenario.slo, misses, growing, look)
    return simulate(
        probe.placement,
        workload.trace(num_requests=requests, rate_per_s=rate, **draw).after(probe.skip),
        profiles=scenario.profiles_of(probe.placement),
        options=replace(scenario.options, seed=seed, track_itl=False, log_steps=False),
        window=window,
        phase=probe.phase,
    )


def _outcome(scenario: Scenario, probe: Probe, result: Result) -> Outcome:
    requests = len(result.columns["arrival_s"])
    if result.stopped_early:
        look = probe.look if result.stopped_in_warmup else None
        slack = probe.slack if look is None else look.slack
        assert slack is not None
        seen = Observation(scenario.target - slack, stopped_early=True, requests=requests)
        return Outcome(seen, in_warmup=look is not None)
    met = result.met(scenario.slo)
    shares = result.attainment(scenario.slo)
    stable = scenario.transient or result.saturation is not Saturation.OVERLOADED
    late = None if scenario.transient else float(met[len(met) // 2 :].mean())
    apart = not scenario.transient and len(met) >= PARTS * _STRETCH
    parts = tuple(stretches(met, PARTS).tolist()) if apart else ()
    return Outcome(
        Observation(float(met.mean()), stable=stable, requests=requests, late=late, stretches=parts),
        error=_error(met),
        attainment=(shares.both, shares.ttft, shares.tpot),
        utilization=tuple(sorted(result.utilization.items(), key=lambda item: item[0].name)),
        parts_s=tuple(result.ttft_parts_s().items()) if probe.phase is None else (),
        throughput_per_s=_throughput_per_s(result),
    )


def required_hits(share: float, requests: int) -> int:
    """Return the fewest requests that are at least this share of all, whatever binary fractions make of the share.

    >>> required_hits(1 - 0.9, 300), required_hits(0.9, 301)
    (30, 271)
    """
    return max(0, math.ceil(round(share * requests, 6)))


def _throughput_per_s(result: Result) -> float:
    """Return completions per second during the arrivals; of an overloaded run, the most that the placement can do."""
    arrivals, ends = result.columns["arrival_s"], result.columns["last_token_s"]
    start_s, stop_s = float(arrivals[int(_FILLING * len(arrivals))]), float(arrivals[-1])
    if stop_s <= start_s:
        return 0.0
    return float(np.count_nonzero((ends > start_s) & (ends <= stop_s))) / (stop_s - start_s)


def _error(met: np.ndarray) -> float:
    """Return the standard error of the mean of autocorrelated values, from batch means."""
    if len(met) < 2 * _BATCHES:
        return 0.5 / math.sqrt(max(len(met), 1))
    means = [float(batch.mean()) for batch in np.array_split(met, _BATCHES)]
    return float(np.std(means, ddof=1)) / math.sqrt(_BATCHES)
