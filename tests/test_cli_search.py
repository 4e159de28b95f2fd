"""`dsim search`: what it prints and writes."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsim.cli import main
from dsim.cli.options import AffinityChoice, ModeChoice
from placement.search import Affinity, Mode
from profiles.shipped import find_profile
from tests.cli import QUICK, Cli

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/schema/search.schema.json").read_text())


def answer(cli: Cli, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON object that a search prints, checked against the schema."""
    run = cli(*arguments, "--format", "json")
    assert run.code == code, run.err
    result: dict[str, Any] = json.loads(run.out)
    jsonschema.validate(result, SCHEMA)
    return result


@pytest.mark.parametrize(("light", "real"), [(AffinityChoice, Affinity), (ModeChoice, Mode)])
def test_the_choices_are_those_of_the_search(light: type[AffinityChoice], real: type[Affinity]) -> None:
    assert [choice.value for choice in light] == [choice.value for choice in real]


def test_json_follows_the_schema(cli: Cli) -> None:
    result = answer(cli, *QUICK)
    best = result["best"]
    assert best["disaggregated"]["placement"] == "1xP:tp1pp1 + 1xD:tp1pp1"
    assert best["disaggregated"]["state"] == "COMPLETE"
    assert best["disaggregated"]["reasons"] == []
    assert best["colocated"]["policy"] == "orca"
    goodput = best["colocated"]["goodput_per_gpu_per_s"]
    assert 0 < goodput["low"] <= goodput["best"] <= goodput["high"]
    assert best["ratio"]["low"] < best["ratio"]["high"]
    assert {trial["state"] for trial in result["trials"]} <= {"COMPLETE", "PRUNED", "INFEASIBLE", "FAILED"}
    assert all(trial["reasons"] for trial in result["trials"] if trial["state"] != "COMPLETE")
    assert result["transient"] is True
    assert result["profiles"]["decode"]["engine"] == "distserve"
    assert result["profiles"]["colocated"]["engine"] == "vllm"


def test_the_level_of_the_intervals(cli: Cli) -> None:
    """Less sure is narrower: the same runs, as the finite ones are as many whatever is asked for."""
    limits = {}
    for level in ("80%", "0.99"):
        result = answer(cli, *QUICK, "--mode", "colocated", "--confidence", level)
        limits[level] = result["best"]["colocated"]["goodput_per_gpu_per_s"]
        assert result["question"]["confidence"] == {"80%": 0.8, "0.99": 0.99}[level]
    assert limits["80%"]["best"] == limits["0.99"]["best"]
    assert limits["0.99"]["low"] < limits["80%"]["low"] < limits["80%"]["high"] < limits["0.99"]["high"]
    for level in ("50%", "99.9%"):
        assert f" {level} interval" in cli(*QUICK, "--mode", "colocated", "--confidence", level).out


def test_rates_of_thousands_are_written_out(cli: Cli) -> None:
    tiny = ("--mode", "colocated", "--slo", "ttft=0.05,tpot=0.1", "-w", "fixed:1,1", "-n", "2000", "--top", "1")
    run = cli(*QUICK, *tiny)
    assert run.code == 0
    assert re.search(r"best colocated: \S+ \(orca\) on . GPUs?, \d,\d{3} \(\d,\d{3} - \d,\d{3}\) requests/s", run.out)


def test_kv_blocks_of_every_trial(cli: Cli) -> None:
    result = answer(cli, *QUICK, "--kv-blocks", "900,decode=500")
    best = result["best"]
    assert best["disaggregated"]["kv_blocks"] == {"prefill": 900, "decode": 500}
    assert best["colocated"]["kv_blocks"] == {"colocated": 900}
    assert all(set(trial["kv_source"].values()) == {"given"} for trial in result["trials"])
    fewer = answer(cli, *QUICK, "--mode", "colocated", "--kv-blocks", "30", code=3)
    assert {trial["state"] for trial in fewer["trials"]} == {"INFEASIBLE"}
    shown = cli(*QUICK).out
    assert "KV blocks of each instance of 1xP:tp1pp1 + 1xD:tp1pp1: prefill 4,134 (profile), decode 4,134" in shown


def test_a_model_too_large_for_a_node_says_so_of_the_largest_instance(cli: Cli) -> None:
    run = cli("search", "-m", "deepseek-v3", "--gpu", "h100", "--slo", "ttft=1,tpot=0.1", "-n", "20", "-j", "1", "-q")
    assert run.code == 3
    assert "no placement of deepseek-v3 can run on 8 GPUs (" in run.err
    assert "tp8pp1: weights of 673.0 GB leave no room for KV in 586.4 GB of usable memory" in run.err


def test_the_steady_state_is_the_default(cli: Cli) -> None:
    arguments = [part for part in QUICK if part not in ("-n", "50", "--policy", "orca")]
    assert answer(cli, *arguments, "--mode", "disaggregated")["transient"] is False


def test_the_table_says_what_a_planner_asks(cli: Cli) -> None:
    run = cli(*QUICK)
    assert (run.code, run.err) == (0, "")
    for words in (
        "13b = OPT-13B (facebook/opt-13b) on a100-80g",
        "disaggregated: profile opt-13b-a100-80g-distserve [",
        "colocated: profile opt-13b-a100-80g-vllm [",
        "at most 2 GPUs (1 node of 8), fixed:512,16 lengths, poisson arrivals, 90.0% of requests within ttft=0.4",
        "a transient, not a rate that can be sustained",
        "best disaggregated: 1xP:tp1pp1 + 1xD:tp1pp1 on 2 GPUs, ",
        "best colocated: ",
        "disaggregated / colocated: ",
        "most on 2 GPUs: ",
        "requests/s per GPU",
        "95% interval",
        "limited by",
        "of saturation",
        "decode admission",
        "placements: ",
    ):
        assert words in run.out


def test_the_mode_says_which_kinds_compete(cli: Cli) -> None:
    colocated = answer(cli, *QUICK, "--mode", "colocated")
    assert colocated["best"]["disaggregated"] is None
    assert list(colocated["profiles"]) == ["colocated"]
    assert all(trial["placement"].endswith("C:tp1pp1") or "C:" in trial["placement"] for trial in colocated["trials"])


def test_same_seed_same_answer_whatever_the_jobs(cli: Cli) -> None:
    arguments = [*QUICK, "--mode", "colocated", "--format", "json"]
    assert cli(*arguments).out == cli(*arguments, "-j", "2").out


def test_infeasible_placements_say_why(cli: Cli) -> None:
    result = answer(cli, *QUICK, "-m", "66b", "--gpus", "3", "--slo", "ttft=2,tpot=0.3")
    reasons = {trial["placement"]: trial["reasons"] for trial in result["trials"] if trial["state"] == "INFEASIBLE"}
    assert any("weights of 131.4 GB leave no room" in reason for reason in reasons["1xC:tp1pp1"])
    assert any("no coefficients for tp=1" in reason for reason in reasons["1xC:tp1pp1"])


@pytest.mark.parametrize("gpu", ["a100-80g", "h100-sxm"])
def test_a_profile_of_measured_steps_is_searched_within_what_was_measured(cli: Cli, gpu: str) -> None:
    question = (
        "search",
        "--model",
        "llama-2-70b",
        "--gpu",
        gpu,
        "--gpus",
        "4",
        "--slo",
        "ttft=1,tpot=0.2",
        "-n",
        "100",
        "--policy",
        "chunked",
        "-j",
        "1",
    )
    found = answer(cli, *question, "--top", "1")
    profile = find_profile("llama-2-70b", gpu, engine="vllm-2023")  # the only engine there is
    assert found["profiles"]["decode"]["name"] == profile.name
    assert found["best"]["disaggregated"]
    assert found["best"]["colocated"]
    assert not any(trial["state"] == "FAILED" for trial in found["trials"])
    assert any("KV cache of" in warning and "--extrapolate" in warning for warning in found["warnings"])
    assert found["extrapolated"] is False
    beyond = answer(cli, *question, "--top", "1", "--mode", "colocated", "--extrapolate")
    assert beyond["extrapolated"] is True
    assert not any("KV cache of" in warning for warning in beyond["warnings"])


def test_runs_too_short_to_miss_the_limits_say_so(cli: Cli) -> None:
    question = ("search", "--model", "13b", "--gpus", "1", "--mode", "colocated", "--slo", "ttft=100s,tpot=10s")
    run = cli(*question, "-n", "10", "-j", "1", "--policy", "orca")
    assert run.code == 3
    assert "runs of 10 requests meet the limits at any rate: ask for longer ones" in run.err


def test_no_placement_can_run(cli: Cli) -> None:
    arguments = ["search", "-m", "66b", "--slo", "ttft=2,tpot=0.3", "--gpus", "1"]
    result = answer(cli, *arguments, code=3)
    assert result["best"] == {"disaggregated": None, "colocated": None, "ratio": None}
    run = cli(*arguments)
    assert run.code == 3
    assert run.err.count("\n") == 1
    assert run.err.startswith("error: --gpus: no placement of opt-66b can run on 1 GPU (1xC:tp1pp1")
    assert "give more GPUs" in run.err
    # Of prefill and decode instances there is not one pair.
    run = cli(*arguments, "--mode", "disaggregated")
    assert run.code == 3
    assert "no placement to compare\n" in run.out


def test_no_placement_meets_the_limits(cli: Cli) -> None:
    run = cli(*QUICK, "--slo", "ttft=1ms,tpot=0.1")
    assert run.code == 3
    assert run.err.count("\n") == 1
    assert run.err.startswith("error: --slo: no placement on 2 GPUs serves any rate with 0.9 of the requests within ")
    assert run.err.endswith("; relax the limits, or give more GPUs\n")
    assert "no placement sustains any rate within the limits" in run.out


def test_output_files_hold_the_same_result_and_run_again(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run = cli(*QUICK, "-o", str(folder), "--format", "json")
    assert run.code == 0
    assert run.err == f"wrote attainment.csv, attainment.png, config.yaml, result.json, trials.csv to {folder}\n"
    result = json.loads(run.out)
    assert json.loads((folder / "result.json").read_text()) == result
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["placement"] for row in rows] == [trial["placement"] for trial in result["trials"]]
    assert float(rows[0]["goodput_per_gpu_per_s.best"]) == result["trials"][0]["goodput_per_gpu_per_s"]["best"]
    assert "goodput_per_gpu_per_s" not in rows[0]
    with (folder / "attainment.csv").open() as file:
        curve = list(csv.DictReader(file))
    assert len({row["placement"] for row in curve}) == 2
    assert float(curve[0]["attainment.best"]) > float(curve[8]["attainment.best"])
    assert (folder / "attainment.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert cli("search", "-c", str(folder / "config.yaml"), "-j", "1", "--format", "json").out == run.out
    assert cli.refused(*QUICK, "-o", str(folder)).startswith(f"--output-dir: '{folder}' already has result.json, ")


def test_a_dry_run_counts_the_candidates(cli: Cli, tmp_path: Path) -> None:
    run = cli(*QUICK, "--dry-run", "-o", str(tmp_path / "out"))
    assert run.code == 0
    assert "would compare 5 placements" in run.out
    assert not (tmp_path / "out").exists()
    assert json.loads(cli(*QUICK, "--dry-run", "--format", "json").out)["candidates"] == 5
    one = [part for part in QUICK if part not in ("--policy", "orca")]
    assert "would compare 1 placement\n" in cli(*one, "--mode", "disaggregated", "--dry-run").out


def test_a_search_that_may_take_long_says_so_before_it_starts(cli: Cli, tmp_path: Path) -> None:
    large = [*QUICK, "--gpus", "127", "--mode", "colocated", "--policy", "chunked", "--token-budgets"]
    large += [",".join(map(str, range(512, 520))), "--dry-run"]
    run = cli(*large)
    count = re.search("would compare ([0-9,]+) placements\n", run.out)
    assert count
    assert run.err == (
        f"note: {count[1]} placements on up to 127 GPUs are compared, which may take long; shorter with a wider "
        "--precision, one --mode, one --policy, fewer GPUs, a smaller --top, --shard on several machines, --time-limit "
        "or more --jobs; with -o DIR what has run is kept, and --resume goes on\n"
    )
    assert cli(*large, "-q").err == ""
    kept = cli(*large, "-o", str(tmp_path / "out"), "--shard", "1/2").err
    half = (int(count[1].replace(",", "")) + 1) // 2
    assert kept.startswith(f"note: {half:,} placements on ")
    assert kept.endswith("a smaller --top, --time-limit or more --jobs\n")
    assert cli(*large, "--gpus", "64").err == ""
    size = cli("size", *QUICK[1:5], "--rate", "5", "--copy-gpus", "64", "--dry-run")
    assert "one --policy, smaller --copy-gpus, --time-limit or more --jobs; with -o DIR" in size.err


def test_the_search_itself_says_it_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsim.cli.amount._MANY", 4)
    assert cli(*QUICK).err.startswith("note: 5 placements on up to 2 GPUs are compared, which may take long; ")
    assert cli(*QUICK, "--mode", "colocated").err == ""


def test_the_progress_says_how_many_placements_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    heard = Terminal()
    monkeypatch.setattr("sys.stderr", heard)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(QUICK) == 0
    assert "runs for 5 placements" in heard.getvalue()


def test_nodes_and_gpus_per_node(cli: Cli) -> None:
    plan = json.loads(cli(*QUICK[:5], "--nodes", "2", "--gpus-per-node", "3", "--dry-run", "--format", "json").out)
    assert plan["num_gpus"] == 6
    assert json.loads(cli(*QUICK[:5], "--dry-run", "--format", "json").out)["num_gpus"] == 8
    low = json.loads(cli(*QUICK[:5], "--nodes", "2", "--affinity", "low", "--dry-run", "--format", "json").out)
    assert low["candidates"] > 0
    assert cli.refused(*QUICK[:5], "--gpus", "129").startswith("--gpus: 129 must be <= 128 GPUs in all; ")
    refused = cli.refused(*QUICK[:5], "--gpus", "1025", "--affinity", "low")
    assert refused.startswith("--gpus: 1025 must be <= 1024 GPUs in all; ")
    assert cli.refused(*QUICK[:5], "--nodes", "2", "--nic", "25").startswith(
        "--nic: '25' must be >= 1e+06 bytes per second"
    )


def test_engines_of_the_two_kinds(cli: Cli) -> None:
    def engines(*arguments: str) -> dict[str, str]:
        plan = json.loads(cli(*QUICK[:5], *arguments, "--dry-run", "--format", "json").out)
        return {role: profile["engine"] for role, profile in plan["profiles"].items()}

    assert engines() == {"prefill": "distserve", "decode": "distserve", "colocated": "vllm"}
    assert engines("--engine", "vllm") == {"prefill": "vllm", "decode": "vllm", "colocated": "vllm"}
    assert engines("--colocated-engine", "distserve")["colocated"] == "distserve"


def test_profiles_of_your_own(cli: Cli, tmp_path: Path) -> None:
    data = Path(__file__).parents[1] / "profiles/data"
    own = tmp_path / "mine.yaml"
    own.write_bytes((data / "opt-13b-a100-80g-vllm.yaml").read_bytes())
    run = cli("search", "--profile", str(own), "--slo", "ttft=0.4,tpot=0.1", "--dry-run")
    assert "colocated: profile opt-13b-a100-80g-vllm [" in run.out
    assert run.out.startswith("OPT-13B (facebook/opt-13b) on a100-80g\n")
    other = data / "opt-66b-a100-80g-vllm.yaml"
    error = cli.refused(*QUICK, "--colocated-profile", str(other))
    assert error.startswith(f"--colocated-profile: '{other}' is for model opt-66b, the other profile for opt-13b")


def test_options_from_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "search.yaml"
    path.write_text("model: 13b\nslo: {ttft: 0.4, tpot: 0.1}\ngpus: 2\npolicy: [orca, chunked]\nattainment: 0.95\n")
    plan = json.loads(cli("search", "-c", str(path), "--dry-run", "--format", "json").out)
    assert plan["attainment_target"] == 0.95
    # One pair, and one or two colocated instances of tp 1, one of tp 2 and of pp 2, under orca and three token budgets.
    assert plan["candidates"] == 1 + 4 * 4
    path.write_text("model: 13b\nslo: {ttft: 0.4, tpot: 0.1}\ngpus: 0\n")
    assert cli.refused("search", "-c", str(path)) == f"{path}:3: gpus=0 must be >= 1; write a value in that range"
