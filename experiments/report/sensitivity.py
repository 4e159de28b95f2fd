"""What becomes of a recommendation when traffic, lengths or step times are not what was assumed."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

from dsim.pools import Placement
from experiments.report.scaled import ScaledLengths, scaled_profile
from placement.goodput import Ask, Estimator, Goodput, Sampling, ratio
from placement.probe import Outcome, Probe, Scenario
from placement.runner import Progress, Runner
from placement.search import Question, horizon, scenario
from placement.statistics import Interval, mean_interval

#: By how much each assumption is changed.
CHANGE: Final = 0.2
#: Replications behind every number, and requests counted in each.
_REPLICATIONS: Final = 4
_COUNTED: Final = 4_000
#: Finite runs: requests over all replications, and replications at least and at most.
_TRANSIENT_REQUESTS: Final = 4_000
_TRANSIENT_REPLICATIONS: Final = (6, 24)


class Changed(enum.Enum):
    """What is changed while everything else stays."""

    NOTHING = "as asked"
    PROMPTS = "prompt lengths"
    OUTPUTS = "output lengths"
    STEPS = "step times"


#: How the goodput moves with the factor, roughly: where the search for it begins.
_EXPONENT: Final = {Changed.NOTHING: 0.0, Changed.PROMPTS: -0.7, Changed.OUTPUTS: -0.7, Changed.STEPS: -1.0}


@dataclass(frozen=True, slots=True)
class Case:
    """A changed assumption."""

    changed: Changed
    factor: float = 1.0

    @property
    def label(self) -> str:
        r"""The change in words.

        >>> Case(Changed.PROMPTS, 0.8).label
        'prompt lengths −20\xa0%'
        """
        if self.changed is Changed.NOTHING:
            return str(self.changed.value)
        return f"{self.changed.value} {'+' if self.factor > 1 else '−'}{100 * abs(self.factor - 1):.0f}\u00a0%"


CASES: Final = (
    Case(Changed.NOTHING),
    *(Case(what, factor) for what in list(Changed)[1:] for factor in (1 - CHANGE, 1 + CHANGE)),
)
#: Rates, as shares of the recommended one.
SHARES: Final = (1 - CHANGE, 1.0, 1 + CHANGE)


@dataclass(frozen=True, slots=True)
class RatePoint:
    """How two placements meet the limits at one rate; `other` is None where there is only one.

    Args:
        share: of the recommended rate.
    """

    share: float
    rate_per_gpu_per_s: float
    recommended: Interval
    other: Interval | None


class Verdict(enum.Enum):
    """What a changed assumption does to the recommendation."""

    STAYS = "stays"
    TIED = "too close to call"
    CHANGES = "changes"
    NEITHER = "neither serves any rate"
    ALONE = "no alternative"


@dataclass(frozen=True, slots=True)
class CasePoint:
    """Goodput of two placements in one case, requests/s per GPU.

    Args:
        recommended, other: 0 where no rate is sustained; `other` is None where there is only one placement.
        advantage: recommended / other, from the same requests; None where either sustains nothing.
        reasons: why a run broke off.
        cut: share of requests that were cut to fit the model's context.
    """

    case: Case
    recommended: Interval
    other: Interval | None
    advantage: Interval | None
    reasons: tuple[str, ...] = ()
    cut: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Whether the other placement would be recommended instead."""
        if self.other is None:
            return Verdict.ALONE
        if self.advantage is None:
            if self.recommended.best == self.other.best == 0:
                return Verdict.NEITHER
            return Verdict.STAYS if self.recommended.best > self.other.best else Verdict.CHANGES
        if self.advantage.low > 1:
            return Verdict.STAYS
        return Verdict.CHANGES if self.advantage.high < 1 else Verdict.TIED


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The answer to "what if" for the recommended placement and its best alternative.

    Args:
        seed: of the runs; that of the search gives the same requests as the search had.
        counted: requests counted in one run.
    """

    recommended: Placement
    other: Placement | None
    rates: tuple[RatePoint, ...]
    cases: tuple[CasePoint, ...]
    seed: int
    replications: int
    counted: int


@dataclass(frozen=True, slots=True)
class Contender:
    """A placement and the goodput that the search found, of the whole placement."""

    placement: Placement
    rate_per_s: float

    @property
    def per_gpu(self) -> float:
        """Requests/s per GPU."""
        return self.rate_per_s / self.placement.num_gpus


def sensitivity(
    question: Question,
    recommended: Contender,
    other: Contender | None,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Return how attainment and goodput of one or two placements move with the assumptions.

    The same requests for both placements, so that their ratio is less uncertain than either.
    """
    runs = _Runs(question, executor, progress)
    both = [recommended] if other is None else [recommended, other]
    cases = tuple(runs.case(case, both) for case in CASES)
    rates = tuple(runs.rate(share, recommended.per_gpu, both) for share in SHARES)
    return Sensitivity(
        recommended=recommended.placement,
        other=None if other is None else other.placement,
        rates=rates,
        cases=cases,
        seed=question.seed,
        replications=runs.replications,
        counted=runs.counted,
    )


def changed(base: Scenario, case: Case) -> Scenario:
    """Return a scenario under a changed assumption."""
    if case.changed is Changed.STEPS:
        profiles = {role: scaled_profile(profile, case.factor) for role, profile in base.profiles.items()}
        mixes = tuple({role: scaled_profile(p, case.factor) for role, p in mix.items()} for mix in base.mixes)
        return replace(base, profiles=profiles, mixes=mixes)
    if case.changed is Changed.PROMPTS:
        return replace(base, workload=ScaledLengths(base.workload, prompt=case.factor))
    if case.changed is Changed.OUTPUTS:
        return replace(base, workload=ScaledLengths(base.workload, output=case.factor))
    return base


class _Runs:
    """Runs the simulations, as many processes as the executor has."""

    def __init__(self, question: Question, executor: Executor | None, progress: Progress | None) -> None:
        self._question = question
        self._base = scenario(question)
        self._executor, self._progress = executor, progress
        self._horizon = horizon(question)
        self._done = 0
        if question.num_requests is not None:
            least, most = _TRANSIENT_REPLICATIONS
            self.replications = min(max(math.ceil(_TRANSIENT_REQUESTS / question.num_requests), least), most)
            self.counted = question.num_requests
        else:
            self.replications = _REPLICATIONS
            self.counted = max(self._horizon.counted, _COUNTED)

    def rate(self, share: float, per_gpu: float, contenders: Sequence[Contender]) -> RatePoint:
        """Return the attainment at a share of the recommended rate per GPU."""
        probes = [
            self._probe(c, Ask(share * per_gpu * c.placement.num_gpus, i))
            for c in contenders
            for i in range(self.replications)
        ]
        outcomes = self._run(self._base, probes, stage="rates")
        spreads = []
        for number in range(len(contenders)):
            own = outcomes[number * self.replications : (number + 1) * self.replications]
            spread = mean_interval([o.observation.attainment for o in own], confidence=self._question.confidence)
            spreads.append(Interval(max(0.0, spread.low), spread.best, min(1.0, spread.high)))
        return RatePoint(share, share * per_gpu, spreads[0], spreads[1] if len(spreads) > 1 else None)

    def case(self, case: Case, contenders: Sequence[Contender]) -> CasePoint:
        """Return the goodput under a changed assumption."""
        asked = changed(self._base, case)
        confidence = self._question.confidence
        guess = case.factor ** _EXPONENT[case.changed]
        estimators = {c: Estimator(asked.target, c.rate_per_s * guess, sampling=self._sampling()) for c in contenders}
        failures = self._estimate(asked, estimators, stage=case.label)
        found = [self._goodput(estimators[c], c in failures) for c in contenders]
        per_gpu = [g.rate_per_s / c.placement.num_gpus for g, c in zip(found, contenders, strict=True)]
        advantage = None
        if len(contenders) > 1:
            paired = ratio(found[0], found[1], confidence=confidence)
            gpus = contenders[1].placement.num_gpus / contenders[0].placement.num_gpus
            advantage = None if paired is None else paired * gpus
        workload = asked.workload
        cut = 0.0
        if isinstance(workload, ScaledLengths):
            cut = workload.cut(context_tokens=asked.context_tokens, seed=asked.seed)
        return CasePoint(
            case=case,
            recommended=per_gpu[0],
            other=per_gpu[1] if len(per_gpu) > 1 else None,
            advantage=advantage,
            reasons=tuple(dict.fromkeys(failures.values())),
            cut=cut,
        )

    def _estimate(self, asked: Scenario, estimators: dict[Contender, Estimator], *, stage: str) -> dict[Contender, str]:
        """Run what the estimators ask for until all have their result; return why runs broke off."""
        failures: dict[Contender, str] = {}
        while wanted := [(c, ask) for c, e in estimators.items() if c not in failures for ask in e.ask()]:
            outcomes = self._run(asked, [self._probe(c, ask) for c, ask in wanted], stage=stage)
            for (contender, ask), outcome in zip(wanted, outcomes, strict=True):
                estimators[contender].tell(ask, outcome.observation)
                if outcome.failure is not None:
                    failures[contender] = f"{contender.placement.label}: {outcome.failure}"
        return failures

    def _goodput(self, estimator: Estimator, failed: bool) -> Goodput:
        nothing = Goodput(Interval(0.0, 0.0, 0.0), (), (0.0, 0.0))
        return nothing if failed or estimator.result is None else estimator.result

    def _sampling(self) -> Sampling:
        count = self.replications
        return Sampling(locate=count, replications=count, max_replications=count, confidence=self._question.confidence)

    def _probe(self, contender: Contender, ask: Ask) -> Probe:
        run = self._horizon
        return Probe(contender.placement, ask.rate_per_s, ask.replication, run.warmup, self.counted, run.tail)

    def _run(self, asked: Scenario, probes: Sequence[Probe], *, stage: str) -> list[Outcome]:
        runner = Runner(asked, executor=self._executor, progress=self._hear)
        outcomes = runner.run(probes, stage=stage)
        self._done += len(probes)
        return outcomes

    def _hear(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, self._done + done, self._done + total)
