"""The race: which candidates reach the highest rates, found with as few and as short simulations as possible."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dsim.pools import Placement, Pool, Role
from placement.bounds import Bound
from placement.goodput import Ask, Estimator, Goodput, Sampling
from placement.probe import Outcome, Probe
from placement.runner import Runner

#: Attainment that a run may miss the target by before it is stopped as certainly failed.
SLACK: Final = 0.15
BRIEF_SLACK: Final = 0.25
_SEEDING_SLACK: Final = 0.5
#: A short run fails for certain if it is below the target by more than so many standard errors, each of at least
#: `_DOUBT`: the errors of a short run near saturation are themselves underestimated.
_SURE: Final = 3.0
_DOUBT: Final = 0.02
#: Attainment that a candidate may miss the target by, on the requests on which its rivals reach it, and still be tied.
_TIED: Final = 0.01
#: Candidates examined side by side. A constant, so that the number of workers changes nothing.
_ABREAST: Final = 12
#: Goodput over bound expected of a candidate: where roots are sought first, never a reason to prune.
_EXPECTED, _EXPECTED_PIPELINED = 0.85, 0.65


@dataclass(frozen=True, slots=True)
class Horizon:
    """Requests dropped, counted, and arriving after the counted ones, in one run."""

    warmup: int
    counted: int
    tail: int = 0


@dataclass(slots=True, eq=False)
class Entrant:
    """A candidate in the race; rates are per GPU.

    Args:
        bounds: analytic upper bounds, tightest first.
        capacity_per_s, headroom: upper guess of its rate, infinite where unknown, and of the share of it that it may
            use: where to look, never a reason to prune.
        worth: share of the cluster's GPUs that copies of it can use, for the race for the largest total.
        failed: lowest rate that it cannot sustain, and why.
        estimator: seeks its goodput, once it has passed where its rivals are.
        failure: error that broke off a run.
    """

    placement: Placement
    bounds: tuple[Bound, ...]
    capacity_per_s: float = math.inf
    headroom: float = 1.0
    worth: float = 1.0
    failed: float = math.inf
    failed_by: str = ""
    estimator: Estimator | None = None
    outcomes: dict[Ask, Outcome] = field(default_factory=dict)
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
        return 0.0 if self.goodput is None else self.goodput.rate_per_s.best / self.num_gpus

    @property
    def expected(self) -> float:
        """Goodput per GPU guessed from the capacity."""
        if not math.isfinite(self.capacity_per_s):
            return self.headroom
        pipelined = any(pool.parallelism.pp > 1 for pool in self.placement.pools)
        share = _EXPECTED_PIPELINED if pipelined else _EXPECTED
        return self.capacity_per_s / self.num_gpus * share * self.headroom

    def note_failed(self, rate: float, why: str) -> None:
        """Note that it cannot sustain this rate per GPU."""
        if rate < self.failed:
            self.failed, self.failed_by = rate, why


@dataclass(slots=True, eq=False)
class _PoolAlone:
    """What is known of a prefill pool simulated alone; rates are those of the pool."""

    passed: float = 0.0
    failed: float = math.inf


Examination = Generator[list[Probe], list[Outcome], None]


@dataclass(slots=True)
class Race:
    """Examines candidates, the most promising first, at the rate that their best rivals reach.

    A candidate whose bound lies below that rate is never simulated. Another one first runs briefly, its prefill pool
    alone and then all of it, and is dropped when it certainly fails; then on the very requests on which the rivals'
    goodput was found; only one that passes there has its own goodput sought, and may become a rival. What is learnt is
    kept for later contests.

    Args:
        weeding: horizon and slack of the brief runs, shortest first. They start from an empty system and so err on the
            side of passing.
        long: horizon of the others.
        sampling: replications on which candidates are compared.
    """

    runner: Runner
    target: float
    weeding: Sequence[tuple[Horizon, float]]
    long: Horizon
    sampling: Sampling
    pools: dict[Pool, _PoolAlone] = field(default_factory=dict)

    def contest(self, entrants: Sequence[Entrant], *, top: int, by_total: bool = False) -> list[Entrant]:
        """Return the best entrants with the goodput that one replication shows, `top` of them or all that sustain any.

        Args:
            by_total: compare what copies of a placement serve on the whole cluster, not what it serves per GPU used.
        """

        def weight(entrant: Entrant) -> float:
            return entrant.worth if by_total else 1.0

        def value(entrant: Entrant) -> float:
            return entrant.per_gpu * weight(entrant)

        def level() -> float:
            known = heapq.nlargest(top, (value(e) for e in entrants))
            return known[-1] if len(known) == top else 0.0

        queue = sorted(
            (e for e in entrants if e.goodput is None and e.failed > level() / weight(e)),
            key=lambda e: (-e.expected * weight(e), -e.num_gpus, e.placement.label),
        )
        missing = top - sum(e.per_gpu > 0 for e in entrants)
        while missing > 0 and queue:
            seeds = self._seeds(queue, missing)
            self.seek(seeds)
            queue = [e for e in queue if e not in seeds]
            missing = top - sum(e.per_gpu > 0 for e in entrants)
        while queue:
            rate = level()
            batch = [e for e in queue if e.failed > rate / weight(e) and e.failure is None][:_ABREAST]
            queue = queue[queue.index(batch[-1]) + 1 :] if batch else []
            self._run([self._examine(e, rate / weight(e)) for e in batch])
        ranked = sorted((e for e in entrants if value(e) > 0), key=lambda e: (-value(e), e.num_gpus, e.placement.label))
        return ranked[:top]

    def seek(self, entrants: Sequence[Entrant]) -> None:
        """Find the goodput of entrants wherever it lies."""
        unknown = [e for e in entrants if e.goodput is None and e.failure is None]
        self._run([self._examine(e, 0.0) for e in unknown])

    def _seeds(self, queue: Sequence[Entrant], count: int) -> list[Entrant]:
        """Return those of the first in the queue that look best in a brief run at a common rate, `count` of them.

        Before anything can be compared with the level that the best ones reach, there must be one; the better they are,
        the less the others cost.
        """
        first = queue[: max(_ABREAST, 2 * count)]
        rate = statistics.median(entrant.expected for entrant in first)
        horizon = self.weeding[-1][0] if self.weeding else self.long
        probes = [self._weed(e, rate * e.num_gpus, horizon, _SEEDING_SLACK) for e in first]
        outcomes = self.runner.run(probes, stage="racing")
        met = {e: outcome.observation.sustained for e, outcome in zip(first, outcomes, strict=True)}
        return sorted(first, key=lambda e: (-met[e], first.index(e)))[:count]

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

    def _examine(self, entrant: Entrant, rate: float) -> Examination:
        """Find out whether an entrant reaches `rate` per GPU, and if so its goodput."""
        start = entrant.expected * entrant.num_gpus
        if rate > 0:
            yield from self._check_prefill(entrant, rate)
            if entrant.failed <= rate:
                return
            yield from self._check_briefly(entrant, rate)
            if entrant.failed <= rate or entrant.failure is not None:
                return
            start = rate * entrant.num_gpus
        estimator = Estimator(self.target, start, entrant.bounds[0].rate_per_s, self.sampling)
        if rate > 0:
            asks = estimator.ask()
            outcomes = yield [self.probe(entrant, ask, slack=SLACK) for ask in asks]
            entrant.failure = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
            if entrant.failure is not None:
                return
            seen = [outcome.observation for outcome in outcomes]
            mean = sum(observation.sustained for observation in seen) / len(seen)
            if mean < self.target - _TIED:
                at_most = "at most " if any(observation.stopped_early for observation in seen) else ""
                entrant.note_failed(rate, f"attainment {at_most}{mean:.1%} on the requests of its rivals")
                return
            for ask, outcome in zip(asks, outcomes, strict=True):
                entrant.outcomes[ask] = outcome
                estimator.tell(ask, outcome.observation)
        while asks := estimator.ask():
            outcomes = yield [self.probe(entrant, ask) for ask in asks]
            for ask, outcome in zip(asks, outcomes, strict=True):
                entrant.outcomes[ask] = outcome
                estimator.tell(ask, outcome.observation)
                entrant.failure = entrant.failure or outcome.failure
            if entrant.failure is not None:
                return
        entrant.estimator = estimator

    def _check_prefill(self, entrant: Entrant, rate: float) -> Examination:
        """Run the prefill pool alone, which costs a third of a joint run and settles every placement that has it."""
        if entrant.placement.is_colocated or not self.weeding:
            return
        horizon, slack = self.weeding[-1]
        pool = entrant.placement.pool(Role.PREFILL)
        alone = self.pools.setdefault(pool, _PoolAlone())
        rate_per_s = rate * entrant.num_gpus
        if alone.passed < rate_per_s < alone.failed:
            (outcome,) = yield [self._weed(entrant, rate_per_s, horizon, slack, Role.PREFILL)]
            if self._certainly_fails(outcome, slack):
                alone.failed = min(alone.failed, rate_per_s)
            elif outcome.observation.attainment >= self.target:
                alone.passed = max(alone.passed, rate_per_s)
        if alone.failed <= rate_per_s:
            entrant.note_failed(alone.failed / entrant.num_gpus, f"{pool} alone misses the TTFT limit")

    def _check_briefly(self, entrant: Entrant, rate: float) -> Examination:
        for horizon, slack in self.weeding:
            (outcome,) = yield [self._weed(entrant, rate * entrant.num_gpus, horizon, slack)]
            entrant.failure = outcome.failure
            if outcome.failure is not None:
                return
            if self._certainly_fails(outcome, slack):
                seen = outcome.observation
                at_most = "at most " if seen.stopped_early else ""
                entrant.note_failed(rate, f"attainment {at_most}{seen.attainment:.1%} in a short run")
                return

    def _certainly_fails(self, outcome: Outcome, slack: float) -> bool:
        """Return whether a run was stopped early, or fell short by more than its error where the slack is small."""
        seen = outcome.observation
        doubt = max(_SURE * max(outcome.error, _DOUBT), slack if slack > SLACK else 0.0)
        return seen.stopped_early or seen.attainment + doubt < self.target

    def _weed(
        self, entrant: Entrant, rate_per_s: float, horizon: Horizon, slack: float, phase: Role | None = None
    ) -> Probe:
        return Probe(
            entrant.placement,
            rate_per_s,
            0,
            horizon.warmup,
            horizon.counted,
            horizon.tail,
            slack=slack,
            phase=phase,
        )

    def probe(self, entrant: Entrant, ask: Ask, *, slack: float | None = None) -> Probe:
        """Return the long run that an estimator asks for."""
        return Probe(
            entrant.placement, ask.rate_per_s, ask.replication, self.long.warmup, self.long.counted, slack=slack
        )
