"""docs/glossary.md is complete and true: every public field, key, column and value, and units in the names."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import dsim
import placement
from dsim.recorder import COUNT_COLUMNS, TIME_COLUMNS
from experiments.compare import Comparison
from experiments.measures import columns
from experiments.settings import Measure
from experiments.store import Row
from experiments.sweepfile import COUNTS
from experiments.validation import NAMES
from profiles.shipped import shipped_profiles
from tests.cli import Cli
from tests.test_profile_file import FULL

DOCS = Path(__file__).parents[1] / "docs"

#: Modules whose dataclasses and enums users meet.
PUBLIC = {
    "dsim.aggregates",
    "dsim.contract",
    "dsim.gpu",
    "dsim.latency",
    "dsim.layer_latency",
    "dsim.metrics",
    "dsim.model",
    "dsim.nodes",
    "dsim.options",
    "dsim.pools",
    "dsim.profile",
    "dsim.profile_fit",
    "dsim.records",
    "dsim.result",
    "dsim.slo",
    "dsim.table_latency",
    "dsim.trace",
    "dsim.workload.arrivals",
    "dsim.workload.core",
    "dsim.workload.lengths",
    "dsim.workload.presets",
    "placement.authors",
    "placement.bounds",
    "placement.curve",
    "placement.feasibility",
    "placement.goodput",
    "placement.mixes",
    "placement.objective",
    "placement.pareto",
    "placement.result",
    "placement.search",
    "placement.single",
    "placement.size",
    "placement.space",
    "placement.statistics",
}

#: Modules whose dataclasses only other modules of the package meet.
WORKINGS = {
    "dsim.analytic": "shares of a datasheet, from dsim/catalog/efficiencies.yaml, and the times they give",
    "dsim.circuit": "plans of pipelined instances",
    "dsim.cli": "the command line; its options are in --help",
    "dsim.handovers": "handovers by name, from dsim/catalog/handovers.yaml, until they are a Handover",
    "dsim.hugging_face": "keys of a config file, until they are a model",
    "dsim.laws": "columns prepared for the laws",
    "dsim.policies": "what one step of an engine loop will do",
    "dsim.sends": "what sends between stages add to a step, from the profile's p2p",
    "dsim.steplaws": "steps prepared for the laws",
    "dsim.transfer": "a transfer's time, from the handover's numbers",
    "dsim.yamlfile": "positions in a file, for messages",
    "placement.controls": "what departs from the usual in a replication's requests",
    "placement.cache": "results of runs as a cache file has them",
    "placement.crew": "what runs probes, and what becomes of those that do not end by themselves",
    "placement.cover": "the state of a plan on GPUs of several types",
    "placement.decoding": "costs and demand, until they are a bound",
    "placement.probe": "tasks and outcomes that the runner carries",
    "placement.race": "the state of a search",
    "placement.shards": "parts of a search as their files have them",
    "placement.waiting": "a queue and its servers, until they are a bound",
    "placement.worker": "what workers answer",
}

#: Dataclasses of public modules that only other modules of the package meet.
WORKING_CLASSES = {
    "Ask": "a probe that the estimator wants",
    "Block": "a placement that copies may be taken of, and what it adds",
    "Case": "what the bounds of one search share",
    "Controls": "departures from the usual that the estimator is given",
    "Estimator": "the state of the search for one goodput",
    "Level": "a mean on its way to an interval",
    "Observation": "what the estimator is told",
    "Sample": "requests from which the bounds take means",
}

#: How a name ends (or, without a leading underscore, what it contains) whose values have this unit.
SUFFIXES = {
    "1/s": "_per_s",
    "1/s/GPU": "_per_gpu_per_s",
    "B": "_bytes",
    "B/GPU": "bytes_per_gpu",
    "B/s": "_bytes_per_s",
    "B/token": "_bytes_per_token",
    "FLOP/s": "_flops_per_s",
    "USD/Mtoken": "usd_per_million",
    "USD/h": "_usd_per_h",
    "W": "_w",
    "requests/USD": "_per_usd",
    "s": "_s",
    "s/request": "_s",
    "s/sequence": "_s",
    "s/token": "_s",
    "s/token²": "_s",
    "tokens": "token",
    "tokens/s": "_per_s",
    "tokens/s/GPU": "_per_gpu_per_s",
}

#: Units without a dimension, or counts of things that the name itself names.
PLAIN = {
    "–",
    "GPUs",
    "blocks",
    "count",
    "elements",
    "entries",
    "index",
    "instances",
    "nodes",
    "of its key",
    "ratio",
    "replications",
    "requests",
    "share",
    "stages",
    "trials",
    "users",
}

#: Names with a dimension and without its suffix.
UNITLESS_NAMES = {
    **dict.fromkeys(("c1", "c2", "c3", "c4", "c5"), "the names of appendix A of the paper"),
    "log_rates": "a logarithm has no unit; the differences that it is for are ratios",
    "log_stretches": "likewise",
    "output_mean": "parameter of a distribution over tokens, as in lognormal:output=MEAN/CV",
    "prompt_mean": "likewise",
}

#: Keys that a profile file may have and neither the shipped ones nor `FULL` do.
RARE_KEYS = (
    "attention",
    "attention_layers",
    "cached_tokens",
    "comm_share",
    "evidence",
    "expected_error",
    "extrapolate",
    "link",
    "node_bandwidth_bytes_per_s",
    "preset",
    "kernel_s",
    "kernels",
    "layer_tables",
    "request_context_tokens",
    "sequences",
    "table",
    "times",
)

Entry = tuple[str, str]


def modules() -> Iterator[str]:
    for package in (dsim, placement):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield found.name


def classes(module: str) -> Iterator[type[Any]]:
    for name, found in vars(importlib.import_module(module)).items():
        if inspect.isclass(found) and found.__module__ == module and not name.startswith("_"):
            yield found


def nouns() -> Iterator[type[Any]]:
    for module in sorted(PUBLIC):
        for found in classes(module):
            if dataclasses.is_dataclass(found) and found.__name__ not in WORKING_CLASSES:
                yield found


def of_nouns() -> Iterator[Entry]:
    """Fields and properties, each with its class."""
    for noun in nouns():
        names = [field.name for field in dataclasses.fields(noun)]
        names += [name for name, value in vars(noun).items() if isinstance(value, property)]
        for name in names:
            if not name.startswith("_"):
                yield name, noun.__name__


def keys(tree: object) -> Iterator[str]:
    """All keys of nested mappings but those that are data: parallel degrees, dotted names of constants."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if isinstance(key, str) and re.fullmatch(r"(tp\d+pp)?\d+|.+\..+", key) is None:
                yield key
            yield from keys(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from keys(value)


def properties(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(named := schema.get("properties"), dict):
            yield from named
        for value in schema.values():
            yield from properties(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from properties(value)


def of_files() -> Iterator[Entry]:
    for command in ("simulate", "search", "size", "validate"):
        schema = json.loads((DOCS / "schema" / f"{command}.schema.json").read_text(encoding="utf-8"))
        for name in properties(schema):
            yield name, f"{command}.json"
    for name in NAMES:
        yield name, "validate.json"
    for name in (*TIME_COLUMNS, *COUNT_COLUMNS, "ttft_s", "tpot_s", "e2e_s"):
        yield name, "requests.csv"
    for text in (FULL, *(path.read_text(encoding="utf-8") for _, path in shipped_profiles())):
        for name in keys(yaml.safe_load(text)):
            yield name, "profile.yaml"
    for name in RARE_KEYS:
        yield name, "profile.yaml"
    yield from of_sweeps()


def of_sweeps() -> Iterator[Entry]:
    """Keys of a row, columns of the comparison, and what measures give that no other command prints."""
    for error in (None, "no"):
        for name in json.loads(Row("", {}, 0, 0, {}, error, {}).to_line()):
            yield name, "rows.jsonl"
    for name in COUNTS:
        yield name, "summary.csv"
    for name in Comparison({}, "", 0.0, None, None, None).to_dict():
        yield name, "compare.csv"
    printed = {name for name, places, _ in rows() if {"simulate.json", "search.json"} & set(places)}
    for measure in Measure:
        for column in columns(measure):
            for name in set(column.split(".")) - printed:
                yield name, "sweep"


def tables(heading: str) -> Iterator[list[str]]:
    """Cells of every row of the glossary's tables with this heading."""
    inside = False
    for line in (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
        elif line == heading:
            inside = True
        elif inside and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def rows() -> list[tuple[str, list[str], str]]:
    """Return (name, places, unit) of every row."""
    found = []
    for cells in tables("| name | where | unit | meaning |"):
        assert len(cells) == 4, cells
        assert all(cells), cells
        found.append((cells[0].strip("`"), cells[1].split(", "), cells[2]))
    return found


def entries() -> list[Entry]:
    return [(name, place) for name, places, _ in rows() for place in places]


def missing_and_stale(wanted: set[Entry], places: set[str]) -> tuple[list[Entry], list[Entry]]:
    has = {entry for entry in entries() if entry[1] in places}
    return sorted(wanted - has), sorted(has - wanted)


def test_every_dataclass_is_public_or_said_to_be_none() -> None:
    homeless = [
        f"{module}.{found.__name__}"
        for module in modules()
        for found in classes(module)
        if dataclasses.is_dataclass(found)
        and module not in PUBLIC
        and not any(module == known or module.startswith(f"{known}.") for known in WORKINGS)
    ]
    assert homeless == []
    named = {found.__name__ for module in PUBLIC for found in classes(module)}
    assert named >= set(WORKING_CLASSES)


def test_fields_and_properties_of_the_nouns() -> None:
    wanted = set(of_nouns())
    assert missing_and_stale(wanted, {noun.__name__ for noun in nouns()}) == ([], [])


def test_keys_and_columns_of_files() -> None:
    wanted = set(of_files())
    assert missing_and_stale(wanted, {place for _, place in wanted}) == ([], [])


def test_keys_of_the_lists(capsys: pytest.CaptureFixture[str]) -> None:
    run = Cli(capsys)
    wanted = {
        (name, "lists")
        for command in ("models", "gpus", "profiles")
        for name in keys(json.loads(run(command, "--format", "json").out))
    }
    assert missing_and_stale(wanted, {"lists"}) == ([], [])


def test_every_place_is_known() -> None:
    known = {noun.__name__ for noun in nouns()} | {place for _, place in of_files()} | {"lists"}
    assert {place for _, place in entries()} == known


def test_one_row_for_each_name_and_place() -> None:
    found = entries()
    assert sorted({entry for entry in found if found.count(entry) > 1}) == [
        # A key that stands in two sections of a profile, with a meaning in each.
        ("context_tokens", "profile.yaml"),
    ]


def test_values() -> None:
    wanted = {
        (member.value, found.__name__)
        for module in PUBLIC
        for found in classes(module)
        if issubclass(found, enum.Enum)
        for member in found
    }
    has = {
        (value, cells[1])
        for cells in tables("| value | of | meaning |")
        for value in re.findall(r"`([^`]+)`", cells[0])
    }
    assert (sorted(wanted - has), sorted(has - wanted)) == ([], [])


def test_names_with_a_dimension_carry_its_unit() -> None:
    for name, places, unit in rows():
        if name in UNITLESS_NAMES:
            assert unit not in PLAIN, name
            continue
        assert unit in PLAIN or unit in SUFFIXES, f"{name}: unknown unit {unit}"
        if unit in SUFFIXES:
            suffix = SUFFIXES[unit]
            fits = name.endswith(suffix) if suffix.startswith("_") else suffix in name
            assert fits, f"{name} of {', '.join(places)} is in {unit}"


def test_suffixes_say_the_unit() -> None:
    """The longest suffix that a name ends with is that of its unit."""
    for name, places, unit in rows():
        ends = {suffix for suffix in SUFFIXES.values() if suffix.startswith("_") and name.endswith(suffix)}
        if ends:
            longest = max(ends, key=len)
            assert SUFFIXES.get(unit) == longest, f"{name} of {', '.join(places)} is in {unit}"
