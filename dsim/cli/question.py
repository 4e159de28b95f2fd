"""The question that the options of a search ask, and how an answer names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsim.cli.groups import ModelOptions
from dsim.cli.handover import HandoverOptions
from dsim.cli.inputs import (
    described_profiles,
    described_slo,
    display_name,
    evidence_lines,
    number_of,
    seed_of,
    source_line,
    whole,
)
from dsim.cli.kinds import check_kinds
from dsim.cli.kv_blocks import with_kv_blocks
from dsim.cli.mixes import described_mixes, fleet_line, mixed_gpus, mixed_introduction
from dsim.cli.options import (
    Affinity,
    AffinityChoice,
    ArrivalsText,
    Attainment,
    ColocatedEngine,
    ColocatedGpu,
    ColocatedProfile,
    Confidence,
    Extrapolate,
    Gpus,
    GpusPerNode,
    KvBlocksText,
    MaxBatchRequests,
    MaxBatchTokens,
    Mode,
    ModeChoice,
    Policies,
    Precision,
    PrefillBatchingOption,
    Seed,
    Slo,
    TokenBudgets,
    WholeNodes,
    WorkloadText,
)
from dsim.cli.pools import Chosen, PairOptions, asked_batches, asked_budgets, check_lm, roles_of, whole_number_of_gpus
from dsim.errors import InputError, by_option
from dsim.options import Options, PrefillBatching
from dsim.pools import Policy, Role
from dsim.slo import parse_slo
from dsim.units import parse_share

if TYPE_CHECKING:
    from dsim.profile import Profile
    from placement.mixes import BatchChoices
    from placement.search import Question
    from placement.space import Cluster


#: Levels of intervals: an interval that is missed more often than not says nothing, and few runs do not tell of tails.
_LEVELS = (0.5, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions:
    """What a search compares, for which requests, within which limits: of `dsim search`, and of `dsim size`."""

    slo: Slo
    models: ModelOptions
    colocated_engine: ColocatedEngine = None
    colocated_profile: ColocatedProfile = None
    pair: PairOptions
    colocated_gpu: ColocatedGpu = None
    gpus: Gpus = None
    nodes: WholeNodes = None
    gpus_per_node: GpusPerNode = None
    workload: WorkloadText = None
    arrivals: ArrivalsText = None
    attainment: Attainment = "0.9"
    affinity: Affinity = AffinityChoice.HIGH
    mode: Mode = ModeChoice.BOTH
    policy: Policies = None
    prefill_batching: PrefillBatchingOption = PrefillBatching.ENGINE
    max_batch_tokens: MaxBatchTokens = None
    max_batch_requests: MaxBatchRequests = None
    token_budgets: TokenBudgets = None
    kv_blocks: KvBlocksText = None
    handover: HandoverOptions
    precision: Precision = "0.03"
    confidence: Confidence = "0.95"
    extrapolate: Extrapolate = False
    seed: Seed = 0

    @property
    def side_by_side(self) -> bool:
        """Whether the stages of a prefill and a decode instance lie side by side."""
        return self.affinity is AffinityChoice.LOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the answer's heading says."""

    model: str | None
    workload: str
    arrivals: str
    used: Profile
    colocated: Profile
    handover_asked: bool = False
    mixed: Chosen | None = None


def resolved(
    options: QuestionOptions,
    *,
    requests: int | None = None,
    top: int = 3,
) -> tuple[Asked, Question]:
    """Return the question that the options of a search ask.

    Raises:
        InputError: a value cannot be used.
    """
    from profiles.choice import choose_colocated

    models, handover = options.models, options.handover
    seed_of(options.seed)
    parse_slo(options.slo)
    batches = asked_batches(options.prefill_batching, options.max_batch_tokens, options.max_batch_requests)
    check_kinds(options)
    roles = options.pair.beside(options.colocated_gpu, options.colocated_profile)
    mixed = None
    if roles.are_given or (options.gpus is not None and "=" in options.gpus):
        mixed = roles.chosen(
            models.wanted(options.colocated_engine),
            roles=roles_of(options.mode.value),
            gpus=options.gpus,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            side_by_side=options.side_by_side,
            handover=handover,
        )
        used, colocated, cluster = mixed.first(Role.PREFILL), mixed.first(Role.COLOCATED), mixed.fleet.all
        if options.prefill_batching is PrefillBatching.LM:
            batches = batches.with_lm()
    else:
        used = models.chosen()
        colocated = choose_colocated(
            used, engine=options.colocated_engine, file=options.colocated_profile, variant=models.variant
        )
        cluster = _cluster(options, used)
        handing = handover.of(used)
        if colocated is used:
            # Nothing else is about colocated placements: they stay what they are, under one name.
            colocated = handing
        used = handing
    asked = Asked(
        model=models.model,
        workload="sharegpt" if options.workload is None else options.workload,
        arrivals="poisson" if options.arrivals is None else options.arrivals,
        used=used,
        colocated=colocated,
        handover_asked=handover.are_given,
        mixed=mixed,
    )
    try:
        question = _question(options, asked, cluster=cluster, batches=batches, requests=requests, top=top)
    except InputError as error:
        raise by_option(error) from None
    return asked, question


def _cluster(options: QuestionOptions, used: Profile) -> Cluster:
    """Return the GPUs that there are."""
    from placement.space import asked_cluster

    gpus, nodes = whole_number_of_gpus(options.gpus), options.nodes
    for option, value, most in (
        ("--gpus-per-node", options.gpus_per_node, 1024),
        ("--nodes", nodes, 10_000),
        ("--gpus", gpus, 100_000),
    ):
        if value is not None:
            whole(option, value, at_least=1, at_most=most)
    return asked_cluster(
        used.gpu, gpus=gpus, nodes=nodes, gpus_per_node=options.gpus_per_node, side_by_side=options.side_by_side
    )


def _question(
    options: QuestionOptions,
    asked: Asked,
    *,
    cluster: Cluster,
    batches: BatchChoices,
    requests: int | None,
    top: int,
) -> Question:
    from dsim.workload import Workload
    from dsim.workload.parse import parse_arrivals, parse_workload
    from placement.search import Affinity, Mode, Question

    attainment = parse_share(options.attainment, "--attainment")
    precision = parse_share(options.precision, "--precision")
    confidence = _confidence(options.confidence)
    mixed, seed, kv_blocks = asked.mixed, options.seed, options.kv_blocks
    token_limit = None if mixed is not None else asked.used.prefill_token_limit(options.prefill_batching)
    token_budgets = asked_budgets(options.token_budgets)
    num_requests = None if requests is None else whole("--requests", requests, at_least=10)
    whole("--top", top, at_least=1, at_most=1000)
    workload = Workload(parse_arrivals(asked.arrivals), parse_workload(asked.workload))
    # Requests are drawn when they are needed: see now whether they can be.
    workload.trace(num_requests=1, seed=seed, context_tokens=asked.used.model.context_tokens, rate_per_s=1.0)
    profiles = {Role.PREFILL: asked.used, Role.DECODE: asked.used, Role.COLOCATED: asked.colocated}
    question = Question(
        profiles=with_kv_blocks(profiles if mixed is None else mixed.profiles, kv_blocks),
        mixes=() if mixed is None else tuple(with_kv_blocks(mix, kv_blocks) for mix in mixed.mixes),
        fleet=None if mixed is None else mixed.fleet,
        batches=batches,
        token_budgets=token_budgets,
        workload=workload,
        slo=parse_slo(options.slo),
        attainment=attainment,
        num_gpus=cluster.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        affinity=Affinity(options.affinity.value),
        mode=Mode(options.mode.value),
        policies=tuple(dict.fromkeys(options.policy or Policy)),
        seed=seed,
        top=top,
        precision=precision,
        confidence=confidence,
        num_requests=num_requests,
        options=Options(seed=seed, prefill_token_limit=token_limit, extrapolate=options.extrapolate),
    )
    check_lm(question)
    return question


def _confidence(text: str) -> float:
    """Return the level of the intervals.

    Raises:
        InputError: it is none that an interval of so few runs can have, or that says anything.
    """
    level = parse_share(text, "--confidence")
    least, most = _LEVELS
    # 99.9 / 100 is a little more than 0.999.
    if not least <= round(level, 9) <= most:
        raise InputError("--confidence", f"must be {least:g} to {most:g}", value=text, hint="as in 0.95 or 95%")
    return level


def described(asked: Asked, question: Question) -> dict[str, Any]:
    """Return what the answer depends on, beside the question itself."""
    return {
        "model": asked.used.model.name,
        "hugging_face": asked.used.model.hugging_face,
        "gpu": mixed_gpus(question),
        "num_gpus": question.cluster.num_gpus,
        "slo": described_slo(question.slo),
        "attainment_target": question.attainment,
        "workload": asked.workload,
        "arrivals": asked.arrivals,
        "profiles": described_profiles(question.profiles, question.roles),
        "mixes": described_mixes(question),
        "extrapolated": question.options.extrapolate,
        "seed": question.seed,
    }


def introduction(asked: Asked, question: Question) -> list[str]:
    """Return the lines that say what was asked and with which numbers."""
    from dsim.cli.tables import percent

    if question.fleet is not None:
        return [
            *mixed_introduction(question, model=asked.model),
            fleet_line(question),
            f"{asked.workload} lengths, {asked.arrivals} arrivals, {percent(question.attainment)} of requests within "
            f"{question.slo}, seed {question.seed}",
        ]
    model = asked.used.model
    name = f"{display_name(model)} ({model.hugging_face})"
    lines = [f"{asked.model} = {name} on {asked.used.gpu.name}" if asked.model else f"{name} on {asked.used.gpu.name}"]
    roles = {Role.PREFILL: "disaggregated", Role.COLOCATED: "colocated"}
    for role, kind in roles.items():
        if role in question.roles:
            lines.append(f"{kind}: {source_line(question.profiles[role])}")
    lines += dict.fromkeys(
        line for role in roles if role in question.roles for line in evidence_lines(question.profiles[role])
    )
    if asked.handover_asked and Role.DECODE in question.roles:
        from profiles.handover import handover_line

        across = question.cluster.num_nodes > 1
        lines.append(handover_line(question.profiles[Role.DECODE], across=across))
    cluster = question.cluster
    nodes = f"{number_of(cluster.num_nodes, 'node')} of {cluster.gpus_per_node}"
    lines.append(
        f"at most {number_of(cluster.num_gpus, 'GPU')} ({nodes}), {asked.workload} lengths, {asked.arrivals} arrivals, "
        f"{percent(question.attainment)} of requests within {question.slo}, seed {question.seed}"
    )
    return lines
