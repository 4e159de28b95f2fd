# ruff: noqa: E501 (tables of one case a line)
"""`dsim sweep`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import runner
from experiments.shipped import shipped_sweeps
from experiments.store import load_sweep
from tests.cli import Cli
from tests.test_sweep_files import GOOD


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_results_of_a_sweep(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    run = cli("sweep", str(file), "-o", str(folder), "-j", "1")
    assert run.code == 0
    names = ["compare.csv", "rates.png", "rates.svg", "rows.jsonl", "summary.csv", "summary.json", "sweep.yaml"]
    assert run.err == f"wrote {', '.join(names)} to {folder}\n"
    assert sorted(path.name for path in folder.glob("[!.]*")) == names
    lines = run.out.splitlines()
    assert lines[0] == "small: Attainment of two systems."
    assert re.split(r"  +", lines[2].strip()) == ["rate_per_gpu", "system", "attainment.both"]
    assert re.split(r"  +", lines[4].strip()) == ["0.5", "DistServe", "1"]
    assert len(lines[4:10]) == 6
    assert "published: a paper" in lines
    with (folder / "summary.csv").open(encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    metrics = ["attainment.both", *(f"ttft_s.{name}" for name in ("mean", "p50", "p90", "p95", "p99"))]
    limits = [name + limit for name in metrics for limit in ("", ".low", ".high")]
    assert list(rows[0]) == ["rate_per_gpu", "system", *limits, "replications", "failed", "missing"]
    assert [(row["rate_per_gpu"], row["system"]) for row in rows][:3] == [
        ("0.5", "DistServe"),
        ("0.5", "vLLM"),
        ("1.0", "DistServe"),
    ]
    assert {(row["replications"], row["failed"], row["missing"]) for row in rows} == {("2", "0", "")}
    with (folder / "compare.csv").open(encoding="utf-8") as text:
        (point,) = csv.DictReader(text)
    assert point == {
        "rate_per_gpu": "0.5",
        "system": "vLLM",
        "column": "attainment.both",
        "published": "0.9",
        "simulated": "1.0",
        "low": "1.0",
        "high": "1.0",
        "difference": str(1.0 - 0.9),
        "ratio": str(1.0 / 0.9),
        "note": "",
    }


def test_rows(cli: Cli, file: Path, tmp_path: Path) -> None:
    assert cli("sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1").code == 0
    lines = (tmp_path / "out" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert list(rows[0]) == ["id", "factors", "replication", "seed", "status", "outputs", "version", "profiles"]
    assert [row["seed"] for row in rows] == [0, 1] * 6
    assert rows[0]["factors"] == {"rate_per_gpu": 0.5, "system": "DistServe"}
    assert {tuple(row["profiles"]) for row in rows} == {("decode", "prefill"), ("colocated",)}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for row in rows for digest in row["profiles"].values())
    assert rows[0]["outputs"]["attainment"]["both"] == 1
    assert len({row["id"] for row in rows}) == len(rows) == 12


def test_formats(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    text = cli("sweep", str(file), "-o", str(folder), "-j", "1", "--format", "csv").out
    assert text == (folder / "summary.csv").read_text(encoding="utf-8")
    run = cli("sweep", str(file), "-o", str(folder), "--resume", "--format", "json", "--quiet")
    assert run.err == ""
    answer = json.loads(run.out)
    assert list(answer) == ["name", "about", "summary", "published", "comparisons", "failed"]
    assert [row["system"] for row in answer["summary"]] == ["DistServe", "vLLM"] * 3
    table = list(csv.DictReader(io.StringIO(text)))
    assert [str(row["ttft_s.p90"]) for row in answer["summary"]] == [row["ttft_s.p90"] for row in table]
    assert (answer["comparisons"][0]["published"], answer["failed"]) == (0.9, [])


def test_one_replication_has_no_interval(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    base = ("sweep", str(file), "-o", str(folder), "-j", "1", "--set", "replications=1")
    answer = json.loads(cli(*base, "--format", "json").out)
    row = answer["summary"][0]
    assert (row["attainment.both"], row["attainment.both.low"], row["attainment.both.high"]) == (1, None, None)
    frame = load_sweep(folder).summary
    assert frame["attainment.both.low"].isna().all()
    assert frame["attainment.both"].dtype.kind == "f"


def test_the_default_folder_has_the_sweep_s_name(
    cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("sweep", "small.yaml", "--quick", "-j", "1").code == 0
    assert (tmp_path / "results" / "small" / "summary.csv").is_file()
    assert cli("sweep", "small.yaml", "--quick", "-j", "1", "--set", "name=other").code == 0
    assert (tmp_path / "results" / "other" / "summary.csv").is_file()


def test_dry_run(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    base = ("sweep", str(file), "-o", str(folder), "-j", "1")
    run = cli(*base, "--dry-run")
    assert (run.code, run.err, folder.exists()) == (0, "", False)
    assert "rate_per_gpu (3) x system (2) x 2 replications: 12 tasks, 0 of them done" in run.out
    assert re.search(rf"the rest takes between \d+ s and \d+ s on one process, into {folder}", run.out)
    plan = json.loads(cli(*base, "--dry-run", "--format", "json", "--quick").out)
    low_s, middle_s, high_s = (plan.pop(f"estimated_{name}s") for name in ("low_", "", "high_"))
    assert 0 < low_s < middle_s < high_s < 60
    assert plan == {
        "name": "small",
        "factors": {"rate_per_gpu": 2, "system": 2},
        "replications": 2,
        "tasks": 8,
        "done": 0,
        "jobs": 1,
        "output_dir": str(folder),
    }
    assert cli(*base, "--shard", "1/2", "--quiet").code == 0
    plan = json.loads(cli(*base, "--dry-run", "--resume", "--format", "json").out)
    assert (plan["tasks"], plan["done"]) == (12, 6)
    assert cli(*base, "--dry-run", "--format", "csv", "--resume").out.count("\n") == 2
    assert "go on with --resume" in cli.refused(*base, "--dry-run")


def test_a_sweep_may_limit_its_processes(cli: Cli, file: Path) -> None:
    def jobs(*arguments: str) -> object:
        return json.loads(cli("sweep", str(file), "--dry-run", "--format", "json", *arguments).out)["jobs"]

    assert jobs("-j", "3") == 3
    assert jobs("-j", "3", "--set", "jobs=1") == 1
    assert jobs("-j", "3", "--set", "jobs=8") == 3


def test_list(cli: Cli) -> None:
    known = shipped_sweeps()
    listed = json.loads(cli("sweep", "--list", "--format", "json").out)
    assert [row["name"] for row in listed] == list(known)
    assert all(row["tasks"] > 0 and Path(row["file"]).is_file() for row in listed)
    table = cli("sweep", "--list").out
    assert all(name in table for name in known)
    assert cli("sweep", "--list", "--format", "csv").out.count("\n") == len(known) + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "FILE: is needed; give a sweep file, or one of the names that dsim sweep --list shows"),
        (("none.yaml",), "FILE: 'none.yaml' is no file and no name of a shipped sweep; check the path; dsim sweep --list"),
        (("{dir}",), "is a directory; give a sweep file, or a name that --list shows"),
        (("{file}", "--resume", "--overwrite"), "--resume: contradicts --overwrite; leave one out"),
        (("{file}", "--retry-failed"), "--retry-failed: needs --resume; add --resume"),
        (("{file}", "-j", "0"), "--jobs: 0 must be >= 1"),
        (("{file}", "-o", "{file}"), "is no directory; give another path"),
        (("{file}", "--shard", "3/2"), "--shard: '3/2' is no part of a whole"),
        (("{file}", "--format", "yaml"), "--format: "),
        (("{file}", "--resum"), "--resum: is no option of dsim sweep; did you mean '--resume'?"),
        (("{file}", "more"), "dsim sweep: got unexpected extra argument"),
    ],
)  # fmt: skip
def test_refused_options(arguments: tuple[str, ...], words: str, cli: Cli, file: Path, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    shown = [argument.format(dir=tmp_path / "dir", file=file) for argument in arguments]
    assert words in cli.refused("sweep", *shown)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "small.yaml"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a: [", b"- 1\n", b"dsim_sweep: 1\n"])
def test_files_that_are_no_sweep(content: bytes, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_bytes(content)
    assert "odd.yaml" in cli.refused("sweep", str(file))


def test_a_figure_that_cannot_be_drawn_leaves_the_rest(
    cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(setting: object, *, seed: int) -> dict[str, Any]:
        del setting
        return {"ttft_s": {"mean": 0.1 + seed}}

    monkeypatch.setattr(runner, "measure", without)
    run = cli("sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1")
    assert run.code == 1
    assert run.out
    assert "error: plot rates: " in run.err
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == [
        "compare.csv",
        "rows.jsonl",
        "summary.csv",
        "summary.json",
        "sweep.yaml",
    ]


# What vLLM's tools read


def test_keys_of_plot_pareto(cli: Cli, file: Path, tmp_path: Path) -> None:
    """Its tokens/s per user are output_throughput / max_concurrency, per GPU output_throughput / (tp · pp · dp)."""
    folder = tmp_path / "out"
    assert cli("sweep", str(file), "-o", str(folder), "-j", "1").code == 0
    records = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    frame = load_sweep(folder).summary
    assert isinstance(records, list)
    assert len(records) == len(frame) == 6
    for record, (_, row) in zip(records, frame.iterrows(), strict=True):
        assert (record["rate_per_gpu"], record["system"]) == (row["rate_per_gpu"], row["system"])
        gpus = record["tensor_parallel_size"] * record["pipeline_parallel_size"] * record["data_parallel_size"]
        assert gpus == record["num_gpus"] == record["gpu_count"] == {"DistServe": 3, "vLLM": 1}[row["system"]]
        # Tokens, not requests: every request has four.
        assert record["output_throughput"] == pytest.approx(4 * record["request_throughput"])
        assert record["output_throughput"] / gpus == pytest.approx(row["output_tokens_per_gpu_per_s"])
        assert record["max_concurrency"] == pytest.approx(row["throughput_per_s"] * row["e2e_s.mean"])
        per_user = record["output_throughput"] / record["max_concurrency"]
        assert per_user == pytest.approx(4 / row["e2e_s.mean"])
        assert record["p90_ttft_ms"] == pytest.approx(1000 * row["ttft_s.p90"])
        assert record["median_tpot_ms"] == pytest.approx(1000 * row["tpot_s.p50"])
        assert record["request_rate"] == pytest.approx(row["rate_per_s"])
        assert all(isinstance(value, int | float) for key, value in record.items() if key != "system")


def test_degrees_of_equal_instances(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assignment = "factors.system.choices=[{label: a, engine: vllm, placement: 2xC:tp2pp2, policy: orca}]"
    run = cli(
        "sweep",
        str(file),
        "-o",
        str(folder),
        "-j",
        "1",
        "--set",
        assignment,
        "--set",
        "published={source: x, points: []}",
    )
    assert run.code == 0
    records = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    degrees = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "num_gpus")
    assert [records[0][name] for name in degrees] == [2, 2, 2, 8]


def test_what_has_no_throughput_is_left_out(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settings = ["base.measure=queueing", "base.queueing={formula: md1, prefill_s: 0.05}", "outputs=[ttft_s.mean]"]
    settings += ["factors.system.choices=[{label: a, seed: 0}]", "plots=[]", "published={source: x, points: []}"]
    assert cli("sweep", str(file), "-o", str(folder), "-j", "1", *pairs(settings)).code == 0
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8")) == []


def pairs(settings: list[str]) -> Iterator[str]:
    for setting in settings:
        yield from ("--set", setting)


# What is not the sweep's own


def test_files_of_a_user_are_neither_deleted_nor_replaced(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "sweep.yaml").write_text("plots: [{kind: line, file: photo}]", encoding="utf-8")
    (folder / "photo.png").write_bytes(b"a photo")
    refused = cli.refused("sweep", str(file), "-o", str(folder), "-j", "1")
    assert "already has sweep.yaml, not as a sweep wrote it" in refused
    assert cli("sweep", str(file), "-o", str(folder), "-j", "1", "--overwrite").code == 0
    assert (folder / "photo.png").read_bytes() == b"a photo"
    (folder / "rates.svg").write_text("redrawn by hand", encoding="utf-8")
    assert "already has rates.svg" in cli.refused("sweep", str(file), "-o", str(folder), "--resume")


def test_a_sweep_file_is_not_replaced_by_its_own_copy(cli: Cli, tmp_path: Path) -> None:
    source = tmp_path / "sweep.yaml"
    source.write_text("# mine\n" + GOOD, encoding="utf-8")
    for more in ((), ("--overwrite",), ("--resume",)):
        assert "the sweep file itself" in cli.refused("sweep", str(source), "-o", str(tmp_path), *more)
    assert source.read_text(encoding="utf-8").startswith("# mine\n")


@pytest.mark.parametrize("text", ["my notes, no newline", '{"id":7}\nmy data', '{"id":"me', '{"id": "a"}\n'])
@pytest.mark.parametrize("more", ["--resume", "--overwrite"])
def test_notes_named_as_rows_are_kept(cli: Cli, file: Path, tmp_path: Path, more: str, text: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    assert re.search(
        r"holds no rows of a sweep|is no row of a sweep", cli.refused("sweep", str(file), "-o", str(folder), more)
    )
    assert (folder / "rows.jsonl").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("torn", ["", '{"', '{"id":"', '{"id":"0123', '{"id":"' + 64 * "a" + '","factors":{"x'])
def test_what_a_kill_leaves_of_the_first_row_is_dropped(cli: Cli, file: Path, tmp_path: Path, torn: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(torn, encoding="utf-8")
    assert cli("sweep", str(file), "-o", str(folder), "-j", "1", "--resume").code == 0
    assert load_sweep(folder).is_complete


def test_an_unfinished_sweep_is_neither_drawn_nor_reported(cli: Cli, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run = ("sweep", str(file), "-o", str(folder), "-j", "1")
    assert cli(*run).code == 0
    assert cli(*run, "--resume", "--set", "replications=3", "--shard", "1/6").code == 0
    found = load_sweep(folder)
    assert not found.is_complete
    for command in (("plot", str(folder)), ("report", str(folder), "-o", str(tmp_path / "page.html"))):
        words = f"has {len(found.rows)} of the 18 rows of its sweep; finish it with dsim sweep --resume"
        assert words in cli.refused(*command)


@pytest.mark.parametrize("change", ["base.reqests: 300", "base.requests: -1", "replications: none"])
def test_the_quick_variant_is_checked_with_the_rest(cli: Cli, tmp_path: Path, change: str) -> None:
    path = tmp_path / "slow.yaml"
    start = GOOD.find("quick:")
    path.write_text((GOOD if start < 0 else GOOD[:start]) + f"quick: {{{change}}}\n", encoding="utf-8")
    refused = cli.refused("sweep", str(path), "-o", str(tmp_path / "out"))
    assert f"{path}:" in refused
    assert change.partition(":")[0].rpartition(".")[2] in refused
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",), ("--shard", "2/4"), ("--dry-run",)])
@pytest.mark.parametrize(
    "name",
    [
        "summary.csv",
        "rates.png",
        "sweep.yaml",
        "rows.jsonl",
        "rows-2-of-4.jsonl",
        ".lock",
        ".lock-2-of-4",
        ".made.json",
    ],
)
def test_a_folder_in_the_place_of_a_file_is_seen_before_anything_runs(
    name: str, more: tuple[str, ...], cli: Cli, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    refused = cli.refused("sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", *more)
    assert refused == f"--output-dir: {str(tmp_path / 'out')!r} has a directory {name}; move it away"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_a_pipe_in_the_place_of_rows_is_not_waited_for(cli: Cli, file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "rows-1-of-2.jsonl")
    refused = cli.refused("sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--resume")
    assert "has something that is no file, named rows-1-of-2.jsonl; move it away" in refused


#: Names of columns, of limits of their intervals, of groups of them, and of counts.
@pytest.mark.parametrize(
    "name",
    [
        "num_gpus",
        "attainment.both.low",
        "ttft_s.mean.high",
        "num_requests.low",
        "attainment",
        "ttft_s",
        "missing",
        "failed",
    ],
)
def test_a_linked_factor_cannot_have_a_column_s_name(name: str, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "named.yaml"
    text = GOOD.replace("system", name)
    path.write_text(text, encoding="utf-8")
    line = text[: text.index(f"  {name}:")].count("\n") + 1
    words = f"{path}:{line}: factors.{name} is the name of a column of results, so a linked factor cannot have it"
    assert cli.refused("sweep", str(path), "-o", str(tmp_path / "out")).startswith(words)


def test_a_factor_stands_in_results_as_its_file_has_it(cli: Cli, tmp_path: Path) -> None:
    """`model` is a column of results too, there with the model's own name."""
    path = tmp_path / "model.yaml"
    text = GOOD.replace("  system:\n    choices:\n", "  model: {choices: [13b]}\n  system:\n    choices:\n")
    text = text.replace("  model: opt-13b\n", "").replace("{system: vLLM, rate", "{model: 13b, system: vLLM, rate")
    path.write_text(text, encoding="utf-8")
    run = cli("sweep", str(path), "-o", str(tmp_path / "out"), "-j", "1", "--format", "json")
    answer = json.loads(run.out)
    assert {row["model"] for row in answer["summary"]} == {"13b"}
    assert [(row["model"], row["published"]) for row in answer["comparisons"]] == [("13b", 0.9)]


@pytest.mark.parametrize(
    "factors",
    [
        "rate_per_gpu: {range: {min: 1, max: 3, num: 1000000}}\n  slo_scale: {range: {min: 1, max: 2, num: 2}}",
        "rate_per_gpu: {range: {min: 1, max: 2, step: 0.000002}}",
        "rate_per_gpu: {range: {min: 1, max: 2, step: 0.0001}}\n  slo_scale: {range: {min: 1, max: 9, num: 99, scale: log}}",
        "rate_per_gpu: {range: {min: 1, max: 2, num: 500001}}",
    ],
)
def test_too_many_tasks_are_refused_before_any_value_is_made(
    factors: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(*_: object) -> None:
        pytest.fail("a value was made")

    monkeypatch.setattr("experiments.factors._Range.value", value)
    path = tmp_path / "many.yaml"
    text = GOOD[: GOOD.index("factors:")] + f"factors:\n  {factors}\nreplications: 2\n"
    path.write_text(text, encoding="utf-8")
    refused = cli.refused("sweep", str(path), "--dry-run")
    assert re.search(
        r"many.yaml:11: factors makes more than 1000000 tasks \(\d+ combinations x 2 replications\)", refused
    )


def test_a_factor_of_another_name_is_another_sweep(cli: Cli, file: Path, tmp_path: Path) -> None:
    assert cli("sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1").code == 0
    file.write_text(GOOD.replace("system", "engines"), encoding="utf-8")
    refused = cli.refused("sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--resume")
    assert "holds rows of another sweep" in refused
