"""`dsim plot`: figures of the directories that other commands write, and what it refuses."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pandas as pd
import pytest

from experiments.plots.results import _quantiles as run_quantiles
from tests.cli import Cli

RUN = "simulate -m 13b -p 1xP:tp2pp1+1xD:tp1pp1 --finite -n 60 -r 3 --slo ttft=0.4,tpot=0.1 -q"

SWEEP = """\
dsim_sweep: 1
name: small
about: What dsim plot draws.
base:
  model: opt-13b
  workload: fixed:128,16
  requests: 30
  warmup: 0
  finite: true
  slo: {ttft: 0.4, tpot: 0.1}
  quantiles: [ttft_s]
factors:
  system:
    choices:
    - {label: apart, placement: 1xP:tp1pp1 + 1xD:tp1pp1}
    - {label: together, placement: 1xC:tp1pp1, engine: vllm}
  rate_per_gpu: {choices: [0.5, 1]}
replications: 2
plots:
- {kind: attainment-rate, series: system, file: by-rate}
- {kind: cdf, y: quantiles.ttft_s, series: system, where: {rate_per_gpu: 1}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a run, a logged run, a sweep and a search, each written by its command."""
    from dsim.cli import main

    folder = tmp_path_factory.mktemp("made")
    assert main([*RUN.split(), "-o", str(folder / "run")]) == 0
    assert main([*RUN.split(), "-o", str(folder / "logged"), "--step-log"]) == 0
    (folder / "small.yaml").write_text(SWEEP)
    assert main(["sweep", str(folder / "small.yaml"), "-o", str(folder / "sweep"), "-q", "-j", "1"]) == 0
    search = "search -m 13b --slo ttft=0.4,tpot=0.1 --gpus 2 -n 50 --top 1 --precision 0.2 -q -j 1"
    assert main([*search.split(), "-o", str(folder / "search")]) == 0
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def both(*stems: str) -> set[str]:
    return {f"{stem}.{form}" for stem in stems for form in ("svg", "png")}


def test_a_run(cli: Cli, made: Path, tmp_path: Path) -> None:
    run = cli("plot", str(made / "run"), "-o", str(tmp_path / "a"))
    assert (run.code, run.out) == (0, "")
    assert run.err.startswith("wrote cdf.svg, cdf.png, breakdown.svg, breakdown.png to ")
    assert names(tmp_path / "a") == both("cdf", "breakdown")
    assert cli("plot", str(made / "logged"), "-o", str(tmp_path / "b"), "-q").err == ""
    assert names(tmp_path / "b") == both("cdf", "breakdown", "timeline")
    svg = (tmp_path / "b" / "timeline.svg").read_text()
    assert "opt-13b on a100-80g, 1xP:tp2pp1 + 1xD:tp1pp1, 3 requests/s" in svg


def test_a_window_of_the_timeline(cli: Cli, made: Path, tmp_path: Path) -> None:
    assert cli("plot", str(made / "logged"), "-o", str(tmp_path), "--window", "1s,2500ms", "--format", "svg").code == 0
    assert names(tmp_path) == {"timeline.svg"}
    assert ">2.4</text>" in (tmp_path / "timeline.svg").read_text()


def test_a_search(cli: Cli, made: Path, tmp_path: Path) -> None:
    assert cli("plot", str(made / "search"), "-o", str(tmp_path)).code == 0
    assert names(tmp_path) == both("goodput-bars", "attainment-rate", "staircase", "breakdown")
    stairs = (tmp_path / "staircase.svg").read_text()
    assert "cost (USD/h, at" in stairs
    answer = json.loads((made / "search" / "result.json").read_text())
    best = answer["best"]["disaggregated"]
    per_copy = best["goodput_per_gpu_per_s"]["best"] * best["num_gpus"]
    assert f"{best['num_gpus']} GPUs a copy, {per_copy:.3g}" in stairs
    assert "finite runs, a transient" in stairs
    # Beside its own files too, none of which it has to replace.
    assert cli("plot", str(made / "search"), "--kind", "staircase", "--title", "Mine", "-q").code == 0
    assert ">Mine</text>" in (made / "search" / "staircase.svg").read_text()


def test_a_sweep(cli: Cli, made: Path, tmp_path: Path) -> None:
    assert both("by-rate", "cdf") <= names(made / "sweep")
    assert cli("plot", str(made / "sweep"), "-o", str(tmp_path / "all")).code == 0
    assert names(tmp_path / "all") == both("by-rate", "cdf")
    for name in names(tmp_path / "all"):
        assert (tmp_path / "all" / name).read_bytes() == (made / "sweep" / name).read_bytes()
    options = ["--kind", "line", "-x", "rate_per_gpu", "-y", "ttft_s.p90", "-y", "tpot_s.p90", "--series", "system"]
    assert cli("plot", str(made / "sweep"), *options, "--where", "system=apart", "-o", str(tmp_path / "one")).code == 0
    assert names(tmp_path / "one") == both("line")
    svg = (tmp_path / "one" / "line.svg").read_text()
    assert ">TTFT, p90 (s)</text>" in svg
    assert ">apart</text>" in svg
    assert ">together</text>" not in svg


def drawn(cli: Cli, folder: Path, out: Path, *options: str) -> str:
    """Return the only figure that options describe, as SVG."""
    assert cli("plot", str(folder), "-o", str(out), "--format", "svg", "-q", *options).code == 0
    (path,) = out.iterdir()
    return path.read_text()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            "--kind heatmap -x rate_per_gpu -y system --set value=attainment.both --set best=placement --set file=mine",
            [">A  1xP:tp1pp1 + 1xD:tp1pp1</text>", ">requests within all limits (%)</text>"],
        ),
        ("--kind attainment-rate --series system --set target=0.5", [">target 50 %</text>"]),
        ("--kind attainment-rate", [">together</text>"]),  # a factor that was forgotten is told apart
        (
            "--kind line -x rate_per_gpu -y ttft_s.p90 --series system --set log=xy --set ylabel=mine(s)"
            " --set 'marks=[{x: 1, label: here}]'",
            [">mine(s)</text>", ">here</text>"],
        ),
        ("--kind breakdown -x rate_per_gpu --series system --set share=true", ["share of the mean latency (%)"]),
        ("--kind cdf --series system --where rate_per_gpu=1 --set xlabel=mine", [">mine</text>", "over replications"]),
        ("--kind pareto --series system --set labels=rate_per_gpu", ["rate per GPU "]),
    ],
)
def test_every_key_of_a_figure_can_be_given(
    cli: Cli, made: Path, tmp_path: Path, options: str, wanted: list[str]
) -> None:
    svg = drawn(cli, made / "sweep", tmp_path, *shlex.split(options))
    for text in wanted:
        assert text in svg


def test_keys_of_a_search_and_of_a_run(cli: Cli, made: Path, tmp_path: Path) -> None:
    options = ["--kind", "staircase", "--set", "price_usd_per_h=7", "--set", "max_rate_per_s=50"]
    assert "cost (USD/h, at 7 USD/h a GPU)" in drawn(cli, made / "search", tmp_path / "search", *options)
    shares = drawn(cli, made / "run", tmp_path / "run", "--kind", "breakdown", "--set", "share=true")
    assert "share of the mean latency (%)" in shares
    timeline = ["--kind", "timeline", "--title", "Mine"]
    assert ">Mine</text>" in drawn(cli, made / "logged", tmp_path / "logged", *timeline)


REFUSED = [
    ("sweep", ["--kind", "heatmap", "-x", "rate_per_gpu", "-y", "system"], "--set: value is missing; add --set value="),
    ("sweep", ["--set", "log=x"], "--set: 'log=x' needs a kind of figure; add --kind"),
    ("sweep", ["--kind", "line", "--set", "log"], "--set: 'log' must be a key and its value; as in value="),
    ("sweep", ["--kind", "line", "--set", "kind=cdf"], "--set: 'kind=cdf' is an option of its own; give it as --kind"),
    ("sweep", ["--kind", "line", "-x", "a", "--set", "x=b"], "--set: 'x=b' is given twice; leave one of them out"),
    ("sweep", ["--kind", "cdf", "--set", "valu=a"], "--set: 'valu' is not a known key; "),
    (
        "sweep",
        ["--kind", "cdf", "--set", "target=0.5"],
        "--set: 'target' has no use in a figure of kind cdf; leave it out",
    ),
    ("sweep", ["--kind", "attainment-rate", "--set", "target=2"], "--set: target=2 must be "),
    (
        "sweep",
        ["--kind", "heatmap", "-x", "rate_per_gpu", "-y", "system", "--set", "value=attainmen"],
        "--set: value='attainmen' is no column of the rows; did you mean",
    ),
    ("search", ["--kind", "staircase", "--set", "log=x"], "--set: 'log' has no use in a figure of kind staircase"),
    ("search", ["--kind", "staircase", "--set", "price_usd_per_h=-1"], "--set: price_usd_per_h=-1 must be "),
    ("logged", ["--kind", "timeline", "--set", "log=x"], "--set: 'log' has no use in a figure of kind timeline"),
    ("nowhere", [], "RESULT: '{}' does not exist; give what dsim sweep, search or simulate wrote to"),
    ("small.yaml", [], "RESULT: '{}' is no directory; give what dsim sweep, search or simulate wrote to"),
    (".", [], "RESULT: '{}' has none of sweep.yaml, result.json, summary.json; give what dsim sweep, dsim search -o"),
    ("run", ["--kind", "timelin"], "--kind: 'timelin' cannot be drawn of this result; did you mean 'timeline'?"),
    ("run", ["--kind", "timeline"], "{}: has no all_requests.csv; run dsim simulate again with -o and --step-log"),
    ("run", ["-x", "rate"], "-x: 'rate' belongs to sweeps; leave it out; {} is no sweep's directory"),
    ("run", ["-y", "a", "-y", "b"], "-y: 'a, b' belongs to sweeps; leave it out"),
    (
        "run",
        ["--kind", "cdf", "--window", "1,2"],
        "--window: '1,2' belongs to timelines; give the directory of dsim simulate",
    ),
    ("logged", ["--window", "1"], "--window: '1' must be a start and an end; as in 10s,12s"),
    ("logged", ["--window", "2,1"], "--window: '2,1' must start before it ends; as in 10s,12s"),
    ("logged", ["--window", "1h,2h"], "--window: "),
    ("logged", ["--window", "9999s,10000s"], "--window: '9999,10000' lies outside the run; the run lasts "),
    (
        "search",
        ["--kind", "cdf"],
        "--kind: 'cdf' cannot be drawn of this result; expected one of goodput-bars, attainment-rate",
    ),
    ("search", ["--window", "1,2"], "--window: '1,2' belongs to timelines"),
    ("sweep", ["--kind", "timeline"], "--kind: 'timeline' cannot be drawn of this result; "),
    ("sweep", ["-x", "rate_per_gpu"], "-x: 'rate_per_gpu' needs a kind of figure; add --kind, such as --kind line"),
    (
        "sweep",
        ["--kind", "line", "-x", "rate_per_gp", "-y", "ttft_s.p90"],
        "-x: 'rate_per_gp' is no column of the rows; did you mean 'rate_per_gpu'?",
    ),
    ("sweep", ["--kind", "line", "-x", "rate_per_gpu"], "--kind: needs the key y; add the column to show"),
    (
        "sweep",
        ["--kind", "line", "-x", "rate_per_gpu", "-y", "tft_s.p90"],
        "-y: 'tft_s.p90' is no column of the rows; did you mean 'ttft_s.p90'?",
    ),
    ("sweep", ["--kind", "cdf", "-x", "rate_per_gpu"], "-x: has no use in a figure of kind cdf; leave it out"),
    (
        "sweep",
        ["--kind", "line", "-x", "rate_per_gpu", "-y", "ttft_s.p90", "--series", "sys"],
        "--series: 'sys' is no column",
    ),
    (
        "sweep",
        ["--kind", "line", "--where", "system"],
        "--where: 'system' must be a column and its value; as in system=vllm",
    ),
    (
        "sweep",
        ["--kind", "attainment-rate", "--where", "sytem=a"],
        "--where: 'sytem' is no column of the rows; did you mean 'system'?",
    ),
    (
        "sweep",
        ["--kind", "attainment-rate", "--where", "system=c"],
        "plot attainment-rate: has no rows to show; relax `where`",
    ),
    ("sweep", ["--kind", "attainment-rate", "--where", "system=[1]"], "--where: 'system=[1]' must be one value"),
    ("sweep", ["--format", "pdf"], "--format: 'pdf' is not known; expected one of svg, png"),
    ("sweep", ["--format", ""], "--format: '' is not known"),
    (
        "sweep",
        [],
        "--output-dir: '{}' already has by-rate.svg, by-rate.png, cdf.svg, cdf.png; give another directory, or",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_refusals_are_one_line_and_leave_nothing(
    cli: Cli, made: Path, name: str, options: list[str], message: str
) -> None:
    before = sorted(made.rglob("*"))
    error = cli.refused("plot", str(made / name), *options)
    assert message.replace("{}", str(made / name)) in error
    assert sorted(made.rglob("*")) == before


BROKEN = [
    ("summary.json", "no json", "is no JSON object; run dsim simulate again"),
    ("summary.json", "{}", "is not what dsim simulate writes; run the command that wrote it again"),
    ("requests.csv", "a,b\n1,2\n", "has no column ttft_s; run dsim simulate again"),
    ("steps.csv", "role,instance,part,launch_s,end_s,prefill,decode\nX,0,0,0,1,0,\n", "has the role 'X'; run"),
    (
        "steps.csv",
        "role,instance,part,launch_s,end_s,prefill,decode\nP,0,0,0,x,0,\n",
        "has end_s='x', which is no number",
    ),
    (
        "steps.csv",
        "role,instance,part,launch_s,end_s,prefill,decode\nP,0,0,0,1,a,\n",
        "has prefill='a', which are no request",
    ),
    ("steps.csv", "role,instance,part,launch_s,end_s,prefill,decode\nP,0\n", "has a row with too few cells"),
    ("steps.csv", "role,instance,part,launch_s,end_s,prefill,decode\nP,0,0,0,1,99999,\n", "names request 99999"),
    ("kv.csv", "role,instance\n", "has no column part; run dsim simulate again"),
    ("all_requests.csv", "", "has no column arrival_s; run dsim simulate again"),
]


@pytest.mark.parametrize(("name", "text", "message"), BROKEN)
def test_files_that_no_command_wrote(cli: Cli, made: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    shutil.copytree(made / "logged", tmp_path / "broken")
    (tmp_path / "broken" / name).write_text(text)
    error = cli.refused("plot", str(tmp_path / "broken"), "-o", str(tmp_path / "out"))
    assert error.startswith(f"{tmp_path / 'broken' / name}: ")
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["nothing", "[]", "{}", '{"trials": 3}', '{"trials": [{}]}'])
def test_a_search_that_no_command_wrote(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    error = cli.refused("plot", str(tmp_path))
    assert error.startswith(f"{tmp_path / 'result.json'}: is no")
    assert names(tmp_path) == {"result.json"}


def test_the_transfer_of_a_run_is_without_the_wait_for_the_decode_side(cli: Cli, tmp_path: Path) -> None:
    run = "simulate -m 13b -p 2xP:tp1pp1+1xD:tp1pp1 -r 12 -n 200 --warmup 0 --kv-blocks 600 -q -o"
    assert cli(*run.split(), str(tmp_path)).code == 0
    requests = pd.read_csv(tmp_path / "requests.csv")
    moved_s = requests["transfer_end_s"] - requests["transfer_start_s"]
    waited_s = requests["transfer_end_s"] - requests["prefill_end_s"]
    assert waited_s.max() > 10 * moved_s.max()  # the case tells the two apart
    (row,) = run_quantiles(tmp_path).to_dict("records")
    assert row["quantiles.transfer_s"][-1] == pytest.approx(moved_s.max(), rel=1e-6)
