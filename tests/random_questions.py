"""Random questions, with every candidate's goodput from longer runs: `python -m tests.random_questions [N [FIRST]]`.

Models, GPUs, workloads, limits and targets are drawn; every placement is looked at, briefly, with requests that the
search has not seen, and those that may be the best in runs of 30,000, three times as long as the search's own.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import dataclass
from typing import Final

from dsim.errors import DsimError
from dsim.pools import Placement, Policy, Role
from dsim.slo import Slo
from dsim.workload import Workload
from dsim.workload.parse import parse_arrivals, parse_workload
from placement.result import Trial
from placement.search import Question, candidates, search
from placement.single import goodput_of
from placement.statistics import Interval
from profiles.choice import choose_colocated, choose_profile


@dataclass(frozen=True, slots=True)
class Served:
    """A model on a GPU, GPUs at most, and the limits that are drawn for it, seconds."""

    model: str
    gpu: str
    most: int
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]


SERVED: Final = (
    Served("13b", "a100-80g", 4, (0.15, 0.8), (0.06, 0.15)),
    Served("66b", "a100-80g", 6, (0.4, 2.5), (0.08, 0.2)),
    Served("llama-3.1-8b", "a100-80g", 4, (0.2, 1.0), (0.02, 0.08)),
    Served("llama-3.1-8b", "h100", 3, (0.1, 0.6), (0.012, 0.05)),
    Served("qwen3-8b", "h200", 3, (0.1, 0.6), (0.012, 0.05)),
    Served("qwen3-30b-a3b", "h200", 3, (0.1, 0.8), (0.012, 0.06)),
    Served("qwen3-32b", "h200", 4, (0.3, 1.5), (0.025, 0.08)),
)
WORKLOADS: Final = (
    "sharegpt", "sharegpt", "humaneval", "longbench", "uniform:512,128,0.3,2", "lognormal:prompt=600/1,output=150/1.2"
)  # fmt: skip
POLICIES: Final = (
    (Policy.CHUNKED,),
    (Policy.PREFILL_FIRST, Policy.ORCA),
    (Policy.PREFILL_FIRST, Policy.CHUNKED),
)
#: Requests counted in a run that looks at a candidate, and in one that finds the truth; seeds of both.
_LOOK: Final = (3_000, 77)
_TRUTH: Final = (30_000, 4242)
#: A candidate whose goodput may be this share of the winner's is looked at closely.
_NEAR: Final = 0.97


def random_question(number: int) -> tuple[Question, str]:
    """Return a question, the same for the same number, and how it reads."""
    drawn = random.Random(number)
    served = drawn.choice(SERVED)
    profile = choose_profile(model=served.model, gpu=served.gpu)
    lengths = drawn.choice(WORKLOADS)
    arrivals = drawn.choice(("poisson", "poisson", "gamma:cv=2"))
    ttft_s = round(drawn.uniform(*served.ttft_s) * (3 if lengths == "longbench" else 1), 2)
    tpot_s = round(drawn.uniform(*served.tpot_s), 3)
    question = Question(
        profiles={Role.PREFILL: profile, Role.DECODE: profile, Role.COLOCATED: choose_colocated(profile)},
        workload=Workload(parse_arrivals(arrivals), parse_workload(lengths)),
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
        num_gpus=drawn.randint(2, served.most),
        policies=drawn.choice(POLICIES),
        attainment=drawn.choice((0.9, 0.9, 0.95, 0.99)),
        precision=drawn.choice((0.02, 0.03, 0.05)),
        seed=number,
    )
    said = f"{served.model} on {question.num_gpus} {profile.gpu.name}, {lengths}, {arrivals}"
    return question, f"{said}, {question.attainment:.0%} within {ttft_s:g} / {tpot_s:g} s"


def goodput(question: Question, placement: Placement, how: tuple[int, int], precision: float) -> Interval:
    """Return the goodput of a placement per GPU, nothing where a run breaks off."""
    counted, seed = how
    asked = dataclasses.replace(question, seed=seed, precision=precision)
    try:
        found = goodput_of(asked, placement, counted=counted)
    except DsimError:
        return Interval(0.0, 0.0, 0.0)
    return found.goodput.rate_per_s * (1 / found.num_gpus)


def truths(question: Question, winner: Trial, shown: dict[Placement, Interval]) -> dict[Placement, Interval]:
    """Return the goodputs of the placements that are shown, and of all that may be better than the winner."""
    best = shown[winner.placement].best
    found = {}
    for placement in candidates(question):
        looked = shown.get(placement) or goodput(question, placement, _LOOK, 0.05)
        if placement in shown or looked.high >= _NEAR * best:
            found[placement] = goodput(question, placement, _TRUTH, 0.01)
    return found


def main(count: int, first: int) -> None:
    """Print a line for each question, and how many claims held: an interval holds where it meets the truth's."""
    winners = intervals = rows = held = asked = 0
    losses = []
    for number in range(first, first + count):
        question, said = random_question(number)
        result = search(question)
        winner = result.best.overall
        if winner is None:
            sys.stdout.write(f"{number}: {said}: nothing\n")
            continue
        shown = {t.placement: t.goodput_per_gpu_per_s for t in result.complete if t.goodput_per_gpu_per_s is not None}
        tied = {t.placement for t in result.complete if t.tied} | {winner.placement}
        found = truths(question, winner, shown)
        best = max(found, key=lambda placement: found[placement].best)
        fits = {p: _meet(interval, found[p]) for p, interval in shown.items()}
        losses.append(1 - found[winner.placement].best / found[best].best)
        asked, winners, intervals = asked + 1, winners + (best in tied), intervals + fits[winner.placement]
        rows, held = rows + len(fits), held + sum(fits.values())
        sys.stdout.write(
            f"{number}: {said}: {winner.placement.label} {_shown(shown[winner.placement])},"
            f" true {_shown(found[winner.placement])};"
            f" best {best.label}, {'tied' if best in tied else 'NOT TIED'}; rows {sum(fits.values())} of {len(fits)}"
            f"{'; ' + result.warnings[0] if result.warnings else ''}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(
        f"the best, or tied with it: {winners} of {asked}; lost by the choice: {max(losses):.2%} at most\n"
    )
    sys.stdout.write(
        f"the winner's interval meets the truth's in {intervals} of {asked}, any row's in {held} of {rows}\n"
    )


def _shown(interval: Interval) -> str:
    return f"{interval.best:.4g} ({interval.low:.4g} - {interval.high:.4g})"


def _meet(one: Interval, other: Interval) -> bool:
    return one.low <= other.high and other.low <= one.high


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
