"""`dsim profile import`: timings of other tools as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.options import Overwrite, Quiet, file_path
from dsim.errors import InputError


def import_rows(
    *,
    dynamo: Annotated[
        list[Path] | None,
        typer.Option("--dynamo", metavar="PATH", help="raw_data.npz of Dynamo's profiler, or its results directory."),
    ] = None,
    vllm_latency: Annotated[
        list[str] | None,
        typer.Option("--vllm-latency", metavar="NxP+O=FILE", help="JSON of vllm bench latency: N prompts of P, O out."),
    ] = None,
    vllm_throughput: Annotated[
        list[str] | None,
        typer.Option("--vllm-throughput", metavar="NxP+1=FILE", help="JSON of vllm bench throughput --output-len 1."),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel degree of the runs.")] = 1,
    unit: Annotated[str, typer.Option("--unit", metavar="ms|s", help="Of Dynamo's times.")] = "ms",
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", min=1, help="The engine's --max-num-batched-tokens (vllm bench throughput).")
    ] = 8192,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME", help="What was timed.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="On what.")] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=file_path, metavar="FILE", help="The rows to write.")
    ] = Path("rows.csv"),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> int:
    """Bring timings of other tools into a rows file, for `dsim profile fit`."""
    from dsim.catalog import find_gpu, find_model
    from dsim.cli.output import note
    from profiles.importers import BenchRun, find_dynamo, read_dynamo, read_vllm_latency, read_vllm_throughput
    from profiles.rows import parse_rows, rows_text

    if output.exists() and not overwrite:
        raise InputError("--output", "is there already", value=str(output), hint="give another path, or --overwrite")
    rows = []
    for path in dynamo or ():
        for file in find_dynamo(path) if path.is_dir() else [path]:
            rows += read_dynamo(file, tp=tp, unit=unit)
    rows += read_vllm_latency([BenchRun.parse(text) for text in vllm_latency or ()], tp=tp)
    runs = [BenchRun.parse(text, "--vllm-throughput") for text in vllm_throughput or ()]
    rows += read_vllm_throughput(runs, tp=tp, step_tokens=step_tokens)
    if not rows:
        raise InputError(
            "dsim profile import", "has nothing to import", hint="give --dynamo, --vllm-latency or --vllm-throughput"
        )
    tools = [("Dynamo's profiler", dynamo), ("vllm bench latency", vllm_latency), ("vllm bench throughput", runs)]
    head: dict[str, object] = {"source": ", ".join(name for name, given in tools if given), "host_overhead": "included"}
    if dynamo:
        head["engine"] = {"name": "dynamo", "version": "unknown"}
    elif vllm_latency or runs:
        head["engine"] = {"name": "vllm", "version": "unknown"}
    if model is not None:
        head["model"] = find_model(model).name
    if gpu is not None:
        head["gpu"] = find_gpu(gpu).name
    text = rows_text(rows, head)
    # What cannot be read again is not written: times in the wrong unit, points that stand twice.
    parse_rows(text.encode(), file=str(output))
    output.write_text(text, encoding="utf-8")
    note(f"wrote {len(rows)} rows to {output}; try: dsim profile fit {output}", quiet=quiet)
    return 0
