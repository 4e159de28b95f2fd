"""Settings: what one task of a sweep measures, everything resolved, and what its result depends on."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dsim.options import Options
from dsim.plain import content
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import Workload
from placement.mixes import BatchChoices, Fleet
from placement.search import Affinity, Mode
from placement.space import Cluster

#: Fields of lengths and arrivals that say where they were read, not what they are.
_ORIGIN: Final = ("source", "lines")
#: Fields of a search that ids have apart, where they say something.
_MIXED: Final = ("mixes", "fleet", "batches")
#: What only disaggregated placements have, and what one of their pools alone has no use for.
_WITHOUT_POOLS: Final = {"prefill_token_limit": None, "decode_routing": None}
_ALONE: Final = {
    Role.PREFILL: {"decode_routing": None},
    Role.DECODE: {"prefill_token_limit": None, "prefill_routing": None},
}


class Measure(enum.Enum):
    """What one task does."""

    SIMULATE = "simulate"
    GOODPUT = "goodput"
    SEARCH = "search"
    STEP = "step"
    QUEUEING = "queueing"


class StepPhase(enum.Enum):
    """Which step of the latency profile is evaluated."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    CHUNKED = "chunked"


class Formula(enum.Enum):
    """Which mean TTFT of `placement.queueing` is evaluated."""

    MD1 = "md1"
    TWO_STAGE = "two-stage"
    SPEEDUP = "speedup"


class Method(enum.Enum):
    """How a search is done."""

    FULL = "full"
    AUTHORS = "authors"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a run and which of them count.

    Args:
        workload: None where a trace is replayed.
        rate_per_s: of the whole placement; None: the arrivals' own, or not needed.
    """

    workload: Workload | None
    trace: Trace | None
    rate_per_s: float | None
    requests: int
    warmup: int
    finite: bool


@dataclass(frozen=True, slots=True)
class SearchSetting:
    """What a search is asked beyond profiles, workload and limits; see `placement.search.Question`."""

    cluster: Cluster
    affinity: Affinity
    mode: Mode
    policies: tuple[Policy, ...]
    token_budgets: tuple[int, ...]
    top: int
    precision: float
    requests: int | None
    method: Method
    timing: bool
    jobs: int | None
    mixes: tuple[Mapping[Role, Profile], ...] = ()
    fleet: Fleet | None = None
    batches: BatchChoices = field(default_factory=BatchChoices)


@dataclass(frozen=True, slots=True)
class StepSetting:
    """A step of the latency profile; lengths are those of one request."""

    phase: StepPhase
    tp: int
    pp: int
    batch: int
    prompt_tokens: int
    context_tokens: int
    chunk_tokens: int

    @property
    def role(self) -> Role:
        """The role whose host overhead the step has."""
        return {StepPhase.PREFILL: Role.PREFILL, StepPhase.DECODE: Role.DECODE}.get(self.phase, Role.COLOCATED)

    def as_used(self) -> StepSetting:
        """Return it with 0 for the lengths that a step of its phase does not have."""
        unused: tuple[str, ...] = {
            StepPhase.PREFILL: ("context_tokens", "chunk_tokens"),
            StepPhase.DECODE: ("prompt_tokens", "chunk_tokens"),
            StepPhase.MIXED: ("chunk_tokens",),
            StepPhase.CHUNKED: () if self.batch else ("context_tokens",),
        }[self.phase]
        nothing: dict[str, Any] = dict.fromkeys(unused, 0)
        return dataclasses.replace(self, **nothing)


@dataclass(frozen=True, slots=True)
class QueueingSetting:
    """A formula and its execution time D."""

    formula: Formula
    prefill_s: float
    tp_speedup: float

    @property
    def num_gpus(self) -> int:
        """GPUs that the formula is about."""
        return 1 if self.formula is Formula.MD1 else 2


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One task of a sweep, everything resolved; it can be sent to another process.

    Args:
        profiles: by role; empty where the measure needs none.
        slo: limits, scaled; None where none are given.
        attainment: share (0 to 1) that goodput asks for.
        seed: of the first replication.
    """

    measure: Measure
    profiles: Mapping[Role, Profile]
    placement: Placement | None
    phase: Role | None
    traffic: Traffic
    slo: Slo | None
    attainment: float
    options: Options
    kv_blocks: int | None
    seed: int
    quantiles: tuple[str, ...]
    search: SearchSetting | None
    step: StepSetting | None
    queueing: QueueingSetting | None

    @property
    def num_gpus(self) -> int:
        """GPUs that rates per GPU are about."""
        if self.queueing is not None and self.measure is Measure.QUEUEING:
            return self.queueing.num_gpus
        if self.placement is None:
            return 1
        return self.placement.num_gpus if self.phase is None else self.placement.pool(self.phase).num_gpus

    @property
    def used(self) -> Mapping[Role, Profile]:
        """The profiles that the measure reads."""
        if self.measure is Measure.QUEUEING:
            return {}
        if self.measure is Measure.STEP and self.step is not None:
            return {self.step.role: self.profiles[self.step.role]}
        if self.measure is Measure.SEARCH and self.search is not None:
            colocated = self.search.mode is not Mode.DISAGGREGATED
            disaggregated = self.search.mode is not Mode.COLOCATED
            wanted = {Role.COLOCATED: colocated, Role.PREFILL: disaggregated, Role.DECODE: disaggregated}
            return {role: profile for role, profile in self.profiles.items() if wanted[role]}
        roles = () if self.placement is None else tuple(pool.role for pool in self.placement.pools)
        return {role: self.profiles[role] for role in roles}

    def identity(self) -> dict[str, Any]:
        """Return what the result depends on, the seed apart: plain values in base units, no file names.

        Keys that the measure does not read, or that others override, are not in it.
        """
        common = {
            "measure": self.measure.value,
            "profiles": {role.name.lower(): profile.sha256 for role, profile in sorted(self.used.items(), key=_name)},
        }
        if self.measure is Measure.STEP:
            assert self.step is not None
            return {**common, "step": content(self.step.as_used()), "extrapolate": self.options.extrapolate}
        if self.measure is Measure.QUEUEING:
            return {**common, "queueing": content(self.queueing), "rate_per_s": self.traffic.rate_per_s}
        return {
            **common,
            "lengths": content(self.traffic.workload, leave_out=_ORIGIN),
            "slo": content(self.slo),
            "prefill_token_limit": self.options.prefill_token_limit,
            "prefill_routing": self.options.prefill_routing.value,
            "decode_routing": self.options.decode_routing.value,
            "extrapolate": self.options.extrapolate,
            **{
                Measure.SIMULATE: self._identity_of_run,
                Measure.GOODPUT: self._identity_of_goodput,
                Measure.SEARCH: self._identity_of_search,
            }[self.measure](),
        }

    def _identity_of_placement(self) -> dict[str, Any]:
        assert self.placement is not None
        phase = None if self.phase is None else self.phase.name.lower()
        found: dict[str, Any] = {"placement": self.placement.label, "phase": phase, "kv_blocks": self.kv_blocks}
        pools = [pool for pool in self.placement.pools if self.phase in {None, pool.role}]
        segments = [pool.parallelism.inter_node_pp for pool in pools]
        if max(segments) > 1:
            found["inter_node_pp"] = segments
        crossings = self.placement.crossings if self.phase is None else None
        if crossings is not None and any(map(any, crossings)):
            found["crossings"] = [list(row) for row in crossings]
        if self.placement.is_colocated:
            return found | _WITHOUT_POOLS
        if self.phase is not None:
            found |= _ALONE[self.phase]
        return found

    def _identity_of_run(self) -> dict[str, Any]:
        traffic, slo = self.traffic, self.slo
        if slo is not None and self.phase is not None:
            # One pool has a limit of its own.
            slo = Slo(ttft_s=slo.ttft_s) if self.phase is Role.PREFILL else Slo(tpot_s=slo.tpot_s)
        return {
            **self._identity_of_placement(),
            "slo": content(slo),
            "trace": content(traffic.trace),
            "rate_per_s": traffic.rate_per_s,
            "requests": traffic.requests,
            "warmup": traffic.warmup,
            "finite": traffic.finite,
            "quantiles": list(self.quantiles),
        }

    def _identity_of_goodput(self) -> dict[str, Any]:
        assert self.search is not None
        requests = self.traffic.requests if self.traffic.finite else self.search.requests
        finite = requests is not None
        return {
            **self._identity_of_placement(),
            "attainment": self.attainment,
            "finite": finite,
            "requests": requests if finite else self.traffic.requests,
            # Finite runs are replicated as often as their length asks for.
            "precision": None if finite else self.search.precision,
        }

    def _identity_of_search(self) -> dict[str, Any]:
        assert self.search is not None
        asked = dataclasses.replace(self.search, jobs=None)
        if asked.method is Method.AUTHORS:
            asked = dataclasses.replace(asked, top=0, precision=0.0, requests=None)
        if asked.mode is Mode.DISAGGREGATED:
            asked = dataclasses.replace(asked, policies=())
        if Policy.CHUNKED not in asked.policies:
            asked = dataclasses.replace(asked, token_budgets=())
        # On one node neither plays a part; the affinity is told anyway.
        idle = ("domain_gpus", "side_by_side") if asked.cluster.num_nodes == 1 else ()
        said = content(asked, leave_out=(*_MIXED, *idle))
        found = {"attainment": self.attainment, "search": said} | _identity_of_mixes(asked)
        return found | (_WITHOUT_POOLS if asked.mode is Mode.COLOCATED else {})


def _identity_of_mixes(asked: SearchSetting) -> dict[str, Any]:
    """Return what searches have that are about several GPUs, or limits of a batch; nothing of others."""
    found: dict[str, Any] = {}
    if asked.fleet is not None:
        found["mixes"] = [
            {role.name.lower(): profile.sha256 for role, profile in sorted(mix.items(), key=_name)}
            for mix in asked.mixes
        ]
        found["fleet"] = content(asked.fleet)
    if asked.batches != BatchChoices():
        found["batches"] = content(asked.batches)
    return found


def _name(item: tuple[Role, Profile]) -> str:
    return item[0].name
