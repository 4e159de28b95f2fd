"""Search: which placement serves the most requests per GPU within the limits."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Model
from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile, profiles_by_role, range_remarks
from dsim.slo import Slo
from dsim.workload import replication_seed
from placement import bounds, feasibility, space
from placement.controls import Traffic
from placement.goodput import Ask, Estimator, Goodput, Sampling, more_replications, ratio
from placement.mixes import BatchChoices, Fleet, Mix, case_of, check_mixes, gpus_of, limit_reasons, mix_of, on_gpus
from placement.objective import Prices, thrift
from placement.probe import PARTS, Outcome, Scenario, Source
from placement.race import Entrant, Goal, Horizon, Race
from placement.result import Best, Operation, SearchResult, State, Trial, by_worth, rank
from placement.runner import Progress, Runner, local_processes

#: Requests from whose lengths the bounds take their means.
_SAMPLE: Final = 2**15
#: Times the requests in service at the largest rate that are simulated before any counts.
_RESIDENCES: Final = 1.0
#: Requests that the shortest runs of the race count; and that its short runs and those on which candidates are compared
#: let pass for queues to settle, and count; and that runs behind an interval count.
_BRIEF: Final = 400
_SHORT: Final = (300, 1200)
_LONG: Final = (600, 1600)
_REPORTED: Final = 10_000
#: Misses that a run behind an interval should have where the target is just met, and requests that it counts for that
#: at most: 30 are too few for 16 runs to tell how far they scatter (`python -m tests.coverage_counts`).
_ENOUGH_MISSES, _MOST_REPORTED = 50, 50_000
#: How much longer a best placement runs, as long as that is no more than the most, beyond which share of its largest
#: stable rate, where attainment falls over a cliff: it may hold out for 10,000 requests and not for more.
_LASTING, _NEARLY_SATURATED = 5, 0.95
#: Replications behind the interval of a reported candidate, at least, of a best one at least and at most; and of a
#: placement looked at by itself.
_REPORTED_REPLICATIONS, _BEST_REPLICATIONS, _MOST_REPLICATIONS = 2, 3, 16
_REPLICATIONS: Final = 4
#: A reported candidate with an interval wider than this, and than twice what is aimed for, gets so many at most.
_ROUGHLY, _MOST_REPORTED_REPLICATIONS = 0.05, 5
#: Half width aimed for that those at first are meant for; a tighter one buys more, up to the most.
_PRECISION: Final = 0.03
#: Share of its largest stable rate above which some runs of a placement may collapse where others do not.
_RISKY: Final = 0.93
#: Misses of a run that just meets the target from which on they are explained by what its requests are like.
_FEW_MISSES: Final = 300
#: Rate for which the length of a run beyond saturation is chosen, as a multiple of its own.
_FILLED: Final = 2.0
#: Where the long runs behind an interval begin, as a share of what the shorter ones of the race found: those flatter.
_BELOW: Final = 0.97
#: Attainment that the first of these may miss the target by before it is stopped as far off.
_FAR: Final = 0.2
#: Share of that run's rate where the goodput is looked for next.
_FALLEN: Final = 0.95
#: Candidates that are not among the best of the race but come so close to the best of all (a share of it) that longer
#: runs may put them first, or so far above the best of their kind, get an interval, too: so many of each kind at most.
#: Of a kind whose best has less than `_BEHIND` of the best of all, only those that look better by `_CLEARLY`.
_CLOSE, _BEHIND, _CLEARLY = 0.98, 0.9, 1.01
_CHALLENGERS: Final = 2
#: Requests behind the interval of a finite-run number, over all replications.
_TRANSIENT_REQUESTS: Final = 6_000
#: Replications on which candidates are compared there.
_CHECKS: Final = 8
#: Precision, relative, with which candidates are compared.
_COARSE: Final = 0.1


class Affinity(enum.Enum):
    """Where instances lie: each by itself (DistServe's Algorithm 1), or their stages side by side (Algorithm 2)."""

    HIGH = "high"
    LOW = "low"


class Mode(enum.Enum):
    """Which kinds of placement are searched."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    BOTH = "both"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What a search is asked.

    Args:
        profiles: latency profile by role; roles that `mode` does not need may be absent.
        attainment: share of requests (0 to 1) that must meet all limits.
        num_gpus: at most this many GPUs are used; None: one node.
        gpus_per_node: None: the GPU's own.
        top: candidates reported with an interval, the best of each kind always among them.
        always: placements of the space that are reported with an interval whether they are good or not.
        precision: half width of the best ones' intervals, relative, that is aimed for. Below the default it buys more
            replications, up to a most; the interval says what was reached.
        num_requests: goodput of runs of so many requests from an empty system, the transient that papers report; None:
            the steady state.
        prices: of the roles' GPUs, to compare placements by goodput per dollar; None: by goodput per GPU.
        mixes: profiles of prefill and decode, or of colocated, for each combination of GPUs that pools may lie on;
            empty: `profiles` alone, which are else those of the first ones.
        fleet: with mixes, the GPUs of each type.
        batches: limits of a batch that are tried.
    """

    profiles: Mapping[Role, Profile]
    workload: Source
    slo: Slo
    attainment: float = 0.9
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    affinity: Affinity = Affinity.HIGH
    mode: Mode = Mode.BOTH
    policies: tuple[Policy, ...] = tuple(Policy)
    token_budgets: tuple[int, ...] = space.TOKEN_BUDGETS
    seed: int = 0
    top: int = 3
    always: tuple[Placement, ...] = ()
    precision: float = _PRECISION
    confidence: float = 0.95
    num_requests: int | None = None
    prices: Prices | None = None
    options: Options = field(default_factory=Options)
    mixes: tuple[Mix, ...] = ()
    fleet: Fleet | None = None
    batches: BatchChoices = field(default_factory=BatchChoices)

    def __post_init__(self) -> None:
        for name, value in (("num_gpus", self.num_gpus), ("gpus_per_node", self.gpus_per_node), ("top", self.top)):
            if value is not None and value < 1:
                raise InputError("search", "must be >= 1", name=name, value=value)
        if self.num_requests is not None and self.num_requests < 10:
            raise InputError("search", "must be >= 10", name="num_requests", value=self.num_requests)
        for name, share in (("attainment", self.attainment), ("confidence", self.confidence)):
            if not 0 < share < 1:
                raise InputError("search", "must be between 0 and 1", name=name, value=share)
        if not 0 < self.precision < 1:
            raise InputError("search", "must be between 0 and 1", name="precision", value=self.precision)
        missing = [role.name.lower() for role in self.roles if role not in self.profiles]
        if missing:
            raise InputError("search", "needs a profile for the role", name=", ".join(missing))
        if bool(self.mixes) != (self.fleet is not None):
            raise InputError("search", "must be given with mixes, and only with them", name="fleet")
        check_mixes(self.mixes)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the placements searched."""
        disaggregated = () if self.mode is Mode.COLOCATED else (Role.PREFILL, Role.DECODE)
        return disaggregated + (() if self.mode is Mode.DISAGGREGATED else (Role.COLOCATED,))

    @property
    def used_profiles(self) -> dict[Role, Profile]:
        """The profiles by role, with KV caches that end with their valid ranges unless extrapolation is allowed."""
        return profiles_by_role(self.profiles, extrapolate=self.options.extrapolate)

    @property
    def used_mixes(self) -> tuple[Mix, ...]:
        """The mixes with KV caches as in `used_profiles`."""
        return tuple(profiles_by_role(mix, extrapolate=self.options.extrapolate) for mix in self.mixes)

    def profiles_of(self, placement: Placement) -> Mapping[Role, Profile]:
        """Return the profiles of the GPUs that a placement lies on, as used."""
        return mix_of(placement, self.used_mixes, self.used_profiles)

    @property
    def model(self) -> Model:
        """The model served."""
        return self.profiles[self.roles[0]].model

    @property
    def gpu(self) -> Gpu:
        """The GPU it is served on."""
        return self.profiles[self.roles[0]].gpu

    @property
    def other_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that pools name: none where all lie on those of `profiles`."""
        return tuple({p.gpu.name: p.gpu for mix in self.mixes for p in mix.values()}.values())

    @property
    def cluster(self) -> space.Cluster:
        """The GPUs there are."""
        if self.fleet is not None:
            return self.fleet.at_most(self.num_gpus).all
        per_node = self.gpus_per_node or self.gpu.gpus_per_node
        low = self.affinity is Affinity.LOW
        return space.cluster_of(self.gpu, num_gpus=self.num_gpus or per_node, gpus_per_node=per_node, side_by_side=low)

    def cluster_of(self, placement: Placement) -> space.Cluster:
        """Return the GPUs that copies of a placement may use."""
        gpus = {pool.role: pool.gpu for pool in placement.pools if pool.gpu is not None}
        if self.fleet is None or len(gpus) < len(placement.pools):
            return self.cluster
        return self.fleet.at_most(self.num_gpus).of(gpus)

    def to_dict(self) -> dict[str, Any]:
        """Return the question for provenance."""
        used = {role.name.lower(): self.profiles[role] for role in self.roles}
        return self._mixed() | {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "profiles": {role: {"name": p.name, "sha256": p.sha256} for role, p in used.items()},
            "workload": repr(self.workload) if len(repr(self.workload)) < 200 else type(self.workload).__name__,
            "slo": str(self.slo),
            "attainment": self.attainment,
            "num_gpus": self.cluster.num_gpus,
            "gpus_per_node": self.cluster.gpus_per_node,
            "affinity": self.affinity.value,
            "mode": self.mode.value,
            "policies": [policy.value for policy in self.policies],
            "seed": self.seed,
            "top": self.top,
            "always": [placement.label for placement in self.always],
            "precision": self.precision,
            "confidence": self.confidence,
            "num_requests": self.num_requests,
        }

    def _mixed(self) -> dict[str, Any]:
        """Return what questions have that are about several GPUs, or limits of a batch."""
        found: dict[str, Any] = {}
        if self.fleet is not None:
            found["mixes"] = [
                {role.name.lower(): {"gpu": p.gpu.name, "sha256": p.sha256} for role, p in mix.items()}
                for mix in self.mixes
            ]
            found["fleet"] = {name: [part.num_gpus, part.gpus_per_node] for name, part in self.fleet.types.items()}
            found["by_role"] = {role.name.lower(): number for role, number in self.fleet.by_role.items()}
        if self.batches != BatchChoices():
            found["batches"] = repr(self.batches)
        if self.token_budgets != space.TOKEN_BUDGETS:
            found["token_budgets"] = list(self.token_budgets)
        return found


def candidates(question: Question) -> tuple[Placement, ...]:
    """Return every placement of the question's space, whether it can run or not."""
    if question.fleet is None:
        shapes = _shapes(question, question.cluster)
        return tuple(p for shape in shapes for p in question.batches.variants(shape, question.profiles))
    many = len(question.fleet.types) > 1
    return tuple(
        variant
        for part, mix in _parts(question)
        for placement in _shapes(part, question.fleet.at_most(question.num_gpus).of(gpus_of(mix)))
        if question.fleet.allows(placement)
        for variant in question.batches.variants(on_gpus(placement, mix) if many else placement, mix)
    )


def _parts(question: Question) -> Iterator[tuple[Question, Mix]]:
    """Yield the question about each mix alone, and the mix."""
    assert question.fleet is not None
    for mix in question.mixes:
        names = set(gpus_of(mix).values())
        # Pairs within a node are on GPUs of one type, as nodes are.
        if not set(mix) <= set(question.roles) or (question.affinity is Affinity.LOW and len(names) > 1):
            continue
        cluster = question.fleet.at_most(question.num_gpus).of(gpus_of(mix))
        mode = Mode.COLOCATED if Role.COLOCATED in mix else Mode.DISAGGREGATED
        alone = replace(question, profiles=mix, mixes=(), fleet=None, mode=mode, prices=None, always=())
        yield replace(alone, num_gpus=cluster.num_gpus, gpus_per_node=cluster.gpus_per_node), mix


def _shapes(question: Question, cluster: space.Cluster) -> list[Placement]:
    """Return every placement on these GPUs, under the engine's limits of a batch."""
    found: list[Placement] = []
    if question.mode is not Mode.COLOCATED:
        prefill = space.parallelisms(question.profiles[Role.PREFILL].model, max_gpus=cluster.num_gpus, cluster=cluster)
        decode = space.parallelisms(question.profiles[Role.DECODE].model, max_gpus=cluster.num_gpus, cluster=cluster)
        pairs = space.disaggregated if question.affinity is Affinity.HIGH else space.paired
        found += pairs(prefill, decode, cluster=cluster)
    if question.mode is not Mode.DISAGGREGATED:
        degrees = space.parallelisms(
            question.profiles[Role.COLOCATED].model, max_gpus=cluster.num_gpus, cluster=cluster
        )
        variants = space.schedulings(question.policies, token_budgets=question.token_budgets)
        found += space.colocated(degrees, variants, cluster=cluster)
    return found


def search(
    question: Question,
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Answer a question.

    The answer depends on the question and its seed only, not on `jobs`, `executor` or timing.

    Args:
        jobs: local worker processes; 1 runs everything in this one.
        executor: used instead of local processes; a `placement.crew.Crew` has a cache and a limit of time.

    Raises:
        InputError: lengths that do not fit the model's context.
    """
    if executor is not None:
        return _Search(question, executor, progress).run()
    with local_processes(jobs) as local:
        return _Search(question, local, progress).run()


def search_among(
    question: Question,
    among: Collection[Placement],
    *,
    starts: Mapping[Placement, float] | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> tuple[SearchResult, dict[Placement, float]]:
    """Return the answer for some of a question's candidates, and the rates where their goodputs were first looked for.

    Args:
        among: the candidates; the others are left out.
        starts: such rates of all of them: the goodput of each is found from there, and none is pruned.
    """
    state = _Search(question, executor, progress, among, starts)
    return state.run(), state.starts


def scenario(question: Question) -> Scenario:
    """Return what all probes of a question share."""
    return Scenario(
        profiles=question.used_profiles,
        workload=question.workload,
        slo=question.slo,
        target=question.attainment,
        seed=question.seed,
        options=replace(question.options, track_itl=False, log_steps=False),
        transient=question.num_requests is not None,
        mixes=question.used_mixes,
    )


def horizon(question: Question) -> Horizon:
    """Return how much is simulated in one run of placements that are not searched for: at most what compares them."""
    return _horizons(question, case(question))[-1]


def replications_of(question: Question) -> tuple[int, int]:
    """Return the replications of one placement looked at by itself: at first, and at most if the precision asks."""
    if question.num_requests is not None:
        count = min(max(math.ceil(_TRANSIENT_REQUESTS / question.num_requests), _CHECKS), 40)
        return count, count
    return _REPLICATIONS, _MOST_REPLICATIONS if question.precision < _PRECISION else _REPLICATIONS


def case(question: Question) -> bounds.Case:
    """Return what the bounds of a question's candidates share."""
    context_tokens = scenario(question).context_tokens
    trace = question.workload.trace(
        num_requests=_SAMPLE, seed=question.seed, context_tokens=context_tokens, rate_per_s=1.0
    )
    sample = bounds.Sample.of(trace)
    return bounds.Case(question.used_profiles, sample, question.slo, question.attainment, question.options)


def _horizons(question: Question, known: bounds.Case) -> tuple[Horizon | None, Horizon | None, Horizon]:
    """Choose how much is simulated: in brief runs, in short ones, and in the longest that compare placements.

    The same requests count for every candidate and rate. Requests stay for some time, of which several must pass before
    the system is as full as it will be; and a limit of many seconds needs a run of many such limits.
    """
    if question.num_requests is not None:
        return None, None, Horizon(0, question.num_requests)
    slo = question.slo
    output_tokens = float(np.mean(known.sample.output_tokens))
    stay_s = min(min(slo.ttft_s, 60.0) + output_tokens * min(slo.tpot_s, 0.2), slo.e2e_s, 120.0)
    held = math.ceil(_highest_rate(question, known) * stay_s)
    settling = math.ceil(_RESIDENCES * held)
    brief = Horizon(held // 2, _BRIEF, held // 4, stay_s=stay_s, before=0.5, after=0.25)
    short = Horizon(_SHORT[0] + held, _SHORT[1], held // 2, settling=_SHORT[0], stay_s=stay_s)
    counted = max(_LONG[1], 2 * settling)
    return brief, short, Horizon(_LONG[0] + settling, counted, held, settling=_LONG[0], stay_s=stay_s)


def _highest_rate(question: Question, known: bounds.Case) -> float:
    """Return an upper bound on the rate that any placement of the question sustains, 1 where none is known."""
    if question.mixes:
        parts = [(part, replace(known, profiles=part.used_profiles, known={}, idle={})) for part, _ in _parts(question)]
        return max((_highest_rate(part, known_of_part) for part, known_of_part in parts), default=1.0)
    best: dict[Role, float] = {}
    profiles, cases = question.used_profiles, dict[object, bounds.Case]()
    one_node = candidates(replace(question, affinity=Affinity.LOW, num_gpus=question.cluster.largest_node))
    for placement in one_node or candidates(replace(question, affinity=Affinity.LOW)):
        for pool in placement.pools:
            if not feasibility.pool_reasons(pool, profiles, question.cluster, known.sample.longest):
                placed = case_of(placement, known, (), cases)
                per_gpu = bounds.pool_capacity(pool, placed).rate_per_s / pool.num_gpus
                best[pool.role] = max(best.get(pool.role, 0.0), per_gpu if math.isfinite(per_gpu) else 0.0)
    both = [best.get(role, 0.0) for role in (Role.PREFILL, Role.DECODE)]
    disaggregated = 1 / (1 / both[0] + 1 / both[1]) if min(both) > 0 else max(both)
    return question.cluster.num_gpus * max(disaggregated, best.get(Role.COLOCATED, 0.0)) or 1.0


def _warnings(asked: Scenario) -> list[str]:
    """Return what a reader of the answer must know."""
    found = []
    first, second = (
        asked.workload.trace(
            num_requests=100,
            seed=replication_seed(asked.seed, i),
            context_tokens=asked.context_tokens,
            rate_per_s=1.0,
        )
        for i in (0, 1)
    )
    columns = ("arrival_s", "prompt_tokens", "output_tokens")
    if all(np.array_equal(getattr(first, name), getattr(second, name)) for name in columns):
        found.append("every replication has the same requests: the intervals only say how closely rates are bracketed")
    return found


class _Search:
    """The state of one search."""

    def __init__(
        self,
        question: Question,
        executor: Executor | None,
        progress: Progress | None,
        among: Collection[Placement] | None = None,
        starts: Mapping[Placement, float] | None = None,
    ) -> None:
        self.question = question
        self.among = among
        self.given_starts = starts
        self.starts: dict[Placement, float] = {}
        self.scenario = scenario(question)
        self.runner = Runner(self.scenario, executor=executor, progress=progress)
        self.case = case(question)
        self.cases: dict[object, bounds.Case] = {}
        self.stable_per_s: dict[Entrant, float] = {}
        self.confirmed: dict[Entrant, Estimator] = {}
        self.first_outcomes: dict[Entrant, dict[Ask, Outcome]] = {}
        self.roughly = max(_ROUGHLY, 2 * question.precision)
        self.warnings = _warnings(self.scenario)
        self.replications = replications_of(question)
        if question.num_requests is None:
            self.replications = _REPORTED_REPLICATIONS, _MOST_REPLICATIONS
        checks = min(_CHECKS, self.replications[0]) if self.scenario.transient else 1
        horizons = _horizons(question, self.case)
        # A placement whose KV cache fills slowly looks better in short runs than it is: they only rank.
        telling = min(_ENOUGH_MISSES / (1 - question.attainment), _MOST_REPORTED)
        counted = PARTS * math.ceil(max(horizons[-1].counted, _REPORTED, telling) / PARTS)
        self.reported = replace(horizons[-1], counted=counted, tail=horizons[-1].tail // 2)
        if self.scenario.transient:
            self.reported = horizons[-1]
        self.traffic = Traffic(self.scenario, self.reported.warmup, self.reported.counted, PARTS)
        # One replication need not resolve what the others will blur.
        sampling = replace(self._sampling(checks, checks), precision=max(question.precision, _COARSE))
        brief, short, long = horizons
        if not self.scenario.transient:
            long = replace(long, counted=_LONG[1], most_counted=long.counted, tail=long.tail // 2)
        self.race = Race(self.runner, question.attainment, brief, short, long, sampling)

    def run(self) -> SearchResult:
        """Return the answer."""
        infeasible, entrants = self._enter()
        everyone = frozenset(entrants)
        goals = [
            Goal(everyone, self.question.top),
            *(Goal(frozenset(e for e in entrants if e.placement.is_colocated is kind), 1) for kind in (False, True)),
            Goal(everyone, 1, by_total=True),
        ]
        if self.given_starts is None:
            self.race.contest(entrants, goals)
        else:
            # As another search did that began at these rates: its runs are those of this one.
            self.race.seek({e: _shared(self.given_starts[e.placement], e.num_gpus) for e in entrants})
        wanted = [e for e in entrants if e.placement in self.question.always]
        self.race.seek({e: e.expected for e in wanted})
        self._confirm(entrants, goals)
        self.starts = {e.placement: e.estimator.start_per_s for e in entrants if e.estimator is not None}
        known = {e: e.per_gpu or e.guess for e in entrants}
        reported = dict.fromkeys([e for goal in goals for e in goal.best] + [e for e in wanted if e.failed > 0])
        self._estimate({e: known[e] for e in reported})
        for kind in goals[1:3]:
            self._challenge(kind, goals[0], known, reported)
        self._sharpen(reported)
        if self._collapses_later(goals[1:3], reported):
            self._lengthen(reported)
            for kind in goals[1:3]:
                self._challenge(kind, goals[0], known, reported)
            self._sharpen(reported)
        self._note_failed(entrants, reported, known)
        # Overload may cost throughput (swapping, stalls): a rate that was seen to be stable is.
        stable = {entrant: max(rate, entrant.stable_per_s) for entrant, rate in self.stable_per_s.items()}
        return self._answer(infeasible, entrants, reported, stable)

    def _enter(self) -> tuple[list[Trial], list[Entrant]]:
        """Return the trials of placements that cannot run, and the others."""
        cluster, longest = self.question.cluster, self.case.sample.longest
        infeasible, entrants = [], []
        for placement in candidates(self.question):
            if self.among is not None and placement not in self.among:
                continue
            known = case_of(placement, self.case, self.scenario.mixes, self.cases)
            within = self.question.cluster_of(placement)
            reasons = feasibility.reasons(placement, profiles=known.profiles, cluster=within, longest=longest)
            reasons += limit_reasons(placement, known.profiles, self.question.options)
            if reasons:
                infeasible.append(Trial(placement, State.INFEASIBLE, reasons=reasons))
                continue
            worth = within.copies(placement) * placement.num_gpus / cluster.num_gpus
            analytic = bounds.upper_bounds(placement, known)
            # What it can do, whether within the limits or not.
            able = [bound.rate_per_s for bound in analytic if bound.rate_per_s > 0 and not bound.by_limits]
            capacity = min(able, default=math.inf)
            if self.scenario.transient:
                # A finite run may end before its backlog hurts: only what is impossible for one request is.
                analytic = (bounds.idle_bound(placement, known),)
            headroom = bounds.headroom(placement, known)
            cheap = thrift(placement, self.question.prices)
            entrants.append(Entrant(placement, analytic, capacity, headroom, worth, cheap))
        return infeasible, entrants

    def _sampling(self, replications: int, most: int, *, close: bool = False) -> Sampling:
        return Sampling(
            locate=replications,
            replications=replications,
            max_replications=most,
            precision=self.question.precision,
            confidence=self.question.confidence,
            close=close,
        )

    def _confirm(self, entrants: Sequence[Entrant], goals: Sequence[Goal]) -> None:
        """Run the best of each goal once, long, and race again below those that fall far short of what the race found.

        Placements whose queues grow slowly look better in short runs than they are. The run is the first of those
        behind an interval, so that only those cost more that fall behind.
        """
        while not self.scenario.transient:
            best = {goal: goal.best for goal in goals}
            unsure = [e for e in dict.fromkeys(itertools.chain(*best.values())) if e not in self.confirmed]
            if not unsure:
                return
            self._run_long(unsure)
            lost = [goal for goal, found in best.items() if found and _falls_behind(found[0])]
            if lost and self.given_starts is None:
                self.race.contest(entrants, lost)

    def _run_long(self, entrants: Sequence[Entrant]) -> None:
        """Run each of the entrants once, long, a little below what the race found; note if it falls short."""
        self._prepare({e: e.per_gpu or e.guess for e in entrants})
        asked = [(e, ask) for e in entrants for ask in self.confirmed[e].ask()]
        probes = [self.race.probe(e, ask, slack=_FAR, run=self.reported) for e, ask in asked]
        for (entrant, ask), outcome in zip(asked, self.runner.run(probes, stage="estimating"), strict=True):
            seen = outcome.observation
            entrant.failure = outcome.failure
            if seen.stopped_early:
                entrant.most = ask.rate_per_s / entrant.num_gpus * _FALLEN
                # All of a run will be wanted, but at a rate that is closer.
                self._prepare({entrant: entrant.most / _BELOW}, collapsed=True)
            else:
                self.confirmed[entrant].tell(ask, seen)
                self.first_outcomes[entrant] = {ask: outcome}

    def _prepare(self, starts: Mapping[Entrant, float], *, collapsed: bool = False) -> None:
        """Make ready to find the goodput of entrants in runs long enough for an interval.

        Args:
            starts: goodput per GPU that the race found or guesses.
            collapsed: runs were seen to.
        """
        self.stable_per_s |= self._saturate({e: s for e, s in starts.items() if e not in self.stable_per_s})
        for entrant, start in starts.items():
            entrant.pace_per_s = start * entrant.num_gpus
            limit = entrant.bounds[0].rate_per_s
            begin = entrant.pace_per_s * _BELOW
            known = case_of(entrant.placement, self.case, self.scenario.mixes, self.cases)
            # A run with few misses says little of what they depend on.
            few = (1 - self.question.attainment) * self.reported.counted < _FEW_MISSES
            controls = None if few else self.traffic.controls(entrant.placement, begin, known)
            risky = collapsed or few or begin > _RISKY * self.stable_per_s.get(entrant, 0.0)
            scout = self.traffic.heaviest(_BEST_REPLICATIONS) if risky else 0
            replications = _BEST_REPLICATIONS if risky else self.replications[0]
            sampling = replace(self._sampling(replications, replications), locate=1, precision=self.roughly)
            estimator = Estimator(self.question.attainment, begin, limit, sampling, controls, risky, scout)
            self.confirmed[entrant] = estimator
            self.first_outcomes[entrant] = {}

    def _estimate(self, starts: Mapping[Entrant, float]) -> None:
        """Find the goodput of entrants in runs long enough for an interval.

        Args:
            starts: goodput per GPU that the race found or guesses.
        """
        steady = {e: s for e, s in starts.items() if not self.scenario.transient and e.failure is None and s > 0}
        self._prepare({e: s for e, s in steady.items() if e not in self.confirmed})
        for entrant in steady:
            entrant.estimator, entrant.most = self.confirmed[entrant], math.inf
            entrant.outcomes = dict(self.first_outcomes[entrant])
        self._replicate(starts, self.replications[0])

    def _challenge(
        self, kind: Goal, everyone: Goal, known: dict[Entrant, float], reported: dict[Entrant, None]
    ) -> None:
        """Report what may be the best of a kind as well, and what comes so close to the best of all that it may tie.

        Args:
            known: goodput per GPU that the race found or guesses, 0 where neither; lowered where a long run does.
        """
        for _ in range(_CHALLENGERS):
            shown = max(
                (e for e in kind.members if e in reported and e.failure is None and e.per_gpu > 0),
                key=lambda e: (e.per_gpu * e.thrift, -e.num_gpus, e.placement.label),
                default=None,
            )
            if shown is None:
                return
            best = max(e.per_gpu * e.thrift for e in everyone.members if e in reported and e.failure is None)
            reached = shown.per_gpu * shown.thrift
            if reached <= best * _BEHIND:
                least = reached * _CLEARLY
            elif reached < best:
                least = min(reached, best * _CLOSE)
            else:
                # What short runs say is compared with what they say of the best, if that is less.
                least = min(reached, known[shown] * shown.thrift) * _CLOSE
            close = [
                e for e in kind.members if e not in reported and e.failure is None and known[e] * e.thrift > least > 0
            ]
            if not close:
                return
            first = min(close, key=lambda e: (-known[e] * e.thrift, e.num_gpus, e.placement.label))
            if first not in self.confirmed and not self.scenario.transient:
                self._run_long([first])
            known[first] = min(known[first], first.most)
            if known[first] * first.thrift > least:
                reported[first] = None
                self._estimate({first: known[first]})

    def _replicate(self, entrants: Iterable[Entrant], least: int, *, close: bool = False) -> None:
        """Run replications of the entrants until each goodput has its interval."""
        running = [e for e in entrants if e.estimator is not None and e.failure is None]
        for entrant in running:
            assert entrant.estimator is not None
            if close or entrant.estimator.sampling.replications < least:
                entrant.estimator.extend(self._sampling(least, least, close=close))
        while asked := [(e, a) for e in running if e.failure is None and e.estimator for a in e.estimator.ask()]:
            probes = [self.race.probe(entrant, ask, run=self.reported) for entrant, ask in asked]
            for (entrant, ask), outcome in zip(asked, self.runner.run(probes, stage="estimating"), strict=True):
                assert entrant.estimator is not None
                entrant.outcomes[ask] = outcome
                entrant.failure = entrant.failure or outcome.failure
                entrant.estimator.tell(ask, outcome.observation)

    def _saturate(self, starts: Mapping[Entrant, float]) -> dict[Entrant, float]:
        """Return the rate that each placement serves when more arrives than it can, where that can be measured.

        Args:
            starts: goodput per GPU that the race found or guesses.
        """
        probes = []
        for entrant, start in starts.items():
            capacity, served = entrant.capacity_per_s, start * entrant.num_gpus
            rate = max(1.05 * capacity if math.isfinite(capacity) else 0.0, 1.2 * served)
            # What is overloaded must be full before its throughput says anything.
            probes.append(self.race.long.probe(entrant.placement, rate, 0, pace_per_s=_FILLED * rate))
        outcomes = self.runner.run(probes, stage="saturating")
        return {
            entrant: outcome.throughput_per_s
            for entrant, outcome in zip(starts, outcomes, strict=True)
            if outcome.failure is None
        }

    def _sharpen(self, reported: Iterable[Entrant]) -> None:
        """Add replications to the best, until it stays the best with what the precision asks for.

        Those of others whose intervals are wide are added to in between. How many is decided once for each: to look
        again would make the intervals too narrow.
        """
        sharp: set[Entrant] = set()
        while not self.scenario.transient:
            found = [e for e in reported if e.per_gpu > 0 and e.failure is None]
            best = min(found, key=lambda e: (-e.per_gpu * e.thrift, e.num_gpus, e.placement.label), default=None)
            if best is not None and best not in sharp:
                sharp.add(best)
                self._replicate([best], _BEST_REPLICATIONS, close=True)
                if best.estimator is not None and best.goodput is not None and best.failure is None:
                    wanted = more_replications(best.goodput, self.question.precision, runs=best.estimator.runs)
                    self._replicate([best], min(wanted, self.replications[1]), close=True)
                continue
            rough = [e for e in found if e not in sharp and e.goodput and self._is_rough(e.goodput)]
            if not rough:
                return
            sharp.update(rough)
            for entrant in rough:
                assert entrant.estimator is not None
                sampling = replace(entrant.estimator.sampling, max_replications=_MOST_REPORTED_REPLICATIONS)
                entrant.estimator.extend(sampling)
            self._replicate(rough, 0)

    def _collapses_later(self, kinds: Sequence[Goal], reported: Iterable[Entrant]) -> bool:
        """Return whether the best of a kind fails at the lower limit of its goodput in runs that last much longer.

        Near saturation, where attainment falls over a cliff, queues may take longer than a run to carry it away.
        """
        longer = self._longer()
        if self.scenario.transient or longer.counted == self.reported.counted:
            return False
        steep = []
        for kind in kinds:
            found = [e for e in reported if e in kind.members and e.per_gpu > 0 and e.failure is None]
            best = min(found, key=lambda e: (-e.per_gpu * e.thrift, e.num_gpus, e.placement.label), default=None)
            if best is None or best.estimator is None or best.goodput is None or not best.estimator.is_cliff:
                continue
            saturated = max(self.stable_per_s.get(best, math.inf), best.stable_per_s)
            if best.goodput.rate_per_s.best > _NEARLY_SATURATED * saturated:
                steep.append((best, best.goodput.rate_per_s.low))
        asked = [(e, Ask(low, i)) for e, low in steep for i in range(_BEST_REPLICATIONS)]
        outcomes = self.runner.run([self.race.probe(e, ask, run=longer) for e, ask in asked], stage="estimating")
        met: dict[Entrant, list[float]] = {}
        for (entrant, _), outcome in zip(asked, outcomes, strict=True):
            if outcome.failure is None:
                met.setdefault(entrant, []).append(outcome.observation.attainment)
        return any(sum(seen) / len(seen) < self.question.attainment for seen in met.values())

    def _longer(self) -> Horizon:
        """Return the runs that tell whether a placement lasts."""
        counted = max(self.reported.counted, min(_LASTING * self.reported.counted, _MOST_REPORTED))
        return replace(self.reported, counted=counted)

    def _lengthen(self, reported: Iterable[Entrant]) -> None:
        """Find the goodput of entrants once more, from runs that are much longer."""
        before, self.reported = self.reported.counted, self._longer()
        self.traffic = Traffic(self.scenario, self.reported.warmup, self.reported.counted, PARTS)
        self.warnings.append(
            f"near saturation a placement held out for {before:,} requests and not for more: "
            f"intervals rest on runs of {self.reported.counted:,}"
        )
        self.confirmed.clear()
        self._estimate({e: e.per_gpu for e in reported if e.per_gpu > 0 and e.failure is None})

    def _note_failed(
        self, entrants: Iterable[Entrant], reported: Iterable[Entrant], known: Mapping[Entrant, float]
    ) -> None:
        """Warn of the placement that broke off while it looked better than the best, as far as that can be told.

        Args:
            known: goodput per GPU that the race found or guesses, 0 where neither.
        """
        best = max((e.per_gpu * e.thrift for e in reported if e.failure is None), default=0.0)
        broken = [e for e in entrants if e.failure is not None and known[e] * e.thrift > best > 0]
        if broken:
            first = min(broken, key=lambda e: (-known[e] * e.thrift, e.num_gpus, e.placement.label))
            self.warnings.append(
                f"{first.placement.label} failed, and looked better than the best, with {known[first]:.3g} requests/s "
                "per GPU in short runs: mend what made it fail"
            )

    def _is_rough(self, goodput: Goodput) -> bool:
        return goodput.rate_per_s.half_width > self.roughly

    def _answer(
        self,
        infeasible: Sequence[Trial],
        entrants: Sequence[Entrant],
        reported: Mapping[Entrant, None],
        stable_per_s: Mapping[Entrant, float],
    ) -> SearchResult:
        trials = [*infeasible, *(self._trial(e, e in reported, stable_per_s.get(e)) for e in entrants)]
        complete = sorted((t for t in trials if t.state is State.COMPLETE and _sustains(t)), key=rank)
        tied = self._tied(complete)
        kin = set().union(*(self._tied([t for t in complete if t.placement.is_colocated is c]) for c in (False, True)))
        trials = [replace(t, tied=t.placement in tied, tied_in_kind=t.placement in kin) for t in trials]
        complete = sorted((t for t in trials if t.state is State.COMPLETE and _sustains(t)), key=rank)
        split, whole = (next((t for t in complete if t.placement.is_colocated is c), None) for c in (False, True))
        total = min(
            complete,
            key=lambda t: (-(t.total_per_s.best if t.total_per_s else 0.0), t.num_gpus * t.replicas),
            default=None,
        )
        return SearchResult(
            best=Best(split, whole, confidence=self.question.confidence),
            trials=by_worth(trials),
            most_total=total,
            transient=self.scenario.transient,
            question=self.question.to_dict(),
            probes=self.runner.probes,
            requests=self.runner.requests,
            warnings=(*self.warnings, *self._range_remarks(reported)),
        )

    def _range_remarks(self, reported: Iterable[Entrant]) -> list[str]:
        placements = [entrant.placement for entrant in reported]
        return list(dict.fromkeys(r for p in placements for r in range_remarks(self.scenario.profiles_of(p), [p])))

    def _tied(self, complete: Sequence[Trial]) -> set[Placement]:
        """Return the placements that are not significantly below the first trial, itself included."""
        confidence = self.question.confidence
        return {t.placement for t in complete if t is complete[0] or _is_tied(t, complete[0], confidence)}

    def _trial(self, entrant: Entrant, reported: bool, stable_per_s: float | None) -> Trial:
        trial = self._trial_per_gpu(entrant, reported, stable_per_s)
        return trial if entrant.thrift == 1.0 else replace(trial, thrift=entrant.thrift)

    def _trial_per_gpu(self, entrant: Entrant, reported: bool, stable_per_s: float | None) -> Trial:
        placement = entrant.placement
        replicas = self.question.cluster_of(placement).copies(placement)
        fault = self.runner.faults.get(placement)
        failure = entrant.failure if fault is None else fault.why
        if failure is not None:
            return Trial(placement, State.FAILED, replicas, (failure,))
        goodput = entrant.goodput
        if reported and goodput is not None:
            operation = operation_of(placement, goodput, entrant.outcomes, stable_per_s)
            return Trial(placement, State.COMPLETE, replicas, (), goodput, operation=operation)
        analytic = entrant.bounds[0].rate_per_s / entrant.num_gpus
        bound = analytic if math.isfinite(analytic) else None
        failed_at: float | None = entrant.failed if entrant.failed < analytic else None
        if goodput is not None:
            runs = "one replication" if len(goodput.log_rates) == 1 else f"{len(goodput.log_rates)} replications"
            why = f"goodput {entrant.per_gpu:.4g} requests/s per GPU in short runs of {runs}, below the best"
            failed_at = goodput.bracket_per_s[1] / entrant.num_gpus
            failed_at = failed_at if math.isfinite(failed_at) else None
        elif failed_at is not None:
            why = f"{entrant.failed_by}: fell short of {entrant.failed:.4g} requests/s per GPU"
        else:
            why = f"{entrant.failed_by}: below {analytic:.4g} requests/s per GPU"
        return Trial(
            placement, State.PRUNED, replicas, (why,), bound_per_gpu_per_s=bound, failed_at_per_gpu_per_s=failed_at
        )


def _shared(rate_per_s: float, num_gpus: int) -> float:
    """Return a rate per GPU that times the GPUs is the rate to the last bit, if there is one."""
    near = rate_per_s / num_gpus
    tries = (near, math.nextafter(near, math.inf), math.nextafter(near, 0.0))
    return next((rate for rate in tries if rate * num_gpus == rate_per_s), near)


def _falls_behind(entrant: Entrant) -> bool:
    """Return whether a long run took away what the race found."""
    return entrant.most < math.inf or entrant.failure is not None


def _sustains(trial: Trial) -> bool:
    return trial.goodput is not None and trial.goodput.rate_per_s.best > 0


def _is_tied(trial: Trial, first: Trial, confidence: float) -> bool:
    """Return whether a trial is not significantly below the first one by the objective, over paired replications."""
    assert trial.goodput is not None
    assert first.goodput is not None
    paired = ratio(trial.goodput, first.goodput, confidence=confidence)
    return paired is not None and paired.high * first.num_gpus / trial.num_gpus * (trial.thrift / first.thrift) >= 1


def operation_of(
    placement: Placement, goodput: Goodput, outcomes: Mapping[Ask, Outcome], stable_per_s: float | None = None
) -> Operation | None:
    """Return how a placement ran at the highest rate that it sustained; None where it sustained none.

    Args:
        outcomes: of the runs that found its goodput.
        stable_per_s: the largest rate at which its backlog does not grow, if known.
    """
    rate = goodput.bracket_per_s[0]
    runs = [outcome for ask, outcome in sorted(outcomes.items(), key=_order) if ask.rate_per_s == rate]
    if not runs:
        return None
    both, ttft, tpot = (float(np.mean([run.attainment[i] for run in runs])) for i in range(3))
    utilization = _mean_by_key([dict(run.utilization) for run in runs])
    if placement.is_colocated:
        limiting = Role.COLOCATED
    elif ttft == tpot:
        limiting = max((Role.PREFILL, Role.DECODE), key=lambda role: utilization[role])
    else:
        limiting = Role.PREFILL if ttft < tpot else Role.DECODE
    return Operation(
        rate_per_s=rate,
        attainment={"both": both, "ttft": ttft, "tpot": tpot},
        utilization=utilization,
        limiting=limiting,
        ttft_parts_s=_mean_by_key([dict(run.parts_s) for run in runs]),
        stable_rate_per_s=stable_per_s,
    )


def _order(item: tuple[Ask, Outcome]) -> tuple[float, int]:
    return item[0].rate_per_s, item[0].replication


def _mean_by_key(rows: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]} if rows else {}
