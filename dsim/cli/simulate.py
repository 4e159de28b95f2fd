"""`dsim simulate`: one placement under one workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.config import rerun_text
from dsim.cli.groups import CommonOptions, ModelOptions, grouped
from dsim.cli.handover import HandoverOptions, with_asked_handover
from dsim.cli.inputs import (
    check_runs,
    described_profile,
    described_profiles,
    described_slo,
    introduction,
    not_runnable,
    number_of,
    seed_of,
    whole,
)
from dsim.cli.kv_blocks import kv_sources, with_kv_blocks
from dsim.cli.nodes import NodeOptions, layout_lines, on_nodes
from dsim.cli.options import (
    Check,
    DecodeRouting,
    Extrapolate,
    Format,
    KvBlocksText,
    OutputDirectory,
    Overwrite,
    PlacementText,
    PrefillBatchingOption,
    PrefillRouting,
    Seed,
    SloOrNone,
    whole_number,
)
from dsim.cli.output import OutputFolder, emit, emit_data, note, show, to_csv, to_json, use_color
from dsim.cli.pools import PairOptions, Placed
from dsim.cli.pools import placed as apart
from dsim.cli.traffic import Traffic, TrafficOptions, asked_traffic
from dsim.errors import InfeasiblePlacementError, InputError, by_option
from dsim.options import Options, PrefillBatching, Routing
from dsim.pools import Placement, Policy, Role
from dsim.slo import Slo, parse_slo

if TYPE_CHECKING:
    from dsim.aggregates import Aggregates
    from dsim.profile import Profile
    from dsim.result import Result

#: What --step-log writes beside the other files.
_LOG_FILES = ("steps.csv", "kv.csv", "all_requests.csv")


@grouped
def simulate(
    context: typer.Context,
    *,
    placement: PlacementText,
    models: ModelOptions,
    pair: PairOptions,
    slo: SloOrNone = None,
    traffic_options: TrafficOptions,
    policy: Annotated[
        Policy | None, typer.Option("--policy", help="Scheduling of colocated instances. [default: prefill-first]")
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget", parser=whole_number, metavar="N", help="Tokens per step of chunked. [default: 2048]"
        ),
    ] = None,
    prefill_routing: PrefillRouting = Routing.JOIN_SHORTEST_QUEUE,
    decode_routing: DecodeRouting = Routing.LEAST_LOADED,
    prefill_batching: PrefillBatchingOption = PrefillBatching.ENGINE,
    kv_blocks: KvBlocksText = None,
    handover: HandoverOptions,
    nodes: NodeOptions,
    extrapolate: Extrapolate = False,
    check: Check = False,
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
    output_dir: OutputDirectory = None,
    overwrite: Overwrite = False,
    common: CommonOptions,
) -> int:
    """Simulate one placement under one workload and print its latencies."""
    from dsim.aggregates import Aggregates

    seed_of(seed)
    limits = None if slo is None else parse_slo(slo)
    placed = _placement(placement, policy=policy, token_budget=token_budget)
    mixed = apart(placed, models.wanted(), pair.beside(), handover=handover, nodes=nodes.nodes)
    if mixed is not None:
        used, placed = mixed.front, mixed.placement
        profiles = with_kv_blocks(mixed.profiles, kv_blocks)
    else:
        used = with_asked_handover(models.chosen(), placed, handover, nodes=nodes.nodes)
        profiles = with_kv_blocks(dict.fromkeys(Role, used), kv_blocks)
    check_runs(placement, placed, profiles)
    placed = on_nodes(placed, used.gpu, nodes)
    traffic = asked_traffic(traffic_options, used, seed=seed, aggregate=aggregate)
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
        folder = OutputFolder(output_dir, overwrite=overwrite)
        folder.check(names)
    asked = _Run(
        used,
        profiles,
        placed,
        traffic,
        limits,
        model=models.model,
        extrapolate=extrapolate,
        handover_asked=handover.are_given,
        mixed=mixed,
    )
    if common.dry_run:
        _print_plan(asked, output_format=common.output_format, files=names if output_dir is not None else [])
        return 0
    result = _simulated(asked, options, aggregate=aggregate)
    summary = _summary(asked, result)
    if output_dir is not None:
        files = {"summary.json": to_json(summary), "config.yaml": rerun_text(context)}
        if not isinstance(result, Aggregates):
            files["requests.csv"] = result.to_frame().to_csv(index_label="request", lineterminator="\n")
            if step_log:
                files |= _log_files(result)
        folder.write(files)
    _print(asked, result, summary, common)
    if output_dir is not None:
        note(f"wrote {', '.join(names)} to {output_dir}", quiet=common.quiet)
    return 0


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that was asked for."""

    profile: Profile
    profiles: Mapping[Role, Profile]
    placement: Placement
    traffic: Traffic
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
        raise not_runnable(str(asked.placement), error.reasons) from None
    except InputError as error:
        raise by_option(error) from None


def _described(asked: _Run) -> dict[str, Any]:
    profile, slo = asked.profile, asked.slo
    return {
        **asked.placement.named_dict(),
        "num_gpus": asked.placement.num_gpus,
        **asked.placement.layout_dict(),
        "model": profile.model.name,
        "hugging_face": profile.model.hugging_face,
        "gpu": profile.gpu.name,
        "engine": profile.engine,
        "profile": described_profile(profile),
        "profiles": described_profiles(asked.profiles, [pool.role for pool in asked.placement.pools]),
        "extrapolated": asked.extrapolate,
        "slo": None if slo is None else described_slo(slo),
        "traffic": asked.traffic.described,
    }


def _summary(asked: _Run, result: Result | Aggregates) -> dict[str, Any]:
    from dsim.aggregates import Aggregates

    summary = result.summary() if isinstance(result, Aggregates) else result.summary(asked.slo or Slo())
    if asked.slo is None:
        summary["attainment"] = summary["good_throughput_per_s"] = None
    return {**summary, **_described(asked), "kv_source": kv_sources(result.profiles, asked.placement)}


def _print_plan(asked: _Run, *, output_format: Format, files: list[str]) -> None:
    if not emit_data(output_format, {**_described(asked), "files": files}):
        lines = [*asked.heading(), f"would simulate {_what(asked)}"]
        emit("\n".join([*lines, *([f"would write {', '.join(files)}"] if files else [])]) + "\n")


def _what(asked: _Run) -> str:
    return f"{asked.placement.label} on {number_of(asked.placement.num_gpus, 'GPU')}: {asked.traffic.label}"


def _print(asked: _Run, result: Result | Aggregates, summary: dict[str, Any], common: CommonOptions) -> None:
    if emit_data(common.output_format, summary):
        return
    from dsim.cli.tables import run_parts
    from dsim.profile import range_remarks

    lines = [*asked.heading(), f"{_what(asked)}, seed {summary['seed']}"]
    if asked.extrapolate:
        lines.append("extrapolated: steps may lie outside the range that the profile was measured on")
    lines += range_remarks(result.profiles, [result.placement])
    if "percentile_error" in summary:
        lines.append(f"percentiles within {summary['percentile_error']:.1%}: only aggregates were kept")
    show("\n".join(lines), *run_parts(result, summary, asked.slo), color=use_color(no_color=common.no_color))


def _log_files(result: Result) -> dict[str, str]:
    """Return what --step-log writes, by name: what `dsim plot` draws a timeline from."""
    from dataclasses import asdict, fields

    from dsim.records import KvRecord

    every = result.arrivals().to_csv(index_label="request", lineterminator="\n")
    kv = to_csv([asdict(change) for change in result.kv or ()], [field.name for field in fields(KvRecord)])
    return dict(zip(_LOG_FILES, (_steps_csv(result), kv, every), strict=True))


def _steps_csv(result: Result) -> str:
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
