"""The race: which candidates reach the highest rates, found with as few and as short simulations as possible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dsim.pools import Placement, Pool, Role
from placement.bounds import Bound
from placement.goodput import Ask, Estimator, Goodput, Observation, Sampling, distance
from placement.probe import EarlyLook, Outcome, Probe
from placement.runner import Runner
from placement.statistics import Interval

#: Attainment that a run may miss the target by before it is stopped as clearly failed: a prefill pool alone, a whole
#: placement briefly, one of those that decide where to begin, a long run, one of several long runs.
_SLACK: Final = 0.1
_BRIEF_SLACK: Final = 0.08
_SEEDING_SLACK: Final = 0.5
_LONG_SLACK: Final = 0.04
_SHARED_SLACK: Final = 0.15
#: A run clearly fails if it is below the target by more than so many standard errors. Those of a run that weeds out are
#: at least `_DOUBT`, as short runs near saturation underestimate them; of one on the requests of the rivals, whose
#: chances are the same, half of it.
_CLEAR: Final = 2.0
_DOUBT: Final = 0.02
#: Candidates examined side by side, at first and later. Constants, so that the number of workers changes nothing.
_ABREAST: Final = (4, 12)
#: Candidates from which the first to be examined are chosen.
_SEEDS: Final = 16
#: Goodput expected of a candidate over what it can do (a colocated pipeline keeps its latency), and over its tightest
#: bound: where roots are sought first, never a reason to prune.
_EXPECTED, _EXPECTED_PIPELINED, _OF_BOUND = 0.85, 0.65, 0.9
#: How far above a rate, as a log ratio, the goodput of an entrant that passes there is guessed rather than sought.
_NEAR: Final = 0.04
#: What is left in the long run of a rate that a brief run from an empty system shows, and of one that is expected.
_OPTIMISM, _HOPE = 0.86, 0.93


@dataclass(frozen=True, slots=True)
class Horizon:
    """Requests dropped, counted, and arriving after the counted ones, in one run.

    Args:
        warmup, tail: at most; placements that hold fewer requests need fewer.
        counted: at least, and at most `most_counted`.
        settling: requests for queues to settle, beside those in service.
        stay_s: seconds that a request is in service.
        before, after: parts of the requests in service that are dropped and that arrive after the counted ones.
    """

    warmup: int
    counted: int
    tail: int = 0
    most_counted: int = 0
    settling: int = 0
    stay_s: float = math.inf
    before: float = 1.0
    after: float = 0.5

    def probe(self, placement: Placement, rate_per_s: float, replication: int, *, pace_per_s: float) -> Probe:
        """Return a run of a placement: the same requests count for all, as far as they count.

        Args:
            pace_per_s: rate for which its length is chosen.
        """
        if math.isinf(self.stay_s):
            return Probe(placement, rate_per_s, replication, self.warmup, self.counted, self.tail)
        held = pace_per_s * self.stay_s
        warmup = min(self.settling + math.ceil(self.before * held), self.warmup)
        counted = max(self.counted, min(math.ceil(2 * held), self.most_counted))
        tail = min(math.ceil(self.after * held), self.tail)
        return Probe(placement, rate_per_s, replication, warmup, counted, tail, self.warmup - warmup)


@dataclass(slots=True, eq=False)
class Entrant:
    """A candidate in the race; rates are per GPU.

    Args:
        bounds: analytic upper bounds, tightest first.
        capacity_per_s, headroom: upper guess of its rate, infinite where unknown, and of the share of it that it may
            use: where to look, never a reason to prune.
        worth: share of the cluster's GPUs that copies of it can use, for the race for the largest total.
        thrift: GPUs over cost, where the race is for goodput per dollar and GPUs differ in price.
        failed: lowest rate that it cannot sustain or fell short at, and why.
        pace_per_s: rate for which the length of its runs is chosen.
        guess: rate where its goodput may lie, of one that fell short of a rate so narrowly that it was not sought.
        estimator: seeks its goodput, once it has passed where its rivals are.
        most: goodput per GPU at most, as a long run of the one that the race found shows.
        failure: error that broke off a run.
    """

    placement: Placement
    bounds: tuple[Bound, ...]
    capacity_per_s: float = math.inf
    headroom: float = 1.0
    worth: float = 1.0
    thrift: float = 1.0
    failed: float = math.inf
    failed_by: str = ""
    guess: float = 0.0
    pace_per_s: float = 0.0
    estimator: Estimator | None = None
    outcomes: dict[Ask, Outcome] = field(default_factory=dict)
    most: float = math.inf
    failure: str | None = None

    def __post_init__(self) -> None:
        self.note_failed(self.bounds[0].rate_per_s / self.num_gpus, self.bounds[0].name)

    @property
    def num_gpus(self) -> int:
        """GPUs of the placement."""
        return self.placement.num_gpus

    @property
    def goodput(self) -> Goodput | None:
        """What its estimator found so far."""
        return None if self.estimator is None else self.estimator.result

    @property
    def per_gpu(self) -> float:
        """Goodput per GPU as far as known, else 0."""
        return 0.0 if self.goodput is None else min(self.goodput.rate_per_s.best / self.num_gpus, self.most)

    @property
    def stable_per_s(self) -> float:
        """Highest rate of the placement at which its backlog did not grow in most runs, and at least its goodput."""
        runs: dict[float, list[bool]] = {}
        for ask, outcome in self.outcomes.items():
            runs.setdefault(ask.rate_per_s, []).append(outcome.observation.stable)
        stable = [rate for rate, verdicts in runs.items() if 2 * sum(verdicts) > len(verdicts)]
        return max([self.per_gpu * self.num_gpus, *stable])

    @property
    def expected(self) -> float:
        """Goodput per GPU guessed from the capacity and the bounds."""
        if not math.isfinite(self.capacity_per_s):
            return self.headroom
        pipelined = self.placement.is_colocated and self.placement.pools[0].parallelism.pp > 1
        share = _EXPECTED_PIPELINED if pipelined else _EXPECTED
        guess_per_s = min(self.capacity_per_s * share * self.headroom, self.bounds[0].rate_per_s * _OF_BOUND)
        return guess_per_s / self.num_gpus

    @property
    def family(self) -> tuple[Pool, ...]:
        """What it shares with the entrants that differ in the numbers of instances only."""
        return tuple(replace(pool, count=1) for pool in self.placement.pools)

    def note_failed(self, rate: float, why: str) -> None:
        """Note that it cannot sustain this rate per GPU."""
        if rate < self.failed:
            self.failed, self.failed_by = rate, why


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """The best of some entrants are wanted: `top` of them.

    Args:
        by_total: by what copies of a placement serve on the whole cluster, not by what it serves per GPU used.
    """

    members: frozenset[Entrant]
    top: int
    by_total: bool = False

    def weight(self, entrant: Entrant) -> float:
        """Return what a rate per GPU is multiplied by before it is compared."""
        return entrant.worth if self.by_total else entrant.thrift

    @property
    def best(self) -> list[Entrant]:
        """The best members as far as known, at most `top`."""
        known = [e for e in self.members if e.per_gpu > 0 and e.failure is None]
        known.sort(key=lambda e: (-e.per_gpu * self.weight(e), e.num_gpus, e.placement.label))
        return known[: self.top]

    @property
    def missing(self) -> int:
        """How many are not known yet."""
        return self.top - len(self.best)

    @property
    def level(self) -> float:
        """What an entrant must reach to be among the best, 0 while too few are known."""
        best = self.best
        return best[-1].per_gpu * self.weight(best[-1]) if len(best) == self.top else 0.0


@dataclass(slots=True, eq=False)
class _PoolAlone:
    """What is known of a prefill pool simulated alone; rates are those of the pool."""

    passed: float = 0.0
    failed: float = math.inf


Examination = Generator[list[Probe], list[Outcome], None]


@dataclass(slots=True)
class Race:
    """Examines candidates, the most promising first, at the rate that their best rivals reach.

    A candidate whose bound lies below that rate is never simulated. Of another one the prefill pool runs first, alone;
    then all of it, on the very requests on which the rivals' goodput was found. It is dropped as soon as it clearly
    fails, if in a part of the warm-up that is judged as a brief run would be. Only one that passes has its own goodput
    sought, and may become a rival. What is learnt is kept.

    Args:
        brief, short: horizons of brief runs of whole placements, and of prefill pools alone. They start from an empty
            system and so err on the side of passing. None: every run has the full length.
        long: horizon of the others.
        sampling: replications on which candidates are compared.
        promise: what brief runs show of a family over what its members are expected to do: whom to look at first.
    """

    runner: Runner
    target: float
    brief: Horizon | None
    short: Horizon | None
    long: Horizon
    sampling: Sampling
    pools: dict[Pool, _PoolAlone] = field(default_factory=dict)
    promise: dict[tuple[Pool, ...], float] = field(default_factory=dict)

    def contest(self, entrants: Sequence[Entrant], goals: Sequence[Goal]) -> None:
        """Find the entrants that reach each goal, with the goodput that the race's replications show.

        An entrant is examined once, at the lowest rate at which it would matter to any goal.
        """
        queue = sorted(
            (e for e in entrants if e.goodput is None and e.failed > 0),
            key=lambda e: (-e.expected * e.thrift, -e.num_gpus, e.placement.label),
        )
        seeds: dict[Entrant, float] = {}
        for goal in goals:
            wanted = [e for e in queue if e in goal.members and e not in seeds]
            missing = goal.missing - sum(e in goal.members for e in seeds)
            seeds |= self._seeds(wanted, missing) if missing > 0 and wanted else {}
        self._run([self._examine(e, 0.0, start) for e, start in seeds.items()])
        for goal in goals:
            wanted = [e for e in queue if e in goal.members and e not in seeds]
            while (missing := goal.missing) > 0 and wanted:
                more = self._seeds(wanted, missing)
                self._run([self._examine(e, 0.0, start) for e, start in more.items()])
                seeds |= more
                wanted = [e for e in wanted if e not in seeds]
        queue = [e for e in queue if e.estimator is None and e.failure is None]
        queue.sort(key=lambda e: -e.expected * e.thrift * self.promise.get(e.family, 1.0))
        abreast = _ABREAST[0]
        while queue:
            levels = [(goal, goal.level) for goal in goals]
            batch: list[Examination] = []
            while queue and len(batch) < abreast:
                entrant = queue.pop(0)
                rate = min(
                    (level / goal.weight(entrant) for goal, level in levels if entrant in goal.members),
                    default=math.inf,
                )
                if entrant.failed > rate:
                    batch.append(self._examine(entrant, rate))
            self._run(batch)
            abreast = _ABREAST[1]

    def seek(self, starts: Mapping[Entrant, float]) -> None:
        """Find the goodput of entrants wherever it lies, from these rates per GPU."""
        unknown = {e: s for e, s in starts.items() if e.goodput is None and e.failure is None and e.failed > 0}
        self._run([self._examine(e, 0.0, start) for e, start in unknown.items()])

    def _seeds(self, queue: Sequence[Entrant], count: int) -> dict[Entrant, float]:
        """Return those that look best in a brief run at a common rate, `count` of the first in the queue.

        Before anything can be compared with the level that the best ones reach, there must be one; the better they are,
        the less the others cost. So the first of every family are looked at before others of it. With each comes the
        rate per GPU at which its goodput may lie.
        """
        families: dict[tuple[Pool, ...], int] = {}
        turns = []
        for entrant in queue:
            turns.append(families.get(entrant.family, 0))
            families[entrant.family] = turns[-1] + 1
        most = max(_SEEDS, 2 * count)
        first = [queue[i] for i in sorted(range(len(queue)), key=lambda i: (turns[i], i))[:most]]
        rate = statistics.median(entrant.expected * entrant.thrift for entrant in first)
        horizon = self.brief or self.long
        probes = [self._weed(e, rate / e.thrift * e.num_gpus, horizon, _SEEDING_SLACK) for e in first]
        outcomes = self.runner.run(probes, stage="racing")
        met = {e: outcome.observation.attainment for e, outcome in zip(first, outcomes, strict=True)}
        shown = {e: rate / e.thrift * math.exp(distance(met[e], self.target)) for e in first}
        guesses = {e: min(_OPTIMISM * shown[e], _HOPE * e.expected) for e in first}
        for entrant, guess in guesses.items():
            promise = guess / entrant.expected
            self.promise[entrant.family] = max(promise, self.promise.get(entrant.family, 0.0))
        best = sorted(first, key=lambda e: (-met[e], first.index(e)))[:count]
        return {e: guesses[e] for e in best}

    def _run(self, examinations: Sequence[Examination]) -> None:
        """Run examinations side by side until all have ended."""
        active = [(examination, next(examination, None)) for examination in examinations]
        while wanted := [(examination, probes) for examination, probes in active if probes is not None]:
            outcomes = iter(self.runner.run([p for _, probes in wanted for p in probes], stage="racing"))
            active = []
            for examination, probes in wanted:
                try:
                    active.append((examination, examination.send([next(outcomes) for _ in probes])))
                except StopIteration:
                    continue

    def _examine(self, entrant: Entrant, rate: float, start: float = 0.0) -> Examination:
        """Find out whether an entrant reaches `rate` per GPU, and if so its goodput; from `start` if rate is 0."""
        if rate > 0:
            yield from self._check_prefill(entrant, rate)
            if entrant.failed <= rate:
                return
            start = rate
        entrant.pace_per_s = start * entrant.num_gpus
        estimator = Estimator(self.target, start * entrant.num_gpus, entrant.bounds[0].rate_per_s, self.sampling)
        if rate > 0:
            asks = estimator.ask()
            slack = _LONG_SLACK if len(asks) == 1 else _SHARED_SLACK
            outcomes = yield [self._check(entrant, ask, slack) for ask in asks]
            entrant.failure = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
            if entrant.failure is not None:
                return
            if any(outcome.in_warmup for outcome in outcomes):
                seen = next(outcome.observation for outcome in outcomes if outcome.in_warmup)
                entrant.note_failed(rate, f"attainment at most {seen.attainment:.1%} in a short run")
                return
            if len(outcomes) == 1 and not self._clearly_fails(outcomes) and self._falls_short(outcomes):
                again = Ask(asks[0].rate_per_s, 1)
                outcomes += yield [self.probe(entrant, again, slack=slack)]
                asks.append(again)
                entrant.failure = outcomes[-1].failure
                if entrant.failure is not None:
                    return
            if self._clearly_fails(outcomes) or (len(outcomes) > 1 and self._falls_short(outcomes)):
                self._note_short(entrant, rate, [outcome.observation for outcome in outcomes])
                return
            for ask, outcome in zip(asks, outcomes, strict=True):
                # A run that was stopped says what attainment was at most: the estimator asks for all of it.
                if not outcome.observation.stopped_early and ask.replication < self.sampling.replications:
                    entrant.outcomes[ask] = outcome
                    estimator.tell(ask, outcome.observation)
        while asks := estimator.ask():
            if rate > 0 and (near := self._nearly(estimator)) is not None:
                estimator.result = near
                break
            outcomes = yield [self.probe(entrant, ask) for ask in asks]
            for ask, outcome in zip(asks, outcomes, strict=True):
                entrant.outcomes[ask] = outcome
                estimator.tell(ask, outcome.observation)
                entrant.failure = entrant.failure or outcome.failure
            if entrant.failure is not None:
                return
        entrant.estimator = estimator

    def _nearly(self, estimator: Estimator) -> Goodput | None:
        """Return the goodput of an entrant that passed so narrowly that its one run says where it lies."""
        runs = [(rate, list(seen.values())) for rate, seen in estimator.seen.items()]
        if self.sampling.replications > 1 or len(runs) != 1:
            return None
        ((rate, (run, *more)),) = runs
        above = distance(run.attainment, self.target)
        if more or run.stopped_early or not run.stable or not 0 <= above <= _NEAR:
            return None
        best = min(rate * math.exp(above), estimator.limit_per_s)
        interval = Interval(rate, best, best * math.exp(above))
        return Goodput(interval, (math.log(best),), (rate, math.inf), above, requests=run.requests)

    def _check_prefill(self, entrant: Entrant, rate: float) -> Examination:
        """Run the prefill pool alone, which costs a third of a joint run and settles every placement that has it."""
        if entrant.placement.is_colocated or self.short is None:
            return
        pool = entrant.placement.pool(Role.PREFILL)
        alone = self.pools.setdefault(pool, _PoolAlone())
        rate_per_s = rate * entrant.num_gpus
        if alone.passed < rate_per_s < alone.failed:
            (outcome,) = yield [self._weed(entrant, rate_per_s, self.short, _SLACK, Role.PREFILL)]
            if outcome.failure is not None:
                # What broke it off says nothing of the pool's rate; the joint runs will tell.
                return
            if self._drops(outcome):
                alone.failed = min(alone.failed, rate_per_s)
            elif outcome.observation.attainment >= self.target:
                alone.passed = max(alone.passed, rate_per_s)
        if alone.failed <= rate_per_s:
            entrant.note_failed(alone.failed / entrant.num_gpus, f"{pool} alone misses the TTFT limit")

    def _drops(self, outcome: Outcome) -> bool:
        seen = outcome.observation
        return seen.stopped_early or seen.attainment + _CLEAR * max(outcome.error, _DOUBT) < self.target

    def _clearly_fails(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether runs on the requests of the rivals fall short by more than their errors."""
        mean = sum(outcome.observation.attainment for outcome in outcomes) / len(outcomes)
        errors = [outcome.error for outcome in outcomes if not outcome.observation.stopped_early]
        if not errors:
            return True
        error = math.sqrt(sum(max(error, _DOUBT / 2) ** 2 for error in errors)) / len(errors)
        return mean + _CLEAR * error < self.target

    def _falls_short(self, outcomes: Sequence[Outcome]) -> bool:
        seen = [outcome.observation for outcome in outcomes]
        grows = 2 * sum(not observation.stable for observation in seen) > len(seen)
        return grows or sum(observation.attainment for observation in seen) / len(seen) < self.target

    def _note_short(self, entrant: Entrant, rate: float, seen: Sequence[Observation]) -> None:
        mean = sum(observation.attainment for observation in seen) / len(seen)
        at_most = "at most " if any(observation.stopped_early for observation in seen) else ""
        grows = 2 * sum(not observation.stable for observation in seen) > len(seen)
        growing = " and a growing backlog" if grows else ""
        runs = "one run" if len(seen) == 1 else f"{len(seen)} runs"
        entrant.note_failed(rate, f"attainment {at_most}{mean:.1%}{growing} in {runs} on the requests of its rivals")
        if not at_most and not grows:
            entrant.guess = rate * math.exp(distance(mean, self.target))

    def _weed(
        self, entrant: Entrant, rate_per_s: float, horizon: Horizon, slack: float, phase: Role | None = None
    ) -> Probe:
        probe = horizon.probe(entrant.placement, rate_per_s, 0, pace_per_s=rate_per_s)
        return replace(probe, slack=slack, hasty=self.brief is not None, phase=phase)

    def _check(self, entrant: Entrant, ask: Ask, slack: float) -> Probe:
        """Return the run that tells whether an entrant reaches a rate: stopped soon if a brief one would fall short."""
        probe = self.probe(entrant, ask, slack=slack)
        if self.brief is None:
            return probe
        brief = self.brief.probe(entrant.placement, ask.rate_per_s, 0, pace_per_s=entrant.pace_per_s)
        return replace(probe, look=EarlyLook(brief.warmup, brief.counted, _BRIEF_SLACK))

    def probe(self, entrant: Entrant, ask: Ask, *, slack: float | None = None, run: Horizon | None = None) -> Probe:
        """Return the run that an estimator asks for, as long as those that compare candidates unless said otherwise."""
        probe = (run or self.long).probe(
            entrant.placement, ask.rate_per_s, ask.replication, pace_per_s=entrant.pace_per_s
        )
        return replace(probe, slack=slack, hasty=slack is not None and self.brief is not None)
