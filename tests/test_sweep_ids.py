# ruff: noqa: E501 (tables of one case a line)
"""Content ids: every key of `base` changes the id of every measure that reads it, and of no other; spelling none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsim.errors import InputError
from dsim.plain import content
from dsim.yamlfile import parse_yaml
from experiments import measures
from experiments.base import parse_setting
from experiments.keys import KEYS
from experiments.measures import measure
from experiments.settings import Setting
from experiments.sweepfile import content_id
from profiles.shipped import shipped_profiles

Tree = Mapping[str, Any]

_PAIR = {"model": "13b", "placement": "2xP:tp1pp1 + 2xD:tp1pp1", "slo": {"ttft": 0.2, "tpot": 0.1}}
_GOODPUT = {**_PAIR, "measure": "goodput", "placement": "1xP:tp1pp1 + 1xD:tp1pp1", "workload": "fixed:512,2"}
_STEP = {"model": "13b", "measure": "step"}
#: Settings in which keys matter: pools of several instances, for routing; warm-up; limits that bind.
BASES: dict[str, Tree] = {
    "simulate": {**_PAIR, "rate": 9, "requests": 60, "warmup": 10, "quantiles": ["e2e_s"]},
    "finite": {**_PAIR, "rate": 9, "requests": 60, "finite": True},
    "colocated": {
        **_PAIR,
        "placement": "2xC:tp1pp1",
        "engine": "vllm",
        "policy": "chunked",
        "token_budget": 512,
        "rate": 5,
        "requests": 60,
        "warmup": 10,
    },
    "prefill": {**_PAIR, "rate": 9, "requests": 60, "warmup": 10, "phase": "prefill"},
    "decode": {**_PAIR, "slo": {"ttft": 0.2, "tpot": 0.03}, "rate": 9, "requests": 60, "warmup": 10, "phase": "decode"},
    "trace": {**_PAIR, "slo": {"ttft": 0.2, "tpot": 0.03}, "trace": "short.csv"},
    "goodput": {**_GOODPUT, "requests": 20, "finite": True},
    "steady": {**_GOODPUT, "requests": 20000},
    "search": {
        **_PAIR,
        "measure": "search",
        "workload": "fixed:64,4",
        "search": {"gpus": 2, "requests": 20, "top": 1, "policies": ["chunked", "orca"]},
    },
    "authors": {**_PAIR, "measure": "search", "search": {"gpus": 2, "method": "authors", "mode": "disaggregated"}},
    "colocated search": {**_PAIR, "measure": "search", "search": {"gpus": 2, "method": "authors", "mode": "colocated"}},
    "prefill step": {**_STEP, "step": {"phase": "prefill", "batch": 2, "prompt_tokens": 64}},
    "decode step": {**_STEP, "step": {"phase": "decode", "batch": 2, "context_tokens": 64}},
    "mixed step": {**_STEP, "step": {"phase": "mixed", "batch": 2, "prompt_tokens": 64, "context_tokens": 64}},
    "chunks": {
        **_STEP,
        "step": {"phase": "chunked", "batch": 2, "prompt_tokens": 64, "context_tokens": 64, "chunk_tokens": 16},
    },
    "queueing": {
        "measure": "queueing",
        "rate": 3,
        "queueing": {"formula": "speedup", "prefill_s": 0.2, "tp_speedup": 1.5},
    },
}

#: What is changed of a base for each key: dotted paths and values, None where one is left out.
VARIED: dict[str, Tree] = {
    "measure": {"measure": "queueing", "rate": 3, "queueing": {"formula": "md1", "prefill_s": 0.2}},
    "model": {"model": "llama-2-13b"},
    "gpu": {"gpu": "h100-sxm"},
    "engine": {"engine": "vllm"},
    "evidence": {"evidence": "roofline"},
    "profile": {"profile": "mine.yaml", "model": None},
    "profile_set": {"profile_set": {f"host.{role}.token_s": 4e-7 for role in ("prefill", "decode", "colocated")}},
    "colocated_engine": {"colocated_engine": "vllm"},
    "colocated_profile": {"colocated_profile": "mine.yaml"},
    "prefill_gpu": {"prefill_gpu": "h100"},
    "decode_gpu": {"decode_gpu": "h100"},
    "colocated_gpu": {"colocated_gpu": "h100"},
    "prefill_profile": {"prefill_profile": "mine.yaml"},
    "decode_profile": {"decode_profile": "mine.yaml"},
    "placement": {"placement": "1xP:tp2pp1 + 1xD:tp1pp1"},
    "policy": {"policy": "orca", "token_budget": None},
    "token_budget": {"token_budget": 256},
    "nodes": {"nodes": 2, "gpus_per_node": 2},
    "gpus_per_node": {"nodes": 4, "gpus_per_node": 1},
    "affinity": {"placement": "1xP:tp1pp2 + 1xD:tp1pp2", "nodes": 2, "gpus_per_node": 2, "affinity": "low"},
    "phase": {"phase": "decode"},
    "workload": {"workload": "fixed:100,9"},
    "arrivals": {"arrivals": "gamma:cv=2"},
    "rate": {"rate": 4},
    "rate_per_gpu": {"rate_per_gpu": 1, "rate": None},
    "trace": {"trace": "trace.csv", "rate": None, "workload": None, "finite": None, "requests": None, "warmup": None},
    "requests": {"requests": 40},
    "warmup": {"warmup": 5},
    "finite": {"finite": True},
    "slo": {"slo": {"ttft": 0.1}},
    "slo.ttft": {"slo.ttft": 0.05},
    "slo.tpot": {"slo.tpot": 0.015},
    "slo.e2e": {"slo.e2e": 0.1},
    "slo_scale": {"slo_scale": 0.5},
    "attainment": {"attainment": 0.5},
    "prefill_batching": {"prefill_batching": "lm"},
    "prefill_routing": {"prefill_routing": "round-robin"},
    "decode_routing": {"decode_routing": "round-robin"},
    "kv_blocks": {"kv_blocks": 200},
    "handover": {"handover": {"hop_s": 0.01}},
    "kv_link": {"kv_link": "pcie"},
    "nic": {"nic": "1GB/s"},
    "extrapolate": {"extrapolate": True},
    "check": {"check": True},
    "seed": {"seed": 1},
    "quantiles": {"quantiles": ["ttft_s"]},
    "search": {"search": {"gpus": 1}},
    "search.gpus": {"search.gpus": 1},
    "search.nodes": {"search.nodes": 1, "search.gpus": None},
    "search.gpus_per_node": {"search.gpus_per_node": 4},
    "search.affinity": {"search.affinity": "low"},
    "search.mode": {"search.mode": "colocated"},
    "search.policies": {"search.policies": ["orca"]},
    "search.token_budgets": {"search.token_budgets": [64]},
    "search.max_batch_tokens": {"search.max_batch_tokens": "prefill=512"},
    "search.max_batch_requests": {"search.max_batch_requests": "decode=4,8"},
    "search.top": {"search.top": 2},
    "search.precision": {"search.precision": 0.5},
    "search.requests": {"search.requests": 30},
    "search.method": {"search.method": "authors"},
    "search.timing": {"search.timing": True},
    "search.jobs": {"search.jobs": 3},
    "step": {"step": {"phase": "prefill", "prompt_tokens": 9}},
    "step.phase": {"step.phase": "mixed", "step.prompt_tokens": 9, "step.context_tokens": 9},
    "step.tp": {"step.tp": 2},
    "step.pp": {"step.pp": 2},
    "step.batch": {"step.batch": 3},
    "step.prompt_tokens": {"step.prompt_tokens": 65},
    "step.context_tokens": {"step.context_tokens": 65},
    "step.chunk_tokens": {"step.chunk_tokens": 15},
    "queueing": {"queueing": {"formula": "md1", "prefill_s": 0.1}},
    "queueing.formula": {"queueing.formula": "two-stage"},
    "queueing.prefill_s": {"queueing.prefill_s": 0.1},
    "queueing.tp_speedup": {"queueing.tp_speedup": 1.6},
}


_ALWAYS = {"seed"}
_PROFILED = {"measure", "model", "gpu", "engine", "evidence", "profile", "profile_set", "extrapolate"}
_LIMITED = {"workload", "arrivals", "slo", "slo.ttft", "slo.tpot", "slo.e2e", "slo_scale", "prefill_routing"}
_RUN = _PROFILED | _LIMITED | {"placement", "rate", "rate_per_gpu", "requests", "warmup", "finite", "kv_blocks"}
_NODES = {"nodes", "gpus_per_node", "affinity"}
_POOLS = {"phase", "prefill_batching", "decode_routing"}
_SEARCHED = {"attainment", "colocated_profile", "search", "search.gpus", "search.nodes", "search.gpus_per_node"}
_CLUSTER = _SEARCHED | {"search.affinity", "search.mode", "search.timing"}
_FULL = {
    "search.policies",
    "search.token_budgets",
    "search.top",
    "search.precision",
    "search.requests",
    "search.method",
}
_EVALUATED = _PROFILED | {"step", "step.phase", "step.tp", "step.pp", "step.batch"}
_PAIRED = {"prefill_gpu", "decode_gpu", "prefill_profile", "decode_profile"}
_APART = _PAIRED | {"colocated_gpu", "search.max_batch_tokens", "search.max_batch_requests"}
#: Keys that the id of each base has to tell.
READ: dict[str, set[str]] = {
    "simulate": _RUN | _POOLS | _PAIRED | _NODES | {"trace", "quantiles", "handover", "kv_link", "nic"},
    "goodput": _PROFILED | _LIMITED | _POOLS | _PAIRED | {"placement", "requests", "kv_blocks", "attainment"},
    "steady": _PROFILED | _LIMITED | {"finite", "requests", "search.precision", "search.requests"},
    "colocated": (_RUN - {"engine", "placement", "profile"}) | {"policy", "token_budget"},
    "search": _PROFILED | _LIMITED | _CLUSTER | _FULL | _APART | {"prefill_batching", "decode_routing"},
    "authors": _PROFILED | _LIMITED | (_CLUSTER - {"colocated_profile"}),
    "prefill step": (_EVALUATED - {"step.pp"}) | {"step.prompt_tokens"},
    "decode step": _EVALUATED | {"step.context_tokens"},
    "mixed step": {"step.prompt_tokens", "step.context_tokens"},
    "chunks": {
        "step.prompt_tokens",
        "step.context_tokens",
        "step.chunk_tokens",
        "colocated_engine",
        "colocated_profile",
    },
    "queueing": {"rate", "rate_per_gpu", "queueing", "queueing.formula", "queueing.prefill_s", "queueing.tp_speedup"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace and a profile that is slower than the shipped one."""
    made = tmp_path_factory.mktemp("files")
    rows = [f"{i * 0.02:.2f},{100 + i * 137 % 700},{2 + i * 7 % 20}" for i in range(40)]
    (made / "short.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]), encoding="utf-8")
    (made / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,10,2\n", encoding="utf-8")
    path = next(path for name, path in shipped_profiles() if name == "opt-13b-a100-80g-distserve")
    text = path.read_text(encoding="utf-8")
    assert "token_s: 1.5e-7" in text
    (made / "mine.yaml").write_text(text.replace("token_s: 1.5e-7", "token_s: 2.5e-7"), encoding="utf-8")
    return made


def changed(base: Tree, changes: Tree) -> dict[str, Any]:
    """Return a tree with values at dotted paths; None leaves one out."""
    tree: dict[str, Any] = json.loads(json.dumps(base))
    for path, value in changes.items():
        *groups, last = path.split(".")
        inside = tree
        for group in groups:
            inside = inside.setdefault(group, {})
        if value is None:
            inside.pop(last, None)
        else:
            inside[last] = value
    return tree


def setting(tree: Tree, folder: Path) -> Setting:
    return parse_setting(parse_yaml(yaml.safe_dump(tree).encode(), file="base.yaml"), folder=folder)


def id_of(found: Setting) -> str:
    return content_id(found.identity(), found.seed)


class Reads:
    """What the measures hand to the simulator, the search and the goodput, for one setting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def of(self, found: Setting) -> str:
        """Return everything that is read of a setting as text."""
        seen: list[object] = []

        class _Called(Exception):  # noqa: N818 it is no error
            pass

        def called(*arguments: object, executor: object = None, **named: object) -> object:
            del executor
            seen.append([content(list(arguments)), content(named)])
            raise _Called

        for name in ("search", "goodput_of", "authors_settings"):
            self.monkeypatch.setattr(measures, name, called)
        asked = (
            found
            if found.search is None
            else dataclasses.replace(found, search=dataclasses.replace(found.search, jobs=1))
        )
        try:
            seen.append(measure(asked, seed=found.seed))
        except _Called:
            seen.append(None if found.search is None else [found.search.timing, found.search.method.value])
        finally:
            self.monkeypatch.undo()
        return json.dumps(seen, sort_keys=True)


@cache
def outputs(tree: str, folder: Path) -> str:
    """Return what is measured, as text."""
    found = setting(json.loads(tree), folder)
    measured = measure(found, seed=found.seed)
    return json.dumps({name: value for name, value in measured.items() if name not in ("elapsed_s", "cpu_s")})


def test_every_key_is_varied() -> None:
    assert list(VARIED) == [key.name for key in KEYS]


#: A permission, which changes no number of a setting that needs none; the seed, which every id has; and what is
#: part of a profile, which counts as a whole, as the profiles of both pools do where one of them runs alone.
SILENT = {
    "extrapolate",
    "seed",
    "handover",
    "kv_link",
    "nic",
    "prefill_gpu",
    "decode_gpu",
    "prefill_profile",
    "decode_profile",
}
#: Of runs too long for a test; a finite one shows the same.
LONG = {"steady": "goodput"}


@pytest.mark.parametrize("base", BASES)
def test_an_id_changes_with_what_is_read_and_nothing_else(
    base: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, reads = BASES[base], Reads(monkeypatch)
    before = setting(tree, folder)
    read, told = reads.of(before), {}
    for key, changes in VARIED.items():
        varied = changed(tree, changes)
        if varied == tree:
            told[key] = "the same already"
            continue
        try:
            after = setting(varied, folder)
        except InputError as error:
            told[key] = f"refused: {error}"
            continue
        is_read, is_told = reads.of(after) != read, id_of(after) != id_of(before)
        told[key] = "told" if is_told else "no part"
        if is_told:
            assert is_read or key in SILENT, f"{key} changes the id and nothing else"
        elif is_read:
            short = LONG.get(base)
            same = (BASES[short], changed(BASES[short], changes)) if short else (tree, varied)
            first, second = (outputs(json.dumps(one), folder) for one in same)
            assert first == second, f"{key} changes the result and not the id"
    lost = (READ.get(base, set()) | _ALWAYS) - {key for key in told if told[key] == "told"}
    assert lost == set(), {key: told[key] for key in lost}


def test_each_key_is_read_by_a_measure() -> None:
    never = {"check", "search.jobs"}  # they change what a run costs, and nothing of what it finds
    assert set().union(*READ.values()) == set(VARIED) - never - _ALWAYS


SPELLINGS = [
    ("simulate", {"workload": "fixed:512,64"}, {"workload": "fixed:512, 64"}),
    ("simulate", {"workload": "lognormal:prompt=700/1.2,output=200/1.5"}, {"workload": "lognormal:prompt=700.0/cv=1.20, output=2e2/1.5"}),
    ("simulate", {"workload": "uniform:512,64,0.8"}, {"workload": "uniform:512,64,.80,1"}),
    ("simulate", {"arrivals": "gamma:cv=2"}, {"arrivals": "gamma:cv=2.0"}),
    ("simulate", {"slo.ttft": 0.4}, {"slo.ttft": "400ms"}),
    ("simulate", {"slo": {"ttft": 1}}, {"slo": "ttft=1.0"}),
    ("simulate", {"rate": 9}, {"rate": "540/min"}),
    ("simulate", {"rate": 9}, {"rate": None, "rate_per_gpu": 2.25}),
    ("simulate", {"placement": "2xP:tp1pp1 + 2xD:tp1pp1"}, {"placement": "2xP:tp1pp1+2xD:tp1pp1"}),
    ("simulate", {"model": "13b"}, {"model": "opt-13b"}),
    ("simulate", {"requests": 60}, {"requests": 60.0}),
    ("simulate", {"profile_set": {"handover.latency_s": 0.4}}, {"profile_set": {"handover": {"latency_s": 0.40}}}),
    ("simulate", {"profile_set": {"handover.bandwidth_bytes_per_s": 25e9}}, {"profile_set": {"handover.bandwidth_bytes_per_s": 25000000000}}),
    ("simulate", {"profile_set": {"preemption.method": "swap"}}, {"profile_set": {"preemption": {"method": "swap"}}}),
    ("goodput", {"attainment": 0.9}, {"attainment": "90%"}),
    ("steady", {"search.precision": 0.05}, {"search.precision": "5%"}),
    ("queueing", {"queueing.prefill_s": 0.2}, {"queueing.prefill_s": "200ms"}),
    ("queueing", {"queueing.tp_speedup": 2}, {"queueing.tp_speedup": 2.0}),
    ("decode step", {"step.batch": 2}, {"step.batch": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "one", "other"), SPELLINGS)
def test_an_id_is_that_of_the_value_not_of_its_spelling(base: str, one: Tree, other: Tree, folder: Path) -> None:
    first, second = (setting(changed(BASES[base], changes), folder) for changes in (one, other))
    assert first.identity() == second.identity()
    assert id_of(first) == id_of(second)


@pytest.mark.parametrize("key", ["workload", "arrivals", "trace"])
def test_a_file_is_known_by_what_it_says(key: str, tmp_path: Path) -> None:
    """Neither its name and folder nor empty lines and trailing zeros matter; a number does."""
    texts = {
        "a.csv": "arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,10,2\n",
        "b.csv": "arrival_s,prompt_tokens,output_tokens\n0.0,10,2\n1.000,10,2\n",
        "c.csv": "arrival_s,prompt_tokens,output_tokens\n0,10,2\n1.5,11,2\n",
    }
    ids = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        changes = VARIED["trace"] if key == "trace" else {"rate": 9}
        ids.append(id_of(setting(changed(BASES["simulate"], {**changes, key: name}), tmp_path)))
    assert ids[0] == ids[1] != ids[2]
