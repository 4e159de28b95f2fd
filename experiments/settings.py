"""Settings: what one task of a sweep measures, everything resolved, and what its result depends on."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import Workload
from placement.search import Affinity, Mode
from placement.space import Cluster


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
        label: lengths and arrivals as the file writes them, or the digest of a file's content.
        rate_per_s: of the whole placement; None: the arrivals' own, or not needed.
    """

    workload: Workload | None
    trace: Trace | None
    label: str
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
        """Return what the result depends on, the seed apart: plain values in base units, no file names."""
        common = {
            "measure": self.measure.value,
            "profiles": {role.name.lower(): profile.sha256 for role, profile in sorted(self.used.items(), key=_name)},
        }
        if self.measure is Measure.STEP:
            assert self.step is not None
            return {**common, "step": _plain(self.step), "extrapolate": self.options.extrapolate}
        if self.measure is Measure.QUEUEING:
            assert self.queueing is not None
            return {**common, "queueing": _plain(self.queueing), "rate_per_s": self.traffic.rate_per_s}
        return {**common, **self._identity_of_runs()}

    def _identity_of_runs(self) -> dict[str, Any]:
        traffic, slo, options = self.traffic, self.slo, self.options
        simulates = self.measure is Measure.SIMULATE
        found: dict[str, Any] = {
            "placement": None if self.placement is None else self.placement.label,
            "phase": None if self.phase is None else self.phase.name.lower(),
            "traffic": traffic.label,
            "rate_per_s": traffic.rate_per_s if simulates else None,
            "requests": traffic.requests,
            "warmup": traffic.warmup if simulates else None,
            "finite": traffic.finite,
            "slo": None if slo is None else [slo.ttft_s, slo.tpot_s, slo.e2e_s],
            "attainment": None if simulates else self.attainment,
            "prefill_token_limit": options.prefill_token_limit,
            "prefill_routing": options.prefill_routing.value,
            "decode_routing": options.decode_routing.value,
            "kv_blocks": self.kv_blocks,
            "extrapolate": options.extrapolate,
            "quantiles": list(self.quantiles) if simulates else [],
        }
        if self.measure is Measure.SEARCH and self.search is not None:
            asked = dataclasses.replace(self.search, jobs=None)
            found |= {"placement": None, "requests": None, "search": _plain(asked)}
        elif self.measure is Measure.GOODPUT and self.search is not None:
            found["search"] = {"precision": self.search.precision, "requests": self.search.requests}
        return found


def _name(item: tuple[Role, Profile]) -> str:
    return item[0].name


def _plain(value: object) -> object:
    """Return nested dataclasses and enums as plain values."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
