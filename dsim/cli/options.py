"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.config import read_assignments, read_config


class Format(enum.Enum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colours.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all inputs, print what would run, and stop.")]
OutputDirectory = Annotated[
    Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Write the result as files into DIR.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are already in the output directory.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of all random streams.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", metavar="N", help="Processes; default: one per core.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="Take options from a YAML file: their names without dashes as keys.",
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        is_eager=True,
        callback=read_assignments,
        help="Set an option as in a config file, such as slo.ttft=0.4; wins over the file.",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME", help="The model, such as 13b; see dsim models.")
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="The GPU; see dsim gpus. [default: a100-80g]")
]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="The serving engine. [default: distserve]")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="A latency profile of your own instead of a shipped one."),
]
SloText = Annotated[
    str | None,
    typer.Option("--slo", metavar="LIMITS", help="Latency targets in seconds: ttft=0.4,tpot=0.1 (or 400ms, e2e=...)."),
]
WorkloadText = Annotated[
    str | None,
    typer.Option("--workload", "-w", metavar="LENGTHS", help="Prompt and output lengths. [default: sharegpt]"),
]
ArrivalsText = Annotated[
    str | None,
    typer.Option("--arrivals", metavar="PROCESS", help="poisson, gamma:cv=2 or constant. [default: poisson]"),
]
