"""Handovers by name, the links that KV takes, and the transfer model against measured transfers."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import yaml

from dsim.catalog import find_gpu
from dsim.errors import InputError
from dsim.handovers import Link, find_preset, parse_kv_link, presets, read_presets
from dsim.pools import Placement, Policy
from dsim.profile import FirstToken, Handover, HandoverMode
from dsim.simulate import simulate
from dsim.yamlfile import parse_yaml
from experiments.base import parse_setting
from profiles.choice import best_profile
from profiles.handover import asked_handover, handover_line, parse_handover, with_handover
from profiles.scripts.transfers import main
from profiles.transfers import fit_transfers, read_transfers
from tests.cli import Cli
from tests.reference.systems import make_profile, make_trace

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "dsim" / "catalog" / "handovers.yaml"
TRANSFERS = ROOT.parent / "shared" / "data" / "truth" / "mooncake_kv_transfer.csv"
needs_transfers = pytest.mark.skipif(
    not TRANSFERS.is_file(), reason="needs the measured transfers beside the repository"
)

PROFILE = best_profile("13b", "a100-80g", engine="distserve")
RUN = ("simulate", "-m", "13b", "-p", "1xP:tp2pp1 + 1xD:tp1pp1", "-r", "4", "-n", "40", "--warmup", "0")


def test_every_number_has_a_source_or_says_that_it_is_assumed() -> None:
    every = {"first_token_from", "mode", "stalls_decode", "latency_s", "link_share", "hop_s", "post_s", "post_block_s"}
    every |= {"step_s", "watermark"}
    for preset in presets().values():
        assert set(preset.sources) - {"most_bytes_per_s"} == every
        assert all(len(source) > 10 for source in preset.sources.values())
        assert ("most_bytes_per_s" in preset.sources) == (preset.most_bytes_per_s < math.inf)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hop_s": {"value": 0}}, "must have a source, or say what is assumed, and not both"),
        ({"hop_s": {"value": 0, "source": "one", "assumed": "two"}}, "must have a source, or say what is assumed"),
        ({"hop_s": {"value": -1, "source": "one"}}, "hop_s.value=-1 must be >= 0"),
        ({"hop_s": None}, "hop_s"),
        ({"hop": {"value": 0, "source": "one"}}, "'hop' is not a known key"),
        ({"link_share": {"value": 1.2, "source": "one"}}, "link_share.value=1.2 must be <= 1"),
        ({"watermark": {"value": 0, "source": "one"}}, "watermark.value=0 must be > 0;"),
        ({"most_bytes_per_s": {"value": 6, "source": "in GB"}}, "most_bytes_per_s.value=6 must be >= 1000000"),
        ({"stalls_decode": {"value": "no", "source": "one"}}, "stalls_decode.value='no' must be true or false"),
    ],
)
def test_numbers_without_a_source_and_impossible_ones_are_refused(change: dict[str, object], said: str) -> None:
    tree = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    entry = {**tree["handovers"]["vllm-nixl"], **change}
    tree["handovers"] = {"mine": {key: value for key, value in entry.items() if value is not None}}
    with pytest.raises(InputError) as caught:
        read_presets(parse_yaml(yaml.safe_dump(tree, sort_keys=False).encode(), file="mine.yaml"))
    assert said in str(caught.value)


def test_the_documented_table_is_that_of_the_file() -> None:
    entries = yaml.safe_load(DATA.read_text(encoding="utf-8"))["handovers"]
    text = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    rows = {}
    for line in text[text.index("#### Handovers by name") : text.index("### `preemption`")].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows[cells[0].strip("`")] = cells[1:]
    for column, entry in enumerate(entries.values()):
        for key, cells in rows.items():
            cell = cells[column]
            if key not in entry:
                assert cell == "–"
                continue
            value, starred = entry[key]["value"], cell.endswith(" *")
            assert starred == ("assumed" in entry[key]), key
            said = yaml.safe_load(cell.removesuffix(" *").strip("`"))
            assert said == value if isinstance(value, str | bool) else float(said) == pytest.approx(value), key
        assert set(entry) - {"about"} <= set(rows)


def test_what_the_presets_say() -> None:
    """Who shows token 1 and when pulls are posted, as each engine does it."""
    kinds = {name: (p.rest.first_token_from, p.rest.mode, p.rest.stalls_decode) for name, p in presets().items()}
    assert kinds == {
        "distserve": (FirstToken.PREFILL, HandoverMode.DIRECT, True),
        "vllm-nixl": (FirstToken.DECODE, HandoverMode.PULL_AT_STEP, False),
        "sglang-mooncake": (FirstToken.TRANSFER_END, HandoverMode.DIRECT, False),
        "dynamo": (FirstToken.DECODE, HandoverMode.PULL_AT_STEP, False),
    }
    nixl = find_preset("vLLM-NIXL", where="x").rest
    # About 7 ms of the loop for prompts of some 5,000 tokens in blocks of 16.
    assert nixl.post_s + nixl.post_block_s * 5000 / 16 == pytest.approx(0.0067, rel=0.01)


def test_distserve_by_name_is_what_its_profile_says() -> None:
    named = asked_handover(PROFILE, "distserve", None).handover
    reached = pytest.approx(PROFILE.handover.bandwidth_bytes_per_s, rel=0.001)
    assert named.bandwidth_bytes_per_s == reached
    # A preset reaches its share of the network, too.
    assert named.node_bandwidth_bytes_per_s == pytest.approx(0.667 * PROFILE.gpu.network_bytes_per_s)
    own = dataclasses.replace(
        PROFILE.handover,
        bandwidth_bytes_per_s=named.bandwidth_bytes_per_s,
        node_bandwidth_bytes_per_s=named.node_bandwidth_bytes_per_s,
    )
    assert named == own


@pytest.mark.parametrize(
    ("handover", "kv_link", "crosses_nodes", "gb_per_s"),
    [
        # A100: NVLink 300, NIC 25, PCIe 32 GB/s. Without a name the share is 0.8.
        (None, "nvlink", True, 240.0),
        (None, "nic", False, 20.0),
        (None, "pcie", False, 25.6),
        (None, "4.3GB/s", False, 4.3),
        ("sglang-mooncake", None, False, 0.731 * 300),
        ("sglang-mooncake", None, True, 0.731 * 25),
        ("sglang-mooncake", "pcie", True, 0.731 * 32),
        ("sglang-mooncake,link=nic", "pcie", False, 0.731 * 25),
        ("sglang-mooncake", "100Gbit/s", True, 12.5),
        ("vllm-nixl", "nvlink", False, 6.0),
        ("vllm-nixl,bandwidth_bytes_per_s=9e9", None, False, 9.0),
        ("link=nic", None, False, 20.0),
        ("hop_s=0.5", None, True, 200.0),
    ],
)
def test_links(handover: str | None, kv_link: str | None, crosses_nodes: bool, gb_per_s: float) -> None:
    used = asked_handover(PROFILE, handover, kv_link, crosses_nodes=crosses_nodes)
    assert used.handover.bandwidth_bytes_per_s == pytest.approx(1e9 * gb_per_s)
    assert used.sha256 != PROFILE.sha256


def test_keys_beside_a_name_win_over_it_and_alone_over_the_profile() -> None:
    named = asked_handover(PROFILE, "vllm-nixl,hop_s=0.02,mode=direct", None).handover
    assert (named.hop_s, named.mode, named.post_s) == (0.02, HandoverMode.DIRECT, 0.0024)
    own = asked_handover(PROFILE, "hop_s=0.02", None).handover
    assert own == dataclasses.replace(PROFILE.handover, hop_s=0.02)
    assert with_handover(PROFILE) is PROFILE


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: dynamo\nlink: nic\nhop_s: 0.004\n")
    used = with_handover(PROFILE, parse_handover("mine.yaml,step_s=0.001", folder=tmp_path)).handover
    assert (used.hop_s, used.step_s, used.bandwidth_bytes_per_s) == (0.004, 0.001, 6e9)
    whole = tmp_path / "whole.yml"
    whole.write_text("handover:\n  mode: layer-wise\n  stalls_decode: false\n")
    assert asked_handover(PROFILE, str(whole), None).handover.mode is HandoverMode.LAYER_WISE
    file.write_text("preset: dynamo\nhop: 3\n")
    with pytest.raises(InputError, match=r"mine.yaml:2: 'hop' is not a known key; did you mean 'hop_s'\?"):
        asked_handover(PROFILE, str(file), None)


@pytest.mark.parametrize(
    ("handover", "kv_link", "said"),
    [
        (
            "nixl",
            None,
            r"--handover: 'nixl' is no handover that dsim knows; did you mean 'vllm-nixl'\?|expected one of",
        ),
        ("vllm-nixl,hop", None, "--handover: 'hop' is no KEY=VALUE; a preset"),
        ("vllm-nixl,hop_s=-1", None, "--handover: hop_s=-1 must be >= 0"),
        ("mode=pull-at-step", None, "--handover: mode='pull-at-step' does not go with stalls_decode=true; set stalls"),
        ("vllm-nixl,stalls_decode=true", None, "--handover: mode='pull-at-step' does not go with stalls_decode=true"),
        ("hop_s=0.1,mode=layer-wise,stalls_decode=false", None, "--handover: hop_s=0.1 does not go with mode=layer"),
        ("nothing.yaml", None, "nothing.yaml: does not exist"),
        (None, "ethernet", "--kv-link: 'ethernet' is neither a link nor a rate; nvlink, nic, pcie"),
        (None, "25", "--kv-link: '25' must be >= 1e[+]06 bytes per second"),
        (None, "1e308TB/s", "--kv-link: '1e308TB/s' must be >= 1e[+]06"),
        (None, "25GB", "--kv-link: '25GB' has an unknown unit 'GB'"),
    ],
)
def test_malformed(handover: str | None, kv_link: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        asked_handover(PROFILE, handover, kv_link)


def test_line_rates_are_those_of_the_catalog() -> None:
    gpu = find_gpu("h100")
    rates = [link.line_bytes_per_s(gpu) for link in Link]
    assert rates == [gpu.nvlink_bytes_per_s, gpu.network_bytes_per_s, gpu.pcie_bytes_per_s]
    assert parse_kv_link(" NIC ") is Link.NIC
    assert parse_kv_link(" 1MB/s") == 1e6
    assert find_preset(" vLLM-NIXL ", where="x") is presets()["vllm-nixl"]


def test_the_line_says_every_number() -> None:
    asked = "vllm-nixl,step_s=0.001"
    assert handover_line(asked_handover(PROFILE, asked, None)) == (
        "handover: pull-at-step, token 1 from decode, 0.6 ms + bytes / 6 GB/s a link, second hop 17 ms, "
        "posting 2.4 ms + 13.7 µs a block, 1 ms a launch"
    )


def test_simulate_search_and_size_take_them(cli: Cli) -> None:
    out = cli(*RUN, "--handover", "vllm-nixl", "--check").out
    assert "handover: pull-at-step, token 1 from decode" in out
    assert "handover:" not in cli(*RUN).out
    out = cli(*RUN, "--set", "handover.preset=sglang-mooncake", "--set", "handover.hop_s=0.003", "--kv-link", "nic").out
    assert "handover: direct, token 1 from transfer end, 0.38 ms + bytes / 18.3 GB/s a link, second hop 3 ms" in out
    colocated = ("simulate", "-m", "13b", "-p", "1xC:tp1pp1", "-r", "1", "-n", "40", "--dry-run", "--kv-link", "nic")
    assert "--kv-link: 'nic' is for disaggregated placements" in cli(*colocated).err
    search = ("search", "-m", "13b", "--slo", "ttft=0.4,tpot=0.1", "--handover", "sglang-mooncake", "--dry-run")
    assert "219 GB/s a link" in cli(*search).out
    # Prefill and decode may lie on different nodes.
    assert "219 GB/s a link (18.3 GB/s to another node)" in cli(*search, "--nodes", "2").out
    assert "219 GB/s a link (2.5 GB/s to another node)" in cli(*search, "--nodes", "2", "--nic", "20Gbit/s").out
    assert "12 GB/s a link (12 GB/s to another node)" in cli(*search, "--nodes", "2", "--kv-link", "12GB/s").out
    without = tuple(part for part in search if part not in ("--handover", "sglang-mooncake"))
    assert "handover:" not in cli(*without, "--nodes", "2", "--nic", "20Gbit/s", "--mode", "colocated").out
    size = ("size", "--rate", "10", *search[1:], "--copy-gpus", "16", "--nic", "20Gbit/s")
    assert "219 GB/s a link (2.5 GB/s to another node)" in cli(*size).out


def test_sweeps_take_them(tmp_path: Path) -> None:
    def used(**keys: object) -> Handover:
        base = {"model": "13b", "placement": "1xP:tp2pp1 + 1xD:tp1pp1", "rate": 4, **keys}
        text = yaml.safe_dump(base, sort_keys=False)
        setting = parse_setting(parse_yaml(text.encode(), file="base.yaml"), folder=tmp_path)
        return next(iter(setting.used.values())).handover

    assert used(handover="dynamo").hop_s == 0.01
    assert used(handover={"preset": "dynamo", "hop_s": 0.03}, kv_link="nic").hop_s == 0.03
    assert used(kv_link="25GB/s").bandwidth_bytes_per_s == 25e9
    (tmp_path / "mine.yaml").write_text("mode: direct\nstep_s: 0.001\n")
    assert used(handover="mine.yaml").step_s == 0.001
    for keys, said in (
        ({"handover": "dynamoo"}, r"base.yaml:4: handover='dynamoo' is no handover that dsim knows"),
        (
            {"handover": {"hop": 1}},
            r"base.yaml:5: handover is wrong: 'hop' is not a known key in handover; did you mean 'hop_s'",
        ),
        ({"kv_link": "fast"}, r"base.yaml:4: kv_link='fast' is neither a link nor a rate"),
    ):
        with pytest.raises(InputError, match=said):
            used(**keys)


def test_who_shows_token_1_decides_the_comparison_with_a_colocated_engine() -> None:
    """The same steps and transfers: with `prefill` TTFT is below that of a colocated instance, with `decode` above."""
    trace = make_trace([60.0 * i for i in range(200)], [64] * 200, [9] * 200)
    slow = Handover(stalls_decode=False, mode=HandoverMode.PULL_AT_STEP, latency_s=0.02, hop_s=0.01)
    ttft_s = {}
    for shown in FirstToken:
        profile = make_profile(
            prefill=(8.0, 0.5, 0.0),
            decode=(8.0, 0.0, 0.1),
            handover=dataclasses.replace(slow, first_token_from=shown),
        )
        result = simulate(Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"), trace, profiles=profile)
        ttft_s[shown] = float(result.ttft_s.mean())
    together = simulate(Placement.parse("2xC:tp1pp1", policy=Policy.PREFILL_FIRST), trace, profiles=profile)
    colocated_s = float(together.ttft_s.mean())
    assert ttft_s[FirstToken.PREFILL] <= colocated_s < ttft_s[FirstToken.TRANSFER_END] < ttft_s[FirstToken.DECODE]


# The transfer model


def test_fits_exactly_what_is_a_line() -> None:
    rows = [(size, 0.0005 + size / 2e10) for size in (1e6, 3e7, 5e8, 4e9)]
    fit = fit_transfers(rows)
    assert fit.latency_s == pytest.approx(0.0005)
    assert fit.bandwidth_bytes_per_s == pytest.approx(2e10)
    assert fit.mean_error(rows) == pytest.approx(0.0, abs=1e-9)


def test_a_latency_is_never_negative() -> None:
    fit = fit_transfers([(1e6, 0.0001), (2e6, 0.0004), (4e6, 0.0009)])
    assert fit.latency_s == 0.0
    assert fit.bandwidth_bytes_per_s > 0


@pytest.mark.parametrize("rows", [[(1e6, 0.1), (1e6, 0.2)], [(1e6, 0.2), (2e6, 0.0)], [(1e6, 1.0), (1e9, 1e-6)]])
def test_rows_that_are_no_line(rows: list[tuple[float, float]]) -> None:
    with pytest.raises(InputError, match="transfers: rows"):
        fit_transfers(rows)


def test_reads_tables_only(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("kv_size,kv_size_unit,kv_transfer_ms\n2,MB,3\n")
    assert read_transfers(file) == [(2 * 2**20, 0.003)]
    file.write_text("kv_size,kv_size_unit,kv_transfer_ms\n2,Mb,3\n")
    with pytest.raises(InputError, match="kv_size_unit B, KB, MB or GB"):
        read_transfers(file)


@needs_transfers
def test_predicts_the_transfers_it_was_not_fitted_to() -> None:
    """Mooncake's table: fitted to every other row, the mean error on the others is 5.3 % and 4.4 %."""
    rows = read_transfers(TRANSFERS)
    assert len(rows) == 9
    for start in (0, 1):
        fit, others = fit_transfers(rows[start::2]), rows[1 - start :: 2]
        assert fit.mean_error(others) < 0.06


@needs_transfers
def test_the_preset_has_the_numbers_of_the_fit() -> None:
    fit, preset = fit_transfers(read_transfers(TRANSFERS)), find_preset("sglang-mooncake", where="x")
    assert preset.rest.latency_s == pytest.approx(fit.latency_s, rel=0.01)
    assert preset.share == pytest.approx(fit.bandwidth_bytes_per_s / 200e9, rel=0.001)
    said = main(str(TRANSFERS))
    assert re.findall(r"[0-9.]+ %|[0-9.]+%", said) == ["3.6%", "5.3%", "4.4%"]
