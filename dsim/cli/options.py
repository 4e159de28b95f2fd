"""Options that several commands share."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.config import read_assignments, read_config
from dsim.options import Evidence, ExpertSharing, KvDtype, PrefillBatching


class Format(enum.Enum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def whole_number(value: str | int) -> int:
    """Return the whole number that an option's text says; typer also passes defaults, which are numbers."""
    text = str(value).strip()
    # Python's int() would take 1_000, and digits of other scripts.
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text) is None:
        raise typer.BadParameter(f"{text!r} must be a whole number")
    return int(text)


def file_path(value: str | Path) -> Path:
    """Return the path that an option's text says."""
    if not str(value).strip():
        raise typer.BadParameter(f"{str(value)!r} must not be empty")
    return Path(value)


FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colours.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all inputs, print what would run, and stop.")]
OutputDirectory = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", parser=file_path, metavar="DIR", help="Write the result as files into DIR."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are already in the output directory.")]
Seed = Annotated[int, typer.Option("--seed", parser=whole_number, metavar="N", help="Seed of all random streams.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", parser=whole_number, metavar="N", help="Processes; default: one per core.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        parser=file_path,
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
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME", help="The model, such as 13b (see dsim models), or a Hugging Face config.json."
    ),
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="The GPU; see dsim gpus. [default: a100-80g]")
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="The serving engine. [default: the one with the best evidence]"),
]
EvidenceOption = Annotated[
    Evidence | None,
    typer.Option("--evidence", help="What step times must rest on. [default: the best there is]"),
]
ExpertsOption = Annotated[
    ExpertSharing,
    typer.Option(
        "--experts",
        help="How the GPUs of an instance share experts: a slice of each (tp), or whole ones (ep; estimated).",
    ),
]
KvDtypeOption = Annotated[
    KvDtype, typer.Option("--kv-dtype", help="What the KV cache is stored in; other than the model's is estimated.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", parser=file_path, metavar="FILE", help="A latency profile of your own instead of a shipped one."
    ),
]
HandoverText = Annotated[
    str | None,
    typer.Option(
        "--handover",
        metavar="NAME|FILE|KEY=VALUE,...",
        help="How KV gets to the decode side: distserve, vllm-nixl, sglang-mooncake, dynamo, a YAML file, or keys. "
        "[default: the profile's]",
    ),
]
KvLinkText = Annotated[
    str | None,
    typer.Option(
        "--kv-link",
        metavar="nvlink|nic|pcie|RATE",
        help="What KV goes over, or what one link reaches, as 25GB/s. [default: the profile's; of a --handover by "
        "name NVLink within a node, the NIC across nodes]",
    ),
]
SloOption = typer.Option(
    "--slo", metavar="LIMITS", help="Latency targets in seconds: ttft=0.4,tpot=0.1 (or 400ms, e2e=...)."
)
WorkloadText = Annotated[
    str | None,
    typer.Option("--workload", "-w", metavar="LENGTHS", help="Prompt and output lengths. [default: sharegpt]"),
]
ArrivalsText = Annotated[
    str | None,
    typer.Option("--arrivals", metavar="PROCESS", help="poisson, gamma:cv=2 or constant. [default: poisson]"),
]
KvBlocksText = Annotated[
    str | None,
    typer.Option(
        "--kv-blocks",
        metavar="N",
        help="KV blocks of an instance instead of the profile's: 2588, prefill=2588,decode=3400, tp2pp1=6000.",
    ),
]
PrefillBatchingOption = Annotated[
    PrefillBatching, typer.Option("--prefill-batching", help="Prefill batches up to the engine's limit, or up to Lm.")
]
