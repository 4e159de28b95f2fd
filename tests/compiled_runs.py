"""Digests of what many systems do: `python -m tests.compiled_runs SYSTEMS` prints one line for each.

Compiled or not, the lines are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dsim.cli import main
from dsim.latency import AffineLatency, ValidRange
from dsim.options import Options, Routing, Window
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Preemption, Profile
from dsim.simulate import aggregate, simulate
from dsim.slo import Slo
from dsim.workload import ClosedLoop, Uniform, Workload
from dsim.workload.arrivals import Poisson
from dsim.workload.presets import preset
from tests.reference.systems import every_role, make_profile, make_trace, tokens_per_s
from tests.test_twin import Listed

#: Commands with shipped profiles; their output is theirs to the byte.
COMMANDS = (
    "simulate --model 13b --placement 2xP:tp1pp1+1xD:tp1pp1 --rate 6 --slo ttft=0.4,tpot=0.1 --requests 300",
    "simulate --model 13b --placement 1xP:tp1pp2+1xD:tp2pp2 --rate 6 --slo ttft=0.4,tpot=0.1 --requests 300 --check",
    "simulate --model qwen3-32b --gpu h200 --placement 2xC:tp2pp1 --rate 8 --slo ttft=0.4,tpot=0.05 --requests 300",
    "simulate --model 66b --placement 1xC:tp2pp2 --rate 1 --slo ttft=4,tpot=0.2 --requests 200",
    "simulate --model llama-3.1-70b --gpu h100 --placement 1xP:tp4pp1+1xD:tp4pp1 --rate 2 --requests 200",
    "search --model 13b --gpus 2 --slo ttft=0.4,tpot=0.1 --requests 200",
    "profile show opt-13b-a100-80g-distserve",
)


def _profile(rng: random.Random, scale: float) -> Profile:
    def ticks(*choices: float) -> float:
        return rng.choice(choices) * scale / 1024

    mode = rng.choice(list(HandoverMode))
    handover = Handover(
        first_token_from=rng.choice(list(FirstToken)),
        mode=mode,
        stalls_decode=mode is HandoverMode.DIRECT and rng.random() < 0.5,
        latency_s=ticks(0, 2, 9),
        bandwidth_bytes_per_s=tokens_per_s(rng.choice([2.0**8, 2.0**12, math.inf])),
        watermark=rng.choice([0.05, 0.25, 1.0]),
        hop_s=0.0 if mode is HandoverMode.LAYER_WISE else ticks(0, 0, 1, 3),
        post_s=ticks(0, 1, 7),
        step_s=ticks(0, 0.5),
    )
    limits = {
        Role.PREFILL: BatchLimits(rng.choice([16, 64, 4096]), rng.choice([1, 2, 64])),
        Role.DECODE: BatchLimits(requests=rng.choice([2, 4, 64])),
        Role.COLOCATED: BatchLimits(rng.choice([16, 64, 4096]), rng.choice([1, 4, 64])),
    }
    profile = make_profile(
        prefill=(8 * scale, 0.5, rng.choice([0.0, 1 / 64])),
        decode=(4 * scale, rng.choice([0.0, 1 / 32]), rng.choice([0.0, 0.5])),
        decode_large=(2 * scale, 1 / 32, 1.0),
        threshold_requests=3,
        limits=limits,
        kv_tokens=rng.choice([96, 128, 200, 400, 1 << 16]),
        preemption=rng.choice(list(Preemption)),
        swap_tokens_per_s=rng.choice([2.0**10, math.inf]),
        handover=handover,
        admission_watermark=rng.choice([0.0, 0.1]),
        request_s=rng.choice([0.0, 4 / 1024]),
    )
    limit = ValidRange(context_tokens=rng.choice([math.inf, math.inf, 150]))
    models = {
        tp: replace(model, valid_range=limit)
        for tp, model in profile.latency.items()
        if isinstance(model, AffineLatency)
    }
    if rng.random() < 0.25:
        return replace(profile, latency={tp: Listed(model) for tp, model in models.items()})
    return replace(profile, latency=models)


def _placement(rng: random.Random) -> Placement:
    def degree() -> Parallelism:
        return Parallelism(tp=rng.choice([1, 2]), pp=rng.choice([1, 1, 2, 4]))

    if rng.random() < 0.5:
        policy = rng.choice(list(Policy))
        budget = rng.choice([2, 16, 64]) if policy is Policy.CHUNKED else None
        return Placement.colocated(parallelism=degree(), count=rng.randint(1, 3), policy=policy, token_budget=budget)
    return Placement.disaggregated(
        prefill=degree(), num_prefill=rng.randint(1, 3), decode=degree(), num_decode=rng.randint(1, 3)
    )


def _system(number: int) -> tuple[Any, ...]:
    """Return everything that one random system left behind."""
    rng = random.Random(number)
    profile, placement = _profile(rng, rng.choice([1.0, 1.0371])), _placement(rng)
    n = rng.randint(1, 60)
    arrivals = sorted(rng.choice([rng.randint(0, 200), rng.uniform(0, 200)]) for _ in range(n))
    prompts = [rng.randint(1, 70) for _ in range(n)]
    outputs = [rng.choice([1, 2, 3, 5, 17, 33, 60]) for _ in range(n)]
    trace = make_trace(arrivals, prompts, outputs, [min(rng.randint(0, 40), prompt - 1) for prompt in prompts])
    options = Options(
        seed=rng.randint(0, 5),
        prefill_routing=rng.choice(list(Routing)),
        decode_routing=rng.choice(list(Routing)),
        prefill_token_limit=rng.choice([None, 32]),
        log_steps=rng.random() < 0.5,
        check=rng.random() < 0.2,
    )
    profiles = every_role(profile)
    if rng.random() < 0.2:
        users = rng.randint(1, 6)
        loop = ClosedLoop(users, Uniform(30, 20, low=0.05), num_requests=users + 20, stagger_s=5 / 1024)
        result = simulate(placement, loop, profiles=profiles, options=options)
    else:
        slo = Slo(ttft_s=rng.choice([0.05, math.inf]), tpot_s=rng.choice([0.01, math.inf]))
        window = (
            Window(stop_slo=slo, max_misses=rng.choice([3, math.inf]), counted=n) if rng.random() < 0.3 else Window()
        )
        result = simulate(placement, trace, profiles=profiles, options=options, window=window)
    plain = replace(options, log_steps=False, check=False)
    sums = aggregate(placement, trace, profiles=profiles, slo=Slo(ttft_s=0.1), options=plain)
    columns = {name: values.tobytes().hex() for name, values in result.columns.items()}
    gaps = [] if result.gaps is None else [values.tolist() for values in result.gaps.expanded()]
    return columns, gaps, repr(result.steps), repr(result.kv), result.summary(Slo(ttft_s=0.1)), sums.summary()


def _steady(number: int) -> tuple[Any, ...]:
    """Return what a stream of requests did that ended with its statistics."""
    rng = random.Random(number)
    profile = make_profile(kv_tokens=1 << 16)
    workload = Workload(Poisson(), preset(rng.choice(["sharegpt", "humaneval"])))
    source = workload.finite(
        rate_per_s=2.0, num_requests=6000, seed=number, context_tokens=profile.model.context_tokens
    )
    sums = aggregate(_placement(rng), source, profiles=every_role(profile), num_requests=6000)
    return (sums.summary(),)


def _command(line: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*line.split(), "--format", "json"])
    return code, said.getvalue()


def digests(systems: int) -> Iterator[str]:
    """Yield a line for each system and each command: its name and its digest."""
    for number in range(systems):
        yield f"system {number}: {_digest(_system(number))}"
    for number in range(systems // 100):
        yield f"stream {number}: {_digest(_steady(number))}"
    for line in COMMANDS:
        code, said = _command(line)
        yield f"{line}: exit code {code}, {_digest(said)}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()


if __name__ == "__main__":
    for text in digests(int(sys.argv[1])):
        sys.stdout.write(text + "\n")
