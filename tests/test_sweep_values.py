"""Every key of a sweep file with hostile values, wherever a value can stand: one line with place, key and remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from dsim.errors import InputError
from experiments.keys import KEYS
from experiments.sweepfile import read_sweep
from tests.cli import Cli

#: Values that hardly any key takes, as they are written in YAML: tried wherever a value can stand.
EVERYWHERE: Final = ("null", ".nan", "1e400", "2024-01-01", "true", "{a: {b: 1}}", "folder.csv")
#: Values that are hostile to some kind of key or other: tried in `base`.
IN_BASE: Final = (
    *("''", ".inf", "-1", "0", "-0.0", "0.5", "1e-320", "1e9", "4294967296", "9" * 400, "[]", "[null]", "[1, 2]"),
    *("[orca, orca]", "{}", ".", "/dev/null", "none.csv", "latin.csv", "empty.yaml", "bad.csv", "bad.yaml", "loop.csv"),
    *(r'"a\0b"', r'"x\ny"', r'"\u202e"', "x" * 300, "--seed", "1_000", "'5'", "-5ms", "1e400s", "nan%", "150%", "'%s'"),
    *("ttft=0", "1xP:tp0", "fixed:0,1", "gamma:cv=nan", "lognormal:prompt=nan,output=1/1", "sharegpt:3"),
)
#: What some keys take of these.
ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "profile_set": ("{}",),
    "handover": ("{}",),
    "token_budget": ("1e9",),
    "rate": ("0.5", "1e9", "1_000", "'5'"),
    "rate_per_gpu": ("0.5", "1_000", "'5'"),
    "requests": ("1e9",),
    "warmup": ("0", "-0.0", "1e9"),
    "finite": ("true",),
    "slo.ttft": ("0.5", "'5'"),
    "slo.tpot": ("0.5",),
    "slo.e2e": ("0.5", "1_000", "'5'"),
    "slo_scale": ("0.5",),
    "attainment": ("0.5", "1e-320"),
    "kv_blocks": ("1e9",),
    "extrapolate": ("true",),
    "check": ("true",),
    "seed": ("0", "-0.0", "1e9"),
    "quantiles": ("[]",),
    "search": ("{}",),
    "search.token_budgets": ("[1, 2]",),
    "search.max_batch_tokens": ("'5'",),
    "search.max_batch_requests": ("'5'",),
    "search.precision": ("0.5", "1e-320"),
    "search.requests": ("1e9",),
    "search.timing": ("true",),
    "step.batch": ("0", "-0.0"),
    "step.chunk_tokens": ("1e9", "4294967296"),
    "queueing.prefill_s": ("0.5", "1_000", "'5'", "1e-320"),
}
HEAD: Final = "dsim_sweep: 1\nabout: Nothing. Nothing.\n"
Base = dict[str, str | dict[str, str]]


def base_of(key: str) -> Base:
    """A setting that is right and reads the key."""
    top = key.partition(".")[0]
    disaggregated: Base = {"model": "13b", "placement": "1xP:tp2pp1 + 1xD:tp1pp1", "slo": {"ttft": "0.25"}}
    step: Base = {"phase": "chunked", "prompt_tokens": "64", "context_tokens": "64", "chunk_tokens": "32"}
    queueing: Base = {"formula": "speedup", "prefill_s": "0.2", "tp_speedup": "1.5"}
    colocated: Base = {"model": "13b", "placement": "1xC:tp1pp1", "rate": "4"}
    search: Base = {"measure": "search", "model": "13b", "slo": {"ttft": "0.25", "tpot": "0.1"}}
    bases: dict[str, Base] = {
        "step": {"measure": "step", "model": "13b", "step": step},  # type: ignore[dict-item]
        "queueing": {"measure": "queueing", "rate": "1", "queueing": queueing},  # type: ignore[dict-item]
        **dict.fromkeys(("search", "attainment", "slo"), search),
        "trace": {**disaggregated, "trace": "trace.csv"},
        "rate_per_gpu": {**disaggregated, "rate_per_gpu": "1"},
        "token_budget": {**colocated, "policy": "chunked"},
        "policy": colocated,
        "colocated_engine": colocated,
        "colocated_profile": colocated,
    }
    return bases.get(top, {**disaggregated, "rate": "4"})


def with_value(base: Base, key: str, value: str | None) -> Base:
    """The setting with one key's value, or without it."""
    top, _, inner = key.partition(".")
    if not inner:
        return {name: item for name, item in base.items() if name != top} | ({} if value is None else {top: value})
    section = base.get(top, {})
    assert isinstance(section, dict)
    kept = {name: item for name, item in section.items() if name != inner} | ({} if value is None else {inner: value})
    return {**base, top: kept} if kept else {name: item for name, item in base.items() if name != top}


def written(base: Base) -> str:
    lines = ["base:"] if base else ["base: {}"]
    for key, value in base.items():
        lines += [f"  {key}:", *(f"    {k}: {v}" for k, v in value.items())] if isinstance(value, dict) else []
        lines += [] if isinstance(value, dict) else [f"  {key}: {value}"]
    return "\n".join(lines) + "\n"


def sweep_text(place: str, key: str, value: str) -> str:
    """A sweep file whose only hostile value stands in some place, on its last line but in `base`."""
    good = base_of(key)
    without = HEAD + written(with_value(good, key, None))
    return {
        "base": HEAD + written(with_value(good, key, value)),
        "factor": f"{without}factors:\n  {key}:\n    choices:\n    - {value}\n",
        "linked choice": f"{without}factors:\n  system:\n    choices:\n    - label: A\n      {key}: {value}\n",
        "quick": f"{HEAD}{written(good)}quick:\n  base.{key}: {value}\n",
        "--set": HEAD + written(good),
    }[place]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that are none."""
    found = tmp_path_factory.mktemp("sweeps")
    (found / "folder.csv").mkdir()
    (found / "loop.csv").symlink_to("loop.csv")
    (found / "latin.csv").write_bytes("größe".encode("latin-1"))
    (found / "empty.yaml").write_bytes(b"")
    (found / "bad.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,x,1\n", encoding="utf-8")
    (found / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n1,10,2\n", encoding="utf-8")
    (found / "bad.yaml").write_text("dsim_profile: 1\nmodel: [\n", encoding="utf-8")
    return found


def refusal(path: Path, place: str, key: str, value: str) -> str | None:
    """What is said of the value; None where it is taken."""
    path.write_text(sweep_text(place, key, value), encoding="utf-8")
    try:
        read_sweep(path, assignments=[f"base.{key}={value}"] if place == "--set" else ())
    except InputError as error:
        return str(error)
    return None


def problem_of(said: str, path: Path, place: str, key: str, value: str) -> str | None:
    """What is wrong with a refusal."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = lines.index(next(line for line in lines if line.endswith(f" {value}"))) + 1 if place != "--set" else 1
    where = f"{'--set' if place == '--set' else path}:{number}: "
    if not said.startswith(where):
        return f"starts with {said[:80]!r}, not with {where!r}"
    what = said.removeprefix(where)
    if re.search(rf"\b{key.rpartition('.')[2]}\b", what) is None:
        return f"does not name the key: {what!r}"
    if "; " not in what or not what.isprintable() or len(what) > 900:
        return f"is no line of rule and remedy: {what!r}"
    if "--" in what.replace("'--seed'", "").replace("base.--seed", ""):
        return f"speaks of an option: {what!r}"
    return None


@pytest.mark.parametrize("place", ["base", "factor", "linked choice", "quick", "--set"])
@pytest.mark.parametrize("key", [key.name for key in KEYS])
def test_hostile_values_are_refused_on_one_line(
    key: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    taken = set()
    for value in (*EVERYWHERE, *(IN_BASE if place == "base" else ())):
        path = Path("hostile.yaml")
        said = refusal(path, place, key, value)
        if said is None:
            taken.add(value)
        else:
            assert problem_of(said, path, place, key, value) is None, (value, said)
    if place == "base":
        assert taken == set(ACCEPTED.get(key, ()))
    else:
        # A factor of a mapping has no label.
        nothing = {"{}"} if place == "factor" else set()
        assert taken == (set(ACCEPTED.get(key, ())) & set(EVERYWHERE)) - nothing


def test_every_value_that_is_accepted_is_tried() -> None:
    assert {value for values in ACCEPTED.values() for value in values} <= {*EVERYWHERE, *IN_BASE}
    assert set(ACCEPTED) <= {key.name for key in KEYS}


@pytest.mark.parametrize("key", [key.name for key in KEYS[::4]])
def test_the_command_ends_with_2(key: str, folder: Path, cli: Cli) -> None:
    path = folder / "hostile.yaml"
    path.write_text(sweep_text("base", key, "folder.csv"), encoding="utf-8")
    assert cli.refused("sweep", str(path), "--dry-run").startswith(f"{path}:")


def test_devices_and_pipes_are_no_traces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    pipe = folder / "pipe.csv"
    os.mkfifo(pipe)
    for key in ("trace", "workload", "arrivals", "profile", "prefill_profile"):
        for value in (str(pipe), "/dev/zero"):
            said = refusal(Path("hostile.yaml"), "base", key, value)
            assert said is not None
            assert f"base.{key}='{value}' is no plain file; give a file that can be read twice" in said
