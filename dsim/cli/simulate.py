"""`dsim simulate`: one placement under one workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.config import rerun_text
from dsim.cli.handover import with_asked_handover
from dsim.cli.inputs import described_profiles, introduction, number_of, rate_per_s, seconds, whole
from dsim.cli.kv_blocks import kv_sources, with_kv_blocks
from dsim.cli.nodes import Affinity, GpusPerNode, NicText, Nodes, layout_lines, on_nodes
from dsim.cli.options import (
    ArrivalsText,
    Assignments,
    Config,
    DryRun,
    EngineName,
    EvidenceOption,
    ExpertsOption,
    Format,
    FormatOption,
    GpuName,
    HandoverText,
    KvBlocksText,
    KvDtypeOption,
    KvLinkText,
    ModelName,
    NoColor,
    OutputDirectory,
    Overwrite,
    PrefillBatchingOption,
    ProfileFile,
    Quiet,
    Seed,
    SloOption,
    WorkloadText,
    file_path,
    whole_number,
)
from dsim.cli.pools import DecodeGpu, DecodeProfile, Placed, PrefillGpu, PrefillProfile, RoleOptions
from dsim.cli.pools import placed as apart
from dsim.errors import InfeasiblePlacementError, InputError, by_option
from dsim.options import ExpertSharing, KvDtype, Options, PrefillBatching, Routing, Window
from dsim.pools import Placement, Policy, Role
from dsim.slo import Slo, parse_slo

if TYPE_CHECKING:
    from dsim.aggregates import Aggregates
    from dsim.profile import Profile
    from dsim.result import Result
    from dsim.trace import Trace
    from dsim.workload import ClosedLoop

#: What --step-log writes beside the other files.
_LOG_FILES = ("steps.csv", "kv.csv", "all_requests.csv")


def simulate(
    context: typer.Context,
    *,
    placement: Annotated[
        str,
        typer.Option(
            "--placement", "-p", metavar="POOLS", help='"1xP:tp2pp1 + 1xD:tp1pp1", or "2xC:tp1pp1" colocated.'
        ),
    ],
    model: ModelName = None,
    gpu: GpuName = None,
    engine: EngineName = None,
    profile: ProfileFile = None,
    prefill_gpu: PrefillGpu = None,
    decode_gpu: DecodeGpu = None,
    prefill_profile: PrefillProfile = None,
    decode_profile: DecodeProfile = None,
    evidence: EvidenceOption = None,
    experts: ExpertsOption = ExpertSharing.TP,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    slo: Annotated[str | None, SloOption] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", "-r", metavar="RATE", help="Requests per second of all instances together.")
    ] = None,
    workload: WorkloadText = None,
    arrivals: ArrivalsText = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", parser=whole_number, metavar="N", help="Requests that count. [default: 10000]"
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            parser=whole_number,
            metavar="N",
            help="Requests before them, not counted. [default: 1000; finite runs 0]",
        ),
    ] = None,
    finite: Annotated[
        bool,
        typer.Option("--finite", help="Stop arrivals after the last counted request: a transient, as papers run it."),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            parser=file_path,
            metavar="FILE",
            help="Replay arrival_s, prompt_tokens, output_tokens from CSV or JSONL.",
        ),
    ] = None,
    closed_loop: Annotated[
        int | None,
        typer.Option(
            "--closed-loop",
            parser=whole_number,
            metavar="USERS",
            help="Users who each send when their last request is done.",
        ),
    ] = None,
    turnaround: Annotated[
        str | None, typer.Option("--turnaround", metavar="TIME", help="A user's pause between requests. [default: 0]")
    ] = None,
    stagger: Annotated[
        str | None, typer.Option("--stagger", metavar="TIME", help="Time between the users' starts. [default: 0]")
    ] = None,
    skip_first_wave: Annotated[
        bool, typer.Option("--skip-first-wave", help="Do not count the first request of each user.")
    ] = False,
    policy: Annotated[
        Policy | None, typer.Option("--policy", help="Scheduling of colocated instances. [default: prefill-first]")
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget", parser=whole_number, metavar="N", help="Tokens per step of chunked. [default: 2048]"
        ),
    ] = None,
    prefill_routing: Annotated[
        Routing, typer.Option("--prefill-routing", help="Also of colocated instances.")
    ] = Routing.JOIN_SHORTEST_QUEUE,
    decode_routing: Annotated[
        Routing, typer.Option("--decode-routing", help="Which decode instance pulls a prompt.")
    ] = Routing.LEAST_LOADED,
    prefill_batching: PrefillBatchingOption = PrefillBatching.ENGINE,
    kv_blocks: KvBlocksText = None,
    handover: HandoverText = None,
    kv_link: KvLinkText = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    affinity: Affinity = None,
    nic: NicText = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Go beyond the profile's valid range; the result says so.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify the conservation laws on the result.")] = False,
    step_log: Annotated[
        bool,
        typer.Option("--step-log", help="Also write every batch and all KV use, to steps.csv and kv.csv; needs -o."),
    ] = False,
    aggregate: Annotated[
        bool,
        typer.Option(
            "--aggregate",
            help="Keep statistics only: memory does not grow with the requests; percentiles are within 0.1 %.",
        ),
    ] = False,
    seed: Seed = 0,
    output_format: FormatOption = Format.TABLE,
    output_dir: OutputDirectory = None,
    overwrite: Overwrite = False,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Simulate one placement under one workload and print its latencies."""
    from dsim.aggregates import Aggregates
    from profiles.choice import Variant, choose_profile
    from profiles.mixed import Wanted

    del config, assignments
    whole("--seed", seed, at_least=0, at_most=2**32 - 1)
    limits = None if slo is None else parse_slo(slo)
    placed = _placement(placement, policy=policy, token_budget=token_budget)
    variant = Variant(experts, kv_dtype)
    roles = RoleOptions(gpus=(prefill_gpu, decode_gpu, None), files=(prefill_profile, decode_profile, None))
    wanted = Wanted(model=model, gpu=gpu, engine=engine, profile=profile, evidence=evidence, variant=variant)
    mixed = apart(placed, wanted, roles, handover=handover, kv_link=kv_link, nic=nic, nodes=nodes)
    if mixed is not None:
        used, placed = mixed.front, mixed.placement
        profiles = with_kv_blocks(mixed.profiles, kv_blocks)
    else:
        used = choose_profile(model=model, gpu=gpu, engine=engine, file=profile, evidence=evidence, variant=variant)
        used = with_asked_handover(used, placed, handover, kv_link, nic=nic, nodes=nodes)
        profiles = with_kv_blocks(dict.fromkeys(Role, used), kv_blocks)
    _check_placement(placement, placed, profiles)
    placed = on_nodes(placed, used.gpu, nodes=nodes, gpus_per_node=gpus_per_node, affinity=affinity)
    traffic = _traffic(
        _Asked(
            rate=rate,
            workload=workload,
            arrivals=arrivals,
            requests=requests,
            warmup=warmup,
            finite=finite,
            trace=trace,
            closed_loop=closed_loop,
            turnaround=turnaround,
            stagger=stagger,
            skip_first_wave=skip_first_wave,
            aggregate=aggregate,
        ),
        used,
        seed=seed,
    )
    options = Options(
        seed=seed,
        prefill_routing=prefill_routing,
        decode_routing=decode_routing,
        prefill_token_limit=used.prefill_token_limit(prefill_batching),
        log_steps=step_log,
        check=check,
        extrapolate=extrapolate,
    )
    for option, given in (("--step-log", step_log), ("--check", check)):
        if aggregate and given:
            hint = "leave it or --aggregate out"
            raise InputError(option, "needs every request, of which --aggregate keeps none", hint=hint)
    if step_log and output_dir is None:
        raise InputError("--step-log", "needs a place to write to", hint="add --output-dir DIR")
    of_requests = [] if aggregate else ["requests.csv"]
    names = ["summary.json", *of_requests, "config.yaml", *(_LOG_FILES if step_log else [])]
    if output_dir is not None:
        from dsim.cli.output import OutputFolder

        folder = OutputFolder(output_dir, overwrite=overwrite)
        folder.check(names)
    asked = _Run(
        used,
        profiles,
        placed,
        traffic,
        limits,
        model=model,
        extrapolate=extrapolate,
        handover_asked=(handover or kv_link or nic) is not None,
        mixed=mixed,
    )
    if dry_run:
        _print_plan(asked, output_format=output_format, files=names if output_dir is not None else [])
        return 0
    result = _simulated(asked, options, aggregate=aggregate)
    summary = _summary(asked, result)
    if output_dir is not None:
        from dsim.cli.output import to_json

        files = {"summary.json": to_json(summary), "config.yaml": rerun_text(context)}
        if not isinstance(result, Aggregates):
            files["requests.csv"] = result.to_frame().to_csv(index_label="request", lineterminator="\n")
            if step_log:
                files |= _log_files(result)
        folder.write(files)
    _print(asked, result, summary, output_format=output_format, no_color=no_color)
    if output_dir is not None:
        from dsim.cli.output import note

        note(f"wrote {', '.join(names)} to {output_dir}", quiet=quiet)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options that say which requests come."""

    rate: str | None
    workload: str | None
    arrivals: str | None
    requests: int | None
    warmup: int | None
    finite: bool
    trace: Path | None
    closed_loop: int | None
    turnaround: str | None
    stagger: str | None
    skip_first_wave: bool
    aggregate: bool


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The requests of a run, which of them count, and how to call it."""

    source: Trace | Iterator[Trace] | ClosedLoop
    window: Window
    label: str
    described: dict[str, Any]
    num_requests: int | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that was asked for."""

    profile: Profile
    profiles: Mapping[Role, Profile]
    placement: Placement
    traffic: _Traffic
    slo: Slo | None
    model: str | None
    extrapolate: bool
    handover_asked: bool
    mixed: Placed | None

    def heading(self) -> list[str]:
        """Return the lines that say what was simulated on what."""
        from profiles.handover import handover_line

        if self.mixed is not None:
            return self.mixed.heading(self.model)
        lines = introduction(self.profile, asked=self.model)
        if self.handover_asked:
            lines.append(handover_line(self.profile, across=self.placement.nodes is not None))
        return [*lines, *layout_lines(self.placement, self.profile)]


def _placement(text: str, *, policy: Policy | None, token_budget: int | None) -> Placement:
    if token_budget is not None:
        whole("--token-budget", token_budget, at_least=1)
    placed = Placement.parse(text, policy=policy or Policy.PREFILL_FIRST, token_budget=token_budget)
    if policy is not None and not placed.is_colocated:
        raise InputError("--policy", "belongs to colocated placements", value=policy.value, hint="as in 1xC:tp1pp1")
    if token_budget is not None and policy is not Policy.CHUNKED:
        raise InputError(
            "--token-budget", "belongs to --policy chunked", value=token_budget, hint="add --policy chunked"
        )
    return placed


def _check_placement(text: str, placed: Placement, profiles: Mapping[Role, Profile]) -> None:
    """Refuse a placement that cannot run, with every reason."""
    from placement.feasibility import cannot_run

    found = cannot_run(placed, profiles)
    if found:
        raise _cannot_run(text, found)


def _cannot_run(text: str, reasons: tuple[str, ...]) -> InputError:
    hint = "change the parallel degrees, or give a --profile that has them"
    return InputError("--placement", "cannot run: " + "; ".join(dict.fromkeys(reasons)), value=text, hint=hint)


def _traffic(asked: _Asked, profile: Profile, *, seed: int) -> _Traffic:
    if asked.requests is not None:
        whole("--requests", asked.requests, at_least=1)
    if asked.warmup is not None:
        whole("--warmup", asked.warmup, at_least=0)
    _check_combination(asked)
    try:
        if asked.trace is not None:
            return _replayed(asked, asked.trace, profile)
        if asked.closed_loop is not None:
            return _looped(asked, asked.closed_loop)
        return _generated(asked, profile, seed=seed)
    except InputError as error:
        raise by_option(error) from None


def _check_combination(asked: _Asked) -> None:
    """Refuse options of one kind of traffic beside another kind."""
    replays, loops = asked.trace is not None, asked.closed_loop is not None
    if not replays and not loops and asked.rate is None and not _has_own_rate(asked.arrivals):
        hint = "as in --rate 6; or replay with --trace FILE, or close the loop with --closed-loop USERS"
        raise InputError("--rate", "is needed", hint=hint)
    chosen = "--trace" if replays else "--closed-loop" if loops else "an open loop"
    foreign: dict[str, object] = {}
    if replays:
        foreign |= {"--closed-loop": asked.closed_loop, "--workload": asked.workload}
    if replays or loops:
        foreign |= {"--rate": asked.rate, "--arrivals": asked.arrivals, "--finite": asked.finite or None}
    if not loops:
        foreign |= {
            "--turnaround": asked.turnaround,
            "--stagger": asked.stagger,
            "--skip-first-wave": asked.skip_first_wave or None,
        }
    for option, value in foreign.items():
        if value is not None:
            shown = None if value is True else value
            raise InputError(option, f"does not go with {chosen}", value=shown, hint="leave one of the two out")


def _has_own_rate(arrivals: str | None) -> bool:
    """Return whether the arrivals are those of a file."""
    return arrivals is not None and arrivals.partition(":")[0] not in ("poisson", "constant", "gamma")


def _replayed(asked: _Asked, path: Path, profile: Profile) -> _Traffic:
    from dsim.workload.traces import read_trace

    trace = read_trace(path, context_tokens=profile.model.context_tokens)
    warmup = asked.warmup or 0
    rows = len(trace) if asked.requests is None else warmup + asked.requests
    if rows > len(trace) or warmup >= len(trace):
        option = "--warmup" if asked.requests is None else "--requests"
        hint = f"{path} has {len(trace)} requests"
        raise InputError(option, "asks for more requests than the trace has", value=rows, hint=hint)
    counted = rows - warmup
    return _Traffic(
        trace.first(rows),
        Window(warmup=warmup),
        f"{counted} requests replayed from {path}" + (f" after {warmup} of warm-up" if warmup else ""),
        {"kind": "trace", "trace": str(path), "warmup": warmup, "requests": counted},
    )


def _looped(asked: _Asked, users: int) -> _Traffic:
    from dsim.workload import DEFAULT_REQUESTS, ClosedLoop
    from dsim.workload.parse import parse_workload

    whole("--closed-loop", users, at_least=1)
    text = "sharegpt" if asked.workload is None else asked.workload
    counted = DEFAULT_REQUESTS if asked.requests is None else asked.requests
    warmup = asked.warmup if asked.warmup is not None else users if asked.skip_first_wave else 0
    loop = ClosedLoop(
        users,
        parse_workload(text),
        counted + warmup,
        stagger_s=0.0 if asked.stagger is None else seconds("--stagger", asked.stagger),
        turnaround_s=0.0 if asked.turnaround is None else seconds("--turnaround", asked.turnaround),
    )
    return _Traffic(
        loop,
        Window(warmup=warmup),
        f"{counted} requests of {users} users in a closed loop, {text} lengths"
        + (f", after {warmup} of warm-up" if warmup else ""),
        {
            "kind": "closed_loop",
            "users": users,
            "workload": text,
            "turnaround_s": loop.turnaround_s,
            "stagger_s": loop.stagger_s,
            "warmup": warmup,
            "requests": counted,
        },
    )


def _generated(asked: _Asked, profile: Profile, *, seed: int) -> _Traffic:
    from dsim.workload import DEFAULT_REQUESTS, DEFAULT_WARMUP, Workload
    from dsim.workload.parse import parse_arrivals, parse_workload

    text = "sharegpt" if asked.workload is None else asked.workload
    process = "poisson" if asked.arrivals is None else asked.arrivals
    workload = Workload(parse_arrivals(process), parse_workload(text))
    rate = None if asked.rate is None else rate_per_s(asked.rate)
    counted = DEFAULT_REQUESTS if asked.requests is None else asked.requests
    warmup = asked.warmup if asked.warmup is not None else 0 if asked.finite else DEFAULT_WARMUP
    draw = {"seed": seed, "context_tokens": profile.model.context_tokens}
    source: Trace | Iterator[Trace]
    if asked.finite and asked.aggregate:
        source = workload.finite(num_requests=warmup + counted, rate_per_s=rate, **draw)
    elif asked.finite:
        source = workload.trace(num_requests=warmup + counted, rate_per_s=rate, **draw)
    else:
        source = workload.steady(num_requests=warmup + counted, rate_per_s=rate, **draw)
    shown_rate = rate if rate is not None else workload.arrivals.native_rate_per_s
    label = f"{counted} requests at {shown_rate:g}/s, {process} arrivals, {text} lengths"
    label += f", after {warmup} of warm-up" if warmup else ""
    label += "; a finite run, so a transient" if asked.finite else ""
    return _Traffic(
        source,
        Window(warmup=warmup) if asked.finite else Window(warmup=warmup, counted=counted),
        label,
        {
            "kind": "open_loop",
            "rate_per_s": shown_rate,
            "arrivals": process,
            "workload": text,
            "finite": asked.finite,
            "warmup": warmup,
            "requests": counted,
        },
        warmup + counted if asked.finite else None,
    )


def _simulated(asked: _Run, options: Options, *, aggregate: bool) -> Result | Aggregates:
    from dsim.simulate import aggregate as add_up
    from dsim.simulate import simulate as run

    placement, profiles, traffic = asked.placement, asked.profiles, asked.traffic
    source, window = traffic.source, traffic.window
    try:
        if not aggregate:
            return run(placement, source, profiles=profiles, options=options, window=window)
        return add_up(
            placement,
            source,
            profiles=profiles,
            slo=asked.slo,
            options=options,
            window=window,
            num_requests=traffic.num_requests,
        )
    except InfeasiblePlacementError as error:
        raise _cannot_run(str(asked.placement), error.reasons) from None
    except InputError as error:
        raise by_option(error) from None


def _described(asked: _Run) -> dict[str, Any]:
    profile, slo = asked.profile, asked.slo
    return {
        "placement": str(asked.placement),
        "policy": None if asked.placement.pools[0].policy is None else asked.placement.pools[0].policy.value,
        "token_budget": asked.placement.pools[0].token_budget,
        "num_gpus": asked.placement.num_gpus,
        **asked.placement.layout_dict(),
        "model": profile.model.name,
        "hugging_face": profile.model.hugging_face,
        "gpu": profile.gpu.name,
        "engine": profile.engine,
        "profile": {
            "name": profile.name,
            "sha256": profile.sha256,
            "source": profile.source,
            "evidence": profile.evidence.value,
            "expected_error": profile.expected_error,
        },
        "profiles": described_profiles(asked.profiles, [pool.role for pool in asked.placement.pools]),
        "extrapolated": asked.extrapolate,
        "slo": None if slo is None else {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s},
        "traffic": asked.traffic.described,
    }


def _summary(asked: _Run, result: Result | Aggregates) -> dict[str, Any]:
    from dsim.aggregates import Aggregates

    summary = result.summary() if isinstance(result, Aggregates) else result.summary(asked.slo or Slo())
    if asked.slo is None:
        summary["attainment"] = summary["good_throughput_per_s"] = None
    return {**summary, **_described(asked), "kv_source": kv_sources(result.profiles, asked.placement)}


def _print_plan(asked: _Run, *, output_format: Format, files: list[str]) -> None:
    from dsim.cli.output import emit, to_csv, to_json

    plan = {**_described(asked), "files": files}
    if output_format is Format.JSON:
        emit(to_json(plan))
    elif output_format is Format.CSV:
        emit(to_csv([plan]))
    else:
        lines = [*asked.heading(), f"would simulate {_what(asked)}"]
        emit("\n".join([*lines, *([f"would write {', '.join(files)}"] if files else [])]) + "\n")


def _what(asked: _Run) -> str:
    return f"{asked.placement.label} on {number_of(asked.placement.num_gpus, 'GPU')}: {asked.traffic.label}"


def _print(
    asked: _Run,
    result: Result | Aggregates,
    summary: dict[str, Any],
    *,
    output_format: Format,
    no_color: bool,
) -> None:
    from dsim.cli.output import emit, show, to_csv, to_json, use_color

    if output_format is Format.JSON:
        emit(to_json(summary))
    elif output_format is Format.CSV:
        emit(to_csv([summary]))
    else:
        from dsim.cli.tables import run_parts
        from dsim.profile import range_remarks

        lines = [*asked.heading(), f"{_what(asked)}, seed {summary['seed']}"]
        if asked.extrapolate:
            lines.append("extrapolated: steps may lie outside the range that the profile was measured on")
        lines += range_remarks(result.profiles, [result.placement])
        if "percentile_error" in summary:
            lines.append(f"percentiles within {summary['percentile_error']:.1%}: only aggregates were kept")
        show("\n".join(lines), *run_parts(result, summary, asked.slo), color=use_color(no_color=no_color))


def _log_files(result: Result) -> dict[str, str]:
    """Return what --step-log writes, by name: what `dsim plot` draws a timeline from."""
    from dataclasses import asdict, fields

    from dsim.cli.output import to_csv
    from dsim.records import KvRecord

    every = result.arrivals().to_csv(index_label="request", lineterminator="\n")
    kv = to_csv([asdict(change) for change in result.kv or ()], [field.name for field in fields(KvRecord)])
    return dict(zip(_LOG_FILES, (_steps_csv(result), kv, every), strict=True))


def _steps_csv(result: Result) -> str:
    from dsim.cli.output import to_csv

    return to_csv(
        [
            {
                "role": step.role,
                "instance": step.instance,
                "part": step.part,
                "launch_s": step.launch_s,
                "end_s": step.end_s,
                "prefill": " ".join(map(str, step.prefill)),
                "decode": " ".join(map(str, step.decode)),
            }
            for step in result.steps or ()
        ],
        ["role", "instance", "part", "launch_s", "end_s", "prefill", "decode"],
    )
