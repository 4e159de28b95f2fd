# ruff: noqa: E501 (tables of one case a line)
"""Options of roles: GPUs, profiles, budgets and limits of batches, on the command line and in sweep files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dsim.errors import InputError
from dsim.pools import Placement, Role
from dsim.yamlfile import parse_yaml
from experiments.base import parse_setting
from experiments.settings import Setting
from profiles.shipped import profile_file
from tests.cli import Cli

SCHEMAS = Path(__file__).parents[1] / "docs/schema"
MODEL = ["-m", "llama-3.1-8b", "--slo", "ttft=0.5,tpot=0.05"]
#: Finite runs of few short requests.
ANY = ["search", *MODEL, "-n", "50", "--precision", "30%", "-w", "fixed:512,16", "-j", "1"]
SEARCH = [*ANY, "--policy", "orca"]
MIXED = ["--prefill-gpu", "h100", "--decode-gpu", "h20"]
SIMULATE = ["simulate", *MODEL, "--rate", "20", "-n", "100", "--warmup", "10", "-w", "fixed:512,16"]


def answer(cli: Cli, schema: str, *arguments: str) -> dict[str, Any]:
    run = cli(*arguments, "--format", "json")
    assert run.code == 0, run.err
    found: dict[str, Any] = json.loads(run.out)
    jsonschema.validate(found, json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8")))
    return found


def planned(cli: Cli, *arguments: str) -> str:
    asked = ANY if "disaggregated" in arguments else SEARCH
    run = cli(*asked, *arguments, "--dry-run")
    assert run.code == 0, run.err
    return run.out


def test_a_mixed_search(cli: Cli) -> None:
    found = answer(cli, "search", *SEARCH, *MIXED, "--gpus", "h100=1,h20=2", "--price", "h20=1,h100=3")
    assert found["gpu"] == "h100-sxm, h20-96g"
    assert found["num_gpus"] == 3
    assert [sorted(mix) for mix in found["mixes"]] == [["decode", "prefill"], ["colocated"], ["colocated"]]
    assert [mix["colocated"]["gpu"] for mix in found["mixes"][1:]] == ["h100-sxm", "h20-96g"]
    assert found["mixes"][0]["decode"]["evidence"] == "roofline"
    assert found["profiles"]["decode"]["gpu"] == "h20-96g"
    used = {trial["placement"].count("h100-sxm") for trial in found["trials"]}
    assert used == {0, 1}, "each placement names its GPUs"
    split = found["best"]["disaggregated"]
    assert split["placement"].startswith("1xP:tp1pp1@h100-sxm + ")
    gpus = split["num_gpus"]
    assert split["cost_usd_per_h"]["best"] == 3 + (gpus - 1)
    assert set(split["kv_blocks"]) == {"prefill", "decode"}
    # What it names can be simulated.
    again = answer(cli, "simulate", *SIMULATE, "-p", split["placement"])
    assert again["placement"] == split["placement"]
    assert again["kv_blocks"] == split["kv_blocks"]


def test_what_a_mixed_search_prints(cli: Cli) -> None:
    text = planned(cli, *MIXED, "--gpus", "prefill=1,decode=2")
    assert "h100-sxm (prefill, colocated): profile llama-3.1-8b-h100-sxm-vllm" in text
    assert "h20-96g: evidence: roofline" in text
    assert "KV from h100-sxm to h20-96g crosses nodes, at the rate of the slower end: handover: direct" in text
    assert "bytes / 40 GB/s a link" in text
    assert (
        "at most 3 GPUs, of which at most 1 h100-sxm (1 node of 8), 2 h20-96g (1 node of 8), and 1 for prefill" in text
    )
    rate = planned(cli, *MIXED, "--gpus", "3", "--kv-link", "10GB/s")
    assert "bytes / 10 GB/s a link" in rate
    shown = cli(*SEARCH, "--prefill-gpu", "h100,h20", "--decode-gpu", "h20", "--gpus", "h100=1,h20=1").out
    assert "the best known of each kind, per GPU of whatever type:" in shown
    assert "  P h100-sxm D h20-96g: 1xP:tp1pp1@h100-sxm + 1xD:tp1pp1@h20-96g: " in shown


def test_names_are_the_union_of_their_mixes(cli: Cli) -> None:
    def count(*arguments: str) -> int:
        return int(planned(cli, *arguments, "--gpus", "3").rsplit("would compare ", 1)[1].split()[0])

    pairs = [
        count("--prefill-gpu", p, "--decode-gpu", d, "--mode", "disaggregated")
        for p in ("h100", "h20")
        for d in ("h100", "h20")
    ]
    both = count("--prefill-gpu", "h100,h20", "--decode-gpu", "h100,h20", "--mode", "disaggregated")
    assert both == sum(pairs)
    alone = [count("--colocated-gpu", gpu, "--mode", "colocated") for gpu in ("h100", "h20")]
    assert count("--colocated-gpu", "h100,h20", "--mode", "colocated") == sum(alone)
    assert pairs[0] == count("--gpu", "h100", "--mode", "disaggregated")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "h100=2"], "--gpus: 'h100=2' says nothing of h20-96g; add h20-96g=N"),
        (["--gpus", "prefill=2"], "--gpus: 'prefill=2' says nothing of decode; add decode=N"),
        (["--gpus", "prefill=2,decode=2", "--objective", "min_gpus", "--rate", "5"], "--gpus: is by role, and min_gpus plans copies by GPU"),
        (["--gpus", "several"], "--gpus: 'several' must be a whole number, or numbers by GPU or role; as in 24, or"),
        (["--gpus", "0"], "--gpus: 0 must be >= 1"),
        (["--gpus", "h100=40,h20=999"], "--gpus: 999 must be <= "),
        (["--nodes", "2"], "--nodes: 2 does not say of which GPU; give GPUs, as in --gpus h100-sxm=8,h20-96g=8"),
        (["--nodes", "2", "--gpus", "4"], "--nodes: 2 does not go with --gpus"),
        (["--affinity", "low"], "--affinity: 'low' keeps pairs within a node, and a node has GPUs of one type"),
        (["--kv-link", "nvlink"], "--kv-link: 'nvlink' is within a node, and nodes have GPUs of one type"),
        (["--colocated-gpu", "x200"], "--colocated-gpu: 'x200' is not a known GPU"),
        (["--colocated-gpu", "h100", "--mode", "disaggregated"], "--colocated-gpu: 'h100' is of a role that is not searched"),
        (["--objective", "goodput_per_dollar"], "--objective: needs a price above 0 for h20-96g"),
        (["--price", "b200=3"], "--price: 'b200' is not used: h100-sxm, h20-96g"),
        (["--max-batch-tokens", "decode=4"], "--max-batch-tokens: 'decode' is no role that has this limit"),
        (["--max-batch-tokens", "1", "--prefill-batching", "lm"], "--max-batch-tokens: does not go with --prefill-batching"),
        (["--max-batch-requests", "lm"], "--max-batch-requests: 'lm' is no number; as in 64,128 or engine"),
        (["--token-budgets", "512,"], "--token-budgets: '' is no number; as in 512,2048,8192"),
        (["--engine", "sglang"], ""),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(cli: Cli, arguments: list[str], message: str) -> None:
    if not message:
        assert cli(*SEARCH, *MIXED, *arguments, "--dry-run").code == 0
        return
    asked = ANY if {"disaggregated", "--token-budgets"} & set(arguments) else SEARCH
    assert cli.refused(*asked, *MIXED, *arguments, "--dry-run").startswith(message)


def test_limits_of_batches_are_candidates(cli: Cli) -> None:
    one = ["--gpu", "h100", "--gpus", "2", "--mode", "disaggregated"]
    plain, more = planned(cli, *one), planned(cli, *one, "--max-batch-requests", "decode=engine,64,128")
    assert "would compare 1 placement\n" in plain
    assert "would compare 3 placements" in more
    budgets = planned(cli, *one[:4], "--mode", "colocated", "--policy", "chunked", "--token-budgets", "256")
    assert "would compare" in budgets
    found = answer(cli, "search", *ANY, *one, "--max-batch-tokens", "prefill=1024,lm", "--top", "2")
    named = {trial["placement"] for trial in found["trials"]}
    lm = found["trials"][0]["placement"], found["trials"][1]["placement"]
    assert "1xP:tp1pp1/tokens1024 + 1xD:tp1pp1" in named
    assert len(set(lm)) == 2
    assert found["question"]["batches"]


def test_pools_of_a_run_on_gpus_of_their_own(cli: Cli) -> None:
    named = answer(cli, "simulate", *SIMULATE, "-p", "1xP:tp1@h100 + 2xD:tp1@h20")
    asked = answer(cli, "simulate", *SIMULATE, "-p", "1xP:tp1 + 2xD:tp1", *MIXED)
    assert named == asked
    assert named["placement"] == "1xP:tp1pp1@h100-sxm + 2xD:tp1pp1@h20-96g"
    assert [named["profiles"][role]["gpu"] for role in ("prefill", "decode")] == ["h100-sxm", "h20-96g"]
    file = profile_file(model="llama-3.1-8b", gpu="h100", engine="vllm")
    own = answer(
        cli, "simulate", *SIMULATE, "-p", "1xP:tp1 + 2xD:tp1", "--prefill-profile", str(file), "--decode-gpu", "h20"
    )
    assert own == named
    alone = answer(cli, "simulate", *SIMULATE, "-p", "1xC:tp1@h20", "--rate", "2")
    assert alone["gpu"] == "h20-96g"
    for arguments, message in (
        (["-p", "1xP:tp1@h100 + 1xD:tp1", "--prefill-gpu", "h20"], "--prefill-gpu: 'h20' contradicts --placement, which says h100-sxm"),
        (["-p", "1xP:tp1 + 1xD:tp1", "--prefill-gpu", "h100,h20"], "--prefill-gpu: 'h100,h20' names more than one GPU; name one"),
        (["-p", "1xC:tp1", "--prefill-gpu", "h100"], "--prefill-gpu: 'h100' is of a role that the placement does not have"),
        (["-p", "1xP:tp1@h1 + 1xD:tp1"], "--placement: 'h1' is not a known GPU"),
        (["-p", "1xP:tp1/tokens99999 + 1xD:tp1", *MIXED], "--placement: '1xP:tp1pp1/tokens99999@h100-sxm"),
        (["-p", "1xP:tp1 + 1xD:tp1", *MIXED, "--kv-link", "pcie"], "--kv-link: 'pcie' is within a node"),
    ):  # fmt: skip
        assert cli.refused(*SIMULATE, *arguments).startswith(message)


def test_a_mixed_size(cli: Cli) -> None:
    asked = ["size", *MODEL, "--rate", "5", *MIXED]
    plan = cli(*asked, "--gpus", "h100=2,h20=4", "--dry-run")
    assert plan.code == 0, plan.err
    assert "to serve: 5 requests/s on at most 6 GPUs" in plan.out
    for arguments, message in (
        (["--gpus", "prefill=2,decode=4"], "--gpus: 'prefill=2,decode=4' is by GPU here, not by role"),
        (["--gpus", "h100=2"], "--gpus: 'h100=2' says nothing of h20-96g"),
        (["--gpus", "h100=9999,h20=9999"], "--gpus: 'h100-sxm=9999,h20-96g=9999' is too many to plan by type"),
        (["--nodes", "2"], "--nodes: 2 does not say of which GPU"),
    ):
        assert cli.refused(*asked, *arguments, "--dry-run").startswith(message)
    one = cli.refused("size", *MODEL, "--rate", "5", "--gpu", "h100", "--gpus", "h100=4", "--dry-run")
    assert one.startswith("--gpus: 'h100=4' is by type, and there is one")


def test_a_pair_on_two_types_fits_into_two_gpus(cli: Cli) -> None:
    asked = ["size", *MODEL, *MIXED, "--mode", "disaggregated", "-w", "fixed:512,16", "--precision", "30%", "-j", "1"]
    found = answer(cli, "size", *asked, "--rate", "5", "--copy-gpus", "2", "--gpus", "2")
    assert (found["plan"]["num_gpus"], found["plan"]["num_nodes"]) == (2, 2)
    assert found["fits"]


# Sweeps


def setting(**base: object) -> Setting:
    tree = {"model": "llama-3.1-8b", "slo": {"ttft": 0.5, "tpot": 0.05}, "rate": 5, **base}
    return parse_setting(parse_yaml(yaml.safe_dump(tree).encode(), file="base.yaml"), folder=Path())


def test_settings_have_profiles_of_roles() -> None:
    found = setting(placement="1xP:tp1/requests4 + 1xD:tp1", prefill_gpu="h100", decode_gpu="h20")
    assert [found.profiles[role].gpu.name for role in (Role.PREFILL, Role.DECODE)] == ["h100-sxm", "h20-96g"]
    assert found.placement == Placement.parse("1xP:tp1/requests4@h100-sxm + 1xD:tp1@h20-96g")
    same = setting(placement="1xP:tp1/requests4@h100 + 1xD:tp1@h20")
    assert found.identity() == same.identity()
    assert found.identity() != setting(placement="1xP:tp1@h100 + 1xD:tp1@h20").identity()


def test_settings_of_searches_have_mixes() -> None:
    asked = {"gpus": "h100=2,h20=4", "max_batch_requests": "decode=64,128"}
    found = setting(measure="search", prefill_gpu="h100,h20", decode_gpu="h20", search=asked)
    assert found.search is not None
    assert len(found.search.mixes) == 4
    assert found.search.fleet is not None
    assert found.search.fleet.types["h20-96g"].num_gpus == 4
    other = setting(
        measure="search", prefill_gpu="h100,h20", decode_gpu="h20", search={**asked, "gpus": "h100=2,h20=5"}
    )
    assert other.identity() != found.identity()
    for base, message in (
        ({"search": {"gpus": "h100=2"}}, r"base.yaml:\d+: search.gpus='h100=2' says nothing of h20-96g"),
        ({"search": {"method": "authors"}}, "compares placements on GPUs of one type"),
        ({"prefill_batching": "lm"}, "prefill_batching='lm' is of one GPU; write search.max_batch_tokens: prefill=lm"),
        ({"kv_link": "nvlink"}, "kv_link='nvlink' is within a node, and nodes have GPUs of one type"),
    ):
        with pytest.raises(InputError, match=message):
            setting(measure="search", prefill_gpu="h100,h20", decode_gpu="h20", **base)
    with pytest.raises(
        Exception, match="prefill_gpu='h100,h20' names more than one GPU; name one; a search takes several"
    ):
        setting(placement="1xP:tp1 + 1xD:tp1", prefill_gpu="h100,h20")
