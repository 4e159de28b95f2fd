"""Predicted against measured, statistic by statistic, with every input that the prediction rests on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dsim.errors import InputError
from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile, profiles_by_role
from dsim.slo import Slo
from experiments.validation.inputs import Input
from experiments.validation.measured import ATTAINMENTS, METRICS, RATES, STATISTICS, Measured, Value
from experiments.validation.replay import Case, Replay, engine_of, replay
from experiments.validation.settle import Given, cases, settle

#: Every statistic that can be compared, in the order in which they are printed.
NAMED: Final = (*(f"{m}.{s}" for m, s in itertools.product(METRICS, STATISTICS)), *RATES, *ATTAINMENTS)
#: Inputs that change nothing where no request reaches them.
_LIMITS: Final = ("max_seqs", "kv_blocks")
#: Combinations of inputs beyond which a run is refused rather than left running for hours.
MOST_CASES: Final = 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    """One statistic, measured and predicted.

    Args:
        name: `ttft_s.mean`, `throughput_per_s`, `attainment.both`.
        predicted: None where inputs that are not known make a difference, so that there is only a range.
        low: least of all replays.
        high: most of all replays.
    """

    name: str
    measured: float
    predicted: float | None
    low: float
    high: float

    @property
    def is_share(self) -> bool:
        """Whether it is a share, whose error is a difference."""
        return self.name.startswith("attainment")

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; of a share predicted - measured. None where there is only a range."""
        return None if self.predicted is None else self._error(self.predicted)

    @property
    def error_low(self) -> float:
        """The same of the least prediction."""
        return self._error(self.low)

    @property
    def error_high(self) -> float:
        """The same of the largest prediction."""
        return self._error(self.high)

    def _error(self, predicted: float) -> float:
        if predicted == self.measured:
            return 0.0
        if self.is_share:
            return predicted - self.measured
        return predicted / self.measured - 1 if self.measured else math.copysign(math.inf, predicted)


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """A measured run beside its replays.

    Args:
        inputs: all that the prediction rests on, beside the profile.
        replays: one for each combination of the inputs' values.
        remarks: what to know about the numbers, a line each.
    """

    measured: Measured
    placement: Placement
    profiles: Mapping[Role, Profile]
    inputs: tuple[Input, ...]
    replays: tuple[Replay, ...]
    comparisons: tuple[Comparison, ...]
    remarks: tuple[str, ...]

    def of(self, name: str) -> Comparison:
        """Return the comparison of one statistic; KeyError if it was not measured."""
        for comparison in self.comparisons:
            if comparison.name == name:
                return comparison
        raise KeyError(name)

    @property
    def unknown(self) -> tuple[Input, ...]:
        """The inputs of which several values were tried."""
        return tuple(item for item in self.inputs if not item.is_known)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The names of unknown inputs that no replay depends on."""
        return tuple(item.name for item in self.unknown if not _matters(item.name, self.replays))

    @property
    def inputs_line(self) -> str:
        """All inputs on one line."""
        return ", ".join(map(str, self.inputs))


def validate(
    measured: Measured,
    *,
    profiles: Profile | Mapping[Role, Profile],
    placement: Placement,
    given: Given | None = None,
    slo: Slo | None = None,
    options: Options = Options(),
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Replay a measured run and compare every statistic that was measured.

    Nothing is fitted. Inputs that neither `given` nor the file says are tried with several plausible values, in every
    combination, and the comparison has the range of what comes out.

    Args:
        placement: its policy and token budget are those of the inputs, not its own.
        given: values by name of an input (`inputs.NAMES`); several values are all tried.
        slo: limits whose attainment is compared.
        options: of every replay, but for the seed.
        progress: called with the number of replays done and of all.

    Raises:
        InputError: the file does not say something that is needed, or the profile cannot run it.
    """
    given = {} if given is None else given
    by_role = profiles_by_role(profiles, extrapolate=options.extrapolate)
    inputs = settle(measured, given, profiles=by_role, placement=placement, extrapolate=options.extrapolate)
    asked = cases(inputs)
    if len(asked) > MOST_CASES:
        unknown = ", ".join(f"{item.name} ({len(item.values)})" for item in inputs if not item.is_known)
        rule = f"would take {len(asked)} replays, more than {MOST_CASES}, to try all values of {unknown}"
        raise InputError("--assume", rule, hint="fix some of them, as in --assume max_seqs=256")
    run: list[Replay] = []
    alike: dict[tuple[Value, ...], list[Replay]] = {}
    for number, case in enumerate(asked):
        others = alike.setdefault(tuple(value for name, value in case.items() if name not in _LIMITS), [])
        known = _same(others, case, placement, by_role)
        if known is None:
            run.append(replay(measured, case, profiles=by_role, placement=placement, options=options, slo=slo))
            others.append(run[-1])
        else:
            run.append(replace(known, case=case))
        if progress is not None:
            progress(number + 1, len(asked))
    return Validation(
        measured=measured,
        placement=placement,
        profiles={pool.role: by_role[pool.role] for pool in placement.pools},
        inputs=inputs,
        replays=tuple(run),
        comparisons=compare(_measured(measured, slo), [one.statistics for one in run], one_number=_one(inputs)),
        remarks=(*measured.remarks, *_remarks(measured, run, inputs, slo)),
    )


def compare(
    measured: Mapping[str, float], predicted: Sequence[Mapping[str, float]], *, one_number: bool
) -> tuple[Comparison, ...]:
    """Return the comparisons of all statistics that are on both sides.

    Args:
        predicted: of every replay.
        one_number: whether their mean is a prediction, as where only the seed differs.
    """
    found = []
    for name in NAMED:
        values = [statistics[name] for statistics in predicted if name in statistics]
        if name in measured and values:
            low, high = min(values), max(values)
            agree = math.isclose(low, high, rel_tol=1e-9)
            mean = values[0] if agree else float(np.mean(values))
            found.append(Comparison(name, measured[name], mean if agree or one_number else None, low, high))
    return tuple(found)


def _one(inputs: Sequence[Input]) -> bool:
    """Return whether the replays differ in nothing but the seed."""
    return all(item.is_known or item.name == "seed" for item in inputs)


def _measured(measured: Measured, slo: Slo | None) -> dict[str, float]:
    """Return what was measured, with the attainment of these limits where the requests are known."""
    if measured.requests is None or slo is None:
        return dict(measured.statistics)
    shares = measured.requests.statistics(slo=slo)
    return {**measured.statistics, **{name: shares[name] for name in ATTAINMENTS if name in shares}}


def _same(run: Sequence[Replay], case: Case, placement: Placement, profiles: Mapping[Role, Profile]) -> Replay | None:
    """Return a replay whose limits never bound, where the case differs from it in limits that would not either."""
    for done in run:
        differ = {name for name in case if case[name] != done.case[name]}
        if done.result.column("rejected").any():
            continue
        if "max_seqs" in differ and any(int(one["max_seqs"] or 0) < done.peak_requests for one in (case, done.case)):
            continue
        # What a decode instance pulls depends on its capacity also where there is room.
        if "kv_blocks" in differ and not (
            placement.is_colocated
            and all(_room(one, placement, profiles) >= done.peak_blocks for one in (case, done.case))
        ):
            continue
        return done
    return None


def _room(case: Case, placement: Placement, profiles: Mapping[Role, Profile]) -> int:
    """Return the KV blocks of one engine loop that prompts may take."""
    placed, used = engine_of(case, profiles=profiles, placement=placement)
    pool = placed.pools[0]
    profile, loops = used[pool.role], pool.parallelism.pp
    blocks = max(0, profile.kv_tokens(pool.parallelism)) // profile.block_tokens // loops
    return blocks - math.floor(profile.admission_watermark * blocks)


def _matters(name: str, replays: Sequence[Replay]) -> bool:
    """Return whether two replays that differ in this input alone came out differently."""
    found: dict[tuple[Value, ...], Replay] = {}
    for one in replays:
        others = tuple(value for key, value in one.case.items() if key != name)
        first = found.setdefault(others, one)
        if any(
            not math.isclose(value, first.statistics[key], rel_tol=1e-9)
            for key, value in one.statistics.items()
            if key in first.statistics
        ):
            return True
    return False


def _remarks(measured: Measured, run: Sequence[Replay], inputs: Sequence[Input], slo: Slo | None) -> list[str]:
    found = []
    if slo is None and any(name in measured.statistics for name in ATTAINMENTS):
        found.append("attainment was measured and is not compared without its limits: add --slo")
    limit = measured.inputs.get("concurrency_limit")
    most = max(one.peak_requests for one in run)
    if isinstance(limit, int) and most > limit:
        found.append(f"the client held at most {limit} requests in flight, the replay of its open loop up to {most}")
    rejected = max(int(np.count_nonzero(one.result.column("rejected"))) for one in run)
    if rejected:
        found.append(f"up to {rejected} requests were rejected in a replay, as they can never fit the KV cache")
    if any(one.case.get("policy") not in {None, Policy.CHUNKED.value} for one in run) and any(
        item.name == "token_budget" for item in inputs
    ):
        found.append("token_budget bears on the policy chunked only")
    if measured.requests is not None and any(item.name == "loop" and item.values == ("replay",) for item in inputs):
        found.append("every row counts: no warm-up is left out")
    return found
