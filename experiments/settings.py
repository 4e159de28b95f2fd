"""Settings: what one task of a sweep measures, read strictly from the keys of `base`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from dsim.errors import InputError, by_option
from dsim.hugging_face import is_config
from dsim.options import Evidence, Options, PrefillBatching, Routing
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile
from dsim.slo import Slo, parse_slo
from dsim.trace import Trace
from dsim.units import parse_duration_s, parse_rate_per_s, parse_share
from dsim.workload import DEFAULT_REQUESTS, DEFAULT_WARMUP, Workload, parse_arrivals, parse_workload, read_trace
from dsim.yamlfile import Field, Section
from experiments.keys import KEYS, QUANTILES
from placement.feasibility import cannot_run
from placement.search import Affinity, Mode
from placement.space import TOKEN_BUDGETS, Cluster, asked_cluster
from profiles.choice import choose_colocated, choose_profile

E = TypeVar("E", bound=enum.Enum)


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


class _Phase(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


_TOP: Final = tuple(dict.fromkeys(key.name.split(".")[0] for key in KEYS))
_SECTIONS: Final = {
    name: tuple(key.name.partition(".")[2] for key in KEYS if key.name.startswith(f"{name}."))
    for name in ("slo", "search", "step", "queueing")
}


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


def parse_setting(section: Section, *, folder: Path) -> Setting:
    """Return the setting that `base` (with a task's factor values in it) says.

    Args:
        folder: that the paths of profiles and traces start from: the sweep file's.

    Raises:
        InputError: `file:line`, the key, what is wrong with it and what to do.
    """
    section.only(_TOP)
    measure = _choice(section, "measure", Measure.SIMULATE)
    step, queueing = _step(section), _queueing(section)
    profiles = _profiles(section, measure, folder=folder)
    search = _search(section, profiles)
    placement = _placement(section, needed=measure in {Measure.SIMULATE, Measure.GOODPUT})
    phase = _phase(section, placement)
    kv_blocks = _whole(section, "kv_blocks", at_least=1)
    if placement is not None and profiles and measure in {Measure.SIMULATE, Measure.GOODPUT}:
        profiles = _with_kv_blocks(profiles, placement, kv_blocks)
        _check_placement(section, placement, profiles)
    gpus = _gpus(measure, placement, phase, queueing)
    setting = Setting(
        measure=measure,
        profiles=profiles,
        placement=placement,
        phase=phase,
        traffic=_traffic(section, measure, profiles, folder=folder, gpus=gpus),
        slo=_slo(section),
        attainment=_share(section, "attainment", 0.9),
        options=_options(section, profiles),
        kv_blocks=kv_blocks,
        seed=_whole(section, "seed", at_least=0, at_most=2**32 - 1) or 0,
        quantiles=_quantiles(section),
        search=search,
        step=step,
        queueing=queueing,
    )
    _check_needs(section, setting)
    return setting


def _check_needs(section: Section, setting: Setting) -> None:
    """Refuse a measure without what it measures."""
    if setting.measure in {Measure.GOODPUT, Measure.SEARCH} and setting.slo is None:
        section.need("slo")
    if setting.measure in {Measure.GOODPUT, Measure.SEARCH} and setting.traffic.workload is None:
        raise section.need("trace").error("is for measure simulate", "leave it out, and give workload")
    if setting.measure is Measure.STEP:
        section.need("step")
        _check_step(section, setting)
    if setting.measure is Measure.QUEUEING:
        section.need("queueing")


# Profiles


def _profiles(section: Section, measure: Measure, *, folder: Path) -> dict[Role, Profile]:
    """Return the profile of each role; none where the measure needs none and none is named."""
    if measure is Measure.QUEUEING and "model" not in section and "profile" not in section:
        return {}
    changes = _changes(section)
    evidence = section.get("evidence")
    with _placed(section, "model"):
        used = choose_profile(
            model=_model(section, folder),
            gpu=_text(section, "gpu"),
            engine=_text(section, "engine"),
            file=_path(section, "profile", folder),
            evidence=None if evidence is None else evidence.choice(Evidence),
            changes=changes,
        )
    colocated = _colocated(section, used, measure, changes, folder=folder)
    return {Role.PREFILL: used, Role.DECODE: used, Role.COLOCATED: colocated}


def _colocated(
    section: Section, used: Profile, measure: Measure, changes: Mapping[str, Field], *, folder: Path
) -> Profile:
    engine, file = _text(section, "colocated_engine"), _path(section, "colocated_profile", folder)
    if engine is None and file is None and measure is not Measure.SEARCH:
        return used
    with _placed(section, "colocated_engine" if file is None else "colocated_profile"):
        return choose_colocated(used, engine=engine, file=file, changes=changes)


def _model(section: Section, folder: Path) -> str | None:
    """Return the model's name, or the path of its config file, which starts from the sweep file's folder."""
    name = _text(section, "model")
    return name if name is None or not is_config(str(folder / name)) else str(folder / name)


def _changes(section: Section) -> dict[str, Field]:
    """Return the values of `profile_set` by dotted key."""
    field = section.get("profile_set")
    return {} if field is None else dict(_leaves(field.section(), ""))


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Field]]:
    for key, field in section.fields.items():
        path = f"{prefix}{key}"
        if isinstance(field.value, dict):
            yield from _leaves(field.section(), f"{path}.")
        else:
            yield path, field


def _with_kv_blocks(profiles: dict[Role, Profile], placement: Placement, kv_blocks: int | None) -> dict[Role, Profile]:
    if kv_blocks is None:
        return profiles
    return {role: profile.with_kv_blocks(placement, kv_blocks) for role, profile in profiles.items()}


# Placement


def _placement(section: Section, *, needed: bool) -> Placement | None:
    field = section.need("placement") if needed else section.get("placement")
    if field is None:
        return None
    policy, budget = section.get("policy"), _whole(section, "token_budget", at_least=1)
    chosen = None if policy is None else policy.choice(Policy)
    with _placed(section, "placement"):
        placement = Placement.parse(
            field.text(), policy=chosen or Policy.PREFILL_FIRST, token_budget=budget, where=field.where
        )
    if policy is not None and not placement.is_colocated:
        raise policy.error("belongs to colocated placements", "as in placement: 1xC:tp1pp1, or leave it out")
    if budget is not None and chosen is not Policy.CHUNKED:
        raise section.need("token_budget").error("belongs to policy chunked", "add policy: chunked, or leave it out")
    return placement


def _check_placement(section: Section, placement: Placement, profiles: Mapping[Role, Profile]) -> None:
    """Refuse a placement that cannot run, with every reason."""
    found = cannot_run(placement, profiles)
    if found:
        hint = "change the parallel degrees, or give a profile that has them"
        raise section.need("placement").error("cannot run: " + "; ".join(dict.fromkeys(found)), hint)


def _phase(section: Section, placement: Placement | None) -> Role | None:
    field = section.get("phase")
    if field is None or field.value == "both":
        return None
    phase = {_Phase.PREFILL: Role.PREFILL, _Phase.DECODE: Role.DECODE}[field.choice(_Phase)]
    if placement is not None and placement.is_colocated:
        raise field.error("belongs to disaggregated placements", "as in placement: 1xP:tp1pp1 + 1xD:tp1pp1")
    return phase


def _gpus(
    measure: Measure, placement: Placement | None, phase: Role | None, queueing: QueueingSetting | None
) -> int | None:
    """Return the GPUs that `rate_per_gpu` is about."""
    if measure is Measure.QUEUEING:
        return None if queueing is None else queueing.num_gpus
    if placement is None:
        return None
    return placement.num_gpus if phase is None else placement.pool(phase).num_gpus


# Traffic


def _traffic(
    section: Section, measure: Measure, profiles: Mapping[Role, Profile], *, folder: Path, gpus: int | None
) -> Traffic:
    finite = section.flag("finite", default=False)
    requests, warmup = _whole(section, "requests", at_least=1), _whole(section, "warmup", at_least=0)
    rate_per_s = _rate_per_s(section, gpus)
    if "trace" in section:
        return _replayed(section, profiles, folder=folder, requests=requests, warmup=warmup or 0)
    lengths, process = _text(section, "workload") or "sharegpt", _text(section, "arrivals") or "poisson"
    with _placed(section, "workload"):
        drawn = parse_workload(lengths, folder=folder)
    with _placed(section, "arrivals"):
        arrivals = parse_arrivals(process, folder=folder)
    workload = Workload(arrivals, drawn)
    if rate_per_s is None and measure in {Measure.SIMULATE, Measure.QUEUEING} and arrivals.native_rate_per_s is None:
        raise InputError(section.field.where, "is missing", name="rate", hint="add rate, rate_per_gpu or a trace")
    if profiles and measure in {Measure.SIMULATE, Measure.GOODPUT, Measure.SEARCH}:
        with _placed(section, "rate" if "rate" in section else "rate_per_gpu"):
            # Requests are drawn when they are needed: see now whether they can be.
            context_tokens = min(profile.model.context_tokens for profile in profiles.values())
            workload.trace(num_requests=1, seed=0, context_tokens=context_tokens, rate_per_s=rate_per_s or 1.0)
    return Traffic(
        workload=workload,
        trace=None,
        label=f"{_content(lengths, folder)} {_content(process, folder)}",
        rate_per_s=rate_per_s if rate_per_s is not None else arrivals.native_rate_per_s,
        requests=DEFAULT_REQUESTS if requests is None else requests,
        warmup=warmup if warmup is not None else 0 if finite else DEFAULT_WARMUP,
        finite=finite,
    )


def _replayed(
    section: Section, profiles: Mapping[Role, Profile], *, folder: Path, requests: int | None, warmup: int
) -> Traffic:
    for key in ("workload", "arrivals", "rate", "rate_per_gpu", "finite"):
        if key in section:
            raise section.need(key).error("does not go with trace", "leave one of the two out")
    file = _path(section, "trace", folder)
    assert file is not None
    context_tokens = min((profile.model.context_tokens for profile in profiles.values()), default=None)
    trace = read_trace(file, context_tokens=context_tokens)
    rows = len(trace) if requests is None else warmup + requests
    if rows > len(trace) or warmup >= len(trace):
        field = section.need("warmup" if requests is None else "requests")
        raise field.error("asks for more requests than the trace has", f"it has {len(trace)}")
    return Traffic(
        workload=None,
        trace=trace.first(rows),
        label=_digest(file),
        rate_per_s=None,
        requests=rows - warmup,
        warmup=warmup,
        finite=True,
    )


def _rate_per_s(section: Section, gpus: int | None) -> float | None:
    whole, per_gpu = section.get("rate"), section.get("rate_per_gpu")
    if whole is not None and per_gpu is not None:
        raise per_gpu.error("does not go with rate", "leave one of the two out")
    field = whole or per_gpu
    if field is None:
        return None
    if isinstance(field.value, str):
        rate_per_s = parse_rate_per_s(field.value, field.where, name=field.name)
    else:
        rate_per_s = field.number()
    if not 1e-9 <= rate_per_s <= 1e9:
        raise field.error("must be between 1e-9 and 1e9 requests per second", "as in 6 or 90/min")
    if per_gpu is None:
        return rate_per_s
    return None if gpus is None else rate_per_s * gpus


def _content(text: str, folder: Path) -> str:
    """Return the text, or the digest of the file that it names: a path says nothing of what is in it."""
    file = folder / text
    return _digest(file) if file.suffix in {".csv", ".jsonl", ".json", ".ndjson"} and file.is_file() else text


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# Limits and options


def _slo(section: Section) -> Slo | None:
    field = section.get("slo")
    scale = 1.0 if "slo_scale" not in section else section.need("slo_scale").number(above=0, at_most=1e6)
    if field is None:
        return None
    if isinstance(field.value, str):
        slo = parse_slo(field.value, where=field.where)
    else:
        limits = field.section().only(_SECTIONS["slo"])
        found = {f"{key}_s": _limit_s(key, limit) for key, limit in limits.fields.items()}
        if not found:
            raise field.error("needs a limit", "as in {ttft: 0.4, tpot: 0.1}")
        slo = Slo(**found)
    return Slo(slo.ttft_s * scale, slo.tpot_s * scale, slo.e2e_s * scale)


def _limit_s(key: str, field: Field) -> float:
    """Return one limit, as a number of seconds or as a text with a unit."""
    value = field.value if isinstance(field.value, str) else field.number(above=0)
    try:
        slo = parse_slo(f"{key}={value}", where=field.where)
    except InputError as error:
        raise field.error(error.rule, error.hint) from None
    limit_s = getattr(slo, f"{key}_s")
    assert isinstance(limit_s, float)
    return limit_s


def _options(section: Section, profiles: Mapping[Role, Profile]) -> Options:
    batching = _choice(section, "prefill_batching", PrefillBatching.ENGINE)
    limit = None
    if profiles:
        with _placed(section, "prefill_batching"):
            limit = profiles[Role.PREFILL].prefill_token_limit(batching)
    return Options(
        prefill_routing=_choice(section, "prefill_routing", Routing.JOIN_SHORTEST_QUEUE),
        decode_routing=_choice(section, "decode_routing", Routing.LEAST_LOADED),
        prefill_token_limit=limit,
        check=section.flag("check", default=False),
        extrapolate=section.flag("extrapolate", default=False),
    )


def _quantiles(section: Section) -> tuple[str, ...]:
    field = section.get("quantiles")
    if field is None:
        return ()
    names = [item.text() for item in field.items()]
    for item, name in zip(field.items(), names, strict=True):
        if name not in QUANTILES:
            raise item.error("is not known", "expected some of " + ", ".join(QUANTILES))
    return tuple(dict.fromkeys(names))


# Sections


def _search(section: Section, profiles: Mapping[Role, Profile]) -> SearchSetting | None:
    field = section.get("search")
    if not profiles:
        return None
    asked = Section(Field(section.field.file, section.field.line, "search", {})) if field is None else field.section()
    asked.only(_SECTIONS["search"])
    affinity = _choice(asked, "affinity", Affinity.HIGH)
    with _placed(asked, "gpus"):
        cluster = asked_cluster(
            profiles[Role.PREFILL].gpu,
            gpus=_whole(asked, "gpus", at_least=1),
            nodes=_whole(asked, "nodes", at_least=1),
            gpus_per_node=_whole(asked, "gpus_per_node", at_least=1, at_most=1024),
            within_node=affinity is Affinity.LOW,
        )
    policies = asked.get("policies")
    budgets = asked.get("token_budgets")
    return SearchSetting(
        cluster=cluster,
        affinity=affinity,
        mode=_choice(asked, "mode", Mode.BOTH),
        policies=tuple(Policy) if policies is None else tuple(item.choice(Policy) for item in policies.items()),
        token_budgets=TOKEN_BUDGETS if budgets is None else tuple(b.integer(at_least=1) for b in budgets.items()),
        top=_whole(asked, "top", at_least=1, at_most=1000) or 3,
        precision=_share(asked, "precision", 0.03),
        requests=_whole(asked, "requests", at_least=10),
        method=_choice(asked, "method", Method.FULL),
        timing=asked.flag("timing", default=False),
        jobs=_whole(asked, "jobs", at_least=1, at_most=1024),
    )


def _step(section: Section) -> StepSetting | None:
    field = section.get("step")
    if field is None:
        return None
    step = field.section().only(_SECTIONS["step"])
    phase = step.need("phase").choice(StepPhase)
    prefills, decodes = phase is not StepPhase.DECODE, phase is not StepPhase.PREFILL
    alone = phase is StepPhase.CHUNKED and _whole(step, "batch", at_least=0) == 0
    return StepSetting(
        phase=phase,
        tp=step.integer("tp", 1, at_least=1),
        pp=step.integer("pp", 1, at_least=1),
        batch=step.integer("batch", 1, at_least=0 if phase is StepPhase.CHUNKED else 1),
        prompt_tokens=step.integer("prompt_tokens", None if prefills else 0, at_least=int(prefills)),
        context_tokens=step.integer("context_tokens", None if decodes and not alone else 0, at_least=int(decodes)),
        chunk_tokens=step.integer(
            "chunk_tokens", None if phase is StepPhase.CHUNKED else 0, at_least=int(phase is StepPhase.CHUNKED)
        ),
    )


def _check_step(section: Section, setting: Setting) -> None:
    """Refuse a step that the profile has no numbers for."""
    step = setting.step
    assert step is not None
    fields = section.need("step").section()
    profile = setting.profiles[step.role]
    if step.tp not in profile.latency or step.tp in profile.refused:
        known = ", ".join(str(tp) for tp in sorted(profile.latency))
        raise (fields.get("tp") or fields.field).error(
            f"has no coefficients in profile {profile.name}", f"it has {known}"
        )
    if setting.options.extrapolate:
        return
    valid = profile.latency[step.tp].valid_range
    decoding = 0 if step.phase is StepPhase.PREFILL else step.batch
    prefilled = step.prompt_tokens * (step.batch if step.phase is StepPhase.PREFILL else 1)
    prefilled = min(prefilled, step.chunk_tokens or prefilled)
    for key, value, most in (
        ("prompt_tokens", step.prompt_tokens, valid.chunk_tokens),
        ("batch", prefilled, valid.prefill_tokens),
        ("batch", decoding, valid.decode_requests),
        ("context_tokens", decoding * step.context_tokens, valid.context_tokens),
    ):
        if value > most:
            rule = f"leaves the profile's valid range: {value} is above {most:g}"
            raise (fields.get(key) or fields.field).error(rule, "take less, or add extrapolate: true")


def _queueing(section: Section) -> QueueingSetting | None:
    field = section.get("queueing")
    if field is None:
        return None
    asked = field.section().only(_SECTIONS["queueing"])
    formula = asked.need("formula").choice(Formula)
    duration = asked.need("prefill_s")
    if isinstance(duration.value, str):
        prefill_s = parse_duration_s(duration.value, duration.where, name=duration.name)
    else:
        prefill_s = duration.number()
    if not 0 < prefill_s <= 1e6:
        raise duration.error("must be > 0 and at most 1e6 seconds")
    speedup = asked.need("tp_speedup").number(above=1, at_most=2) if formula is Formula.SPEEDUP else 1.0
    return QueueingSetting(formula, prefill_s, speedup)


# Values


def _text(section: Section, key: str) -> str | None:
    field = section.get(key)
    return None if field is None else field.text()


def _path(section: Section, key: str, folder: Path) -> Path | None:
    text = _text(section, key)
    return None if text is None else folder / text


def _whole(section: Section, key: str, *, at_least: int, at_most: int = 1_000_000_000) -> int | None:
    field = section.get(key)
    return None if field is None else field.integer(at_least=at_least, at_most=at_most)


def _share(section: Section, key: str, default: float) -> float:
    field = section.get(key)
    if field is None:
        return default
    if isinstance(field.value, str):
        return parse_share(field.value, field.where, name=field.name)
    return field.number(above=0, below=1)


def _choice(section: Section, key: str, default: E) -> E:
    field = section.get(key)
    return default if field is None else field.choice(type(default))


@contextlib.contextmanager
def _placed(section: Section, key: str) -> Iterator[None]:
    """Let errors that name an option of the command line name the place and key of the file.

    Args:
        key: taken where the error names neither a key of the section nor a place in a file.
    """
    try:
        yield
    except InputError as error:
        named = by_option(error)
        if not named.where.startswith("--"):
            raise
        option = named.where.removeprefix("--").replace("-", "_")
        field = section.get(option) or section.get(key) or section.field
        name = field.name if field is not section.field else f"{section.field.name}.{option}".lstrip(".")
        rule = _keys(named.rule)
        if named.name is not None:
            rule = f"is wrong: {named.name}={named.value} {rule}"
        value = None if isinstance(field.value, tuple | dict) else field.value
        raise InputError(field.where, rule, name=name, value=value, hint=_keys(named.hint)) from None


def _keys(text: str) -> str:
    """Return a text in which options of the command line are written as keys."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text)


def _name(item: tuple[Role, Profile]) -> str:
    return item[0].name


def _plain(value: object) -> object:
    """Return nested dataclasses and enums as plain values."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
