"""Base: the setting that the keys of `base` say, with a task's factor values in it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.options import Options, PrefillBatching, Routing
from dsim.pools import Placement, Policy, Role
from dsim.profile import Profile
from dsim.slo import Slo, parse_slo
from dsim.units import parse_duration_s
from dsim.yamlfile import Field, Section
from experiments.inputs import mixes_of_setting, profiles_of, traffic_of
from experiments.keys import KEYS, QUANTILES
from experiments.mixed import on_gpus
from experiments.settings import (
    Formula,
    Measure,
    Method,
    QueueingSetting,
    SearchSetting,
    Setting,
    StepPhase,
    StepSetting,
)
from experiments.values import choice_at, placed, share_at, text_at, whole_at
from placement.batches import parse_batches
from placement.feasibility import cannot_run
from placement.fleet import fleet_of
from placement.mixes import BatchChoices
from placement.search import Affinity, Mode
from placement.space import TOKEN_BUDGETS, asked_cluster, cluster_of

T = TypeVar("T")

#: How many seeds there are; the first is 0.
SEEDS: Final = 2**32

#: More requests in one step are a slip: no engine takes them, and each has its own part in the sum of a prefill step.
_MOST_REQUESTS: Final = 100_000


class _Phase(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


_TOP: Final = tuple(dict.fromkeys(key.name.split(".")[0] for key in KEYS))
_SECTIONS: Final = {
    name: tuple(key.name.partition(".")[2] for key in KEYS if key.name.startswith(f"{name}."))
    for name in ("slo", "search", "step", "queueing")
}


def parse_setting(section: Section, *, folder: Path) -> Setting:
    """Return the setting that `base` (with a task's factor values in it) says.

    Args:
        folder: that the paths of profiles and traces start from: the sweep file's.

    Raises:
        InputError: `file:line`, the key, what is wrong with it and what to do.
    """
    section.only(_TOP)
    measure = choice_at(section, "measure", Measure.SIMULATE)
    step, queueing = _step(section), _queueing(section)
    profiles = profiles_of(section, measure, folder=folder)
    search = _search(section, profiles, mixes_of_setting(section, measure, folder=folder), measure)
    placement = _placement(section, needed=measure in {Measure.SIMULATE, Measure.GOODPUT})
    if placement is not None:
        placement = on_gpus(section, placement, profiles)
    phase = _phase(section, placement)
    kv_blocks = whole_at(section, "kv_blocks", at_least=1)
    if placement is not None and profiles and measure in {Measure.SIMULATE, Measure.GOODPUT}:
        profiles = _with_kv_blocks(profiles, placement, kv_blocks)
        _check_placement(section, placement, profiles)
        placement = _on_nodes(section, placement, profiles[placement.pools[0].role].gpu)
    gpus = _gpus(measure, placement, phase, queueing)
    setting = Setting(
        measure=measure,
        profiles=profiles,
        placement=placement,
        phase=phase,
        traffic=traffic_of(section, measure, profiles, folder=folder, gpus=gpus),
        slo=_slo(section),
        attainment=share_at(section, "attainment", 0.9),
        options=_options(section, profiles),
        kv_blocks=kv_blocks,
        seed=whole_at(section, "seed", at_least=0, at_most=SEEDS - 1) or 0,
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
    if setting.measure not in {Measure.SIMULATE, Measure.STEP} and setting.traffic.workload is None:
        raise section.need("trace").error("is for measure simulate", "leave it out, and give workload")
    if setting.measure is Measure.STEP:
        section.need("step")
        _check_step(section, setting)
    if setting.measure is Measure.QUEUEING:
        section.need("queueing")


# Placement


def _placement(section: Section, *, needed: bool) -> Placement | None:
    field = section.need("placement") if needed else section.get("placement")
    if field is None:
        return None
    policy, budget = section.get("policy"), whole_at(section, "token_budget", at_least=1)
    chosen = None if policy is None else policy.choice(Policy)
    with placed(section, "placement"):
        placement = Placement.parse(field.text(), policy=chosen or Policy.PREFILL_FIRST, token_budget=budget)
    if policy is not None and not placement.is_colocated:
        raise policy.error("belongs to colocated placements", "as in placement: 1xC:tp1pp1, or leave it out")
    if budget is not None and chosen is not Policy.CHUNKED:
        raise section.need("token_budget").error("belongs to policy chunked", "add policy: chunked, or leave it out")
    return placement


def _with_kv_blocks(profiles: dict[Role, Profile], placement: Placement, kv_blocks: int | None) -> dict[Role, Profile]:
    if kv_blocks is None:
        return profiles
    return {role: profile.with_kv_blocks(placement, kv_blocks) for role, profile in profiles.items()}


def _check_placement(section: Section, placement: Placement, profiles: Mapping[Role, Profile]) -> None:
    """Refuse a placement that cannot run, with every reason."""
    found = cannot_run(placement, profiles)
    if found:
        hint = "change the parallel degrees, or give a profile that has them"
        raise section.need("placement").error("cannot run: " + "; ".join(dict.fromkeys(found)), hint)


def _on_nodes(section: Section, placement: Placement, gpu: Gpu) -> Placement:
    """Return the placement packed onto the nodes that the section names."""
    nodes = whole_at(section, "nodes", at_least=1, at_most=10_000)
    if nodes is None:
        for key in ("gpus_per_node", "affinity"):
            if key in section:
                raise section.need(key).error("belongs to nodes", "add nodes, or leave it out")
        return placement
    per_node = whole_at(section, "gpus_per_node", at_least=1, at_most=1024) or gpu.gpus_per_node
    low = choice_at(section, "affinity", Affinity.HIGH) is Affinity.LOW
    cluster = cluster_of(gpu, num_gpus=nodes * per_node, gpus_per_node=per_node, side_by_side=low)
    if not cluster.packs(placement):
        rule = f"are too few for {placement}: its instances do not pack into nodes of {per_node} GPUs"
        raise section.need("nodes").error(rule, "give more nodes, or smaller instances")
    return cluster.on(placement)


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


# Limits and options


def _slo(section: Section) -> Slo | None:
    field = section.get("slo")
    scale = 1.0 if "slo_scale" not in section else section.need("slo_scale").number(at_least=1e-6, at_most=1e6)
    if field is None:
        return None
    if isinstance(field.value, str):
        with placed(section, "slo"):
            slo = parse_slo(field.value)
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
    batching = choice_at(section, "prefill_batching", PrefillBatching.ENGINE)
    limit = None
    if profiles:
        with placed(section, "prefill_batching"):
            limit = profiles[Role.PREFILL].prefill_token_limit(batching)
    return Options(
        prefill_routing=choice_at(section, "prefill_routing", Routing.JOIN_SHORTEST_QUEUE),
        decode_routing=choice_at(section, "decode_routing", Routing.LEAST_LOADED),
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


def _search(
    section: Section, profiles: Mapping[Role, Profile], mixes: tuple[Mapping[Role, Profile], ...], measure: Measure
) -> SearchSetting | None:
    field = section.get("search")
    if not profiles:
        return None
    asked = Section(Field(section.field.file, section.field.line, "search", {})) if field is None else field.section()
    asked.only(_SECTIONS["search"])
    affinity = choice_at(asked, "affinity", Affinity.HIGH)
    mode, fleet = choice_at(asked, "mode", Mode.BOTH), None
    searched = mixes if measure is Measure.SEARCH else ()
    batches = _batches(section, asked, searched or (profiles,))
    method = choice_at(asked, "method", Method.FULL)
    if searched and method is Method.AUTHORS:
        raise asked.need("method").error("compares placements on GPUs of one type", "leave it out")
    with placed(asked, "gpus"):
        nodes = whole_at(asked, "nodes", at_least=1)
        gpus_per_node = whole_at(asked, "gpus_per_node", at_least=1, at_most=1024)
        if searched:
            gpus = asked.get("gpus")
            fleet = fleet_of(
                {role: [mix[role] for mix in searched if role in mix] for role in Role},
                roles=[role for role in Role if any(role in mix for mix in searched)],
                gpus=None if gpus is None else str(gpus.value),
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                side_by_side=affinity is Affinity.LOW,
            )
            cluster = fleet.all
        else:
            cluster = asked_cluster(
                profiles[Role.PREFILL].gpu,
                gpus=whole_at(asked, "gpus", at_least=1),
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                side_by_side=affinity is Affinity.LOW,
            )
    policies = _listed(asked, "policies", lambda item: item.choice(Policy))
    budgets = _listed(asked, "token_budgets", lambda item: item.integer(at_least=1, at_most=1_000_000_000))
    return SearchSetting(
        cluster=cluster,
        affinity=affinity,
        mode=mode,
        policies=policies or tuple(Policy),
        token_budgets=budgets or TOKEN_BUDGETS,
        top=whole_at(asked, "top", at_least=1, at_most=1000) or 3,
        precision=share_at(asked, "precision", 0.03),
        requests=whole_at(asked, "requests", at_least=10),
        method=method,
        timing=asked.flag("timing", default=False),
        jobs=whole_at(asked, "jobs", at_least=1, at_most=1024),
        mixes=searched,
        fleet=fleet,
        batches=batches,
    )


def _batches(section: Section, asked: Section, mixes: Sequence[Mapping[Role, Profile]]) -> BatchChoices:
    """Return the limits of a batch that a search tries."""
    found = {}
    for key in ("max_batch_tokens", "max_batch_requests"):
        field = asked.get(key)
        value = None if field is None else field.value
        found[key] = str(value) if isinstance(value, int) and not isinstance(value, bool) else text_at(asked, key)
        with placed(asked, key):
            parse_batches(**{"max_batch_tokens": None, "max_batch_requests": None, key: found[key]})
    batches = parse_batches(**found)
    with placed(asked, "max_batch_tokens"):
        for mix in mixes:
            batches.check_lm(mix)
    if section.get("prefill_batching") is None or section.need("prefill_batching").value != PrefillBatching.LM.value:
        return batches
    if found["max_batch_tokens"] is not None:
        raise section.need("prefill_batching").error("stands beside search.max_batch_tokens", "leave one of them out")
    if len(mixes) > 1:
        raise section.need("prefill_batching").error("is of one GPU", "write search.max_batch_tokens: prefill=lm")
    return batches


def _listed(section: Section, key: str, read: Callable[[Field], T]) -> tuple[T, ...]:
    """Return the different values of a list; an empty tuple where it is not given."""
    field = section.get(key)
    if field is None:
        return ()
    values: list[T] = []
    for item in field.items():
        value = read(item)
        if value in values:
            raise item.error("stands twice", "keep one of the two")
        values.append(value)
    if not values:
        raise field.error("must not be empty", "list at least one value, or leave the key out")
    return tuple(values)


def _step(section: Section) -> StepSetting | None:
    field = section.get("step")
    if field is None:
        return None
    step = field.section().only(_SECTIONS["step"])
    phase = step.need("phase").choice(StepPhase)
    prefills, decodes = phase is not StepPhase.DECODE, phase is not StepPhase.PREFILL
    alone = phase is StepPhase.CHUNKED and whole_at(step, "batch", at_least=0) == 0
    return StepSetting(
        phase=phase,
        tp=step.integer("tp", 1, at_least=1),
        pp=step.integer("pp", 1, at_least=1),
        batch=step.integer("batch", 1, at_least=0 if phase is StepPhase.CHUNKED else 1, at_most=_MOST_REQUESTS),
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
    layers = profile.model.layers
    if layers % step.pp:
        raise fields.need("pp").error(
            f"does not divide the {layers} layers of {profile.model.name}", "take one that does"
        )
    longest = profile.model.context_tokens
    for key, value in (("prompt_tokens", step.prompt_tokens), ("context_tokens", step.context_tokens)):
        if value > longest:
            rule = f"is longer than the context of {profile.model.name}, {longest} tokens"
            raise fields.need(key).error(rule, "take less, or a model with a longer context")
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
