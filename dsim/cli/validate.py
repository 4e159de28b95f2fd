"""`dsim validate`: a measured run, replayed, and how far off dsim is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.config import rerun_text
from dsim.cli.groups import CommonOptions, ModelOptions, grouped
from dsim.cli.handover import HandoverOptions, with_asked_handover
from dsim.cli.inputs import check_runs, described_profile, described_slo, introduction, number_of, whole
from dsim.cli.kv_blocks import with_kv_blocks
from dsim.cli.options import (
    Check,
    DecodeRouting,
    Extrapolate,
    Format,
    HandoverText,
    KvBlocksText,
    KvLinkText,
    OutputDirectory,
    Overwrite,
    PlacementText,
    PrefillRouting,
    SloOrNone,
    file_path,
    whole_number,
)
from dsim.cli.output import OutputFolder, Table, emit_data, note, show, to_csv, to_json, use_color
from dsim.cli.progress import progress_bar
from dsim.errors import InputError, nearest
from dsim.options import Options, Routing
from dsim.pools import Placement, Policy, Role
from dsim.slo import Slo, parse_slo

if TYPE_CHECKING:
    from dsim.profile import Profile
    from experiments.validation import Comparison, HostFit, Input, Kind, Measured, TpotDefinition, Validation
    from experiments.validation.measured import Value
    from experiments.validation.readers import Mapped

_FILES = ("validation.json", "comparisons.csv", "config.yaml")
#: What rows of CSV leave out, or have in columns of their own.
_NOT_IN_ROWS = {"comparisons", "host_fit", "inputs", "remarks", "profile"}
_FIRST = ("name", "measured", "predicted", "low", "high", "error", "error_low", "error_high")
_METRICS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
_RATES = {
    "throughput_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s",
    "attainment.both": "attainment %",
    "attainment.ttft": "attainment of TTFT %",
    "attainment.tpot": "attainment of TPOT %",
}


@grouped
def validate(
    context: typer.Context,
    *,
    file: Annotated[
        Path,
        typer.Argument(
            parser=file_path,
            metavar="FILE",
            help="CSV or JSONL of requests, a result of vllm bench serve, or rows of statistics.",
            show_default=False,
        ),
    ],
    placement: PlacementText,
    models: ModelOptions,
    slo: SloOrNone = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", metavar="KIND", help="What FILE holds: requests, vllm or aggregate. [default: as its keys say]"
        ),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option("--row", parser=whole_number, metavar="N", help="Which row of statistics, counted from 1."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="NAME=COLUMN", help="A column of another name, as in ttft_s=first:ms; repeatable."
        ),
    ] = None,
    tpot_definition: Annotated[
        str,
        typer.Option("--tpot-definition", metavar="TOOL", help="What FILE's TPOT is: vllm, guidellm or simdistserve."),
    ] = "vllm",
    policy: Annotated[Policy | None, typer.Option("--policy", help="Scheduling of colocated instances.")] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget",
            parser=whole_number,
            metavar="N",
            help="Tokens per step of chunked, or of a prefill batch.",
        ),
    ] = None,
    max_seqs: Annotated[
        int | None, typer.Option("--max-seqs", parser=whole_number, metavar="N", help="Most requests of one step.")
    ] = None,
    kv_blocks: KvBlocksText = None,
    handover: HandoverText = None,
    kv_link: KvLinkText = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume",
            metavar="KEY=VALUE",
            help="Fix an input, as in users=32 or turnaround_s=5ms, or try several, as in seed=0,1; repeatable.",
        ),
    ] = None,
    prefill_routing: PrefillRouting = Routing.JOIN_SHORTEST_QUEUE,
    decode_routing: DecodeRouting = Routing.LEAST_LOADED,
    extrapolate: Extrapolate = False,
    check: Check = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit-host",
            help="Also fit four host constants to the even requests, and print the errors of the odd ones.",
        ),
    ] = False,
    output_dir: OutputDirectory = None,
    overwrite: Overwrite = False,
    common: CommonOptions,
) -> int:
    """Replay a measured run and print what was predicted beside what was measured.

    What neither FILE nor an option says is tried with several plausible values, and the error is a range.
    """
    from experiments.validation import validate as run

    used = models.chosen()
    limits = None if slo is None else parse_slo(slo)
    placed = Placement.parse(placement)
    used = with_asked_handover(used, placed, HandoverOptions(handover=handover, kv_link=kv_link))
    profiles = with_kv_blocks(dict.fromkeys(Role, used), kv_blocks)
    check_runs(placement, placed, profiles)
    # The profiles have the last two already.
    options_given = {
        "policy": policy,
        "token_budget": token_budget,
        "max_seqs": max_seqs,
        "kv_blocks": None if kv_blocks is None else "100%",
        "handover": handover or kv_link,
    }
    given = _given(assume, options_given)
    measured = _measured(
        file,
        kind=kind,
        row=row,
        columns=column,
        tpot_definition=tpot_definition,
        context_tokens=used.model.context_tokens,
    )
    options = Options(
        prefill_routing=prefill_routing, decode_routing=decode_routing, check=check, extrapolate=extrapolate
    )
    asked = _Asked(measured, used, profiles, placed, limits, model=models.model, extrapolate=extrapolate)
    if output_dir is not None:
        folder = OutputFolder(output_dir, overwrite=overwrite)
        folder.check(_FILES)
    if common.dry_run:
        _print_plan(asked, given, output_format=common.output_format, files=_FILES if output_dir is not None else ())
        return 0
    with progress_bar(quiet=common.quiet, no_color=common.no_color) as bar:
        found = run(
            measured,
            profiles=profiles,
            placement=placed,
            given=given,
            slo=limits,
            options=options,
            progress=None if bar is None else lambda done, total: bar("replaying", done, total),
        )
    host = None
    if fit:
        from experiments.validation import fit_host

        host = fit_host(found, options=options)
    answer = _answer(asked, found, host)
    if output_dir is not None:
        folder.write(
            {
                "validation.json": to_json(answer),
                "comparisons.csv": to_csv(_rows(answer)),
                "config.yaml": rerun_text(context),
            }
        )
    _print(asked, found, host, answer, common)
    if output_dir is not None:
        note(f"wrote {', '.join(_FILES)} to {output_dir}", quiet=common.quiet)
    return 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """Everything that was asked for."""

    measured: Measured
    profile: Profile
    profiles: Mapping[Role, Profile]
    placement: Placement
    slo: Slo | None
    model: str | None
    extrapolate: bool


def _given(assume: list[str] | None, options: Mapping[str, object]) -> dict[str, tuple[Value, ...]]:
    """Return the inputs that options fix, by name."""
    from experiments.validation import parse_assumption

    found: dict[str, tuple[Value, ...]] = {}
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Policy):
            found[name] = (value.value,)
        elif isinstance(value, int):
            found[name] = (whole(option, value, at_least=1),)
        elif isinstance(value, str):
            found[name] = (value,)
    for text in assume or []:
        name, values = parse_assumption(text)
        if name in found:
            hint = "keep one of the two"
            raise InputError("--assume", "is given twice", name=name, value=text.partition("=")[2], hint=hint)
        found[name] = values
    return found


def _measured(
    file: Path,
    *,
    kind: str | None,
    row: int | None,
    columns: list[str] | None,
    tpot_definition: str,
    context_tokens: int,
) -> Measured:
    from experiments.validation import Kind, TpotDefinition, read_run
    from experiments.validation.readers import parse_column

    mapped: dict[str, Mapped] = {}
    for text in columns or []:
        name, column = parse_column(text)
        if name in mapped:
            raise InputError("--column", "is given twice", name=name, value=text, hint="keep one of the two")
        mapped[name] = column
    kinds: dict[str, Kind] = {known.value: known for known in Kind}
    definitions: dict[str, TpotDefinition] = {known.value: known for known in TpotDefinition}
    if kind is not None and kind not in kinds:
        raise InputError("--kind", "is not a known kind", value=kind, hint=nearest(kind, kinds))
    if tpot_definition not in definitions:
        hint = nearest(tpot_definition, definitions)
        raise InputError("--tpot-definition", "is not a known tool", value=tpot_definition, hint=hint)
    return read_run(
        file,
        kind=None if kind is None else kinds[kind],
        columns=mapped,
        row=row,
        tpot_definition=definitions[tpot_definition],
        context_tokens=context_tokens,
    )


def _described(asked: _Asked) -> dict[str, Any]:
    profile, slo, measured = asked.profile, asked.slo, asked.measured
    return {
        "file": measured.source,
        "kind": measured.kind.value,
        "num_requests": None if measured.requests is None else len(measured.requests),
        "tpot_definition": measured.tpot_definition.value,
        "placement": str(asked.placement),
        "num_gpus": asked.placement.num_gpus,
        "model": profile.model.name,
        "hugging_face": profile.model.hugging_face,
        "gpu": profile.gpu.name,
        "engine": profile.engine,
        "profile": described_profile(profile),
        "extrapolated": asked.extrapolate,
        "slo": None if slo is None else described_slo(slo),
    }


def _inputs(inputs: tuple[Input, ...]) -> dict[str, Any]:
    return {item.name: {"values": list(item.values), "origin": item.origin.value, "note": item.note} for item in inputs}


def _answer(asked: _Asked, found: Validation, host: HostFit | None) -> dict[str, Any]:
    from dsim.version import __version__

    return {
        **_described(asked),
        "inputs": _inputs(found.inputs),
        "without_effect": list(found.without_effect),
        "replays": len(found.replays),
        "comparisons": _compared(found.comparisons),
        "host_fit": None
        if host is None
        else {
            "constants": dict(host.constants),
            "replays": host.runs,
            "fitted": _compared(host.fitted),
            "held_out": _compared(host.held_out),
        },
        "remarks": list(found.remarks),
        "version": __version__,
    }


def _compared(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            "name": comparison.name,
            "measured": comparison.measured,
            "predicted": comparison.predicted,
            "low": comparison.low,
            "high": comparison.high,
            "error": comparison.error,
            "error_low": comparison.error_low,
            "error_high": comparison.error_high,
        }
        for comparison in comparisons
    ]


def _rows(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each comparison, with every input in it."""
    same = {key: value for key, value in answer.items() if key not in _NOT_IN_ROWS}
    same["profile"] = answer["profile"]["name"]
    inputs = {name: [_text(value) for value in item["values"]] for name, item in answer["inputs"].items()}
    parts = {"all": answer["comparisons"]}
    if answer["host_fit"] is not None:
        parts |= {part: answer["host_fit"][part] for part in ("fitted", "held_out")}
    return [
        {**comparison, "part": part, **same, "inputs": inputs} for part, found in parts.items() for comparison in found
    ]


def _text(value: Value) -> str:
    from experiments.validation.inputs import shown

    return "" if value is None else shown(value)


def _print_plan(
    asked: _Asked, given: Mapping[str, tuple[Value, ...]], *, output_format: Format, files: tuple[str, ...]
) -> None:
    from dsim.profile import profiles_by_role
    from experiments.validation import settle
    from experiments.validation.settle import cases

    profiles = profiles_by_role(asked.profiles, extrapolate=asked.extrapolate)
    inputs = settle(asked.measured, given, profiles=profiles, placement=asked.placement, extrapolate=asked.extrapolate)
    replays = len(cases(inputs))
    plan = {**_described(asked), "inputs": _inputs(inputs), "replays": replays, "files": list(files)}
    if not emit_data(output_format, plan):
        lines = [
            *introduction(asked.profile, asked=asked.model),
            f"would replay {_what(asked)}: {number_of(replays, 'run')}",
            *([f"would write {', '.join(files)}"] if files else []),
        ]
        show("\n".join(lines), _input_table(inputs), color=False)


def _what(asked: _Asked) -> str:
    measured = asked.measured
    count = "" if measured.requests is None else f"{len(measured.requests)} requests of "
    return f"{count}{measured.source} on {asked.placement}, {number_of(asked.placement.num_gpus, 'GPU')}"


def _input_table(inputs: tuple[Input, ...]) -> Table:
    from experiments.validation import Origin
    from experiments.validation.inputs import ORIGINS

    table = Table(["<input", "<value", "<from", "<note"])
    for item in inputs:
        origin = "not known: all tried" if item.origin is Origin.UNKNOWN else ORIGINS[item.origin]
        table.rows.append([item.name, " | ".join(_text(value) or "none" for value in item.values), origin, item.note])
    return table


def _print(
    asked: _Asked, found: Validation, host: HostFit | None, answer: dict[str, Any], common: CommonOptions
) -> None:
    if emit_data(common.output_format, answer, rows=_rows(answer), first=_FIRST):
        return
    lines = [*introduction(asked.profile, asked=asked.model), f"replayed {_what(asked)}: {_replays(found)}"]
    if asked.extrapolate:
        lines.append("extrapolated: steps may lie outside the range that the profile was measured on")
    lines += found.remarks
    parts: list[Table | str] = ["\n".join(lines), _input_table(found.inputs), _comparison_table(found.comparisons)]
    if host is not None:
        parts += [
            f"host constants fitted to the even requests in {number_of(host.runs, 'run')}: {_constants(host)}",
            "the even requests, which they were fitted to:",
            _comparison_table(host.fitted),
            "the odd requests, which they were not:",
            _comparison_table(host.held_out),
        ]
    show(*parts, color=use_color(no_color=common.no_color))


def _replays(found: Validation) -> str:
    unknown = [item.name for item in found.unknown]
    if not unknown:
        return "one run"
    are = "is" if len(unknown) == 1 else "are"
    text = f"{number_of(len(found.replays), 'run')}, as {' and '.join(unknown)} {are} not known"
    if found.without_effect:
        text += f"; {' and '.join(found.without_effect)} made no difference"
    return text


def _constants(host: HostFit) -> str:
    return ", ".join(f"{name} {1e6 * value:,.2f} us" for name, value in host.constants.items())


def _comparison_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(["<", "measured", "predicted", "error"])
    for comparison in comparisons:
        name, scale = _heading(comparison.name)
        predicted = (
            f"[{_figure(comparison.low * scale)}, {_figure(comparison.high * scale)}]"
            if comparison.predicted is None
            else _figure(comparison.predicted * scale)
        )
        table.rows.append([name, _figure(comparison.measured * scale), predicted, _error(comparison)])
    return table


def _heading(name: str) -> tuple[str, float]:
    """Return how a statistic is called in print, and by what its value is multiplied there."""
    if name in _RATES:
        return _RATES[name], 100.0 if name.startswith("attainment") else 1.0
    metric, _, statistic = name.partition(".")
    return f"{_METRICS[metric]} {statistic} ms", 1000.0


def _figure(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:#.3g}"


def _error(comparison: Comparison) -> str:
    errors = (comparison.error_low, comparison.error_high) if comparison.error is None else (comparison.error,)
    unit = "points" if comparison.is_share else "%"
    texts = [f"{100 * error:+.1f}" if math.isfinite(error) else "inf" for error in errors]
    return f"{texts[0]} {unit}" if len(texts) == 1 else f"[{', '.join(texts)}] {unit}"
