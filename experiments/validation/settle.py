"""Which inputs a replay has: as given, as the file says, by default, or with what is tried where nobody knows."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Final

from dsim.errors import InputError
from dsim.pools import Placement, Policy, Role
from dsim.profile import BatchLimits, Handover, Profile
from experiments.validation.inputs import NAMES, Input, Loop, Origin, shown
from experiments.validation.measured import Kind, Measured, Value

#: What is tried where nobody says: defaults of vLLM's versions, and what benchmarks commonly set.
BUDGETS: Final = (2048, 8192)
MAX_SEQS: Final = (1024, 256, 128)
KV_SHARES: Final = ("100%", "80%", "120%")
LENGTH_RANGES: Final = ("exact", "0.8-1")
SEEDS: Final = (0, 1, 2)
#: Requests for each user of a closed loop, and of an open one.
PER_USER: Final = (5, 10)
OPEN_REQUESTS: Final = (300, 1000)
#: vLLM's engine of version 1, the default since 0.8, mixes chunks of prompts into decode steps; so do the other two.
_CHUNKED_SINCE: Final = (0, 8)
Given = Mapping[str, tuple[Value, ...]]


def settle(
    measured: Measured,
    given: Given,
    *,
    profiles: Mapping[Role, Profile],
    placement: Placement,
    extrapolate: bool = False,
) -> tuple[Input, ...]:
    """Return every input that bears on the replay, in the order of `NAMES`.

    Args:
        given: values by name of the input; they win over the file's.

    Raises:
        InputError: an input that is needed is not known, or one that is given does not bear on this run.
    """
    found = _Settling(measured, given)
    loop = _loop(found)
    if loop is Loop.OPEN:
        _open(found)
    elif loop is Loop.CLOSED:
        _closed(found)
    else:
        _requests(found, ())
    drawn = _lengths(found) or loop is Loop.OPEN
    if drawn:
        found.add("seed", SEEDS, Origin.UNKNOWN, "arrivals or lengths are drawn")
    _engine(found, profiles, placement, extrapolate=extrapolate)
    left = [name for name in given if name not in found.inputs]
    if left:
        where = f"{loop.value} loop" if loop in {Loop.OPEN, Loop.CLOSED} else loop.value
        rule = f"does not bear on this run ({where}, {placement}{', lengths of the file' if not drawn else ''})"
        raise InputError("--assume", rule, name=left[0], value=shown(given[left[0]][0]), hint="leave it out")
    return tuple(found.inputs[name] for name in NAMES if name in found.inputs)


def cases(inputs: tuple[Input, ...]) -> list[dict[str, Value]]:
    """Return every combination of the inputs' values that differs from those before it.

    Other policies than chunked have no token budget; where nothing is drawn the seed does not matter.
    """
    found: dict[tuple[Value, ...], dict[str, Value]] = {}
    for values in itertools.product(*(item.values for item in inputs)):
        case = dict(zip((item.name for item in inputs), values, strict=True))
        if case.get("policy") not in {None, Policy.CHUNKED.value}:
            case["token_budget"] = None
        if "seed" in case and not _draws(case):
            case["seed"] = inputs[[item.name for item in inputs].index("seed")].values[0]
        found.setdefault(tuple(case.values()), case)
    return list(found.values())


class _Settling:
    """The inputs found so far."""

    def __init__(self, measured: Measured, given: Given) -> None:
        self.measured = measured
        self.given = given
        self.inputs: dict[str, Input] = {}

    def has(self, name: str) -> bool:
        return name in self.given or self.measured.inputs.get(name) is not None

    def add(self, name: str, otherwise: tuple[Value, ...], origin: Origin, note: str = "") -> Input:
        """Add an input with the values given, else the file's, else these."""
        # Shares of the profile's blocks mean the same whoever gave them.
        own = note if name == "kv_blocks" else ""
        if name in self.given:
            found = Input(name, self.given[name], Origin.GIVEN, own)
        elif self.measured.inputs.get(name) is not None:
            found = Input(name, (self.measured.inputs[name],), Origin.FILE, own)
        else:
            found = Input(
                name, otherwise, Origin.DEFAULT if len(otherwise) == 1 and origin is Origin.UNKNOWN else origin, note
            )
        self.inputs[name] = found
        return found

    def need(self, name: str, hint: str) -> Input:
        """Add an input without which nothing can be replayed."""
        if not self.has(name):
            raise InputError(self.measured.source, "is not in the file", name=name, hint=hint)
        return self.add(name, (), Origin.UNKNOWN)


def _loop(found: _Settling) -> Loop:
    """Add and return how requests are sent."""
    requests = found.measured.requests
    has_arrivals = requests is not None and requests.arrival_s is not None
    if len(found.given.get("loop", ())) > 1:
        raise InputError("--assume", "takes one value", name="loop", hint="compare loops in runs of their own")
    if not found.has("loop"):
        if has_arrivals:
            guess, told_by = Loop.REPLAY, "arrival_s"
        elif found.has("users") and not found.has("rate_per_s"):
            guess, told_by = Loop.CLOSED, "users"
        elif found.has("rate_per_s"):
            guess, told_by = Loop.OPEN, "rate_per_s"
        else:
            hint = "add --assume rate_per_s=RATE, users=N, or loop=burst"
            raise InputError(found.measured.source, "does not say when requests were sent", hint=hint)
        origin = Origin.GIVEN if told_by in found.given else Origin.FILE
        found.inputs["loop"] = Input("loop", (guess.value,), origin, f"as {told_by} is")
    else:
        found.add("loop", (), Origin.UNKNOWN)
    loop = Loop(found.inputs["loop"].values[0])
    if loop is Loop.REPLAY and not has_arrivals:
        raise InputError("--assume", "needs arrivals, which the file does not have", name="loop", value=loop.value)
    return loop


def _open(found: _Settling) -> None:
    found.need("rate_per_s", "add --assume rate_per_s=RATE")
    found.add("burstiness", (1.0,), Origin.DEFAULT, "Poisson")
    found.add("fixed_span", (found.measured.kind is Kind.VLLM,), Origin.DEFAULT)
    _requests(found, OPEN_REQUESTS)


def _closed(found: _Settling) -> None:
    users = found.need("users", "add --assume users=N")
    found.add("turnaround_s", (0.0,), Origin.DEFAULT)
    found.add("stagger_s", (0.0,), Origin.DEFAULT)
    most = max(int(value) for value in users.values if isinstance(value, int))
    requests = _requests(found, tuple(most * per_user for per_user in PER_USER))
    every = [int(value) for value in requests.values if isinstance(value, int)]
    if found.measured.requests is not None or max(every) <= most:
        found.add("first_wave_counted", (True,), Origin.DEFAULT)
    else:
        found.add("first_wave_counted", (True, False), Origin.UNKNOWN)


def _requests(found: _Settling, otherwise: tuple[Value, ...]) -> Input:
    """Add how many requests are sent."""
    requests = found.measured.requests
    if requests is not None:
        found.inputs["num_requests"] = Input("num_requests", (len(requests),), Origin.FILE)
        return found.inputs["num_requests"]
    if not otherwise:
        return found.need("num_requests", "add --assume num_requests=N")
    return found.add("num_requests", otherwise, Origin.UNKNOWN)


def _lengths(found: _Settling) -> bool:
    """Add how long requests are and return whether their lengths are drawn."""
    if found.measured.requests is not None:
        return False
    if found.has("workload"):
        found.add("workload", (), Origin.UNKNOWN)
        return True
    hint = "add --assume {0}=TOKENS, or workload=LENGTHS"
    for name in ("prompt_tokens", "output_tokens"):
        found.need(name, hint.format(name))
    ranges = found.add("length_range", LENGTH_RANGES, Origin.UNKNOWN)
    if any(value != "exact" for value in ranges.values):
        found.add("lengths_are", ("nominal",), Origin.DEFAULT)
        return True
    return False


def _draws(case: Mapping[str, Value]) -> bool:
    """Return whether arrivals or lengths of this combination are drawn."""
    arrivals = case["loop"] == Loop.OPEN.value and case.get("burstiness") != math.inf
    lengths = case.get("workload") is not None or case.get("length_range", "exact") != "exact"
    return arrivals or lengths


def _engine(found: _Settling, profiles: Mapping[Role, Profile], placement: Placement, *, extrapolate: bool) -> None:
    pool = placement.pools[-1]
    profile = profiles[pool.role]
    if placement.is_colocated:
        policies, origin, note = _policies(profile)
        policy = found.add("policy", policies, origin, note)
        if Policy.CHUNKED.value in policy.values:
            most = math.inf if extrapolate else profile.latency_at(pool.parallelism.tp).valid_range.prefill_tokens
            budgets = tuple(dict.fromkeys(int(min(budget, most)) for budget in BUDGETS))
            found.add("token_budget", budgets, Origin.UNKNOWN)
    else:
        limit = profiles[Role.PREFILL].limits.get(Role.PREFILL, BatchLimits()).tokens
        found.add("token_budget", (None if math.isinf(limit) else int(limit),), Origin.PROFILE, "of a prefill batch")
    valid = math.inf if extrapolate else profile.latency_at(pool.parallelism.tp).valid_range.decode_requests
    engine = profile.limits.get(pool.role, BatchLimits()).requests
    limits = (*(() if math.isinf(engine) else (engine,)), *MAX_SEQS)
    found.add("max_seqs", tuple(dict.fromkeys(int(min(most, valid)) for most in limits)), Origin.UNKNOWN)
    own = {p.parallelism: max(0, profiles[p.role].kv_tokens(p.parallelism)) for p in placement.pools}
    capacity = ", ".join(f"100% is {tokens // profile.block_tokens} of {at}" for at, tokens in own.items())
    found.add("kv_blocks", KV_SHARES, Origin.UNKNOWN, capacity)
    bits = f"{8 * profile.model.kv_element_bytes} bits"
    found.inputs["kv_dtype"] = Input("kv_dtype", (bits,), Origin.PROFILE)
    if not placement.is_colocated:
        # The profile has it already, whoever asked for it.
        origin = Origin.GIVEN if "handover" in found.given else Origin.PROFILE
        found.inputs["handover"] = Input("handover", (_handover(profile.handover),), origin)


def _policies(profile: Profile) -> tuple[tuple[Value, ...], Origin, str]:
    """Return how this engine schedules: as its version does, or both ways where the version does not tell."""
    chunked, whole = Policy.CHUNKED.value, Policy.PREFILL_FIRST.value
    named = f"{profile.engine} {profile.engine_version}"
    if profile.engine in {"sglang", "trtllm"}:
        return (chunked,), Origin.PROFILE, named
    version = re.match(r"(\d+)\.(\d+)", profile.engine_version)
    if version is not None and profile.engine == "vllm":
        late = (int(version[1]), int(version[2])) >= _CHUNKED_SINCE
        return (chunked if late else whole,), Origin.PROFILE, named
    if profile.engine_version.startswith(("2023", "vLLM of 2023")):
        return (whole,), Origin.PROFILE, named
    return (chunked, whole), Origin.UNKNOWN, ""


def _handover(handover: Handover) -> str:
    """Return the handover's settings, without those that change nothing."""
    plain = Handover()
    parts = [f"{handover.mode.value}, first token from {handover.first_token_from.value}"]
    if handover.stalls_decode:
        parts.append("stalls decode")
    for name in ("latency_s", "hop_s", "post_s", "post_block_s", "step_s"):
        if getattr(handover, name) != getattr(plain, name):
            parts.append(f"{name} {getattr(handover, name):g}")
    if not math.isinf(handover.bandwidth_bytes_per_s):
        parts.append(f"{handover.bandwidth_bytes_per_s / 1e9:g} GB/s a link")
    return ", ".join([*parts, f"watermark {handover.watermark:g}"])
