"""`dsim size`, and the objectives and prices of `dsim search`: what they print and write."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsim.cli.options import ObjectiveChoice
from placement.objective import Objective
from tests.cli import QUICK, Cli
from tests.test_cli_search import answer as search_answer

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/schema/size.schema.json").read_text())
#: Copies of one colocated GPU under one policy: a second or two.
SMALL = ["-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--mode", "colocated", "--policy", "orca", "-w", "fixed:512,16"]
SMALL += ["--precision", "30%", "-j", "1"]
SIZE = ["size", *SMALL, "--copy-gpus", "1"]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed does not need narrow intervals."""
    monkeypatch.setattr("placement.search._REPORTED", 1500, raising=False)


def answer(cli: Cli, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON object that is printed, checked against the schema."""
    run = cli(*arguments, "--format", "json")
    assert run.code == code, run.err
    result: dict[str, Any] = json.loads(run.out)
    jsonschema.validate(result, SCHEMA)
    return result


def test_the_objectives_are_those_of_the_search() -> None:
    assert [choice.value for choice in ObjectiveChoice] == [choice.value for choice in Objective]


def test_a_rate(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = answer(cli, *SIZE, "--rate", "30", "--price", "2", "-o", str(folder))
    plan = result["plan"]
    assert result["fits"]
    (kind,) = plan["copies"]
    assert kind["placement"] == "1xC:tp1pp1"
    assert kind["copies"] == plan["num_gpus"]
    # The fewest: one copy less falls short at the lower limit.
    low = kind["goodput_per_s"]["low"]
    assert plan["num_gpus"] * low >= 30 > (plan["num_gpus"] - 1) * low
    assert kind["rate_per_s"] == pytest.approx(30 / plan["num_gpus"])
    assert plan["load"]["best"] == pytest.approx(kind["rate_per_s"] / kind["goodput_per_s"]["best"])
    assert plan["confidence"] == pytest.approx(0.975)
    assert plan["cost_usd_per_h"]["best"] == 2 * plan["num_gpus"]
    per_hour = 30 * 3600
    for name, tokens in (("input", 512), ("output", 16), ("total", 528)):
        amount = plan["usd_per_million_tokens"][name]["best"]
        assert amount == pytest.approx(2 * plan["num_gpus"] / (per_hour * tokens) * 1e6)
    assert json.loads((folder / "result.json").read_text()) == result
    plan = json.loads(cli("size", "-c", str(folder / "config.yaml"), "--dry-run", "--format", "json").out)
    assert plan["demand"] == result["demand"]


def test_users_and_what_the_table_says(cli: Cli) -> None:
    run = cli(*SIZE, "--users", "200", "--think-time", "30s")
    assert (run.code, run.err) == (0, "")
    for words in (
        "to serve: 200 users who think for 30 s",
        "copies of at most 1 GPU",
        "GPUs if every goodput were its estimate: ",
        "the probability that these limits hold is at least 97.5%",
        "headroom: ",
        "may fail, wherever, before requests may miss the target",
        "mean E2E there: ",
        "USD/h; USD per million tokens, the whole cost over each: input ",
        "price of a100-80g: 1.3 USD/h, seen from 0.8 to 4.1 [",
        "one source, not a quotation: --price a100-80g=USD",
        "the interactive response time law",
        "with equal think times they bunch and do worse\n",
    ):
        assert words in run.out


def test_too_few_gpus(cli: Cli) -> None:
    run = cli(*SIZE, "--rate", "30", "--gpus", "2", "--format", "csv")
    assert run.code == 3
    assert run.err.count("\n") == 1
    assert run.err.startswith("error: --rate: needs ")
    assert " of which the GPUs there are serve " in run.err
    rows = list(csv.DictReader(io.StringIO(run.out)))
    assert rows[0]["placement"] == "1xC:tp1pp1"
    assert int(rows[0]["plan.num_gpus"]) > 2


def test_no_placement_sustains_anything(cli: Cli) -> None:
    run = cli(*SIZE, "--rate", "1", "--slo", "ttft=1ms,tpot=0.1", "--format", "json")
    assert run.code == 3
    assert run.err.startswith("error: --slo: no placement on 1 GPU serves any rate with 0.9 of the requests within ")
    result = json.loads(run.out)
    jsonschema.validate(result, SCHEMA)
    assert result["plan"] is None


def test_a_dry_run(cli: Cli) -> None:
    plan = json.loads(cli(*SIZE, "--rate", "30", "--nodes", "2", "--dry-run", "--format", "json").out)
    assert (plan["candidates"], plan["available_gpus"]) == (1, 16)
    assert "to serve: 30 requests/s on at most 16 GPUs" in cli(*SIZE, "--rate", "30", "--nodes", "2", "--dry-run").out
    alone = cli(*SIZE, "--users", "1", "--think-time", "30s", "--gpus", "1", "--dry-run").out
    assert "to serve: 1 user who thinks for 30 s on at most 1 GPU\nwould compare 1 placement\n" in alone
    error = cli.refused(*SIZE, "--rate", "30", "--nodes", "2", "--gpus", "4")
    assert error == "--nodes: 2 does not go with --gpus; leave one of the two out"
    assert cli.refused(*SIZE).startswith("--rate: or --users is needed; as in --rate 40 or --users 10000")


def test_what_the_nic_reaches(cli: Cli, tmp_path: Path) -> None:
    asked = ["size", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--rate", "5", "--copy-gpus", "16", "--dry-run"]
    assert "handover: " not in cli(*asked).out
    assert "(3 GB/s to another node)" in cli(*asked, "--nic", "3GB/s").out
    config = tmp_path / "size.yaml"
    config.write_text("nic: 3GB/s\n")
    assert cli(*asked, "--config", str(config)).out == cli(*asked, "--nic", "3GB/s").out
    # KV between two types of GPU crosses nodes whatever the copies are.
    mixed = ["size", "-m", "llama-3.1-8b", "--slo", "ttft=1,tpot=0.1", "--rate", "5", "--dry-run"]
    mixed += ["--prefill-gpu", "h100", "--decode-gpu", "h20"]
    assert "bytes / 3 GB/s a link" in cli(*mixed, "--nic", "3GB/s").out
    assert cli.refused(*asked, "--nic", "25").startswith("--nic: '25' must be >= 1e+06 bytes per second; ")


def test_a_gpu_without_a_price(cli: Cli) -> None:
    question = ["size", "-m", "llama-3.1-8b", "--gpu", "h20", "--slo", "ttft=1,tpot=0.1", "--rate", "5"]
    error = cli.refused(*question, "--objective", "goodput_per_dollar")
    assert error == "--objective: needs a price above 0 for h20-96g; give one, as in --price h20-96g=2.50"
    assert cli(*question, "--objective", "goodput_per_dollar", "--price", "h20=1.1", "--dry-run").code == 0


def test_a_search_by_dollars_says_that_one_price_changes_nothing(cli: Cli) -> None:
    plain = search_answer(cli, *QUICK)
    assert plain["objective"] == "goodput_per_gpu"
    assert plain["best_by_objective"]["placement"] == plain["trials"][0]["placement"]
    run = cli(*QUICK, "--objective", "goodput_per_dollar", "--price", "a100-80g=2")
    assert "all GPUs have one price: goodput per dollar ranks placements as goodput per GPU does" in run.out
    assert "price of a100-80g: 2 USD/h, as given" in run.out
    assert "disaggregated / colocated, per dollar: " in run.out
    assert "disaggregated / colocated: " in cli(*QUICK, "--price", "2").out
    priced = search_answer(cli, *QUICK, "--objective", "goodput_per_dollar", "--price", "2")
    assert priced["best"]["ratio"] == plain["best"]["ratio"]
    best = priced["best_by_objective"]
    assert best["placement"] == plain["best_by_objective"]["placement"]
    assert best["cost_usd_per_h"]["best"] == 2 * best["num_gpus"]
    # Requests an hour and GPU, over the dollars that it costs.
    assert best["requests_per_usd"]["best"] == pytest.approx(3600 * best["goodput_per_gpu_per_s"]["best"] / 2)


def test_a_search_for_the_fewest_gpus_and_the_front(cli: Cli, tmp_path: Path) -> None:
    arguments = ["search", *SMALL, "--gpus", "1", "--top", "1"]
    folder = tmp_path / "out"
    result = search_answer(cli, *arguments, "--objective", "min_gpus", "--rate", "2", "--pareto", "-o", str(folder))
    assert result["fits"]
    assert result["plan"]["num_gpus"] == 1
    assert result["best_by_objective"] is None
    points = result["pareto"]
    assert any(point["is_best"] for point in points)
    with (folder / "pareto.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(points)
    run = cli(*arguments, "--objective", "min_gpus", "--rate", "200")
    assert run.code == 3
    assert run.err.startswith("error: --rate: needs ")
    refused = cli.refused(*arguments, "-n", "50", "--pareto")
    assert refused.startswith("--pareto: does not go with --requests")
