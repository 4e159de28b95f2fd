"""Size: how many GPUs a rate, or a population of users, needs, in whole copies of placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final

from dsim.errors import InputError
from dsim.nodes import Nodes
from dsim.pools import Placement
from placement.cover import Limited, usage
from placement.crew import each
from placement.objective import Prices, cost_usd_per_h, plus, usd_per_million_tokens
from placement.pareto import played
from placement.probe import Probe, Scenario
from placement.result import SearchResult, State, Trial
from placement.runner import Progress, Runner, local_processes
from placement.search import Question, case, horizon, scenario, search
from placement.space import Cluster
from placement.statistics import Interval, mean_interval

#: Replications behind a mean E2E, and behind the verdict on a placement that has lost GPUs.
_REPLICATIONS: Final = 4
#: Attainment that a run may fall short of the target before it is stopped as failed.
_SLACK: Final = 0.1
#: Standard errors by which the attainment of what is left must lie above the target.
_CLEAR: Final = 2.0
#: Relative change of the rate below which the interactive response time law is taken as solved, and tries at most.
_SOLVED, _TRIES = 0.002, 24
#: Copies of the best block at most that the others may replace.
_LOOSE: Final = 64
#: Share of a demand that rounding may lose.
_ROUNDING: Final = 1e-9
#: Least rate of arrivals, requests per second, as of every workload.
_LEAST_PER_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests that arrive whether or not earlier ones have been served."""

    rate_per_s: float

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < math.inf:
            raise InputError("rate", "must be finite and > 0", value=self.rate_per_s)

    @property
    def amount(self) -> float:
        """What blocks must cover."""
        return self.rate_per_s


@dataclass(frozen=True, slots=True)
class Population:
    """Users, each of whom sends the next request some time after the answer to the last one.

    Args:
        think_time_s: mean seconds between a last token and that user's next request.
    """

    users: int
    think_time_s: float = 0.0

    def __post_init__(self) -> None:
        if self.users < 1:
            raise InputError("population", "must be >= 1", name="users", value=self.users)
        if not 0 <= self.think_time_s < math.inf:
            raise InputError("population", "must be finite and >= 0", name="think_time_s", value=self.think_time_s)
        if self.users < _LEAST_PER_S * self.think_time_s:
            rule = f"is so long that fewer than {_LEAST_PER_S:g} requests per second arrive"
            raise InputError("--think-time", rule, value=self.think_time_s, hint="give a shorter one, as in 30s")

    @property
    def amount(self) -> float:
        """What blocks must cover."""
        return float(self.users)


Demand = Rate | Population


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A placement that copies are taken of.

    Args:
        serves: of the demand, requests per second or users: safely, at the estimate, and at most.
        weight: what a copy adds to what is made small, a whole number.
    """

    trial: Trial
    serves: Interval
    weight: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Equal copies of a placement in a plan.

    Args:
        rate_per_s: that each copy gets.
        goodput_per_s: of each.
    """

    placement: Placement
    count: int
    rate_per_s: float
    goodput_per_s: Interval

    @property
    def num_gpus(self) -> int:
        """GPUs of all of them."""
        return self.count * self.placement.num_gpus

    def to_dict(self) -> dict[str, Any]:
        """Return the copies as in docs/size.md."""
        return {
            **self.placement.named_dict(),
            "copies": self.count,
            "num_gpus": self.placement.num_gpus,
            "rate_per_s": self.rate_per_s,
            "goodput_per_s": self.goodput_per_s.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What serves a demand.

    Args:
        copies: by kind; requests are split so that every copy runs at the same share of its goodput's lower limit.
        rate_per_s: that arrives, in all.
        num_nodes: nodes that hold the instances.
        gpus_at_estimate, gpus_at_most_optimistic: GPUs that would do if every goodput were its estimate, or its upper
            limit.
        confidence: that every copy sustains its share at least: each lower limit holds with (1 + level) / 2.
        e2e_s: mean at that rate, of a population; None of a rate.
        cost_usd_per_h: of the GPUs, at the typical price between the lowest and the highest; None where one is unknown.
        usd_per_million_tokens: the whole cost over the tokens of the prompts, of the outputs, of both (`total`).
        gpus_may_fail: that may fail, wherever, before the others may miss the target.
    """

    copies: tuple[Copies, ...]
    rate_per_s: float
    num_nodes: int
    gpus_at_estimate: int
    gpus_at_most_optimistic: int
    confidence: float
    e2e_s: Interval | None
    cost_usd_per_h: Interval | None
    usd_per_million_tokens: Mapping[str, Interval | None]
    gpus_may_fail: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all copies."""
        return sum(kind.num_gpus for kind in self.copies)

    @property
    def capacity_per_s(self) -> Interval:
        """Goodput of all copies together."""
        total = Interval(0.0, 0.0, 0.0)
        for kind in self.copies:
            total = plus(total, kind.goodput_per_s * kind.count)
        return total

    @property
    def load(self) -> Interval:
        """Rate / goodput: the estimate between its value at the upper and at the lower limit of the goodput."""
        capacity = self.capacity_per_s
        low = self.rate_per_s / capacity.low if capacity.low > 0 else math.inf
        return Interval(self.rate_per_s / capacity.high, self.rate_per_s / capacity.best, low)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as in docs/size.md."""
        cost = self.cost_usd_per_h
        return {
            "copies": [kind.to_dict() for kind in self.copies],
            "rate_per_s": self.rate_per_s,
            "num_gpus": self.num_gpus,
            "num_nodes": self.num_nodes,
            "gpus_at_estimate": self.gpus_at_estimate,
            "gpus_at_most_optimistic": self.gpus_at_most_optimistic,
            "confidence": self.confidence,
            "capacity_per_s": self.capacity_per_s.to_dict(),
            "load": self.load.to_dict(),
            "gpus_may_fail": self.gpus_may_fail,
            "e2e_s": None if self.e2e_s is None else self.e2e_s.to_dict(),
            "cost_usd_per_h": None if cost is None else cost.to_dict(),
            "usd_per_million_tokens": {
                name: None if value is None else value.to_dict() for name, value in self.usd_per_million_tokens.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer: a plan, or what came closest.

    Args:
        plan: None where no placement sustains any rate.
        fits: whether the plan's GPUs are there.
        most: of the demand that the GPUs there are serve safely; None without a limit.
        trials: the placements whose copies were considered, by goodput per GPU.
        searched: the search of the largest copies.
    """

    plan: Plan | None
    fits: bool
    most: float | None
    trials: tuple[Trial, ...]
    searched: SearchResult
    probes: int
    requests: int


def cover(blocks: Sequence[Block], amount: float, *, serve: str = "low") -> dict[Block, int]:
    """Return the copies of blocks that serve an amount with the least weight, of equal ones those that serve most.

    Exact where weights are GPUs: but for fewer copies than the densest block weighs, all are of that one.

    Args:
        serve: which of `serves` counts: `low`, `best` or `high`.

    Returns:
        No copies where no block serves anything.
    """
    useful = [block for block in blocks if 0 < getattr(block.serves, serve) < math.inf]
    if not useful:
        return {}
    scale = math.gcd(*(block.weight for block in useful))
    items = [(getattr(block.serves, serve), block.weight // scale, block) for block in useful]
    items.sort(key=lambda item: (-item[0] / item[1], item[1], item[2].trial.placement.label))
    densest = items[0]
    wanted = amount * (1 - _ROUNDING)
    # Of `weight` other copies some weigh a multiple of the densest block together: it serves no less in their place.
    loose = min(densest[1], _LOOSE) * max(weight for _, weight, _ in items) / densest[1] + 1
    fixed = max(0, math.floor(wanted / densest[0] - loose))
    rest = wanted - fixed * densest[0]
    # most[w]: what copies of weight w serve at most, and the last of them.
    most: list[tuple[float, int]] = [(0.0, -1)]
    while most[-1][0] < rest:
        weight = len(most)
        best = (most[-1][0], -1)
        for number, (serves, own, _) in enumerate(items):
            if own <= weight and most[weight - own][0] + serves > best[0]:
                best = (most[weight - own][0] + serves, number)
        most.append(best)
    found = {densest[2]: fixed} if fixed else {}
    weight = len(most) - 1
    while weight > 0:
        number = most[weight][1]
        if number < 0:
            weight -= 1
            continue
        _, own, block = items[number]
        found[block] = found.get(block, 0) + 1
        weight -= own
    return found


def size(
    question: Question,
    demand: Demand,
    *,
    prices: Prices,
    available_gpus: int | None = None,
    available_by_type: Mapping[str, int] | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Sizing:
    """Return the fewest GPUs that serve a demand safely: at the lower limits of the goodputs.

    Placements of at most the question's GPUs are searched, then those of fewer GPUs whose copies could save some at the
    goodput per GPU of the best: what is left after whole copies of the best placement may need only a small one. With
    `question.prices`, the cheapest GPUs.

    Args:
        prices: of the roles' GPUs.
        available_gpus: GPUs there are, in nodes of the question; None: as many as it takes.
        available_by_type: those of each type, where the question has several; None: no limit of its own.
        jobs: local worker processes.
        executor: used instead of them.

    Raises:
        InputError: the question is about finite runs, whose goodput does not last.
    """
    if question.num_requests is not None:
        raise InputError("size", "must be None: what a finite run serves does not last", name="num_requests")
    if executor is not None:
        return _Sizer(question, demand, prices, available_gpus, executor, progress, available_by_type).run()
    with local_processes(jobs) as local:
        return _Sizer(question, demand, prices, available_gpus, local, progress, available_by_type).run()


class _Sizer:
    """The state of one sizing."""

    def __init__(
        self,
        question: Question,
        demand: Demand,
        prices: Prices,
        available_gpus: int | None,
        executor: Executor | None,
        progress: Progress | None,
        available_by_type: Mapping[str, int] | None = None,
    ) -> None:
        self.question = question
        self.demand = demand
        self.prices = prices
        self.available_gpus = available_gpus
        self.available_by_type = available_by_type
        self.executor = executor
        self.progress = progress
        self.scenario = scenario(question)
        self.runner = Runner(self.scenario, executor=executor, progress=progress)
        self.blocks: dict[Placement, Block] = {}
        #: Most that a unit of weight serves safely in placements of at most so many GPUs.
        self.densest: dict[int, float] = {}
        self.e2e: dict[tuple[Placement, float], Interval] = {}
        self.probes = 0
        self.requests = 0

    def run(self) -> Sizing:
        """Return the answer."""
        largest = self.question.cluster.num_gpus
        searched = self._search(largest)
        while self.blocks and (wanted := self._promising()) is not None:
            self._search(wanted)
        blocks = list(self.blocks.values())
        chosen = cover(blocks, self.demand.amount)
        trials = tuple(sorted((block.trial for block in blocks), key=_by_goodput))
        most = None if self.available_gpus is None else self._most(blocks, self.available_gpus)
        if self.available_by_type is not None and blocks:
            limited = Limited(blocks, self.available_by_type, total=self.available_gpus)
            most = limited.most
            used = usage(chosen)
            short = any(number > self.available_by_type.get(gpu or "", 0) for gpu, number in used.items())
            if short or (self.available_gpus is not None and sum(used.values()) > self.available_gpus):
                # Where there are too few of what is best, others may do.
                chosen = limited.cover(self.demand.amount * (1 - _ROUNDING)) or chosen
        if chosen and not self._fits(chosen):
            # Copies that fill nodes may pack where those of least weight leave room that none of them can use.
            filling = cover([block for block in blocks if self._fills(block)], self.demand.amount)
            chosen = filling if filling and self._fits(filling) else chosen
        plan = self._plan(chosen) if chosen else None
        fits = plan is not None and self._fits(chosen)
        return Sizing(plan, fits, most, trials, searched, self.probes + self.runner.probes, self._requests())

    def _requests(self) -> int:
        return self.requests + self.runner.requests

    def _search(self, num_gpus: int) -> SearchResult:
        """Search placements of at most so many GPUs and take those with a goodput as blocks."""
        question = replace(self.question, num_gpus=num_gpus)
        if num_gpus < self.question.cluster.num_gpus:
            question = replace(question, top=1, always=())
        found = search(question, executor=self.executor, progress=self.progress)
        self.probes += found.probes
        self.requests += found.requests
        for trial in found.trials:
            if trial.state is State.COMPLETE and trial.goodput and trial.placement not in self.blocks:
                goodput = trial.goodput.rate_per_s
                if goodput.low > 0:
                    self.blocks[trial.placement] = Block(trial, self._serves(trial), self._weight(trial.placement))
        placements = {trial.placement for trial in found.trials}
        own = [b.serves.low / b.weight for b in self.blocks.values() if b.trial.placement in placements]
        self.densest[num_gpus] = max(own, default=0.0)
        return found

    def _weight(self, placement: Placement) -> int:
        if self.question.prices is None:
            return placement.num_gpus
        cost = cost_usd_per_h(placement, self.question.prices)
        assert cost is not None
        return max(1, round(100 * cost.best))

    def _serves(self, trial: Trial) -> Interval:
        """Return what a copy serves of the demand."""
        assert trial.goodput is not None
        goodput = trial.goodput.rate_per_s
        if isinstance(self.demand, Rate):
            return goodput
        # The interactive response time law: so many users send requests at the largest safe rate.
        e2e = self._e2e(trial.placement, goodput.low)
        return Interval(
            goodput.low * (self.demand.think_time_s + e2e.low),
            goodput.best * (self.demand.think_time_s + e2e.best),
            goodput.high * (self.demand.think_time_s + e2e.high),
        )

    def _promising(self) -> int | None:
        """Return a number of GPUs not searched yet whose placements could make the plan smaller, None if none could.

        Placements of fewer GPUs are among those of more that were searched: they serve no more per GPU than the best.
        """
        blocks = list(self.blocks.values())
        cheapest = min(self._per_gpu_weights())
        hoped: dict[Block, int] = {}
        for num_gpus in range(1, self.question.cluster.num_gpus):
            if num_gpus not in self.densest:
                weight = num_gpus * cheapest
                serves = weight * min(most for size, most in self.densest.items() if size > num_gpus)
                hoped[Block(blocks[0].trial, Interval(serves, serves, serves), weight)] = num_gpus
        best = cover([*blocks, *hoped], self.demand.amount)
        if _weight_of(best) >= _weight_of(cover(blocks, self.demand.amount)):
            return None
        return max(hoped[block] for block in best if block in hoped)

    def _per_gpu_weights(self) -> list[int]:
        if self.question.prices is None:
            return [1]
        known = [price.price_usd_per_h for price in self.question.prices.values()]
        return [max(1, round(100 * price.best)) for price in known if price is not None]

    def _plan(self, chosen: Mapping[Block, int]) -> Plan:
        copies, e2e = self._shared(chosen)
        rate = sum(kind.count * kind.rate_per_s for kind in copies)
        blocks = list(self.blocks.values())
        costs = [cost_usd_per_h(kind.placement, self.prices) for kind in copies]
        cost: Interval | None = Interval(0.0, 0.0, 0.0)
        for kind, own in zip(copies, costs, strict=True):
            cost = None if cost is None or own is None else plus(cost, own * kind.count)
        sample = case(self.question).sample
        tokens = {"input": float(sample.prompt_tokens.mean()), "output": float(sample.output_tokens.mean())}
        tokens["total"] = tokens["input"] + tokens["output"]
        # Bonferroni: each lower limit is missed with half of what the interval leaves out.
        confidence = max(0.0, 1 - len(copies) * (1 - self.question.confidence) / 2)
        return Plan(
            copies=copies,
            rate_per_s=rate,
            num_nodes=self._num_nodes(chosen),
            gpus_at_estimate=_gpus_of(cover(blocks, self.demand.amount, serve="best")),
            gpus_at_most_optimistic=_gpus_of(cover(blocks, self.demand.amount, serve="high")),
            confidence=confidence,
            e2e_s=e2e,
            cost_usd_per_h=cost,
            usd_per_million_tokens={name: usd_per_million_tokens(cost, rate, count) for name, count in tokens.items()},
            gpus_may_fail=self._may_fail(copies, rate),
        )

    def _shared(self, chosen: Mapping[Block, int]) -> tuple[tuple[Copies, ...], Interval | None]:
        """Return the copies with the rate that each gets, and the mean E2E of a population there."""
        total = sum(block.serves.low * count for block, count in chosen.items())
        share = self.demand.amount / total
        copies, weighted, rates = [], Interval(0.0, 0.0, 0.0), 0.0
        for block, count in sorted(chosen.items(), key=lambda item: -item[0].trial.num_gpus):
            assert block.trial.goodput is not None
            goodput = block.trial.goodput.rate_per_s
            rate = share * goodput.low
            if isinstance(self.demand, Population):
                users = share * block.serves.low
                rate, e2e = self._closed(block.trial.placement, users, self.demand.think_time_s, goodput.low)
                weighted = plus(weighted, e2e * (rate * count))
                rates += rate * count
            copies.append(Copies(block.trial.placement, count, rate, goodput))
        return tuple(copies), weighted / rates if rates else None

    def _closed(self, placement: Placement, users: float, think_s: float, most_per_s: float) -> tuple[float, Interval]:
        """Return the rate at which so many users send requests to one copy, and the mean E2E there."""
        return solve_law(
            lambda rate: self._e2e(placement, rate), users=users, think_time_s=think_s, start_per_s=most_per_s
        )

    def _e2e(self, placement: Placement, rate_per_s: float) -> Interval:
        """Return the mean E2E of a copy at a rate, over replications, seconds."""
        key = (placement, rate_per_s)
        if key not in self.e2e:
            run = horizon(self.question)
            probes = [Probe(placement, rate_per_s, i, run.warmup, run.counted, run.tail) for i in range(_REPLICATIONS)]
            means = each(mean_e2e_s, self.scenario, probes, self.executor)
            self.probes += len(probes)
            self.requests += len(probes) * (run.warmup + run.counted + run.tail)
            spread = mean_interval(means, confidence=self.question.confidence)
            self.e2e[key] = Interval(max(0.0, spread.low), spread.best, spread.high)
        return self.e2e[key]

    def _num_nodes(self, copies: Mapping[Block, int]) -> int:
        """Return the nodes that hold the copies, each of which lies as the one that was simulated."""
        held = self._held(copies)
        return sum(num_nodes(own, self._cluster(gpu).gpus_per_node) for gpu, own in held.items())

    def _held(self, copies: Mapping[Block, int], *, joined: bool = False) -> dict[str | None, dict[int, int]]:
        """Return by type of GPU how many parts of so many GPUs lie in one node each; None for pools that name none.

        Args:
            joined: in one rack each, where fast links join nodes.
        """
        held: dict[str | None, dict[int, int]] = {}

        def add(gpu: str | None, gpus: int, number: int) -> None:
            own = held.setdefault(gpu, {})
            own[gpus] = own.get(gpus, 0) + number

        for block, count in copies.items():
            placement, found = block.trial.placement, block.trial.placement.layout
            first = placement.pools[0].gpu
            own = self._cluster(first)
            room = own.joined_gpus if joined else own.gpus_per_node
            # KV goes where it went in the simulation: no other copy's lies between.
            is_whole = not placement.is_colocated and {pool.gpu for pool in placement.pools} == {first}
            if is_whole and found is not None and room == own.joined_gpus:
                add(first, room, count * found.nodes_used)
            elif is_whole and placement.num_gpus <= room:
                add(first, placement.num_gpus, count)
            else:
                for pool in placement.pools:
                    own = self._cluster(pool.gpu)
                    nodes = Nodes(own.num_gpus, own.joined_gpus if joined else own.gpus_per_node)
                    parts = nodes.segments(pool.parallelism.tp, pool.parallelism.pp) or pool.parallelism.inter_node_pp
                    add(pool.gpu, pool.parallelism.num_gpus // parts, count * pool.count * parts)
        return held

    def _cluster(self, gpu: str | None) -> Cluster:
        """Return the GPUs there are of a type."""
        fleet = self.question.fleet
        return self.question.cluster if gpu is None or fleet is None else fleet.types[gpu]

    def _fills(self, block: Block) -> bool:
        """Return whether copies of a placement leave no room in their nodes."""
        held = self._held({block: 1})
        return all(self._cluster(gpu).gpus_per_node % gpus == 0 for gpu, own in held.items() for gpus in own)

    def _fits(self, copies: Mapping[Block, int]) -> bool:
        """Return whether the GPUs there are hold the copies, in nodes of which the last may not be full."""
        total, by_type = self.available_gpus, self.available_by_type
        if total is not None and _gpus_of(copies) > total:
            return False
        for joined in (False, True):
            for gpu, held in self._held(copies, joined=joined).items():
                there = total if by_type is None else by_type.get(gpu or "", 0)
                own = self._cluster(gpu)
                room = own.joined_gpus if joined else own.gpus_per_node
                if there is not None and num_nodes(held, room, spare=there % room) > there // room:
                    return False
        return True

    def _most(self, blocks: Sequence[Block], num_gpus: int) -> float:
        """Return what the blocks serve safely at most on so many GPUs."""
        return most_served([(block.trial.num_gpus, block.serves.low) for block in blocks], num_gpus)

    def _may_fail(self, copies: Sequence[Copies], rate: float) -> int:
        """Return how many GPUs may fail wherever they are.

        A GPU that fails takes its instance with it. Either its whole copy is given up and the others share its
        requests, or the rest of the copy goes on with its share: as simulated, whichever instances fail.
        """
        failures = copies_to_spare(copies, rate)
        while all(self._survives(kind, failures + 1) for kind in copies):
            failures += 1
        return failures

    def _survives(self, kind: Copies, failures: int) -> bool:
        """Return whether a copy sustains its rate when so many of its instances have failed, whichever."""
        left = list(remainders(kind.placement, failures))
        if not left:
            return False
        run = horizon(self.question)
        for placement in left:
            probes = [
                Probe(placement, kind.rate_per_s, i, run.warmup, run.counted, run.tail, slack=_SLACK)
                for i in range(_REPLICATIONS)
            ]
            # The first run alone tells most of the time.
            first, *others = probes
            outcomes = self.runner.run([first], stage="failing")
            seen = outcomes[0].observation
            if outcomes[0].failure is not None or seen.stopped_early or seen.attainment < self.question.attainment:
                return False
            outcomes += self.runner.run(others, stage="failing")
            lasting = [min(o.observation.attainment, o.observation.late or 0.0) for o in outcomes]
            stable = all(o.failure is None and o.observation.stable for o in outcomes)
            error = math.sqrt(sum(o.error**2 for o in outcomes)) / len(outcomes)
            if not stable or sum(lasting) / len(lasting) - _CLEAR * error < self.question.attainment:
                return False
        return True


def most_served(kinds: Sequence[tuple[int, float]], num_gpus: int) -> float:
    """Return the most that copies serve on so many GPUs.

    Args:
        kinds: GPUs of a copy and what it serves.
    """
    if not kinds:
        return 0.0
    # As many other copies as the densest has GPUs would take a multiple of its GPUs, some of them: they serve no more.
    own, serves = max(kinds, key=lambda kind: (kind[1] / kind[0], -kind[0]))
    fixed = max(0, (num_gpus - (own - 1) * max(gpus for gpus, _ in kinds)) // own - 1)
    most = [0.0] * (num_gpus - fixed * own + 1)
    for left in range(1, len(most)):
        most[left] = max([most[left - 1], *(most[left - gpus] + each for gpus, each in kinds if gpus <= left)])
    return fixed * serves + most[-1]


def copies_to_spare(copies: Sequence[Copies], rate_per_s: float) -> int:
    """Return how many copies may be given up, those that serve most first, while the others serve a rate safely."""
    spare_per_s = sum(kind.count * kind.goodput_per_s.low for kind in copies) - rate_per_s * (1 - _ROUNDING)
    number = 0
    for kind in sorted(copies, key=lambda kind: -kind.goodput_per_s.low):
        # Copies may be millions: whole kinds at once.
        gone = min(kind.count, max(0, math.floor(spare_per_s / kind.goodput_per_s.low)))
        number += gone
        spare_per_s -= gone * kind.goodput_per_s.low
        if gone < kind.count:
            break
    return number


def mean_e2e_s(asked: Scenario, probe: Probe) -> float:
    """Return the mean E2E of the counted requests of a run, seconds."""
    return float(played(asked, probe).e2e_s.mean())


def solve_law(
    e2e: Callable[[float], Interval], *, users: float, think_time_s: float, start_per_s: float
) -> tuple[float, Interval]:
    """Return the rate X at which `users` = X · (think time + E2E at X), and the E2E there.

    E2E grows with the rate, so what the law gives falls: the solution lies between a rate and what the law makes of it.

    Args:
        e2e: mean E2E at a rate, seconds.
        start_per_s: the first rate tried.

    >>> rate, seen = solve_law(lambda rate: Interval(2.0, 2.0, 2.0), users=640, think_time_s=30, start_per_s=1)
    >>> rate, seen.best
    (20.0, 2.0)
    """
    low, high, rate = 0.0, math.inf, start_per_s
    before: tuple[float, float] | None = None
    for number in range(_TRIES):
        seen = e2e(rate)
        law = users / (think_time_s + seen.best)
        excess = law - rate
        if abs(excess) <= _SOLVED * rate:
            return rate, seen
        low, high = (rate, high) if excess > 0 else (low, rate)
        guess = law
        if before is not None and before[1] != excess:
            guess = rate - excess * (rate - before[0]) / (excess - before[1])
        before = rate, excess
        # A secant may creep along one end: every other time the bracket is halved instead.
        halve = number > 2 and number % 2 and high < math.inf
        rate = guess if low < guess < high and not halve else (low + high) / 2 if high < math.inf else 2 * low
    # The larger end of the bracket: rather too many requests than too few.
    rate = high if high < math.inf else rate
    return rate, e2e(rate)


def remainders(placement: Placement, failures: int) -> tuple[Placement, ...]:
    """Return what may be left of a placement when so many of its instances are gone; none where a pool may be empty.

    >>> [str(p) for p in remainders(Placement.parse("3xP:tp1pp1 + 5xD:tp1pp1"), 1)]
    ['2xP:tp1pp1 + 5xD:tp1pp1', '3xP:tp1pp1 + 4xD:tp1pp1']
    """
    pools = placement.pools
    if any(pool.count <= failures for pool in pools):
        return ()
    lost = [split for split in itertools.product(range(failures + 1), repeat=len(pools)) if sum(split) == failures]
    return tuple(
        placement.with_counts([pool.count - gone for pool, gone in zip(pools, split, strict=True)])
        for split in reversed(lost)
    )


def num_nodes(counts: Mapping[int, int], gpus_per_node: int, *, spare: int = 0) -> int:
    """Return the nodes that so many instances of so many GPUs fill, the largest first, each where it fits first.

    Args:
        spare: GPUs of a smaller node that is filled, too, and does not count.

    >>> num_nodes({4: 3, 1: 5}, 8)
    3
    >>> num_nodes({5: 2}, 8, spare=2), num_nodes({5: 1, 2: 1}, 8, spare=2), num_nodes({2: 5}, 8, spare=2)
    (2, 1, 1)
    """
    free: dict[int, int] = {spare: 1} if spare else {}
    nodes = 0
    for gpus, count in sorted(counts.items(), reverse=True):
        left = count
        for room in sorted(free, reverse=True):
            if room < gpus or not left:
                continue
            each = room // gpus
            used = min(free[room], -(-left // each))
            placed = min(left, used * each)
            whole, rest = divmod(placed, each)
            free[room] -= used
            for node_room, number in ((room - each * gpus, whole), (room - rest * gpus, 1 if rest else 0)):
                if number:
                    free[node_room] = free.get(node_room, 0) + number
            left -= placed
        if left:
            each = max(gpus_per_node // gpus, 1)
            whole, rest = divmod(left, each)
            nodes += whole + (1 if rest else 0)
            if whole:
                free[gpus_per_node - each * gpus] = free.get(gpus_per_node - each * gpus, 0) + whole
            if rest:
                free[gpus_per_node - rest * gpus] = free.get(gpus_per_node - rest * gpus, 0) + 1
    return nodes


def _by_goodput(trial: Trial) -> tuple[float, int, str]:
    goodput = trial.goodput_per_gpu_per_s
    assert goodput is not None
    return (-goodput.best, trial.num_gpus, trial.placement.label)


def _gpus_of(chosen: Mapping[Block, int]) -> int:
    return sum(block.trial.num_gpus * count for block, count in chosen.items())


def _weight_of(chosen: Mapping[Block, int]) -> int:
    return sum(block.weight * count for block, count in chosen.items())
