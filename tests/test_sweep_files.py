# ruff: noqa: E501 (tables of one case a line)
"""Sweep files: what they mean, and that every malformed one is refused on one line before anything is written."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsim.errors import InputError
from dsim.yamlfile import Field, parse_yaml
from experiments.edits import edited, first_difference, parse_assignment, plain
from experiments.factors import parse_factors, row_value
from experiments.sweepfile import Sweep, content_id, read_outline, read_sweep
from tests.cli import Cli

GOOD = """\
dsim_sweep: 1
name: small
about: Attainment of two systems. Nothing here was measured.
base:
  model: opt-13b
  placement: 1xP:tp2pp1 + 1xD:tp1pp1
  workload: fixed:32,4
  slo: {ttft: 0.25, tpot: 0.1}
  requests: 50
  warmup: 0
factors:
  rate_per_gpu: {range: {min: 0.5, max: 1.5, step: 0.5}}
  system:
    choices:
    - {label: DistServe, engine: distserve}
    - {label: vLLM, placement: 1xC:tp1pp1, engine: vllm, policy: prefill-first}
replications: 2
outputs: [attainment.both, ttft_s]
plots:
- {kind: attainment-rate, series: system, file: rates}
published:
  source: a paper
  points:
  - {where: {system: vLLM, rate_per_gpu: 0.5}, attainment.both: 0.9}
quick:
  base.requests: 20
  factors.rate_per_gpu.range.num: 2
"""

# What of GOOD is replaced by what, and words of the line that refuses it; L is the line of what was put in.
MALFORMED = [
    ("dsim_sweep: 1\n", "", ":1: dsim_sweep is missing; add this key"),
    ("dsim_sweep: 1", "dsim_sweep: 2", ":L: dsim_sweep=2 is not the format that this dsim reads, 1; write dsim_sweep: 1"),
    ("dsim_sweep: 1", "dsim_sweep: true", ":L: dsim_sweep=True is not the format"),
    ("dsim_sweep: 1", "dsim_sweep: 1.0", ":L: dsim_sweep=1.0 is not the format"),
    ("  warmup: 0", "  seed: 4294967295", ":L: base.seed=4294967295 leaves no seeds for 2 replications: the last would be abo"),
    ("{label: DistServe, ", "{label: D, slo: {ttft: 1}, slo.ttft: 2, ", ":L: factors.system.choices[0].slo.ttft stands beside slo on"),
    ("replications: 2", "replicatons: 2", ":L: 'replicatons' is not a known key; did you mean 'replications'?"),
    ("name: small", "name: a/b", ":L: name='a/b' must be a plain name of letters, digits, - and _; as in"),
    ("name: small", "name: [a]", ":L: name=[...] must be a text"),
    ("about: Attainment of two systems. Nothing here was measured.\n", "", ":1: about is missing; add this key"),
    ("about: Attainment of two systems. Nothing here was measured.", "about: ''", ":L: about='' must not be empty"),
    ("name: small", "name: small\nname: large", ":3: name stands twice; it also stands on line 2"),
    ("  model: opt-13b", "  modell: opt-13b", ":L: 'modell' is not a known key in base; did you mean 'model'?"),
    ("  model: opt-13b", "  model: opt-14b", ":L: base.model='opt-14b' is not a known model; did you mean"),
    ("  requests: 50", "  requests: -1", ":L: base.requests=-1 must be >= 1; write a value in that range"),
    ("  requests: 50", "  requests: many", ":L: base.requests='many' must be a whole number"),
    ("  requests: 50", "  requests: 50\n  requests: 60", ":10: base.requests stands twice; it also stands on line 9"),
    ("ttft: 0.25", "tftt: 0.25", ":L: 'tftt' is not a known key in base.slo; did you mean 'ttft'?"),
    ("ttft: 0.25", "ttft: 250", ":L: base.slo.ttft=250 reads as 250 s"),
    ("  placement: 1xP:tp2pp1 + 1xD:tp1pp1", "  placement: 1xP:tp3pp1 + 1xD:tp1pp1", ":L: base.placement='1xP:tp3pp1 + "),
    ("  warmup: 0\n", "  warmup: 0\n  slo_scale: {}\n", "base.slo_scale={...} must be a number"),
    ("  warmup: 0", "  measure: simulat", ":L: base.measure='simulat' is not known; did you mean 'simulate'?"),
    ("  warmup: 0", "  profile: none.yaml", ":L: base.profile='none.yaml' does not exist; check the path, which starts from"),
    ("base:", "base: 3\nbaze:", ":L: 'baze' is not a known key; did you mean 'base'?"),
    ("rate_per_gpu: {range", "rate_per_gpuu: {range", ":L: 'rate_per_gpuu' is no key of base; did you mean 'rate_per_gpu'?"),
    ("rate_per_gpu: {range", "slo.tttf: {range", ":L: 'slo.tttf' is no key of base; did you mean 'slo.ttft'?"),
    ("rate_per_gpu: {range", "model.x: {range", ":L: 'model.x' is no key of base; did you mean 'model'?"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 1.5, max: 0.5, step: 0.5}", ".range.max=0.5 must be > min; a single value"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 0.5, step: 0.5}", ".range.max=0.5 must be > min; a single value"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, step: 0}", ".range.step=0 must be > 0; the values go up"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, step: -1}", ".range.step=-1 must be > 0"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, step: 0.4}", ".range.step=0.4 does not divide max - min; "),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, step: 1e-9}", ".range.step=1e-09 makes more than 1000000"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5}", ".range needs step or num; give one of the two"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, step: 0.5, num: 3}", ".range has both step and num"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, num: 1}", ".range.num=1 must be >= 2; both ends are incl"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, num: 2.5}", ".range.num=2.5 must be a whole number"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0, max: 1.5, num: 3, scale: log}", ".range.min=0 must be > 0 on a logar"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 1, max: 9, step: 2, scale: log}", ".range.step=2 does not go with scale"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 1, max: 9, num: 3, scale: lin}", ".range.scale='lin' is not known; exp"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 0.5, max: 1.5, stepp: 1}", ":L: 'stepp' is not a known key in factors.rate"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{max: 1.5, step: 0.5}", ":L: factors.rate_per_gpu.range.min is missing; add"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: .nan, max: 1.5, step: 0.5}", ".range.min=nan must be a finite number"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 30/min, max: 2/s, num: 3}", ".range.max='2/s' must have the unit of min, /m"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: 1 ell, max: 2 ell, num: 3}", ".range.min='1 ell' has an unknown unit; as in"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "{min: low, max: 2, num: 3}", ".range.min='low' must be a number"),
    ("{min: 0.5, max: 1.5, step: 0.5}", "[1, 2]", ":L: factors.rate_per_gpu.range=[...] must be a mapping"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{}", ":L: factors.rate_per_gpu has neither choices nor range; give one"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "[1, 2]", ":L: factors.rate_per_gpu=[...] must be a mapping of keys to"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{choices: []}", ":L: factors.rate_per_gpu.choices=[...] must not be emp"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{choices: 3}", ":L: factors.rate_per_gpu.choices=3 must be a list; write"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{choices: [1, 2, 1.0]}", ".choices[2]=1.0 stands twice; line 12 has it too"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{choices: [60/min, 1/s]}", ".choices[1]='1/s' stands twice; line 12 has"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{choices: [0.5, -1]}", ":L: factors.rate_per_gpu.choices[1]=-1 must be"),
    ("{range: {min: 0.5, max: 1.5, step: 0.5}}", "{choices: [0.5, {label: a}]}", ".choices[0]=0.5 stands among mappings; gi"),
    ("{range: {min: 0.5,", "{choices: [1], range: {min: 0.5,", ":L: factors.rate_per_gpu has both choices and range; give one"),
    ("{label: DistServe, engine: distserve}", "{engine: distserve}", ":L: factors.system.choices[0].label is missing; add"),
    ("{label: DistServe, engine: distserve}", "{label: DistServe}", ":L: factors.system.choices[0]={...} sets no key of base"),
    ("{label: DistServe, engine: distserve}", "{label: vLLM, engine: distserve}", ".choices[1].label='vLLM' stands twice; "),
    ("{label: DistServe, engine: distserve}", "{label: [1], engine: distserve}", ".label=[...] must be a text or a number"),
    ("{label: DistServe, engine: distserve}", "{label: D, engin: distserve}", ":L: 'engin' is no key of base; did you mean 'engine'?"),
    ("{label: DistServe, engine: distserve}", "{label: D, engine: dist}", ".choices[0].engine='dist' has no latency prof"),
    ("{label: DistServe, engine: distserve}", "{label: D, rate_per_gpu: 1}", ":13: factors.system sets rate_per_gpu, and so"),
    ("  system:\n", "  engine: {choices: [vllm]}\n  system:\n", "factors.system sets engine, and so does the factor engine on"),
    ("replications: 2", "replications: 0", ":L: replications=0 must be >= 1"),
    ("replications: 2", "replications: 1000000", ":11: factors makes more than 1000000 tasks (6 combinations x 1000000 r"),
    ("replications: 2", "replications: 2.5", ":L: replications=2.5 must be a whole number"),
    ("replications: 2", "replications: 2\njobs: 0", ":L: jobs=0 must be >= 1"),
    ("[attainment.both, ttft_s]", "[attainment.bth]", ":L: outputs[0]='attainment.bth' is no column of this measure; did"),
    ("[attainment.both, ttft_s]", "[ttft]", ":L: outputs[0]='ttft' is no column of this measure; did you mean 'ttft_s'?"),
    ("[attainment.both, ttft_s]", "[]", ":L: outputs=[...] must not be empty; list columns, or leave the key out"),
    ("[attainment.both, ttft_s]", "[ttft_s, ttft_s]", ":L: outputs[1]='ttft_s' stands twice; keep one of the two"),
    ("[attainment.both, ttft_s]", "ttft_s", ":L: outputs='ttft_s' must be a list; write [a, b]"),
    ("kind: attainment-rate", "kind: attainment-rat", ":L: plots[0].kind='attainment-rat' is not known; did you mean"),
    ("series: system", "series: sistem", ":L: plots[0].series='sistem' is no column of the rows; did you mean 'system'?"),
    ("series: system", "seris: system", ":L: 'seris' is not a known key in plots[0]; did you mean 'series'?"),
    ("file: rates}", "file: rates}\n- {kind: attainment-rate, file: rates}", ":L: plots[1] would overwrite the figure rates; "),
    ("  source: a paper\n", "", ":L: published.source is missing; add this key"),
    ("  source: a paper", "  sorce: a paper", ":L: 'sorce' is not a known key in published; did you mean 'source'?"),
    ("{system: vLLM, rate_per_gpu: 0.5}", "{sistem: vLLM}", ":L: 'sistem' is no factor of this sweep; did you mean 'system'?"),
    ("{system: vLLM, rate_per_gpu: 0.5}", "{system: VLLM}", ".where.system='VLLM' is no value of this factor; it has Dist"),
    ("{system: vLLM, rate_per_gpu: 0.5}", "{rate_per_gpu: 0.75}", ".rate_per_gpu=0.75 is no value of this factor; it has"),
    ("attainment.both: 0.9}", "attainment.bth: 0.9}", ":L: 'attainment.bth' is no column of this measure; did you mean"),
    ("attainment.both: 0.9}", "attainment.both: high}", ":L: published.points[0].attainment.both='high' must be a number"),
    (", attainment.both: 0.9}", "}", ":L: published.points[0]={...} has no published number; add a column"),
    ("  base.requests: 20", "  bas.requests: 20", ":L: quick.bas.requests is no path of this file; did you mean 'base'?"),
    ("  base.requests: 20", "  base..requests: 20", ":L: quick.base..requests is no dotted path; as in base.requests"),
    ("  base.requests: 20", "  base.model.x: 20", ":L: quick.base.model.x leads through base.model, which is a plain v"),
    ("  base.requests: 20", "  factors.system.choices.7.label: x", "leads through factors.system.choices, a list of 2; name an it"),
    ("  base.requests: 20", "  dsim_sweep: 1\n  quick.a: 3", ":L: quick.quick.a is no path of this file; expected one of"),
    ("  base.requests: 20", "  base.requests: 20\n  base.requests: 30", "quick.base.requests stands twice; it also stands on"),
    ("name: small", "name: {a: [b}", ":L: is not YAML: "),
    ("name: small", "name: &a small\nabout: *a", "which is not supported; write the value out"),
    ("name: small", "name: !!python/name:os.system x", ":L: name uses the YAML tag"),
]  # fmt: skip


def sweep_of(text: str, folder: Path, **changes: object) -> Sweep:
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return read_sweep(path, **changes)  # type: ignore[arg-type]


def line_of(text: str, old: str, new: str) -> int:
    """The line of what is new in the text: where the first word that differs stands."""
    changed = text.replace(old, new, 1)
    lines = zip(text.splitlines(), changed.splitlines(), strict=False)
    return next(number for number, (a, b) in enumerate(lines, 1) if a != b)


@pytest.mark.parametrize(("old", "new", "words"), MALFORMED, ids=map(str, range(len(MALFORMED))))
def test_a_malformed_file_is_one_line(old: str, new: str, words: str, cli: Cli, tmp_path: Path) -> None:
    assert old in GOOD
    file = tmp_path / "bad.yaml"
    file.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    line = cli.refused("sweep", str(file), "-o", str(tmp_path / "out"))
    if ":L:" in words:
        number = re.search(r"bad\.yaml:(\d+): ", line)
        assert number is not None, line
        near = line_of(GOOD, old, new)
        # A value on a line after that of its key is reported at the key.
        assert near - 1 <= int(number[1]) <= near + 1, line
        words = words.replace(":L:", f":{number[1]}:")
    assert words in line
    assert "; " in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"]


def test_there_are_many_malformed_files() -> None:
    assert len(MALFORMED) >= 40
    assert len({(old, new) for old, new, _ in MALFORMED}) == len(MALFORMED)


def test_a_file_whose_name_cannot_be_that_of_a_sweep_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "my sweep.yaml"
    path.write_text(GOOD.replace("name: small\n", ""), encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_sweep(path)
    rule = "'my sweep' is the file's name and cannot be the sweep's; add a name: of letters, digits, - and _"
    assert str(error.value) == f"{path}:1: {rule}"
    path.write_text(GOOD, encoding="utf-8")
    assert read_sweep(path).outline.name == "small"


def test_values_of_a_factor_are_told_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has DistServe, vLLM$"):
        sweep_of(GOOD.replace("{system: vLLM, rate_per_gpu: 0.5}", "{system: VLLM}"), tmp_path)


def test_the_last_seed_there_is_can_be_used(tmp_path: Path) -> None:
    text = GOOD.replace("  warmup: 0", "  seed: 4294967294")
    assert [task.seed for task in sweep_of(text, tmp_path).tasks[:2]] == [2**32 - 2, 2**32 - 1]


def test_order_seeds_and_values(tmp_path: Path) -> None:
    tasks = sweep_of(GOOD, tmp_path).tasks
    assert [tuple(task.factors.values()) for task in tasks[::2]] == [
        (rate, system) for rate in (0.5, 1.0, 1.5) for system in ("DistServe", "vLLM")
    ]
    assert [task.replication for task in tasks] == [0, 1] * 6
    assert [task.seed for task in tasks] == [0, 1] * 6
    assert len({task.id for task in tasks}) == len(tasks)
    placements = {str(task.setting.placement) for task in tasks if task.factors["system"] == "vLLM"}
    assert placements == {"1xC:tp1pp1"}


def test_seeds_start_at_that_of_base(tmp_path: Path) -> None:
    tasks = sweep_of(GOOD.replace("  requests: 50", "  requests: 50\n  seed: 7"), tmp_path).tasks
    assert [task.seed for task in tasks[:4]] == [7, 8, 7, 8]


def test_ids_are_of_the_content(tmp_path: Path) -> None:
    def ids(text: str) -> list[str]:
        return [task.id for task in sweep_of(text, tmp_path).tasks]

    known = ids(GOOD)
    assert all(re.fullmatch("[0-9a-f]{64}", found) for found in known)
    # Words for the same, and what is not measured, change nothing; what is, does.
    assert ids(GOOD.replace("ttft: 0.25", "ttft: 250ms").replace("about: A", "about: B")) == known
    assert ids(GOOD.replace("name: small", "name: large").replace("file: rates", "file: r")) == known
    assert set(ids(GOOD.replace("requests: 50", "requests: 51"))).isdisjoint(known)
    assert set(ids(GOOD.replace("ttft: 0.25", "ttft: 0.26"))).isdisjoint(known)
    assert ids(GOOD.replace("replications: 2", "replications: 3"))[:2] == known[:2]
    assert content_id({"a": 1, "b": [0.1]}, 3) == content_id({"b": [0.1], "a": 1}, 3) != content_id({"a": 1}, 3)


def test_quick_and_set(tmp_path: Path) -> None:
    quick = sweep_of(GOOD, tmp_path, quick=True)
    assert {task.setting.traffic.requests for task in quick.tasks} == {20}
    assert [factor.key for factor in quick.outline.factors] == ["rate_per_gpu", "system"]
    assert [choice.value for choice in quick.outline.factors[0].choices] == [0.5, 1.5]
    changed = sweep_of(
        GOOD, tmp_path, quick=True, assignments=["base.requests=30", "base.slo.tpot=50ms", "replications=1", "name=x"]
    )
    assert {task.setting.traffic.requests for task in changed.tasks} == {30}
    assert changed.tasks[0].setting.slo is not None
    assert (changed.tasks[0].setting.slo.tpot_s, changed.outline.name, len(changed.tasks)) == (0.05, "x", 4)
    new = sweep_of(
        GOOD, tmp_path, assignments=["factors.slo.ttft.choices=[100ms, 1]", "factors.system.choices.0.label=D"]
    )
    assert [factor.key for factor in new.outline.factors] == ["rate_per_gpu", "system", "slo.ttft"]
    assert [tuple(task.factors.values()) for task in new.tasks[:4:2]] == [(0.5, "D", 0.1), (0.5, "D", 1)]


def test_published_points_of_a_quick_sweep_are_those_that_it_runs(tmp_path: Path) -> None:
    text = GOOD.replace("  - {where", "  - {where: {rate_per_gpu: 1.0}, attainment.ttft: 0.7}\n  - {where")
    assert len(sweep_of(text, tmp_path).outline.published.points) == 2
    quick = sweep_of(text, tmp_path, quick=True).outline
    assert [point.column for point in quick.published.points] == ["attainment.both"]
    again = tmp_path / "again.yaml"
    again.write_text(quick.yaml(), encoding="utf-8")
    assert [point.value for point in read_outline(again).published.points] == [0.9]


def test_the_resolved_file_is_the_same_sweep(tmp_path: Path) -> None:
    sweep = sweep_of(GOOD, tmp_path, quick=True, assignments=["base.requests=30"])
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "sweep.yaml").write_text(sweep.outline.yaml(), encoding="utf-8")
    again = read_sweep(folder / "sweep.yaml")
    assert [task.id for task in again.tasks] == [task.id for task in sweep.tasks]
    assert again.outline.name == "small"
    assert again.outline.yaml() == sweep.outline.yaml()


def test_the_resolved_file_finds_its_profiles(tmp_path: Path) -> None:
    from profiles.shipped import shipped_profiles

    source = dict(shipped_profiles())["opt-13b-a100-80g-distserve"]
    (tmp_path / "mine.yaml").write_bytes(source.read_bytes())
    text = GOOD.replace("  model: opt-13b\n", "").replace(
        "{label: DistServe, ", "{label: DistServe, profile: mine.yaml, "
    )
    text = text.replace("{label: vLLM, ", "{label: vLLM, model: opt-13b, ")
    sweep = sweep_of(text, tmp_path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "sweep.yaml").write_text(sweep.outline.yaml(), encoding="utf-8")
    assert [task.id for task in read_sweep(folder / "sweep.yaml").tasks] == [task.id for task in sweep.tasks]
    text = GOOD.replace("  model: opt-13b\n", "").replace(
        "  system:\n", "  profile: {choices: [mine.yaml]}\n  system:\n"
    )
    text = text.replace(", engine: vllm, policy", ", policy")
    sweep = sweep_of(text, tmp_path)
    (folder / "sweep.yaml").write_text(sweep.outline.yaml(), encoding="utf-8")
    again = read_sweep(folder / "sweep.yaml")
    assert [(task.id, task.factors) for task in again.tasks] == [(task.id, task.factors) for task in sweep.tasks]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("requests", "--set: 'requests' is no assignment; write PATH=VALUE, as in base.requests=300"),
        ("=3", "--set: '=3' is no assignment"),
        ("base..requests=3", "--set: 'base..requests=3' is no assignment"),
        ("requests=3", "--set: requests is no path of a sweep file; settings are in base, as in base.requests"),
        ("replication=3", "--set: replication is no path of a sweep file; did you mean 'replications'?"),
        ("base.requests=[", "--set: 'base.requests=[' is not YAML"),
        ("base.requests=-5", "--set: base.requests=-5 must be >= 1"),
        ("base.request=5", "--set: 'request' is not a known key in base; did you mean 'requests'?"),
        ("base.rate_per_gpu=5", "--set: base.rate_per_gpu would have no effect: the factor rate_per_gpu sets rate_per_gpu; "),
        ("base.engine=vllm", "--set: base.engine would have no effect: the factor system sets engine; set factors.system"),
        ("quick.replications=5", "--set: quick.replications is no path of a sweep file; expected one of name"),
        ("factors.rate_per_gpu.range.step=0.3", "--set: factors.rate_per_gpu.range.step=0.3 does not divide max - min"),
        ("factors.system.choices.2.label=x", "--set: factors.system.choices.2.label leads through factors.system.choices"),
    ],
)  # fmt: skip
def test_refused_assignments(assignment: str, words: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(GOOD, encoding="utf-8")
    assert words in cli.refused("sweep", str(file), "-o", str(tmp_path / "out"), "--set", assignment)
    assert not (tmp_path / "out").exists()


def values_of(text: str) -> list[object]:
    """The values of one factor, as the file says it."""
    factors = parse_factors(parse_yaml(f"rate: {text}".encode(), file="f.yaml"))
    return [choice.value for choice in factors[0].choices]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{range: {min: 0.1, max: 0.7, step: 0.1}}", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        ("{range: {min: 0.1, max: 0.4, num: 4}}", [0.1, 0.2, 0.3, 0.4]),
        ("{range: {min: 1, max: 4, step: 1}}", [1, 2, 3, 4]),
        ("{range: {min: 100, max: 300, num: 3}}", [100, 200, 300]),
        ("{range: {min: 1, max: 2, num: 3}}", [1, 1.5, 2]),
        ("{range: {min: 0.01, max: 100, num: 5, scale: log}}", [0.01, 0.1, 1.0, 10.0, 100.0]),
        ("{range: {min: 1, max: 1000, num: 4, scale: log}}", [1, 10, 100, 1000]),
        ("{range: {min: 2, max: 3, num: 3, scale: log}}", [2, 2.44948974278, 3]),
        ("{range: {min: 100ms, max: 300ms, step: 100ms}}", [0.1, 0.2, 0.3]),
        ("{range: {min: 10GB/s, max: 40GB/s, num: 4}}", [1e10, 2e10, 3e10, 4e10]),
        ("{range: {min: 1e9, max: 3e9, step: 1e9}}", [1e9, 2e9, 3e9]),
        ("{range: {min: -1, max: 1, step: 1}}", [-1, 0, 1]),
        ("{choices: [200ms, 0.4, 90/min, 25GB/s, 90%, 13b, true, null]}", [0.2, 0.4, 1.5, 2.5e10, 0.9, "13b", True, None]),
        ("{choices: ['fixed:512,64', 1.0, [a, 2]]}", ["fixed:512,64", 1.0, "a, 2"]),
        ("{choices: [{label: x, a: 1}, {label: 2, b.c: 3}]}", ["x", 2]),
    ],
)  # fmt: skip
def test_values(text: str, values: list[object]) -> None:
    found = values_of(text)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@given(
    st.integers(-10_000, 10_000),
    st.integers(1, 5_000),
    st.integers(1, 60),
    st.integers(0, 5),
)
def test_ranges_are_exact_decimals(low: int, step: int, count: int, places: int) -> None:
    def written(units: int) -> str:
        return f"{Decimal(units).scaleb(-places):f}"

    text = f"{{range: {{min: {written(low)}, max: {written(low + step * count)}, step: {written(step)}}}}}"
    wanted = [float(written(low + step * i)) for i in range(count + 1)]
    assert values_of(text) == wanted
    # By number, each value is the float nearest to the exact one.
    text = text.replace(f"step: {written(step)}", f"num: {count + 1}")
    assert values_of(text) == [float(Fraction(low + step * i, 10**places)) for i in range(count + 1)] == wanted


def test_edits_find_keys_with_dots() -> None:
    tree = parse_yaml(b"a: {b.c: {d: 1}, e: [1, {f: 2}]}\ng:", file="f.yaml").field

    def after(assignment: str) -> object:
        return plain(edited(tree, *parse_assignment(assignment)))

    assert after("a.b.c.d=2") == {"a": {"b.c": {"d": 2}, "e": [1, {"f": 2}]}, "g": None}
    assert after("a.b.x=2") == {"a": {"b.c": {"d": 1}, "e": [1, {"f": 2}], "b": {"x": 2}}, "g": None}
    assert after("a.e.1.f={x: [3]}") == {"a": {"b.c": {"d": 1}, "e": [1, {"f": {"x": [3]}}]}, "g": None}
    assert after("g.h=yes") == {"a": {"b.c": {"d": 1}, "e": [1, {"f": 2}]}, "g": {"h": "yes"}}
    for wrong in ("a.b.c.d.e=1", "a.e.2=1", "a.e.x=1"):
        with pytest.raises(InputError, match="leads through"):
            after(wrong)


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({"x": [1, {"y": 2}]}, {"x": [1, {"y": 3}]}, ("x[1].y", "2", "3")),
        ({"x": 1}, {"x": 1, "z": "t"}, ("z", "not given", "t")),
        ({"x": [1]}, {"x": [1, 2]}, ("x", "[1]", "[1, 2]")),
        ({"x": 1, "y": 2}, {"x": 1.0, "y": 2}, None),
    ],
)
def test_first_difference(a: object, b: object, found: object) -> None:
    assert first_difference(a, b) == found


def test_shipped_files_are_valid(cli: Cli) -> None:
    from experiments.shipped import shipped_sweeps

    for name, path in shipped_sweeps().items():
        sweep, quick = read_sweep(path), read_sweep(path, quick=True)
        assert sweep.outline.name == name
        assert len(quick.tasks) <= len(sweep.tasks), name


def test_value_of_a_mapping() -> None:
    field = Field("f.yaml", 3, "x", {"a": Field("f.yaml", 3, "x.a", 1)})
    with pytest.raises(InputError, match="must be a plain value"):
        row_value(field)
    assert row_value(replace(field, value=" two  words ")) == "two words"


def test_texts_of_the_table_are_whole() -> None:
    """Typing slips in the table: what is put in must change the file."""
    for old, new, _ in MALFORMED:
        assert GOOD.replace(old, new, 1) != GOOD
    assert textwrap.dedent(GOOD) == GOOD


def test_the_resolved_file_finds_its_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,5\n200,9\n", encoding="utf-8")
    (tmp_path / "sharegpt").write_text("a directory of data may be called so", encoding="utf-8")
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    config |= {"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    factor = "  workload: {choices: [sharegpt, 'fixed:32,4', lengths.csv]}\n  system:\n"
    for text in (
        GOOD.replace("workload: fixed:32,4", "workload: lengths.csv"),
        GOOD.replace("  workload: fixed:32,4\n", "").replace("  system:\n", factor),
        GOOD.replace("opt-13b", "config.json").replace("engine: distserve", "engine: vllm, placement: 1xC:tp2pp1"),
    ):
        sweep = sweep_of(text, tmp_path)
        (folder / "sweep.yaml").write_text(sweep.outline.yaml(), encoding="utf-8")
        again = read_sweep(folder / "sweep.yaml")
        assert [(task.id, task.factors) for task in again.tasks] == [(task.id, task.factors) for task in sweep.tasks]


def test_labels_that_read_as_quantities_are_texts(tmp_path: Path) -> None:
    text = GOOD.replace("label: vLLM", "label: 2 s").replace("system: vLLM", "system: 2 s")
    text = text.replace("{kind: attainment-rate, series: system,", "{kind: attainment-rate, where: {system: 2 s},")
    outline = sweep_of(text, tmp_path).outline
    assert outline.published.points[0].where == {"system": "2 s", "rate_per_gpu": 0.5}
    assert outline.plots[0].where == {"system": "2 s"}
    assert read_sweep(tmp_path / "small.yaml", assignments=["plots=[]"], quick=True).outline.plots == ()
