"""Options that several commands share, each with its names, reader and help in one place."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.config import read_assignments, read_config
from dsim.options import Evidence, ExpertSharing, KvDtype, PrefillBatching, Routing
from dsim.pools import Policy


class Format(enum.Enum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class AffinityChoice(enum.Enum):
    """As `placement.search.Affinity`, which takes long to import."""

    HIGH = "high"
    LOW = "low"


class ModeChoice(enum.Enum):
    """As `placement.search.Mode`, which takes long to import."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    BOTH = "both"


class ObjectiveChoice(enum.Enum):
    """As `placement.objective.Objective`, which takes long to import."""

    GOODPUT_PER_GPU = "goodput_per_gpu"
    GOODPUT_PER_DOLLAR = "goodput_per_dollar"
    MIN_GPUS = "min_gpus"


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


# How a command runs, and where its result goes

FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colours.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all inputs, print what would run, and stop.")]
OutputDirectory = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", parser=file_path, metavar="DIR", help="Write the result as files into DIR."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are already in the output directory.")]
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

# Model, GPU and profile

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
PrefillGpu = Annotated[
    str | None,
    typer.Option(
        "--prefill-gpu", metavar="NAMES", help="GPUs of prefill pools: one, or several to choose from, as h100,h20."
    ),
]
DecodeGpu = Annotated[
    str | None, typer.Option("--decode-gpu", metavar="NAMES", help="GPUs of decode pools. [default: --gpu]")
]
ColocatedGpu = Annotated[
    str | None,
    typer.Option(
        "--colocated-gpu", metavar="NAMES", help="GPUs of colocated placements. [default: those of the other pools]"
    ),
]
ColocatedEngine = Annotated[
    str | None,
    typer.Option(
        "--colocated-engine",
        metavar="NAME",
        help="The engine of colocated placements. [default: vllm beside distserve, else --engine]",
    ),
]
PrefillProfile = Annotated[
    Path | None,
    typer.Option("--prefill-profile", parser=file_path, metavar="FILE", help="A profile of your own for prefill."),
]
DecodeProfile = Annotated[
    Path | None,
    typer.Option("--decode-profile", parser=file_path, metavar="FILE", help="A profile of your own for decode."),
]
ColocatedProfile = Annotated[
    Path | None,
    typer.Option(
        "--colocated-profile",
        parser=file_path,
        metavar="FILE",
        help="A profile of your own for colocated placements.",
    ),
]

# KV and what it goes over

KvBlocksText = Annotated[
    str | None,
    typer.Option(
        "--kv-blocks",
        metavar="N",
        help="KV blocks of an instance instead of the profile's: 2588, prefill=2588,decode=3400, tp2pp1=6000.",
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
NicText = Annotated[
    str | None,
    typer.Option(
        "--nic",
        metavar="RATE",
        help="What one GPU's link to another node reaches, as 20GB/s. [default: 80 % of the GPU's network]",
    ),
]

# GPUs that there are

Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N|NAME=N,...",
        help="At most this many GPUs in all, or of each GPU (h100=8,h20=16) or role (prefill=8,decode=16). "
        "[default: one node, of each GPU]",
    ),
]
WholeNodes = Annotated[
    int | None, typer.Option("--nodes", parser=whole_number, metavar="N", help="Whole nodes instead of --gpus.")
]
GpusPerNode = Annotated[
    int | None,
    typer.Option("--gpus-per-node", parser=whole_number, metavar="N", help="[default: what the GPU usually has]"),
]
Affinity = Annotated[
    AffinityChoice,
    typer.Option(
        "--affinity", help="high: each instance by itself; low: stages of prefill and decode side by side in a node."
    ),
]

# Requests and limits

_SLO = typer.Option(
    "--slo", metavar="LIMITS", help="Latency targets in seconds: ttft=0.4,tpot=0.1 (or 400ms, e2e=...)."
)
Slo = Annotated[str, _SLO]
SloOrNone = Annotated[str | None, _SLO]
WorkloadText = Annotated[
    str | None,
    typer.Option("--workload", "-w", metavar="LENGTHS", help="Prompt and output lengths. [default: sharegpt]"),
]
ArrivalsText = Annotated[
    str | None,
    typer.Option("--arrivals", metavar="PROCESS", help="poisson, gamma:cv=2 or constant. [default: poisson]"),
]
Attainment = Annotated[
    str, typer.Option("--attainment", metavar="SHARE", help="Share of requests within the limits, as 0.9 or 90%.")
]
Seed = Annotated[int, typer.Option("--seed", parser=whole_number, metavar="N", help="Seed of all random streams.")]
Extrapolate = Annotated[
    bool, typer.Option("--extrapolate", help="Go beyond the profiles' valid range; the result says so.")
]
Check = Annotated[bool, typer.Option("--check", help="Verify the conservation laws on every run.")]

# Placements

PlacementText = Annotated[
    str,
    typer.Option("--placement", "-p", metavar="POOLS", help='"1xP:tp2pp1 + 1xD:tp1pp1", or "2xC:tp1pp1" colocated.'),
]
Mode = Annotated[ModeChoice, typer.Option("--mode", help="Which kinds of placement compete.")]
Policies = Annotated[
    list[Policy] | None,
    typer.Option("--policy", help="A policy of colocated instances to try; may be repeated. [default: all]"),
]
PrefillRouting = Annotated[Routing, typer.Option("--prefill-routing", help="Also of colocated instances.")]
DecodeRouting = Annotated[Routing, typer.Option("--decode-routing", help="Which decode instance pulls a prompt.")]
PrefillBatchingOption = Annotated[
    PrefillBatching, typer.Option("--prefill-batching", help="Prefill batches up to the engine's limit, or up to Lm.")
]
MaxBatchTokens = Annotated[
    str | None,
    typer.Option(
        "--max-batch-tokens",
        metavar="[ROLE=]N,...",
        help="Most tokens of a prefill batch to try (vLLM: max_num_batched_tokens): numbers, engine, lm; by role as "
        "prefill=2048,8192. [default: engine]",
    ),
]
MaxBatchRequests = Annotated[
    str | None,
    typer.Option(
        "--max-batch-requests",
        metavar="[ROLE=]N,...",
        help="Most requests of a batch to try (vLLM: max_num_seqs): numbers, engine; by role as decode=64,128. "
        "[default: engine]",
    ),
]
TokenBudgets = Annotated[
    str | None,
    typer.Option(
        "--token-budgets", metavar="N,...", help="Tokens per step of policy chunked to try. [default: 512,2048,8192]"
    ),
]

# How sure an answer is

Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="SHARE",
        help="Half width aimed for of the best one's interval; a smaller one than the default buys more runs.",
    ),
]
Confidence = Annotated[
    str, typer.Option("--confidence", metavar="SHARE", help="Level of the intervals, 50% to 99.9%, as 0.95 or 95%.")
]

# Profiles that are written

ShapeName = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="The model, or a config.json of Hugging Face.")
]
NeededGpu = Annotated[str, typer.Option("--gpu", metavar="NAME", help="The GPU.")]
HostWork = Annotated[
    bool, typer.Option("--host/--no-host", help="With the host work that is known of the engine, or kernels only.")
]
NewProfile = Annotated[
    Path, typer.Option("--output", "-o", parser=file_path, metavar="FILE", help="The profile to write.")
]
