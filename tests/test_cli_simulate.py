"""`dsim simulate`: what it prints and writes."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsim.version import __version__
from tests.cli import Cli

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/schema/simulate.schema.json").read_text())
DISAGGREGATED = ["simulate", "-m", "13b", "-p", "1xP:tp2pp1 + 1xD:tp1pp1"]
SHORT = ["--rate", "2", "-n", "100", "--warmup", "0", "--slo", "ttft=0.4,tpot=0.1"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests, the last one of a single token, far enough apart not to meet."""
    path = tmp_path / "run.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,512,11\n100,1024,21\n200,100,1\n")
    return path


def summary(cli: Cli, *arguments: str) -> dict[str, Any]:
    """Return the JSON object that a run prints, checked against the schema."""
    run = cli(*arguments, "--format", "json")
    assert (run.code, run.err) == (0, "")
    result: dict[str, Any] = json.loads(run.out)
    jsonschema.validate(result, SCHEMA)
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        [*DISAGGREGATED, *SHORT],
        [*DISAGGREGATED, "--rate", "2", "-n", "50"],
        [*DISAGGREGATED, "--rate", "120/min", "--finite", "-n", "50", "--slo", "ttft:400", "--check"],
        [*DISAGGREGATED, *SHORT, "--arrivals", "gamma:cv=2", "--workload", "fixed:512,64"],
        [*DISAGGREGATED, *SHORT, "--prefill-batching", "lm", "--prefill-routing", "round-robin"],
        [
            *DISAGGREGATED,
            "--closed-loop",
            "3",
            "-n",
            "20",
            "--turnaround",
            "10ms",
            "--stagger",
            "1",
            "--skip-first-wave",
        ],
        [*DISAGGREGATED, *SHORT, "--workload", "fixed:10,1"],
        ["simulate", "-m", "13b", "-p", "2xC:tp1pp1", "--engine", "vllm", *SHORT, "--check"],
        ["simulate", "-m", "13b", "-p", "1xC:tp1pp1", "--policy", "chunked", "--token-budget", "512", *SHORT],
    ],
)
def test_json_follows_the_schema(cli: Cli, arguments: list[str]) -> None:
    summary(cli, *arguments)


def test_a_trace_counts_every_row(cli: Cli, trace: Path) -> None:
    result = summary(cli, *DISAGGREGATED, "--trace", str(trace), "--slo", "ttft=0.2,tpot=0.1")
    assert result["num_requests"] == 3
    assert result["attainment"] == {"both": 1.0, "ttft": 1.0, "tpot": 1.0}
    assert result["placement"] == "1xP:tp2pp1 + 1xD:tp1pp1"
    assert result["num_gpus"] == 3
    assert result["seed"] == 0
    assert result["version"] == __version__
    assert result["saturation"] == "stable"
    # The run ends with the third request, soon after it came.
    assert result["throughput_per_s"] == pytest.approx(3 / 200, rel=0.01)
    assert result["slo"] == {"ttft_s": 0.2, "tpot_s": 0.1, "e2e_s": None}


def test_a_limit_that_nothing_meets(cli: Cli, trace: Path) -> None:
    result = summary(cli, *DISAGGREGATED, "--trace", str(trace), "--slo", "ttft=1ms,tpot=0.1ms")
    # The one-token output meets any TPOT limit.
    assert result["attainment"] == {"both": 0.0, "ttft": 0.0, "tpot": pytest.approx(1 / 3)}


def test_the_trace_may_be_cut(cli: Cli, trace: Path) -> None:
    result = summary(cli, *DISAGGREGATED, "--trace", str(trace), "-n", "1", "--warmup", "1")
    assert result["num_requests"] == 1
    assert result["traffic"] == {"kind": "trace", "trace": str(trace), "warmup": 1, "requests": 1}


def test_without_an_slo_there_is_no_attainment(cli: Cli, trace: Path) -> None:
    result = summary(cli, *DISAGGREGATED, "--trace", str(trace))
    assert result["attainment"] is None
    assert result["slo"] is None
    assert "attainment" not in cli(*DISAGGREGATED, "--trace", str(trace)).out


def test_colocated_placements_name_their_policy(cli: Cli) -> None:
    arguments = ["simulate", "-m", "13b", "-p", "1xC:tp1pp1", "--engine", "vllm", *SHORT]
    result = summary(cli, *arguments)
    assert (result["placement"], result["policy"], result["num_gpus"]) == ("1xC:tp1pp1", "prefill-first", 1)
    assert set(result["utilization"]) == {"colocated"}
    chunked = summary(cli, *arguments, "--policy", "chunked")
    assert (chunked["policy"], chunked["token_budget"]) == ("chunked", 2048)


def test_the_table_says_what_a_planner_asks(cli: Cli) -> None:
    run = cli(*DISAGGREGATED, *SHORT)
    assert run.code == 0
    assert run.err == ""
    for words in (
        "13b = OPT-13B (facebook/opt-13b) on a100-80g, engine distserve",
        "profile opt-13b-a100-80g-distserve [",
        "LLMServe/DistServe",
        "1xP:tp2pp1 + 1xD:tp1pp1 on 3 GPUs: 100 requests at 2/s, poisson arrivals, sharegpt lengths, seed 0",
        "TTFT ms",
        "TPOT ms",
        "ITL ms",
        "E2E ms",
        "p90",
        "attainment of ttft=0.4,tpot=0.1: ",
        "TTFT alone",
        "throughput: ",
        "saturation: stable",
        "preemptions: 0",
        "decode admission",
        "prefill tp2pp1",
        "KV peak",
        "busy",
    ):
        assert words in run.out
    assert not any(line != line.rstrip() for line in run.out.splitlines())


def test_csv_is_one_row_of_the_same_numbers(cli: Cli, trace: Path) -> None:
    arguments = [*DISAGGREGATED, "--trace", str(trace), "--slo", "ttft=0.2,tpot=0.1"]
    (row,) = csv.DictReader(cli(*arguments, "--format", "csv").out.splitlines())
    result = summary(cli, *arguments)
    assert float(row["ttft_s.p90"]) == result["ttft_s"]["p90"]
    assert float(row["attainment.both"]) == 1.0
    assert row["slo.e2e_s"] == ""
    assert row["policy"] == ""


def test_same_seed_same_bytes_also_in_a_fresh_process(cli: Cli) -> None:
    arguments = [*DISAGGREGATED, *SHORT, "--seed", "7", "--format", "json"]
    here = cli(*arguments).out
    there = subprocess.run(
        [sys.executable, "-m", "dsim", *arguments], capture_output=True, text=True, check=True
    ).stdout
    assert here == there
    assert cli(*arguments[:-4], "--seed", "8", "--format", "json").out != here


def test_a_longer_lm_batch_limit_changes_the_run(cli: Cli) -> None:
    busy = ["--rate", "12", "-n", "300", "--warmup", "0", "--workload", "fixed:400,2"]
    engine, lm = (summary(cli, *DISAGGREGATED, *busy, "--prefill-batching", how) for how in ("engine", "lm"))
    assert engine["ttft_s"] != lm["ttft_s"]


def test_kv_blocks_override_the_profile(cli: Cli) -> None:
    result = summary(cli, *DISAGGREGATED, *SHORT, "--kv-blocks", "400")
    assert result["kv_blocks"] == {"prefill": 400, "decode": 400}


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("prefill=500,decode=400", 500, 400),
        ("600,decode=400", 600, 400),
        ("decode:tp1pp1=400,tp2pp1=500,7", 500, 400),
    ],
)
def test_kv_blocks_by_role_and_parallelism(cli: Cli, text: str, prefill: int, decode: int) -> None:
    result = summary(cli, *DISAGGREGATED, *SHORT, "--kv-blocks", text)
    assert result["kv_blocks"] == {"prefill": prefill, "decode": decode}
    assert result["kv_source"] == {"prefill": "given", "decode": "given"}


def test_each_role_says_what_its_step_times_rest_on(cli: Cli) -> None:
    found = summary(cli, *DISAGGREGATED, *SHORT)["profiles"]
    assert {role: entry["evidence"] for role, entry in found.items()} == {"prefill": "measured", "decode": "measured"}
    other = ["simulate", "-m", "llama-3.1-8b", "--gpu", "h100", "--engine", "sglang", "-p", "1xC:tp1pp1", *SHORT]
    (entry,) = summary(cli, *other)["profiles"].values()
    assert (entry["engine"], entry["evidence"]) == ("sglang", "other-kernels")
    assert "evidence: measured steps\n" in cli(*DISAGGREGATED, *SHORT).out
    assert "evidence: other-kernels, no measured steps; expected error of a step 4 to 8 %" in cli(*other).out


def test_prompts_beyond_the_valid_range_are_refused_and_marked_where_allowed(cli: Cli) -> None:
    arguments = ["simulate", "-m", "qwen3-8b", "--gpu", "h100", "-p", "1xC:tp1pp1", "-r", "1", "-n", "20", "-w"]
    arguments += ["fixed:20000,4", "--warmup", "0"]
    refused = cli.refused(*arguments)
    assert "prompt tokens exceed the profile's valid range of 16384; drop or truncate such requests, or go" in refused
    assert "(--extrapolate), or take estimates (--evidence roofline)" in refused
    assert summary(cli, *arguments, "--extrapolate")["extrapolated"] is True
    assert "extrapolated: steps may lie outside the range" in cli(*arguments, "--extrapolate").out
    assert summary(cli, *arguments, "--evidence", "roofline")["extrapolated"] is False


def test_where_kv_blocks_come_from_is_said(cli: Cli) -> None:
    """What the engine says or its rule gives, what was given, and what the measured context leaves of it."""
    assert summary(cli, *DISAGGREGATED, *SHORT)["kv_source"] == {"prefill": "listed", "decode": "listed"}
    half = summary(cli, *DISAGGREGATED, *SHORT, "--kv-blocks", "decode=400")
    assert half["kv_source"] == {"prefill": "listed", "decode": "given"}
    shown = cli(*DISAGGREGATED, *SHORT, "--kv-blocks", "decode=400").out
    assert re.search(r"prefill tp\dpp1 .* profile\n.*decode tp1pp1 .* 400 +--kv-blocks\n", shown)
    measured = ["simulate", "-m", "llama-2-70b", "--gpu", "h100", "--engine", "vllm-2023", "-p", "1xC:tp8pp1", *SHORT]
    assert summary(cli, *measured)["kv_source"] == {"colocated": "range"}
    assert summary(cli, *measured, "--extrapolate")["kv_source"] == {"colocated": "memory"}


def test_requests_that_never_fit_are_rejected_and_missed(cli: Cli) -> None:
    result = summary(cli, *DISAGGREGATED, *SHORT, "--workload", "fixed:512,64", "--kv-blocks", "32")
    assert result["rejected"] == result["num_requests"] == 100
    assert result["attainment"] == {"both": 0.0, "ttft": 0.0, "tpot": 0.0}
    assert result["ttft_s"]["mean"] is None
    assert (
        "rejected because they can never fit"
        in cli(*DISAGGREGATED, *SHORT, "--workload", "fixed:512,64", "--kv-blocks", "32").out
    )


def test_output_files_hold_the_same_result_and_run_again(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "deep"
    run = cli(*DISAGGREGATED, *SHORT, "-o", str(folder), "--format", "json")
    assert run.code == 0
    assert run.err == f"wrote summary.json, requests.csv, config.yaml to {folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "requests.csv", "summary.json"]
    assert (folder / "summary.json").read_text() == run.out
    with (folder / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 100
    ttft_s = [float(row["ttft_s"]) for row in rows]
    assert math.fsum(ttft_s) / 100 == pytest.approx(json.loads(run.out)["ttft_s"]["mean"])
    again = cli("simulate", "-c", str(folder / "config.yaml"), "--format", "json")
    assert again.out == run.out


def test_the_step_log_has_every_prefill_once(cli: Cli, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert cli(*DISAGGREGATED, "--trace", str(trace), "-o", str(folder), "--step-log").code == 0
    with (folder / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    assert [step["prefill"] for step in steps if step["role"] == "P"] == ["0", "1", "2"]
    # Token 1 comes from the prefill, the others one a step.
    assert [step["decode"] for step in steps if step["role"] == "D"] == ["0"] * 10 + ["1"] * 20
    assert "step-log" not in (folder / "config.yaml").read_text()


def test_the_step_log_has_all_kv_and_all_requests(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = [*DISAGGREGATED, "--rate", "4", "-n", "50", "--warmup", "10", "-o", str(folder), "--step-log"]
    assert cli(*arguments).code == 0
    with (folder / "all_requests.csv").open() as file:
        requests = list(csv.DictReader(file))
    assert len(requests) >= 60
    assert [i for i, row in enumerate(requests) if row["counted"] == "True"] == list(range(10, 60))
    with (folder / "requests.csv").open() as file:
        counted = list(csv.DictReader(file))
    for row, of_all in zip(counted, requests[10:60], strict=True):
        assert {name: row[name] for name in row if name in of_all} == {n: of_all[n] for n in row if n in of_all}
    result = json.loads((folder / "summary.json").read_text())
    with (folder / "kv.csv").open() as file:
        changes = list(csv.DictReader(file))
    for role, letter in (("prefill", "P"), ("decode", "D")):
        most = max(int(change["blocks"]) for change in changes if change["role"] == letter)
        assert result["kv_peak"][role] == pytest.approx(most / result["kv_blocks"][role], abs=1e-12)


def test_files_are_replaced_only_on_request(cli: Cli, tmp_path: Path) -> None:
    arguments = [*DISAGGREGATED, *SHORT, "-o", str(tmp_path), "-q"]
    (tmp_path / "requests.csv").write_text("mine")
    error = cli.refused(*arguments)
    assert error == f"--output-dir: '{tmp_path}' already has requests.csv; give another directory, or --overwrite"
    assert [path.name for path in tmp_path.iterdir()] == ["requests.csv"]
    assert (tmp_path / "requests.csv").read_text() == "mine"
    run = cli(*arguments, "--overwrite")
    assert (run.code, run.err) == (0, "")
    assert (tmp_path / "requests.csv").read_text().startswith("request,arrival_s")


def test_no_partial_files_when_writing_fails(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        if "requests" in self.name:
            raise OSError(28, "No space left on device", str(self))
        return len(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    error = cli.refused(*DISAGGREGATED, *SHORT, "-o", str(tmp_path / "out"), code=1)
    assert error.endswith("No space left on device")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("traffic", [["--rate", "2"], ["--rate", "2", "--finite"], ["--closed-loop", "4"]])
def test_aggregates_say_what_the_requests_would(cli: Cli, traffic: list[str]) -> None:
    arguments = [*DISAGGREGATED, *traffic, "-n", "200", "--warmup", "20", "--slo", "ttft=0.1,tpot=0.05"]
    found, expected = summary(cli, *arguments, "--aggregate"), summary(cli, *arguments)
    assert found.pop("percentile_error") == 0.001
    assert list(found) == list(expected)
    for key in ("num_requests", "attainment", "throughput_per_s", "good_throughput_per_s", "traffic", "preemptions"):
        assert found[key] == expected[key], key
    for key in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert found[key] == pytest.approx(expected[key], rel=0.001)
    assert "percentiles within 0.1%" in cli(*arguments, "--aggregate").out


def test_aggregates_leave_no_requests(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run = cli(*DISAGGREGATED, *SHORT, "--aggregate", "-o", str(folder))
    assert run.code == 0
    assert run.err == f"wrote summary.json, config.yaml to {folder}\n"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "summary.json"]
    again = cli("simulate", "-c", str(folder / "config.yaml"), "--format", "json")
    assert again.out == (folder / "summary.json").read_text()
    for option in ("--step-log", "--check"):
        error = cli.refused(*DISAGGREGATED, *SHORT, "--aggregate", option, "-o", str(tmp_path / "no"))
        hint = "leave it or --aggregate out"
        assert error == f"{option}: needs every request, of which --aggregate keeps none; {hint}"


def test_a_dry_run_checks_everything_and_does_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("dsim.simulate.simulate")
    folder = tmp_path / "out"
    run = cli(*DISAGGREGATED, *SHORT, "-o", str(folder), "--dry-run")
    assert run.code == 0
    assert "would simulate 1xP:tp2pp1 + 1xD:tp1pp1 on 3 GPUs: 100 requests at 2/s" in run.out
    assert "would write summary.json, requests.csv, config.yaml" in run.out
    assert not folder.exists()
    plan = json.loads(cli(*DISAGGREGATED, *SHORT, "--dry-run", "--format", "json").out)
    assert plan["traffic"]["rate_per_s"] == 2.0
    assert cli.refused(*DISAGGREGATED, "--rate", "-1", "--dry-run").startswith("--rate: ")


def test_a_profile_of_your_own(cli: Cli, tmp_path: Path) -> None:
    shipped = Path(__file__).parents[1] / "profiles/data/opt-13b-a100-80g-distserve.yaml"
    own = tmp_path / "mine.yaml"
    own.write_bytes(shipped.read_bytes())
    arguments = ["simulate", "--profile", str(own), "-p", "1xP:tp2pp1 + 1xD:tp1pp1", *SHORT]
    assert summary(cli, *arguments)["ttft_s"] == summary(cli, *DISAGGREGATED, *SHORT)["ttft_s"]
    assert summary(cli, *arguments, "--model", "13b", "--gpu", "a100_sxm", "--engine", "distserve")
    assert cli.refused(*arguments, "--model", "66b") == (
        "--model: '66b' contradicts --profile: the profile is for opt-13b; leave --model out"
    )
    assert cli.refused(*arguments, "--gpu", "h100").startswith("--gpu: 'h100' contradicts --profile")
    assert cli.refused(*arguments, "--engine", "vllm").startswith("--engine: 'vllm' contradicts --profile")


class TestConfig:
    """Options from files and assignments."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(
            "model: 13b\nplacement: 1xP:tp2pp1 + 1xD:tp1pp1\nslo: {ttft: 400ms, tpot: 0.1}\n"
            "rate: 2\nrequests: 100\nwarmup: 0\ncheck: true\nprefill_routing: round-robin\n"
        )
        return path

    def test_a_file_says_the_same_as_options(self, cli: Cli, config: Path) -> None:
        from_file = cli("simulate", "-c", str(config), "--format", "json")
        from_options = cli(*DISAGGREGATED, *SHORT, "--prefill-routing", "round-robin", "--format", "json")
        assert from_file.out == from_options.out

    def test_assignments_win_over_the_file_and_options_over_both(self, cli: Cli, config: Path) -> None:
        base = ["simulate", "-c", str(config), "--dry-run", "--format", "json"]
        assigned = json.loads(cli(*base, "--set", "slo.ttft=0.2", "--set", "rate=3", "--set", "requests=7").out)
        assert assigned["slo"] == {"ttft_s": 0.2, "tpot_s": 0.1, "e2e_s": None}
        assert assigned["traffic"]["rate_per_s"] == 3.0
        assert assigned["traffic"]["requests"] == 7
        option = json.loads(cli(*base, "--set", "rate=3", "--rate", "4").out)
        assert option["traffic"]["rate_per_s"] == 4.0
        reversed_order = json.loads(cli("simulate", "--set", "rate=3", *base[1:]).out)
        assert reversed_order["traffic"]["rate_per_s"] == 3.0

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("rate: -1", "{file}:4: rate=-1.0 must be > 0"),
            ("rate: .nan", "{file}:4: rate='nan' must be a finite number; as in 6 (per second) or 90/min"),
            ("rate: [1, 2]", "{file}:4: rate must be one value, not a list"),
            ("rat: 1", "{file}:4: 'rat' is not a known key; did you mean 'rate'?"),
            ("rate: 2\nrate: 3", "{file}:5: rate stands twice"),
            ("rate: !!python/object:os.system 1", "{file}:4: rate uses the YAML tag"),
            ("rate: 2\nrequests: many", "{file}:5: requests: 'many' must be a whole number; see dsim simulate --help"),
            ("rate: 2\npolicy: fast", "{file}:5: policy: 'fast' is not one of 'orca', 'prefill-first'"),
            ("rate: 2\ncheck: maybe", "{file}:5: check='maybe' must be true or false"),
            ("rate: 2\nconfig: x.yaml", "{file}:5: 'config' is not a known key"),
            ("rate: 2\nprofile: nothing.yaml", "nothing.yaml: does not exist"),
            ("rate: {a: 1}", "{file}:4: rate='a=1' is not a number"),
            ("rate: 2\nslo: {tftt: 1}", "{file}:5: slo stands twice"),
        ],
    )
    def test_mistakes_are_named_by_file_and_line(self, cli: Cli, tmp_path: Path, line: str, message: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text("model: 13b\nplacement: 1xP:tp2pp1 + 1xD:tp1pp1\nslo: {ttft: 0.4}\n" + line + "\n")
        assert cli.refused("simulate", "-c", str(path)).startswith(message.format(file=path))

    @pytest.mark.parametrize("content", ["", "- a\n", "model: [", "\x00", "a: &x 1\nb: *x\n", "model: '13b"])
    def test_files_that_are_no_options(self, cli: Cli, tmp_path: Path, content: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(content)
        assert cli.refused("simulate", "-c", str(path)).startswith(str(path))

    def test_files_that_are_not_there(self, cli: Cli, tmp_path: Path) -> None:
        assert cli.refused("simulate", "-c", str(tmp_path / "x.yaml")).endswith("does not exist; check the path")
        assert cli.refused("simulate", "-c", str(tmp_path)).endswith("is a directory; give a file")
