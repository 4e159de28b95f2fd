"""Random candidates simulated beyond their bounds: `python -m tests.bound_cases [CASES] [FIRST]` prints what holds out.

A bound says that a placement does not sustain a higher rate. So each case simulates one a little above it: attainment
must be below the target, or the backlog grow. What still looks good is run again for ten times as long.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsim.catalog import find_gpu, find_model
from dsim.latency import AffineLatency, HostOverhead
from dsim.options import Options, Routing
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, PointToPoint, Preemption, Profile
from dsim.slo import Slo
from dsim.workload import Workload
from dsim.workload.arrivals import Arrivals, Constant, Gamma, Poisson, Replayed
from dsim.workload.lengths import Fixed, Lengths, LogNormal
from dsim.workload.presets import preset
from placement import bounds, feasibility
from placement.probe import Probe, Scenario, run_probe
from profiles.choice import best_profile
from profiles.estimate import estimated_profile
from tests.reference.systems import KV_BYTES_PER_TOKEN, make_profile

#: Rate that is simulated, as a multiple of the bound.
ABOVE: Final = 1.04
_WARMUP, _COUNTED = 600, 2400
_LONGER: Final = 10
_SAMPLE: Final = 2**14
#: Standard errors above the target that are no chance.
_CLEAR: Final = 3.0

_SHIPPED: Final = (
    ("opt-13b", "a100-80g", "distserve"),
    ("opt-66b", "a100-80g", "distserve"),
    ("opt-13b", "a100-80g", "vllm"),
    ("qwen3-32b", "h200", "vllm"),
)
_MODELS: Final = ("llama-3.1-8b", "qwen3-4b", "llama-3.1-70b", "mixtral-8x7b", "gpt-oss-120b", "qwen3-32b")
_GPUS: Final = ("h100", "a100-80g", "h200", "l40s", "b200")


@dataclass(frozen=True, slots=True, eq=False)
class RandomCase:
    """One placement under one workload, and what the bounds know of it."""

    number: int
    kind: str
    placement: Placement
    scenario: Scenario
    case: bounds.Case

    @property
    def bound(self) -> bounds.Bound:
        """The tightest bound."""
        return bounds.upper_bounds(self.placement, self.case)[0]

    @property
    def label(self) -> str:
        """What it is, on one line."""
        profile = self.case.profiles[self.placement.pools[0].role].name
        return f"{self.number}: {self.kind} {profile} {self.placement.label} {self.case.slo} target {self.case.target}"

    def sustains(self, rate_per_s: float) -> bool:
        """Return whether long runs at this rate meet the limits and have no growing backlog."""
        for length, replication in ((1, 0), (_LONGER, 1)):
            probe = Probe(self.placement, rate_per_s, replication, _WARMUP * length, _COUNTED * length, _WARMUP)
            outcome = run_probe(self.scenario, probe)
            if outcome.failure is not None:
                raise AssertionError(f"{self.label}: {outcome.failure}")
            seen = outcome.observation
            if not seen.stable or seen.attainment < self.case.target + _CLEAR * outcome.error:
                return False
        return True


def random_case(number: int) -> RandomCase | None:
    """Return a case, the same for the same number; None where the placement cannot run."""
    rng = np.random.default_rng([7, number])
    kind, profile = _profile(rng)
    placement = _placement(rng, profile)
    options = Options(prefill_routing=Routing(rng.choice([r.value for r in Routing])))
    workload = Workload(_arrivals(rng), _lengths(rng, kind))
    context = profile.model.context_tokens
    sample = bounds.Sample.of(workload.trace(num_requests=_SAMPLE, seed=number, context_tokens=context, rate_per_s=1.0))
    by_role = {role: dataclasses.replace(profile, within_range=role is not Role.PREFILL) for role in Role}
    for pool in placement.pools:
        if feasibility.cannot_run(placement, by_role) or _too_small(pool.role, pool.parallelism, by_role, sample):
            return None
    target = float(rng.choice([0.5, 0.8, 0.9, 0.9, 0.95, 0.99]))
    case = bounds.Case(by_role, sample, Slo(), target, options)
    ttft_s, tpot_s, e2e_s = bounds.alone_s(placement, case)
    slo = Slo(
        ttft_s=float(np.quantile(ttft_s, rng.uniform(0.5, 1.0)) * rng.uniform(1.05, 6)),
        tpot_s=float(np.quantile(tpot_s, rng.uniform(0.8, 1.0)) * rng.uniform(1.02, 4)) or math.inf,
        e2e_s=float(np.quantile(e2e_s, rng.uniform(0.8, 1)) * rng.uniform(1.1, 4)) if rng.random() < 0.2 else math.inf,
    )
    case = dataclasses.replace(case, slo=slo, idle={}, known={}, waits={})
    scenario = Scenario(by_role, workload, slo, target, seed=number + 1, options=options)
    return RandomCase(number, kind, placement, scenario, case)


def _too_small(role: Role, parallelism: Parallelism, by_role: dict[Role, Profile], sample: bounds.Sample) -> bool:
    loops = parallelism.pp if role is Role.COLOCATED else 1
    longest = sample.longest
    needed = longest.prompt_tokens if role is Role.PREFILL else longest.kv_tokens
    return 2 * needed > by_role[role].kv_tokens(parallelism) / loops


def _profile(rng: np.random.Generator) -> tuple[str, Profile]:
    kind = str(rng.choice(["synthetic", "shipped", "roofline"], p=[0.6, 0.25, 0.15]))
    if kind == "shipped":
        model, gpu, engine = _SHIPPED[rng.integers(len(_SHIPPED))]
        profile = best_profile(model, gpu, engine=engine)
    elif kind == "roofline":
        model, gpu = str(rng.choice(_MODELS)), str(rng.choice(_GPUS))
        profile = estimated_profile(find_model(model), find_gpu(gpu))
    else:
        profile = _synthetic(rng)
    link = KV_BYTES_PER_TOKEN * 10 ** rng.uniform(4, 6) if kind == "synthetic" else 10 ** rng.uniform(10, 11.5)
    mode = HandoverMode(rng.choice([m.value for m in HandoverMode]))
    handover = Handover(
        first_token_from=FirstToken(rng.choice([f.value for f in FirstToken])),
        mode=mode,
        stalls_decode=mode is HandoverMode.DIRECT and bool(rng.random() < 0.5),
        latency_s=float(rng.choice([0.0, 0.001])),
        bandwidth_bytes_per_s=link,
        hop_s=0.0 if mode is HandoverMode.LAYER_WISE else float(rng.choice([0.0, 0.005])),
        post_s=float(rng.choice([0.0, 0.001])),
        step_s=float(rng.choice([0.0, 0.0005])),
    )
    return kind, dataclasses.replace(profile, handover=handover)


def _synthetic(rng: np.random.Generator) -> Profile:
    def number(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    host = {role: HostOverhead(number(1e-5, 2e-3), number(1e-6, 1e-4), number(1e-9, 1e-6)) for role in Role}
    made = make_profile(
        prefill=(number(1, 20), number(0.02, 0.3), number(1e-6, 1e-4)),
        decode=(number(2, 20), number(1e-4, 5e-3), number(0.02, 0.5)),
        decode_large=(number(2, 20), number(1e-4, 5e-3), number(0.02, 0.5)),
        threshold_requests=int(rng.integers(8, 100)),
        host=host,
        limits={
            Role.PREFILL: BatchLimits(float(rng.choice([512, 2048, math.inf])), float(rng.choice([1, 4, math.inf]))),
            Role.DECODE: BatchLimits(math.inf, float(rng.choice([8, 32, 256]))),
            Role.COLOCATED: BatchLimits(float(rng.choice([512, 2048])), float(rng.choice([8, 32, 256]))),
        },
        kv_tokens=int(rng.choice([1 << 12, 1 << 14, 1 << 17])),
        preemption=Preemption(rng.choice([p.value for p in Preemption])),
        swap_tokens_per_s=number(1e5, 1e7),
        request_s=float(rng.choice([0.0, 0.005])),
    )
    latency = {}
    for tp, model in made.latency.items():
        assert isinstance(model, AffineLatency)
        bends = tuple(
            (int(tokens), model.prefill.per_token_s * number(0.2, 2))
            for tokens in sorted(rng.choice([32, 128, 512, 1500], size=int(rng.integers(0, 4)), replace=False))
        )
        steps = tuple(
            (int(requests), model.small.per_request_s * number(0.2, 3))
            for requests in sorted(rng.choice([4, 16, 64], size=int(rng.integers(0, 3)), replace=False))
        )
        latency[tp] = dataclasses.replace(
            model,
            prefill=dataclasses.replace(model.prefill, bends=bends),
            small=dataclasses.replace(model.small, bends=steps),
        )
    return dataclasses.replace(made, latency=latency, p2p=PointToPoint(number(1e-5, 1e-3), number(1e6, 1e9)))


def _placement(rng: np.random.Generator, profile: Profile) -> Placement:
    def degrees() -> str:
        tps = [tp for tp in profile.latency if tp <= 4]
        return f"tp{rng.choice(tps)}pp{rng.choice([1, 1, 2, 4])}"

    policy = Policy(rng.choice([p.value for p in Policy]))
    budget = int(rng.choice([64, 256, 512, 2048]))
    if rng.random() < 0.4:
        return Placement.parse(f"{rng.integers(1, 4)}xC:{degrees()}", policy=policy, token_budget=budget)
    prefill = f"{rng.choice([1, 1, 2, 3])}xP:{degrees()}"
    return Placement.parse(f"{prefill} + {rng.integers(1, 4)}xD:{degrees()}")


def _arrivals(rng: np.random.Generator) -> Arrivals:
    kind = rng.integers(4)
    if kind == 0:
        return Gamma(cv=float(rng.choice([0.5, 2.0, 3.0])))
    if kind == 1:
        # Busy and quiet spells of some ten requests.
        rates = np.repeat(rng.choice([0.3, 1.0, 3.0], size=80), 25)
        return Replayed(np.cumsum(rng.standard_exponential(len(rates)) / rates))
    return Constant() if rng.random() < 0.1 else Poisson()


def _lengths(rng: np.random.Generator, kind: str) -> Lengths:
    if kind != "synthetic" and rng.random() < 0.3:
        return preset("sharegpt")
    outputs = int(rng.choice([1, 8, 30, 100]))
    if rng.random() < 0.4:
        return Fixed(int(rng.integers(10, 1000)), outputs)
    cvs = [float(rng.uniform(0.2, 1.2)) for _ in range(2)]
    return LogNormal(float(rng.integers(30, 500)), cvs[0], float(max(outputs, 2)), cvs[1])


def check(number: int) -> tuple[str, float] | None:
    """Return the name of a case's tightest bound and the rate; None if there is none or the case cannot run.

    Raises:
        AssertionError: the rate above the bound is sustained.
    """
    random = random_case(number)
    if random is None:
        return None
    bound = random.bound
    if math.isinf(bound.rate_per_s):
        return None
    rate = ABOVE * bound.rate_per_s
    if not rate:
        # Nothing is sustained: not even little.
        unlimited = dataclasses.replace(random.case, slo=Slo(), idle={}, known={}, waits={})
        rate = 0.02 * bounds.upper_bounds(random.placement, unlimited)[0].rate_per_s
    if math.isinf(rate) or not rate:
        return None
    if random.sustains(rate):
        raise AssertionError(f"{random.label}: sustains {rate:.4g}/s, above the bound {bound}")
    return bound.name.split(" on ")[0], bound.rate_per_s


def main() -> int:
    """Check cases and print how often each bound was the tightest, and each case that sustains more than its bound."""
    count, first = (int(text) for text in (*sys.argv[1:], *("1000", "0")[len(sys.argv) - 1 :]))
    names: collections.Counter[str] = collections.Counter()
    wrong = 0
    for number in range(first, first + count):
        try:
            found = check(number)
        except AssertionError as error:
            wrong += 1
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
            continue
        names[found[0] if found else "none"] += 1
        if sum(names.values()) % 100 == 0:
            sys.stderr.write(f"{number - first + 1} of {count}\n")
    sys.stdout.write(f"{count} cases, {wrong} sustain more than their bound; tightest bounds: {dict(names)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
