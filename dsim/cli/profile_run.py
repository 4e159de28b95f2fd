"""`dsim profile run`: time the kernels of a model on this machine's own device."""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.inputs import number_of, seconds, whole
from dsim.cli.options import DryRun, Format, FormatOption, NoColor, Quiet, file_path, whole_number
from dsim.errors import InputError

if TYPE_CHECKING:
    from profiles.allreduce import AllReduceModel
    from profiles.profiling import Question


class Dtype(enum.Enum):
    """Type of weights and KV cache."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


_ModelName = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="A name of dsim models, or a path of a config.json.")
]
_Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cuda, cuda:N or cpu.")]
_GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="The device in dsim gpus. [default: what it calls itself]"),
]
_Tps = Annotated[
    str, typer.Option("--tp", metavar="N,...", help="TP degrees; a rank's share of each fits on one device.")
]
_DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="[default: the model's; fp32 on a CPU]")]
_Budget = Annotated[str, typer.Option("--budget", metavar="TIME", help="Wall-clock time in all.")]
_Out = Annotated[Path, typer.Option("--out", parser=file_path, metavar="FILE", help="The CSV file for the rows.")]
_Phases = Annotated[str, typer.Option("--phases", metavar="PHASE,...", help="Some of prefill, decode, mixed.")]
_LargestPrefill = Annotated[
    int | None,
    typer.Option(
        "--largest-prefill",
        parser=whole_number,
        metavar="TOKENS",
        help="Most tokens of a prefill step. [default: 16384; CPU 2048]",
    ),
]
_LargestBatch = Annotated[
    int | None,
    typer.Option(
        "--largest-batch", parser=whole_number, metavar="N", help="Most decoding requests. [default: 256; CPU 32]"
    ),
]
_LargestContext = Annotated[
    int | None,
    typer.Option(
        "--largest-context",
        parser=whole_number,
        metavar="TOKENS",
        help="Longest context of a request. [default: 16384; CPU 2048]",
    ),
]
_Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds", parser=whole_number, metavar="N", help="Rows of each point, if time is left. [default: 3; CPU 5]"
    ),
]
_AllReduce = Annotated[
    str | None,
    typer.Option("--all-reduce", metavar="LATENCY,RATE", help="Instead of timing or assuming it, as in 10us,300GB/s."),
]
_Threads = Annotated[
    int | None, typer.Option("--threads", parser=whole_number, metavar="N", help="Of the CPU. [default: 1]")
]
_Resume = Annotated[bool, typer.Option("--resume", help="Add to the file what it does not have yet.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file.")]


def run(
    *,
    model: _ModelName,
    device: _Device = "cuda",
    gpu: _GpuName = None,
    tp: _Tps = "1",
    dtype: _DtypeOption = None,
    budget: _Budget = "300s",
    out: _Out = Path("rows.csv"),
    phases: _Phases = "prefill,decode,mixed",
    largest_prefill: _LargestPrefill = None,
    largest_batch: _LargestBatch = None,
    largest_context: _LargestContext = None,
    rounds: _Rounds = None,
    all_reduce: _AllReduce = None,
    threads: _Threads = None,
    resume: _Resume = False,
    overwrite: _Overwrite = False,
    dry_run: DryRun = False,
    output_format: FormatOption = Format.TABLE,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Time prefill, decode and mixed steps of a model on this machine, for dsim profile fit."""
    started_s = time.monotonic()
    from profiles.session import check_output

    if resume and overwrite:
        raise InputError("--resume", "contradicts --overwrite", hint="leave one out")
    budget_s = seconds("--budget", budget)
    if not 1 <= budget_s <= 86400:
        raise InputError("--budget", "must be from 1 s to 24 h", value=budget, hint="as in 300s or 5min")
    largest = (largest_prefill, largest_batch, largest_context)
    _check_sizes(largest, rounds, threads, device)
    question = _question(
        model=model,
        device=device,
        gpu=gpu,
        tp=tp,
        dtype=dtype,
        phases=phases,
        largest=largest,
        rounds=rounds,
        all_reduce=all_reduce,
        threads=threads,
    )
    check_output(out, resume=resume, overwrite=overwrite)
    if dry_run:
        return _list(question, output_format=output_format, no_color=no_color)
    return _time(question, out, budget_s=budget_s, started_s=started_s, resume=resume, overwrite=overwrite, quiet=quiet)


def _check_sizes(
    largest: tuple[int | None, int | None, int | None], rounds: int | None, threads: int | None, device: str
) -> None:
    prefill, batch, context = largest
    for option, value in (("--largest-prefill", prefill), ("--largest-context", context)):
        if value is not None:
            whole(option, value, at_least=16, at_most=10_000_000)
    if batch is not None:
        whole("--largest-batch", batch, at_least=1, at_most=100_000)
    if rounds is not None:
        whole("--rounds", rounds, at_least=1, at_most=100)
    if threads is not None:
        whole("--threads", threads, at_least=1, at_most=4096)
        if device != "cpu":
            raise InputError("--threads", "is for --device cpu only", value=threads)


def _time(
    question: Question, out: Path, *, budget_s: float, started_s: float, resume: bool, overwrite: bool, quiet: bool
) -> int:
    from dsim.cli.output import note
    from profiles.profiling import profile
    from profiles.session import Bar, NothingTimedError, OutOfMemoryError, Silence, StepFailedError

    try:
        outcome = profile(
            question,
            out,
            budget_s=budget_s,
            progress=Silence() if quiet else Bar(sys.stderr),
            resume=resume,
            overwrite=overwrite,
            started_s=started_s,
        )
    except KeyboardInterrupt:
        note(f"\nstopped; the same command with --resume goes on with {out}", quiet=quiet)
        raise
    except (OutOfMemoryError, StepFailedError, NothingTimedError) as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    typer.echo(f"{out}: {outcome}")
    return 0


def _question(
    *,
    model: str,
    device: str,
    gpu: str | None,
    tp: str,
    dtype: Dtype | None,
    phases: str,
    largest: tuple[int | None, int | None, int | None],
    rounds: int | None,
    all_reduce: str | None,
    threads: int | None,
) -> Question:
    from profiles.profiling import Largest, Question, default_dtype, gpu_of, parse_device, parse_phases, parse_tps
    from profiles.shapes import shape_of

    shape = shape_of(model)
    name = parse_device(device)
    return Question(
        shape=shape,
        tps=parse_tps(tp),
        phases=parse_phases(phases),
        all_reduce=None if all_reduce is None else _all_reduce(all_reduce),
        gpu=gpu_of(gpu, device=name),
        device=name,
        dtype=default_dtype(shape, name) if dtype is None else dtype.value,
        largest=Largest(*largest),
        rounds=rounds,
        threads=threads,
    )


def _all_reduce(text: str) -> AllReduceModel:
    from dsim.cli.inputs import number
    from dsim.units import parse_bytes_per_s
    from profiles.allreduce import AllReduceModel

    option = "--all-reduce"
    latency, comma, rate = text.partition(",")
    if not comma:
        raise InputError(option, "must be a latency and a rate", value=text, hint="as in 10us,300GB/s")
    rate_bytes_per_s = number(option, parse_bytes_per_s(rate, option), at_least=1e6)
    return AllReduceModel(seconds(option, latency), rate_bytes_per_s)


def _list(question: Question, *, output_format: Format, no_color: bool) -> int:
    from dsim.cli.output import Table, emit_data, show, use_color
    from profiles.grid import listed

    points = [point for level in question.levels() for point in level]
    rows = list(listed(points))
    if not emit_data(output_format, rows):
        table = Table(["<phase", "TP", "requests", "prompt", "cached", "context", "decoding"])
        table.rows.extend([[str(value) for value in row.values()] for row in rows])
        what = f"{question.shape.model.name} on {question.device} ({question.gpu.name})"
        head = f"{number_of(len(points), 'point')} of {what}, most telling first"
        show(head, table, color=use_color(no_color=no_color))
    return 0
